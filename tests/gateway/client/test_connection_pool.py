"""What every engine promises of connections: reused while fresh, replaced when stale, closed when left."""

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from compaction_proxy.gateway.client.httpx_transport import EngineTransport
from tests.helpers.free_ports import find_free_port

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
CANCELS = 2_000


def request(port: int, method: str = "POST", body: Any = b"{}", **timeouts: float | None) -> httpx.Request:
    url = f"http://127.0.0.1:{port}/x"
    extensions = {"timeout": {"connect": 30.0, "read": 30.0, **timeouts}}
    return httpx.Request(method, url, content=body, extensions=extensions)


async def fetch(transport: httpx.AsyncBaseTransport, asked: httpx.Request) -> bytes:
    response = await transport.handle_async_request(asked)
    try:
        return await response.aread()
    finally:
        await response.aclose()


async def collect(response: httpx.Response, into: list[bytes]) -> None:
    async for chunk in response.aiter_raw():
        into.append(chunk)  # noqa: PERF401 - what came before an error counts


async def eventually(condition: Any) -> None:
    async with asyncio.timeout(100):
        while not condition():  # noqa: ASYNC110 - it is about sockets, which set no event
            await asyncio.sleep(0.005)


async def answer(exchange: Any) -> None:
    await exchange.send(OK)


async def answer_and_close(exchange: Any) -> None:
    await exchange.send(OK)
    exchange.writer.close()


async def test_cancels_leak_nothing(wire: Any, engine: Any, runslow: Any) -> None:
    async def script(exchange: Any) -> None:
        if exchange.body == b"hang":
            await exchange.reader.read()
            exchange.writer.close()
        else:
            await exchange.send(OK)

    transport = EngineTransport(engine())
    async with wire.running_upstream(script) as upstream:
        for batch in range((5 if runslow else 1) * CANCELS // 50):
            tasks = [
                asyncio.create_task(fetch(transport, request(upstream.port, body=b"hang"))) for _ in range(50)
            ]
            for _ in range(batch % 12):
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(error) for error in ended] == [asyncio.CancelledError] * 50
        assert (
            await asyncio.gather(*(fetch(transport, request(upstream.port)) for _ in range(120)))
            == [b"ok"] * 120
        )
        await transport.aclose()
        await eventually(lambda: upstream.open_sockets == 0)


async def test_connections_are_reused(wire: Any, engine: Any) -> None:
    transport = EngineTransport(engine())
    async with wire.running_upstream(answer) as upstream:
        for _ in range(5):
            assert await fetch(transport, request(upstream.port)) == b"ok"
        assert upstream.connections == 1
        await transport.aclose()


async def test_a_streamed_body_never_goes_over_a_reused_connection(wire: Any, engine: Any) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b"abc"

    async def script(exchange: Any) -> None:
        if (b"transfer-encoding", b"chunked") in exchange.fields:
            await exchange.reader.readuntil(b"0\r\n\r\n")
        await exchange.send(OK)

    transport = EngineTransport(engine())
    async with wire.running_upstream(script) as upstream:
        await fetch(transport, request(upstream.port))
        assert await fetch(transport, request(upstream.port, body=body())) == b"ok"
        await fetch(transport, request(upstream.port))
        assert upstream.connections == 2
        await transport.aclose()


async def test_an_expired_connection_is_not_used_again(wire: Any, engine: Any) -> None:
    transport = EngineTransport(engine(idle_expiry_s=0.02))
    async with wire.running_upstream(answer) as upstream:
        await fetch(transport, request(upstream.port))
        await asyncio.sleep(0.05)
        await fetch(transport, request(upstream.port))
        assert upstream.connections == 2
        await transport.aclose()


async def test_a_stale_connection_costs_no_error(wire: Any, engine: Any, runslow: Any) -> None:
    """The upstream closes idle connections around the moment they are used again."""
    expiry_s = 0.02

    async def script(exchange: Any) -> None:
        await exchange.send(OK)
        asyncio.get_running_loop().call_later(expiry_s, exchange.writer.close)

    transport = EngineTransport(engine(idle_expiry_s=1.0))
    async with wire.running_upstream(script) as upstream:

        async def client(number: int) -> None:
            for turn in range(250 if runslow else 25):
                assert await fetch(transport, request(upstream.port)) == b"ok"
                await asyncio.sleep(expiry_s + (number * 25 + turn) % 11 * 0.001 - 0.005)

        await asyncio.gather(*map(client, range(40)))
        await transport.aclose()


@pytest.mark.parametrize("method", ["GET", "POST", "PUT"])
async def test_a_reused_connection_that_ends_unanswered_is_replayed_exactly_once(
    wire: Any, engine: Any, method: str
) -> None:
    async def script(exchange: Any) -> None:
        if len(upstream.seen) == 1:
            await exchange.send(OK)
        else:
            exchange.writer.close()

    transport = EngineTransport(engine())
    async with wire.running_upstream(script) as upstream:
        await fetch(transport, request(upstream.port, method))
        with pytest.raises(httpx.RemoteProtocolError):
            await fetch(transport, request(upstream.port, method))
        assert (len(upstream.seen), upstream.connections) == (3, 2)
        await transport.aclose()


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_fresh_connection_that_ends_unanswered_is_not_replayed(
    wire: Any, engine: Any, method: str
) -> None:
    async def script(exchange: Any) -> None:
        exchange.writer.close()

    transport = EngineTransport(engine())
    async with wire.running_upstream(script) as upstream:
        with pytest.raises(httpx.RemoteProtocolError):
            await fetch(transport, request(upstream.port, method))
        assert len(upstream.seen) == 1
        await transport.aclose()


