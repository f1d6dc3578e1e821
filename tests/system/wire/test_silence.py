"""Long silences of the upstream, and offers of WebSockets, over real sockets."""

import asyncio
import gzip
import json
from typing import Any

import openai
import pytest

from compaction_proxy.gateway.sse_keepalive import COMMENT

pytestmark = pytest.mark.virtual_time

SILENCE_S = 5.0
KEPT_ALIVE = {"server": {"keep_alive_s": SILENCE_S}}
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
CHUNK = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}


def event(text: str) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    return b"data: %b\n\n" % json.dumps({**CHUNK, "choices": [choice]}).encode()


DONE = b"data: [DONE]\n\n"
# What the upstream says, a long silence after each; the second silence is within an event.
PIECES = [event("one "), event("two ")[:9], event("two ")[9:], event("three") + DONE]


def silent(*pieces: bytes, head: bytes = HEAD) -> Any:
    """An upstream that says this, with a long silence before each piece, and before its status line."""

    async def script(exchange: Any) -> None:
        await asyncio.sleep(2.5 * SILENCE_S)
        await exchange.send(head + b"\r\n")
        for piece in pieces:
            await asyncio.sleep(2.5 * SILENCE_S)
            await exchange.send(b"%x\r\n%b\r\n" % (len(piece), piece))
        await exchange.send(b"0\r\n\r\n")

    return script


async def test_the_openai_client_passes_over_comments_in_silences(wire: Any) -> None:
    async with (
        wire.running_upstream(silent(*PIECES)) as upstream,
        wire.running_proxy(upstream.port, **KEPT_ALIVE) as port,
        openai.AsyncOpenAI(api_key="k", base_url=f"http://127.0.0.1:{port}/v1", max_retries=0) as client,
    ):
        said: Any = [{"role": "user", "content": "?"}]
        stream = await client.chat.completions.create(model="m", messages=said, stream=True)
        got = [each.choices[0].delta.content async for each in stream]
    assert got == ["one ", "two ", "three"]


async def test_without_its_comments_a_stream_is_the_upstreams_own(wire: Any, chat: Any) -> None:
    async with (
        wire.running_upstream(silent(*PIECES)) as upstream,
        wire.running_proxy(upstream.port, **KEPT_ALIVE) as port,
    ):
        reply, other = await asyncio.gather(
            wire.ask(port, chat(stream=True)), wire.ask(port, wire.get("/v1/events"))
        )
    for each in (reply, other):
        assert each.whole
        assert each.all(b"x-accel-buffering") == [b"no"]
        assert each.body.replace(COMMENT, b"") == b"".join(PIECES)
        assert PIECES[0] + COMMENT in each.body
        assert COMMENT + event("two ") + COMMENT in each.body
        assert each.body.endswith(DONE)
    assert other.body.startswith(COMMENT)  # of what was read the first byte is awaited


@pytest.mark.parametrize(
    ("added", "sections"),
    [(b"", {}), (b"content-encoding: gzip\r\n", KEPT_ALIVE)],
    ids=["not configured", "packed"],
)
async def test_other_streams_stay_as_they_are(wire: Any, chat: Any, added: bytes, sections: Any) -> None:
    packed = gzip.compress(b"".join(PIECES)) if added else b"".join(PIECES)
    async with (
        wire.running_upstream(silent(packed[:20], packed[20:], head=HEAD + added)) as upstream,
        wire.running_proxy(upstream.port, **sections) as port,
    ):
        reply = await wire.ask(port, chat(stream=True))
    assert (reply.whole, reply.body) == (True, packed)


async def test_a_stream_that_is_cut_ends_where_it_was_cut(wire: Any, chat: Any) -> None:
    async def script(exchange: Any) -> None:
        await exchange.send(HEAD + b"\r\n%x\r\n%b\r\n" % (len(DONE), DONE))
        await asyncio.sleep(1.5 * SILENCE_S)
        exchange.writer.close()

    async with (
        wire.running_upstream(script) as upstream,
        wire.running_proxy(upstream.port, **KEPT_ALIVE) as port,
    ):
        reply = await wire.ask(port, chat(stream=True))
    assert (reply.whole, reply.body) == (False, DONE + COMMENT)


async def test_an_answer_that_goes_on_after_a_search_is_not_silent_in_between(wire: Any) -> None:
    tool = {"type": "function", "function": {"name": "open", "parameters": {}}}
    call = {"index": 0, "id": "call_1", "function": {"name": "memory_search", "arguments": '{"query":"x"}'}}
    delta = {"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": "tool_calls"}
    searches = b"data: %b\n\n" % json.dumps({**CHUNK, "choices": [delta]}).encode()
    answers = [silent(PIECES[0], searches, DONE), silent(PIECES[3])]

    async def script(exchange: Any) -> None:
        await answers.pop(0)(exchange)

    recalling = {"models": {"m": {"window": 128_000, "recall": {"tool": "always"}, "tools": True}}}
    body = wire.chat_body(stream=True, tools=[tool])
    async with (
        wire.running_upstream(script) as upstream,
        wire.running_proxy(upstream.port, **KEPT_ALIVE, **recalling) as port,
    ):
        reply = await wire.ask(port, wire.post("/v1/chat/completions", body, "x-session-id: s"))
    assert (reply.whole, len(upstream.seen)) == (True, 2)
    # The second answer comes no sooner than two silences and a half after it was asked for.
    assert PIECES[0] + 5 * COMMENT in reply.body
    assert reply.body.replace(COMMENT, b"").endswith(DONE)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/realtime?model=m", "/openai/v1/realtime"])
@pytest.mark.parametrize("offer", ["websocket", "WebSocket", "h2c, websocket"])
async def test_a_websocket_is_refused_so_that_its_client_goes_on_over_http(
    wire: Any, path: str, offer: str
) -> None:
    """With 426, and on a connection that serves on."""

    async def script(exchange: Any) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    handshake = wire.get(
        path,
        f"upgrade: {offer}",
        "sec-websocket-version: 13",
        "sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==",
        "openai-beta: responses_websockets=2026-02-06",
    ).replace(b"connection: close", b"connection: Upgrade")
    async with wire.running_upstream(script) as upstream, wire.running_proxy(upstream.port) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(100):
            writer.write(handshake)
            head = await reader.readuntil(b"\r\n\r\n")
            refusal = wire.parse_reply(head)
            body = await reader.readexactly(int(refusal.all(b"content-length")[0]))
            writer.write(wire.post("/v1/responses"))
            answer = wire.parse_reply(await reader.read(-1))
        writer.close()
    assert (refusal.status, refusal.all(b"upgrade"), refusal.all(b"connection")) == (
        426,
        [b"HTTP/1.1"],
        [b"upgrade"],
    )
    told = json.loads(body)["error"]
    assert (told["type"], told["code"]) == ("invalid_request_error", "websocket_not_supported")
    assert (answer.status, answer.body) == (200, b"{}")
    assert [seen.head.split(b" ")[0] for seen in upstream.seen] == [b"POST"]
