"""Requests, responses and the interface of the engines that send them over HTTP."""

from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple, Protocol


class HttpRequest(NamedTuple):  # each request makes one; a dataclass would take four times as long
    """One request as it is sent.

    Attributes:
        method: The method in capitals.
        origin: The server that is to answer, as `scheme://host[:port]` in lower case.
        target: The request target (path and query), as the bytes to send.
        headers: Header fields in order, without `host` and the fields that say where the body ends. The
            engine adds these fields itself.
        body: The body to send. A stream cannot be sent twice.
        body_length: Declared length of a stream in bytes. None sends the stream chunked. Ignored if the body
            is bytes.
        connect_timeout_s: Seconds within which the connection must be established. None sets no limit.
        silence_timeout_s: Seconds for which the server may be silent, before the first byte or later.
            None sets no limit.
    """

    method: str
    origin: str
    target: bytes
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes | AsyncIterator[bytes]
    body_length: int | None = None
    connect_timeout_s: float | None = None
    silence_timeout_s: float | None = None


class HttpResponse(Protocol):
    """A response whose headers have arrived. Its body may still be arriving while the caller reads."""

    @property
    def status(self) -> int:
        """The status code as received."""
        ...

    @property
    def reason(self) -> bytes:
        """The reason phrase."""
        ...

    @property
    def headers(self) -> Sequence[tuple[bytes, bytes]]:
        """The header fields in order, as received, with their names in lower case."""
        ...

    async def read(self) -> bytes:
        """Waits for body bytes and returns all that came since the last call; empty at the end of the body.

        If the caller is cancelled, the exchange ends.

        Raises:
            httpx.TransportError: If the body ended too early, or its sender was silent for too long. Earlier
                calls have returned every byte that arrived.
        """
        ...

    async def aclose(self) -> None:
        """Ends the exchange. If the body is not complete, the connection is closed at once."""
        ...


class HttpEngine(Protocol):
    """Sends requests. It changes no bytes of requests and responses, and follows no redirects."""

    async def send(self, request: HttpRequest) -> HttpResponse:
        """Sends a request. Returns as soon as status and headers of the response are known.

        A request whose body is bytes may reuse a connection. If that connection ends before any byte of the
        response has arrived, the request is sent once more over a new connection. If the caller is cancelled,
        the exchange ends at once.

        Raises:
            httpx.TransportError: If the exchange fails. The class is `ConnectError`, `ConnectTimeout`,
                `ReadTimeout`, `ReadError`, `WriteError`, `ProxyError`, `UnsupportedProtocol`,
                `RemoteProtocolError`, or `LocalProtocolError` (a header field, the target or the method
                contains CR, LF or NUL). If a streamed body raises an error, the exchange ends with this error
                or a `WriteError`.
        """
        ...

    async def aclose(self) -> None:
        """Closes all connections. Further calls do nothing."""
        ...
