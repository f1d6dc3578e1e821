"""Sends requests and receives responses over one HTTP/1.1 connection to an upstream."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Protocol, cast

import httpx

from compaction_proxy.gateway.client.parser import ResponseParser
from compaction_proxy.gateway.client.response import NativeResponse

# The most bytes of a request body that one call passes to the transport. Between two such calls, the upload
# checks whether the transport has paused writing.
SLICE_BYTES = 131_072
# After this many bytes, an upload lets other tasks of the event loop run, because TLS encryption blocks the
# loop for about a millisecond for each megabyte.
YIELD_AFTER_BYTES = 524_288


class BodyUploader:
    """Sends a request body as fast as the upstream takes it.

    Args:
        transport: The transport to write to. If asyncio calls `pause_writing` or `resume_writing` of its
            protocol, the protocol must call `pause` or `resume` of this object.
        on_done: Called once when the upload ends, with None if the whole body was written, or else with the
            error that ended the upload.
        is_blocked: Whether the transport has already paused writing.

    Attributes:
        is_blocked: Whether the upstream takes no more data for now.
    """

    __slots__ = ("_on_done", "_task", "_transport", "_turn_bytes", "_unblocked", "is_blocked")

    def __init__(
        self,
        transport: asyncio.WriteTransport,
        on_done: Callable[[BaseException | None], None],
        *,
        is_blocked: bool,
    ) -> None:
        self.is_blocked = is_blocked
        self._transport = transport
        self._on_done = on_done
        self._turn_bytes = 0
        self._unblocked: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, body: bytes | AsyncIterator[bytes], length: int | None) -> None:
        """Starts the upload. The arguments are `body` and `body_length` of a `types.HttpRequest`."""
        upload = self._write_slices(body) if isinstance(body, bytes) else self._upload_stream(body, length)
        self._task = asyncio.get_running_loop().create_task(upload)
        self._task.add_done_callback(self._report_result)

    def stop(self) -> None:
        """Stops the upload. If the body is a stream, the stream is closed."""
        if self._task is not None:
            self._task.cancel()

    def pause(self) -> None:
        """Pauses the upload, because the upstream takes no more data for now."""
        self.is_blocked = True

    def resume(self) -> None:
        """Continues the upload, because the upstream takes data again."""
        self.is_blocked = False
        if self._unblocked is not None and not self._unblocked.done():
            self._unblocked.set_result(None)

    def _report_result(self, task: asyncio.Task[None]) -> None:
        self._on_done(httpx.WriteError("the upload was stopped") if task.cancelled() else task.exception())

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
        """Writes the data in slices of at most `SLICE_BYTES`. Returns when the transport can take more."""
        view = memoryview(data)
        for start in range(0, len(view), SLICE_BYTES):
            self._transport.write(view[start : start + SLICE_BYTES])
            self._turn_bytes += min(SLICE_BYTES, len(view) - start)
            if self.is_blocked:
                self._unblocked = asyncio.get_running_loop().create_future()
                await self._unblocked
                self._turn_bytes = 0
            elif self._turn_bytes >= YIELD_AFTER_BYTES:
                self._turn_bytes = 0
                await asyncio.sleep(0)


# A body of at most this many bytes is written together with the request line and the header fields, in one
# call. A larger body is written by a `BodyUploader`.
MAX_JOINED_BYTES = 65_536
# The tolerance of timeouts, in seconds. A timer may fire this much too late, and a response may time out this
# much too early. With this tolerance, timers are rescheduled less often.
TIMER_SLACK_S = 0.001


class UnansweredError(Exception):
    """A reused connection ended before any byte of the response arrived. The request may be sent again."""


class ConnectionOwner(Protocol):
    """Keeps track of the connections to one origin (scheme, host and port of a server)."""

    def add(self, connection: "UpstreamConnection") -> None:
        """Adds a connection that has just been established."""
        ...

    def release(self, connection: "UpstreamConnection") -> None:
        """Records that a connection has received a complete response and can send another request."""
        ...

    def remove(self, connection: "UpstreamConnection") -> None:
        """Removes a closed connection. Further calls with the same connection do nothing."""
        ...


class UpstreamConnection(asyncio.BufferedProtocol):
    """One connection, from its opening to its end. It serves at most one request at a time.

    Args:
        owner: Is notified when the connection is established, when it can send another request, and when it
            is closed.
        buffer: The memory in which the event loop stores received data. The connection parses the data
            before the event loop runs any other code. So all connections of an event loop may share one
            buffer.

    Attributes:
        idle_since: The time at which the last response was complete, in seconds of the event loop's clock.
    """

    __slots__ = (
        "_buffer",
        "_closed",
        "_has_received_data",
        "_has_served",
        "_is_established",
        "_is_reading_paused",
        "_is_writing_paused",
        "_last_activity_at",
        "_loop",
        "_owner",
        "_parser",
        "_response",
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
        self._response: NativeResponse | None = None
        self._upload: BodyUploader | None = None
        self._is_established = self._closed = False
        self._has_served = False
        self._is_reading_paused = self._is_writing_paused = False
        self._timer: asyncio.TimerHandle | None = None
        self._silence_s: float | None = None
        self._parser = ResponseParser()

    # Methods for sending a request and for ending its response.

    def send_request(
        self, head: bytes, body: bytes | AsyncIterator[bytes], length: int | None, silence_s: float | None
    ) -> NativeResponse:
        """Sends a request and returns the object for its response. Does not wait for the response.

        Args:
            head: The encoded request line and header fields, with the empty line after them.
            body: The body, as in `types.HttpRequest`.
            length: The declared length (`body_length` of `types.HttpRequest`).
            silence_s: The longest silence of the upstream, in seconds (`silence_timeout_s` of
                `types.HttpRequest`).
        """
        self._response = answer = NativeResponse(self._loop, self)
        self._parser.expect_response(is_bodiless=head.startswith(b"HEAD "))
        self._has_received_data = False
        self._last_activity_at = self._loop.time()
        self._silence_s = silence_s
        if self._closed or self._transport.is_closing():
            self.connection_lost(None)
            return answer
        if silence_s is not None:
            self._schedule_timeout_check(self._last_activity_at + silence_s)
        if isinstance(body, bytes) and len(body) <= MAX_JOINED_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._upload = BodyUploader(
                self._transport, self._on_upload_done, is_blocked=self._is_writing_paused
            )
            self._upload.start(body, length)
        return answer

    def _on_upload_done(self, error: BaseException | None) -> None:
        """Records that the upload has ended. If `error` is not None, the response ends with it."""
        self._upload = None
        self._last_activity_at = self._loop.time()
        if error is not None and self._response is not None:
            self._response.set_exception(error)

    def resume_reading(self) -> None:
        """Reads from the socket again, if reading was paused.

        The response calls this when its reader has taken the received data.
        """
        if self._is_reading_paused:
            self._is_reading_paused = False
            self._last_activity_at = self._loop.time()
            self._transport.resume_reading()

    def abort_exchange(self) -> None:
        """Closes the socket now. The response calls this when it ends before it is complete."""
        self._response = None
        self.close()

    def close_with_error(self) -> None:
        """Closes the socket now. If a response is expected or incomplete, it ends with a `ReadError`."""
        if self._response is not None:
            self._response.set_exception(httpx.ReadError("the client was closed"))
        self.close()

    def close(self) -> None:
        """Closes the socket now. Further calls do nothing."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._upload is not None:
            self._upload.stop()
        self._parser.close()
        if self._is_established:
            self._transport.abort()
            self._owner.remove(self)

    def _finish_exchange(self, *, reusable: bool) -> None:
        answer, self._response = self._response, None
        self._has_served = True
        if reusable and self._upload is None and not self._closed:
            self.resume_reading()
            self.idle_since = self._last_activity_at
            self._owner.release(self)
        else:
            self.close()
        if answer is not None:
            answer.feed_eof()

    # Methods for timeouts.

    def _schedule_timeout_check(self, due: float) -> None:
        """Schedules `_check_timeout` for the time `due`, in seconds of the event loop's clock.

        Does nothing if a check is already scheduled for an earlier time, because that check schedules the
        next one.
        """
        if self._timer is not None:
            if self._timer.when() <= due + TIMER_SLACK_S:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self._check_timeout)

    def _check_timeout(self) -> None:
        """Ends the response with an error if the upstream was silent too long.

        Otherwise schedules the next check. Does nothing if no response is expected.

        Does not count the time in which the upstream need not send anything: while the proxy has paused
        reading, or while the proxy is sending the body and the upstream takes the data.
        """
        self._timer = None
        if self._response is None or self._silence_s is None:
            return
        now = self._loop.time()
        is_own_delay = self._is_reading_paused or (self._upload is not None and not self._upload.is_blocked)
        due = (now if is_own_delay else self._last_activity_at) + self._silence_s
        if due > now + TIMER_SLACK_S:
            self._schedule_timeout_check(due)
        else:
            self._response.set_exception(httpx.ReadTimeout("no data arrived in time"))

    # Callbacks of the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Registers the new connection. If it goes through a tunnel, data may arrive before this call."""
        self._transport = cast("asyncio.Transport", transport)
        self._is_established = True
        if self._closed:
            self._transport.abort()
        else:
            self._owner.add(self)

    def pause_writing(self) -> None:
        """Pauses the upload, because the upstream takes no more data for now."""
        self._is_writing_paused = True
        if self._upload is not None:
            self._upload.pause()

    def resume_writing(self) -> None:
        """Continues the upload, because the upstream takes data again."""
        self._is_writing_paused = False
        self._last_activity_at = self._loop.time()
        if self._upload is not None:
            self._upload.resume()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's signature
        """Returns the buffer into which the event loop writes received data."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Parses received data, and passes the status, the header fields and the body to the response.

        Joins all parts of the body that the data contains into one piece.
        """
        answer = self._response
        if (
            answer is None
        ):  # no request is pending, so this data would be taken for the response to the next request
            self.close()
            return
        self._has_received_data = True
        self._last_activity_at = self._loop.time()
        parser = self._parser
        valid = parser.feed_data(self._buffer[:nbytes])
        body = parser.body
        if parser.has_head and not answer.has_head:
            answer.feed_head(parser.status, parser.reason, parser.headers)
        if body:
            full = answer.feed_body(body[0] if len(body) == 1 else b"".join(body))
            body.clear()
            if full and not parser.is_complete:
                self._is_reading_paused = True
                self._transport.pause_reading()
        if parser.is_complete:
            self._finish_exchange(reusable=valid and parser.is_reusable)
        elif not valid:
            answer.set_exception(httpx.RemoteProtocolError("the response is not valid HTTP/1.1"))

    def eof_received(self) -> None:
        """Treats the end of the upstream's data as the end of the connection."""
        self.connection_lost(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Completes the response if the end of the connection also ends its body.

        Otherwise the response ends with an error. `exc` is None if the connection ended without an error.
        """
        answer = self._response
        if answer is None:
            self.close()
        elif exc is None and self._parser.is_delimited_by_close():
            self._finish_exchange(reusable=False)
        else:
            answer.set_exception(self._to_loss_error(exc))

    def _to_loss_error(self, exc: Exception | None) -> Exception:
        if self._has_served and not self._has_received_data:
            return UnansweredError()
        if exc is None:
            return httpx.RemoteProtocolError("the connection ended before the response")
        error_class = httpx.WriteError if self._upload is not None else httpx.ReadError
        return error_class(type(exc).__name__)
