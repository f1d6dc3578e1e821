"""A cut upstream stays a cut: the exact prefix, and then no proper end."""

import asyncio
import json
import socket
import struct
from typing import Any

import pytest
import structlog

from compaction_proxy.wires.usage import UsageTap
from tests.helpers.free_ports import find_free_port

BODY = bytes(range(256)) * 8
AT_ONCE = 16
HEADS = {
    "chunked": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
    "length": b"HTTP/1.1 200 OK\r\ncontent-length: 2048\r\n\r\n",
}


def framed(kind: str, offset: int) -> bytes:
    """The answer up to `offset` bytes of its body, in 100-byte chunks where it is chunked."""
    if kind == "length":
        return HEADS[kind] + BODY[:offset]
    pieces = [BODY[start : start + 100] for start in range(0, len(BODY), 100)]
    wire, left = b"", offset
    for piece in pieces:
        if left <= 0:
            break
        wire += b"%x\r\n" % len(piece) + piece[:left] + (b"\r\n" if left >= len(piece) else b"")
        left -= len(piece)
    return HEADS[kind] + wire


@pytest.mark.parametrize("kind", ["chunked", "length"])
async def test_an_upstream_cut_at_every_offset_stays_a_cut(wire: Any, chat: Any, kind: str) -> None:
    async def script(exchange: Any) -> None:
        await exchange.send(framed(kind, json.loads(exchange.body)["offset"]))
        exchange.writer.close()

    offsets = range(len(BODY) + 1) if kind == "chunked" else range(len(BODY))
    async with wire.running_upstream(script) as upstream, wire.running_proxy(upstream.port) as port:

        async def client(first: int) -> list[int]:
            wrong = []
            for offset in offsets[first::AT_ONCE]:
                reply = await wire.ask(port, chat(offset=offset))
                if (reply.status, reply.body, reply.whole) != (200, BODY[:offset], False):
                    wrong.append(offset)
            return wrong

        wrong = await asyncio.gather(*map(client, range(AT_ONCE)))
        assert [offset for offsets_of_one in wrong for offset in offsets_of_one] == []
    assert len(upstream.seen) == len(offsets)


@pytest.mark.virtual_time
async def test_a_reset_upstream_stays_a_cut(wire: Any, chat: Any) -> None:
    async def script(exchange: Any) -> None:
        await exchange.send(framed("chunked", 300))
        await asyncio.sleep(0.05)
        linger = struct.pack("ii", 1, 0)
        exchange.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        exchange.writer.transport.abort()

    async with wire.running_upstream(script) as upstream, wire.running_proxy(upstream.port) as port:
        reply = await wire.ask(port, chat())
    assert (reply.body, reply.whole) == (BODY[:300], False)


@pytest.mark.virtual_time
async def test_a_silent_upstream_is_cut_after_the_read_timeout(wire: Any, chat: Any) -> None:
    async def script(exchange: Any) -> None:
        await exchange.send(framed("chunked", 300))
        await exchange.reader.read()

    async with (
        wire.running_upstream(script) as upstream,
        wire.running_proxy(upstream.port, upstream={"timeout_s": 0.1}) as port,
    ):
        reply = await wire.ask(port, chat())
    assert (reply.body, reply.whole) == (BODY[:300], False)


@pytest.mark.virtual_time
async def test_no_first_byte_in_time_is_a_504(wire: Any, chat: Any) -> None:
    async def script(exchange: Any) -> None:
        await exchange.reader.read()

    async with (
        wire.running_upstream(script) as upstream,
        wire.running_proxy(upstream.port, upstream={"timeout_s": 0.1}) as port,
    ):
        reply = await wire.ask(port, chat())
    assert (reply.status, b'"code": "upstream_timeout"' in reply.body) == (504, True)


async def test_an_unreachable_upstream_is_a_502_in_openais_shape(wire: Any, chat: Any) -> None:
    nobody = find_free_port()
    async with wire.running_proxy(nobody) as port:
        compacted = await wire.ask(port, chat())
        blind = await wire.ask(port, wire.get("/v1/models"))
    assert compacted.status == blind.status == 502
    assert (
        compacted.body
        == blind.body
        == (
            b'{"error": {"message": "The upstream cannot be reached.", "type": "upstream_error", '
            b'"param": null, "code": "upstream_unreachable"}}'
        )
    )


async def test_a_failing_tap_does_not_hurt_the_stream(
    wire: Any, chat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed = []

    class Panic(BaseException):
        pass

    def feed(tap: UsageTap, chunk: bytes) -> None:
        fed.append(chunk)
        raise Panic

    async def script(exchange: Any) -> None:
        await exchange.send(framed("chunked", 2_048) + b"0\r\n\r\n")

    monkeypatch.setattr(UsageTap, "feed", feed)
    async with wire.running_upstream(script) as upstream, wire.running_proxy(upstream.port) as port:
        reply = await wire.ask(port, chat("x-session-id: s"))  # of others nothing is learned
    assert (reply.body, reply.whole, b"".join(fed)) == (BODY, True, BODY)


async def test_a_cut_is_no_error_of_ours(wire: Any, chat: Any) -> None:
    async def script(exchange: Any) -> None:
        await exchange.send(framed("length", 10))
        exchange.writer.close()

    async with wire.running_upstream(script) as upstream, wire.running_proxy(upstream.port) as port:
        with structlog.testing.capture_logs() as logged:
            assert not (await wire.ask(port, chat())).whole
    assert [line for line in logged if line["log_level"] == "error"] == []
