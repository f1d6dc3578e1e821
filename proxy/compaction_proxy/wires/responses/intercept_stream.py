"""Hides calls of the search tool in a streamed answer on the Responses wire, and appends the next answers.

Bytes from the upstream go in, and bytes for the client come out. In the first answer, an event before the
first call of the search tool is forwarded unchanged. An item that calls the search tool is left out, and
later items and events get lower numbers, so that no number is missing. If an answer calls only the search
tool, its end is held back. The items of the upstream's next answer then follow as part of the same answer,
whose end lists the items of all answers.
"""

import re
from typing import Final

from compaction_proxy.wires.chat.continuation import add_usage, encode_ascii_json
from compaction_proxy.wires.chat.intercept_calls import JsonObject
from compaction_proxy.wires.chat.intercept_stream import EventBuffer
from compaction_proxy.wires.json.slices import DECODER
from compaction_proxy.wires.messages.search_tool import SearchToolCall
from compaction_proxy.wires.responses.intercept_response import ENVELOPE
from compaction_proxy.wires.responses.search_tool import (
    build_message,
    is_call,
    must_client_answer,
    read_arguments,
)
from compaction_proxy.wires.sse import DONE_DATA, EventSplitter, read_data, replace_data

_OPENING_EVENTS: Final = frozenset({"response.created", "response.queued", "response.in_progress"})
_COMPLETED_EVENT: Final = "response.completed"
_END_EVENTS: Final = frozenset({_COMPLETED_EVENT, "response.incomplete", "response.failed"})
_ITEM_DONE_EVENT: Final = "response.output_item.done"
# Matches the events of a first answer that must be parsed. Texts in other events cannot match, because quotes
# in JSON strings are escaped.
_EVENT_PATTERN: Final = re.compile(
    rb'"(?:response\.(?:created|queued|in_progress|output_item\.(?:added|done)|completed|incomplete|failed)'
    rb'|error)"|\[DONE\]'
)
_SEQUENCE_MARKER: Final = b'"sequence_number"'