async def test_a_reused_connection_that_ends_within_the_answer_is_not_replayed(
    wire: Any, engine: Any
) -> None:
    async def script(exchange: Any) -> None:
        if len(upstream.seen) == 1:
            await exchange.send(OK)
        else:
            await exchange.send(b"HTTP/1.1 2")
            exchange.writer.close()

    transport = EngineTransport(engine())
    async with wire.running_upstream(script) as upstream:
        await fetch(transport, request(upstream.port))
        with pytest.raises(httpx.RemoteProtocolError):
            await fetch(transport, request(upstream.port))
        assert len(upstream.seen) == 2
        await transport.aclose()


@pytest.mark.virtual_time
async def test_what_came_while_idle_answers_no_request(wire: Any, engine: Any) -> None:
    async def script(exchange: Any) -> None:
        await exchange.send(OK)
        if len(upstream.seen) == 1:
            await asyncio.sleep(0.01)
            await exchange.send(b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n")

    transport = EngineTransport(engine())
    async with wire.running_upstream(script) as upstream:
        await fetch(transport, request(upstream.port))
        await asyncio.sleep(0.03)
        assert await fetch(transport, request(upstream.port)) == b"ok"
        assert upstream.connections == 2
        await transport.aclose()


async def test_closing_a_response_before_its_end_hangs_up(wire: Any, engine: Any) -> None:
    left = asyncio.Event()

    async def script(exchange: Any) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nx")
        await exchange.reader.read()
        left.set()

    transport = EngineTransport(engine())
    async with wire.running_upstream(script) as upstream:
        response = await transport.handle_async_request(request(upstream.port))
        await response.aclose()
        async with asyncio.timeout(100):
            await left.wait()
        await transport.aclose()


@pytest.mark.virtual_time
async def test_giving_up_a_stalled_upload_closes_the_socket(wire: Any, engine: Any) -> None:
    go_on = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 65_536

    async def script(exchange: Any) -> None:
        await go_on.wait()  # without reading, so that what was written stays unsent
        exchange.writer.close()

    def open_files() -> int:
        return len(list(Path("/dev/fd").iterdir()))

    transport = EngineTransport(engine())
    async with wire.running_upstream(script) as upstream:
        before = open_files()
        upload = asyncio.create_task(fetch(transport, request(upstream.port, body=body())))
        await eventually(lambda: upstream.seen)
        await asyncio.sleep(0.1)
        assert open_files() == before + 2  # both ends
        upload.cancel()
        await asyncio.gather(upload, return_exceptions=True)
        await eventually(lambda: open_files() == before + 1)
        go_on.set()
        await eventually(lambda: upstream.open_sockets == 0)
        await transport.aclose()


@pytest.mark.virtual_time
async def test_bytes_that_came_before_a_cut_are_given_before_the_error(wire: Any, engine: Any) -> None:
    async def script(exchange: Any) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\npart")
        exchange.writer.close()

    transport = EngineTransport(engine())
    got: list[bytes] = []
    async with wire.running_upstream(script) as upstream:
        response = await transport.handle_async_request(request(upstream.port))
        await asyncio.sleep(0.05)  # until the end of the connection has arrived too
        with pytest.raises(httpx.RemoteProtocolError):
            await collect(response, got)
        await response.aclose()
        await transport.aclose()
    assert got == [b"part"]


@pytest.mark.virtual_time
async def test_errors_are_of_httpxs_kinds(wire: Any, engine: Any) -> None:
    closed_port = find_free_port()

    async def script(exchange: Any) -> None:
        if exchange.body == b"silent":
            await exchange.reader.read()
        else:
            await exchange.send(b"not http at all\r\n\r\n")

    transport = EngineTransport(engine())
    async with wire.running_upstream(script) as upstream:
        with pytest.raises(httpx.ConnectError):
            await fetch(transport, request(closed_port))
        with pytest.raises(httpx.ReadTimeout):
            await fetch(transport, request(upstream.port, body=b"silent", read=0.05))
        with pytest.raises(httpx.RemoteProtocolError):
            await fetch(transport, request(upstream.port))
        await transport.aclose()
        with pytest.raises(httpx.ConnectError):
            await fetch(transport, request(upstream.port))


@pytest.mark.virtual_time
async def test_a_connection_that_does_not_stand_in_time_is_a_connect_timeout(engine: Any) -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        port = full.getsockname()[1]
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.settimeout(0)
            filler.connect_ex(("127.0.0.1", port))
        transport = EngineTransport(engine())
        with pytest.raises(httpx.ConnectTimeout):
            await fetch(transport, request(port, connect=0.1))
        await transport.aclose()
        for filler in fillers:
            filler.close()
