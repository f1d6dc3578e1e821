"""A client leaves at each of seven stages: the upstream is hung up on, and nothing is left of it."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from compaction_proxy.gateway.concurrency_limit import ConcurrencyLimiter
from compaction_proxy.storage import envelope
from compaction_proxy.storage.redis.store import RedisStore
from compaction_proxy.storage.redis.url import parse_redis_url
from tests.helpers.fault_tcp import Faults, FaultTcp
from tests.helpers.redis_servers import RedisServer

CHAT = "/v1/chat/completions"
# Connections that wait for another request wait for two seconds; only a hang takes as long.
SETTLED_WITHIN_S = 60.0
STORE_DELAY_S = 0.05
STORE_CONNECTIONS = 6  # one request at a time, what is written behind it (four of them), and one that listens
SUMMARY_MODEL = "summary-small"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass
class Scene:
    """The product between a client, an upstream and a Redis server.

    Attributes:
        upstream: What the product speaks to.
        redis, between: Its store, and what stands before that.
        asked: Set when the upstream has a request that it does not answer yet.
        admissions: Its places for requests.
        port: Where the product listens.
        base, files: Tasks and open files before anybody left.
        counted: Requests in the totals of all conversations, and input tokens, when the product has ended.
    """

    wire: Any
    upstream: Any
    between: FaultTcp
    redis: RedisServer
    asked: asyncio.Event
    admissions: list[ConcurrencyLimiter]
    port: int = 0
    base: set[asyncio.Task[Any]] = field(default_factory=set)
    files: int = 0
    counted: tuple[int, int] = (0, 0)

    def request(self, number: int, **members: Any) -> bytes:
        """A request past the gate, of a conversation of its own; the client would stay connected."""
        body = self.wire.chat_body(user=f"{number}", **members)
        fields = (*self.wire.ways["past the gate"], f"x-session-id: {number}")
        return bytes(self.wire.post(CHAT, body, *fields).replace(b"connection: close\r\n", b""))

    def long_request(self, number: int) -> bytes:
        """A request that does not fit without a summary."""
        turns = [
            {"role": role, "content": f"{role} {number} tells: " + "alpha beta " * 60}
            for role in ("user", "assistant") * 10
        ]
        body = self.wire.chat_body(model="small", messages=turns)
        return bytes(self.wire.post(CHAT, body).replace(b"connection: close\r\n", b""))

    def tasks_left(self) -> set[asyncio.Task[Any]]:
        """Tasks that were not there before, without those of the servers that the tests run."""
        ours = ("FaultTcp.", "Scripted.")
        return {
            task
            for task in asyncio.all_tasks() - self.base
            if not getattr(task.get_coro(), "__qualname__", "").startswith(ours)
        }

    def open_files(self) -> int:
        """Without the store's connections: one end here, two in what stands before it."""
        return len(list(Path("/dev/fd").iterdir())) - 3 * self.between.open

    def leases(self) -> list[bytes]:
        return [key for key in self.redis.admin.keys("*") if b"#lease" in key]


Reach = Callable[[Scene, asyncio.StreamReader, asyncio.StreamWriter, int], Any]


async def within_the_head(scene: Scene, _: Any, writer: asyncio.StreamWriter, number: int) -> None:
    data = scene.request(number)
    writer.write(data[: 1 + number % (data.index(b"\r\n\r\n") + 2)])
    await asyncio.sleep(0.002)


async def within_the_body(scene: Scene, _: Any, writer: asyncio.StreamWriter, number: int) -> None:
    data = scene.request(number)
    writer.write(data[: -1 - number % 100])
    await until(lambda: scene.admissions[0].active_request_count == 1)


async def while_the_store_is_read(scene: Scene, _: Any, writer: asyncio.StreamWriter, number: int) -> None:
    before = scene.between.passed["forth"]
    scene.between.back = Faults(delay_s=STORE_DELAY_S)
    writer.write(scene.request(number))
    await until(
        lambda: scene.admissions[0].active_request_count == 1 and scene.between.passed["forth"] > before
    )


async def while_a_summary_is_made(scene: Scene, _: Any, writer: asyncio.StreamWriter, number: int) -> None:
    writer.write(scene.long_request(number))
    await scene.asked.wait()


async def before_the_first_byte(scene: Scene, _: Any, writer: asyncio.StreamWriter, number: int) -> None:
    writer.write(scene.request(number))
    await scene.asked.wait()


async def within_the_stream(
    scene: Scene, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int
) -> None:
    writer.write(scene.request(number, stream=True))
    await reader.readuntil(b"data: {}\n\n")


async def after_the_last_byte(
    scene: Scene, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int
) -> None:
    writer.write(scene.request(number, seed=1))
    await reader.readuntil(b"\r\n\r\nok")


