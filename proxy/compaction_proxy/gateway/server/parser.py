"""Parses requests with httptools as their bytes arrive, within size limits.

The HTTP head of a request is its request line and its header fields. In it, a client may offer to switch to
another protocol: Java's HTTP clients offer h2c or TLS. The response still uses HTTP/1.1, as RFC 9110 §7.8
allows. httptools stops after such an HTTP head and does not parse the body. So this module lets a second
httptools parser parse the body.
"""

from functools import lru_cache
from typing import NamedTuple, NoReturn, Protocol
from urllib.parse import unquote

import httptools

from compaction_proxy.core.errors import RequestRefusedError

# A request that exceeds one of the limits below is refused with status 431. This one is the limit bytes
# that the request line and the header fields may have together.
MAX_HEAD_BYTES = 65_536
# The most header fields that a request may have.
MAX_FIELDS = 256
# The most bytes of a request that may be no body data, such as chunk sizes, chunk extensions and trailers.
MAX_FRAMING_BYTES = 262_144
# Each byte of body data allows this many further bytes, because each may come in a chunk of its own.
FRAMING_BYTES_PER_BODY_BYTE = 64
# The parser caches the parts (path and query) of a request target of at most this many bytes, because clients
# use the same few targets again and again.
_MAX_CACHED_TARGET_BYTES = 256
# The header fields whose values the parser itself checks or needs.
_FRAMING_FIELDS = frozenset({b"host", b"expect", b"content-length", b"transfer-encoding"})
_INVALID = RequestRefusedError(400, "The request is not valid HTTP/1.1.", "invalid_http")
_NO_HOST = RequestRefusedError(400, "The request must have exactly one Host header.", "invalid_http")
_UNKNOWN_CODING = RequestRefusedError(
    501, "Only the transfer coding `chunked` is supported.", "unsupported_transfer_coding"
)
_HEAD_TOO_LARGE = RequestRefusedError(431, "The header of the request is too large.", "header_too_large")


class _RejectedRequestError(Exception):
    """Raised in callbacks of httptools, to stop it at input that this parser refuses."""


class RequestHead(NamedTuple):
    """The HTTP head of a request: its request line and its header fields.

    Attributes:
        method: The method as received.
        version: The HTTP version, such as `1.1`.
        path: The decoded path.
        raw_path: The path as received.
        query: The query as received, without `?`.
        fields: The header fields in order, with their names in lower case.
        keep_alive: Whether the connection may serve another request.
        expects_continue: Whether the client waits for `100 Continue` before it sends the body.
    """

    method: str
    version: str
    path: str
    raw_path: bytes
    query: bytes
    fields: list[tuple[bytes, bytes]]
    keep_alive: bool
    expects_continue: bool


class RequestReceiver(Protocol):
    """Receives the parts of requests from a `RequestParser`, in the order in which they arrive."""

    def on_head_started(self) -> None:
        """Notes that the first byte of a request has arrived."""
        ...

    def on_head_received(self, head: RequestHead) -> None:
        """Takes the request line and the header fields of a request, when all have arrived."""
        ...

    def on_body_received(self, piece: bytes) -> None:
        """Takes the next part of the request's body."""
        ...

    def on_request_received(self) -> None:
        """Notes that the request is complete."""
        ...


def _parse_target(target: bytes) -> tuple[str, bytes, bytes]:
    """Returns the decoded path, the path as received, and the query of a request target."""
    parsed = httptools.parse_url(target)  # `path` is None if the target has none
    path = parsed.path.decode("ascii")
    return unquote(path) if "%" in path else path, parsed.path, parsed.query or b""


_parse_target_cached = lru_cache(maxsize=1_024)(_parse_target)


