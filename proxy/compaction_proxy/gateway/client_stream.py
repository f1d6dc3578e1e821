"""Reads the client's request body, and notices when the client disconnects.

All functions here report a disconnect by raising starlette's `ClientDisconnect`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, nullcontext
from io import BytesIO
from types import TracebackType
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from compaction_proxy.core.errors import OverloadedError, RequestRefusedError
from compaction_proxy.gateway.body_budget import OUT_OF_MEMORY, RETRY_AFTER_S, BodyHold

# Our own server offers a function as `scope["extensions"][DEPARTURE][NOTICE]`. The function registers a
# callback for the moment when the client disconnects. `server/connection.py` defines these two strings once
# more, because the two layers share no module.
DEPARTURE = "compaction_proxy.departure"
NOTICE = "notice"
SetDisconnectCallback = Callable[[Callable[[], None] | None], None]


def build_too_large_error(limit_bytes: int) -> RequestRefusedError:
    """Returns the error for a body that is larger than `limit_bytes` before or after it is decoded."""
    return RequestRefusedError(
        413, f"The request body is larger than {limit_bytes} bytes.", "request_too_large"
    )


async def stream_body(receive: Receive) -> AsyncIterator[bytes]:
    """Yields the request body as it arrives. `receive` is the ASGI receive channel of the request.

    Raises:
        ClientDisconnect: The client left before the body was complete.
    """
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        more = message.get("more_body", False)
        if body := message.get("body", b""):
            yield body


async def read_body(
    scope: Scope, receive: Receive, limit_bytes: int, hold: BodyHold, declared_bytes: int | None = None
) -> bytes:
    """Returns the whole request body.

    While the body budget is used up, this function reads nothing, so the client cannot send more.

    Args:
        scope: The ASGI scope of the request.
        receive: The ASGI receive channel of the request.
        limit_bytes: The largest size of the body, in bytes. If the whole budget is smaller, the budget is the
            limit.
        hold: Counts the bytes. The caller releases it when it no longer holds the body.
        declared_bytes: Size of the body in bytes from the request's head; None if it is not declared.

    Raises:
        RequestRefusedError: 413, the body is larger than the limit. If the declared size is already larger,
            nothing is read.
        OverloadedError: No room for the rest of the body became free in time, or memory has run out.
        ClientDisconnect: The client left before the body was complete.
    """
    limit_bytes = min(limit_bytes, hold.limit_bytes)
    if declared_bytes is not None and declared_bytes > limit_bytes:
        raise build_too_large_error(limit_bytes)
    try:
        return await _read_whole_body(scope, receive, limit_bytes, hold, declared_bytes)
    except MemoryError:
        raise OverloadedError(RETRY_AFTER_S, OUT_OF_MEMORY) from None


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
            raise build_too_large_error(limit_bytes)
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

    __slots__ = ("_before", "_gone", "_notice", "_task")

    def __init__(self, set_callback: SetDisconnectCallback) -> None:
        self._notice = set_callback
        self._task: asyncio.Task[Any] | None = None
        self._before = 0
        self._gone = False

    def __enter__(self) -> None:
        task = self._task = asyncio.current_task()
        if task is not None:  # always true in a coroutine
            self._before = task.cancelling()
        self._notice(self._cancel_task)

    def _cancel_task(self) -> None:
        if self._task is not None and not self._gone:
            self._gone = True
            self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        self._notice(None)
        # If the task was also cancelled from elsewhere, that cancellation goes on, as with asyncio.timeout.
        client_left = self._gone and task is not None and task.uncancel() <= self._before
        if client_left and kind is asyncio.CancelledError:
            raise ClientDisconnect from None


def while_connected(scope: Scope) -> AbstractContextManager[None]:
    """Runs a block only as long as the client is connected. A disconnect cancels what the block awaits.

    A server also reports a disconnect once the response is complete. So the block must end when the response
    ends. Work that continues after the response must be outside the block.

    Args:
        scope: The ASGI scope of the request. Our own server offers disconnect notices in it. On other
            servers, the block runs to its end.

    Raises:
        ClientDisconnect: The client left, and the block was cancelled.
    """
    extension = scope.get("extensions", {}).get(DEPARTURE)
    return nullcontext() if extension is None else _DisconnectGuard(extension[NOTICE])
