"""Hides calls of the search tool in an answer on the Messages wire that is not a stream."""

from typing import Any, Final

from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.wires.chat.continuation import add_usage, encode_ascii_json
from compaction_proxy.wires.chat.intercept_calls import JsonObject
from compaction_proxy.wires.json import large
from compaction_proxy.wires.messages.blocks import CALL
from compaction_proxy.wires.messages.search_tool import (
    CUT_OFF_REASONS,
    END_TURN_REASON,
    TOOL_USE_REASON,
    SearchToolCall,
    build_message,
    encode_input,
    is_call,
)

# Members that identify an answer. A joined answer has those of the first answer.
_ENVELOPE: Final = ("id", "model")
_CALL_MARKER: Final = b'"tool_use"'


class MessagesAnswerJoiner:
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
        self._previous_blocks: list[Any] = []  # blocks of earlier answers that the client gets
        self._previous_usage: JsonObject = {}
        self._message: JsonObject = {}
        self.calls: tuple[SearchToolCall, ...] = ()

    def join_answer(self, body: bytes, *, may_answer_calls: bool) -> bytes | None:
        """Returns the body for the client, or None if the proxy must answer calls; see `AnswerJoiner`."""
        if self._is_first_answer and _CALL_MARKER not in body:
            return body
        payload = _decode_object(body)
        content = payload.get("content")
        blocks = [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []
        own_blocks = [block for block in blocks if is_call(block, self._name)]
        if self._is_first_answer and not own_blocks:
            return body
        if not isinstance(content, list):
            return body if payload else b""  # a body without blocks may be an error for the client
        shown = [block for block in blocks if not is_call(block, self._name)]
        only_own_calls = bool(own_blocks) and not any(block.get("type") == CALL for block in shown)
        if may_answer_calls and only_own_calls and payload.get("stop_reason") not in CUT_OFF_REASONS:
            self._record_answer(payload, blocks, shown)
            self.calls = tuple(SearchToolCall(encode_input(block)) for block in own_blocks)
            return None
        if only_own_calls and payload.get("stop_reason") == TOOL_USE_REASON:
            payload["stop_reason"] = END_TURN_REASON  # the client has nothing left to call
        payload |= {**self._envelope, "content": [*self._previous_blocks, *shown]}
        payload["usage"] = add_usage(self._previous_usage, _get_usage(payload))
        return encode_ascii_json(payload)

    def get_assistant_message(self) -> JsonObject:
        """Returns the assistant message of the answer for which `join_answer` returned None."""
        return self._message

    def _record_answer(self, payload: JsonObject, blocks: list[JsonObject], shown: list[JsonObject]) -> None:
        self._message = build_message(blocks)
        self._previous_blocks += shown
        self._previous_usage = add_usage(self._previous_usage, _get_usage(payload))
        if self._is_first_answer:
            self._envelope = {key: payload[key] for key in _ENVELOPE if key in payload}
        self._is_first_answer = False


def _decode_object(body: bytes) -> JsonObject:
    """Decodes a body; empty if it is not an object."""
    try:
        payload = large.decode_value(body.strip())
    except UnreadableBodyError:
        return {}
    return payload if isinstance(payload, dict) else {}


def _get_usage(payload: JsonObject) -> JsonObject:
    usage = payload.get("usage")
    return usage if isinstance(usage, dict) else {}
