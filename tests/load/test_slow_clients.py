"""Clients that send next to nothing: they go in time, and nobody else notices them."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.load.peers import ask, chat, note, running_upstream
from tests.proxy_processes import proxy_process

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
BODY = HEAD + b"content-length: 100000\r\n\r\n{"
DEADLINE_S = 4
# A connection is looked at once a second, its body's pace from the first look on; and the machine is busy.
LATE_S = 3.5
# Between two bytes of a slow client.
PAUSE_S = 0.5
TIMES = 2.0
CLIENTS, REQUESTS = 8, 150
ATTEMPTS = 3


async def slow(port: int, begin: bytes, more: Callable[[], bytes]) -> tuple[float, bytes]:
    """Send on, a little at a time; after how many seconds it was over, and what was said."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    begun = time.monotonic()
    said = asyncio.create_task(reader.read())
    writer.write(begin)
    await asyncio.sleep(random.random() * PAUSE_S)
    while not said.done():
        writer.write(more())
        await asyncio.wait({said}, timeout=PAUSE_S)
    writer.close()
    heard = b"" if said.exception() else said.result()
    return time.monotonic() - begun, heard


@asynccontextmanager
async def slow_clients(port: int, count: int) -> AsyncIterator[list[asyncio.Task[tuple[float, bytes]]]]:
    """Half of them with a head that has no end, half with a body of which a byte comes now and then."""
    heads = [slow(port, HEAD, lambda: b"x-a: b\r\n") for _ in range(count // 2)]
    bodies = [slow(port, BODY, lambda: b" ") for _ in range(count // 2)]
    tasks = [asyncio.create_task(each) for each in (*heads, *bodies)]
    try:
        await asyncio.sleep(0.2)
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def good(port: int, request: bytes, waits: list[float]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(REQUESTS):
        begun = time.perf_counter()
        writer.write(request)
        assert (await reader.readuntil(b"\r\n\r\nok"))[:15] == b"HTTP/1.1 200 OK"
        waits.append(time.perf_counter() - begun)
    writer.close()


async def p99_s(port: int, request: bytes) -> float:
    """How long good requests take, on connections that are used again."""
    waits: list[float] = []
    await asyncio.gather(*(good(port, request, waits) for _ in range(CLIENTS)))
    return sorted(waits)[len(waits) * 99 // 100]


async def test_slow_clients_go_within_their_deadline_and_good_ones_do_not_notice_them(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    count = 500 if pytestconfig.getoption("--runslow") else 50
    ratios: list[float] = []
    over: list[tuple[float, bytes]] = []
    async with (
        running_upstream() as upstream,
        proxy_process(
            tmp_path, upstream.port, head_timeout_s=DEADLINE_S, body_timeout_s=DEADLINE_S
        ) as running,
    ):
        await p99_s(running.port, chat())  # everything is warm
        while not ratios or (min(ratios) > TIMES and len(ratios) < ATTEMPTS):
            alone_s = await p99_s(running.port, chat())
            async with slow_clients(running.port, count) as clients:
                beside_s = await p99_s(running.port, chat())
                assert not any(client.done() for client in clients)
                ratios.append(beside_s / alone_s)
                over += await asyncio.gather(*clients)
        after = await ask(running.port, chat(b"connection: close"))
    longest_s = max(took_s for took_s, _ in over)
    note(f"\n{count} slow clients: good p99 is {min(ratios):.2f} times {alone_s * 1000:.1f} ms, all gone")
    note(f"after {longest_s:.1f} s at most")
    assert min(ratios) <= TIMES
    assert longest_s <= DEADLINE_S + LATE_S
    assert min(took_s for took_s, _ in over) >= DEADLINE_S - 0.5
    told = [heard[:12] for _, heard in over]
    for first in range(0, len(told), count):  # half heads, which are just cut off, and half bodies
        assert set(told[first : first + count // 2]) == {b""}
        assert set(told[first + count // 2 : first + count]) == {b"HTTP/1.1 408"}
    assert after.endswith(b"ok")
