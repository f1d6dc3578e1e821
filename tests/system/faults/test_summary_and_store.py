"""Every way for a summary model to fail, under every way for Redis to fail: each request is answered.

What reaches the upstream is what the client sent, byte for byte, or a smaller request that is as valid. The
summary model fails on a socket (`summary_shapes`); Redis is a server of the test's own, and really killed,
stopped, demoted, filled, emptied, overwritten or locked.
"""

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import httpx
import pytest

from compaction_proxy.app import create_app
from compaction_proxy.config.config import Config
from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.providers import tokenizers
from tests.helpers.redis_servers import RedisServer
from tests.system.faults.summary_shapes import (
    ANSWER,
    CLIENTS_FIELD,
    EVENTS,
    REASONS,
    SLOW,
    WAYS,
    WELL,
    WORD,
    Upstream,
    upstream,
)

JsonObject = dict[str, Any]

STRATEGIES = ("anchored", "chained", "full", "selective", "iterations")
TRIGGER_TOKENS = 2_000
# Ways that take for ever are given a moment, in which they are asked on a busy machine too; the others end by
# themselves.
SLOW_TIMEOUT_S, TIMEOUT_S = 2.0, 60.0
AGAIN_S = 0.05
STEPS = 14
# What becomes of a request without a summary: a text without a model, or what came.
NOT_SUMMARISED = {
    "anchored": "applied",
    **dict.fromkeys(("chained", "full", "selective", "iterations"), "failed-open"),
}
TASK = "Find out which parts of the billing service are still on the old cluster."
TOLD = "Part %d reads its settings and opens its port when it starts, as it should. "
RESULT = "part %d: replicas are set\n" + "the worker waits for its queue\n" * 8

cached_load = functools.cache(tokenizers.load_encoding)


def conversation(name: str, steps: int = STEPS) -> list[JsonObject]:
    """An agent's run of its own, about 2,500 tokens long; it ends with a question."""
    messages: list[JsonObject] = [
        {"role": "system", "content": "You move services."},
        {"role": "user", "content": f"{TASK} This is run {name}."},
    ]
    for step in range(steps):
        call = {"name": "read", "arguments": json.dumps({"path": f"/srv/billing/part-{step}.yaml"})}
        messages += [
            {
                "role": "assistant",
                "content": (TOLD % step) * 6,
                "tool_calls": [{"id": f"call_{step}", "type": "function", "function": call}],
            },
            {"role": "tool", "tool_call_id": f"call_{step}", "content": RESULT % step},
        ]
    return [*messages, {"role": "user", "content": f"How far did run {name} get?"}]


def unpaired(messages: list[JsonObject]) -> Iterator[str]:
    """Calls without results right behind them, and results without calls."""
    open_calls: set[str] = set()
    for each in messages:
        if each["role"] == "tool":
            if each["tool_call_id"] not in open_calls:
                yield each["tool_call_id"]
            open_calls.discard(each["tool_call_id"])
            continue
        yield from open_calls
        open_calls = {call["id"] for call in each.get("tool_calls", ())}
    yield from open_calls


def wrong_with(sent: bytes, forwarded: bytes) -> Iterator[str]:
    """What keeps a forwarded request from being the client's bytes, or a smaller one that is as valid."""
    if forwarded == sent:
        return
    before, after = json.loads(sent), json.loads(forwarded)
    had, has = before.pop("messages"), after.pop("messages")
    if len(forwarded) >= len(sent):
        yield "no smaller"
    if before != after:
        yield "another member changed"
    if [each for each in has if each["role"] == "system"] != had[:1]:
        yield "privileged messages changed"
    if had[-1] != has[-1] and had[-1]["content"] not in has[-1]["content"]:  # `full` takes it along
        yield "the latest user message is gone"
    if list(unpaired(has)):
        yield "calls and results do not pair"
    if not all(each["role"] in {"system", "user", "assistant", "tool"} for each in has):
        yield "a role that is none"


