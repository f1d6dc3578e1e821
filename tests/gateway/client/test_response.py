"""How answers end, what of them is handed on, and what is none: the same for every engine."""

import asyncio
import contextlib
import random
from typing import Any

import httpx
import pytest

from compaction_proxy.gateway.client.types import HttpResponse

HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
FUZZED = 300


async def read_into(got: list[bytes], response: HttpResponse) -> None:
    """Read a body to its end; what came before an error counts."""
    try:
        while chunk := await response.read():
            got.append(chunk)
    finally:
        await response.aclose()


WHOLE = {
    "content-length": (HEAD + b"content-length: 5\r\n\r\nhello", b"hello", 1),
    "chunked": (CHUNKED + b"2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n", b"hello", 1),
    "chunked with trailers": (CHUNKED + b"5\r\nhello\r\n0\r\nx-sum: 1\r\n\r\n", b"hello", 1),
    "chunk extensions": (CHUNKED + b"5;a=b\r\nhello\r\n0\r\n\r\n", b"hello", 1),
    "connection: close": (HEAD + b"connection: close\r\ncontent-length: 5\r\n\r\nhello", b"hello", 2),
    "HTTP/1.0": (b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\nhello", b"hello", 2),
    "empty": (HEAD + b"content-length: 0\r\n\r\n", b"", 1),
    "100 and 103 before it": (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n"
        + HEAD
        + b"content-length: 5\r\n\r\nhello",
        b"hello",
        1,
    ),
    "a folded field": (HEAD + b"x: a\r\n  b\r\ncontent-length: 5\r\n\r\nhello", b"hello", 1),
    "lines that end in LF": (b"HTTP/1.1 200 OK\ncontent-length: 5\n\nhello", b"hello", 1),
    "an encoding": (HEAD + b"content-encoding: gzip\r\ncontent-length: 5\r\n\r\nhello", b"hello", 1),
}


@pytest.mark.parametrize(("data", "body", "connections"), WHOLE.values(), ids=WHOLE)
async def test_a_whole_answer_is_read_and_its_connection_serves_again_if_it_may(
    wire: Any, engine: Any, ask: Any, whole: Any, data: bytes, body: bytes, connections: int
) -> None:
    async def script(exchange: Any) -> None:
        await exchange.send(data)

    sender = engine()
    async with wire.running_upstream(script) as upstream:
        for _ in range(2):
            response = await sender.send(ask(upstream.port))
            assert (response.status, response.reason) == (200, b"OK")
            assert await whole(response) == body
        assert upstream.connections == connections


async def test_an_answer_that_comes_byte_by_byte_is_the_same(
    wire: Any, engine: Any, ask: Any, whole: Any
) -> None:
    async def script(exchange: Any) -> None:
        for byte in WHOLE[exchange.body.decode()][0]:
            await exchange.send(bytes([byte]))
            await asyncio.sleep(0)

    sender = engine()
    async with wire.running_upstream(script) as upstream:
        for name, (_, body, _) in WHOLE.items():
            response = await sender.send(ask(upstream.port, name.encode()))
            assert (response.status, response.reason) == (200, b"OK")
            assert await whole(response) == body


@pytest.mark.virtual_time
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_a_body_without_a_declared_end_lasts_as_long_as_the_connection(
    wire: Any, engine: Any, ask: Any, whole: Any, version: bytes
) -> None:
    async def script(exchange: Any) -> None:
        await exchange.send(b"HTTP/%b 200 OK\r\n\r\nhel" % version)
        await asyncio.sleep(0.01)
        await exchange.send(b"lo")
        exchange.writer.close()

    async with wire.running_upstream(script) as upstream:
        assert await whole(await engine().send(ask(upstream.port))) == b"hello"


@pytest.mark.parametrize(
    ("method", "head"),
    [
        ("HEAD", HEAD + b"content-length: 5\r\n\r\n"),
        ("HEAD", CHUNKED),
        ("GET", b"HTTP/1.1 204 No Content\r\n\r\n"),
        ("GET", b"HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n"),
    ],
)
async def test_some_answers_have_no_body_whatever_they_declare(
    wire: Any, engine: Any, ask: Any, whole: Any, method: str, head: bytes
) -> None:
    async def script(exchange: Any) -> None:
        await exchange.send(head)

    sender = engine()
    async with wire.running_upstream(script) as upstream:
        for _ in range(2):
            assert await whole(await sender.send(ask(upstream.port, b"", method))) == b""
        assert upstream.connections == 1


async def test_fields_come_in_order_with_their_names_in_lower_case(
    wire: Any, engine: Any, ask: Any, whole: Any
) -> None:
    fields = [(b"X-Case", b"a"), (b"set-cookie", b"a=1"), (b"set-cookie", b"b=2"), (b"latin", b"\xe9\xff")]

    async def script(exchange: Any) -> None:
        lines = b"".join(b"%b: %b\r\n" % field for field in fields)
        await exchange.send(b"HTTP/1.1 299 Quite Fine\r\n" + lines + b"content-length: 0\r\n\r\n")

    async with wire.running_upstream(script) as upstream:
        response = await engine().send(ask(upstream.port))
        assert (response.status, response.reason) == (299, b"Quite Fine")
        assert [tuple(field) for field in response.headers] == [
            *[(name.lower(), value) for name, value in fields],
            (b"content-length", b"0"),
        ]
        await whole(response)


@pytest.mark.virtual_time
async def test_what_follows_an_answer_answers_no_request(
    wire: Any, engine: Any, ask: Any, whole: Any
) -> None:
    async def script(exchange: Any) -> None:
        answer = HEAD + b"content-length: 2\r\n\r\nok"
        await exchange.send(answer + answer.replace(b"ok", b"no"))

    sender = engine()
    async with wire.running_upstream(script) as upstream:
        for _ in range(3):
            assert await whole(await sender.send(ask(upstream.port))) == b"ok"
            await asyncio.sleep(0.01)
        assert upstream.connections == 3


async def test_a_switch_of_protocols_is_handed_on_and_the_connection_is_not_used_again(
    wire: Any, engine: Any, ask: Any
) -> None:
    async def script(exchange: Any) -> None:
        await exchange.send(b"HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n\x01\x02")

    sender = engine()
    async with wire.running_upstream(script) as upstream:
        for _ in range(2):
            response = await sender.send(ask(upstream.port, b"", "GET"))
            assert response.status == 101
            await response.aclose()
        assert upstream.connections == 2


CUT = {
    "within the head": (b"HTTP/1.1 200 OK\r\nconte", None),
    "within the body": (HEAD + b"content-length: 9\r\n\r\nhello", b"hello"),
    "before a chunk": (CHUNKED + b"5\r\nhello\r\n", b"hello"),
    "within a chunk": (CHUNKED + b"9\r\nhello", b"hello"),
    "before the last line": (CHUNKED + b"5\r\nhello\r\n0\r\n", b"hello"),
}


@pytest.mark.virtual_time
@pytest.mark.parametrize("reset", [False, True], ids=["ended", "reset"])
@pytest.mark.parametrize(("data", "body"), CUT.values(), ids=CUT)
async def test_a_cut_answer_gives_what_came_and_then_an_error(
    wire: Any, engine: Any, ask: Any, data: bytes, body: bytes | None, reset: Any
) -> None:
    async def script(exchange: Any) -> None:
        await exchange.send(data)
        await asyncio.sleep(0.02)
        if reset:
            exchange.writer.transport.abort()
        exchange.writer.close()

    got: list[bytes] = []
    async with wire.running_upstream(script) as upstream:
        with pytest.raises(httpx.TransportError):
            await read_into(got, await engine().send(ask(upstream.port)))
    assert b"".join(got) == (body or b"")


REFUSED = {
    "no HTTP": b"220 mail.example ESMTP\r\n\r\n",
    "a line that is too long": HEAD + b"x: " + b"a" * 70_000 + b"\r\n\r\n",
    "a line without end": HEAD + b"x: " + b"a" * 600_000,
    "too many fields": HEAD + b"a: b\r\n" * 1_100 + b"content-length: 0\r\n\r\n",
    "a length and chunks": HEAD
    + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "chunks and a length": HEAD
    + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "two lengths": HEAD + b"content-length: 1\r\ncontent-length: 2\r\n\r\nab",
    "a length that is no number": HEAD + b"content-length: x\r\n\r\n",
}


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED)
async def test_what_is_no_answer_or_out_of_bounds_is_a_protocol_error(
    wire: Any, engine: Any, ask: Any, data: bytes
) -> None:
    async def script(exchange: Any) -> None:
        await exchange.send(data)
        await exchange.reader.read()

    async with wire.running_upstream(script) as upstream:
        with pytest.raises(httpx.RemoteProtocolError):
            await engine().send(ask(upstream.port))


