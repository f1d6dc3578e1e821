"""A streamed answer on the Messages wire in which calls of the search tool are hidden.

Bytes of the upstream go in and bytes for the client come out. Of the first answer, an event in front of the
first call goes on as its own bytes. A block that calls the tool is left out, and the blocks behind it close
up. Where the answer ends in such calls alone, its end is kept back, and the blocks of the upstream's next
answer follow as if they were of the same one, with the usage of all of them in its end.
"""

import json
import re
from collections.abc import Iterable
from typing import Any, Final

from compaction_proxy.wires.chat.continuation import add_usage, encode_ascii_json
from compaction_proxy.wires.chat.intercept_calls import JsonObject
from compaction_proxy.wires.chat.intercept_stream import EventBuffer
from compaction_proxy.wires.json.slices import DECODER
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
from compaction_proxy.wires.sse import DONE, EventSplitter, read_data, replace_data

# Events of a first answer that are looked at; text in other events has its quotes escaped.
_EVENT_PATTERN: Final = re.compile(
    rb'"(?:message_start|content_block_start|message_delta|message_stop|error)"|\[DONE\]'
)
# What the end of a joined answer says of its usage beside what the upstream's end says there: clients take
# the later word for each of these.
_COUNTS: Final = (
    "input_tokens",
    "cache_creation_input_tokens",
    "cache_read_input_tokens",
    "output_tokens",
)


class MessagesStreamJoiner:
    """One answer as the client sees it, whatever number of answers it is made of.

    Args:
        name: Of the search tool.

    Attributes:
        done: Whether the upstream has said that the present answer is at its end.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._first = True
        self._hidden = True  # whether calls may be answered; else they are left out
        self._number = 0  # of the next block that the client sees
        self._spent: JsonObject = {}
        self._reset_answer()

    def _reset_answer(self) -> None:
        self._events = EventSplitter()
        self._kept = EventBuffer()
        self._mine: dict[int, SearchUse] = {}  # by the upstream's index
        self._numbers: dict[int, int] = {}  # the client's index by the upstream's
        self._others = 0
        self._used: JsonObject = {}
        self._going = False
        self.done = False

    @property
    def buffered_bytes(self) -> int:
        """Bytes of the present answer that `start_next_answer` reads again."""
        return self._kept.size

    @property
    def calls(self) -> tuple[SearchUse, ...]:
        """The calls to be answered before the answer goes on; none where it does not go on."""
        return tuple(self._mine.values()) if self._going else ()

    def feed(self, chunk: bytes) -> bytes:
        """Returns what the client gets when these bytes come."""
        return b"".join([self._filter_event(event) for event in self._events.feed(chunk)])

    def flush_rest(self) -> bytes:
        """Returns what the client gets when the upstream's answer is at its end, not cut."""
        rest = self._events.flush_rest()
        return self._filter_event(rest) if rest else b""

    def start_next_answer(self, *, may_answer_calls: bool) -> JsonObject:
        """Expects the next answer, and returns the assistant message that the present one was.

        Args:
            may_answer_calls: Whether calls in the next answer may be answered, too. Else they are left out.
        """
        message = build_message(_join_events(map(_decode_event, self._kept)))
        self._spent = add_usage(self._spent, self._used)
        self._first, self._hidden = False, may_answer_calls
        self._reset_answer()
        return message

    def write_error(self, body: bytes) -> bytes:
        """Returns the event that tells the client of an error."""
        told = {"type": "error", **DECODER.decode(body.decode())}
        return b"event: error\ndata: %b\n\n" % encode_ascii_json(told)

    def _filter_event(self, event: bytes) -> bytes:
        if self._first and not self._mine and not _EVENT_PATTERN.search(event):
            self._kept.add(event)
            return event
        data = read_data(event)
        payload = _decode_event(event)
        kind = payload.get("type")
        if not data or kind == "ping":
            return event  # keeps the connection alive
        if kind == "error":
            self._going = False
            return event
        self.done = self.done or kind == "message_stop" or data == DONE
        if self._going:
            return b""
        self._kept.add(event)
        return self._filter_payload(event, kind, payload)

    def _filter_payload(self, event: bytes, kind: Any, payload: JsonObject) -> bytes:
        if kind == "message_start":
            self._record_usage(_as_object(payload.get("message")).get("usage"))
            return event if self._first else b""
        if kind == "message_delta":
            return self._filter_end(event, payload)
        index = payload.get("index")
        if type(index) is not int:
            return event
        if kind == "content_block_start":
            self._open_block(index, _as_object(payload.get("content_block")))
        call = self._mine.get(index)
        if call is not None:
            call.arguments += _as_text(_as_object(payload.get("delta")).get("partial_json"))
            return b""
        number = self._numbers.get(index, index)
        return (
            event if number == index else replace_data(event, encode_ascii_json({**payload, "index": number}))
        )

    def _open_block(self, index: int, block: JsonObject) -> None:
        if is_call(block, self._name):
            self._mine[index] = SearchUse(write_input(block))
            return
        self._others += block.get("type") == CALL
        self._numbers[index] = self._number
        self._number += 1

    def _record_usage(self, usage: Any) -> None:
        """Take note of usage; a zero, or what is left out, says nothing new."""
        told = _as_object(usage)
        self._used |= {name: count for name, count in told.items() if count or name not in self._used}

    def _filter_end(self, event: bytes, payload: JsonObject) -> bytes:
        """Returns the end of an answer; empty where the answer goes on."""
        self._record_usage(payload.get("usage"))
        delta = _as_object(payload.get("delta"))
        reason = delta.get("stop_reason")
        alone = bool(self._mine) and not self._others
        if reason and alone and self._hidden and self._kept.is_whole and reason not in CUT_OFF:
            self._going = True
            return b""
        changed = alone and reason == CALLED
        if changed:
            delta["stop_reason"] = ENDED  # nothing is left to be called
        if not self._first:
            total = add_usage(self._spent, self._used)
            told = {*_COUNTS, *_as_object(payload.get("usage"))}
            payload["usage"] = {name: value for name, value in total.items() if name in told}
        return event if self._first and not changed else replace_data(event, encode_ascii_json(payload))


