"""Defines the response object, which buffers the body of a response until the reader takes it."""

import asyncio
from typing import Protocol

import httpx

# Once this many bytes of a body are unread, the connection stops reading from the socket.
MAX_UNREAD_BYTES = 32_768


class ResponseSource(Protocol):
    """The methods of a connection that its response calls."""

    def resume_reading(self) -> None:
        """Reads from the socket again."""
        ...

    def abort_exchange(self) -> None:
        """Closes the socket now."""
        ...


class NativeResponse:
    """Implements `types.HttpResponse`. It is created when the request is sent.

    At most one task may wait for the header fields or for more of the body. If that task is cancelled while
    it waits, the response ends and its connection is closed.
    """

    __slots__ = (
        "_body",
        "_ended",
        "_error",
        "_is_source_paused",
        "_loop",
        "_source",
        "_unread_bytes",
        "_waiter",
        "has_head",
        "headers",
        "reason",
        "status",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, source: ResponseSource) -> None:
        self.status = 0
        self.reason = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.has_head = False
        self._loop = loop
        self._source: ResponseSource | None = source
        self._body: list[bytes] = []
        self._unread_bytes = 0
        self._is_source_paused = False
        self._ended = False
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def wait_for_head(self) -> None:
        """Waits until the status and all header fields have arrived.

        Raises:
            httpx.TransportError: If the response ended before all header fields had arrived.
        """
        if not self.has_head and self._error is None:
            await self._wait_for_more()
        if not self.has_head and self._error is not None:
            raise self._error

    async def read(self) -> bytes:
        """Waits for body bytes, and returns all that arrived since the last call.

        Returns empty bytes at the end of the body. `types.HttpResponse.read` lists the errors.
        """
        if not self._body and not self._ended and self._error is None:
            await self._wait_for_more()
        body = self._body
        if not body:
            if self._error is not None:
                raise self._error
            return b""
        self._body = []
        self._unread_bytes = 0
        if self._is_source_paused and self._source is not None:
            self._is_source_paused = False
            self._source.resume_reading()
        return body[0] if len(body) == 1 else b"".join(body)

    async def aclose(self) -> None:
        """Closes the connection if the response is not complete. Otherwise does nothing."""
        if self._source is not None:
            self.set_exception(httpx.ReadError("the response is closed"))

    async def _wait_for_more(self) -> None:
        self._waiter = waiter = self._loop.create_future()
        is_woken = False
        try:
            await waiter
            is_woken = True
        finally:
            if not is_woken:
                await self.aclose()

    def _wake_reader(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def feed_head(self, status: int, reason: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        """Stores the status and the header fields, and wakes the task that waits for them."""
        self.status, self.reason, self.headers, self.has_head = status, reason, headers, True
        self._wake_reader()

    def feed_body(self, piece: bytes) -> bool:
        """Adds a part of the body, and wakes the task that waits for it.

        Returns whether the connection must stop reading until `ResponseSource.resume_reading` is called.
        """
        self._body.append(piece)
        self._unread_bytes += len(piece)
        self._is_source_paused = self._unread_bytes >= MAX_UNREAD_BYTES
        self._wake_reader()
        return self._is_source_paused

    def feed_eof(self) -> None:
        """Records that the response is complete. From then on, the response no longer uses its connection."""
        self._ended = True
        self._source = None
        self._wake_reader()

    def set_exception(self, error: BaseException) -> None:
        """Ends an incomplete response with `error`, and closes its connection.

        The reader first gets the bytes that have already arrived, then `error`. If the response is already
        complete or has already failed, nothing happens.
        """
        source, self._source = self._source, None
        if source is not None:
            self._error = error
            source.abort_exchange()
            self._wake_reader()
