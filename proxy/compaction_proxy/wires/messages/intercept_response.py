"""An answer on the Messages wire that is no stream, in which calls of the search tool are hidden."""

from typing import Any, Final

from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.wires.chat.continuation import add_usage, encode_ascii_json
from compaction_proxy.wires.chat.intercept_calls import JsonObject
from compaction_proxy.wires.json import large
from compaction_proxy.wires.messages.blocks import CALL
from compaction_proxy.wires.messages.search_tool import (
    CALLED,
    CUT_OFF,
    ENDED,
    SearchUse,
    build_message,
    is_call,
    write_input,
)

# Members that say which answer it is.
_ENVELOPE: Final = ("id", "model")
_CALLING: Final = b'"tool_use"'


class MessagesAnswerJoiner:
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
        self._blocks: list[Any] = []  # what the client gets of earlier answers
        self._spent: JsonObject = {}
        self._message: JsonObject = {}
        self.calls: tuple[SearchUse, ...] = ()

    def join_answer(self, body: bytes, *, may_answer_calls: bool) -> bytes | None:
        """Returns what the client gets if this is the last answer; see `AnswerJoiner.take`."""
        if self._first and _CALLING not in body:
            return body
        payload = _decode_object(body)
        content = payload.get("content")
        blocks = [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []
        mine = [block for block in blocks if is_call(block, self._name)]
        if self._first and not mine:
            return body
        if not isinstance(content, list):
            return body if payload else b""  # perhaps an error
        shown = [block for block in blocks if not is_call(block, self._name)]
        alone = bool(mine) and not any(block.get("type") == CALL for block in shown)
        if may_answer_calls and alone and payload.get("stop_reason") not in CUT_OFF:
            self._record_answer(payload, blocks, shown)
            self.calls = tuple(SearchUse(write_input(block)) for block in mine)
            return None
        if alone and payload.get("stop_reason") == CALLED:
            payload["stop_reason"] = ENDED  # nothing is left to be called
        payload |= {**self._envelope, "content": [*self._blocks, *shown]}
        payload["usage"] = add_usage(self._spent, _get_usage(payload))
        return encode_ascii_json(payload)

    def get_assistant_message(self) -> JsonObject:
        """Returns the assistant message that the answer was which `join_answer` returned None for."""
        return self._message

    def _record_answer(self, payload: JsonObject, blocks: list[JsonObject], shown: list[JsonObject]) -> None:
        self._message = build_message(blocks)
        self._blocks += shown
        self._spent = add_usage(self._spent, _get_usage(payload))
        if self._first:
            self._envelope = {key: payload[key] for key in _ENVELOPE if key in payload}
        self._first = False


def _decode_object(body: bytes) -> JsonObject:
    """Returns the object that a body is; empty where it is none."""
    try:
        payload = large.decode_value(body.strip())
    except UnreadableBodyError:
        return {}
    return payload if isinstance(payload, dict) else {}


def _get_usage(payload: JsonObject) -> JsonObject:
    held = payload.get("usage")
    return held if isinstance(held, dict) else {}
