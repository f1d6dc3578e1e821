"""The client's side of a request: its body, and whether the client is still there.

A client that left shows as starlette's `ClientDisconnect`, wherever it is noticed.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from io import BytesIO
from types import TracebackType
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from compaction_proxy.core.errors import OverloadedError, RequestRefusedError
from compaction_proxy.gateway.body_budget import OUT_OF_MEMORY, RETRY_AFTER_S, BodyHold

# What our server (`server/connection.py`) offers in a scope's extensions; the layers share no module for it.
DEPARTURE = "compaction_proxy.departure"
NOTICE = "notice"
Notice = Callable[[Callable[[], None] | None], None]


def build_too_large_error(limit: int) -> RequestRefusedError:
    """Returns the refusal of a body, decoded or not, that is larger than so many bytes."""
    return RequestRefusedError(413, f"The request body is larger than {limit} bytes.", "request_too_large")


async def stream_body(receive: Receive, ended: asyncio.Event) -> AsyncIterator[bytes]:
    """The request body as it arrives.

    Args:
        receive: The request's ASGI channel.
        ended: Set when nothing more is read from it here, so that `while_connected` may.

    Raises:
        ClientDisconnect: The client left before the body was whole.
    """
    try:
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            more = message.get("more_body", False)
            if body := message.get("body", b""):
                yield body
    finally:
        ended.set()


async def read_body(
    scope: Scope, receive: Receive, limit: int, hold: BodyHold, declared: int | None = None
) -> bytes:
    """Returns the whole request body.

    While the budget of bodies is used up nothing is read, so that the client has to wait.

    Args:
        scope: The request (ASGI).
        receive: The request's ASGI channel.
        limit: The most bytes that are read, unless the budget is smaller.
        hold: Counts the bytes; the caller releases it once it holds the body no more.
        declared: Bytes that it will have, if its head said so.

    Raises:
        RequestRefused: 413, it is larger than the limit; not read at all if declared so.
        Overloaded: There was no room for the rest of it in time.
        ClientDisconnect: The client left before the body was whole.
    """
    limit = min(limit, hold.most_bytes)
    if declared is not None and declared > limit:
        raise build_too_large_error(limit)
    try:
        return await _read_whole_body(scope, receive, limit, hold, declared)
    except MemoryError:
        raise OverloadedError(RETRY_AFTER_S, OUT_OF_MEMORY) from None


async def _read_whole_body(
    scope: Scope, receive: Receive, limit: int, hold: BodyHold, declared: int | None
) -> bytes:
    whole: BytesIO | None = None  # gives its content without a copy
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk: bytes = message.get("body", b"")
        more = message.get("more_body", False)
        goes_on = hold.add_bytes(len(chunk))
        if hold.size_bytes > limit:
            raise build_too_large_error(limit)
        if not goes_on:
            async with _while_connected_by_notice(scope):
                await hold.wait_for_rest(declared if more else hold.size_bytes, limit)
        if whole is None and not more:
            return chunk  # mostly
        whole = whole or BytesIO()
        whole.write(chunk)
        if not more:
            hold.release_unused()
            return whole.getvalue()


def _while_connected_by_notice(scope: Scope) -> AbstractAsyncContextManager[None]:
    """`while_connected` where a departure is noticed without reading: no byte of a body is lost."""
    told = scope.get("extensions", {}).get(DEPARTURE)
    return nullcontext() if told is None else _DisconnectGuard(told[NOTICE])


async def _watch_for_disconnect(
    receive: Receive, after: asyncio.Event | None, presence: asyncio.Timeout
) -> None:
    if after is not None:
        await after.wait()
    while (await receive())["type"] != "http.disconnect":
        pass
    presence.reschedule(0)


@asynccontextmanager
async def _while_connected_by_receive(receive: Receive, after: asyncio.Event | None) -> AsyncIterator[None]:
    """`while_connected` under a server that tells of a departure only those who receive. Costs one task."""
    presence = asyncio.timeout(None)
    try:
        async with presence:
            watcher = asyncio.create_task(_watch_for_disconnect(receive, after, presence))
            try:
                yield
            finally:
                watcher.cancel()
    except TimeoutError:
        if presence.expired():
            raise ClientDisconnect from None
        raise


class _DisconnectGuard:
    """`while_connected` under a server that calls when the client leaves."""

    __slots__ = ("_before", "_gone", "_notice", "_task")

    def __init__(self, notice: Notice) -> None:
        self._notice = notice
        self._task: asyncio.Task[Any] | None = None
        self._before = 0
        self._gone = False

    async def __aenter__(self) -> None:
        task = self._task = asyncio.current_task()
        if task is not None:  # never in a coroutine
            self._before = task.cancelling()
        self._notice(self._cancel_task)

    def _cancel_task(self) -> None:
        if self._task is not None and not self._gone:
            self._gone = True
            self._task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        self._notice(None)
        # Whoever cancelled besides goes first, as with asyncio.timeout.
        left = self._gone and task is not None and task.uncancel() <= self._before
        if left and kind is asyncio.CancelledError:
            raise ClientDisconnect from None


def while_connected(
    scope: Scope, receive: Receive, after: asyncio.Event | None = None
) -> AbstractAsyncContextManager[None]:
    """Run a block only as long as the client is there; it is cancelled at whatever it awaits.

    A server also reports a disconnect once the response is complete, so leave the block right then: work
    that outlives the response does not belong here.

    Args:
        scope: The request (ASGI); under our own server it says how to be told.
        receive: The request's ASGI channel, which nobody else may read meanwhile.
        after: Start looking only when this is set: the block still reads the body (`stream_body`).

    Raises:
        ClientDisconnect: The client left and the block was cancelled.
    """
    told = scope.get("extensions", {}).get(DEPARTURE)
    return _while_connected_by_receive(receive, after) if told is None else _DisconnectGuard(told[NOTICE])
