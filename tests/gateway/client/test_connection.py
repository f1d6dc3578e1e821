"""What goes out: heads as given, bodies whole, held back by a slow server, ended when nobody wants them."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
LARGE = bytes(range(256)) * 65_536  # 16 MiB


async def answer(exchange: Any) -> None:
    await exchange.send(OK)


async def test_a_head_goes_out_as_it_was_given(wire: Any, engine: Any, ask: Any, whole: Any) -> None:
    fields = [(b"x-case", b"A b"), (b"accept", b"a"), (b"accept", b"b"), (b"x-utf8", "ž".encode())]
    async with wire.running_upstream(answer) as upstream:
        await whole(await engine().send(ask(upstream.port, target=b"/a%2Fb/%20?c=%C5%BE&d", headers=fields)))
        (seen,) = upstream.seen
    assert seen.head.startswith(b"POST /a%2Fb/%20?c=%C5%BE&d HTTP/1.1\r\nhost: 127.0.0.1:") or (
        seen.head.startswith(b"POST /a%2Fb/%20?c=%C5%BE&d HTTP/1.1\r\nHost: 127.0.0.1:")
    )
    assert sorted(seen.fields) == sorted(
        [*fields, (b"host", b"127.0.0.1:%d" % upstream.port), (b"content-length", b"2")]
    )


@pytest.mark.parametrize(
    ("method", "declared"), [("POST", b"0"), ("PUT", b"0"), ("PATCH", b"0"), ("GET", None), ("HEAD", None)]
)
async def test_an_empty_body_is_declared_where_one_is_expected(
    wire: Any, engine: Any, ask: Any, method: str, declared: bytes | None
) -> None:
    async def script(exchange: Any) -> None:
        await exchange.send(b"HTTP/1.1 204 No Content\r\n\r\n")

    async with wire.running_upstream(script) as upstream:
        response = await engine().send(ask(upstream.port, b"", method))
        await response.aclose()
        assert dict(upstream.seen[0].fields).get(b"content-length") == declared


@pytest.mark.parametrize("made", [(b"x", b"a\r\ny: b"), (b"x\n", b"a"), (b"x", b"a\x00"), (b"x\ry", b"a")])
async def test_a_field_that_would_end_its_line_is_refused(
    wire: Any, engine: Any, ask: Any, made: tuple[bytes, bytes]
) -> None:
    async with wire.running_upstream(answer) as upstream:
        with pytest.raises(httpx.LocalProtocolError):
            await engine().send(ask(upstream.port, headers=[made]))
        assert upstream.connections == 0


@pytest.mark.parametrize("target", [b"/a b", b"/a\r\nx: y"])
async def test_a_target_that_would_end_early_is_refused(
    wire: Any, engine: Any, ask: Any, target: bytes
) -> None:
    async with wire.running_upstream(answer) as upstream:
        with pytest.raises(httpx.LocalProtocolError):
            await engine().send(ask(upstream.port, target=target))
        assert upstream.connections == 0


@pytest.mark.parametrize("origin", ["ftp://127.0.0.1", "unix:///tmp/x"])
async def test_an_origin_of_another_protocol_is_refused(engine: Any, ask: Any, origin: str) -> None:
    with pytest.raises(httpx.UnsupportedProtocol):
        await engine().send(ask(1, origin=origin))


@pytest.mark.parametrize("length", [None, 3 * 70_000])
async def test_a_stream_arrives_as_it_was_given(
    wire: Any, engine: Any, ask: Any, whole: Any, length: int | None
) -> None:
    async def body() -> AsyncIterator[bytes]:
        for letter in (b"a", b"b", b"c"):
            yield letter * 70_000
            yield b""
            await asyncio.sleep(0)

    came = b""

    async def script(exchange: Any) -> None:
        nonlocal came
        came = exchange.body
        while length is None and not came.endswith(b"\r\n0\r\n\r\n"):
            came += await exchange.reader.read(65_536)
        await exchange.send(OK)

    async with wire.running_upstream(script) as upstream:
        assert await whole(await engine().send(ask(upstream.port, body(), body_length=length))) == b"ok"
    letters = [letter * 70_000 for letter in (b"a", b"b", b"c")]
    framed = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in letters) + b"0\r\n\r\n"
    assert came.lower() == (framed if length is None else b"".join(letters))


@pytest.mark.virtual_time
async def test_a_server_that_does_not_read_holds_a_stream_back(wire: Any, engine: Any, ask: Any) -> None:
    given = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal given
        while True:
            given += 65_536
            yield b"x" * 65_536

    async def script(exchange: Any) -> None:
        await exchange.reader.read(1)
        await asyncio.sleep(60)

    async with wire.running_upstream(script) as upstream:
        sending = asyncio.create_task(engine().send(ask(upstream.port, body(), silence_timeout_s=60.0)))
        before = -1
        while before != given or not given:
            before = given
            await asyncio.sleep(0.1)
        assert given < 32_000_000
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        upstream.seen[0].writer.close()


@pytest.mark.parametrize("kind", ["bytes", "stream"])
async def test_an_answer_that_comes_before_the_body_is_sent_is_read(
    wire: Any, engine: Any, ask: Any, whole: Any, kind: str
) -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 65_536

    async def script(exchange: Any) -> None:
        await exchange.send(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno")
        await asyncio.sleep(60)

    sender = engine()
    async with wire.running_upstream(script) as upstream:
        upstream.read_bodies = False
        body = LARGE if kind == "bytes" else endless()
        response = await sender.send(ask(upstream.port, body))
        assert (response.status, await whole(response)) == (413, b"no")
        upstream.seen[0].writer.close()


async def test_what_a_stream_raises_ends_the_exchange(wire: Any, engine: Any, ask: Any) -> None:
    left = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield b"a"
        raise KeyError("gone")

    async def script(exchange: Any) -> None:
        await exchange.reader.read()
        left.set()

    async with wire.running_upstream(script) as upstream:
        with pytest.raises((KeyError, httpx.WriteError)):
            await engine().send(ask(upstream.port, body()))
        async with asyncio.timeout(100):
            await left.wait()


@pytest.mark.virtual_time
async def test_a_client_that_is_slow_to_send_is_no_silence_of_the_server(
    wire: Any, engine: Any, ask: Any, whole: Any
) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b"a"
        await asyncio.sleep(0.2)
        yield b"b"

    async def script(exchange: Any) -> None:
        await exchange.send(OK)

    async with wire.running_upstream(script) as upstream:
        response = await engine().send(ask(upstream.port, body(), body_length=2, silence_timeout_s=0.1))
        assert await whole(response) == b"ok"
        assert upstream.seen[0].body == b"ab"
