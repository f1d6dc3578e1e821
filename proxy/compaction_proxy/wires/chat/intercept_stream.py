"""Hides calls of the proxy's tool in a streamed answer, and appends the upstream's next answers to it.

Bytes from the upstream go in, and bytes for the client come out. In the first answer, an event without calls
is forwarded unparsed. If the only calls of an answer are calls of the proxy's tool, the end of the answer is
held back. The upstream's next answer is then forwarded as part of the same answer: with the same id, without
a second role, and with the usage of all answers together.
"""

import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

from compaction_proxy.wires.chat.continuation import (
    REASONING_DETAILS,
    AnswerContent,
    add_usage,
    choose_text_separator,
    encode_ascii_json,
    shift_indices,
)
from compaction_proxy.wires.chat.intercept_calls import (
    CUT_OFF_REASONS,
    STOP,
    TOOL_CALLS,
    JsonObject,
    PartialToolCall,
    ToolCallFilter,
)
from compaction_proxy.wires.json.slices import DECODER
from compaction_proxy.wires.sse import DONE_DATA, EventSplitter, read_data, replace_data

# If an answer has more bytes than this, its events are no longer kept, and the proxy cannot continue it.
MAX_KEPT_BYTES: Final = 16 * 1024 * 1024
# Kept events are compressed once they exceed this many bytes in total. It takes a third of a millisecond.
BLOCK_BYTES: Final = 64 * 1024
# The fastest level of compression.
_FAST_LEVEL: Final = 1
# Separates the events of a block. JSON cannot contain this byte, so no event that can be parsed contains it.
_EVENT_SEPARATOR: Final = b"\0"


class EventBuffer:
    """Keeps events in order, compressed in blocks.

    Attributes:
        size_bytes: The size of all events that were added, before compression.
    """

    __slots__ = ("_blocks", "_unpacked_bytes", "_unpacked_events", "size_bytes")

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._unpacked_events: list[bytes] = []
        self._unpacked_bytes = 0
        self.size_bytes = 0

    @property
    def is_complete(self) -> bool:
        """Whether the buffer still holds all events that were added."""
        return self.size_bytes <= MAX_KEPT_BYTES

    def add(self, event: bytes) -> None:
        """Adds an event."""
        self.size_bytes += len(event)
        self._unpacked_events.append(event)
        self._unpacked_bytes += len(event)
        if self._unpacked_bytes > BLOCK_BYTES:
            self._pack_block()

    def _pack_block(self) -> None:
        if self.is_complete:
            self._blocks.append(zlib.compress(_EVENT_SEPARATOR.join(self._unpacked_events), _FAST_LEVEL))
        else:
            self._blocks.clear()
        self._unpacked_events.clear()
        self._unpacked_bytes = 0

    def __iter__(self) -> Iterator[bytes]:
        """Yields all events that were added, but only if `is_complete`.

        An event that contains `_EVENT_SEPARATOR` may be yielded in pieces.
        """
        for block in self._blocks:
            yield from zlib.decompress(block).split(_EVENT_SEPARATOR)
        yield from self._unpacked_events


# Members of an event or an answer that identify the answer. The client sees those of the first answer.
ENVELOPE: Final = ("id", "created", "model", "system_fingerprint", "service_tier")
# Matches events that must be parsed because they hold calls, a finish reason or usage. The end marker of the
# stream is tested separately: without it, all alternatives begin with a quote, which is five times as fast.
_EVENT_PATTERN: Final = re.compile(rb'"(?:tool_calls"|finish_reason"\s*:\s*"|usage"\s*:\s*\{)')