class RequestParser:
    """Parses the requests of one connection, one after the other.

    Args:
        receiver: Gets the parts of the requests, in the order in which they arrive.
    """

    __slots__ = (
        "_expects_continue",
        "_fields",
        "_framing",
        "_framing_bytes",
        "_hosts",
        "_is_muted",
        "_is_reading_head",
        "_is_upgrading",
        "_parser",
        "_pieces",
        "_receiver",
        "_refusal",
        "_target",
    )

    def __init__(self, receiver: RequestReceiver) -> None:
        self._receiver = receiver
        self._parser = self._create_parser()
        self._is_reading_head = self._is_muted = self._is_upgrading = False
        self._target = b""
        self._fields: list[tuple[bytes, bytes]] = []
        self._framing: list[bytes] = []
        self._pieces: list[bytes] = []  # the body data of the current read that the receiver has not got yet
        self._hosts = 0
        self._expects_continue = False
        self._framing_bytes = 0
        self._refusal = _INVALID

    def _create_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # A client may send `connection: close` with a request, and still send data after this request. The
        # server answers the request nevertheless.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def feed_data(self, data: bytes) -> RequestRefusedError | None:
        """Parses received bytes. Returns None, or an error if the bytes are refused.

        After an error, this method must not be called again.
        """
        self._framing_bytes += len(data)
        try:
            self._feed_parser(data)
        except httptools.HttpParserCallbackError as error:
            if not isinstance(error.__context__, _RejectedRequestError):
                raise
            return self._refusal
        except httptools.HttpParserError:
            return _INVALID
        self._pass_body()
        over = self._framing_bytes > (MAX_HEAD_BYTES if self._is_reading_head else MAX_FRAMING_BYTES)
        return _HEAD_TOO_LARGE if over else None

    def close(self) -> None:
        """Drops the httptools parser, whose callbacks refer to this object.

        Without this, both objects would keep each other in memory until the garbage collector runs.
        """
        del self._parser, self._receiver

    def _feed_parser(self, data: bytes) -> None:
        while True:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as stopped:
                data = data[stopped.args[0] :]
                self._restart_after_upgrade()
            else:
                return

    def _restart_after_upgrade(self) -> None:
        """Starts a new httptools parser for the body of a request that offers to switch to another protocol.

        The new parser first gets a request line, and header fields that describe the same body. While it
        parses these, its callbacks do nothing (`_is_muted`).
        """
        self._is_upgrading = False
        self._parser = self._create_parser()
        self._is_muted = True
        self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(self._framing))
        self._is_muted = False

    def _pass_body(self) -> None:
        """Passes the kept parts of the body to the receiver, as one."""
        if self._pieces:
            body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
            self._pieces.clear()
            self._framing_bytes = max(0, self._framing_bytes - FRAMING_BYTES_PER_BODY_BYTE * len(body))
            self._receiver.on_body_received(body)

    def _parse_target_or_refuse(self, target: bytes) -> tuple[str, bytes, bytes]:
        try:
            return (_parse_target_cached if len(target) <= _MAX_CACHED_TARGET_BYTES else _parse_target)(
                target
            )
        except (httptools.HttpParserInvalidURLError, UnicodeDecodeError, AttributeError):
            self._raise_refusal(_INVALID)

    def _raise_refusal(self, refusal: RequestRefusedError) -> NoReturn:
        self._refusal = refusal
        raise _RejectedRequestError

    # Methods that httptools calls.

    def on_message_begin(self) -> None:
        """Resets the state at the start of a request."""
        if self._is_muted:
            return
        self._is_reading_head = True
        self._target = b""
        self._fields = []
        self._framing = []
        self._hosts = 0
        self._expects_continue = False
        self._receiver.on_head_started()

    def on_url(self, piece: bytes) -> None:
        """Adds a part of the request target (path and query)."""
        if not self._is_muted:
            self._target += piece

    def on_header(self, name: bytes, value: bytes) -> None:
        """Adds a header field. Refuses the request if it has too many. Drops trailer fields."""
        if not self._is_reading_head:
            return
        if len(self._fields) >= MAX_FIELDS:
            self._raise_refusal(_HEAD_TOO_LARGE)
        name = name.lower()
        if name in _FRAMING_FIELDS:
            self._record_framing_field(name, value)
        self._fields.append((name, value))

    def _record_framing_field(self, name: bytes, value: bytes) -> None:
        """Records one of the `_FRAMING_FIELDS`. Refuses transfer codings other than `chunked`."""
        if name == b"host":
            self._hosts += 1
        elif name == b"expect":
            self._expects_continue = value.lower() == b"100-continue"
        else:
            if name == b"transfer-encoding" and value.strip().lower() != b"chunked":
                self._raise_refusal(_UNKNOWN_CODING)
            self._framing.append(b"%b: %b\r\n" % (name, value))

    def on_headers_complete(self) -> None:
        """Checks the request line and the header fields, and passes them to the receiver.

        Refuses the request if they are too long or not valid.
        """
        if self._is_muted:
            return
        fields, target, parser = self._fields, self._target, self._parser
        self._is_upgrading = parser.should_upgrade()
        if self._framing_bytes > MAX_HEAD_BYTES:
            size = len(target) + sum([len(name) + len(value) for name, value in fields])
            if size > MAX_HEAD_BYTES:
                self._raise_refusal(_HEAD_TOO_LARGE)
        self._is_reading_head = False
        version = parser.get_http_version()
        modern = version == "1.1"
        if not modern and version != "1.0":
            self._raise_refusal(_INVALID)
        if self._hosts > 1 or (modern and not self._hosts):
            self._raise_refusal(_NO_HOST)
        parts = self._parse_target_or_refuse(target)
        lasts = modern and parser.should_keep_alive()
        method = parser.get_method().decode("ascii")
        self._receiver.on_head_received(
            RequestHead(method, version, *parts, fields, lasts, modern and self._expects_continue)
        )

    def on_body(self, piece: bytes) -> None:
        """Keeps a part of the body until all received bytes are parsed, because chunks may be tiny."""
        self._pieces.append(piece)

    def on_message_complete(self) -> None:
        """Tells the receiver that the request is complete, unless its body is still to be parsed."""
        if self._is_upgrading:
            return  # the body follows, and the parser that `_restart_after_upgrade` starts reads it
        self._pass_body()
        self._framing_bytes = 0
        self._receiver.on_request_received()
