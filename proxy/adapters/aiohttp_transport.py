"""The HTTP client under the relay: aiohttp's connection pool behind httpx's transport interface.

What it promises beyond a plain client: bytes go out and come in exactly as they are, chunks are handed on
as the network delivered them, closing a response closes its socket at once, nobody ever waits for a pool
slot, and a pooled connection that the upstream had already given up costs one silent replay, not an error.
"""

import functools
import io
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import httpx
import yarl
from aiohttp.client_proto import ResponseHandler

IDLE_EXPIRY_S = 2.0  # below the 5 s after which common servers close an idle connection
HEADER_LINE_BYTES = 65_536
HEADER_COUNT = 1_000
LARGE_BYTES = 1_048_576
READ_BUFFER_BYTES = 32_768  # aiohttp stops reading from the socket at twice this much unread data

_SKIP_AUTO_HEADERS = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
_FRAMING = frozenset({b"transfer-encoding", b"connection"})  # aiohttp writes its own

# The first matching row decides.
_HTTPX_ERRORS: tuple[tuple[type[BaseException], type[httpx.TransportError]], ...] = (
    (aiohttp.ConnectionTimeoutError, httpx.ConnectTimeout),
    (aiohttp.ServerTimeoutError, httpx.ReadTimeout),
    (aiohttp.ClientConnectorError, httpx.ConnectError),
    (aiohttp.ServerFingerprintMismatch, httpx.ConnectError),
    (aiohttp.ClientHttpProxyError, httpx.ProxyError),
    (aiohttp.InvalidURL, httpx.UnsupportedProtocol),
    (aiohttp.NonHttpUrlClientError, httpx.UnsupportedProtocol),
    (aiohttp.ServerDisconnectedError, httpx.RemoteProtocolError),
    (aiohttp.ClientResponseError, httpx.RemoteProtocolError),
    (aiohttp.ClientPayloadError, httpx.RemoteProtocolError),
    (aiohttp.ClientOSError, httpx.ReadError),
    (aiohttp.ClientConnectionError, httpx.WriteError),
)


class _ConnectionLostError(aiohttp.ClientError):
    """The connection ended before a response. Not an OSError, so that aiohttp does not replay on its own.

    Attributes:
        stale: Whether the connection had served before and not one byte came: the keep-alive race.
    """

    def __init__(self, *, stale: bool) -> None:
        super().__init__("the connection ended before a response")
        self.stale = stale


class _Connection(ResponseHandler):
    """A connection that knows whether it has served before, and whether the answer has begun."""

    requests = 0
    answered = False

    def set_response_params(self, **params: Any) -> None:  # noqa: ANN401 - aiohttp's own, passed on
        self.requests += 1
        self.answered = False
        super().set_response_params(**params)

    def data_received(self, data: bytes) -> None:
        self.answered = self.answered or bool(data)
        super().data_received(data)

    def set_exception(self, exc: BaseException, *cause: BaseException) -> None:
        """Replace a lost connection by our own error, which says whether a replay is safe."""
        lost = isinstance(exc, aiohttp.ClientConnectionError) and not isinstance(exc, TimeoutError)
        if lost and not isinstance(self.exception(), _ConnectionLostError):
            made = _ConnectionLostError(stale=self.requests > 1 and not self.answered)
            made.__cause__ = exc
            super().set_exception(made, exc)
        elif not lost:
            super().set_exception(exc, *cause)

    def is_connected(self) -> bool:
        """Asked before reuse: what came while idle (such as a 408) must not answer the next request."""
        return super().is_connected() and not self.should_close

    def close(self) -> None:
        """Close now. A stalled upload would otherwise keep the socket open until its buffer drains."""
        if self.transport is not None and self.transport.get_write_buffer_size():
            self.abort()
        super().close()


class _Connector(aiohttp.TCPConnector):
    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - aiohttp's own, passed on
        super().__init__(limit=0, **options)
        made: type[ResponseHandler] = _Connection
        self._factory = functools.partial(made, loop=self._loop)


def _translated(error: BaseException) -> httpx.TransportError:
    """The httpx error that says the same. Its message names the failure, never a URL."""
    if isinstance(error, _ConnectionLostError) and error.__cause__ is not None:
        return _translated(error.__cause__)
    for ours, theirs in _HTTPX_ERRORS:
        if isinstance(error, ours):
            return theirs(type(error).__name__)
    return httpx.NetworkError(type(error).__name__)


