"""An HTTP engine over aiohttp's connection pool.

It guarantees more than a plain client. Bytes are sent and returned unchanged, and chunks are returned as the
network delivered them. Closing a response closes its socket at once. No request waits for a pool slot. If the
upstream has already closed a pooled connection, the request is sent again, and the caller gets no error.
"""

import asyncio
import functools
import io
import re
from itertools import chain
from typing import Any

import aiohttp
import httpx
import yarl
from aiohttp.client_proto import ResponseHandler
from aiohttp.http import HttpProcessingError

from compaction_proxy.gateway.client.proxies import NO_PROXIES, ProxySettings
from compaction_proxy.gateway.client.types import HttpRequest, HttpResponse

IDLE_EXPIRY_S = 2.0  # below the 5 s after which common servers close an idle connection
MAX_HEADER_LINE_BYTES = 65_536
MAX_HEADERS = 1_000
LARGE_BODY_BYTES = 1_048_576
READ_BUFFER_BYTES = 32_768  # aiohttp stops reading from the socket at twice this much unread data

# Bytes that would end a line of the head early, or that no field may contain.
_UNSENDABLE = re.compile(rb"[\r\n\0]")

_SKIP_AUTO_HEADERS = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")

# The httpx error for each aiohttp error. The first matching row decides.
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
    """The connection ended before a response. Not an OSError, so that aiohttp itself does not retry.

    Attributes:
        is_stale: Whether the connection had served a request before and no byte of this response came. If so,
            the upstream closed the connection while it was idle, and the request can be sent again.
    """

    def __init__(self, *, stale: bool) -> None:
        super().__init__("the connection ended before a response")
        self.is_stale = stale


class _AiohttpConnection(ResponseHandler):
    """A connection that knows how many requests it has carried, and whether the response has begun."""

    request_count = 0
    has_response_data = False

    def set_response_params(self, **params: Any) -> None:  # noqa: ANN401 - aiohttp's parameters, passed on
        self.request_count += 1
        self.has_response_data = False
        super().set_response_params(**params)

    def data_received(self, data: bytes) -> None:
        self.has_response_data = self.has_response_data or bool(data)
        super().data_received(data)

    def set_exception(self, exc: BaseException, *cause: BaseException) -> None:
        """Replaces the error of a lost connection by `_ConnectionLostError`, which says whether to retry."""
        is_lost = isinstance(exc, aiohttp.ClientConnectionError) and not isinstance(exc, TimeoutError)
        if is_lost and not isinstance(self.exception(), _ConnectionLostError):
            lost_error = _ConnectionLostError(stale=self.request_count > 1 and not self.has_response_data)
            lost_error.__cause__ = exc
            super().set_exception(lost_error, exc)
        elif not is_lost:
            super().set_exception(exc, *cause)
            if isinstance(exc, HttpProcessingError) and self._payload is not None:
                # aiohttp wakes only a task that waits for the head. A task that reads the body would wait for
                # ever.
                self._payload.set_exception(aiohttp.ClientPayloadError(), exc)

    def is_connected(self) -> bool:
        """Returns whether the connection may be reused.

        If data came while the connection was idle, such as a 408, it may not, because that data would be
        taken for the answer to the next request.
        """
        return super().is_connected() and not self.should_close

    def close(self) -> None:
        """Closes the socket now, and raises an error in a pending read of the body.

        aiohttp's own method would keep the socket open until the whole upload is sent, which never happens if
        the upstream does not read.
        """
        if self._payload is not None and not self._payload.is_eof():
            self._payload.set_exception(aiohttp.ClientOSError())
        if self.transport is not None and self.transport.get_write_buffer_size():
            self.abort()
        super().close()


class _AiohttpConnector(aiohttp.TCPConnector):
    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - aiohttp's parameters, passed on
        super().__init__(limit=0, **options)
        connection_class: type[ResponseHandler] = _AiohttpConnection
        self._factory = functools.partial(connection_class, loop=self._loop)


def _to_httpx_error(error: BaseException) -> httpx.TransportError:
    """Returns the equivalent httpx error. Its message names the kind of failure, never a URL."""
    if isinstance(error, _ConnectionLostError) and error.__cause__ is not None:
        return _to_httpx_error(error.__cause__)
    for aiohttp_error, httpx_error in _HTTPX_ERRORS:
        if isinstance(error, aiohttp_error):
            return httpx_error(type(error).__name__)
    return httpx.NetworkError(type(error).__name__)