def _join_events(payloads: Iterable[JsonObject]) -> list[JsonObject]:
    """Returns the blocks that the events of an answer put together, in their order."""
    blocks: dict[Any, JsonObject] = {}
    pieces: dict[tuple[Any, str], list[str]] = {}
    for payload in payloads:
        index, block, delta = (payload.get(name) for name in ("index", "content_block", "delta"))
        if isinstance(block, dict):
            blocks[index] = dict(block)
        if index in blocks and isinstance(delta, dict):
            _apply_delta(blocks[index], index, delta, pieces)
    for (index, name), texts in pieces.items():
        _join_text(blocks[index], name, "".join(texts))
    return list(blocks.values())


def _apply_delta(
    block: JsonObject, index: Any, delta: JsonObject, pieces: dict[tuple[Any, str], list[str]]
) -> None:
    """Adds a delta to its block; text is put aside in pieces, to be joined once."""
    for name, value in delta.items():
        if name == "citation":
            block["citations"] = [*(block.get("citations") or ()), value]
        elif isinstance(value, str) and name != "type":
            pieces.setdefault((index, name), []).append(value)
        elif name != "type":
            block[name] = value


def _join_text(block: JsonObject, name: str, text: str) -> None:
    if name != "partial_json":
        block[name] = _as_text(block.get(name)) + text
    elif text:  # the input of a call stays text: `build_message` judges it
        block["input"] = text if block.get("type") == CALL else _read_input(text)


def _read_input(text: str) -> Any:
    """Returns the input that pieces of JSON make; the text itself where that is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _decode_event(event: bytes) -> JsonObject:
    """Returns the object that an event carries; empty where it carries none."""
    try:
        payload = DECODER.decode(read_data(event).decode())
    except (ValueError, RecursionError):
        return {}
    return payload if isinstance(payload, dict) else {}


def _as_object(value: Any) -> JsonObject:
    return value if isinstance(value, dict) else {}


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else ""