class _ResponseBody(httpx.AsyncByteStream):
    """The body as the network delivers it, neither decoded nor cut to size."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    async def __aiter__(self) -> AsyncIterator[bytes]:
        content = self._response.content
        try:
            while chunk := await content.readany():
                yield chunk
        except aiohttp.ClientError as error:
            # aiohttp raises ahead of what it has buffered; those bytes did arrive.
            if rest := content._read_nowait(-1):  # noqa: SLF001 - the public one raises first
                yield rest
            raise _translated(error) from error

    async def aclose(self) -> None:
        self._response.close()


def _text(raw: bytes) -> str:
    """Header bytes as aiohttp wants them. It writes UTF-8; anything else is read as Latin-1."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def _url(request: httpx.Request) -> yarl.URL:
    """Where to send it. The whole target goes into the path, which is then written byte for byte."""
    target: bytes = request.extensions.get("target", request.url.raw_path)
    return yarl.URL.build(
        scheme=request.url.scheme,
        host=request.url.host,
        port=request.url.port,
        path=target.decode("latin-1" if not target.isascii() else "ascii"),
        encoded=True,
    )


def _payload(body: object) -> object:
    """What aiohttp is given. It writes bytes in one piece, which blocks the loop if they are many."""
    if isinstance(body, bytes) and len(body) > LARGE_BYTES:
        return io.BytesIO(body)
    return body or None


def _timeout(request: httpx.Request) -> aiohttp.ClientTimeout:
    limits: dict[str, float | None] = request.extensions.get("timeout", {})
    return aiohttp.ClientTimeout(total=None, connect=limits.get("connect"), sock_read=limits.get("read"))


def _environment_proxy(url: httpx.URL) -> str | None:
    """The proxy that the environment names for this origin, honouring NO_PROXY."""
    if urllib.request.proxy_bypass(url.host):
        return None
    return urllib.request.getproxies().get(url.scheme)


class AiohttpTransport(httpx.AsyncBaseTransport):
    """Sends requests over aiohttp. One per event loop; connections are made as they are needed.

    Honours `request.extensions`: `target` (the raw request target, bytes) and `timeout` (httpx's dict:
    `connect` and `read` in seconds or None; `read` is both the wait for the first byte and for each next).

    Args:
        trust_env: Whether HTTP_PROXY, HTTPS_PROXY and NO_PROXY decide the way. SSL_CERT_FILE and
            SSL_CERT_DIR always name the trusted roots; nothing else of the environment is looked at.
        idle_expiry_s: Seconds after which an idle connection is not used again.
    """

    def __init__(self, *, trust_env: bool = False, idle_expiry_s: float = IDLE_EXPIRY_S) -> None:
        self._trust_env = trust_env
        self._idle_expiry_s = idle_expiry_s
        self._tls = httpx.create_ssl_context()
        self._closed = False

    @functools.cached_property
    def _pooled(self) -> aiohttp.ClientSession:
        return self._session(_Connector(ssl=self._tls, keepalive_timeout=self._idle_expiry_s))

    @functools.cached_property
    def _fresh(self) -> aiohttp.ClientSession:
        return self._session(_Connector(ssl=self._tls, force_close=True))

    def _session(self, connector: _Connector) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=_SKIP_AUTO_HEADERS,
            auto_decompress=False,
            read_bufsize=READ_BUFFER_BYTES,
            max_line_size=HEADER_LINE_BYTES,
            max_field_size=HEADER_LINE_BYTES,
            max_headers=HEADER_COUNT,
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send the request; the response comes back as soon as its headers are known, its body unread.

        A request whose body is bytes may go over a pooled connection, and is replayed once, over a new one,
        if that connection turns out to be dead before one byte came back. A streamed body cannot be sent
        twice, so it always gets a new connection.

        Raises:
            httpx.TransportError: `ConnectError`, `ConnectTimeout`, `ReadTimeout`, `ReadError`, `WriteError`
                or `RemoteProtocolError`. Iterating the body may raise the last two kinds, after every byte
                that did arrive.
        """
        if self._closed:
            raise httpx.ConnectError("the transport is closed")
        try:
            if not isinstance(request.stream, httpx.ByteStream):
                return await self._send(self._fresh, request, request.stream)
            try:
                return await self._send(self._pooled, request, b"".join(request.stream))
            except _ConnectionLostError as error:
                if not error.stale:
                    raise
            except aiohttp.ClientConnectionResetError:
                pass  # lost between the pool and the first write: nothing was sent
            return await self._send(self._fresh, request, b"".join(request.stream))
        except (aiohttp.ClientError, OSError) as error:
            raise _translated(error) from error

    async def _send(
        self, session: aiohttp.ClientSession, request: httpx.Request, body: object
    ) -> httpx.Response:
        response = await session.request(
            request.method,
            _url(request),
            headers=[(_text(k), _text(v)) for k, v in request.headers.raw if k.lower() not in _FRAMING],
            data=_payload(body),
            allow_redirects=False,
            timeout=_timeout(request),
            proxy=_environment_proxy(request.url) if self._trust_env else None,
        )
        return httpx.Response(
            response.status,
            headers=list(response.raw_headers),
            stream=_ResponseBody(response),
            extensions={"reason_phrase": (response.reason or "").encode("latin-1", "replace")},
            request=request,
        )

    async def aclose(self) -> None:
        """Close every connection. Calling it twice does no harm."""
        self._closed = True
        for name in ("_pooled", "_fresh"):
            session = self.__dict__.get(name)
            if session is not None:
                await session.close()
