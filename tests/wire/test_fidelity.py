"""What goes through goes through unchanged."""

import asyncio
import gzip
import random
from typing import Any

import pytest

STREAMS = 2_000
STREAMS_AT_ONCE = 20


def chunked(pieces: list[bytes]) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def slices(data: bytes, rng: random.Random, most: int) -> list[bytes]:
    pieces = []
    while data:
        size = rng.randint(1, most)
        pieces.append(data[:size])
        data = data[size:]
    return pieces


def sse(rng: random.Random) -> bytes:
    """Events as providers send them, and as they should not: CRLF, comments, split UTF-8, no [DONE]."""
    ends = [b"\n\n", b"\r\n\r\n", b"\n"]
    lines = [b": ping", 'data: {"choices":[{"delta":{"content":"žluťoučký 🐎"}}]}'.encode(), b"data: [DONE]"]
    return b"".join(rng.choice(lines) + rng.choice(ends) for _ in range(rng.randint(1, 60)))


async def test_2000_streams_with_random_slicing_arrive_identical(wire: Any) -> None:
    async def script(exchange: Any) -> None:
        rng = random.Random(int(exchange.body))
        body = sse(rng)
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        framed = head + chunked(slices(body, rng, 400))
        for piece in slices(framed, rng, 1_500):
            await exchange.send(piece)
            if rng.random() < 0.3:
                await asyncio.sleep(0)

    async with wire.running_upstream(script) as upstream, wire.running_proxy(upstream.port) as proxy:

        async def client(first: int) -> int:
            same = 0
            for seed in range(first, STREAMS, STREAMS_AT_ONCE):
                reply = await wire.ask(proxy.port, wire.post("/v1/chat/completions", b"%d" % seed))
                same += reply.whole and reply.body == sse(random.Random(seed))
            return same

        assert sum(await asyncio.gather(*map(client, range(STREAMS_AT_ONCE)))) == STREAMS


async def test_a_chunk_is_handed_on_before_the_next_one_comes(wire: Any) -> None:
    go_on = asyncio.Event()

    async def script(exchange: Any) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nfirst\r\n")
        await go_on.wait()
        await exchange.send(b"0\r\n\r\n")

    async with wire.running_upstream(script) as upstream, wire.running_proxy(upstream.port) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(wire.post("/v1/chat/completions"))
        async with asyncio.timeout(5):
            await reader.readuntil(b"first\r\n")
            go_on.set()
            assert await reader.read(-1) == b"0\r\n\r\n"
        writer.close()


async def test_a_compressed_answer_keeps_its_bytes_and_its_header(wire: Any) -> None:
    packed = gzip.compress(b'{"object":"chat.completion"}' * 50)

    async def script(exchange: Any) -> None:
        await exchange.send(
            b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n%s"
            % (len(packed), packed)
        )

    async with wire.running_upstream(script) as upstream, wire.running_proxy(upstream.port) as proxy:
        reply = await wire.ask(
            proxy.port, wire.post("/v1/chat/completions", b"{}", "accept-encoding: gzip, br")
        )
    assert (reply.body, reply.all(b"content-encoding")) == (packed, [b"gzip"])
    assert reply.all(b"content-length") == [b"%d" % len(packed)]
    assert dict(upstream.seen[0].fields)[b"accept-encoding"] == b"gzip, br"


async def test_response_fields_go_back_as_a_list(wire: Any) -> None:
    async def script(exchange: Any) -> None:
        await exchange.send(
            b"HTTP/1.1 200 OK\r\nServer: upstream\r\nDate: never\r\nSet-Cookie: a=1\r\nX-Request-Id: r1\r\n"
            b"Set-Cookie: b=2\r\nConnection: keep-alive, X-Hidden\r\nX-Hidden: 1\r\nKeep-Alive: timeout=5\r\n"
            b"Content-Length: 0\r\nX-Long: " + b"l" * 60_000 + b"\r\n\r\n"
        )

    async with wire.running_upstream(script) as upstream, wire.running_proxy(upstream.port) as proxy:
        first = await wire.ask(proxy.port, wire.post("/v1/chat/completions"))
        again = await wire.ask(proxy.port, wire.post("/v1/chat/completions"))
    assert first.all(b"set-cookie") == [b"a=1", b"b=2"]
    assert (first.all(b"server"), len(first.all(b"date"))) == ([b"uvicorn"], 1)
    assert (first.all(b"x-request-id"), first.all(b"x-compaction-status")) == ([b"r1"], [b"none"])
    assert (first.all(b"x-hidden"), first.all(b"keep-alive")) == ([], [])
    assert first.all(b"x-long") == [b"l" * 60_000]
    assert again.all(b"set-cookie") == [b"a=1", b"b=2"]
    assert b"cookie" not in dict(upstream.seen[1].fields)


