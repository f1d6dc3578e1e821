"""Detects responses that refuse a request as too long, before any byte of them is relayed to the client."""

import time
from itertools import dropwhile
from typing import Final

import httpx

from compaction_proxy.gateway.upstream import PEEK_BYTES, UpstreamResponse
from compaction_proxy.wires.content_coding import IDENTITY
from compaction_proxy.wires.context_errors import Overflow, condense_error_event, parse_overflow
from compaction_proxy.wires.sse import EventSplitter
from compaction_proxy.wires.wire import Wire

# The proxy holds back the beginning of a stream for at most this many seconds, and at most `HOLD_BYTES` bytes
# of it. Then it relays the stream. The number of bytes is large, because some streams begin with two copies
# of the request's instructions and tools.
HOLD_S: Final = 3.0
HOLD_BYTES: Final = 512 * 1024


async def detect_overflow(answer: UpstreamResponse, wire: Wire) -> Overflow | None:
    """Returns what a response says about the request's length, if it refuses the request as too long.

    Returns None for any other response.

    Some servers send status 200 and refuse the request only inside the stream. So the function reads the
    beginning of a stream before the proxy relays it to the client. It reads until a part of the model's reply
    comes (`Wire.may_hold_back_stream`), but for at most `HOLD_S` seconds and about `HOLD_BYTES` bytes. The
    bytes that it has read can still be relayed.
    """
    status = answer.response.status
    if status == httpx.codes.OK:
        beginning = await _peek_beginning(answer, wire)
        beginning = condense_error_event(beginning) if len(beginning) > PEEK_BYTES else beginning
        beginning = beginning if beginning.find(b"error") >= 0 else b""
    else:
        beginning = await answer.peek(PEEK_BYTES) if status >= httpx.codes.BAD_REQUEST else b""
    return parse_overflow(status, beginning, answer.get_field(b"content-encoding")) if beginning else None


async def _peek_beginning(answer: UpstreamResponse, wire: Wire) -> bytes:
    """Returns the first bytes of a response.

    If the response is an uncompressed stream, the function also waits until a part of the model's reply or an
    error comes, for at most `HOLD_S` seconds. The result then leaves out the events before that.
    """
    beginning = await answer.peek(1)
    is_plain = answer.get_field(b"content-encoding").strip().lower() in IDENTITY
    if not is_plain or not answer.is_stream:
        return beginning
    until = time.monotonic() + HOLD_S
    events = EventSplitter()
    whole = events.feed(beginning)
    holding = bool(beginning) and wire.may_hold_back_stream(beginning)
    while holding and len(beginning) < HOLD_BYTES and not answer.is_cut:
        more = await answer.peek_with_timeout(len(beginning) + 1, until - time.monotonic())
        late = events.feed(more[len(beginning) :])
        holding = len(more) > len(beginning) and all(map(wire.may_hold_back_stream, late))
        whole += late
        beginning = more
    return b"".join([*dropwhile(wire.may_hold_back_stream, whole), events.flush_rest()])
