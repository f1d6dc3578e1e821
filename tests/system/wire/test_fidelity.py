"""What goes through goes through unchanged."""

import asyncio
import gzip
import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from compaction_proxy.storage import envelope
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.store import ListEntry, Record
from compaction_proxy.telemetry import exchange_log

CHAT = "/v1/chat/completions"
STREAMS_AT_ONCE = 20
STREAM_BYTES = 10_000  # on average: 20,000 streams are 200 MB


class Kept(MemoryStore):
    """A store that shows what was last written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.last: dict[str, bytes] = {}

    async def write(self, items: Sequence[Record | ListEntry]) -> None:
        await super().write(items)
        self.last.update({item.key: item.value for item in items})

    def totals(self, name: str) -> int:
        """The sum of one total over all conversations."""
        records = [
            envelope.unpack(self.last[key]) or {} for key in self.last if key.endswith(":conversation")
        ]
        return sum(record[name] for record in records)


def chunked(pieces: list[bytes]) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def slices_of_any_size(data: bytes, rng: random.Random) -> list[bytes]:
    """Pieces of 1 byte to 64 KiB, small ones as likely as large ones; now and then none above 16 bytes."""
    magnitude = 4 if rng.random() < 0.01 else 16
    pieces, start = [], 0
    while start < len(data):
        stop = start + int(2 ** rng.uniform(0, magnitude))
        pieces.append(data[start:stop])
        start = stop
    return pieces


def sse(seed: int) -> bytes:
    """Events as providers send them, and as they should not; no two alike, so that none may change places.

    CRLF, comments, a byte order mark, split UTF-8, a line of 1 MiB, no [DONE], more behind it.
    """
    rng = random.Random(seed)
    ends = [b"\n\n", b"\r\n\r\n", b"\n"]
    said = "žluťoučký 🐎 " * 50
    events = [b"\xef\xbb\xbf"] if seed % 3 == 0 else []
    for number in range(rng.randint(1, 60)):
        text = said[: rng.randint(1, 600)].encode()
        data = b'data: {"choices":[{"delta":{"content":"%d %b"}}]}' % (number, text)
        line = rng.choice([b": ping %d" % number, data, data])
        events.append(line + rng.choice(ends))
    again = events[:3]
    if seed % 1_000 == 1:
        events.append(b"data: " + rng.randbytes(524_288).hex().encode() + b"\n\n")
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":2}}' % seed
    return b"".join([*events, usage, rng.choice(ends), b"data: [DONE]\n\n" * rng.randint(0, 1), *again])


@pytest.mark.timeout(600)  # with --runslow
async def test_streams_of_any_shape_in_slices_of_any_size_arrive_identical_and_are_counted(
    wire: Any, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    """Every other one goes past the gate."""
    streams = 20_000 if pytestconfig.getoption("--runslow") else 2_000
    monkeypatch.setattr(exchange_log, "FLUSH_INTERVAL_S", 600.0)  # so that the totals are written at the end

    async def script(exchange: Any) -> None:
        seed = json.loads(exchange.body)["seed"]
        rng = random.Random(-seed)
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        framed = head + chunked(slices_of_any_size(sse(seed), rng))
        for piece in slices_of_any_size(framed, rng):
            await exchange.send(piece)
            if rng.random() < 0.3:
                await asyncio.sleep(0)

    ways = list(wire.ways.values())
    bodies = [wire.chat_body(seed=seed, stream=True) for seed in range(streams)]
    store = Kept()
    async with (
        wire.running_upstream(script) as upstream,
        wire.running_proxy(upstream.port, store=store) as port,
    ):

        async def client(first: int) -> tuple[int, int]:
            same = size = 0
            for seed in range(first, streams, STREAMS_AT_ONCE):
                fields = (*ways[seed % 2], f"x-session-id: {seed % 8}")
                reply = await wire.ask(port, wire.post(CHAT, bodies[seed], *fields))
                read = "tokens-before" in wire.status_of_ours(reply)
                same += reply.whole and reply.body == sse(seed) and read == bool(ways[seed % 2])
                size += len(reply.body)
            return same, size

        came = await asyncio.gather(*map(client, range(STREAMS_AT_ONCE)))
        assert sum(same for same, _ in came) == streams
        assert sum(size for _, size in came) >= streams * STREAM_BYTES
    assert sorted(seen.body for seen in upstream.seen) == sorted(bodies)
    names = ("requests", "request_bytes", "prompt_tokens", "completion_tokens")
    counted = (streams, sum(map(len, bodies)), sum(range(streams)), 2 * streams)
    assert tuple(map(store.totals, names)) == counted


async def test_a_chunk_is_handed_on_before_the_next_one_comes(wire: Any, chat: Any) -> None:
    go_on = asyncio.Event()

    async def script(exchange: Any) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nfirst\r\n")
        await go_on.wait()
        await exchange.send(b"0\r\n\r\n")

    async with wire.running_upstream(script) as upstream, wire.running_proxy(upstream.port) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(chat())
        async with asyncio.timeout(100):
            await reader.readuntil(b"first\r\n")
            go_on.set()
            assert await reader.read(-1) == b"0\r\n\r\n"
        writer.close()


async def test_a_compressed_answer_keeps_its_bytes_and_its_header_and_is_counted(
    wire: Any, chat: Any
) -> None:
    packed = gzip.compress(b'{"object":"chat.completion","usage":{"prompt_tokens":41}}' + b" " * 5_000)
    store = Kept()

    async def script(exchange: Any) -> None:
        await exchange.send(
            b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n%s"
            % (len(packed), packed)
        )

    async with (
        wire.running_upstream(script) as upstream,
        wire.running_proxy(upstream.port, store=store) as port,
    ):
        reply = await wire.ask(port, chat("accept-encoding: gzip, br", "x-session-id: s"))
    assert (reply.body, reply.all(b"content-encoding")) == (packed, [b"gzip"])
    assert reply.all(b"content-length") == [b"%d" % len(packed)]
    assert dict(upstream.seen[0].fields)[b"accept-encoding"] == b"gzip, br"
    assert store.totals("prompt_tokens") == 41


@pytest.mark.parametrize(
    "head",
    [
        b"200 OK\r\ncontent-length: 0",
        b"204 No Content",
        b"304 Not Modified",
        b"304 Not Modified\r\ncontent-length: 9",
    ],
)
async def test_an_answer_without_a_body_passes(wire: Any, chat: Any, head: bytes) -> None:
    async def script(exchange: Any) -> None:
        await exchange.send(b"HTTP/1.1 " + head + b"\r\netag: e\r\n\r\n")

    async with wire.running_upstream(script) as upstream, wire.running_proxy(upstream.port) as port:
        reply = await wire.ask(port, chat())
    assert (reply.status, reply.body, reply.all(b"etag")) == (int(head[:3]), b"", [b"e"])


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
async def test_another_method_on_a_compacted_path_is_relayed_without_a_look(wire: Any, method: str) -> None:
    async def script(exchange: Any) -> None:
        body = b"" if method == "HEAD" else b"abc"
        await exchange.send(b"HTTP/1.1 200 OK\r\nallow: POST\r\ncontent-length: 3\r\n\r\n" + body)

    async with wire.running_upstream(script) as upstream, wire.running_proxy(upstream.port) as port:
        reply = await wire.ask(port, wire.get(CHAT, method=method), bodiless=method == "HEAD")
    assert (reply.status, reply.all(b"content-length"), reply.whole) == (200, [b"3"], True)
    assert (wire.status_of_ours(reply), len(upstream.seen)) == ({}, 1)


async def test_response_fields_go_back_as_a_list(wire: Any, chat: Any) -> None:
    async def script(exchange: Any) -> None:
        await exchange.send(
            b"HTTP/1.1 200 OK\r\nServer: upstream\r\nDate: never\r\nSet-Cookie: a=1\r\nX-Request-Id: r1\r\n"
            b"Set-Cookie: b=2\r\nConnection: keep-alive, X-Hidden\r\nX-Hidden: 1\r\nKeep-Alive: timeout=5\r\n"
            b"Content-Length: 0\r\nX-Long: " + b"l" * 60_000 + b"\r\n\r\n"
        )

    async with wire.running_upstream(script) as upstream, wire.running_proxy(upstream.port) as port:
        first = await wire.ask(port, chat())
        again = await wire.ask(port, chat())
    assert first.all(b"set-cookie") == [b"a=1", b"b=2"]
    assert (first.all(b"server"), len(first.all(b"date"))) == ([], 1)
    assert (first.all(b"x-request-id"), first.all(b"x-compaction-status")) == ([b"r1"], [b"none"])
    assert (first.all(b"x-hidden"), first.all(b"keep-alive")) == ([], [])
    assert first.all(b"x-long") == [b"l" * 60_000]
    assert again.all(b"set-cookie") == [b"a=1", b"b=2"]
    assert b"cookie" not in dict(upstream.seen[1].fields)


async def test_nothing_is_added_to_a_request_but_the_hop_mark(wire: Any, chat: Any) -> None:
    async def script(exchange: Any) -> None:
        await exchange.send(b"HTTP/1.1 204 No Content\r\n\r\n")

    here = ("te: trailers", "connection: x-hidden", "x-hidden: 1", "keep-alive: timeout=5")
    asked = chat(*here, "x-b: 1", "x-a: 2", "x-b: 3", n=1.0)
    request = asked.replace(b" HTTP/1.1", b"?a=%2F HTTP/1.1", 1)
    body = wire.chat_body(n=1.0)
    async with wire.running_upstream(script) as upstream, wire.running_proxy(upstream.port) as port:
        reply = await wire.ask(port, request)
    seen = upstream.seen[0]
    assert (reply.status, seen.target, seen.body) == (204, b"/v1/chat/completions?a=%2F", body)
    sent = [(name, held) for name, held in seen.fields if name != b"x-compaction-hop"]
    assert sorted(sent) == sorted(
        [
            (b"host", b"127.0.0.1:%d" % upstream.port),
            (b"content-length", b"%d" % len(body)),
            (b"x-b", b"1"),
            (b"x-a", b"2"),
            (b"x-b", b"3"),
        ]
    )
    assert len(seen.fields) == len(sent) + 1


async def test_the_proxys_own_key_is_sent_instead_of_the_clients(wire: Any, chat: Any) -> None:
    async def script(exchange: Any) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    async with (
        wire.running_upstream(script) as upstream,
        wire.running_proxy(upstream.port, upstream={"api_key": "ours"}) as port,
    ):
        await wire.ask(port, chat("authorization: Bearer theirs"))
    assert dict(upstream.seen[0].fields)[b"authorization"] == b"Bearer ours"


STATUSES = [*range(400, 419), *range(421, 427), 428, 429, 431, 451, 499, *range(500, 508), 520, 529]


@pytest.mark.parametrize("stream", [False, True])
async def test_40_error_statuses_pass_verbatim(wire: Any, chat: Any, stream: bool) -> None:  # noqa: FBT001 - a case
    """Status, fields in their order, body; and each was asked for once. Only a page gets a field more."""
    isolated = [(b"content-security-policy", b"sandbox")]

    def answered(status: int) -> tuple[list[tuple[bytes, bytes]], bytes]:
        body = b"<html>%d</html>" % status if status % 2 else b'[{"error": %d}]' % status
        kind = b"text/html" if status % 2 else b"application/json"
        fields = [(b"retry-after-ms", b"7"), (b"x-should-retry", b"false"), (b"x-ratelimit-reset", b"1s")]
        return [*fields, (b"content-type", kind), (b"content-length", b"%d" % len(body))], body

    async def script(exchange: Any) -> None:
        status = json.loads(exchange.body)["status"]
        fields, body = answered(status)
        lines = b"".join(b"%b: %b\r\n" % field for field in fields)
        await exchange.send(b"HTTP/1.1 %d Whatever\r\n%b\r\n%b" % (status, lines, body))

    assert len(STATUSES) == 40
    async with wire.running_upstream(script) as upstream, wire.running_proxy(upstream.port) as port:
        for status in STATUSES:
            reply = await wire.ask(port, chat(status=status, stream=stream))
            theirs = [field for field in reply.fields if field[0] not in {b"date", b"connection"}]
            passed = [field for field in theirs if not field[0].startswith(b"x-compaction-")]
            fields, body = answered(status)
            expected = [*fields, *(isolated if status % 2 else [])]
            assert (reply.status, passed, reply.body) == (status, expected, body)
    assert len(upstream.seen) == 40


@pytest.mark.parametrize("status", [b"101 Switching Protocols", b"999 Odd", b"garbage"])
async def test_what_is_no_answer_becomes_a_502(wire: Any, chat: Any, status: bytes) -> None:
    async def script(exchange: Any) -> None:
        await exchange.send(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\n\r\n")

    async with wire.running_upstream(script) as upstream, wire.running_proxy(upstream.port) as port:
        reply = await wire.ask(port, chat())
    assert reply.status == 502
    assert b'"code": "upstream_protocol_error"' in reply.body


async def test_an_interim_response_is_not_taken_for_the_answer(wire: Any, chat: Any) -> None:
    async def script(exchange: Any) -> None:
        await exchange.send(
            b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
        )

    async with wire.running_upstream(script) as upstream, wire.running_proxy(upstream.port) as port:
        reply = await wire.ask(port, chat())
    assert (reply.status, reply.body, reply.all(b"link")) == (200, b"ok", [])
