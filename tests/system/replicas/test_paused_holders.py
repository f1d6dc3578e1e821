"""Holders of leases that are stopped past their time: what they write then is nothing.

Each is stopped while it waits for its summary, which comes when the test says so: while the holder is still
stopped, once it has been woken up and its successor is done, or while its successor is still at it.
"""

import asyncio
import re
import signal
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from compaction_proxy.storage.leases import LEASE_S

# Conversations whose rounds one process makes when it is stopped.
BATCH = 25
SLACK_S = 60.0
# A holder that has its summary has tried to save it by then.
TRIED_S = 0.5
# Nobody gives up before a lease has run out, and there is no further round beside those that are looked at.
PATIENT = {
    "COMPACTION_PROXY__COMPACTION__MAX_BLOCK_S": "60",
    "COMPACTION_PROXY__SUMMARY__TIMEOUT_S": "60",
    "COMPACTION_PROXY__COMPACTION__BACKGROUND": "false",
}
WHILE_STOPPED, AFTER_ITS_SUCCESSOR, BESIDE_ITS_SUCCESSOR = WAKES = ("stopped", "after", "beside")
ROUND = re.compile(r":(checkpoint|checkpoints|staged|archive|archives|rounds)(:(?!.*lease)|$)")
CHECKPOINT = re.compile(r":checkpoint:\w+:[0-9a-f]+$")
MARKER = re.compile(rb"trial\d+-")
SUMMARY = re.compile(rb"Summary (\d+)\.")

Saved = dict[str, list[bytes]]


def without_repetition(saved: Saved) -> Saved:
    """The same where the index names no place twice, which is as good as once."""
    return {
        key: list(dict.fromkeys(lines)) if ":checkpoints:" in key else lines for key, lines in saved.items()
    }


def saved_in_redis(server: Any) -> Saved:
    """All that a round writes, by its key."""
    found: Saved = {}
    for key in server.admin.scan_iter(count=1_000):
        if ROUND.search(key.decode()):
            is_list = server.admin.type(key) == b"list"
            found[key.decode()] = server.admin.lrange(key, 0, -1) if is_list else [server.admin.get(key)]
    return found


def saved_in_sqlite(path: Path) -> Saved:
    """The same of a file."""
    found: Saved = {}
    sql = "SELECT key, coalesce(items.value, lines.value) FROM items LEFT JOIN lines ON item = items.id"
    with closing(sqlite3.connect(path)) as db:
        for key, value in db.execute(f"{sql} ORDER BY lines.id"):
            if ROUND.search(key):
                found.setdefault(key, []).append(value)
    return found


async def until(condition: Any, limit_s: float) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 - it is about other processes
            await asyncio.sleep(0.01)


@dataclass
class Trial:
    """A conversation of its own tenant, which a replica is asked about that is stopped, and then another.

    Attributes:
        marker: Stands in each of its messages.
        wake: When the holder gets its summary.
        answers: Let the summaries of the holder and of its successor go.
        calls: How many summaries were asked for.
    """

    marker: str
    wake: str
    body: bytes
    answers: tuple[asyncio.Event, asyncio.Event] = field(
        default_factory=lambda: (asyncio.Event(), asyncio.Event())
    )
    calls: int = 0

    async def hold(self) -> None:
        self.calls += 1
        await self.answers[min(self.calls, 2) - 1].wait()

    def ask(self, replica: Any) -> asyncio.Task[Any]:
        return asyncio.create_task(replica.ask(self.body, authorization=f"Bearer {self.marker}"))


def released(trials: Iterable[Trial], whose: int, *wakes: str) -> None:
    for trial in trials:
        if trial.wake in wakes:
            trial.answers[whose].set()


