"""Passes one request to an ASGI application, and sends the application's response to the client.

The HTTP head of a response is its status line and its header fields. This module does not send it until the
application sends the first bytes of the body or waits for something else. So a small response is sent in one
write, and a slow body does not delay the HTTP head.
"""

import asyncio
import http
import json
from collections.abc import Sequence
from typing import Protocol

import structlog
from starlette.types import ASGIApp, Message, Scope

from compaction_proxy.core.errors import (
    ClientFacingError,
    InternalError,
    OverloadedError,
    RequestRefusedError,
    build_shortage_error,
    format_openai_error,
    is_resource_shortage,
)
from compaction_proxy.support.fail_open import suppress_and_report
from compaction_proxy.support.log_events import REQUEST_CRASHED, REQUEST_OUT_OF_RESOURCES

# If the first part of the body has at most this many bytes, it is sent together with the status line and the
# header fields in one write. A larger part is sent in a second write.
MAX_JOINED_BYTES = 65_536
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_CLOSE = b"connection: close\r\n"
_CHUNKED = b"transfer-encoding: chunked\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
_DISCONNECT: Message = {"type": "http.disconnect"}
_JSON_HEADERS = ((b"content-type", b"application/json"),)
_BODILESS_STATUSES = frozenset({204, 304})
# The names in RFC 9110. Before version 3.13, Python had older names for some statuses.
_PHRASES = {status.value: status.phrase for status in http.HTTPStatus} | {
    413: "Content Too Large",
    414: "URI Too Long",
    416: "Range Not Satisfiable",
    422: "Unprocessable Content",
}
_STATUS_LINES = {
    status: f"HTTP/1.1 {status} {_PHRASES.get(status, '')}\r\n".encode() for status in range(100, 600)
}

_log = structlog.get_logger()


