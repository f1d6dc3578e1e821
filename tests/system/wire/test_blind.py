"""Whatever is not compacted is relayed as it is, by any method and of any size."""

import asyncio
import hashlib
import json
from typing import Any

import pytest

LARGE_BYTES = 24 * 1_048_576


def answering(head: bytes, body: bytes = b"") -> Any:
    async def script(exchange: Any) -> None:
        await exchange.send(head + b"\r\n\r\n" + body)

    return script


@pytest.mark.parametrize("method", ["GET", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD"])
async def test_every_method_is_relayed(wire: Any, method: str) -> None:
    body = b"" if method == "HEAD" else b"abc"
    script = answering(b"HTTP/1.1 200 OK\r\nallow: all\r\ncontent-length: 3", body)
    async with wire.running_upstream(script) as upstream, wire.running_proxy(upstream.port) as port:
        request = wire.get("/v1/models", method=method)
        reply = await wire.ask(port, request, bodiless=method == "HEAD")
    assert upstream.seen[0].head.startswith(method.encode() + b" /v1/models HTTP/1.1\r\n")
    assert (reply.status, reply.body, reply.all(b"content-length"), reply.whole) == (200, body, [b"3"], True)


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("/v1/models", b"/v1/models"),
        ("/models", b"/v1/models"),
        ("/v1/files/a%2Fb%20c?x=%2F&y=+", b"/v1/files/a%2Fb%20c?x=%2F&y=+"),
        ("/v1/a/../b//c?q=a/b?c", b"/v1/a/../b//c?q=a/b?c"),
        ("/administrator", b"/v1/administrator"),
    ],
)
async def test_the_target_reaches_the_upstream_byte_for_byte(wire: Any, path: str, target: bytes) -> None:
    script = answering(b"HTTP/1.1 200 OK\r\ncontent-length: 0")
    async with wire.running_upstream(script) as upstream, wire.running_proxy(upstream.port) as port:
        await wire.ask(port, wire.get(path))
    assert upstream.seen[0].target == target


@pytest.mark.parametrize("status", [b"301 Moved", b"302 Found", b"303 See Other", b"307 Temp", b"308 Perm"])
async def test_a_redirect_is_not_followed(wire: Any, status: bytes) -> None:
    script = answering(
        b"HTTP/1.1 " + status + b"\r\nlocation: http://127.0.0.1:1/x\r\ncontent-length: 2", b"go"
    )
    async with wire.running_upstream(script) as upstream, wire.running_proxy(upstream.port) as port:
        reply = await wire.ask(port, wire.get("/v1/models"))
    assert (reply.status, reply.body) == (int(status[:3]), b"go")
    assert reply.all(b"location") == [b"http://127.0.0.1:1/x"]


@pytest.mark.parametrize(
    "head", [b"204 No Content", b"304 Not Modified", b"304 Not Modified\r\ncontent-length: 9"]
)
async def test_a_status_without_a_body_passes(wire: Any, head: bytes) -> None:
    script = answering(b"HTTP/1.1 " + head + b"\r\netag: e")
    async with wire.running_upstream(script) as upstream, wire.running_proxy(upstream.port) as port:
        reply = await wire.ask(port, wire.get("/v1/models"))
    assert (reply.status, reply.body, reply.all(b"etag")) == (int(head[:3]), b"", [b"e"])


async def test_a_body_that_ends_with_the_connection_is_whole(wire: Any) -> None:
    async def script(exchange: Any) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nall of it")
        exchange.writer.close()

    async with wire.running_upstream(script) as upstream, wire.running_proxy(upstream.port) as port:
        reply = await wire.ask(port, wire.get("/v1/models"))
    assert (reply.body, reply.whole) == (b"all of it", True)


async def test_a_multipart_body_passes_as_it_is(wire: Any) -> None:
    body = b'--b\r\ncontent-disposition: form-data; name="file"\r\n\r\n\x00\xff\r\n--b--\r\n'
    kind = "multipart/form-data; boundary=b"
    script = answering(b"HTTP/1.1 200 OK\r\ncontent-length: 0")
    async with wire.running_upstream(script) as upstream, wire.running_proxy(upstream.port) as port:
        await wire.ask(port, wire.post("/v1/audio/transcriptions", body, f"content-type: {kind}"))
    seen = upstream.seen[0]
    assert (seen.body, dict(seen.fields)[b"content-type"]) == (body, kind.encode())


