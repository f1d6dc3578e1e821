"""An HTTP/1.1 client of our own, for little time and memory on the way of a request.

Nothing is decoded, followed or remembered. A small request is one write, its wait one future; it has no task,
no lock and no timer of its own, and in the pool nobody waits.
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
    """Connections of one origin. Nobody ever waits here: who finds none makes one.

    Args:
        idle_expiry_s: Seconds after which a connection that waits is closed.
    """

    def __init__(self, idle_expiry_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._idle_expiry_s = idle_expiry_s
        self._idle: list[UpstreamConnection] = []  # the one that served last is at the end
        self._all: set[UpstreamConnection] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False

    def get_idle_connection(self) -> UpstreamConnection | None:
        """The connection that served last, None if there is none that is young enough."""
        if not self._idle:
            return None
        connection = self._idle.pop()
        if self._loop.time() - connection.idle_since <= self._idle_expiry_s:
            return connection
        connection.close()
        return None  # the others have waited for longer

    def release(self, connection: UpstreamConnection) -> None:
        """A connection has served and may serve again."""
        self._idle.append(connection)
        if self._sweep is None:
            self._sweep = self._loop.call_later(self._idle_expiry_s, self._close_expired)

    def add(self, connection: UpstreamConnection) -> None:
        """A connection stands; it is closed if the pool is."""
        self._all.add(connection)
        if self._closed:
            connection.close()

    def remove(self, connection: UpstreamConnection) -> None:
        """A connection is closed."""
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def _close_expired(self) -> None:
        self._sweep = None
        oldest = self._loop.time() - self._idle_expiry_s
        expired = [connection for connection in self._idle if connection.idle_since <= oldest]
        for connection in expired:
            connection.close()
        if self._idle:
            due = self._idle[0].idle_since + self._idle_expiry_s
            self._sweep = self._loop.call_at(due, self._close_expired)

    def close(self) -> None:
        """Close every connection, whatever is under way on it."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in list(self._all):
            connection.close_with_error()


IDLE_EXPIRY_S = 2.0  # below the 5 s after which common servers close an idle connection
BUFFER_BYTES = 32_768


@dataclass(frozen=True, slots=True)
class _OriginPool:
    route: OriginRoute
    pool: ConnectionPool


class NativeEngine:
    """`ports.HttpEngine` on the event loop's own transports. One per event loop.

    SSL_CERT_FILE and SSL_CERT_DIR name the trusted roots.

    Args:
        proxies: Which origins are reached through which proxies.
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
        """Send a request (`ports.HttpEngine`). A streamed body always gets a new connection.

        Raises:
            httpx.TransportError: As the port says.
        """
        origin = self._origins.get(request.origin) or self._add_origin(request.origin)
        lines = encode_request_head(request, origin.route)
        if isinstance(request.body, bytes):
            connection = origin.pool.get_idle_connection()
            if connection is not None:
                answer = connection.send_request(lines, request.body, None, request.silence_s)
                try:
                    await answer.wait_for_head()
                except UnansweredError:
                    pass
                else:
                    return answer
        connection = await self._open_connection(origin, request.connect_s)
        answer = connection.send_request(lines, request.body, request.length, request.silence_s)
        await answer.wait_for_head()
        return answer

    def _add_origin(self, name: str) -> _OriginPool:
        if self._closed:
            raise httpx.ConnectError("the engine is closed")
        made = _OriginPool(resolve_route(name, self._proxies), ConnectionPool(self._idle_expiry_s))
        self._origins[name] = made
        return made

    async def _open_connection(self, origin: _OriginPool, limit_s: float | None) -> UpstreamConnection:
        connection = await open_connection(
            origin.route, self._tls, lambda: UpstreamConnection(origin.pool, self._buffer), limit_s
        )
        if self._closed:
            raise httpx.ConnectError("the engine is closed")
        return connection

    async def aclose(self) -> None:
        """Close every connection. Calling it twice does no harm."""
        self._closed = True
        for origin in self._origins.values():
            origin.pool.close()
        self._origins.clear()