class ChatStreamJoiner:
    """Joins one or more streams of the upstream into one stream for the client.

    Args:
        name: The name of the proxy's tool.

    Attributes:
        is_done: Whether the upstream has signalled the end of the current answer.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_first_answer = True
        self._may_answer_calls = True  # if False, calls of the proxy's tool are only removed
        self._envelope: JsonObject = {}
        self._has_sent_role = False
        self._previous_text = ""  # text of the previous answer, until the separator after it is chosen
        self._reasoning_offset = 0  # added to the index of `reasoning_details`; see `shift_indices`
        self._previous_usage: JsonObject = {}
        self._reset_answer()

    def _reset_answer(self) -> None:
        self._events = EventSplitter()
        self._calls = ToolCallFilter(self._name)
        self._buffered_events = EventBuffer()
        self._usage: JsonObject = {}
        self._has_finish_reason = False  # the provider has given a finish reason
        self._is_continuing = False
        self.is_done = False

    @property
    def buffered_bytes(self) -> int:
        """The number of bytes of the current answer that `start_next_answer` will read again."""
        return self._buffered_events.size_bytes

    @property
    def calls(self) -> tuple[PartialToolCall, ...]:
        """The calls that the proxy must answer before the answer continues; empty if it does not continue."""
        return tuple(self._calls.own_calls) if self._is_continuing else ()

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
        content = AnswerContent()
        for event in self._buffered_events:
            payload = _decode_object(read_data(event))
            delta = _get_delta(_get_choice(payload))
            content.add_delta(delta)
            self._has_sent_role = self._has_sent_role or "role" in delta
            if self._is_first_answer and not self._envelope and _get_choice(payload):
                self._envelope = {key: payload[key] for key in ENVELOPE if key in payload}
        message = content.build_message(self._calls.own_calls)
        self._previous_text = content.text or self._previous_text
        self._reasoning_offset += content.reasoning_index_count
        self._previous_usage = add_usage(self._previous_usage, self._usage)
        self._is_first_answer, self._may_answer_calls = False, may_answer_calls
        self._reset_answer()
        return message

    def encode_error_event(self, body: bytes) -> bytes:
        """Returns the event that reports an error to the client."""
        return b"data: %b\n\n" % body

    def _filter_event(self, event: bytes) -> bytes:
        if (
            self._is_first_answer
            and not self._is_continuing
            and DONE_DATA not in event
            and not _EVENT_PATTERN.search(event)
        ):
            self._buffered_events.add(event)
            return event
        data = read_data(event)
        if not data:
            return event  # only a comment, which keeps the connection alive
        if data == DONE_DATA:
            return self._receive_done(event)
        payload = _decode_object(data)
        if payload.get("error"):
            self._is_continuing = False
            return event
        return self._filter_payload(event, payload)

    def _receive_done(self, event: bytes) -> bytes:
        self.is_done = True
        self._is_continuing = self._is_continuing or (not self._has_finish_reason and self._may_continue(""))
        return b"" if self._is_continuing else event

    def _may_continue(self, reason: str) -> bool:
        """Returns whether the proxy answers its tool's calls and continues an answer that ended for `reason`.

        It does not if the client must answer calls too, or if the answer was cut off or is too large to keep.
        """
        only_own_calls = bool(self._calls.own_calls) and not self._calls.client_call_count
        return (
            self._may_answer_calls
            and self._buffered_events.is_complete
            and only_own_calls
            and reason not in CUT_OFF_REASONS
        )

    def _filter_payload(self, event: bytes, payload: JsonObject) -> bytes:
        usage_holders = _find_usage_holders(payload)
        for holder in usage_holders:
            self._usage = holder["usage"]
        choice = _get_choice(payload)
        if self._is_continuing:
            return b""
        if not payload:
            return event
        self._buffered_events.add(event)
        changed = bool(choice) and self._filter_choice(choice)
        if self._is_continuing:
            usage_holders = _clear_usage(usage_holders)
        if self._is_first_answer and not changed:
            return event
        if not self._is_first_answer:
            self._rewrite_as_continuation(payload, choice, usage_holders)
        return (
            replace_data(event, encode_ascii_json(payload))
            if _has_content(payload, choice, usage_holders)
            else b""
        )

    def _filter_choice(self, choice: JsonObject) -> bool:
        """Removes calls of the proxy's tool from a choice, and adapts the finish reason of this choice.

        Returns whether the choice has changed.
        """
        delta = _get_delta(choice)
        pieces = delta.get(TOOL_CALLS)
        before = pieces if isinstance(pieces, list) else []
        shown = self._calls.filter_pieces(before)
        reason = choice.get("finish_reason")
        if isinstance(reason, str) and reason:
            shown += self._calls.release_unnamed()
        changed = shown != before
        if changed:
            choice["delta"] = delta
            delta[TOOL_CALLS] = shown
            if not shown:
                del delta[TOOL_CALLS]
        return self._filter_end(choice, reason) or changed

    def _filter_end(self, choice: JsonObject, reason: object) -> bool:
        """Adapts the finish reason of a choice, and returns whether the choice changed.

        The finish reason is removed if the answer continues. It becomes `stop` if the answer cannot continue
        and all its calls were removed.
        """
        if not isinstance(reason, str) or not reason:
            return False
        self._has_finish_reason = True
        if not self._calls.own_calls:
            return False
        if self._may_continue(reason):
            self._is_continuing = True
            choice["finish_reason"] = None
            return True
        if self._calls.client_call_count or reason != TOOL_CALLS:
            return False
        choice["finish_reason"] = STOP  # the client has nothing left to call
        return True

    def _rewrite_as_continuation(
        self, payload: JsonObject, choice: JsonObject, usage_holders: list[JsonObject]
    ) -> None:
        """Changes an event of a later answer so that, for the client, it continues the first answer."""
        payload.update(self._envelope)
        for holder in usage_holders:
            holder["usage"] = add_usage(self._previous_usage, holder["usage"])
        delta = _get_delta(choice)
        if self._has_sent_role:
            delta.pop("role", None)
        shift_indices(delta.get(REASONING_DETAILS), self._reasoning_offset)
        content = delta.get("content")
        if isinstance(content, str) and content and self._previous_text:
            delta["content"] = choose_text_separator(self._previous_text, content) + content
            self._previous_text = ""


def _decode_object(data: bytes) -> JsonObject:
    """Decodes the data of an event; empty if it is not an object."""
    try:
        payload = DECODER.decode(data.decode())
    except (ValueError, RecursionError):
        return {}
    return payload if isinstance(payload, dict) else {}


def _get_choice(payload: Mapping[str, Any]) -> JsonObject:
    """Returns the first choice of an event; empty if there is none."""
    choices = payload.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return first if isinstance(first, dict) else {}


def _get_delta(choice: Mapping[str, Any]) -> JsonObject:
    delta = choice.get("delta")
    return delta if isinstance(delta, dict) else {}


def _find_usage_holders(payload: JsonObject) -> list[JsonObject]:
    """Returns the objects that hold usage: the event itself, its choice (Kimi), or `x_groq` (Groq)."""
    groq = payload.get("x_groq")
    holders = (payload, _get_choice(payload), groq if isinstance(groq, dict) else {})
    return [holder for holder in holders if isinstance(holder.get("usage"), dict)]


def _clear_usage(usage_holders: list[JsonObject]) -> list[JsonObject]:
    for holder in usage_holders:
        holder["usage"] = None
    return []


def _has_content(payload: JsonObject, choice: JsonObject, usage_holders: list[JsonObject]) -> bool:
    """Returns whether a changed event still holds anything for the client."""
    if not choice or usage_holders or choice.get("finish_reason"):
        return bool(payload)
    return any(_get_delta(choice).values())
