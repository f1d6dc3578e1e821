"""Clients that leave at random moments, by the thousand, leave nothing behind."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from compaction_proxy.gateway.concurrency_limit import ConcurrencyLimiter
from compaction_proxy.storage.memory import MemoryStore

CHAT = "/v1/chat/completions"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
SUMMARY_MODEL = "summary-small"
AT_ONCE = 100
# Pooled connections wait for two seconds, a lease runs out after ten; only a hang takes as long.
SETTLED_WITHIN_S = 60.0

STAGES = ("head", "body", "unanswered", "stream", "summary", "whole")


def open_files() -> int:
    return len(list(Path("/dev/fd").iterdir()))


class Upstream:
    """What the upstream does: each request says in its `user` member what it wants."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.summaries = 0

    async def __call__(self, exchange: Any) -> None:
        body = json.loads(exchange.body)
        if body["model"] == SUMMARY_MODEL:
            self.summaries += 1
            await asyncio.sleep(self.rng.random() * 0.1)
            await exchange.send(summary())
        elif body.get("user") == "unanswered":
            await exchange.reader.read()
            exchange.writer.close()
        elif body.get("user") == "stream":
            await exchange.send(STREAM)
            while not exchange.writer.is_closing():
                await exchange.send(b"a\r\ndata: {}\n\n\r\n")
                await asyncio.sleep(0.002)
        else:
            await exchange.send(OK)


def summary() -> bytes:
    said = "They told one another of alpha and beta, again and again, and asked for nothing."
    body = json.dumps(
        {"choices": [{"message": {"role": "assistant", "content": said}, "finish_reason": "stop"}]}
    ).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def request(wire: Any, rng: random.Random, number: int, stage: str) -> bytes:
    """A request, half of the time read, half of the time not; a long one where a summary is wanted."""
    fields = rng.choice([*wire.ways.values()])
    if stage != "summary":
        body = wire.chat_body(model="m", user=stage)
    else:
        turns = [
            {"role": role, "content": f"{role} {number} tells: " + "alpha beta " * 60}
            for role in ("user", "assistant") * 10
        ]
        body = wire.chat_body(model="small", messages=turns, user=stage)
        fields = ()
    return bytes(wire.post(CHAT, body, *fields).replace(b"connection: close\r\n", b""))


async def leave(port: int, data: bytes, stage: str, rng: random.Random, script: Upstream) -> None:
    """Ask, and leave at a stage."""
    summaries = script.summaries
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = data.index(b"\r\n\r\n") + 4
    cut = {"head": rng.randrange(1, head - 1), "body": rng.randrange(head, len(data))}
    writer.write(data[: cut.get(stage)])
    if stage == "stream" and rng.random() < 0.7:
        await reader.read(65_536)
    if stage == "whole":
        await reader.readuntil(b"ok")
    if stage == "summary" and rng.random() < 0.7:  # while one is made, or after the answer
        answer = asyncio.create_task(reader.read(1))
        while script.summaries == summaries and not answer.done():
            await asyncio.wait({answer}, timeout=0.01)
        answer.cancel()
    if rng.random() < 0.8:
        await asyncio.sleep(rng.random() * (0.1 if stage == "summary" else 0.006))
    if rng.random() < 0.5:
        writer.transport.abort()
    writer.close()


def held(store: MemoryStore) -> list[str]:
    """Leases that somebody holds; one that nobody renews runs out."""
    return [key for key, lent in store._leases.items() if lent.expires > store._clock()]


async def settled(condition: Any) -> None:
    async with asyncio.timeout(SETTLED_WITHIN_S):
        while not condition():  # noqa: ASYNC110 - it is about sockets and tasks, which set no event
            await asyncio.sleep(0.02)


@pytest.mark.timeout(600)  # with --runslow
@pytest.mark.parametrize("on_disconnect", ["finish", "cancel"])
async def test_cancelled_requests_leave_no_place_task_socket_or_lease(
    wire: Any, on_disconnect: str, admissions: list[ConcurrencyLimiter], pytestconfig: pytest.Config
) -> None:
    requests = 5_000 if pytestconfig.getoption("--runslow") else 500
    rng, store = random.Random(3), MemoryStore()
    script = Upstream(rng)
    sections: dict[str, Any] = {
        "summary": {"model": SUMMARY_MODEL},
        "compaction": {"on_disconnect": on_disconnect},
        "models": {"m": {"window": 128_000}, "small": {"window": 2_000}},
    }
    async with (
        wire.running_upstream(script) as upstream,
        wire.running_proxy(upstream.port, store=store, **sections) as port,
    ):
        (admission,) = admissions
        assert (await wire.ask(port, wire.post(CHAT, wire.chat_body()))).body == b"ok"
        await settled(lambda: upstream.open_sockets == 0)
        files, tasks = open_files(), asyncio.all_tasks()
        for start in range(0, requests, AT_ONCE):
            stages = [rng.choice(STAGES) for _ in range(AT_ONCE)]
            leaving = [
                leave(port, request(wire, rng, start + number, stage), stage, rng, script)
                for number, stage in enumerate(stages)
            ]
            await asyncio.gather(*leaving)
        await settled(lambda: admission.active_request_count == 0)
        await settled(lambda: upstream.open_sockets == 0)
        await settled(lambda: asyncio.all_tasks() <= tasks)
        await settled(lambda: open_files() <= files)
        await settled(lambda: not held(store))
        replies = [
            await wire.ask(port, wire.post(CHAT, wire.chat_body(), *way)) for way in wire.ways.values()
        ]
    assert [reply.body for reply in replies] == [b"ok", b"ok"]
    assert script.summaries > requests / 100  # so that some did leave while one was being made