def encode_header_lines(fields: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Encodes header fields as lines of the form `name: value` that end in CR LF.

    Raises:
        ValueError: If a field contains a line break or a NUL.
    """
    block = b"\r\n".join([*map(b": ".join, fields), b""])
    if not block.count(b"\r") == block.count(b"\n") == len(fields) or block.find(b"\0") >= 0:
        raise ValueError("a header field contains a line break")
    return block


def _encode_error(error: ClientFacingError) -> bytes:
    """Encodes the body of an error so that clients of all wires understand it.

    The server does not know the wire. So the body is in OpenAI's format, and also has the member `type` that
    clients of Anthropic's API look for.
    """
    return json.dumps({"type": "error", **json.loads(format_openai_error(error))}).encode()


def encode_refusal(error: RequestRefusedError, default_headers: bytes) -> bytes:
    """Encodes an error as a complete response with `connection: close`.

    `default_headers` are the encoded header lines that every response has.
    """
    body = _encode_error(error)
    fields = [*_JSON_HEADERS, (b"content-length", b"%d" % len(body))]
    return b"".join(
        (_STATUS_LINES[error.status], default_headers, encode_header_lines(fields), _CLOSE, b"\r\n", body)
    )


class ConnectionProtocol(Protocol):
    """The attributes and methods of a connection that its requests use."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    is_writing_paused: bool

    def encode_default_headers(self) -> tuple[bytes, bool]:
        """Returns the header lines that every response has, and whether one is `connection: close`."""
        ...

    async def drain(self) -> None:
        """Waits until the client takes data again. Does not wait if writing is not paused."""
        ...

    def resume_reading(self) -> None:
        """Reads from the socket again."""
        ...

    def on_response_complete(self) -> None:
        """Records that the response was sent completely."""
        ...

    def hang_up(self) -> None:
        """Ends the connection."""
        ...


class RequestResponseCycle:
    """Passes one request to the application, and sends the application's response to the client.

    Args:
        connection: The connection on which the request came.
        scope: The ASGI scope of the request.
        keep_alive: Whether the connection may serve another request.
        expects_continue: Whether the client waits for `100 Continue` before it sends the body.

    Attributes:
        scope: The ASGI scope of the request.
        keep_alive: Whether the connection stays open after this response.
        expects_continue: Whether the client still waits for `100 Continue`.
        more_body: Whether the request is still incomplete.
        body_bytes: Number of body bytes that have arrived.
        last_pace_check: The time when the server last checked how fast the body arrives, in seconds of the
            event loop's clock, and `body_bytes` at that time; None before the first check.
        is_disconnected: Whether the client left before the response was complete.
        response_started: Whether the application has started the response.
        response_complete: Whether the response was sent completely.
    """

    __slots__ = (
        "_bodiless",
        "_chunked",
        "_connection",
        "_held_head",
        "_is_end_received",
        "_news_event",
        "_remaining_bytes",
        "_unread_body",
        "_unread_bytes",
        "body_bytes",
        "expects_continue",
        "is_disconnected",
        "keep_alive",
        "last_pace_check",
        "more_body",
        "response_complete",
        "response_started",
        "scope",
    )

    def __init__(
        self, connection: ConnectionProtocol, scope: Scope, *, keep_alive: bool, expects_continue: bool
    ) -> None:
        self.scope = scope
        self.keep_alive = keep_alive
        self.expects_continue = expects_continue
        self.more_body = True
        self.body_bytes = 0
        self.last_pace_check: tuple[float, int] | None = None
        self.is_disconnected = False
        self.response_started = False
        self.response_complete = False
        self._connection = connection
        self._unread_body: list[bytes] = []
        self._unread_bytes = 0
        self._is_end_received = False  # whether the application has received the end of the request
        self._news_event: asyncio.Event | None = None
        self._held_head = b""  # the HTTP head, until it is sent
        self._remaining_bytes: int | None = (
            0  # bytes of the body still to send; None without a content-length
        )
        self._chunked = self._bodiless = False

    # Methods that the connection calls.

    async def run(self, app: ASGIApp) -> None:
        """Runs the application. If it ends before its response is complete, closes the connection.

        If the response has not even begun, first sends an error: with status 503 if no memory, thread or
        descriptor is left, else with status 500. An exception of the application is logged.
        """
        failure: InternalError | OverloadedError = InternalError()

        def record_crash(error: BaseException) -> None:
            nonlocal failure
            if is_resource_shortage(error):
                failure = build_shortage_error()
                _log.warning(REQUEST_OUT_OF_RESOURCES, error=type(error).__name__)
            else:
                _log.error(REQUEST_CRASHED, exc_info=error)

        try:
            with suppress_and_report(record_crash):
                await app(self.scope, self.receive, self.send)
        finally:
            if not (self.response_complete or self.is_disconnected):
                self._abort_response(failure)

    def feed_body(self, piece: bytes) -> int:
        """Adds a part of the body. Returns how many of its bytes still wait for the application."""
        self._unread_body.append(piece)
        self._unread_bytes += len(piece)
        self.body_bytes += len(piece)
        self._wake_receiver()
        return self._unread_bytes

    def feed_eof(self) -> None:
        """Records that the request is complete."""
        self.more_body = False
        self._wake_receiver()

    def mark_disconnected(self) -> None:
        """Records that the client has left, and wakes the application if it waits for data."""
        self.is_disconnected = not self.response_complete
        self._held_head = b""
        self._wake_receiver()

    def _wake_receiver(self) -> None:
        if self._news_event is not None:
            self._news_event.set()

    # Methods that the application calls.

    async def receive(self) -> Message:
        """Waits for the next part of the request and returns it (ASGI).

        Returns `http.disconnect` if the client has left or the response is complete.
        """
        if self.expects_continue and not self.is_disconnected:
            self.expects_continue = False
            self._connection.transport.write(_CONTINUE)
        if not self._has_news():
            self._connection.resume_reading()
            await self._wait_for_news()
        if self.is_disconnected or self.response_complete:
            return _DISCONNECT
        came, self._unread_body, self._unread_bytes = self._unread_body, [], 0
        self._is_end_received = not self.more_body
        body = came[0] if len(came) == 1 else b"".join(came)
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    def _has_news(self) -> bool:
        ended = not self.more_body and not self._is_end_received
        return bool(self._unread_body) or ended or self.is_disconnected or self.response_complete

    async def _wait_for_news(self) -> None:
        while not self._has_news():
            if self._news_event is None:
                self._news_event = asyncio.Event()
            self._news_event.clear()
            await self._news_event.wait()

    async def send(self, message: Message) -> None:
        """Sends the next part of the response (ASGI). After the client has left, the part is dropped.

        Raises:
            RuntimeError: If the message comes out of order, or the body is longer or shorter than its
                content-length.
            ValueError: If a header field contains a line break or a NUL.
        """
        if self._connection.is_writing_paused:
            await self._connection.drain()
        if self.is_disconnected:
            return
        kind = message["type"]
        if kind == "http.response.body" and self.response_started and not self.response_complete:
            self._send_body(message.get("body", b""), more_body=message.get("more_body", False))
        elif kind == "http.response.start" and not self.response_started:
            self._start_response(message["status"], message.get("headers", ()))
            self._connection.loop.call_soon(self._flush_head)
        else:
            raise RuntimeError(f"unexpected event {kind}")

    def _start_response(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Encodes the status line and the header fields of the response, but does not send them yet."""
        framing = dict(headers)
        ours, closes = self._connection.encode_default_headers()
        head = _STATUS_LINES[status] + ours + encode_header_lines(headers)
        self._bodiless = self.scope["method"] == "HEAD" or status in _BODILESS_STATUSES
        if b"content-length" in framing:
            self._remaining_bytes = 0 if self._bodiless else int(framing[b"content-length"])
        elif not self._bodiless:
            self._remaining_bytes = None
            # HTTP/1.0 has no chunked bodies. In HTTP/1.0, the end of the connection ends the body.
            self._chunked = self.scope["http_version"] == "1.1"
            head += _CHUNKED if self._chunked and b"transfer-encoding" not in framing else b""
        closes = closes or b"close" in framing.get(b"connection", b"").lower()
        # A client that waits for `100 Continue` and gets a final response instead may send its body or not.
        # So the server cannot know where the next request would begin, and closes the connection.
        self.keep_alive = self.keep_alive and not closes and not self.expects_continue
        if not self.keep_alive and not closes:
            head += _CLOSE
        self.response_started = True
        self.expects_continue = False
        self._held_head = head + b"\r\n"

    def _flush_head(self) -> None:
        """Sends the status line and the header fields, unless they were already sent."""
        if self._held_head and not self._connection.transport.is_closing():
            self._connection.transport.write(self._held_head)
        self._held_head = b""

    def _send_body(self, body: bytes, *, more_body: bool) -> None:
        data = b"" if self._bodiless else self._frame_body(body, more_body=more_body)
        if self._held_head and len(data) <= MAX_JOINED_BYTES:
            data, self._held_head = self._held_head + data, b""
        self._flush_head()
        if data:
            self._connection.transport.write(data)
        if more_body:
            return
        if self._remaining_bytes:
            raise RuntimeError("the body is shorter than its content-length")
        self.response_complete = True
        self._wake_receiver()
        if not self.keep_alive:
            self._connection.hang_up()
        self._connection.on_response_complete()

    def _frame_body(self, body: bytes, *, more_body: bool) -> bytes:
        if self._remaining_bytes is not None:
            self._remaining_bytes -= len(body)
            if self._remaining_bytes < 0:
                raise RuntimeError("the body is longer than its content-length")
        if not self._chunked:
            return body
        chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
        return chunk if more_body else chunk + _LAST_CHUNK

    def _abort_response(self, failure: InternalError | OverloadedError) -> None:
        """Closes the connection although the response is not complete.

        If the response has not begun, first sends `failure`.
        """
        if self.response_started:
            self._flush_head()
        else:
            body = _encode_error(failure)
            fields = [*_JSON_HEADERS, (b"content-length", b"%d" % len(body))]
            if isinstance(failure, OverloadedError):
                fields.append((b"retry-after", b"%d" % failure.retry_after_s))
            self.keep_alive = False
            self._start_response(failure.status, fields)
            self._send_body(body, more_body=False)
        self._connection.transport.close()
