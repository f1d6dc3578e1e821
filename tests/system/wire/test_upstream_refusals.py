"""An upstream that answers with an error or a redirect: what a client sees, and what is done about it."""

import asyncio
import json
from typing import Any

import pytest

from compaction_proxy.telemetry import exchange_log

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


async def ok(exchange: Any) -> None:
    await exchange.send(OK)


def long_chat(wire: Any) -> bytes:
    said = [
        {"role": role, "content": f"{role} tells: " + "alpha beta " * 60}
        for role in ("user", "assistant") * 10
    ]
    body = wire.chat_body(messages=[*said, {"role": "user", "content": "?"}])
    return bytes(wire.post("/v1/chat/completions", body, "x-session-id: s", "idempotency-key: k"))


REFUSAL = json.dumps(
    {
        "error": {
            "message": "This model's maximum context length is 2000 tokens. However, your messages resulted "
            "in 2600 tokens. Please reduce the length of the messages.",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "context_length_exceeded",
        }
    }
).encode()


@pytest.mark.parametrize("refusals", [1, 100])
async def test_a_refusal_for_length_is_answered_by_a_shorter_request_or_passed_on(
    wire: Any, refusals: int
) -> None:
    """The window is thought to be 128,000 tokens, and is 2,000."""
    refusal = b"HTTP/1.1 400 Bad\r\nx-request-id: r\r\ncontent-length: %d\r\n\r\n%b" % (len(REFUSAL), REFUSAL)

    async def script(exchange: Any) -> None:
        await exchange.send(refusal if len(upstream.seen) <= refusals else OK)

    async with wire.running_upstream(script) as upstream, wire.running_proxy(upstream.port) as port:
        reply = await wire.ask(port, long_chat(wire))
    sizes = [len(seen.body) for seen in upstream.seen]
    assert sizes == sorted(set(sizes), reverse=True)  # each is smaller than the one before
    named = [b"idempotency-key" in seen.head for seen in upstream.seen]
    assert named == [True, *[False] * (len(named) - 1)]  # another body is another request
    if refusals == 1:
        assert (reply.status, reply.body, len(sizes)) == (200, b"ok", 2)
        assert wire.status_of_ours(reply)["status"] == "applied"
    else:
        assert (reply.status, reply.body, reply.all(b"x-request-id")) == (400, REFUSAL, [b"r"])
        assert len(sizes) <= 3


@pytest.mark.parametrize("status", [401, 429, 500])
async def test_of_an_error_nothing_is_learned_and_nothing_is_asked_after_it(
    wire: Any, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """The conversation is above the soft mark, so that an answer would have a summary made ahead."""
    noted: list[Any] = []
    monkeypatch.setattr(exchange_log.ExchangeLog, "record_exchange", lambda _, *what: noted.append(what[3]))
    body = b'{"usage":{"prompt_tokens":41,"completion_tokens":1}}'
    framed = b"content-length: %d\r\n\r\n%b" % (len(body), body)

    async def script(exchange: Any) -> None:
        await exchange.send(b"HTTP/1.1 %d Whatever\r\n" % (status if failing else 200) + framed)

    sections = {"summary": {"model": "summary-small"}, "models": {"m": {"window": 6_000}}}
    async with (
        wire.running_upstream(script) as upstream,
        wire.running_proxy(upstream.port, **sections) as port,
    ):
        for failing in (True, False):
            reply = await wire.ask(port, long_chat(wire))
            assert (reply.status, reply.body) == (status if failing else 200, body)
            assert wire.status_of_ours(reply)["status"] == "scheduled"
            await asyncio.sleep(0.1)
            if failing:
                asked = [json.loads(seen.body)["model"] for seen in upstream.seen]
    assert asked == ["m"]
    assert [json.loads(seen.body)["model"] for seen in upstream.seen][:3] == ["m", "m", "summary-small"]
    assert [each.prompt_tokens for each in noted] == [None, 41]


@pytest.mark.parametrize("status", [b"301 Moved", b"302 Found", b"303 See", b"307 Temp", b"308 Perm"])
async def test_a_redirect_of_a_chat_request_is_passed_on_and_nobody_goes_there(
    wire: Any, chat: Any, status: bytes
) -> None:
    async with wire.running_upstream(ok) as elsewhere:
        there = b"http://127.0.0.1:%d/v1/chat/completions" % elsewhere.port

        async def script(exchange: Any) -> None:
            await exchange.send(
                b"HTTP/1.1 " + status + b"\r\nlocation: " + there + b"\r\ncontent-length: 2\r\n\r\ngo"
            )

        async with wire.running_upstream(script) as upstream, wire.running_proxy(upstream.port) as port:
            reply = await wire.ask(port, chat("authorization: Bearer sk-secret"))
    assert (reply.status, reply.body, reply.all(b"location")) == (int(status[:3]), b"go", [there])
    assert (len(upstream.seen), elsewhere.connections) == (1, 0)
