"""What has ended is gone at once. The collector comes seldom: it would hold everybody up."""

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from compaction_proxy.gateway.client import connection
from compaction_proxy.gateway.client.parser import ResponseParser
from compaction_proxy.gateway.server.connection import ServerConnection
from compaction_proxy.gateway.server.cycle import RequestResponseCycle
from compaction_proxy.gateway.server.parser import RequestParser

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok"
BEGUN = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: {}\n\n"
KINDS = (ServerConnection, RequestResponseCycle, RequestParser, connection.UpstreamConnection, ResponseParser)
TIMES = 20


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive() -> Counter[str]:
    return Counter(type(each).__name__ for each in gc.get_objects() if isinstance(each, KINDS))


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("leaves", [False, True], ids=["answered", "left"])
async def test_of_connections_that_have_ended_nothing_is_held(wire: Any, chat: Any, *, leaves: bool) -> None:
    async def script(exchange: Any) -> None:
        await exchange.send(BEGUN if leaves else OK)
        if leaves:
            await exchange.reader.read()
        exchange.writer.close()

    async with wire.running_upstream(script) as upstream, wire.running_proxy(upstream.port) as port:
        before = alive()
        for _ in range(TIMES):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(chat())
            await (reader.readuntil(b"data: {}") if leaves else reader.read())
            writer.close()
            del reader, writer
        async with asyncio.timeout(100):
            while alive() - before:  # noqa: ASYNC110 - nobody is told
                await asyncio.sleep(0.05)
    assert len(upstream.seen) == TIMES
