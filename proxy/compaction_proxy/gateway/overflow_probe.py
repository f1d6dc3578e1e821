"""Detects an answer that refuses the request for its length, before a byte of the answer is relayed."""

import time
from itertools import dropwhile
from typing import Final

import httpx

from compaction_proxy.gateway.upstream import PEEK_BYTES, UpstreamResponse
from compaction_proxy.wires.content_coding import IDENTITY
from compaction_proxy.wires.context_errors import Overflow, condense_error_event, parse_overflow
from compaction_proxy.wires.sse import EventSplitter
from compaction_proxy.wires.wire import Wire

# The longest time, in seconds, for which the beginning of a stream is held back, and the most bytes of it.
# Some beginnings repeat the request's instructions and tools, twice.
HOLD_S: Final = 3.0
HOLD_BYTES: Final = 512 * 1024
_STREAM: Final = "text/event-stream"


async def detect_overflow(answer: UpstreamResponse, wire: Wire) -> Overflow | None:
    """Returns what an answer says about a request that is too long, or None if it is about anything else.

    Some servers refuse inside a stream that has already begun. For a request large enough to be read, the
    beginning of the stream is therefore awaited before the status is relayed, and is relayed with it. While
    the beginning says nothing of the answer yet (`Wire.may_hold_back`), it is held back, for a few seconds at
    most.
    """
    status = answer.response.status
    if status == httpx.codes.OK:
        beginning = await _peek_beginning(answer, wire)
        beginning = condense_error_event(beginning) if len(beginning) > PEEK_BYTES else beginning
        beginning = beginning if b"error" in beginning else b""
    else:
        beginning = await answer.peek(PEEK_BYTES) if status >= httpx.codes.BAD_REQUEST else b""
    return parse_overflow(status, beginning, answer.get_field(b"content-encoding")) if beginning else None


async def _peek_beginning(answer: UpstreamResponse, wire: Wire) -> bytes:
    """Returns the first bytes of an answer, without leading stream events that say nothing of it yet."""
    beginning = await answer.peek(1)
    if not answer.get_field(b"content-type").startswith(_STREAM) or not _is_plain(answer):
        return beginning
    until = time.monotonic() + HOLD_S
    events = EventSplitter()
    whole = events.feed(beginning)
    holding = bool(beginning) and wire.may_hold_back(beginning)
    while holding and len(beginning) < HOLD_BYTES and not answer.is_cut:
        more = await answer.peek_within(len(beginning) + 1, until - time.monotonic())
        late = events.feed(more[len(beginning) :])
        holding = len(more) > len(beginning) and all(map(wire.may_hold_back, late))
        whole += late
        beginning = more
    return b"".join([*dropwhile(wire.may_hold_back, whole), events.flush_rest()])


def _is_plain(answer: UpstreamResponse) -> bool:
    return answer.get_field(b"content-encoding").strip().lower() in IDENTITY
