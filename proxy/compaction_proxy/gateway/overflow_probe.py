"""Whether an answer is a refusal of the request for its length: looked at before a byte of it is relayed."""

import time
from itertools import dropwhile
from typing import Final

import httpx

from compaction_proxy.gateway.upstream import PEEK_BYTES, UpstreamResponse
from compaction_proxy.wires.context_errors import Overflow, condense_error_event, parse_overflow
from compaction_proxy.wires.decompress import IDENTITY
from compaction_proxy.wires.sse import EventSplitter
from compaction_proxy.wires.wire import Wire

# Longest time, in seconds, that the beginning of a stream is held, and how much of it: some repeat the
# request's instructions and tools, twice.
HOLD_S: Final = 3.0
HOLD_BYTES: Final = 512 * 1024
_STREAM: Final = "text/event-stream"


async def detect_overflow(answer: UpstreamResponse, wire: Wire) -> Overflow | None:
    """What an answer says about a request that is too long; None if it is about anything else.

    Some servers refuse inside a stream that has already begun. For a request large enough to have been read
    the beginning is awaited before the status is relayed; it is relayed with it. Where that says nothing of
    the answer yet (`Wire.opening`), it is held for a few seconds at most.
    """
    status = answer.response.status
    if status == httpx.codes.OK:
        seen = await _peek_beginning(answer, wire)
        seen = condense_error_event(seen) if len(seen) > PEEK_BYTES else seen
        seen = seen if b"error" in seen else b""
    else:
        seen = await answer.peek(PEEK_BYTES) if status >= httpx.codes.BAD_REQUEST else b""
    return parse_overflow(status, seen, answer.get_field(b"content-encoding")) if seen else None


async def _peek_beginning(answer: UpstreamResponse, wire: Wire) -> bytes:
    """The first bytes that come, without the events of a stream that say nothing of its answer yet."""
    seen = await answer.peek(1)
    if not answer.get_field(b"content-type").startswith(_STREAM) or not _is_plain(answer):
        return seen
    until = time.monotonic() + HOLD_S
    events = EventSplitter()
    whole = events.feed(seen)
    holding = bool(seen) and wire.may_hold_back(seen)
    while holding and len(seen) < HOLD_BYTES and not answer.is_cut:
        more = await answer.peek_within(len(seen) + 1, until - time.monotonic())
        late = events.feed(more[len(seen) :])
        holding = len(more) > len(seen) and all(map(wire.may_hold_back, late))
        whole += late
        seen = more
    return b"".join([*dropwhile(wire.may_hold_back, whole), events.flush_rest()])


def _is_plain(answer: UpstreamResponse) -> bool:
    return answer.get_field(b"content-encoding").strip().lower() in IDENTITY
