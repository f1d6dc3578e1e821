"""An upstream that cannot be reached, is cut, resets, falls silent or drips: what a client sees.

Where bytes are to be lost or late, a proxy that does harm stands between the product and its upstream.
"""

import asyncio
import json
import ssl
from pathlib import Path
from typing import Any

import pytest

from compaction_proxy.gateway import upstream as upstreams
from compaction_proxy.telemetry import exchange_log
from tests.helpers.certificates import self_signed
from tests.helpers.fault_tcp import Faults, FaultTcp
from tests.helpers.free_ports import find_free_port

CONNECT_LIMIT_S = 3.0
BODY = bytes(range(256)) * 8
UNREACHABLE = {
    "message": "The upstream cannot be reached.",
    "type": "upstream_error",
    "param": None,
    "code": "upstream_unreachable",
}


def chunked(body: bytes) -> bytes:
    pieces = [body[start : start + 100] for start in range(0, len(body), 100)]
    framed = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        + framed
        + b"0\r\n\r\n"
    )


ANSWER = chunked(BODY)
HEAD_BYTES = ANSWER.index(b"\r\n\r\n") + 4


async def answer(exchange: Any) -> None:
    await exchange.send(ANSWER)


def delivered(offset: int) -> bytes:
    """What of the body lies within the first bytes of ANSWER."""
    wire, body = ANSWER[HEAD_BYTES:offset], b""
    while (found := wire.find(b"\r\n")) > 0:
        size = int(wire[:found], 16)
        body += wire[found + 2 :][:size]
        wire = wire[found + 2 + size + 2 :]
    return body


def no_name(_: int, __: int) -> str:
    return "http://nobody.invalid"


def refused(_: int, __: int) -> str:
    return f"http://127.0.0.1:{find_free_port()}"


def of_nobodys_certificate(tls: int, _: int) -> str:
    return f"https://localhost:{tls}"


def without_tls(_: int, plain: int) -> str:
    return f"https://127.0.0.1:{plain}"


@pytest.mark.parametrize("where", [no_name, refused, of_nobodys_certificate, without_tls])
async def test_an_upstream_that_cannot_be_reached_is_a_502_and_gets_no_request(
    wire: Any, chat: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: Any
) -> None:
    monkeypatch.setattr(upstreams, "CONNECT_TIMEOUT_S", 1.0)  # one who knows no TLS may just wait
    pem = tmp_path / "server.pem"
    pem.write_bytes(b"".join(self_signed()))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    async with wire.running_upstream(answer) as upstream:
        server = await asyncio.start_server(upstream.serve, "127.0.0.1", 0, ssl=context)
        base_url = where(server.sockets[0].getsockname()[1], upstream.port)
        async with wire.running_proxy(0, upstream={"base_url": base_url}) as port:
            reply = await wire.ask(port, chat())
        server.close()
    assert (reply.status, json.loads(reply.body), reply.whole) == (502, {"error": UNREACHABLE}, True)
    assert upstream.seen == []


