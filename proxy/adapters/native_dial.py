"""Making connections: names, addresses, proxies and TLS."""

import asyncio
import ssl
from collections.abc import Callable
from typing import Any

import httpx

from proxy.adapters.native_connection import Connection
from proxy.adapters.native_route import Hop, Route

TUNNEL_HEAD_BYTES = 65_536


class _Tunnel(asyncio.Protocol):
    """The proxy's answer to CONNECT."""

    def __init__(self) -> None:
        self.answered: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._head = b""

    def data_received(self, data: bytes) -> None:
        self._head += data
        if self.answered.done():
            return
        if b"\r\n\r\n" in self._head:
            self.answered.set_result(self._head)
        elif len(self._head) > TUNNEL_HEAD_BYTES:
            self.answered.set_exception(httpx.ProxyError("the proxy's answer is too long"))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the loop's
        if not self.answered.done():
            self.answered.set_exception(httpx.ProxyError("the proxy hung up"))


async def dial(
    way: Route, tls: ssl.SSLContext, make: Callable[[], Connection], limit_s: float | None
) -> Connection:
    """A connection over which the origin, or a forwarding proxy, answers.

    Args:
        way: Where to, and through what.
        tls: Which certificates are believed.
        make: Makes the connection's protocol.
        limit_s: Seconds until all of it must be done, None for no limit.

    Raises:
        httpx.ConnectError: It cannot be reached, or is not who it should be.
        httpx.ConnectTimeout: It took too long.
        httpx.ProxyError: The proxy refused.
    """
    try:
        async with asyncio.timeout(limit_s):
            if way.proxy is None:
                return (await _connected(way.origin, tls, make))[1]
            if not way.origin.tls:
                return (await _connected(way.proxy, tls, make))[1]
            return await _through(way, way.proxy, tls, make)
    except TimeoutError as error:
        raise httpx.ConnectTimeout("no connection in time") from error
    except (OSError, ValueError) as error:  # ValueError: a name that no name can be
        raise httpx.ConnectError(type(error).__name__) from error


async def _connected(hop: Hop, tls: ssl.SSLContext, make: Callable[[], Any]) -> tuple[Any, Any]:
    """Transport and protocol; every address of the name is tried."""
    loop = asyncio.get_running_loop()
    name = hop.host if hop.tls else None
    return await loop.create_connection(
        make, hop.host, hop.port, ssl=tls if hop.tls else None, server_hostname=name
    )


async def _through(way: Route, proxy: Hop, tls: ssl.SSLContext, make: Callable[[], Connection]) -> Connection:
    """A connection through a tunnel (RFC 9110 §9.3.6)."""
    loop = asyncio.get_running_loop()
    transport, tunnel = await _connected(proxy, tls, _Tunnel)
    secured = None
    try:
        credential = b"proxy-authorization: %b\r\n" % way.credential if way.credential else b""
        transport.write(
            b"CONNECT %b HTTP/1.1\r\nhost: %b\r\n%b\r\n" % (way.connect_to, way.connect_to, credential)
        )
        head = await tunnel.answered
        if head[9:10] != b"2" or not head.endswith(b"\r\n\r\n"):
            raise httpx.ProxyError(f"the proxy answered {head[9:12].decode('latin-1')}")
        connection = make()
        secured = await loop.start_tls(transport, connection, tls, server_hostname=way.origin.host)
        if secured is None:
            raise httpx.ConnectError("the connection ended")
        connection.connection_made(secured)
        return connection
    finally:
        if secured is None:
            transport.abort()
