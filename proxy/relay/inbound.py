"""The client's side of a request: its body, and whether the client is still there.

A client that left shows as starlette's `ClientDisconnect`, wherever it is noticed.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from proxy.errors import RequestRefused
from proxy.relay.headers import content_length


def _too_large(limit: int) -> RequestRefused:
    return RequestRefused(413, f"The request body is larger than {limit} bytes.", "request_too_large")


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


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole request body.

    Raises:
        RequestRefused: 413, it is larger than `limit` bytes; not read at all if declared so.
        ClientDisconnect: The client left before the body was whole.
    """
    if (content_length(scope["headers"]) or 0) > limit:
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    async for chunk in stream_body(receive, asyncio.Event()):
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        chunks.append(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def _watch(receive: Receive, after: asyncio.Event | None, presence: asyncio.Timeout) -> None:
    if after is not None:
        await after.wait()
    while (await receive())["type"] != "http.disconnect":
        pass
    presence.reschedule(0)


@asynccontextmanager
async def while_connected(receive: Receive, after: asyncio.Event | None = None) -> AsyncIterator[None]:
    """Run the block only as long as the client is there; it is cancelled at whatever it awaits.

    A server also reports a disconnect once the response is complete, so leave the block right then: work
    that outlives the response does not belong here. Costs one task.

    Args:
        receive: The request's ASGI channel, which nobody else may read meanwhile.
        after: Start looking only when this is set: the block still reads the body (`stream_body`).

    Raises:
        ClientDisconnect: The client left and the block was cancelled.
    """
    presence = asyncio.timeout(None)
    try:
        async with presence:
            watcher = asyncio.create_task(_watch(receive, after, presence))
            try:
                yield
            finally:
                watcher.cancel()
    except TimeoutError:
        if presence.expired():
            raise ClientDisconnect from None
        raise
