"""An answer that is coming in, and the wait for it: what lies between a connection and those who read."""

import asyncio
from typing import Protocol

import httpx

# Unread bytes of a body from which on nothing more is taken from the socket.
UNREAD_BYTES = 32_768


class ResponseSource(Protocol):
    """The connection that an answer comes over."""

    def resume_reading(self) -> None:
        """Take more from the socket."""
        ...

    def abort_exchange(self) -> None:
        """Close the socket now."""
        ...


class NativeResponse:
    """`ports.HttpResponse`: one answer, from the request's last byte on.

    At most one task waits, for the head or for more of the body. Whatever ends its wait early, such as a
    cancellation, ends the exchange.
    """

    __slots__ = (
        "_body",
        "_ended",
        "_error",
        "_held",
        "_loop",
        "_size",
        "_source",
        "_waiter",
        "headed",
        "headers",
        "reason",
        "status",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, source: ResponseSource) -> None:
        self.status = 0
        self.reason = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.headed = False
        self._loop = loop
        self._source: ResponseSource | None = source
        self._body: list[bytes] = []
        self._size = 0
        self._held = False
        self._ended = False
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def wait_for_head(self) -> None:
        """Wait until status and headers have come.

        Raises:
            httpx.TransportError: They never will.
        """
        if not self.headed and self._error is None:
            await self._wait_for_more()
        if not self.headed and self._error is not None:
            raise self._error

    async def read(self) -> bytes:
        """What has come since the last call (`ports.HttpResponse`)."""
        if not self._body and not self._ended and self._error is None:
            await self._wait_for_more()
        body = self._body
        if not body:
            if self._error is not None:
                raise self._error
            return b""
        self._body = []
        self._size = 0
        if self._held and self._source is not None:
            self._held = False
            self._source.resume_reading()
        return body[0] if len(body) == 1 else b"".join(body)

    async def aclose(self) -> None:
        """End the exchange (`ports.HttpResponse`)."""
        if self._source is not None:
            self.set_exception(httpx.ReadError("the answer is closed"))

    async def _wait_for_more(self) -> None:
        self._waiter = waiter = self._loop.create_future()
        came = False
        try:
            await waiter
            came = True
        finally:
            if not came:
                await self.aclose()

    def _wake_reader(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def feed_head(self, status: int, reason: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        """The head has come."""
        self.status, self.reason, self.headers, self.headed = status, reason, headers, True
        self._wake_reader()

    def feed_body(self, piece: bytes) -> bool:
        """Add what has come of the body. True if that is enough for now, until `Source.resume`."""
        self._body.append(piece)
        self._size += len(piece)
        self._held = self._size >= UNREAD_BYTES
        self._wake_reader()
        return self._held

    def feed_eof(self) -> None:
        """The answer is whole; its connection is nothing to it any more."""
        self._ended = True
        self._source = None
        self._wake_reader()

    def set_exception(self, error: BaseException) -> None:
        """Nothing more will come: `error` follows upon what came. The connection is closed."""
        source, self._source = self._source, None
        if source is not None:
            self._error = error
            source.abort_exchange()
            self._wake_reader()