async def paused(trials: Sequence[Trial], holder: Any, other: Any, saved: Any) -> list[str]:
    """What went wrong in any of the trials, of which all holders are stopped at once."""
    done = [trial.wake != BESIDE_ITS_SUCCESSOR for trial in trials]
    first = [trial.ask(holder) for trial in trials]
    await until(lambda: all(trial.calls == 1 for trial in trials), SLACK_S)
    holder.signal(signal.SIGSTOP)
    released(trials, 0, WHILE_STOPPED)
    second = [trial.ask(other) for trial in trials]
    await until(lambda: all(trial.calls == 2 for trial in trials), LEASE_S + SLACK_S)
    released(trials, 1, WHILE_STOPPED, AFTER_ITS_SUCCESSOR)
    await asyncio.gather(*(task for task, ends in zip(second, done, strict=True) if ends))
    before = saved()

    holder.signal(signal.SIGCONT)
    released(trials, 0, *WAKES)
    await asyncio.gather(*(task for task, ends in zip(first, done, strict=True) if ends))
    await asyncio.sleep(TRIED_S)
    stale = saved()
    released(trials, 1, *WAKES)
    answers = await asyncio.gather(*first, *second)
    after = saved()
    later = await asyncio.gather(*(trial.ask(replica) for replica in (holder, other) for trial in trials))

    wrong = [f"stale: {key}" for key in before.keys() | stale.keys() if before.get(key) != stale.get(key)]
    wrong += [f"written over: {key}" for key in before if before[key] != after.get(key)]
    wrong += [f"status {answer.status_code}" for answer in answers if answer.status_code != 200]
    statuses = {answer.headers["x-compaction-status"] for answer in later}
    return wrong + [f"later {status}" for status in statuses - {"reused"}]


def unlike(trial: Trial, bodies: set[bytes], successors: range) -> list[str]:
    """What is wrong with what the model was sent: all of it holds what the successor wrote."""
    numbers = [int(number) for body in bodies for number in SUMMARY.findall(body)]
    if len(bodies) == trial.calls - 1 == len(numbers) == 1 and numbers[0] in successors:
        return []
    return [f"{trial.marker} {trial.wake}: {len(bodies)} bodies of {trial.calls} summaries, {numbers}"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["redis", pytest.param("sqlite", marks=pytest.mark.slow)])
async def test_a_holder_that_was_stopped_past_its_lease_writes_nothing_and_uses_its_successors(
    replicated: Any, kind: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    count = {"redis": 200, "sqlite": 50}[kind] if pytestconfig.getoption("--runslow") else 6
    trials = []
    for number, wake in zip(range(count), cycle(WAKES), strict=False):
        marker = f"trial{number}-"
        trials.append(Trial(marker, wake, replicated.body(replicated.conversation(marker))))
    by_marker = {trial.marker.encode(): trial for trial in trials}

    async def hold(body: bytes) -> None:
        found = MARKER.search(body)
        assert found is not None
        await by_marker[found[0]].hold()

    wrong: list[str] = []
    path = tmp_path / "state.db"
    async with replicated.scene(numbered=True) as (upstream, url, replicas, server):
        upstream.hold = hold
        pair = await replicas.pair(url, server.url if kind == "redis" else f"sqlite:///{path}", **PATIENT)

        def saved() -> Saved:
            return without_repetition(saved_in_redis(server) if kind == "redis" else saved_in_sqlite(path))

        for number, batch in enumerate(trials[k : k + BATCH] for k in range(0, count, BATCH)):
            made = upstream.summaries
            wrong += await paused(batch, pair[number % 2], pair[1 - number % 2], saved)
            successors = range(made + len(batch) + 1, made + 2 * len(batch) + 1)
            for trial in batch:
                wrong += unlike(trial, set(upstream.forwarded(trial.marker)), successors)
        checkpoints = [key for key in saved() if CHECKPOINT.search(key)]
        failures = [event["reason"] for replica in pair for event in replica.events("store.failed")]

    replicated.note(f"\n{count} holders stopped past their leases: {len(wrong)} faults, {failures}")
    assert wrong == []
    assert len(checkpoints) == count
    assert upstream.summaries == 2 * count