class Said(NamedTuple):
    """What the proxy said of a request."""

    status: str
    reason: str | None


class Stage:
    """The proxy over one Redis server, and who asks it.

    Attributes:
        wrong: What was wrong with any request.
        failed: How many met a summary model that fails.
    """

    def __init__(self, client: httpx.AsyncClient, behind: Upstream) -> None:
        self.client = client
        self.behind = behind
        self.wrong: list[str] = []
        self.failed = 0

    async def ask(self, way: str, name: str, strategy: str, *, stream: bool, steps: int = STEPS) -> Said:
        """One request. Whatever is wrong with its answer, or with what reached the upstream, is noted."""
        who = f"{way}.{name}"
        model = "slow" if way in SLOW else "m"
        sent = json.dumps({"model": model, "messages": conversation(who, steps), "stream": stream}).encode()
        headers = {
            "authorization": f"Bearer {who}",
            "x-compaction-strategy": strategy,
            "x-compaction-trigger-tokens": str(TRIGGER_TOKENS),
            CLIENTS_FIELD.decode(): "1",
        }
        answer = await self.client.post("/v1/chat/completions", content=sent, headers=headers)
        if (answer.status_code, answer.content) != (200, EVENTS if stream else ANSWER):
            self.wrong.append(f"{who}: answered {answer.status_code} {answer.content[:80]!r}")
        forwarded = self.behind.bodies.pop(who, b"{}")
        self.wrong += [f"{who}: {each}" for each in wrong_with(sent, forwarded)]
        if WORD.encode() in forwarded and way != WELL and strategy != "iterations":  # which cuts what is long
            self.wrong.append(f"{who}: what the summary model said was used")
        return Said(answer.headers["x-compaction-status"], answer.headers.get("x-compaction-reason"))

    async def fail(self, number: int, *, strategy: str, stream: bool) -> None:
        """One request for each way of the summary model to fail, at once; first those that end soon."""
        for ways in (set(WAYS) - SLOW, SLOW):
            await self._fail(sorted(ways), f"{number}-{strategy}-{stream}", strategy, stream=stream)

    async def _fail(self, ways: list[str], name: str, strategy: str, *, stream: bool) -> None:
        asking = [self.ask(way, name, strategy, stream=stream) for way in ways]
        for way, said in zip(ways, await asyncio.gather(*asking), strict=True):
            cuts = strategy == "iterations" and way in {"longer", "unfinished"}
            expected = Said("applied", None) if cuts else Said(NOT_SUMMARISED[strategy], REASONS[way])
            late = said.reason == "deadline" and way in SLOW  # of the request, which ends at the same moment
            if late:
                expected = expected._replace(reason="deadline")
            if said != expected:
                self.wrong.append(f"{way}.{name}: {said}, not {expected}")
            if not late and not self.behind.asked[f"{way}.{name}"]:
                self.wrong.append(f"{way}.{name}: no summary was asked for")
            self.failed += 1

    async def well(self, steps: int) -> None:
        """A conversation with each strategy, as far as it has come; the summary model is in order."""
        for each in STRATEGIES:
            said = await self.ask(WELL, each, each, stream=False, steps=steps)
            if said != Said("applied", None) and steps == STEPS:
                self.wrong.append(f"{each}, {steps} steps: {said}")


@asynccontextmanager
async def staged(server: RedisServer) -> AsyncIterator[Stage]:
    async with upstream() as behind:
        config = Config.model_validate(
            {
                "upstream": {"base_url": f"{behind.url}/v1"},
                "store": {"url": server.url},
                "summary": {"model": "summary", "timeout_s": TIMEOUT_S},
                "compaction": {"strategies": {"anchored": {"max_block_s": TIMEOUT_S}}},  # as for the others
                "models": {
                    "m": {"window": 128_000},
                    "slow": {"window": 128_000, "summary": {"timeout_s": SLOW_TIMEOUT_S}},
                },
            }
        )
        with mock.patch.object(tokenizers, "load_encoding", cached_load):  # takes half a second each time
            async with (
                serve_embedded(create_app(config)) as url,
                httpx.AsyncClient(base_url=url, timeout=90, trust_env=False) as client,
            ):
                yield Stage(client, behind)


