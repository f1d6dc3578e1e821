"""Hides calls of the search tool in a streamed answer on the Messages wire, and appends the next answers.

Bytes from the upstream go in, and bytes for the client come out. In the first answer, an event before the
first call of the search tool is forwarded unchanged. A block that calls the search tool is left out, and
later blocks get lower indices, so that no index is missing. If an answer calls only the search tool, its end
is held back. The blocks of the upstream's next answer then follow as part of the same answer, whose end
reports the usage of all answers together.
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
    CUT_OFF_REASONS,
    END_TURN_REASON,
    TOOL_USE_REASON,
    SearchToolCall,
    build_message,
    encode_input,
    is_call,
)
from compaction_proxy.wires.sse import DONE_DATA, EventSplitter, read_data, replace_data

# Matches the events of a first answer that must be parsed. Texts in other events cannot match, because quotes
# in JSON strings are escaped.
_EVENT_PATTERN: Final = re.compile(
    rb'"(?:message_start|content_block_start|message_delta|message_stop|error)"|\[DONE\]'
)
# The token counts that the end of a joined answer always reports, because clients use the last value that
# they receive for each count.
_COUNTS: Final = (
    "input_tokens",
    "cache_creation_input_tokens",
    "cache_read_input_tokens",
    "output_tokens",
)


class MessagesStreamJoiner:
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
        self._next_index = 0  # index of the next block that the client sees
        self._previous_usage: JsonObject = {}
        self._reset_answer()

    def _reset_answer(self) -> None:
        self._events = EventSplitter()
        self._buffered_events = EventBuffer()
        self._own_calls: dict[int, SearchToolCall] = {}  # by the upstream's index of the block
        self._client_indices: dict[int, int] = {}  # the client's index of a block, by the upstream's
        self._client_call_count = 0
        self._usage: JsonObject = {}
        self._is_continuing = False
        self.is_done = False

    @property
    def buffered_bytes(self) -> int:
        """The number of bytes of the current answer that `start_next_answer` will read again."""
        return self._buffered_events.size_bytes

    @property
    def calls(self) -> tuple[SearchToolCall, ...]:
        """The calls that the proxy must answer before the answer continues; empty if it does not continue."""
        return tuple(self._own_calls.values()) if self._is_continuing else ()

    def feed(self, chunk: bytes) -> bytes:
        """Returns the bytes to send to the client when this chunk arrives."""
        return b"".join([self._filter_event(event) for event in self._events.feed(chunk)])

    def flush_rest(self) -> bytes:
        """Returns the last bytes for the client. To be called when the upstream's answer ended normally."""
        rest = self._events.flush_rest()
        return self._filter_event(rest) if rest else b""

    def start_next_answer(self, *, may_answer_calls: bool) -> JsonObject:
        """Prepares for the next answer, and returns the assistant message of the current answer.

        Args:
            may_answer_calls: Whether the proxy may answer calls of its tool in the next answer as well. If
                False, that is the last answer, and these calls are removed from it.
        """
        message = build_message(_join_events(map(_decode_event, self._buffered_events)))
        self._previous_usage = add_usage(self._previous_usage, self._usage)
        self._is_first_answer, self._may_answer_calls = False, may_answer_calls
        self._reset_answer()
        return message

    def encode_error_event(self, body: bytes) -> bytes:
        """Returns the event that reports an error to the client."""
        payload = {"type": "error", **DECODER.decode(body.decode())}
        return b"event: error\ndata: %b\n\n" % encode_ascii_json(payload)

    def _filter_event(self, event: bytes) -> bytes:
        if self._is_first_answer and not self._own_calls and not _EVENT_PATTERN.search(event):
            self._buffered_events.add(event)
            return event
        data = read_data(event)
        payload = _decode_event(event)
        kind = payload.get("type")
        if not data or kind == "ping":
            return event  # a comment or a ping keeps the connection alive
        if kind == "error":
            self._is_continuing = False
            return event
        self.is_done = self.is_done or kind == "message_stop" or data == DONE_DATA
        if self._is_continuing:
            return b""
        self._buffered_events.add(event)
        return self._filter_payload(event, kind, payload)

    def _filter_payload(self, event: bytes, kind: Any, payload: JsonObject) -> bytes:
        if kind == "message_start":
            self._record_usage(_as_object(payload.get("message")).get("usage"))
            return event if self._is_first_answer else b""
        if kind == "message_delta":
            return self._filter_end(event, payload)
        index = payload.get("index")
        if type(index) is not int:
            return event
        if kind == "content_block_start":
            self._open_block(index, _as_object(payload.get("content_block")))
        call = self._own_calls.get(index)
        if call is not None:
            call.arguments += _as_text(_as_object(payload.get("delta")).get("partial_json"))
            return b""
        number = self._client_indices.get(index, index)
        return (
            event if number == index else replace_data(event, encode_ascii_json({**payload, "index": number}))
        )

    def _open_block(self, index: int, block: JsonObject) -> None:
        if is_call(block, self._name):
            self._own_calls[index] = SearchToolCall(encode_input(block))
            return
        self._client_call_count += block.get("type") == CALL
        self._client_indices[index] = self._next_index
        self._next_index += 1

    def _record_usage(self, usage: Any) -> None:
        """Merges counts into the answer's usage. A zero does not replace an earlier count."""
        counts = _as_object(usage)
        self._usage |= {name: count for name, count in counts.items() if count or name not in self._usage}

    def _filter_end(self, event: bytes, payload: JsonObject) -> bytes:
        """Returns the event to send for the `message_delta` that ends an answer; empty if it continues."""
        self._record_usage(payload.get("usage"))
        delta = _as_object(payload.get("delta"))
        reason = delta.get("stop_reason")
        only_own_calls = bool(self._own_calls) and not self._client_call_count
        if (
            reason
            and only_own_calls
            and self._may_answer_calls
            and self._buffered_events.is_complete
            and reason not in CUT_OFF_REASONS
        ):
            self._is_continuing = True
            return b""
        changed = only_own_calls and reason == TOOL_USE_REASON
        if changed:
            delta["stop_reason"] = END_TURN_REASON  # the client has nothing left to call
        if not self._is_first_answer:
            total = add_usage(self._previous_usage, self._usage)
            reported = {*_COUNTS, *_as_object(payload.get("usage"))}
            payload["usage"] = {name: value for name, value in total.items() if name in reported}
        return (
            event
            if self._is_first_answer and not changed
            else replace_data(event, encode_ascii_json(payload))
        )


def _join_events(payloads: Iterable[JsonObject]) -> list[JsonObject]:
    """Builds the blocks of an answer from its events, and returns them in order."""
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
    """Adds a delta to its block. Texts are only collected in `pieces`, to be joined all at once later."""
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
    elif text:  # a call's input stays text: `build_message` parses it
        block["input"] = text if block.get("type") == CALL else _read_input(text)


def _read_input(text: str) -> Any:
    """Parses the input of a provider's tool; the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _decode_event(event: bytes) -> JsonObject:
    """Decodes the data of an event; empty if it is not an object."""
    try:
        payload = DECODER.decode(read_data(event).decode())
    except (ValueError, RecursionError):
        return {}
    return payload if isinstance(payload, dict) else {}


def _as_object(value: Any) -> JsonObject:
    return value if isinstance(value, dict) else {}


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else ""
