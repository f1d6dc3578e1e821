"""Two replicas at about 50 requests a second while their Redis server fails in every way it can.

No client notices, and once the server is back, what one replica makes is used by the other. With `-s` the
times of each phase are printed. None is asserted: a machine may be busy.
"""

import asyncio
import itertools
import math
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.helpers.redis_servers import RedisServer

pytestmark = pytest.mark.asyncio(loop_scope="module")

PERIOD_S = 0.02
AT_ONCE = 30
"""Requests under way, at most: a busy machine gets fewer a second."""
HEALTHY, AWAY, AFTER = 30, 60, 10
"""How many requests are answered before the outage, in it and after it."""
LIMIT_S = 60.0
"""Only a hang takes as long."""
SLOTS, STEPS = 6, 8
PASSWORD = "another"


@dataclass(frozen=True)
class Outage:
    """A way to fail.

    Attributes:
        name: Of the report.
        begin: Makes the server fail.
        end: Makes it work.
        forgets: Whether what was stored is gone.
    """

    name: str
    begin: Callable[[RedisServer], object]
    end: Callable[[RedisServer], object]
    forgets: bool = False


def start_empty(server: RedisServer) -> None:
    shutil.rmtree(server.directory / "appendonlydir")
    server.start()


def fill(server: RedisServer) -> None:
    server.admin.config_set("maxmemory-policy", "noeviction")
    server.admin.config_set("maxmemory", "1")


def lock(server: RedisServer) -> None:
    server.admin.config_set("requirepass", PASSWORD)
    server.admin.client_kill_filter(_type="normal", skipme=True)


OUTAGES = [
    Outage("killed", RedisServer.kill, RedisServer.start),
    Outage("hung", RedisServer.pause, RedisServer.resume),
    Outage("restarted empty", RedisServer.kill, start_empty, forgets=True),
    Outage(
        "read-only",
        lambda server: server.admin.replicaof("127.0.0.1", "1"),
        lambda server: server.admin.replicaof("NO", "ONE"),
    ),
    Outage("full", fill, lambda server: server.admin.config_set("maxmemory", "0")),
    Outage("wrong password", lock, lambda server: server.admin.config_set("requirepass", "")),
]


