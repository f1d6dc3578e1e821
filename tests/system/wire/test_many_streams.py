"""The proxy as a process under many slow streams, and under a client that reads nothing."""

import asyncio
import contextlib
import hashlib
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.free_ports import find_free_port

ROOT = Path(__file__).resolve().parents[3]
CHAT = "/v1/chat/completions"
CHUNKS, PAUSE_S = 12, 0.2
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
LARGE_BYTES = 50_000_000
STREAM_KIB = 64 * 10  # ten times what is aimed at
UNREAD_KIB = 5_000


@contextlib.asynccontextmanager
async def proxy_process(upstream_port: int) -> AsyncIterator[tuple[int, int]]:
    """The product in a process of its own; gives its port and process id."""
    port = find_free_port()
    settings = {
        "UPSTREAM__BASE_URL": f"http://127.0.0.1:{upstream_port}/v1",
        "STORE__URL": "memory://",
        "SUMMARY__MODEL": "none",
        "MODELS": '{"m": {"window": 128000}}',
        "SERVER__PORT": str(port),
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "compaction_proxy", "serve"),
        env={f"COMPACTION_PROXY__{name}": value for name, value in settings.items()},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        cwd=ROOT,
    )
    try:
        await ready(port)
        yield port, process.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def ready(port: int) -> None:
    async with asyncio.timeout(100), httpx.AsyncClient(trust_env=False) as client:
        while True:
            with contextlib.suppress(httpx.TransportError):
                if (await client.get(f"http://127.0.0.1:{port}/readyz")).status_code == 200:
                    return
            await asyncio.sleep(0.05)


def held_kib(pid: int) -> int:
    """Resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


def chunk(stream: int, number: int) -> bytes:
    return b"data: %d-%d %b\n\n" % (stream, number, b"x" * (number * 7 % 50))


async def slow_stream(exchange: Any) -> None:
    """Numbered chunks, five a second."""
    stream = int(dict(exchange.fields)[b"x-stream"])
    await exchange.send(STREAM)
    for number in range(CHUNKS):
        piece = chunk(stream, number)
        await exchange.send(b"%x\r\n%b\r\n" % (len(piece), piece))
        await asyncio.sleep(PAUSE_S)
    await exchange.send(b"0\r\n\r\n")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
async def test_many_slow_streams_arrive_whole_at_little_memory_each(
    wire: Any, pytestconfig: pytest.Config
) -> None:
    streams = 1_000 if pytestconfig.getoption("--runslow") else 200
    ways = list(wire.ways.values())
    open_streams = 0

    async def read(stream: int) -> str:
        nonlocal open_streams
        data = wire.post(CHAT, wire.chat_body(stream=True), f"x-stream: {stream}", *ways[stream % 2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        came = await reader.readuntil(b"\r\n\r\n")
        open_streams += 1
        while piece := await reader.read(65_536):
            came += piece
        writer.close()
        reply = wire.parse_reply(came)
        assert (reply.status, reply.whole) == (200, True)
        return hashlib.sha256(reply.body).hexdigest()

    async with wire.running_upstream(slow_stream) as upstream, proxy_process(upstream.port) as (port, pid):
        warming = [wire.ask(port, wire.post(CHAT, wire.chat_body(), "x-stream: 0", *way)) for way in ways]
        await asyncio.gather(*warming)  # what is made once is made
        before = held_kib(pid)
        reading = [asyncio.create_task(read(stream)) for stream in range(streams)]
        async with asyncio.timeout(100):
            while open_streams < streams:  # noqa: ASYNC110 - it is a number, which sets no event
                await asyncio.sleep(0.02)
        during = held_kib(pid)
        digests = await asyncio.gather(*reading)
    sent = [b"".join(chunk(stream, number) for number in range(CHUNKS)) for stream in range(streams)]
    assert digests == [hashlib.sha256(body).hexdigest() for body in sent]
    assert (during - before) / streams < STREAM_KIB


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
async def test_a_client_that_reads_nothing_costs_little_memory_and_holds_up_nobody(wire: Any) -> None:
    sent = 0

    async def script(exchange: Any) -> None:
        nonlocal sent
        if b"large" not in exchange.body:
            await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
            return
        await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % LARGE_BYTES)
        for _ in range(0, LARGE_BYTES, 50_000):
            await exchange.send(b"x" * 50_000)
            sent += 50_000

    async with wire.running_upstream(script) as upstream, proxy_process(upstream.port) as (port, pid):
        for way in wire.ways.values():
            assert (await wire.ask(port, wire.post(CHAT, wire.chat_body(), *way))).body == b"ok"
        before = held_kib(pid)
        with socket.create_connection(("127.0.0.1", port)) as idle:
            idle.sendall(wire.post(CHAT, wire.chat_body(user="large")))
            last = -1
            while last != sent or not sent:  # until the kernels and we hold what we hold
                last = sent
                await asyncio.sleep(0.2)
            for _ in range(50):
                assert (await wire.ask(port, wire.post(CHAT, wire.chat_body()))).body == b"ok"
            during = held_kib(pid)
            blocked_at, left = sent, LARGE_BYTES
            idle.settimeout(0)
            head, _, body = (await asyncio.get_running_loop().sock_recv(idle, 65_536)).partition(b"\r\n\r\n")
            left -= len(body)
            while left and (data := await asyncio.get_running_loop().sock_recv(idle, 1_048_576)):
                left -= len(data)
    assert head.startswith(b"HTTP/1.1 200")
    assert (blocked_at < LARGE_BYTES, left) == (True, 0)
    assert during - before < UNREAD_KIB
