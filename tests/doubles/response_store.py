"""Stores responses of the three-wire provider, for requests that refer to them instead of repeating them."""

from collections import OrderedDict
from collections.abc import Iterable
from typing import TypeVar

from compaction_proxy.cli.demo.chat import JsonObject
from tests.doubles.responses_request import get_item_type, get_items

MAX_KEPT = 1000  # largest number of stored responses, and of stored items

_Value = TypeVar("_Value")


class ResponseStore:
    """Stores responses by id, each as its whole conversation, and the output items of responses by id."""

    def __init__(self) -> None:
        self._responses: OrderedDict[str, list[JsonObject]] = OrderedDict()
        self._items: OrderedDict[str, JsonObject] = OrderedDict()

    def keep_response(self, response_id: str, body: JsonObject, output: Iterable[JsonObject]) -> None:
        """Stores the response to a valid request, unless the request says `store: false`."""
        if body.get("store") is False:
            return
        items = list(output)
        _put_bounded(self._responses, response_id, [*get_items(body), *items])
        for item in items:
            _put_bounded(self._items, item["id"], item)

    def expand_references(self, body: JsonObject) -> JsonObject:
        """Returns the request with its references replaced by the stored items.

        References to unknown responses or items stay as they are. Validation then refuses the request.
        """
        previous_items = self._responses.get(str(body.get("previous_response_id")))
        value = body.get("input")
        if not isinstance(value, str | list):
            return body
        items = [self._resolve_reference(item) for item in get_items(body)]
        if previous_items is not None:
            return {**body, "input": [*previous_items, *items], "previous_response_id": None}
        return body if isinstance(value, str) else {**body, "input": items}

    def _resolve_reference(self, item: object) -> object:
        if not isinstance(item, dict) or get_item_type(item) != "item_reference":
            return item
        return self._items.get(str(item.get("id")), item)


def _put_bounded(entries: OrderedDict[str, _Value], key: str, value: _Value) -> None:
    """Stores a value as the newest, and removes the oldest values if there are too many."""
    entries[key] = value
    entries.move_to_end(key)
    while len(entries) > MAX_KEPT:
        entries.popitem(last=False)