class _AiohttpResponse:
    """Implements `types.HttpResponse`. Returns the body as the network delivers it, without decoding."""

    __slots__ = ("_response", "headers", "reason", "status")

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.status = response.status
        self.reason = (response.reason or "").encode("latin-1", "replace")
        self.headers = response.raw_headers
        self._response = response

    async def read(self) -> bytes:
        content = self._response.content
        try:
            return await content.readany()
        except asyncio.CancelledError:
            self._response.close()
            raise
        except aiohttp.ClientError as error:
            # aiohttp raises the error before it returns the bytes that it has buffered. They are returned
            # first here.
            if rest := content._read_nowait(-1):  # noqa: SLF001 - the public method raises first
                return rest
            raise _to_httpx_error(error) from error

    async def aclose(self) -> None:
        self._response.close()


def _decode_header(raw: bytes) -> str:
    """Decodes header bytes for aiohttp, which encodes them as UTF-8. Reads invalid UTF-8 as Latin-1."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin-1")


@functools.lru_cache(maxsize=64)
def _parse_origin(origin: str) -> yarl.URL:
    return yarl.URL(origin)


def _build_url(request: HttpRequest) -> yarl.URL:
    """Builds the URL of a request.

    Its path holds the whole target, which aiohttp then writes byte for byte.
    """
    origin = _parse_origin(request.origin)
    return yarl.URL.build(
        scheme=origin.scheme,
        host=origin.host or "",
        port=origin.explicit_port,
        path=request.target.decode("latin-1"),
        encoded=True,
    )


def _to_payload(body: object) -> object:
    """Returns the body in the form in which aiohttp should send it.

    Large bytes become a file object, because aiohttp would write them in one piece and block the loop.
    """
    if isinstance(body, bytes) and len(body) > LARGE_BODY_BYTES:
        return io.BytesIO(body)
    return body or None


class AiohttpEngine:
    """Implements `types.HttpEngine` with aiohttp. Each event loop needs its own engine.

    Args:
        proxies: Which origins are reached through which proxies. From the environment, the engine reads only
            SSL_CERT_FILE and SSL_CERT_DIR, which name the trusted certificates.
        idle_expiry_s: Seconds after which an idle connection is not used again.
    """

    def __init__(self, *, proxies: ProxySettings = NO_PROXIES, idle_expiry_s: float = IDLE_EXPIRY_S) -> None:
        self._proxies = proxies
        self._idle_expiry_s = idle_expiry_s
        self._tls = httpx.create_ssl_context()
        self._closed = False

    @functools.cached_property
    def _pooled(self) -> aiohttp.ClientSession:
        return self._create_session(_AiohttpConnector(ssl=self._tls, keepalive_timeout=self._idle_expiry_s))

    @functools.cached_property
    def _fresh(self) -> aiohttp.ClientSession:
        return self._create_session(_AiohttpConnector(ssl=self._tls, force_close=True))

    def _create_session(self, connector: _AiohttpConnector) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=_SKIP_AUTO_HEADERS,
            auto_decompress=False,
            read_bufsize=READ_BUFFER_BYTES,
            max_line_size=MAX_HEADER_LINE_BYTES,
            max_field_size=MAX_HEADER_LINE_BYTES,
            max_headers=MAX_HEADERS,
        )

    async def send(self, request: HttpRequest) -> HttpResponse:
        """Sends a request (`types.HttpEngine`). A streamed body always gets a new connection."""
        if self._closed:
            raise httpx.ConnectError("the engine is closed")
        try:
            if not isinstance(request.body, bytes):
                return await self._send_once(self._fresh, request)
            try:
                return await self._send_once(self._pooled, request)
            except _ConnectionLostError as error:
                if not error.is_stale:
                    raise
            except aiohttp.ClientConnectionResetError:
                pass  # lost between the pool and the first write: nothing was sent
            return await self._send_once(self._fresh, request)
        except (aiohttp.ClientError, OSError) as error:
            raise _to_httpx_error(error) from error

    async def _send_once(self, session: aiohttp.ClientSession, request: HttpRequest) -> HttpResponse:
        url = _build_url(request)
        if any(map(_UNSENDABLE.search, chain((request.target,), *request.headers))) or b" " in request.target:
            raise httpx.LocalProtocolError("a field holds what would end its line")
        headers = [(_decode_header(k), _decode_header(v)) for k, v in request.headers]
        if request.body_length is not None and not isinstance(request.body, bytes):
            headers.append(("content-length", str(request.body_length)))
        response = await session.request(
            request.method,
            url,
            headers=headers,
            data=_to_payload(request.body),
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(
                total=None, connect=request.connect_timeout_s, sock_read=request.silence_timeout_s
            ),
            proxy=self._proxies.get_proxy_url(url.scheme, url.host or "", url.port or 0),
        )
        return _AiohttpResponse(response)

    async def aclose(self) -> None:
        """Closes all connections. Further calls do nothing."""
        self._closed = True
        for name in ("_pooled", "_fresh"):
            session = self.__dict__.get(name)
            if session is not None:
                await session.close()
