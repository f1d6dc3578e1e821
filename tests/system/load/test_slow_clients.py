"""Clients that send next to nothing: they go when their time is over, and nobody else notices them."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.helpers.proxy_processes import ProxyProcess, proxy_process
from tests.system.load.peers import ask, chat, note, running_upstream

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
BODY = HEAD + b"content-length: 100000\r\n\r\n{"
DEADLINE_S = 2
# What a slow client itself costs at most, in seconds of the processor.
SLOW_WORK_S = 0.02
# Between two bytes of a slow client.
PAUSE_S = 0.5
CLIENTS, REQUESTS = 8, 150
# What a good request may cost beside slow clients, of what it costs alone, in the proxy's processor time.
TIMES = 2.0


async def slow(port: int, begin: bytes, more: Callable[[], bytes]) -> bytes:
    """Send on, a little at a time, until it is over; what was said."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    said = asyncio.create_task(reader.read())
    writer.write(begin)
    await asyncio.sleep(random.random() * PAUSE_S)
    while not said.done():
        writer.write(more())
        await asyncio.wait({said}, timeout=PAUSE_S)
    writer.close()
    return b"" if said.exception() else said.result()


@asynccontextmanager
async def slow_clients(port: int, count: int) -> AsyncIterator[list[asyncio.Task[bytes]]]:
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


async def good(port: int, request: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(REQUESTS):
        writer.write(request)
        assert (await reader.readuntil(b"\r\n\r\nok"))[:15] == b"HTTP/1.1 200 OK"
    writer.close()


async def work_s(running: ProxyProcess, request: bytes) -> float:
    """Seconds of the processor that good requests cost, on connections that are used again."""
    before_s = running.cpu_s
    await asyncio.gather(*(good(running.port, request) for _ in range(CLIENTS)))
    return running.cpu_s - before_s


async def test_slow_clients_go_and_good_ones_do_not_notice_them(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    count = 500 if pytestconfig.getoption("--runslow") else 50
    async with (
        running_upstream() as upstream,
        proxy_process(
            tmp_path, upstream.port, head_timeout_s=DEADLINE_S, body_timeout_s=DEADLINE_S
        ) as running,
    ):
        await work_s(running, chat())  # everything is warm
        alone_s = await work_s(running, chat())
        async with slow_clients(running.port, count) as clients:
            beside_s = await work_s(running, chat())
            told = [heard[:12] for heard in await asyncio.gather(*clients)]
        after = await ask(running.port, chat(b"connection: close"))
    note(
        f"\n{count} slow clients: good requests cost {beside_s / alone_s:.2f} times {alone_s:.2f} s, all gone"
    )
    assert beside_s <= TIMES * alone_s + SLOW_WORK_S * count
    assert set(told[: count // 2]) == {b""}  # half heads, which are just cut off
    assert set(told[count // 2 :]) == {b"HTTP/1.1 408"}
    assert after.endswith(b"ok")
