"""A streamed answer on the Responses wire in which calls of the search tool are hidden.

Bytes of the upstream go in and bytes for the client come out. Of the first answer, an event in front of the
first call goes on as its own bytes. An item that calls the tool is left out, and what is numbered behind it
closes up. Where the answer ends in such calls alone, its end is kept back, and the items of the upstream's
next answer follow as if they were of the same one, whose end lists them all.
"""

import re
from typing import Final

from compaction_proxy.wires.chat.continuation import add_usage, encode_ascii_json
from compaction_proxy.wires.chat.intercept_calls import JsonObject
from compaction_proxy.wires.chat.intercept_stream import EventBuffer
from compaction_proxy.wires.json.slices import DECODER
from compaction_proxy.wires.messages.search_tool import SearchUse
from compaction_proxy.wires.responses.intercept_response import ENVELOPE
from compaction_proxy.wires.responses.search_tool import asks_client, build_message, is_call, read_arguments
from compaction_proxy.wires.sse import DONE, EventSplitter, read_data, replace_data

_OPENINGS: Final = frozenset({"response.created", "response.queued", "response.in_progress"})
_COMPLETED: Final = "response.completed"
_ENDS: Final = frozenset({_COMPLETED, "response.incomplete", "response.failed"})
_ITEM_DONE: Final = "response.output_item.done"
# Events of a first answer that are looked at; text in other events has its quotes escaped.
_EVENT_PATTERN: Final = re.compile(
    rb'"(?:response\.(?:created|queued|in_progress|output_item\.(?:added|done)|completed|incomplete|failed)'
    rb'|error)"|\[DONE\]'
)
_NUMBERED: Final = b'"sequence_number"'


