"""Reads and decodes the client's request body, and notices when the client disconnects.

The functions that notice a disconnect raise starlette's `ClientDisconnect`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from io import BytesIO
from types import TracebackType
from typing import Any, Final, NamedTuple

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from compaction_proxy.core.errors import RequestRefusedError, UnreadableBodyError, build_shortage_error
from compaction_proxy.gateway.body_budget import (
    MAX_DECODERS,
    SMALL_BYTES,
    BodyHold,
)
from compaction_proxy.gateway.headers import Headers, get_content_length
from compaction_proxy.support.offload import FairQueue
from compaction_proxy.wires.content_coding import decode_body, parse_codings

# The proxy's own server puts a function into `scope["extensions"][DEPARTURE][NOTICE]`. The function registers
# a callback, which the server calls when the client disconnects. `server/connection.py` also
# defines these strings, because the two modules import nothing in common.
DEPARTURE = "compaction_proxy.departure"
NOTICE = "notice"
# The function in `scope["extensions"][DEPARTURE][HAS_LEFT]` returns whether the client has disconnected.
HAS_LEFT = "has_left"
SetDisconnectCallback = Callable[[Callable[[], None] | None], None]


def _build_too_large_error(limit_bytes: int) -> RequestRefusedError:
    """Returns the error for a body that is larger than `limit_bytes` before or after it is decoded."""
    return RequestRefusedError(
        413, f"The request body is larger than {limit_bytes} bytes.", "request_too_large"
    )


async def stream_body(receive: Receive) -> AsyncIterator[bytes]:
    """Yields the request body as it arrives. `receive` is the ASGI receive channel of the request.

    Raises:
        ClientDisconnect: If the client left before the body was complete.
    """
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        more = message.get("more_body", False)
        if body := message.get("body", b""):
            yield body


async def read_body(scope: Scope, receive: Receive, limit_bytes: int, hold: BodyHold) -> bytes:
    """Returns the whole request body.

    While the body budget is used up, the function reads nothing, so the client cannot send more.

    Args:
        scope: The ASGI scope of the request.
        receive: The ASGI receive channel of the request.
        limit_bytes: The largest size of the body, in bytes. If the whole body budget is smaller, it is the
            limit instead.
        hold: Counts the bytes. The caller releases it when it no longer holds the body.

    Raises:
        RequestRefusedError: With status 413 if the body is larger than the limit. If the declared size is
            already larger, nothing is read.
        OverloadedError: If no room for the rest of the body became free in time, or memory has run out.
        ClientDisconnect: If the client left before the body was complete.
    """
    limit_bytes = min(limit_bytes, hold.budget.limit_bytes)
    declared_bytes = get_content_length(scope["headers"])
    if declared_bytes is not None and declared_bytes > limit_bytes:
        raise _build_too_large_error(limit_bytes)
    try:
        return await _read_whole_body(scope, receive, limit_bytes, hold, declared_bytes)
    except MemoryError:
        raise build_shortage_error() from None


async def _read_whole_body(
    scope: Scope, receive: Receive, limit_bytes: int, hold: BodyHold, declared_bytes: int | None
) -> bytes:
    whole: BytesIO | None = None  # `BytesIO.getvalue` makes no copy
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk: bytes = message.get("body", b"")
        more = message.get("more_body", False)
        goes_on = hold.add_bytes(len(chunk))
        if hold.size_bytes > limit_bytes:
            raise _build_too_large_error(limit_bytes)
        if not goes_on:
            with while_connected(scope):
                await hold.wait_for_rest(declared_bytes if more else hold.size_bytes, limit_bytes)
        if whole is None and not more:
            return chunk  # most bodies arrive in one chunk
        whole = whole or BytesIO()
        whole.write(chunk)
        if not more:
            hold.release_unused()
            return whole.getvalue()


class _DisconnectGuard:
    """Implements `while_connected` for a server that calls back when the client leaves."""

    __slots__ = ("_before", "_has_left", "_set_callback", "_task")

    def __init__(self, set_callback: SetDisconnectCallback, task: asyncio.Task[Any]) -> None:
        self._set_callback = set_callback
        self._task = task
        self._before = task.cancelling()
        self._has_left = False

    def __enter__(self) -> None:
        self._set_callback(self._cancel_task)

    def _cancel_task(self) -> None:
        if not self._has_left:
            self._has_left = True
            self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._set_callback(None)
        # If other code also cancelled the task, that cancellation stays in effect, as with asyncio.timeout.
        is_ours = self._has_left and self._task.uncancel() <= self._before
        if is_ours and kind is asyncio.CancelledError:
            raise ClientDisconnect from None


def while_connected(scope: Scope) -> AbstractContextManager[None]:
    """Returns a context manager whose block runs only as long as the client is connected.

    If the client disconnects, the block is cancelled where it waits.

    A client may disconnect as soon as it has the response. So the block must end when the response ends, and
    work that continues after the response must be outside the block.

    Args:
        scope: The ASGI scope of the request. The proxy's own server puts a function into it that
            reports a disconnect (`NOTICE`). On other servers, the block always runs to its end.

    Raises:
        ClientDisconnect: If the client left, and the block was cancelled.
    """
    extension = scope.get("extensions", {}).get(DEPARTURE)
    task = asyncio.current_task()
    if extension is None or task is None:
        return nullcontext()
    return _DisconnectGuard(extension[NOTICE], task)


CONTENT_ENCODING: Final = b"content-encoding"
UNDECODABLE: Final = "The request body cannot be decoded. Its encoding is unknown, or it is damaged."
# An encoded body of at most this many bytes is first decoded on the event loop. If it has more bytes, or more
# than `_INLINE_DECODED_BYTES` after decoding, it is decoded in a thread.
_INLINE_BYTES: Final = 16_384
_INLINE_DECODED_BYTES: Final = 131_072
# The decoded size is unknown in advance. The first attempt in a thread reserves room for `_USUAL_BYTES`, or
# for `_USUAL_RATIO` times the encoded size if that is more. If the decoded body is larger, it is decoded
# again, with room for the largest body that is allowed.
_USUAL_BYTES: Final = 2 * 1024 * 1024
_USUAL_RATIO: Final = 32

# Decoding has its own thread pool. A thread cannot be stopped, so decoding continues even if the request has
# already ended. Because the pool is separate, this delays no other kind of work.
_POOL: Final = ThreadPoolExecutor(max_workers=MAX_DECODERS, thread_name_prefix="decode")
_TURNS: Final = FairQueue(MAX_DECODERS)


class OriginalRequest(NamedTuple):
    """A request with an encoded body or with digests of its body, as the client sent it.

    Attributes:
        scope: The ASGI scope of the request.
        raw: The body, encoded if the client has encoded it.
    """

    scope: Scope
    raw: bytes


async def decode_request_body(raw: bytes, headers: Headers, hold: BodyHold, limit_bytes: int) -> bytes | None:
    """Returns the decoded body, or `raw` itself if the body is not encoded.

    `hold` then counts the decoded body in addition to `raw`. Returns None if the body cannot be decoded,
    because its coding is unknown or it is damaged.

    Args:
        raw: The body as the client sent it.
        headers: The header fields of the request.
        hold: Counts the bytes of the request.
        limit_bytes: The most bytes that the decoded body may have. The limit is lower if the budget can never
            have room for this many bytes in addition to `raw`.

    Raises:
        RequestRefusedError: With status 413 if the decoded body is larger than the limit.
        OverloadedError: If no room for the decoded body became free in time.
    """
    codings = parse_codings(value for name, value in headers if name == CONTENT_ENCODING)
    if not codings:
        return raw if codings is not None else None
    most_bytes = hold.budget.limit_bytes
    limit_bytes = min(limit_bytes, most_bytes, most_bytes + SMALL_BYTES - len(raw))
    try:
        decoded = await _decode_with_limit(raw, codings, hold, limit_bytes)
    except UnreadableBodyError:
        return None
    finally:
        hold.release_unused()
    if decoded is None:
        raise _build_too_large_error(limit_bytes)
    return decoded


async def decode_or_refuse(raw: bytes, headers: Headers, hold: BodyHold, limit_bytes: int) -> bytes:
    """Returns the decoded body as `decode_request_body` does, but refuses a body that cannot be decoded.

    Raises:
        RequestRefusedError: With status 413 if the decoded body is larger than the limit. With status 415 if
            the body cannot be decoded.
        OverloadedError: If no room for the decoded body became free in time.
    """
    decoded = await decode_request_body(raw, headers, hold, limit_bytes)
    if decoded is None:
        raise RequestRefusedError(415, UNDECODABLE, "encoded")
    return decoded


async def _decode_with_limit(
    raw: bytes, codings: Sequence[str], hold: BodyHold, limit_bytes: int
) -> bytes | None:
    """Decodes a body on the event loop or in a thread, first with a low size limit, then with a higher one.

    Returns None if the decoded body is longer than `limit_bytes`.

    Raises:
        UnreadableBodyError: If the body is damaged or its coding is unknown (`decode_body`).
        OverloadedError: If no room for the decoded body became free in time.
    """
    decoded = None
    if len(raw) <= _INLINE_BYTES:
        decoded = decode_body(raw, codings, min(limit_bytes, _INLINE_DECODED_BYTES))
    usual_bytes = min(limit_bytes, max(_USUAL_BYTES, _USUAL_RATIO * len(raw)))
    for most_bytes in dict.fromkeys((usual_bytes, limit_bytes)):
        if decoded is None:
            decoded = await _decode_in_worker(raw, codings, hold, most_bytes)
    if decoded is not None and not hold.add_bytes(len(decoded)):
        await hold.wait_for_room(0)
    return decoded


async def _decode_in_worker(
    raw: bytes, codings: Sequence[str], hold: BodyHold, limit_bytes: int
) -> bytes | None:
    work = partial(decode_body, raw, codings, limit_bytes)
    while True:
        # A request that waits for a turn or a slot reserves no room.
        async with _TURNS.wait_for_turn(), hold.budget.decoder_slots:
            if hold.try_reserve_rest(limit_bytes):
                return await asyncio.get_running_loop().run_in_executor(_POOL, work)
        await hold.wait_for_room(limit_bytes)