def nothing(server: RedisServer) -> None:
    """No further harm."""


def demote(server: RedisServer) -> None:
    server.admin.replicaof("127.0.0.1", "1")


def fill(server: RedisServer) -> None:
    server.admin.config_set("maxmemory-policy", "noeviction")
    server.admin.config_set("maxmemory", "1")


def empty(server: RedisServer) -> None:
    server.admin.flushall()


def overwrite(server: RedisServer) -> None:
    """Every record becomes rubbish, every list a record and every other thing a list."""
    for number, key in enumerate(server.admin.keys("*")):
        kind = server.admin.type(key)
        with server.admin.pipeline() as pipeline:  # a transaction: the proxy writes the same keys
            pipeline.delete(key)
            if kind != b"string" or number % 2:
                pipeline.set(key, b"\x00\xff{rubbish")
            else:
                pipeline.rpush(key, b"rubbish")
            pipeline.execute()


def lock(server: RedisServer) -> None:
    server.admin.config_set("requirepass", "another")
    server.admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


def restart(server: RedisServer) -> None:
    server.kill()
    server.start()


# What happens before the requests, and then again and again beside them.
Harm = Callable[[RedisServer], None]
HARMS: dict[str, tuple[Harm, Harm]] = {
    "away-at-the-start": (nothing, nothing),
    "killed": (RedisServer.kill, nothing),
    "hung": (RedisServer.pause, nothing),
    "demoted": (demote, nothing),
    "full": (fill, nothing),
    "emptied-again-and-again": (empty, empty),
    "overwritten-again-and-again": (overwrite, overwrite),
    "locked": (lock, nothing),
    "restarted-again-and-again": (restart, restart),
}


# Under these nobody can speak to the store at all.
AWAY = {"away-at-the-start", "killed", "hung", "locked"}


@asynccontextmanager
async def harmed(server: RedisServer, harm: str) -> AsyncIterator[None]:
    """Inside, harm is done."""
    first, again = HARMS[harm]
    await asyncio.to_thread(first, server)

    async def going_on() -> None:
        while again is not nothing:
            await asyncio.to_thread(again, server)
            await asyncio.sleep(AGAIN_S)

    task = asyncio.create_task(going_on())
    await asyncio.sleep(0)
    yield
    if task.done():
        task.result()  # doing harm must not fail
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def rounds(store: int, *, whole: bool) -> list[tuple[str, bool]]:
    """Strategies, and whether to stream: all ten, or one that differs from store to store."""
    all_ten = [(strategy, stream) for strategy in STRATEGIES for stream in (False, True)]
    return all_ten if whole else [all_ten[store % len(all_ten)]]


@pytest.mark.parametrize("harm", HARMS)
async def test_every_summary_failure_under_every_store_failure_is_answered_by_the_upstream(
    harm: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    number = list(HARMS).index(harm)
    asked = rounds(number, whole=pytestconfig.getoption("--runslow"))
    with RedisServer(tmp_path) as server:
        if harm == "away-at-the-start":
            server.kill()
        async with staged(server) as stage:
            await stage.well(STEPS)
            async with harmed(server, harm):
                for strategy, stream in asked:
                    await stage.fail(number, strategy=strategy, stream=stream)
                await stage.well(STEPS + 2)
                store = (await stage.client.get("/readyz")).json()["store"]
    assert not stage.wrong, "\n".join(stage.wrong)
    assert store == "down" or harm not in AWAY
    assert stage.failed == len(WAYS) * len(asked)


def test_there_are_twenty_five_summary_failures_and_nine_store_failures() -> None:
    assert (len(WAYS), len(HARMS), len(rounds(0, whole=True))) == (25, 9, 10)
