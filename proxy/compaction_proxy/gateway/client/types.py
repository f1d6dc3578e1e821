"""What sends requests over HTTP."""

from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple, Protocol


class HttpRequest(NamedTuple):  # made for each request: a dataclass costs four times as much
    """One request as it goes onto the wire.

    Attributes:
        method: In capitals.
        origin: `scheme://host[:port]`, in lower case.
        target: The request target, byte for byte.
        headers: Fields in their order, without host and without what frames the body: those follow from
            the origin and the body.
        body: What is sent; a stream cannot be sent twice.
        length: Declared length of a stream in bytes; None sends it chunked. Without meaning for bytes.
        connect_s: Seconds until a connection must stand, None for no limit.
        silence_s: Seconds that the other side may be silent, before the first byte or later; None for ever.
    """

    method: str
    origin: str
    target: bytes
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes | AsyncIterator[bytes]
    length: int | None = None
    connect_s: float | None = None
    silence_s: float | None = None


class HttpResponse(Protocol):
    """An answer whose headers have come, and whose body comes as it is read."""

    @property
    def status(self) -> int:
        """As it came."""
        ...

    @property
    def reason(self) -> bytes:
        """The phrase behind the status."""
        ...

    @property
    def headers(self) -> Sequence[tuple[bytes, bytes]]:
        """Fields in their order, as they came."""
        ...

    async def read(self) -> bytes:
        """What has come of the body since the last call, waiting for at least a byte; empty at its end.

        Raises:
            httpx.TransportError: The body was cut, or its sender silent for too long; every byte that did
                arrive has been given before. A cancellation ends the exchange.
        """
        ...

    async def aclose(self) -> None:
        """End the exchange. Where the body is not at its end, the other side sees a hang-up at once."""
        ...


class HttpEngine(Protocol):
    """What sends requests: bytes go out and come in exactly as they are, and nothing is followed."""

    async def send(self, request: HttpRequest) -> HttpResponse:
        """Send a request; comes back as soon as status and headers of the answer are known.

        A request whose body is bytes may go over a connection that has served before, and is sent once more
        over a new one if that turns out to be dead before one byte came back. When the caller is cancelled,
        the exchange ends at once.

        Raises:
            httpx.TransportError: `ConnectError`, `ConnectTimeout`, `ReadTimeout`, `ReadError`, `WriteError`,
                `ProxyError`, `UnsupportedProtocol`, `RemoteProtocolError`, or `LocalProtocolError` for a head
                that holds CR, LF or NUL. What the body raises ends the exchange, as itself or `WriteError`.
        """
        ...

    async def aclose(self) -> None:
        """Close every connection. Calling it twice does no harm."""
        ...
