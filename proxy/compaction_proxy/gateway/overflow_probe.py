"""Whether an answer is a refusal of the request for its length: looked at before a byte of it is relayed."""

import time
from itertools import dropwhile
from typing import Final

import httpx

from compaction_proxy.gateway.upstream import PEEK_BYTES, Answer
from compaction_proxy.wires.context_errors import Overflow, brief, detect
from compaction_proxy.wires.decompress import IDENTITY
from compaction_proxy.wires.sse import Events
from compaction_proxy.wires.wire import Dialect

# Longest time, in seconds, that the beginning of a stream is held, and how much of it: some repeat the
# request's instructions and tools, twice.
HOLD_S: Final = 3.0
HOLD_BYTES: Final = 512 * 1024
_STREAM: Final = "text/event-stream"


async def too_long(answer: Answer, dialect: Dialect) -> Overflow | None:
    """What an answer says about a request that is too long; None if it is about anything else.

    Some servers refuse inside a stream that has already begun. For a request large enough to have been read
    the beginning is awaited before the status is relayed; it is relayed with it. Where that says nothing of
    the answer yet (`Dialect.opening`), it is held for a few seconds at most.
    """
    status = answer.response.status
    if status == httpx.codes.OK:
        seen = await _beginning(answer, dialect)
        seen = brief(seen) if len(seen) > PEEK_BYTES else seen
        seen = seen if b"error" in seen else b""
    else:
        seen = await answer.peek(PEEK_BYTES) if status >= httpx.codes.BAD_REQUEST else b""
    return detect(status, seen, answer.field(b"content-encoding")) if seen else None


async def _beginning(answer: Answer, dialect: Dialect) -> bytes:
    """The first bytes that come, without the events of a stream that say nothing of its answer yet."""
    seen = await answer.peek(1)
    if not answer.field(b"content-type").startswith(_STREAM) or not _plain(answer):
        return seen
    until = time.monotonic() + HOLD_S
    events = Events()
    whole = events.feed(seen)
    holding = bool(seen) and dialect.opening(seen)
    while holding and len(seen) < HOLD_BYTES and not answer.cut:
        more = await answer.peek_within(len(seen) + 1, until - time.monotonic())
        late = events.feed(more[len(seen) :])
        holding = len(more) > len(seen) and all(map(dialect.opening, late))
        whole += late
        seen = more
    return b"".join([*dropwhile(dialect.opening, whole), events.rest()])


def _plain(answer: Answer) -> bool:
    return answer.field(b"content-encoding").strip().lower() in IDENTITY
