"""A client that leaves is noticed although nothing is taken from its socket."""

import asyncio
import socket
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells of a socket that is not read"
)

_NOTICED_WITHIN_S = 30.0  # only a hang takes as long
_SETTLED_S = 0.3
_UPLOAD_BYTES = 64_000_000
_STEP_BYTES = 32_768
_GET = b"GET /v1/%b HTTP/1.1\r\nhost: proxy\r\n\r\n"
_ENDINGS = {"with a reset": struct.pack("ii", 1, 0), "in peace": struct.pack("ii", 0, 0)}
ending = pytest.mark.parametrize("how", _ENDINGS)


def _leave(client: socket.socket, how: str) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ENDINGS[how])
    client.close()


async def _connected(port: int) -> socket.socket:
    client = socket.socket()
    client.settimeout(0)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
    return client


async def _nothing_left(before: set[asyncio.Task[Any]]) -> None:
    async with asyncio.timeout(_NOTICED_WITHIN_S):
        while asyncio.all_tasks() - before:  # noqa: ASYNC110 - it is about tasks, which set no event
            await asyncio.sleep(0.01)


@ending
async def test_a_client_whose_next_request_waits_for_a_silent_one_is_noticed_when_it_leaves(
    wire: Any, how: str
) -> None:
    asked, left = asyncio.Event(), asyncio.Event()

    async def script(exchange: Any) -> None:
        asked.set()
        assert await exchange.reader.read() == b""
        left.set()
        exchange.writer.close()

    async with wire.running_upstream(script) as upstream, wire.running_proxy(upstream.port) as port:
        before = asyncio.all_tasks()
        client = await _connected(port)
        await asyncio.get_running_loop().sock_sendall(client, _GET % b"one" + _GET % b"two")
        await asked.wait()
        await asyncio.sleep(_SETTLED_S)
        assert not left.is_set()
        _leave(client, how)
        async with asyncio.timeout(_NOTICED_WITHIN_S):
            await left.wait()
        await _nothing_left(before)
    assert [seen.target for seen in upstream.seen] == [b"/v1/one"]


def _untaken_bytes(client: socket.socket) -> int:
    """What lies in the proxy's socket and is not read."""
    near, far = (f":{address[1]:04X}" for address in (client.getsockname(), client.getpeername()))
    lines = Path("/proc/net/tcp").read_text().splitlines()
    rows = [line.split() for line in lines if near in line and far in line]
    return next(int(row[4][-8:], 16) for row in rows if row[1].endswith(far) and row[2].endswith(near))


async def _send_until_untaken(client: socket.socket, data: bytes) -> None:
    """Send little by little until nothing is taken any more; all that was sent is in the proxy's system."""
    for at in range(0, len(data), _STEP_BYTES):
        await asyncio.get_running_loop().sock_sendall(client, data[at : at + _STEP_BYTES])
        await asyncio.sleep(0.001)
        if _untaken_bytes(client):
            await asyncio.sleep(_SETTLED_S)
            if _untaken_bytes(client):
                return
    pytest.fail("all was taken")


@ending
async def test_a_client_whose_upload_nobody_reads_is_noticed_when_it_leaves(wire: Any, how: str) -> None:
    held: list[asyncio.StreamWriter] = []

    async def read_next_to_nothing(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)

    upstream = await asyncio.start_server(read_next_to_nothing, "127.0.0.1", 0)
    async with wire.running_proxy(upstream.sockets[0].getsockname()[1]) as port:
        before = asyncio.all_tasks()
        client = await _connected(port)
        await _send_until_untaken(client, wire.post("/v1/files", bytes(_UPLOAD_BYTES)))
        try:
            assert asyncio.all_tasks() - before  # the request is under way
            _leave(client, how)
            await _nothing_left(before)
        finally:
            held[0].transport.abort()
            upstream.close()
    assert len(held) == 1
