"""Opens connections to upstreams, directly or through a proxy, with or without TLS."""

import asyncio
import functools
import socket
import ssl
from collections.abc import Callable, Coroutine, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

import httpx

from compaction_proxy.gateway.client.connection import UpstreamConnection
from compaction_proxy.gateway.client.route import Hop, OriginRoute

MAX_TUNNEL_HEAD_BYTES = 65_536
NEXT_ADDRESS_DELAY_S = 0.25

_Protocol = TypeVar("_Protocol", bound=asyncio.BaseProtocol)
_OpenConnection = tuple[asyncio.Transport, _Protocol]


class _TunnelProtocol(asyncio.Protocol):
    """Collects the status line and the header fields of an HTTP proxy's response to CONNECT."""

    def __init__(self) -> None:
        self.response_head: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._head = b""

    def data_received(self, data: bytes) -> None:
        self._head += data
        if self.response_head.done():
            return
        if b"\r\n\r\n" in self._head:
            self.response_head.set_result(self._head)
        elif len(self._head) > MAX_TUNNEL_HEAD_BYTES:
            self.response_head.set_exception(
                httpx.ProxyError("the response of the outgoing proxy is too long")
            )

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        if not self.response_head.done():
            self.response_head.set_exception(httpx.ProxyError("the outgoing proxy closed the connection"))


async def open_connection(
    route: OriginRoute,
    tls: ssl.SSLContext,
    protocol_factory: Callable[[], UpstreamConnection],
    timeout_s: float | None,
) -> UpstreamConnection:
    """Opens a connection over which requests reach an origin, directly or through a proxy.

    A proxy opens a tunnel to an origin that uses TLS. To other origins, it forwards each request.

    Args:
        route: The origin, and the proxy through which it is reached, if any.
        tls: The TLS settings with the trusted certificates.
        protocol_factory: Creates the object that represents the connection.
        timeout_s: Seconds for all steps together. None sets no limit.

    Raises:
        httpx.ConnectError: If the server cannot be reached, or its certificate is wrong.
        httpx.ConnectTimeout: If the connection was not established in time.
        httpx.ProxyError: If the proxy did not open a tunnel to the origin.
    """
    try:
        async with asyncio.timeout(timeout_s):
            if route.proxy is None:
                _, connection = await _connect_hop(route.origin, tls, protocol_factory)
                return connection
            if not route.origin.uses_tls:
                _, connection = await _connect_hop(route.proxy, tls, protocol_factory)
                return connection
            return await _connect_through_tunnel(route, route.proxy, tls, protocol_factory)
    except TimeoutError as error:
        raise httpx.ConnectTimeout("the connection timed out") from error
    except (OSError, ValueError) as error:  # ValueError: the host is no valid name
        raise httpx.ConnectError(type(error).__name__) from error


async def _connect_hop(
    hop: Hop, tls: ssl.SSLContext, protocol_factory: Callable[[], _Protocol]
) -> _OpenConnection[_Protocol]:
    """Connects to a server. Returns the transport and its protocol.

    If the server's name has several addresses, the result is the connection that is established first.
    """
    loop = asyncio.get_running_loop()
    infos = await loop.getaddrinfo(hop.host, hop.port, type=socket.SOCK_STREAM)
    addresses = _interleave_families([(family, str(address[0])) for family, _, _, _, address in infos])
    tls_options: dict[str, Any] = {"ssl": tls, "server_hostname": hop.host} if hop.uses_tls else {}
    return await _connect_first([
        functools.partial(loop.create_connection, protocol_factory, address, hop.port, **tls_options)
        for address in addresses
    ])  # fmt: skip


def _interleave_families(addresses: Sequence[tuple[int, str]]) -> list[str]:
    """Returns the addresses without duplicates, alternating between the two families (IPv4 and IPv6)."""
    first = [address for family, address in addresses if family == addresses[0][0]]
    others = [address for family, address in addresses if family != addresses[0][0]]
    pairs = zip_longest(dict.fromkeys(first), dict.fromkeys(others))
    return [address for pair in pairs for address in pair if address is not None]


async def _connect_first(
    attempts: Sequence[Callable[[], Coroutine[Any, Any, _OpenConnection[_Protocol]]]],
) -> _OpenConnection[_Protocol]:
    """Returns the connection that is established first.

    Starts the next attempt when one fails, or after `NEXT_ADDRESS_DELAY_S` seconds (RFC 8305).

    Raises:
        OSError: If every attempt failed. The function raises the error of the last attempt.
    """
    if len(attempts) == 1:
        return await attempts[0]()
    tasks: list[asyncio.Task[_OpenConnection[_Protocol]]] = []
    winner = None
    try:
        for delay_s in [NEXT_ADDRESS_DELAY_S] * (len(attempts) - 1) + [None]:
            tasks.append(asyncio.ensure_future(attempts[len(tasks)]()))
            winner = await _wait_for_winner(tasks, delay_s)
            if winner is not None:
                return winner.result()
        return tasks[-1].result()  # raises the error of the last attempt
    finally:
        for task in tasks:
            if task is not winner:
                task.cancel()
                task.add_done_callback(_abort_late_connection)


async def _wait_for_winner(
    tasks: list[asyncio.Task[_OpenConnection[_Protocol]]], delay_s: float | None
) -> asyncio.Task[_OpenConnection[_Protocol]] | None:
    """Returns a task that has succeeded, or None.

    If no task succeeds, the function waits for `delay_s` seconds, but only until one task has failed. If
    `delay_s` is None, it waits until all tasks have failed.
    """
    running = {task for task in tasks if not task.done()}
    while running:
        done, running = await asyncio.wait(running, timeout=delay_s, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if task.exception() is None:
                return task
        if delay_s is not None:
            return None
    return None


def _abort_late_connection(task: asyncio.Task[_OpenConnection[_Protocol]]) -> None:
    """Closes a connection that was made after another connection had already been chosen."""
    if not task.cancelled() and task.exception() is None:
        task.result()[0].abort()


async def _connect_through_tunnel(
    route: OriginRoute, proxy: Hop, tls: ssl.SSLContext, protocol_factory: Callable[[], UpstreamConnection]
) -> UpstreamConnection:
    """Opens a connection to the origin through a proxy's tunnel (RFC 9110 §9.3.6)."""
    loop = asyncio.get_running_loop()
    transport, tunnel = await _connect_hop(proxy, tls, _TunnelProtocol)
    tls_transport = None
    try:
        credential = (
            b"proxy-authorization: %b\r\n" % route.proxy_credential if route.proxy_credential else b""
        )
        transport.write(
            b"CONNECT %b HTTP/1.1\r\nhost: %b\r\n%b\r\n"
            % (route.connect_target, route.connect_target, credential)
        )
        head = await tunnel.response_head
        if head[9:10] != b"2" or not head.endswith(b"\r\n\r\n"):
            raise httpx.ProxyError(f"the outgoing proxy answered {head[9:12].decode('latin-1')}")
        connection = protocol_factory()
        tls_transport = await loop.start_tls(transport, connection, tls, server_hostname=route.origin.host)
        if tls_transport is None:
            raise httpx.ConnectError("the connection ended")
        connection.connection_made(tls_transport)
        return connection
    finally:
        if tls_transport is None:
            transport.abort()
