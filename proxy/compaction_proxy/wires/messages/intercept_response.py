"""An answer on the Messages wire that is no stream, in which calls of the search tool are hidden."""

from typing import Any, Final

from compaction_proxy.core.errors import Unreadable
from compaction_proxy.wires.chat.continuation import added, dumped
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


class BlockAnswer:
    """One answer as the client sees it, whatever number of answers it is made of.

    Args:
        name: Of the search tool.

    Attributes:
        calls: The calls to be answered, once `take` has returned None.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._first = True
        self._envelope: JsonObject = {}
        self._blocks: list[Any] = []  # what the client gets of earlier answers
        self._spent: JsonObject = {}
        self._message: JsonObject = {}
        self.calls: tuple[SearchUse, ...] = ()

    def take(self, body: bytes, *, hidden: bool) -> bytes | None:
        """Returns what the client gets if this is the last answer; see `AnswerJoiner.take`."""
        if self._first and _CALLING not in body:
            return body
        payload = _decode(body)
        content = payload.get("content")
        blocks = [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []
        mine = [block for block in blocks if is_call(block, self._name)]
        if self._first and not mine:
            return body
        if not isinstance(content, list):
            return body if payload else b""  # perhaps an error
        shown = [block for block in blocks if not is_call(block, self._name)]
        alone = bool(mine) and not any(block.get("type") == CALL for block in shown)
        if hidden and alone and payload.get("stop_reason") not in CUT_OFF:
            self._note(payload, blocks, shown)
            self.calls = tuple(SearchUse(write_input(block)) for block in mine)
            return None
        if alone and payload.get("stop_reason") == CALLED:
            payload["stop_reason"] = ENDED  # nothing is left to be called
        payload |= {**self._envelope, "content": [*self._blocks, *shown]}
        payload["usage"] = added(self._spent, _usage(payload))
        return dumped(payload)

    def go_on(self) -> JsonObject:
        """Returns the assistant message that the answer was which `take` returned None for."""
        return self._message

    def _note(self, payload: JsonObject, blocks: list[JsonObject], shown: list[JsonObject]) -> None:
        self._message = build_message(blocks)
        self._blocks += shown
        self._spent = added(self._spent, _usage(payload))
        if self._first:
            self._envelope = {key: payload[key] for key in _ENVELOPE if key in payload}
        self._first = False


def _decode(body: bytes) -> JsonObject:
    """Returns the object that a body is; empty where it is none."""
    try:
        payload = large.value(body.strip())
    except Unreadable:
        return {}
    return payload if isinstance(payload, dict) else {}


def _usage(payload: JsonObject) -> JsonObject:
    held = payload.get("usage")
    return held if isinstance(held, dict) else {}
