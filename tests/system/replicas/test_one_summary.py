"""However many replicas and clients need a summary, one is made; whose holder is gone is made by another."""

import asyncio
import signal
import time
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

CLIENTS = 200
# By default no request waits for as long as a lease may last.
PATIENT = {"COMPACTION_PROXY__COMPACTION__MAX_BLOCK_S": "30"}


async def either(replicas: Sequence[Any], number: int, content: bytes) -> httpx.Response:
    """An answer as through a front that takes turns, and asks another replica where one hangs up."""
    for replica in (replicas[number % 2], replicas[(number + 1) % 2]):
        try:
            answer: httpx.Response = await replica.ask(content)
        except httpx.TransportError:
            continue
        return answer
    raise AssertionError("neither replica answers")


async def until(condition: Any, limit_s: float = 60.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 - it is about other processes
            await asyncio.sleep(0.005)


async def test_of_200_equal_first_requests_on_two_replicas_one_makes_the_summary(replicated: Any) -> None:
    async with replicated.scene(numbered=True) as (upstream, url, replicas, server):
        pair = await replicas.pair(url, server.url)
        upstream.held_s = [0.5]
        content = replicated.body(replicated.conversation("c"))

        answers = await asyncio.gather(*(either(pair, n, content) for n in range(CLIENTS)))

    assert [answer.status_code for answer in answers] == [200] * CLIENTS
    outcomes = {
        (answer.headers["x-compaction-status"], answer.headers.get("x-compaction-reason"))
        for answer in answers
    }
    assert outcomes <= {("applied", None), ("reused", None)}
    assert upstream.summaries == 1
    assert len(upstream.log) == CLIENTS
    assert len({seen.body for seen in upstream.log}) == 1
    assert b"Summary 1." in upstream.log[0].body


def holder_and_other(pair: Sequence[Any]) -> tuple[Any, Any]:
    """Of two replicas the one that is making a summary, and the other."""
    started = [bool(replica.events("compaction.started")) for replica in pair]
    assert sorted(started) == [False, True]
    return (pair[0], pair[1]) if started[0] else (pair[1], pair[0])


@pytest.mark.slow
async def test_a_holder_that_is_killed_is_succeeded_within_its_lease(replicated: Any) -> None:
    async with replicated.scene(numbered=True) as (upstream, url, replicas, server):
        pair = await replicas.pair(url, server.url, **PATIENT)
        upstream.held_s = [60.0]
        content = replicated.body(replicated.conversation("c"))

        asking = [asyncio.create_task(either(pair, n, content)) for n in range(20)]
        await until(lambda: upstream.summaries == 1)
        holder, other = holder_and_other(pair)
        holder.signal(signal.SIGKILL)
        killed = time.monotonic()
        await until(lambda: upstream.summaries == 2)
        taken_over_s = time.monotonic() - killed
        answers = await asyncio.gather(*asking)
        later = await other.ask(content)

    replicated.note(f"\na killed holder is succeeded after {taken_over_s:.2f} s")
    assert [answer.status_code for answer in answers] == [200] * 20
    assert later.headers["x-compaction-status"] == "reused"
    assert upstream.summaries == 2
    assert len({seen.body for seen in upstream.log}) == 1
    assert b"Summary 2." in upstream.log[0].body


@pytest.mark.slow
async def test_a_holder_that_was_paused_past_its_lease_writes_nothing_and_uses_its_successors(
    replicated: Any,
) -> None:
    async with replicated.scene(numbered=True) as (upstream, url, replicas, server):
        pair = await replicas.pair(url, server.url, **PATIENT)
        upstream.held_s = [1.0]
        content = replicated.body(replicated.conversation("c"))

        asking = [asyncio.create_task(either(pair, n, content)) for n in range(20)]
        await until(lambda: upstream.summaries == 1)
        holder, _ = holder_and_other(pair)
        holder.signal(signal.SIGSTOP)
        paused = time.monotonic()
        await until(lambda: upstream.summaries == 2)
        taken_over_s = time.monotonic() - paused
        await until(lambda: upstream.answered == 2)
        await until(lambda: upstream.log)
        holder.signal(signal.SIGCONT)
        answers = await asyncio.gather(*asking)
        later = [await replica.ask(content) for replica in pair]

    replicated.note(f"\na paused holder is succeeded after {taken_over_s:.2f} s")
    assert [answer.status_code for answer in answers] == [200] * 20
    assert [answer.headers["x-compaction-status"] for answer in later] == ["reused"] * 2
    assert upstream.summaries == 2
    assert len({seen.body for seen in upstream.log}) == 1
    assert b"Summary 2." in upstream.log[0].body