# Each with what the upstream is asked for on its way, by the model's name.
STAGES: dict[str, tuple[Reach, list[str]]] = {
    "C1 within the head": (within_the_head, []),
    "C2 within the body": (within_the_body, []),
    "C3 while the store is read": (while_the_store_is_read, []),
    "C4 while a summary is made": (while_a_summary_is_made, [SUMMARY_MODEL]),
    "C5 before the first byte": (before_the_first_byte, ["m"]),
    "C6 within the stream": (within_the_stream, ["m"]),
    "C7 after the last byte": (after_the_last_byte, ["m"]),
}


async def until(condition: Callable[[], bool], limit_s: float = SETTLED_WITHIN_S) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 - it is about sockets and tasks, which set no event
            await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def playing(wire: Any, directory: Path, admissions: list[ConcurrencyLimiter]) -> AsyncIterator[Scene]:
    """The scene; what has been made once has been made."""

    async def script(exchange: Any) -> None:
        body = json.loads(exchange.body)
        if body.get("seed"):
            await exchange.send(OK)
            return
        await exchange.send(STREAM + b"a\r\ndata: {}\n\n\r\n" if body.get("stream") else b"")
        scene.asked.set()
        assert await exchange.reader.read() == b""
        exchange.writer.close()

    sections = {
        "summary": {"model": SUMMARY_MODEL},
        "compaction": {"on_disconnect": "cancel"},
        "models": {"m": {"window": 128_000}, "small": {"window": 2_000}},
    }
    with RedisServer(directory) as redis:
        async with FaultTcp(redis.port) as between, wire.running_upstream(script) as upstream:
            store = RedisStore(parse_redis_url(f"redis://127.0.0.1:{between.port}/0"))
            scene = Scene(wire, upstream, between, redis, asyncio.Event(), admissions)
            async with wire.running_proxy(upstream.port, store=store, **sections) as scene.port:
                warm = wire.post(CHAT, wire.chat_body(seed=1), *wire.ways["past the gate"])
                assert (await wire.ask(scene.port, warm)).body == b"ok"
                await until(lambda: upstream.open_sockets == 0)
                upstream.seen.clear()
                assert scene.leases() == []
                scene.base, scene.files = asyncio.all_tasks(), scene.open_files()
                yield scene
            totals = [envelope.unpack(redis.admin.get(key)) for key in redis.admin.keys("*:conversation")]
            told = [each for each in totals if each]
            scene.counted = (
                sum(each["requests"] for each in told),
                sum(each["prompt_tokens"] for each in told),
            )


async def leave(scene: Scene, reach: Reach, number: int, kept: int) -> None:
    """One client that leaves; ends when nothing is left of it but `kept` connections to the upstream."""
    scene.asked.clear()
    reader, writer = await asyncio.open_connection("127.0.0.1", scene.port)
    await reach(scene, reader, writer, number)
    if number % 2:
        writer.transport.abort()  # the sooner: nothing that is unsent is waited for
    writer.close()
    await until(
        lambda: (
            (scene.admissions[0].active_request_count, scene.upstream.open_sockets <= kept) == (0, True)
            and not scene.tasks_left()
        )
    )


@pytest.mark.timeout(300)  # with --runslow
async def test_a_client_that_leaves_at_any_of_seven_stages_is_gone_everywhere(
    wire: Any, tmp_path: Path, admissions: list[ConcurrencyLimiter], pytestconfig: pytest.Config
) -> None:
    clients = 200 if pytestconfig.getoption("--runslow") else 20
    asked = {}
    async with playing(wire, tmp_path, admissions) as scene:
        for stage, (reach, _) in STAGES.items():
            kept = int(reach is after_the_last_byte)
            for number in range(clients):
                await leave(scene, reach, number, kept)
            scene.between.back = Faults()
            asked[stage] = [json.loads(seen.body)["model"] for seen in scene.upstream.seen]
            scene.upstream.seen.clear()
        await until(lambda: not scene.leases() and scene.upstream.open_sockets == 0)
        await until(lambda: scene.open_files() <= scene.files)
        assert scene.between.open <= STORE_CONNECTIONS
        assert (await wire.ask(scene.port, wire.post(CHAT, wire.chat_body(seed=1)))).body == b"ok"
    assert asked == {stage: models * clients for stage, (_, models) in STAGES.items()}
    # Whatever the upstream was asked is a request; only what was answered whole says what it took.
    relayed = sum(any(model != SUMMARY_MODEL for model in models) for _, models in STAGES.values())
    # One before and one after them had no id: they are a conversation, too.
    assert scene.counted == (relayed * clients + 2, 0)