@pytest.mark.virtual_time
async def test_a_connection_that_does_not_stand_in_time_is_a_502(
    wire: Any, chat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other side takes the connection and never says a word of TLS."""
    monkeypatch.setattr(upstreams, "CONNECT_TIMEOUT_S", CONNECT_LIMIT_S)
    async with wire.running_upstream(answer) as upstream, FaultTcp(upstream.port) as between:
        between.blackhole()
        base_url = f"https://127.0.0.1:{between.port}"
        async with wire.running_proxy(0, upstream={"base_url": base_url}) as port:
            clock = asyncio.get_running_loop().time
            started_s = clock()
            reply = await wire.ask(port, chat())
            took_s = clock() - started_s
    assert (reply.status, json.loads(reply.body)) == (502, {"error": UNREACHABLE})
    assert took_s == pytest.approx(CONNECT_LIMIT_S)


async def test_an_upstream_that_comes_back_is_used_at_once(wire: Any, chat: Any) -> None:
    async with (
        wire.running_upstream(answer) as upstream,
        FaultTcp(upstream.port) as between,
        wire.running_proxy(between.port) as port,
    ):
        statuses = []
        for away in (True, False, True, False):
            if away:
                between.refuse()
                between.cut(reset=True)
            else:
                await between.listen()
            statuses.append((await wire.ask(port, chat())).status)
    assert statuses == [502, 200, 502, 200]


async def test_a_request_that_was_sent_and_reset_is_not_sent_again(wire: Any, chat: Any) -> None:
    async with wire.running_upstream(answer) as upstream, FaultTcp(upstream.port) as between:
        between.back = Faults(end_after=0, end="reset")
        async with wire.running_proxy(between.port) as port:
            reply = await wire.ask(port, chat())
    assert (reply.status, json.loads(reply.body)["error"]["code"]) == (502, "upstream_protocol_error")
    assert (len(upstream.seen), between.accepted) == (1, 1)


@pytest.mark.virtual_time
async def test_a_black_hole_is_a_504_and_its_connection_is_closed(wire: Any, chat: Any) -> None:
    async with wire.running_upstream(answer) as upstream, FaultTcp(upstream.port) as between:
        between.blackhole()
        async with wire.running_proxy(between.port, upstream={"timeout_s": 0.2}) as port:
            reply = await wire.ask(port, chat())
            between.release()
            async with asyncio.timeout(100):
                while between.open:  # noqa: ASYNC110 - it is a number, which sets no event
                    await asyncio.sleep(0.005)
    assert (reply.status, json.loads(reply.body)["error"]["code"]) == (504, "upstream_timeout")


@pytest.mark.virtual_time
async def test_a_drip_is_no_silence_and_a_stall_is_one(wire: Any, chat: Any) -> None:
    """The answer takes five times as long as the upstream may be silent."""
    silence_s = 0.3
    async with (
        wire.running_upstream(answer) as upstream,
        FaultTcp(upstream.port) as between,
        wire.running_proxy(between.port, upstream={"timeout_s": silence_s}) as port,
    ):
        between.back = Faults(slices=40, bytes_per_s=len(ANSWER) / (5 * silence_s))
        clock = asyncio.get_running_loop().time
        started_s = clock()
        dripped = await wire.ask(port, chat())
        took_s = clock() - started_s
        between.back = Faults(end_after=HEAD_BYTES + 1_000, end="stall")
        between.cut()  # the connection that has served: what ends counts from its start
        stalled = await wire.ask(port, chat())
    assert (dripped.body, dripped.whole, took_s > 3 * silence_s) == (BODY, True, True)
    assert (stalled.status, stalled.body) == (200, delivered(HEAD_BYTES + 1_000))
    assert not stalled.whole


@pytest.mark.parametrize("way", ["through the gate", "past the gate"])
async def test_a_reset_at_every_offset_gives_what_came_and_no_end(
    wire: Any, way: str, pytestconfig: pytest.Config
) -> None:
    step = 1 if pytestconfig.getoption("--runslow") else 17
    wrong = []
    async with (
        wire.running_upstream(answer) as upstream,
        FaultTcp(upstream.port) as between,
        wire.running_proxy(between.port) as port,
    ):
        offsets = range(0, len(ANSWER), step)
        for offset in offsets:
            between.back = Faults(end_after=offset, end="reset" if offset % 2 else "close", slices=500)
            reply = await wire.ask(port, wire.post("/v1/chat/completions", wire.chat_body(), *wire.ways[way]))
            if offset < HEAD_BYTES:
                right = reply.status == 502 and b"upstream_protocol_error" in reply.body
            else:
                right = (reply.status, reply.body, reply.whole) == (200, delivered(offset), False)
            if not right:
                wrong.append((offset, reply.status, len(reply.body), reply.whole))
    assert wrong == []
    assert len(upstream.seen) == len(offsets)


@pytest.mark.virtual_time
async def test_a_byte_that_changes_on_its_way_changes_that_byte_or_ends_the_stream(
    wire: Any, chat: Any, pytestconfig: pytest.Config
) -> None:
    step = 1 if pytestconfig.getoption("--runslow") else 31
    kinds = set()
    async with (
        wire.running_upstream(answer) as upstream,
        FaultTcp(upstream.port) as between,
        wire.running_proxy(between.port, upstream={"timeout_s": 0.3}) as port,
    ):
        for offset in range(0, len(ANSWER), step):
            between.cut()
            between.back = Faults(flip_at=offset)
            reply = await wire.ask(port, chat())
            changed = [at for at, (is_, was) in enumerate(zip(reply.body, BODY, strict=False)) if is_ != was]
            if reply.status in {502, 504}:
                kinds.add("refused")
                assert offset < HEAD_BYTES
            elif reply.whole:
                kinds.add("whole")
                assert (len(reply.body), len(changed) <= 1) == (len(BODY), True)
            else:
                kinds.add("cut")
                # Where the framing's name has changed, the body is what came, its chunks' sizes among it.
                came = BODY if offset >= HEAD_BYTES else ANSWER[HEAD_BYTES:]
                assert came.startswith(reply.body)
    assert kinds == {"refused", "whole", "cut"}


async def test_of_a_stream_that_was_cut_nothing_is_counted(
    wire: Any, chat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[Any] = []
    monkeypatch.setattr(exchange_log.ExchangeLog, "record_exchange", lambda _, *what: noted.append(what[3]))
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":41,"completion_tokens":1}}\n\n'
    counted = chunked(usage + b"data: [DONE]\n\n")

    async def script(exchange: Any) -> None:
        await exchange.send(counted)

    async with (
        wire.running_upstream(script) as upstream,
        FaultTcp(upstream.port) as between,
        wire.running_proxy(between.port) as port,
    ):
        between.back = Faults(end_after=len(counted) - 3, end="reset")
        cut = await wire.ask(port, chat("x-session-id: s", stream=True))
        noted_of_the_cut = list(noted)
        between.back = Faults()
        whole = await wire.ask(port, chat("x-session-id: s", stream=True))
    assert (cut.whole, whole.whole, cut.body == whole.body) == (False, True, True)
    assert [[each.prompt_tokens for each in some] for some in (noted_of_the_cut, noted)] == [
        [None],
        [None, 41],
    ]
