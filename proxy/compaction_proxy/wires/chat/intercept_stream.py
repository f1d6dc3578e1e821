"""A streamed answer in which calls of a tool of ours are hidden, and whose rest comes from further answers.

Bytes of the upstream go in and bytes for the client come out. Of the first answer, an event that has nothing
to do with calls goes on as its own bytes, unparsed. Where the answer ends in calls of ours alone, its end is
kept back, and what the upstream answers next is told as if it were the same answer: with its id, without a
second role, and with the usage of all of them.
"""

import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

from compaction_proxy.wires.chat.continuation import (
    DETAILS,
    AnswerContent,
    add_usage,
    choose_separator,
    encode_ascii_json,
    shift_indices,
)
from compaction_proxy.wires.chat.intercept_calls import (
    CUT_OFF,
    STOP,
    TOOL_CALLS,
    JsonObject,
    PartialToolCall,
    ToolCallFilter,
)
from compaction_proxy.wires.json.slices import DECODER
from compaction_proxy.wires.sse import DONE, EventSplitter, read_data, replace_data

# Of a longer answer nothing is kept.
MAX_KEPT_BYTES: Final = 16 * 1024 * 1024
# So much is packed at once, in a third of a millisecond.
BLOCK_BYTES: Final = 64 * 1024
_QUICKLY: Final = 1
# Stands in no JSON, and so in no event that could be read.
_BETWEEN: Final = b"\0"


class EventBuffer:
    """Events in their order.

    Attributes:
        size: Bytes of all that were added.
    """

    __slots__ = ("_blocks", "_late", "_late_bytes", "size")

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._late: list[bytes] = []
        self._late_bytes = 0
        self.size = 0

    @property
    def is_whole(self) -> bool:
        """Whether all that were added are there."""
        return self.size <= MAX_KEPT_BYTES

    def add(self, event: bytes) -> None:
        """Keep one more."""
        self.size += len(event)
        self._late.append(event)
        self._late_bytes += len(event)
        if self._late_bytes > BLOCK_BYTES:
            self._pack_block()

    def _pack_block(self) -> None:
        if self.is_whole:
            self._blocks.append(zlib.compress(_BETWEEN.join(self._late), _QUICKLY))
        else:
            self._blocks.clear()
        self._late.clear()
        self._late_bytes = 0

    def __iter__(self) -> Iterator[bytes]:
        """Them all, as long as they are `is_whole`; one that could not be read may come in pieces."""
        for block in self._blocks:
            yield from zlib.decompress(block).split(_BETWEEN)
        yield from self._late


# Members of an event that say which answer it belongs to.
ENVELOPE: Final = ("id", "created", "model", "system_fingerprint", "service_tier")
# An event that is to be looked at: calls, an end, a count. What the stream itself ends with is told apart,
# because a pattern that always begins alike is five times as quick.
_TELLING: Final = re.compile(rb'"(?:tool_calls"|finish_reason"\s*:\s*"|usage"\s*:\s*\{)')


