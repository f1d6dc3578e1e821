"""What the demo provider keeps of its responses, for requests that name them instead of repeating them."""

from collections import OrderedDict
from collections.abc import Iterable
from typing import TypeVar

from compaction_proxy.cli.demo.chat import JsonObject
from compaction_proxy.cli.demo.responses_reading import get_item_type, get_items

KEPT = 1000  # responses, and items, each

_Value = TypeVar("_Value")


class ResponseStore:
    """Responses by their id, each with all that led to it, and items by theirs."""

    def __init__(self) -> None:
        self._responses: OrderedDict[str, list[JsonObject]] = OrderedDict()
        self._items: OrderedDict[str, JsonObject] = OrderedDict()

    def keep_response(self, own: str, body: JsonObject, output: Iterable[JsonObject]) -> None:
        """Remember what was answered to a valid request, unless it said `store: false`."""
        if body.get("store") is False:
            return
        said = list(output)
        _put_bounded(self._responses, own, [*get_items(body), *said])
        for item in said:
            _put_bounded(self._items, item["id"], item)

    def expand_references(self, body: JsonObject) -> JsonObject:
        """The request with what it names in its place; what is unknown is left for the judge."""
        earlier = self._responses.get(str(body.get("previous_response_id")))
        given = body.get("input")
        if not isinstance(given, str | list):
            return body
        found = [self._resolve_reference(item) for item in get_items(body)]
        if earlier is not None:
            return {**body, "input": [*earlier, *found], "previous_response_id": None}
        return body if isinstance(given, str) else {**body, "input": found}

    def _resolve_reference(self, item: object) -> object:
        if not isinstance(item, dict) or get_item_type(item) != "item_reference":
            return item
        return self._items.get(str(item.get("id")), item)


def _put_bounded(known: OrderedDict[str, _Value], own: str, value: _Value) -> None:
    """Put a value last, and let the oldest go when there are too many."""
    known[own] = value
    known.move_to_end(own)
    while len(known) > KEPT:
        known.popitem(last=False)
