"""An answer on the Responses wire that is no stream, in which calls of the search tool are hidden."""

from typing import Any, Final

from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.wires.chat.continuation import add_usage, encode_ascii_json
from compaction_proxy.wires.chat.intercept_calls import JsonObject
from compaction_proxy.wires.json import large
from compaction_proxy.wires.messages.search_tool import SearchUse
from compaction_proxy.wires.responses.search_tool import asks_client, build_message, is_call, read_arguments

# Members that say which answer it is.
ENVELOPE: Final = ("id", "created_at", "model")
COMPLETED: Final = "completed"
_CALLING: Final = b'"function_call"'


class ResponsesAnswerJoiner:
    """One answer as the client sees it, whatever number of answers it is made of.

    Args:
        name: Of the search tool.

    Attributes:
        calls: The calls to be answered, once `join_answer` has returned None.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._first = True
        self._envelope: JsonObject = {}
        self._items: list[Any] = []  # what the client gets of earlier answers
        self._spent: JsonObject = {}
        self._message: JsonObject = {}
        self.calls: tuple[SearchUse, ...] = ()

    def join_answer(self, body: bytes, *, may_answer_calls: bool) -> bytes | None:
        """Returns what the client gets if this is the last answer; see `AnswerJoiner.take`."""
        if self._first and _CALLING not in body:
            return body
        payload = _decode_object(body)
        output = payload.get("output")
        items = [item for item in output if isinstance(item, dict)] if isinstance(output, list) else []
        mine = [item for item in items if is_call(item, self._name)]
        if self._first and not mine:
            return body
        if not isinstance(output, list):
            return body if payload else b""  # perhaps an error
        shown = [item for item in items if not is_call(item, self._name)]
        alone = bool(mine) and not any(map(asks_client, shown))
        if may_answer_calls and alone and payload.get("status", COMPLETED) == COMPLETED:
            self._record_answer(payload, items, shown)
            self.calls = tuple(SearchUse(read_arguments(item)) for item in mine)
            return None
        payload |= {**self._envelope, "output": [*self._items, *shown]}
        if isinstance(payload.get("usage"), dict):
            payload["usage"] = add_usage(self._spent, payload["usage"])
        return encode_ascii_json(payload)

    def get_assistant_message(self) -> JsonObject:
        """Returns what the answer said which `join_answer` returned None for."""
        return self._message

    def _record_answer(self, payload: JsonObject, items: list[JsonObject], shown: list[JsonObject]) -> None:
        self._message = build_message(items)
        self._items += shown
        usage = payload.get("usage")
        self._spent = add_usage(self._spent, usage if isinstance(usage, dict) else {})
        if self._first:
            self._envelope = {key: payload[key] for key in ENVELOPE if key in payload}
        self._first = False


def _decode_object(body: bytes) -> JsonObject:
    """Returns the object that a body is; empty where it is none."""
    try:
        payload = large.decode_value(body.strip())
    except UnreadableBodyError:
        return {}
    return payload if isinstance(payload, dict) else {}
