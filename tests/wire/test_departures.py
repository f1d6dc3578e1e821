"""A client that leaves is noticed at every stage, and back-pressure reaches the upstream."""

import asyncio
import socket
from typing import Any

import pytest

NOTICED_WITHIN_S = 0.5

BEGINNINGS = {
    "before the first byte": b"",
    "in the middle of a stream": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nfirst\r\n",
    "in the middle of a body": b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nfirst",
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("stage", BEGINNINGS)
async def test_a_client_that_leaves_ends_the_upstream_call(wire: Any, stage: str, path: str) -> None:
    asked, left = asyncio.Event(), asyncio.Event()

    async def script(exchange: Any) -> None:
        await exchange.send(BEGINNINGS[stage])
        asked.set()
        assert await exchange.reader.read() == b""
        left.set()
        exchange.writer.close()

    async with wire.running_upstream(script) as upstream, wire.running_proxy(upstream.port) as proxy:
        before = asyncio.all_tasks()
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(wire.post(path))
        await asked.wait()
        if BEGINNINGS[stage]:
            await reader.readuntil(b"first")
        writer.close()
        async with asyncio.timeout(NOTICED_WITHIN_S):
            await left.wait()
            while asyncio.all_tasks() - before:  # noqa: ASYNC110 - it is about tasks, which set no event
                await asyncio.sleep(0.005)


@pytest.mark.parametrize("length", [1_000, 1_000_000])
async def test_a_client_that_leaves_while_sending_never_makes_a_whole_request(wire: Any, length: int) -> None:
    arrived = asyncio.Event()

    async def script(exchange: Any) -> None:
        raise AssertionError("half a body was taken for a whole one")

    async with wire.running_upstream(script) as upstream, wire.running_proxy(upstream.port) as proxy:
        before = asyncio.all_tasks()
        _, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(wire.post("/v1/files", b"x" * length)[:-500])
        await writer.drain()
        asyncio.get_running_loop().call_later(0.05, arrived.set)
        await arrived.wait()
        writer.close()
        async with asyncio.timeout(NOTICED_WITHIN_S):
            while upstream.open_sockets or asyncio.all_tasks() - before:  # noqa: ASYNC110 - likewise
                await asyncio.sleep(0.005)
    assert upstream.seen == []


async def test_a_client_that_leaves_within_a_chunked_upload_leaves_it_unfinished(wire: Any) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()
    got = []

    async def script(exchange: Any) -> None:
        got.append(await exchange.reader.readuntil(b"abc\r\n"))
        begun.set()
        got.append(await exchange.reader.read(-1))
        ended.set()
        exchange.writer.close()

    async with wire.running_upstream(script) as upstream, wire.running_proxy(upstream.port) as proxy:
        _, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"POST /v1/files HTTP/1.1\r\nhost: p\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n")
        async with asyncio.timeout(2):
            await begun.wait()
        writer.close()
        async with asyncio.timeout(NOTICED_WITHIN_S):
            await ended.wait()
    assert got == [b"3\r\nabc\r\n", b""]


async def test_a_client_that_stops_reading_stops_the_upstream(wire: Any) -> None:
    offered = 64 * 1_048_576
    sent = 0

    async def script(exchange: Any) -> None:
        nonlocal sent
        await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % offered)
        while sent < offered:
            await exchange.send(b"x" * 65_536)
            sent += 65_536

    async def settled() -> int:
        last = -1
        while last != sent:
            last = sent
            await asyncio.sleep(0.15)
        return last

    async with wire.running_upstream(script) as upstream, wire.running_proxy(upstream.port) as proxy:
        client = socket.create_connection(("127.0.0.1", proxy.port))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        client.sendall(wire.post("/v1/chat/completions"))
        blocked_at = await settled()
        client.close()
    # Kernel buffers of two loopback sockets take several MiB; ours add little.
    assert 0 < blocked_at < offered / 3
