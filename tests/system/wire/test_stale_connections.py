"""An upstream that closes its idle connections at the worst moment costs no client an error."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

CHAT = "/v1/chat/completions"
AT_ONCE = 20
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
CLOSING = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok"

Script = Callable[[Any], Awaitable[None]]


async def at_once(exchange: Any) -> None:
    await exchange.send(ANSWER)
    exchange.writer.close()


async def with_a_reset(exchange: Any) -> None:
    await exchange.send(ANSWER)
    await asyncio.sleep(random.random() * 0.003)
    exchange.writer.transport.abort()
    exchange.writer.close()


async def a_moment_later(exchange: Any) -> None:
    await exchange.send(ANSWER)
    asyncio.get_running_loop().call_later(random.random() * 0.003, exchange.writer.close)


async def as_the_next_request_comes(exchange: Any) -> None:
    """Every connection serves once; its second request meets a closed door."""
    if getattr(exchange.writer, "served", False):
        exchange.writer.transport.abort()
        exchange.writer.close()
        return
    exchange.writer.served = True
    await exchange.send(ANSWER)


async def as_it_said(exchange: Any) -> None:
    await exchange.send(CLOSING)
    exchange.writer.close()


async def other_than_it_said(exchange: Any) -> None:
    """It says that it closes, and does not."""
    await exchange.send(CLOSING)


async def by_half(exchange: Any) -> None:
    await exchange.send(ANSWER)
    await asyncio.sleep(random.random() * 0.003)
    exchange.writer.write_eof()


@pytest.mark.timeout(600)  # with --runslow
@pytest.mark.parametrize(
    "script",
    [
        at_once,
        with_a_reset,
        a_moment_later,
        as_the_next_request_comes,
        as_it_said,
        other_than_it_said,
        by_half,
    ],
)
async def test_no_client_sees_an_error_where_the_upstream_closes(
    wire: Any, script: Script, pytestconfig: pytest.Config
) -> None:
    each = (10_000 if pytestconfig.getoption("--runslow") else 1_000) // AT_ONCE
    failures: list[bytes] = []
    ways = list(wire.ways.values())

    async def client(number: int) -> None:
        rng = random.Random(number)
        data = wire.post(CHAT, wire.chat_body(), *ways[number % 2]).replace(b"connection: close\r\n", b"")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(each):
            writer.write(data)
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            body = await reader.readexactly(length)
            if (head[:12], body) != (b"HTTP/1.1 200", b"ok"):
                failures.append(head + body)
            await asyncio.sleep(rng.choice((0, 0, 0.001, 0.002, 0.003)))
        writer.close()

    async with wire.running_upstream(script) as upstream, wire.running_proxy(upstream.port) as port:
        await asyncio.gather(*map(client, range(AT_ONCE)))
    assert failures[:3] == []
