"""Hides calls of the search tool in an answer on the Responses wire that is not a stream."""

from typing import Any, Final

from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.wires.chat.continuation import add_usage, encode_ascii_json
from compaction_proxy.wires.chat.intercept_calls import JsonObject
from compaction_proxy.wires.json import large
from compaction_proxy.wires.messages.search_tool import SearchToolCall
from compaction_proxy.wires.responses.search_tool import (
    build_message,
    is_call,
    must_client_answer,
    read_arguments,
)

# Members that identify an answer. A joined answer has those of the first answer.
ENVELOPE: Final = ("id", "created_at", "model")
COMPLETED: Final = "completed"
_CALL_MARKER: Final = b'"function_call"'


class ResponsesAnswerJoiner:
    """Joins one or more answers of the upstream into one answer for the client.

    Args:
        name: The name of the search tool.

    Attributes:
        calls: The calls that the proxy must answer after `join_answer` has returned None.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_first_answer = True
        self._envelope: JsonObject = {}
        self._previous_items: list[Any] = []  # items of earlier answers that the client gets
        self._previous_usage: JsonObject = {}
        self._message: JsonObject = {}
        self.calls: tuple[SearchToolCall, ...] = ()

    def join_answer(self, body: bytes, *, may_answer_calls: bool) -> bytes | None:
        """Returns the body for the client, or None if the proxy must answer calls; see `AnswerJoiner`."""
        if self._is_first_answer and _CALL_MARKER not in body:
            return body
        payload = _decode_object(body)
        output = payload.get("output")
        items = [item for item in output if isinstance(item, dict)] if isinstance(output, list) else []
        own_calls = [item for item in items if is_call(item, self._name)]
        if self._is_first_answer and not own_calls:
            return body
        if not isinstance(output, list):
            return body if payload else b""  # a body without items may be an error for the client
        shown = [item for item in items if not is_call(item, self._name)]
        only_own_calls = bool(own_calls) and not any(map(must_client_answer, shown))
        if may_answer_calls and only_own_calls and payload.get("status", COMPLETED) == COMPLETED:
            self._record_answer(payload, items, shown)
            self.calls = tuple(SearchToolCall(read_arguments(item)) for item in own_calls)
            return None
        payload |= {**self._envelope, "output": [*self._previous_items, *shown]}
        if isinstance(payload.get("usage"), dict):
            payload["usage"] = add_usage(self._previous_usage, payload["usage"])
        return encode_ascii_json(payload)

    def get_assistant_message(self) -> JsonObject:
        """Returns an object whose `output` holds the items of the answer that `join_answer` kept back."""
        return self._message

    def _record_answer(self, payload: JsonObject, items: list[JsonObject], shown: list[JsonObject]) -> None:
        self._message = build_message(items)
        self._previous_items += shown
        usage = payload.get("usage")
        self._previous_usage = add_usage(self._previous_usage, usage if isinstance(usage, dict) else {})
        if self._is_first_answer:
            self._envelope = {key: payload[key] for key in ENVELOPE if key in payload}
        self._is_first_answer = False


def _decode_object(body: bytes) -> JsonObject:
    """Decodes a body; empty if it is not an object."""
    try:
        payload = large.decode_value(body.strip())
    except UnreadableBodyError:
        return {}
    return payload if isinstance(payload, dict) else {}