@pytest.mark.virtual_time
async def test_a_chunk_size_that_is_none_is_an_error_after_what_came(
    wire: Any, engine: Any, ask: Any
) -> None:
    async def script(exchange: Any) -> None:
        await exchange.send(CHUNKED + b"5\r\nhello\r\n")
        await asyncio.sleep(0.02)
        await exchange.send(b"zz\r\n")
        await exchange.reader.read()

    async with wire.running_upstream(script) as upstream:
        response = await engine().send(ask(upstream.port))
        assert await response.read() == b"hello"
        with pytest.raises(httpx.RemoteProtocolError):
            await response.read()
        await response.aclose()


async def test_a_large_head_within_the_bounds_is_read(wire: Any, engine: Any, ask: Any, whole: Any) -> None:
    fields = [(b"x-%d" % number, b"a" * 100) for number in range(900)] + [(b"long", b"b" * 60_000)]

    async def script(exchange: Any) -> None:
        lines = b"".join(b"%b: %b\r\n" % field for field in fields)
        await exchange.send(HEAD + lines + b"content-length: 2\r\n\r\nok")

    async with wire.running_upstream(script) as upstream:
        response = await engine().send(ask(upstream.port))
        assert [tuple(field) for field in response.headers][:-1] == fields
        assert await whole(response) == b"ok"