async def test_nothing_is_added_to_a_request_but_the_hop_mark(wire: Any) -> None:
    async def script(exchange: Any) -> None:
        await exchange.send(b"HTTP/1.1 204 No Content\r\n\r\n")

    request = wire.post(
        "/v1/chat/completions?a=%2F", b'{"n": 1.0}', "te: trailers", "x-b: 1", "x-a: 2", "x-b: 3"
    )
    async with wire.running_upstream(script) as upstream, wire.running_proxy(upstream.port) as proxy:
        reply = await wire.ask(proxy.port, request)
    seen = upstream.seen[0]
    assert (reply.status, seen.target, seen.body) == (204, b"/v1/chat/completions?a=%2F", b'{"n": 1.0}')
    assert sorted(seen.fields) == sorted(
        [
            (b"host", b"127.0.0.1:%d" % upstream.port),
            (b"content-length", b"10"),
            (b"x-b", b"1"),
            (b"x-a", b"2"),
            (b"x-b", b"3"),
            (b"x-compaction-hop", wire.hop.encode()),
        ]
    )


async def test_the_proxys_own_key_is_sent_instead_of_the_clients(wire: Any) -> None:
    async def script(exchange: Any) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    async with (
        wire.running_upstream(script) as upstream,
        wire.running_proxy(upstream.port, api_key="ours") as proxy,
    ):
        await wire.ask(proxy.port, wire.post("/v1/chat/completions", b"{}", "authorization: Bearer theirs"))
    assert dict(upstream.seen[0].fields)[b"authorization"] == b"Bearer ours"


STATUSES = [*range(400, 419), *range(421, 427), 428, 429, 431, 451, 499, *range(500, 508), 520, 529]


async def test_40_error_statuses_pass_verbatim(wire: Any) -> None:
    async def script(exchange: Any) -> None:
        status = int(exchange.body)
        body = b"<html>%d</html>" % status if status % 2 else b'[{"error": %d}]' % status
        await exchange.send(
            b"HTTP/1.1 %d Whatever\r\nretry-after-ms: 7\r\ncontent-length: %d\r\n\r\n%s"
            % (status, len(body), body)
        )

    assert len(STATUSES) == 40
    async with wire.running_upstream(script) as upstream, wire.running_proxy(upstream.port) as proxy:
        for status in STATUSES:
            reply = await wire.ask(proxy.port, wire.post("/v1/chat/completions", b"%d" % status))
            expected = b"<html>%d</html>" % status if status % 2 else b'[{"error": %d}]' % status
            assert (reply.status, reply.body, reply.all(b"retry-after-ms")) == (status, expected, [b"7"])
    assert len(upstream.seen) == 40


@pytest.mark.parametrize("status", [b"101 Switching Protocols", b"999 Odd", b"garbage"])
async def test_what_is_no_answer_becomes_a_502(wire: Any, status: bytes) -> None:
    async def script(exchange: Any) -> None:
        await exchange.send(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\n\r\n")

    async with wire.running_upstream(script) as upstream, wire.running_proxy(upstream.port) as proxy:
        reply = await wire.ask(proxy.port, wire.post("/v1/chat/completions"))
    assert reply.status == 502
    assert b'"code": "upstream_protocol_error"' in reply.body


async def test_an_interim_response_is_not_taken_for_the_answer(wire: Any) -> None:
    async def script(exchange: Any) -> None:
        await exchange.send(
            b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
        )

    async with wire.running_upstream(script) as upstream, wire.running_proxy(upstream.port) as proxy:
        reply = await wire.ask(proxy.port, wire.post("/v1/chat/completions"))
    assert (reply.status, reply.body, reply.all(b"link")) == (200, b"ok", [])
