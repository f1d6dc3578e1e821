"""The requests and responses of the HTTP client, and the interface of an engine, which sends requests."""

from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple, Protocol


class HttpRequest(NamedTuple):  # each request creates one, and a dataclass would take four times as long
    """One request, as an `HttpEngine` sends it.

    Attributes:
        method: The method in capitals.
        origin: The server that is to answer, as `scheme://host[:port]` in lower case.
        target: The request target (path and query), as the bytes to send.
        headers: Header fields in order, without `host`, `content-length` and `transfer-encoding`. The engine
            adds these fields itself.
        body: The body to send. A stream cannot be sent twice.
        body_length: The length in bytes that the engine declares for a streamed body. If it is None, the
            engine sends the stream in chunks. It has no effect if the body is bytes.
        connect_timeout_s: Seconds within which the connection must be established. None sets no limit.
        silence_timeout_s: Seconds for which the server may send nothing, before the first byte of the
            response or later. None sets no limit.
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
    """A response whose header fields have arrived. Its body may still be arriving while it is read."""

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
        """Waits for body bytes, and returns all that arrived since the last call.

        Returns empty bytes at the end of the body. If the waiting task is cancelled, the connection is
        closed.

        Raises:
            httpx.TransportError: If the body ended too early, or its sender was silent for too long. Earlier
                calls have returned every byte that arrived.
        """
        ...

    async def aclose(self) -> None:
        """Closes the connection if the body is not complete. Otherwise does nothing."""
        ...


class HttpEngine(Protocol):
    """Sends requests over HTTP. It changes no bytes of requests and responses, and follows no redirects."""

    async def send(self, request: HttpRequest) -> HttpResponse:
        """Sends a request. Returns when the status and the header fields of the response have arrived.

        A request whose body is bytes may reuse a connection. If that connection ends before any byte of the
        response has arrived, the request is sent once more over a new connection. If the waiting task is
        cancelled, the connection is closed.

        Raises:
            httpx.TransportError: If no response arrives. The class is `ConnectError`, `ConnectTimeout`,
                `ReadTimeout`, `ReadError`, `WriteError`, `ProxyError`, `UnsupportedProtocol`,
                `RemoteProtocolError`, or `LocalProtocolError` (a header field, the target or the method
                contains CR, LF or NUL). If a streamed body raises an error, the method raises this error or a
                `WriteError`.
        """
        ...

    async def aclose(self) -> None:
        """Closes all connections. Further calls do nothing."""
        ...