@dataclass
class Load:
    """Requests of all kinds, one every 20 ms, to one replica after the other.

    Attributes:
        phase: What requests that begin now belong to.
        took_s: Of each answered request the seconds, and whether it is a small one, by phase.
        wrong: What was wrong with answers.
    """

    replicated: Any
    pair: tuple[Any, Any]
    phase: str = ""
    took_s: dict[str, list[tuple[float, bool]]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        asking = asyncio.create_task(self._ask_on())
        try:
            yield
        finally:
            asking.cancel()
            await asyncio.wait((asking,))
        await asyncio.gather(*self._under_way)

    def __post_init__(self) -> None:
        self._under_way: set[asyncio.Task[None]] = set()

    async def _ask_on(self) -> None:
        begun = time.monotonic()
        for number in itertools.count():
            await asyncio.sleep(begun + number * PERIOD_S - time.monotonic())
            if len(self._under_way) >= AT_ONCE:
                await asyncio.wait(self._under_way, return_when=asyncio.FIRST_COMPLETED)
            task = asyncio.create_task(self._one(number))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    async def answers(self, count: int) -> None:
        """Wait until so many requests of this phase have been answered."""
        asked, before = self.took_s.setdefault(self.phase, []), len(self.took_s[self.phase])
        async with asyncio.timeout(LIMIT_S):
            while len(asked) < before + count:  # noqa: ASYNC110 - it is a number, which sets no event
                await asyncio.sleep(PERIOD_S)

    def _content(self, number: int) -> tuple[bytes, str]:
        """Gated, growing, gated and streamed, growing and streamed; who grows begins anew after a while."""
        more = {"stream": True} if number % 4 >= 2 else {}
        if number % 2 == 0:
            return self.replicated.body(
                [{"role": "user", "content": f"Say {number}."}], **more
            ), f"small{number}"
        turn, slot = divmod(number // 2, SLOTS)
        age, step = divmod(turn, STEPS)
        name = f"{id(self)}-{slot}-{age}"
        return self.replicated.body(self.replicated.conversation(name, 61 + 2 * step), **more), name

    async def _one(self, number: int) -> None:
        phase = self.phase
        content, session = self._content(number)
        start = time.perf_counter()
        try:
            answer = await self.pair[number // 4 % 2].ask(content, **{"x-session-id": session})
        except httpx.HTTPError as error:
            self.wrong.append(f"{phase}: {error!r}")
            return
        self.took_s.setdefault(phase, []).append((time.perf_counter() - start, number % 2 == 0))
        whole = answer.content.endswith(b"data: [DONE]\n\n") or answer.content.endswith(b"}")
        if answer.status_code != 200 or not whole:
            self.wrong.append(f"{phase}: {answer.status_code}")


def times(load: Load) -> str:
    """A line for each phase."""
    lines = []
    for phase, asked in load.took_s.items():
        took = sorted(seconds for seconds, _ in asked)
        middles = [median(seconds for seconds, small in asked if small is each) for each in (True, False)]
        p99 = took[math.ceil(0.99 * len(took)) - 1]
        small, grown, late, last = (f"{each * 1000:6.1f}" for each in (*middles, p99, took[-1]))
        lines.append(
            f"\n  {phase:15} {len(took):3} requests; ms: p50 small{small}, long{grown}; p99{late}, max{last}"
        )
    return "".join(lines)


@dataclass
class Scene:
    replicated: Any
    upstream: Any
    url: str
    replicas: Any
    server: RedisServer
    probes: int = 0

    async def shared(self, pair: tuple[Any, Any], name: str = "") -> bool:
        """Whether the other replica uses what one makes, or has made, of a conversation: the same bytes."""
        self.probes += 1
        name = name or f"probe-{self.probes}-"
        content = self.replicated.body(self.replicated.conversation(name))
        answers = [await replica.ask(content) for replica in pair]
        forwarded = self.upstream.forwarded(f"{name} 0.")[-2:]
        return answers[1].headers["x-compaction-status"] == "reused" and len(set(forwarded)) == 1

    async def share_one(self, pair: tuple[Any, Any], name: str) -> str:
        """Makes a conversation that both replicas use, and returns its name.

        On a busy machine the store may answer one of them too late, so that it makes its own compaction.
        """
        async with asyncio.timeout(LIMIT_S):
            for attempt in itertools.count():
                if await self.shared(pair, f"{name}-{attempt}"):
                    break
        return f"{name}-{attempt}"

    async def back_after_s(self, pair: tuple[Any, Any]) -> float:
        """Seconds until a conversation that is compacted now is both replicas'."""
        start = time.monotonic()
        async with asyncio.timeout(LIMIT_S):
            while not await self.shared(pair):  # noqa: ASYNC110 - it is about other processes
                await asyncio.sleep(0.01)
        return time.monotonic() - start


@asynccontextmanager
async def scene(replicated: Any) -> AsyncIterator[Scene]:
    async with replicated.scene("--appendonly", "yes", "--appendfsync", "always", numbered=True) as made:
        yield Scene(replicated, *made)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def standing(replicated: Any) -> AsyncIterator[tuple[Scene, tuple[Any, Any]]]:
    """Replicas that have been running for a while."""
    async with scene(replicated) as made:
        yield made, await made.replicas.pair(made.url, made.server.url)


@pytest.mark.parametrize("outage", OUTAGES, ids=lambda outage: outage.name)
async def test_a_server_that_fails_under_load_fails_no_request(
    outage: Outage, standing: tuple[Scene, tuple[Any, Any]], replicated: Any
) -> None:
    scene, pair = standing
    load = Load(scene.replicated, pair, "healthy")
    async with load.running():
        before = await scene.share_one(pair, f"before-{outage.name}")
        await load.answers(HEALTHY)
        load.phase = outage.name
        outage.begin(scene.server)
        await load.answers(AWAY)
        outage.end(scene.server)
        load.phase = "back"
        back_s = await scene.back_after_s(pair)
        await load.answers(AFTER)

    said = f"\n{outage.name}: stateful again {back_s:.2f} s after it is back"
    replicated.note(said + times(load))
    assert load.wrong == []
    assert outage.forgets or await scene.shared(pair, before)
    # On a busy machine, the store may have answered one of them too late, so that it does without.
    await scene.back_after_s(pair)
    assert [await replica.store() for replica in pair] == ["ok", "ok"]


async def test_a_server_that_restarts_again_and_again_under_load_fails_no_request(
    standing: tuple[Scene, tuple[Any, Any]], replicated: Any, pytestconfig: pytest.Config
) -> None:
    restarts = 20 if pytestconfig.getoption("--runslow") else 2
    scene, pair = standing
    load = Load(scene.replicated, pair, "healthy")
    backs: list[float] = []
    async with load.running():
        for number in range(restarts):
            await load.answers(AFTER)
            load.phase = "restarts"
            scene.server.kill()
            await load.answers(AFTER)
            (scene.server.start if number % 2 else partial(start_empty, scene.server))()
            backs.append(await scene.back_after_s(pair))

    said = (
        f"\n{restarts} restarts: stateful again after {median(backs):.2f} s (p50), {max(backs):.2f} s (max)"
    )
    replicated.note(said + times(load))
    assert load.wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("outage", OUTAGES, ids=lambda outage: outage.name)
async def test_a_server_that_fails_from_the_start_fails_no_request(outage: Outage, replicated: Any) -> None:
    async with scene(replicated) as made:
        outage.begin(made.server)
        begun = time.monotonic()
        pair = await made.replicas.pair(made.url, made.server.url)
        started_s = time.monotonic() - begun
        load = Load(replicated, pair, outage.name)
        async with load.running():
            await load.answers(AWAY)
            outage.end(made.server)
            load.phase = "back"
            back_s = await made.back_after_s(pair)
            await load.answers(AFTER)

    said = f"\n{outage.name} at the start, of {started_s:.1f} s: stateful {back_s:.2f} s after it is back"
    replicated.note(said + times(load))
    assert load.wrong == []


@pytest.mark.slow
async def test_a_replica_that_starts_after_the_server_was_emptied_is_one_with_those_that_ran(
    replicated: Any,
) -> None:
    async with scene(replicated) as made:
        ran = await made.replicas.start(made.url, made.server.url)
        made.server.kill()
        start_empty(made.server)
        started = await made.replicas.start(made.url, made.server.url)
        await made.back_after_s((ran, started))
