"""A provider that refuses a request for its length inside a stream that has begun well, with status 200."""

import asyncio
import gzip
import json
from typing import Any

import pytest

TOO_LONG = "prompt is too long: 2600 tokens > 2000 maximum"
# What providers repeat at the beginning of a stream is as long as a request's tools are.
TOOLS = "a tool " * 12_000


def event(**told: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (told["type"].encode(), json.dumps(told).encode())


def response(**more: Any) -> dict[str, Any]:
    return {"id": "r", "status": "in_progress", "error": None, "instructions": TOOLS, **more}


RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
BEGUN = {
    RESPONSES: event(type="response.created", response=response())
    + event(type="response.in_progress", response=response()),
    MESSAGES: event(type="message_start", message={"id": "m", "content": []}) + event(type="ping"),
}


def refused(path: str) -> bytes:
    message = "prompt is too long: 2600 tokens > 2000 maximum"
    if path == MESSAGES:
        return event(type="error", error={"type": "invalid_request_error", "message": message})
    error = {"code": "context_length_exceeded", "message": message}
    return event(type="response.failed", response=response(status="failed", error=error))


SAID = {
    RESPONSES: event(type="response.output_text.delta", delta="Well"),
    MESSAGES: event(type="content_block_delta", delta={"type": "text_delta", "text": "Well"}),
}
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n%bcontent-length: %d\r\n\r\n"


def long_request(wire: Any, path: str) -> bytes:
    said = [
        {"role": role, "content": f"{role} tells: " + "alpha beta " * 60}
        for role in ("user", "assistant") * 10
    ]
    listed = [*said, {"role": "user", "content": "?"}]
    name = "input" if path == RESPONSES else "messages"
    body = json.dumps({"model": "m", "stream": True, name: listed}).encode()
    return bytes(wire.post(path, body, *wire.ways["past the gate"]))


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
@pytest.mark.parametrize("refusals", [1, 100])
async def test_it_is_asked_for_less_or_its_first_refusal_is_passed_on(
    wire: Any, path: str, refusals: int
) -> None:
    async def script(exchange: Any) -> None:
        nth = len(upstream.seen)
        behind = refused(path) if nth <= refusals else SAID[path]
        await exchange.send(HEAD % (b"x-nth: %d\r\n" % nth, len(BEGUN[path] + behind)))
        await exchange.send(BEGUN[path])
        await exchange.send(behind)

    async with wire.running_upstream(script) as upstream, wire.running_proxy(upstream.port) as port:
        reply = await wire.ask(port, long_request(wire, path))
    sizes = [len(seen.body) for seen in upstream.seen]
    assert sizes == sorted(set(sizes), reverse=True)
    if refusals == 1:
        assert (reply.status, reply.body, len(sizes)) == (200, BEGUN[path] + SAID[path], 2)
    else:
        assert (reply.body, reply.all(b"x-nth")) == (BEGUN[path] + refused(path), [b"1"])
        assert len(sizes) <= 3


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_an_answer_that_has_begun_is_not_asked_for_again(wire: Any, path: str) -> None:
    whole = BEGUN[path] + SAID[path] + refused(path)

    async def script(exchange: Any) -> None:
        await exchange.send(HEAD % (b"", len(whole)) + whole)

    async with wire.running_upstream(script) as upstream, wire.running_proxy(upstream.port) as port:
        reply = await wire.ask(port, long_request(wire, path))
    assert (reply.status, reply.body, len(upstream.seen)) == (200, whole, 1)


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_a_stream_that_cannot_be_read_is_not_held_back(wire: Any, path: str) -> None:
    packed = gzip.compress(BEGUN[path] + SAID[path])
    relayed = asyncio.Event()

    async def script(exchange: Any) -> None:
        await exchange.send(HEAD % (b"content-encoding: gzip\r\n", len(packed)) + packed[:40])
        await asyncio.wait_for(relayed.wait(), 30)
        await exchange.send(packed[40:])

    async with wire.running_upstream(script) as upstream, wire.running_proxy(upstream.port) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(long_request(wire, path))
        head = await reader.readuntil(b"\r\n\r\n")
        relayed.set()
        reply = wire.parse_reply(head + await reader.read(-1))
        writer.close()
    assert (reply.body, reply.whole) == (packed, True)
