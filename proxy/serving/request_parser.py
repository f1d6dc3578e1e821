"""Requests taken apart: httptools over the bytes that have just come, within bounds."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol
from urllib.parse import unquote

import httptools

from proxy.errors import RequestRefused

# A head up to this is read, and fields up to these; and so much that is no body, such as trailers.
HEAD_BYTES = 65_536
FIELDS = 256
FRAMING_BYTES = 262_144
# Targets up to this are remembered, in bytes; the usual ones come again and again.
_REMEMBERED_BYTES = 256
_INVALID = RequestRefused(400, "This is no valid HTTP/1.1 request.", "invalid_http")
_HUGE_HEAD = RequestRefused(431, "The request's header is too large.", "header_too_large")


class _RefusedError(Exception):
    """Stops the parser: what it has found is not wanted."""


@dataclass(slots=True)
class Head:
    """The head of a request.

    Attributes:
        method: As it came.
        version: Of HTTP, such as `1.1`.
        path: Decoded.
        raw_path: As it came.
        query: As it came, without `?`.
        fields: With their names in lower case, in their order.
        lasts: Whether the connection may serve again.
        expects_continue: Whether the client waits to be told that its body is wanted.
    """

    method: str
    version: str
    path: str
    raw_path: bytes
    query: bytes
    fields: list[tuple[bytes, bytes]]
    lasts: bool
    expects_continue: bool


class Receiver(Protocol):
    """Who is told of what was found."""

    def head_begins(self) -> None:
        """The first byte of a request."""
        ...

    def head_came(self, head: Head) -> None:
        """The last of its head."""
        ...

    def body_came(self, piece: bytes) -> None:
        """A part of its body."""
        ...

    def request_came(self) -> None:
        """Its end."""
        ...


def _parts(target: bytes) -> tuple[str, bytes, bytes]:
    """A target's path, decoded and as it came, and its query."""
    parsed = httptools.parse_url(target)
    path = parsed.path.decode("ascii")
    return unquote(path) if "%" in path else path, parsed.path, parsed.query or b""


_usual_parts = lru_cache(maxsize=1_024)(_parts)


class RequestParser:
    """The requests that come over one connection, one after the other.

    Args:
        receiver: Is told what was found.
    """

    __slots__ = (
        "_expects_continue",
        "_fields",
        "_framing_bytes",
        "_heading",
        "_parser",
        "_receiver",
        "_refusal",
        "_target",
    )

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._parser = httptools.HttpRequestParser(self)
        # A client may say that it closes after a request, and send more: the first is answered.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._heading = False
        self._target = b""
        self._fields: list[tuple[bytes, bytes]] = []
        self._expects_continue = False
        self._framing_bytes = 0
        self._refusal = _INVALID

    def feed(self, data: bytes) -> RequestRefused | None:
        """Take apart what has come. What is wrong with it, if anything: then nothing more is to be fed."""
        self._framing_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            return None  # nobody upgrades: the request is answered, and the connection ends with that
        except httptools.HttpParserError:
            return self._refusal
        over = self._framing_bytes > (HEAD_BYTES if self._heading else FRAMING_BYTES)
        return _HUGE_HEAD if over else None

    def _refuse_head(self) -> None:
        self._refusal = _HUGE_HEAD
        raise _RefusedError

    # The parser's calls.

    def on_message_begin(self) -> None:
        """The head of a request begins."""
        self._heading = True
        self._target = b""
        self._fields = []
        self._expects_continue = False
        self._receiver.head_begins()

    def on_url(self, piece: bytes) -> None:
        """A part of the target has come."""
        self._target += piece

    def on_header(self, name: bytes, value: bytes) -> None:
        """A field has come, of the head or of trailers, which are left out."""
        if not self._heading:
            return
        if len(self._fields) >= FIELDS:
            self._refuse_head()
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self._expects_continue = True
        self._fields.append((name, value))

    def on_headers_complete(self) -> None:
        """The head has come."""
        fields, target, parser = self._fields, self._target, self._parser
        if self._framing_bytes > HEAD_BYTES:
            size = len(target) + sum([len(name) + len(value) for name, value in fields])
            if size > HEAD_BYTES:
                self._refuse_head()
        self._heading = False
        version = parser.get_http_version()
        parts = (_usual_parts if len(target) <= _REMEMBERED_BYTES else _parts)(target)
        lasts = version == "1.1" and parser.should_keep_alive() and not parser.should_upgrade()
        method = parser.get_method().decode("ascii")
        self._receiver.head_came(Head(method, version, *parts, fields, lasts, self._expects_continue))

    def on_body(self, piece: bytes) -> None:
        """A part of the body has come."""
        self._framing_bytes = 0
        self._receiver.body_came(piece)

    def on_message_complete(self) -> None:
        """A request has come to its end."""
        self._framing_bytes = 0
        self._receiver.request_came()
