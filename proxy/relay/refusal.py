"""Whether an answer may be a refusal of the request for its length: asked before a byte of it is relayed."""

import time

import httpx

from proxy.dialects.dialect import Dialect
from proxy.relay.exchange import PEEK_BYTES, Answer

# Longest time, in seconds, that the beginning of a stream is held.
HOLD_S = 3.0


async def may_be_refusal(answer: Answer, dialect: Dialect) -> bool:
    """Whether an answer may say that the request is too long: an error, or a 200 that begins with one.

    Some servers refuse inside a stream that has already begun. For a request large enough to have been read
    the beginning is awaited before the status is relayed; it is relayed with it. Where that says nothing of
    the answer yet (`Dialect.opening`), it is held for a few seconds at most.
    """
    if answer.response.status != httpx.codes.OK:
        return answer.response.status >= httpx.codes.BAD_REQUEST
    seen = await answer.peek(1)
    until = time.monotonic() + HOLD_S
    while 0 < len(seen) < PEEK_BYTES and not answer.cut and dialect.opening(seen):
        more = await answer.peek_within(len(seen) + 1, until - time.monotonic())
        if len(more) == len(seen):
            break
        seen = more
    return b"error" in seen[:PEEK_BYTES]