class ResponsesStreamJoiner:
    """Joins one or more streams of the upstream into one stream for the client.

    Args:
        name: The name of the search tool.

    Attributes:
        is_done: Whether the upstream has signalled the end of the current answer.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_first_answer = True
        self._may_answer_calls = True  # if False, calls of the search tool are only removed
        self._next_index = 0  # output index of the next item that the client sees
        self._next_sequence_number = 0  # sequence number of the next event that the client sees
        self._envelope: JsonObject = {}
        self._previous_items: list[JsonObject] = []  # items of earlier answers that the client has received
        self._previous_usage: JsonObject = {}
        self._reset_answer()

    def _reset_answer(self) -> None:
        self._events = EventSplitter()
        self._buffered_events = EventBuffer()
        self._own_call_keys: set[int | str] = set()
        # The output index that the client sees, by the upstream's key of the item (`_get_item_key`).
        self._client_indices: dict[int | str, int] = {}
        self._answer_items: list[JsonObject] = []  # items of the current answer, if the next one continues it
        self._usage: JsonObject = {}
        self._is_continuing = False
        self.is_done = False

    @property
    def buffered_bytes(self) -> int:
        """The number of bytes of the current answer that are kept: the items that its end must list."""
        return self._buffered_events.size_bytes

    @property
    def calls(self) -> tuple[SearchToolCall, ...]:
        """The calls that the proxy must answer before the answer continues; empty if it does not continue."""
        if not self._is_continuing:
            return ()
        return tuple(
            SearchToolCall(read_arguments(item)) for item in self._answer_items if is_call(item, self._name)
        )

    def feed(self, chunk: bytes) -> bytes:
        """Returns the bytes to send to the client when this chunk arrives."""
        return b"".join([self._filter_event(event) for event in self._events.feed(chunk)])

    def flush_rest(self) -> bytes:
        """Returns the last bytes for the client. To be called when the upstream's answer ended normally."""
        rest = self._events.flush_rest()
        return self._filter_event(rest) if rest else b""

    def start_next_answer(self, *, may_answer_calls: bool) -> JsonObject:
        """Prepares for the next answer, and returns an object whose `output` has the current answer's items.

        Args:
            may_answer_calls: Whether the proxy may answer calls of its tool in the next answer as well. If
                False, that is the last answer, and these calls are removed from it.
        """
        message = build_message(self._answer_items)
        self._previous_items += self._drop_calls(self._answer_items)
        self._previous_usage = add_usage(self._previous_usage, self._usage)
        self._is_first_answer, self._may_answer_calls = False, may_answer_calls
        self._reset_answer()
        return message

    def encode_error_event(self, body: bytes) -> bytes:
        """Returns the event that reports an error to the client.

        The event has the documented fields, and also the field `error`, which SDKs read.
        """
        details = DECODER.decode(body.decode()).get("error")
        error = details if isinstance(details, dict) else {"message": str(details)}
        flat = {name: error.get(name) for name in ("code", "message", "param")}
        event = {"type": "error", "sequence_number": self._next_sequence_number, **flat, "error": error}
        return b"event: error\ndata: %b\n\n" % encode_ascii_json(event)

    def _filter_event(self, event: bytes) -> bytes:
        if self._is_first_answer and not self._own_call_keys and not _EVENT_PATTERN.search(event):
            self._next_sequence_number += _SEQUENCE_MARKER in event
            return event
        data = read_data(event)
        if not data:
            return event  # only a comment, which keeps the connection alive
        payload = _decode_object(data)
        kind = payload.get("type")
        if kind == "error":
            self._is_continuing = False
            return self._renumber_event(event, payload)
        self.is_done = self.is_done or kind in _END_EVENTS or data == DONE_DATA
        if self._is_continuing or (kind in _OPENING_EVENTS and not self._is_first_answer):
            return b""
        if kind in _END_EVENTS:
            return self._filter_end(event, payload)
        return b"" if self._is_hidden(event, payload) else self._renumber_event(event, payload)

    def _is_hidden(self, event: bytes, payload: JsonObject) -> bool:
        """Returns whether an event belongs to a call of the search tool, and records the event's item.

        Also records the envelope and the first sequence number of a `response.created` event.
        """
        if payload.get("type") == "response.created":
            self._envelope = {
                key: payload["response"][key] for key in ENVELOPE if key in _get_response(payload)
            }
            sequence = payload.get("sequence_number")
            self._next_sequence_number = sequence if type(sequence) is int else 0
        item, key = payload.get("item"), _get_item_key(payload)
        if not isinstance(item, dict):
            return key in self._own_call_keys
        if payload.get("type") == _ITEM_DONE_EVENT:
            self._buffered_events.add(event)
        if is_call(item, self._name):
            self._own_call_keys.add(key)
        elif key not in self._client_indices:
            self._client_indices[key] = self._next_index
            self._next_index += 1
        return key in self._own_call_keys

    def _renumber_event(self, event: bytes, payload: JsonObject) -> bytes:
        """Returns the event with the output index and the sequence number that the client expects.

        The same bytes are returned if both stay the same.
        """
        numbers: JsonObject = {}
        index = payload.get("output_index")
        if type(index) is int:
            numbers["output_index"] = self._client_indices.get(index, index)
        if "sequence_number" in payload:
            numbers["sequence_number"] = self._next_sequence_number
            self._next_sequence_number += 1
        is_unchanged = all(payload[name] == value for name, value in numbers.items())
        return event if is_unchanged else replace_data(event, encode_ascii_json({**payload, **numbers}))

    def _filter_end(self, event: bytes, payload: JsonObject) -> bytes:
        """Returns the event to send for the last event of an answer; empty if the answer continues."""
        response = _get_response(payload)
        output = response.get("output")
        items = (
            [_decode_object(read_data(each))["item"] for each in self._buffered_events]
            if self._buffered_events.is_complete
            else []
        )
        items = items or [
            item for item in (output if isinstance(output, list) else ()) if isinstance(item, dict)
        ]
        shown = self._drop_calls(items)
        has_calls = len(shown) < len(items)
        usage = response.get("usage")
        self._usage = usage if isinstance(usage, dict) else {}
        if (
            has_calls
            and self._may_answer_calls
            and payload["type"] == _COMPLETED_EVENT
            and not any(map(must_client_answer, shown))
        ):
            self._is_continuing, self._answer_items = True, items
            return b""
        if self._is_first_answer and not has_calls:
            return self._renumber_event(event, payload)
        response |= {**self._envelope, "output": [*self._previous_items, *shown]}
        if self._usage:
            response["usage"] = add_usage(self._previous_usage, self._usage)
        sequence = {"sequence_number": self._next_sequence_number} if "sequence_number" in payload else {}
        return replace_data(event, encode_ascii_json({**payload, **sequence, "response": response}))

    def _drop_calls(self, items: list[JsonObject]) -> list[JsonObject]:
        return [item for item in items if not is_call(item, self._name)]


def _decode_object(data: bytes) -> JsonObject:
    """Decodes the data of an event; empty if it is not an object."""
    try:
        payload = DECODER.decode(data.decode())
    except (ValueError, RecursionError):
        return {}
    return payload if isinstance(payload, dict) else {}


def _get_response(payload: JsonObject) -> JsonObject:
    response = payload.get("response")
    return response if isinstance(response, dict) else {}


def _get_item_key(payload: JsonObject) -> int | str:
    """Returns the key of an event's item: its output index, or else its id; empty if it has neither."""
    index, item = payload.get("output_index"), payload.get("item")
    if type(index) is int:
        return index
    item_id = item.get("id") if isinstance(item, dict) else payload.get("item_id")
    return item_id if isinstance(item_id, str) else ""
