"""One HTTP/1.1 connection to an upstream: requests out, answers in, one exchange after the other."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Protocol, cast

import httpx

from compaction_proxy.gateway.client.parser import ResponseParser
from compaction_proxy.gateway.client.response import NativeResponse

# Written at a time, and between two turns of the loop: encryption takes about a millisecond a megabyte.
SLICE_BYTES = 131_072
TURN_BYTES = 524_288


class BodyUploader:
    """Sends a body as fast as the other side takes it.

    Args:
        transport: Where to; its `pause_writing` and `resume_writing` come here as `pause` and `resume`.
        on_done: Called once, when the body is out, or with what has prevented it.
        blocked: Whether the transport has paused its writer already.

    Attributes:
        blocked: Whether the other side takes nothing at present.
    """

    __slots__ = ("_sent", "_task", "_transport", "_turn_bytes", "_unblocked", "blocked")

    def __init__(
        self,
        transport: asyncio.WriteTransport,
        on_done: Callable[[BaseException | None], None],
        *,
        blocked: bool,
    ) -> None:
        self.blocked = blocked
        self._transport = transport
        self._sent = on_done
        self._turn_bytes = 0
        self._unblocked: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, body: bytes | AsyncIterator[bytes], length: int | None) -> None:
        """Begin; `body` and `length` as in `ports.HttpRequest`."""
        sending = self._write_slices(body) if isinstance(body, bytes) else self._upload_stream(body, length)
        self._task = asyncio.get_running_loop().create_task(sending)
        self._task.add_done_callback(self._report_result)

    def stop(self) -> None:
        """Send nothing more. A stream is closed."""
        if self._task is not None:
            self._task.cancel()

    def pause(self) -> None:
        """The other side takes nothing more for now."""
        self.blocked = True

    def resume(self) -> None:
        """The other side takes more."""
        self.blocked = False
        if self._unblocked is not None and not self._unblocked.done():
            self._unblocked.set_result(None)

    def _report_result(self, task: asyncio.Task[None]) -> None:
        self._sent(httpx.WriteError("the upload was stopped") if task.cancelled() else task.exception())

    async def _upload_stream(self, body: AsyncIterator[bytes], length: int | None) -> None:
        try:
            await (self._upload_chunked(body) if length is None else self._upload_declared(body, length))
        finally:
            close = getattr(body, "aclose", None)
            if close is not None:
                await close()

    async def _upload_chunked(self, body: AsyncIterator[bytes]) -> None:
        async for piece in body:
            if piece:
                await self._write_slices(b"%x\r\n" % len(piece))
                await self._write_slices(piece)
                await self._write_slices(b"\r\n")
        await self._write_slices(b"0\r\n\r\n")

    async def _upload_declared(self, body: AsyncIterator[bytes], length: int) -> None:
        left = length
        async for piece in body:
            left -= len(piece)
            if left < 0:
                break
            await self._write_slices(piece)
        if left:
            raise httpx.LocalProtocolError("the body is not as long as declared")

    async def _write_slices(self, data: bytes) -> None:
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


# A body up to this goes out with its head in one write, in bytes.
SMALL_BYTES = 65_536
# A timer that would fire this much too early is not moved, in seconds.
TIMER_SLACK_S = 0.001


class UnansweredError(Exception):
    """A connection that had served before ended unanswered: the request may go out again."""


class ConnectionOwner(Protocol):
    """Who keeps connections."""

    def add(self, connection: "UpstreamConnection") -> None:
        """The connection stands."""
        ...

    def release(self, connection: "UpstreamConnection") -> None:
        """The exchange is over and the connection could serve another."""
        ...

    def remove(self, connection: "UpstreamConnection") -> None:
        """The connection is closed; may be said more than once."""
        ...


class UpstreamConnection(asyncio.BufferedProtocol):
    """A connection, from its making to its end. At most one exchange at a time.

    Args:
        owner: Is told when the connection stands, when an exchange is over, and when the connection is.
        buffer: Where the loop puts what has come. Its content is used up before anything else happens, so
            that all connections of a thread may share it.

    Attributes:
        idle_since: When it last served, by the loop's clock.
    """

    __slots__ = (
        "_answer",
        "_blocked",
        "_buffer",
        "_closed",
        "_heard",
        "_heard_at",
        "_loop",
        "_made",
        "_owner",
        "_parser",
        "_paused",
        "_served",
        "_silence_s",
        "_timer",
        "_transport",
        "_upload",
        "idle_since",
    )

    def __init__(self, owner: ConnectionOwner, buffer: memoryview) -> None:
        self.idle_since = 0.0
        self._owner = owner
        self._buffer = buffer
        self._loop = asyncio.get_running_loop()
        self._answer: NativeResponse | None = None
        self._upload: BodyUploader | None = None
        self._made = self._closed = False
        self._served = False
        self._paused = self._blocked = False
        self._timer: asyncio.TimerHandle | None = None
        self._silence_s: float | None = None
        self._parser = ResponseParser()

    # The exchange.

    def send_request(
        self, head: bytes, body: bytes | AsyncIterator[bytes], length: int | None, silence_s: float | None
    ) -> NativeResponse:
        """Send a request, and give what its answer will come to.

        Args:
            head: With the empty line behind it.
            body: As in `ports.HttpRequest`.
            length: Likewise.
            silence_s: Likewise.
        """
        self._answer = answer = NativeResponse(self._loop, self)
        self._parser.expect_response(bodiless=head.startswith(b"HEAD "))
        self._heard = False
        self._heard_at = self._loop.time()
        self._silence_s = silence_s
        if self._closed or self._transport.is_closing():
            self.connection_lost(None)
            return answer
        if silence_s is not None:
            self._schedule_timeout_check(self._heard_at + silence_s)
        if isinstance(body, bytes) and len(body) <= SMALL_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._upload = BodyUploader(self._transport, self._on_upload_done, blocked=self._blocked)
            self._upload.start(body, length)
        return answer

    def _on_upload_done(self, error: BaseException | None) -> None:
        """The request is out, or cannot be: its body failed."""
        self._upload = None
        self._heard_at = self._loop.time()
        if error is not None and self._answer is not None:
            self._answer.set_exception(error)

    def resume_reading(self) -> None:
        """Take more from the socket: what had come has been read."""
        if self._paused:
            self._paused = False
            self._heard_at = self._loop.time()
            self._transport.resume_reading()

    def abort_exchange(self) -> None:
        """Close the socket now, whatever is under way on it."""
        self._answer = None
        self.close()

    def close_with_error(self) -> None:
        """Close the socket now; who waits for an answer is told."""
        if self._answer is not None:
            self._answer.set_exception(httpx.ReadError("the engine was closed"))
        self.close()

    def close(self) -> None:
        """Close the socket now. Calling it twice does no harm."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._upload is not None:
            self._upload.stop()
        self._parser.close()
        if self._made:
            self._transport.abort()
            self._owner.remove(self)

    def _finish_exchange(self, *, reusable: bool) -> None:
        answer, self._answer = self._answer, None
        self._served = True
        if reusable and self._upload is None and not self._closed:
            self.resume_reading()
            self.idle_since = self._heard_at
            self._owner.release(self)
        else:
            self.close()
        if answer is not None:
            answer.feed_eof()

    # The clock.

    def _schedule_timeout_check(self, due: float) -> None:
        """Have `_check_timeout` called by `due`; a timer that is set for no later is left alone."""
        if self._timer is not None:
            if self._timer.when() <= due + TIMER_SLACK_S:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self._check_timeout)

    def _check_timeout(self) -> None:
        """The other side may have been silent for too long. While it is we who are slow, nothing counts."""
        self._timer = None
        if self._answer is None or self._silence_s is None:
            return
        now = self._loop.time()
        ours = self._paused or (self._upload is not None and not self._upload.blocked)
        due = (now if ours else self._heard_at) + self._silence_s
        if due > now + TIMER_SLACK_S:
            self._schedule_timeout_check(due)
        else:
            self._answer.set_exception(httpx.ReadTimeout("nothing came in time"))

    # The loop's calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection stands. Within a tunnel this may come after what the other side says at once."""
        self._transport = cast("asyncio.Transport", transport)
        self._made = True
        if self._closed:
            self._transport.abort()
        else:
            self._owner.add(self)

    def pause_writing(self) -> None:
        """The other side takes nothing more for now."""
        self._blocked = True
        if self._upload is not None:
            self._upload.pause()

    def resume_writing(self) -> None:
        """The other side takes more."""
        self._blocked = False
        self._heard_at = self._loop.time()
        if self._upload is not None:
            self._upload.resume()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the loop's
        """Where to put what has come."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Something has come; what it holds of the body is handed on in one piece."""
        answer = self._answer
        if answer is None:  # nobody has asked for this: it must not answer the next request
            self.close()
            return
        self._heard = True
        self._heard_at = self._loop.time()
        parser = self._parser
        valid = parser.feed_data(self._buffer[:nbytes])
        body = parser.body
        if parser.headed and not answer.headed:
            answer.feed_head(parser.status, parser.reason, parser.headers)
        if body:
            full = answer.feed_body(body[0] if len(body) == 1 else b"".join(body))
            body.clear()
            if full and not parser.whole:
                self._paused = True
                self._transport.pause_reading()
        if parser.whole:
            self._finish_exchange(reusable=valid and parser.reusable)
        elif not valid:
            answer.set_exception(httpx.RemoteProtocolError("the answer is no valid HTTP/1.1"))

    def eof_received(self) -> None:
        """The other side says no more."""
        self.connection_lost(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended; by `exc`, None if in peace."""
        answer = self._answer
        if answer is None:
            self.close()
        elif exc is None and self._parser.is_delimited_by_close():
            self._finish_exchange(reusable=False)
        else:
            answer.set_exception(self._to_loss_error(exc))

    def _to_loss_error(self, exc: Exception | None) -> Exception:
        if self._served and not self._heard:
            return UnansweredError()
        if exc is None:
            return httpx.RemoteProtocolError("the connection ended before the answer")
        failed = httpx.WriteError if self._upload is not None else httpx.ReadError
        return failed(type(exc).__name__)