class ChatStreamJoiner:
    """One answer as the client sees it, whatever number of answers it is made of.

    Args:
        name: Of the tool of ours.

    Attributes:
        done: Whether the upstream has said that the present answer is at its end.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._first = True
        self._hidden = True  # whether calls of ours may be answered; else they are left out
        self._envelope: JsonObject = {}
        self._role_told = False
        self._text = ""  # what came before, as far as it matters for what comes next
        self._thoughts = 0  # indices of reasoning that are taken
        self._spent: JsonObject = {}
        self._reset_answer()

    def _reset_answer(self) -> None:
        self._events = EventSplitter()
        self._calls = ToolCallFilter(self._name)
        self._kept = EventBuffer()
        self._used: JsonObject = {}
        self._ended = False  # the provider has said why
        self._going = False
        self.done = False

    @property
    def buffered_bytes(self) -> int:
        """Bytes of the present answer that `start_next_answer` reads again."""
        return self._kept.size

    @property
    def calls(self) -> tuple[PartialToolCall, ...]:
        """The calls that are to be answered before the answer goes on; none: it does not go on."""
        return tuple(self._calls.own_calls) if self._going else ()

    def feed(self, chunk: bytes) -> bytes:
        """What the client gets when these bytes come."""
        return b"".join([self._filter_event(event) for event in self._events.feed(chunk)])

    def flush_rest(self) -> bytes:
        """What it gets when the upstream's answer is at its end, not cut."""
        rest = self._events.flush_rest()
        return self._filter_event(rest) if rest else b""

    def start_next_answer(self, *, may_answer_calls: bool) -> JsonObject:
        """Expect the next answer; the assistant message that this one was.

        Args:
            may_answer_calls: Whether calls in it may be answered, too. Else it is the last one, and they are
                left out.
        """
        said = AnswerContent()
        for event in self._kept:
            payload = _decode_object(read_data(event))
            delta = _get_delta(_get_choice(payload))
            said.add_delta(delta)
            self._role_told = self._role_told or "role" in delta
            if self._first and not self._envelope and _get_choice(payload):
                self._envelope = {key: payload[key] for key in ENVELOPE if key in payload}
        message = said.build_message(self._calls.own_calls)
        self._text = said.text or self._text
        self._thoughts += said.reasoning_indices
        self._spent = add_usage(self._spent, self._used)
        self._first, self._hidden = False, may_answer_calls
        self._reset_answer()
        return message

    def write_error(self, body: bytes) -> bytes:
        """Returns the event that tells the client of an error."""
        return b"data: %b\n\n" % body

    def _filter_event(self, event: bytes) -> bytes:
        if self._first and not self._going and DONE not in event and not _TELLING.search(event):
            self._kept.add(event)
            return event
        data = read_data(event)
        if not data:
            return event  # a comment, which keeps the connection alive
        if data == DONE:
            return self._receive_done(event)
        payload = _decode_object(data)
        if payload.get("error"):
            self._going = False
            return event
        return self._filter_payload(event, payload)

    def _receive_done(self, event: bytes) -> bytes:
        self.done = True
        self._going = self._going or (not self._ended and self._may_continue(""))
        return b"" if self._going else event

    def _may_continue(self, reason: str) -> bool:
        """Whether an answer that ends for this reason is one that only wants calls of ours answered."""
        mine = bool(self._calls.own_calls) and not self._calls.others
        return self._hidden and self._kept.is_whole and mine and reason not in CUT_OFF

    def _filter_payload(self, event: bytes, payload: JsonObject) -> bytes:
        usage_holders = _find_usage_holders(payload)
        for holder in usage_holders:
            self._used = holder["usage"]
        choice = _get_choice(payload)
        if self._going:
            return b""
        if not payload:
            return event
        self._kept.add(event)
        changed = bool(choice) and self._filter_choice(choice)
        if self._going:
            usage_holders = _clear_usage(usage_holders)
        if self._first and not changed:
            return event
        if not self._first:
            self._join_payload(payload, choice, usage_holders)
        return (
            replace_data(event, encode_ascii_json(payload))
            if _has_content(payload, choice, usage_holders)
            else b""
        )

    def _filter_choice(self, choice: JsonObject) -> bool:
        """Take our calls out of a choice, and its end if the answer goes on; whether that changed it."""
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
        """Keep the end of an answer back that goes on; whether anything had to be changed."""
        if not isinstance(reason, str) or not reason:
            return False
        self._ended = True
        if not self._calls.own_calls:
            return False
        if self._may_continue(reason):
            self._going = True
            choice["finish_reason"] = None
            return True
        if self._calls.others or reason != TOOL_CALLS:
            return False
        choice["finish_reason"] = STOP  # nothing is left to be called
        return True

    def _join_payload(self, payload: JsonObject, choice: JsonObject, usage_holders: list[JsonObject]) -> None:
        """Make an event of a later answer one of the first."""
        payload.update(self._envelope)
        for holder in usage_holders:
            holder["usage"] = add_usage(self._spent, holder["usage"])
        delta = _get_delta(choice)
        if self._role_told:
            delta.pop("role", None)
        shift_indices(delta.get(DETAILS), self._thoughts)
        content = delta.get("content")
        if isinstance(content, str) and content and self._text:
            delta["content"] = choose_separator(self._text, content) + content
            self._text = ""


def _decode_object(data: bytes) -> JsonObject:
    """What an event carries, if that is an object."""
    try:
        payload = DECODER.decode(data.decode())
    except (ValueError, RecursionError):
        return {}
    return payload if isinstance(payload, dict) else {}


def _get_choice(payload: Mapping[str, Any]) -> JsonObject:
    """The only choice, if it is told of."""
    choices = payload.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return first if isinstance(first, dict) else {}


def _get_delta(choice: Mapping[str, Any]) -> JsonObject:
    held = choice.get("delta")
    return held if isinstance(held, dict) else {}


def _find_usage_holders(payload: JsonObject) -> list[JsonObject]:
    """Where usage stands in an event: at its top, in the choice (Kimi), or beside it (Groq)."""
    groq = payload.get("x_groq")
    holders = (payload, _get_choice(payload), groq if isinstance(groq, dict) else {})
    return [holder for holder in holders if isinstance(holder.get("usage"), dict)]


def _clear_usage(usage_holders: list[JsonObject]) -> list[JsonObject]:
    for holder in usage_holders:
        holder["usage"] = None
    return []


def _has_content(payload: JsonObject, choice: JsonObject, usage_holders: list[JsonObject]) -> bool:
    """Whether anything is left in an event that a client could want."""
    if not choice or usage_holders or choice.get("finish_reason"):
        return bool(payload)
    return any(_get_delta(choice).values())