class ResponsesStreamJoiner:
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
        self._number = 0  # output index of the next item that the client sees
        self._sequence = 0  # sequence number of the next event that the client sees
        self._envelope: JsonObject = {}
        self._items: list[JsonObject] = []  # what the client has got of earlier answers
        self._spent: JsonObject = {}
        self._reset_answer()

    def _reset_answer(self) -> None:
        self._events = EventSplitter()
        self._kept = EventBuffer()
        self._mine: set[int | str] = set()
        self._numbers: dict[int | str, int] = {}  # the client's output index by the upstream's
        self._output: list[JsonObject] = []  # of an answer that goes on
        self._used: JsonObject = {}
        self._going = False
        self.done = False

    @property
    def buffered_bytes(self) -> int:
        """Bytes of the present answer that were kept for `start_next_answer`."""
        return self._kept.size

    @property
    def calls(self) -> tuple[SearchUse, ...]:
        """The calls to be answered before the answer goes on; none where it does not go on."""
        if not self._going:
            return ()
        return tuple(SearchUse(read_arguments(item)) for item in self._output if is_call(item, self._name))

    def feed(self, chunk: bytes) -> bytes:
        """Returns what the client gets when these bytes come."""
        return b"".join([self._filter_event(event) for event in self._events.feed(chunk)])

    def flush_rest(self) -> bytes:
        """Returns what the client gets when the upstream's answer is at its end, not cut."""
        rest = self._events.flush_rest()
        return self._filter_event(rest) if rest else b""

    def start_next_answer(self, *, may_answer_calls: bool) -> JsonObject:
        """Expects the next answer, and returns what the present one said.

        Args:
            may_answer_calls: Whether calls in the next answer may be answered, too. Else they are left out.
        """
        message = build_message(self._output)
        self._items += self._drop_calls(self._output)
        self._spent = add_usage(self._spent, self._used)
        self._first, self._hidden = False, may_answer_calls
        self._reset_answer()
        return message

    def write_error(self, body: bytes) -> bytes:
        """Returns the event that tells the client of an error: as documented, and as the SDKs look for it."""
        told = DECODER.decode(body.decode()).get("error")
        error = told if isinstance(told, dict) else {"message": str(told)}
        flat = {name: error.get(name) for name in ("code", "message", "param")}
        event = {"type": "error", "sequence_number": self._sequence, **flat, "error": error}
        return b"event: error\ndata: %b\n\n" % encode_ascii_json(event)

    def _filter_event(self, event: bytes) -> bytes:
        if self._first and not self._mine and not _EVENT_PATTERN.search(event):
            self._sequence += _NUMBERED in event
            return event
        data = read_data(event)
        if not data:
            return event  # a comment, which keeps the connection alive
        payload = _decode_object(data)
        kind = payload.get("type")
        if kind == "error":
            self._going = False
            return self._renumber_event(event, payload)
        self.done = self.done or kind in _ENDS or data == DONE
        if self._going or (kind in _OPENINGS and not self._first):
            return b""
        if kind in _ENDS:
            return self._filter_end(event, payload)
        return b"" if self._is_hidden(event, payload) else self._renumber_event(event, payload)

    def _is_hidden(self, event: bytes, payload: JsonObject) -> bool:
        """Whether an event is about a call of the search tool; takes note of items as they begin and end."""
        if payload.get("type") == "response.created":
            self._envelope = {
                key: payload["response"][key] for key in ENVELOPE if key in _get_response(payload)
            }
            told = payload.get("sequence_number")
            self._sequence = told if type(told) is int else 0
        item, key = payload.get("item"), _get_item_key(payload)
        if not isinstance(item, dict):
            return key in self._mine
        if payload.get("type") == _ITEM_DONE:
            self._kept.add(event)
        if is_call(item, self._name):
            self._mine.add(key)
        elif key not in self._numbers:
            self._numbers[key] = self._number
            self._number += 1
        return key in self._mine

    def _renumber_event(self, event: bytes, payload: JsonObject) -> bytes:
        """Returns the event with numbers that leave no gap; its own bytes where they are right already."""
        now: JsonObject = {}
        index = payload.get("output_index")
        if type(index) is int:
            now["output_index"] = self._numbers.get(index, index)
        if "sequence_number" in payload:
            now["sequence_number"] = self._sequence
            self._sequence += 1
        same = all(payload[name] == value for name, value in now.items())
        return event if same else replace_data(event, encode_ascii_json({**payload, **now}))

    def _filter_end(self, event: bytes, payload: JsonObject) -> bytes:
        """Returns the end of an answer; empty where the answer goes on."""
        response = _get_response(payload)
        told = response.get("output")
        items = (
            [_decode_object(read_data(each))["item"] for each in self._kept] if self._kept.is_whole else []
        )
        items = items or [item for item in (told if isinstance(told, list) else ()) if isinstance(item, dict)]
        shown = self._drop_calls(items)
        called = len(shown) < len(items)
        usage = response.get("usage")
        self._used = usage if isinstance(usage, dict) else {}
        if called and self._hidden and payload["type"] == _COMPLETED and not any(map(asks_client, shown)):
            self._going, self._output = True, items
            return b""
        if self._first and not called:
            return self._renumber_event(event, payload)
        response |= {**self._envelope, "output": [*self._items, *shown]}
        if self._used:
            response["usage"] = add_usage(self._spent, self._used)
        sequence = {"sequence_number": self._sequence} if "sequence_number" in payload else {}
        return replace_data(event, encode_ascii_json({**payload, **sequence, "response": response}))

    def _drop_calls(self, items: list[JsonObject]) -> list[JsonObject]:
        return [item for item in items if not is_call(item, self._name)]


def _decode_object(data: bytes) -> JsonObject:
    """Returns the object that an event carries; empty where it carries none."""
    try:
        payload = DECODER.decode(data.decode())
    except (ValueError, RecursionError):
        return {}
    return payload if isinstance(payload, dict) else {}


def _get_response(payload: JsonObject) -> JsonObject:
    held = payload.get("response")
    return held if isinstance(held, dict) else {}


def _get_item_key(payload: JsonObject) -> int | str:
    """What names the item that an event is about: its output index, else its id."""
    index, item = payload.get("output_index"), payload.get("item")
    if type(index) is int:
        return index
    told = item.get("id") if isinstance(item, dict) else payload.get("item_id")
    return told if isinstance(told, str) else ""