async def test_a_large_upload_is_streamed(wire: Any) -> None:
    first_arrived = asyncio.Event()
    digest = hashlib.sha256()

    async def script(exchange: Any) -> None:
        left = int(dict(exchange.fields)[b"content-length"])
        while left:
            data = await exchange.reader.read(min(left, 65_536))
            first_arrived.set()
            digest.update(data)
            left -= len(data)
        await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")

    block = bytes(range(256)) * 4_096
    async with wire.running_upstream(script) as upstream, wire.running_proxy(upstream.port) as port:
        upstream.read_bodies = False
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = b"POST /v1/files HTTP/1.1\r\nhost: p\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % LARGE_BYTES + block)
        async with asyncio.timeout(20):
            await first_arrived.wait()  # long before the body is whole
            for _ in range(LARGE_BYTES // len(block) - 1):
                writer.write(block)
                await writer.drain()
            reply = wire.parse_reply(await reader.read(-1))
        writer.close()
    assert (reply.status, reply.body) == (200, b"ok")
    assert digest.digest() == hashlib.sha256(block * (LARGE_BYTES // len(block))).digest()


async def test_a_chunked_upload_stays_chunked(wire: Any) -> None:
    got = []

    async def script(exchange: Any) -> None:
        got.append(await exchange.reader.readuntil(b"0\r\n\r\n"))
        await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    request = b"POST /v1/files HTTP/1.1\r\nhost: p\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    async with wire.running_upstream(script) as upstream, wire.running_proxy(upstream.port) as port:
        reply = await wire.ask(port, request + b"3\r\nabc\r\n0\r\n\r\n")
    assert (reply.status, got) == (200, [b"3\r\nabc\r\n0\r\n\r\n"])


async def test_a_websocket_upgrade_is_answered_426(wire: Any) -> None:
    fields = [
        "upgrade: websocket",
        "sec-websocket-version: 13",
        "sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==",
    ]
    request = wire.get("/v1/responses", *fields).replace(b"connection: close", b"connection: upgrade")
    async with wire.running_proxy(9) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        async with asyncio.timeout(100):
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.readuntil(b"}}")
        writer.close()
    assert head.startswith(b"HTTP/1.1 426 ")
    assert b'"code": "websocket_not_supported"' in body


async def test_a_request_of_our_own_is_refused_before_it_goes_round_again(wire: Any) -> None:
    script = answering(b"HTTP/1.1 200 OK\r\ncontent-length: 0")
    async with wire.running_upstream(script) as upstream, wire.running_proxy(upstream.port) as port:
        await wire.ask(port, wire.get("/v1/models"))
        mark = dict(upstream.seen[0].fields)[b"x-compaction-hop"].decode()
        for path in ("/v1/models", "/v1/chat/completions"):
            reply = await wire.ask(port, wire.post(path, b"{}", f"x-compaction-hop: {mark}"))
            assert (reply.status, b'"code": "loop_detected"' in reply.body) == (508, True)
    assert len(upstream.seen) == 1


async def test_an_oversized_body_is_refused_on_a_compacted_path_only(wire: Any) -> None:
    script = answering(b"HTTP/1.1 200 OK\r\ncontent-length: 0")
    body = b"x" * 1_001
    async with (
        wire.running_upstream(script) as upstream,
        wire.running_proxy(upstream.port, server={"max_body_bytes": 1_000}) as port,
    ):
        blind = await wire.ask(port, wire.post("/v1/embeddings", body))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        # A connection that stays: a server that closes on unread data resets it, and the answer is lost.
        writer.write(wire.post("/v1/chat/completions", body).replace(b"connection: close\r\n", b""))
        refusal = await reader.readuntil(b"}}")
        writer.close()
    assert refusal.startswith(b"HTTP/1.1 413 ")
    assert b'"code": "request_too_large"' in refusal
    assert (blind.status, [seen.body for seen in upstream.seen]) == (200, [body])


async def test_our_own_paths_are_answered_under_the_base_path(wire: Any) -> None:
    script = answering(b"HTTP/1.1 200 OK\r\ncontent-length: 5", b"yours")
    async with (
        wire.running_upstream(script) as upstream,
        wire.running_proxy(upstream.port, server={"base_path": "/cp"}) as port,
    ):
        ours = await wire.ask(port, wire.get("/cp/readyz"))
        missing = await wire.ask(port, wire.get("/cp/admin/x").replace(b"host: proxy", b"host: localhost"))
        yours = await wire.ask(port, wire.get("/readyz"))
    assert (ours.status, json.loads(ours.body)["ready"]) == (200, True)
    assert (missing.status, b"/cp/admin/x" in missing.body) == (404, True)
    assert (yours.status, yours.body) == (200, b"yours")
