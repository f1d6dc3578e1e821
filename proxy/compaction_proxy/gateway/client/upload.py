"""A body on its way out that is too large for one write, or comes as a stream."""

import asyncio
from collections.abc import AsyncIterator, Callable

import httpx

# Written at a time, and between two turns of the loop: encryption takes about a millisecond a megabyte.
SLICE_BYTES = 131_072
TURN_BYTES = 524_288


class Upload:
    """Sends a body as fast as the other side takes it.

    Args:
        transport: Where to; its `pause_writing` and `resume_writing` come here as `block` and `unblock`.
        sent: Called once, when the body is out, or with what has prevented it.
        blocked: Whether the transport has paused its writer already.

    Attributes:
        blocked: Whether the other side takes nothing at present.
    """

    __slots__ = ("_sent", "_task", "_transport", "_turn_bytes", "_unblocked", "blocked")

    def __init__(
        self,
        transport: asyncio.WriteTransport,
        sent: Callable[[BaseException | None], None],
        *,
        blocked: bool,
    ) -> None:
        self.blocked = blocked
        self._transport = transport
        self._sent = sent
        self._turn_bytes = 0
        self._unblocked: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, body: bytes | AsyncIterator[bytes], length: int | None) -> None:
        """Begin; `body` and `length` as in `ports.HttpRequest`."""
        sending = self._put(body) if isinstance(body, bytes) else self._stream(body, length)
        self._task = asyncio.get_running_loop().create_task(sending)
        self._task.add_done_callback(self._done)

    def stop(self) -> None:
        """Send nothing more. A stream is closed."""
        if self._task is not None:
            self._task.cancel()

    def block(self) -> None:
        """The other side takes nothing more for now."""
        self.blocked = True

    def unblock(self) -> None:
        """The other side takes more."""
        self.blocked = False
        if self._unblocked is not None and not self._unblocked.done():
            self._unblocked.set_result(None)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._sent(httpx.WriteError("the upload was stopped") if task.cancelled() else task.exception())

    async def _stream(self, body: AsyncIterator[bytes], length: int | None) -> None:
        try:
            await (self._chunked(body) if length is None else self._declared(body, length))
        finally:
            close = getattr(body, "aclose", None)
            if close is not None:
                await close()

    async def _chunked(self, body: AsyncIterator[bytes]) -> None:
        async for piece in body:
            if piece:
                await self._put(b"%x\r\n" % len(piece))
                await self._put(piece)
                await self._put(b"\r\n")
        await self._put(b"0\r\n\r\n")

    async def _declared(self, body: AsyncIterator[bytes], length: int) -> None:
        left = length
        async for piece in body:
            left -= len(piece)
            if left < 0:
                break
            await self._put(piece)
        if left:
            raise httpx.LocalProtocolError("the body is not as long as declared")

    async def _put(self, data: bytes) -> None:
        """Write, and come back when more is wanted."""
        view = memoryview(data)
        for start in range(0, len(view), SLICE_BYTES):
            self._transport.write(view[start : start + SLICE_BYTES])
            self._turn_bytes += min(SLICE_BYTES, len(view) - start)
            if self.blocked:
                self._unblocked = asyncio.get_running_loop().create_future()
                await self._unblocked
                self._turn_bytes = 0
            elif self._turn_bytes >= TURN_BYTES:
                self._turn_bytes = 0
                await asyncio.sleep(0)