async def test_each_chunk_is_read_when_it_comes(wire: Any, engine: Any, ask: Any) -> None:
    go_on = asyncio.Event()

    async def script(exchange: Any) -> None:
        await exchange.send(CHUNKED)
        for number in range(20):
            await exchange.send(b"3\r\nab%c\r\n" % (97 + number))
            await go_on.wait()
            go_on.clear()
        await exchange.send(b"0\r\n\r\n")

    async with wire.running_upstream(script) as upstream:
        response = await engine().send(ask(upstream.port))
        for number in range(20):
            assert await response.read() == b"ab%c" % (97 + number)
            go_on.set()
        assert await response.read() == b""


@pytest.mark.virtual_time
async def test_what_came_at_once_is_read_at_once(wire: Any, engine: Any, ask: Any) -> None:
    async def script(exchange: Any) -> None:
        await exchange.send(CHUNKED)
        await asyncio.sleep(0.01)
        await exchange.send(b"1\r\na\r\n" * 50 + b"0\r\n\r\n")

    async with wire.running_upstream(script) as upstream:
        response = await engine().send(ask(upstream.port))
        assert [await response.read(), await response.read()] == [b"a" * 50, b""]


@pytest.mark.virtual_time
async def test_a_slow_reader_holds_the_sender_back(wire: Any, engine: Any, ask: Any, whole: Any) -> None:
    sent = 0
    size = 16_000_000

    async def script(exchange: Any) -> None:
        nonlocal sent
        await exchange.send(HEAD + b"content-length: %d\r\n\r\n" % size)
        while sent < size:
            await exchange.send(b"x" * 50_000)
            sent += 50_000

    async with wire.running_upstream(script) as upstream:
        response = await engine().send(ask(upstream.port, silence_timeout_s=0.2))
        before = -1
        while before != sent:  # what the two kernels hold
            before = sent
            await asyncio.sleep(0.15)
        assert sent < size
        assert len(await response.read()) <= 200_000
        assert len(await whole(response)) >= size - 200_000  # and our being slow was no silence of theirs


@pytest.mark.virtual_time
async def test_silence_within_an_answer_is_a_timeout(wire: Any, engine: Any, ask: Any) -> None:
    async def script(exchange: Any) -> None:
        await exchange.send(HEAD + b"content-length: 9\r\n\r\n")
        for _ in range(4):
            await exchange.send(b"a")
            await asyncio.sleep(0.05)
        await exchange.reader.read()

    got: list[bytes] = []
    async with wire.running_upstream(script) as upstream:
        response = await engine().send(ask(upstream.port, silence_timeout_s=0.1))
        with pytest.raises(httpx.ReadTimeout):
            await read_into(got, response)
    assert b"".join(got) == b"aaaa"


@pytest.mark.virtual_time
async def test_a_shorter_patience_than_the_last_requests_holds(
    wire: Any, engine: Any, ask: Any, whole: Any
) -> None:
    async def script(exchange: Any) -> None:
        if exchange.body != b"silent":
            await exchange.send(HEAD + b"content-length: 2\r\n\r\nok")

    sender = engine()
    async with wire.running_upstream(script) as upstream:
        await whole(await sender.send(ask(upstream.port, silence_timeout_s=600.0)))
        async with asyncio.timeout(100):
            with pytest.raises(httpx.ReadTimeout):
                await sender.send(ask(upstream.port, b"silent", silence_timeout_s=0.05))
        assert upstream.connections == 1


@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_of_random_bytes_nothing_but_a_transport_error_escapes(
    wire: Any, engine: Any, ask: Any
) -> None:
    rng = random.Random(5)
    framing = [
        b"content-length: 3\r\n",
        b"transfer-encoding: gzip, chunked\r\n",
        b"5\r\nhello\r\n",
        b"0\r\n\r\n",
    ]
    heads = [HEAD, CHUNKED, b"HTTP/1.1 100 \r\n\r\n", b"HTTP/9.9 2"]
    parts = [*heads, *framing, b"\r\n", b"\n", b"\x00", b"a: b"]

    async def script(exchange: Any) -> None:
        await exchange.send(b"".join(rng.choices(parts, k=rng.randint(1, 8))))
        exchange.writer.close()

    sender = engine()
    async with wire.running_upstream(script) as upstream:
        for _ in range(FUZZED):
            with contextlib.suppress(httpx.TransportError):
                await read_into([], await sender.send(ask(upstream.port)))
