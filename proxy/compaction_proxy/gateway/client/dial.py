"""Making connections: names, addresses, proxies and TLS."""

import asyncio
import functools
import socket
import ssl
from collections.abc import Callable, Coroutine, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

import httpx

from compaction_proxy.gateway.client.connection import Connection
from compaction_proxy.gateway.client.route import Hop, Route

TUNNEL_HEAD_BYTES = 65_536
NEXT_ADDRESS_S = 0.25

_Protocol = TypeVar("_Protocol", bound=asyncio.BaseProtocol)
_Standing = tuple[asyncio.Transport, _Protocol]


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
                _, connection = await _connected(way.origin, tls, make)
                return connection
            if not way.origin.tls:
                _, connection = await _connected(way.proxy, tls, make)
                return connection
            return await _through(way, way.proxy, tls, make)
    except TimeoutError as error:
        raise httpx.ConnectTimeout("no connection in time") from error
    except (OSError, ValueError) as error:  # ValueError: a name that no name can be
        raise httpx.ConnectError(type(error).__name__) from error


async def _connected(hop: Hop, tls: ssl.SSLContext, make: Callable[[], _Protocol]) -> _Standing[_Protocol]:
    """Transport and protocol of a connection to any of a server's addresses."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(hop.host, hop.port, type=socket.SOCK_STREAM)
    addresses = _by_turns([(family, str(address[0])) for family, _, _, _, address in found])
    secured: dict[str, Any] = {"ssl": tls, "server_hostname": hop.host} if hop.tls else {}
    return await _first([
        functools.partial(loop.create_connection, make, address, hop.port, **secured) for address in addresses
    ])  # fmt: skip


def _by_turns(found: Sequence[tuple[int, str]]) -> list[str]:
    """Addresses in their order, but by turns of both families."""
    first = [address for family, address in found if family == found[0][0]]
    others = [address for family, address in found if family != found[0][0]]
    pairs = zip_longest(dict.fromkeys(first), dict.fromkeys(others))
    return [address for pair in pairs for address in pair if address is not None]


async def _first(
    attempts: Sequence[Callable[[], Coroutine[Any, Any, _Standing[_Protocol]]]],
) -> _Standing[_Protocol]:
    """The first connection that stands; another address is tried when one fails, or is slow (RFC 8305).

    Raises:
        OSError: What the last one failed with.
    """
    if len(attempts) == 1:
        return await attempts[0]()
    tasks: list[asyncio.Task[_Standing[_Protocol]]] = []
    won = None
    try:
        for delay_s in [NEXT_ADDRESS_S] * (len(attempts) - 1) + [None]:
            tasks.append(asyncio.ensure_future(attempts[len(tasks)]()))
            won = await _winner(tasks, delay_s)
            if won is not None:
                return won.result()
        return tasks[-1].result()  # it failed
    finally:
        for task in tasks:
            if task is not won:
                task.cancel()
                task.add_done_callback(_discard)


async def _winner(
    tasks: list[asyncio.Task[_Standing[_Protocol]]], delay_s: float | None
) -> asyncio.Task[_Standing[_Protocol]] | None:
    """A task that has succeeded; None when one more has failed, or nothing came of any in time."""
    running = {task for task in tasks if not task.done()}
    while running:
        done, running = await asyncio.wait(running, timeout=delay_s, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if task.exception() is None:
                return task
        if delay_s is not None:
            return None
    return None


def _discard(task: asyncio.Task[_Standing[_Protocol]]) -> None:
    """Close what was connected too late."""
    if not task.cancelled() and task.exception() is None:
        task.result()[0].abort()


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
