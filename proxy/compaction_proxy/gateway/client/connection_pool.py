"""The proxy's own HTTP/1.1 client.

It decodes nothing, follows no redirects and stores no cookies. To send a small request over an idle
connection, the client writes once, waits for one future and creates no task or lock. No request waits until
a connection becomes idle: if none is idle, the client opens a new one.
"""

import asyncio
from dataclasses import dataclass

import httpx

from compaction_proxy.gateway.client.connection import UnansweredError, UpstreamConnection
from compaction_proxy.gateway.client.dial import open_connection
from compaction_proxy.gateway.client.proxies import NO_PROXIES, ProxySettings
from compaction_proxy.gateway.client.response import NativeResponse
from compaction_proxy.gateway.client.route import OriginRoute, encode_request_head, resolve_route
from compaction_proxy.gateway.client.types import HttpRequest


class ConnectionPool:
    """Keeps the connections to one origin. If none is idle, the caller opens a new one without waiting.

    Args:
        idle_expiry_s: Seconds after which an idle connection is closed.
    """

    def __init__(self, idle_expiry_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._idle_expiry_s = idle_expiry_s
        self._idle: list[UpstreamConnection] = []  # the connection that was used last is at the end
        self._all: set[UpstreamConnection] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False

    def pop_idle_connection(self) -> UpstreamConnection | None:
        """Removes and returns the idle connection that was used last.

        Returns None if this connection has expired, or if none is idle.
        """
        if not self._idle:
            return None
        connection = self._idle.pop()
        if self._loop.time() - connection.idle_since <= self._idle_expiry_s:
            return connection
        connection.close()
        return None  # the others have been idle for longer, so they have expired, too

    def release(self, connection: UpstreamConnection) -> None:
        """Adds a connection to the idle connections. The connection must be able to serve another request."""
        self._idle.append(connection)
        if self._sweep is None:
            self._sweep = self._loop.call_later(self._idle_expiry_s, self._close_expired)

    def add(self, connection: UpstreamConnection) -> None:
        """Adds a new connection. Closes it if the pool is closed."""
        self._all.add(connection)
        if self._closed:
            connection.close()

    def remove(self, connection: UpstreamConnection) -> None:
        """Removes a closed connection from the pool."""
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def _close_expired(self) -> None:
        self._sweep = None
        expiry_limit = self._loop.time() - self._idle_expiry_s
        expired = [connection for connection in self._idle if connection.idle_since <= expiry_limit]
        for connection in expired:
            connection.close()
        if self._idle:
            due = self._idle[0].idle_since + self._idle_expiry_s
            self._sweep = self._loop.call_at(due, self._close_expired)

    def close(self) -> None:
        """Closes all connections, including those that serve a request."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in list(self._all):
            connection.close_with_error()


IDLE_EXPIRY_S = 2.0  # shorter than the 5 s after which common servers close an idle connection
BUFFER_BYTES = 32_768


@dataclass(frozen=True, slots=True)
class _OriginPool:
    route: OriginRoute
    pool: ConnectionPool


class NativeEngine:
    """Implements `types.HttpEngine` with asyncio's transports. Each event loop needs its own engine.

    The environment variables SSL_CERT_FILE and SSL_CERT_DIR may name the trusted certificates.

    Args:
        proxies: Decides which origins are reached through which proxies.
        idle_expiry_s: Seconds after which an idle connection is closed.
    """

    def __init__(self, *, proxies: ProxySettings = NO_PROXIES, idle_expiry_s: float = IDLE_EXPIRY_S) -> None:
        self._proxies = proxies
        self._idle_expiry_s = idle_expiry_s
        self._tls = httpx.create_ssl_context()
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._origins: dict[str, _OriginPool] = {}
        self._closed = False

    async def send(self, request: HttpRequest) -> NativeResponse:
        """Sends a request, as `types.HttpEngine.send` documents.

        A request with a streamed body always gets a new connection, because the body cannot be sent again.

        Raises:
            httpx.TransportError: Under the conditions that `types.HttpEngine.send` documents.
        """
        origin = self._origins.get(request.origin) or self._add_origin(request.origin)
        head = encode_request_head(request, origin.route)
        if isinstance(request.body, bytes):
            connection = origin.pool.pop_idle_connection()
            if connection is not None:
                answer = connection.send_request(head, request.body, None, request.silence_timeout_s)
                try:
                    await answer.wait_for_head()
                except UnansweredError:
                    pass
                else:
                    return answer
        connection = await self._open_connection(origin, request.connect_timeout_s)
        answer = connection.send_request(head, request.body, request.body_length, request.silence_timeout_s)
        await answer.wait_for_head()
        return answer

    def _add_origin(self, name: str) -> _OriginPool:
        if self._closed:
            raise httpx.ConnectError("the client is closed")
        origin = _OriginPool(resolve_route(name, self._proxies), ConnectionPool(self._idle_expiry_s))
        self._origins[name] = origin
        return origin

    async def _open_connection(self, origin: _OriginPool, limit_s: float | None) -> UpstreamConnection:
        connection = await open_connection(
            origin.route, self._tls, lambda: UpstreamConnection(origin.pool, self._buffer), limit_s
        )
        if self._closed:
            raise httpx.ConnectError("the client is closed")
        return connection

    async def aclose(self) -> None:
        """Closes all connections. Further calls do nothing."""
        self._closed = True
        for origin in self._origins.values():
            origin.pool.close()
        self._origins.clear()
