"""Many requests at once, in one process and in several: one summary call, the same bytes, nothing lost."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from compaction_proxy.compaction.types import CompactionStatus
from compaction_proxy.core.strategies import STRATEGIES
from compaction_proxy.core.summary.call import SummaryAnswer
from compaction_proxy.storage import leases
from compaction_proxy.storage.factory import open_store
from compaction_proxy.storage.memory import MemoryStore
from tests.helpers.compaction_bench import (
    RECORD,
    Bench,
    Summaries,
    bench,
    forwarded,
    loop,
    prefix,
    says,
    talk,
    user,
)
from tests.helpers.redis_servers import RedisServer

DUE = 93
SUMMARISING = [name for name, row in STRATEGIES.items() if row.summary]


@pytest.mark.parametrize("strategy", SUMMARISING)
async def test_fifty_requests_at_once_share_one_summary_and_its_bytes(strategy: str) -> None:
    async with bench(Summaries(hold=asyncio.Event()), strategy=strategy) as made:
        running = [
            asyncio.create_task(made.fit(talk(DUE), trigger_tokens=8_000, patience_s=None)) for _ in range(50)
        ]
        async with asyncio.timeout(100):
            while made.rounds.waiting_count < 50:  # noqa: ASYNC110 - rounds are no event of ours
                await asyncio.sleep(0.01)
        made.summaries.release()
        fits = await asyncio.gather(*running)
    assert len(made.summaries.calls) == 1
    assert {fit.report.status for fit in fits} <= {CompactionStatus.APPLIED, CompactionStatus.REUSED}
    assert len({fit.raw for fit in fits}) == 1


async def test_branches_at_once_each_get_a_summary_of_their_own() -> None:
    branches = [talk(DUE, start=f"Build it, way {number}.") for number in range(5)]
    async with bench() as made:
        fits = await asyncio.gather(*(made.fit(branch, conversation=None) for branch in branches))
    assert {fit.report.status for fit in fits} == {CompactionStatus.APPLIED}
    assert len(made.summaries.calls) == 5
    for number, fit in enumerate(fits):
        assert forwarded(fit)[1]["content"] == f"Build it, way {number}."


async def test_branches_that_part_late_share_what_they_have_in_common() -> None:
    async with bench() as made:
        first = await made.fit(talk(DUE))
        ways = [[*talk(DUE), says(f"Way {number}."), user("Go on.")] for number in range(5)]
        fits = await asyncio.gather(*(made.fit(way) for way in ways))
    assert len(made.summaries.calls) == 1
    assert all(fit.raw.startswith(prefix(first)) for fit in fits)
    assert [forwarded(fit)[-2]["content"] for fit in fits] == [f"Way {number}." for number in range(5)]


@pytest.mark.virtual_time
async def test_a_request_that_grew_while_the_job_ran_gets_the_job_s_round_and_loses_no_turn() -> None:
    async with bench(Summaries(hold=asyncio.Event())) as made:
        await made.answered(talk(80))
        await made.summaries.asked()
        grown = [asyncio.create_task(made.fit(talk(turns))) for turns in (DUE, DUE + 1, DUE + 2)]
        await asyncio.sleep(1)  # until they wait for the round
        made.summaries.release()
        fits = await asyncio.gather(*grown)
    assert len(made.summaries.calls) == 1
    for fit, turns in zip(fits, (DUE, DUE + 1, DUE + 2), strict=True):
        kept = forwarded(fit)
        assert kept[-20:] == talk(turns)[-20:]
        assert kept[2] == forwarded(fits[0])[2]


async def test_other_results_under_the_same_calls_never_get_a_round_that_is_being_made() -> None:
    other = [
        {**each, "content": "another " + each["content"]} if each["role"] == "tool" else each
        for each in loop(130, lines=12)
    ]
    record = SummaryAnswer(RECORD.replace("it works fine", "the first history"))
    async with bench(Summaries([record, SummaryAnswer(RECORD)], hold=asyncio.Event())) as made:
        first = asyncio.create_task(made.fit(loop(130, lines=12)))
        await made.summaries.asked()
        second = asyncio.create_task(made.fit(other))
        await made.summaries.asked(2)
        made.summaries.release()
        fits = await asyncio.gather(first, second)
    assert [b"the first history" in fit.raw for fit in fits] == [True, False]


async def test_going_back_to_a_message_that_a_running_job_covers_does_not_join_it() -> None:
    async with bench(Summaries(hold=asyncio.Event())) as made:
        await made.answered(talk(80))
        await made.summaries.asked()
        back = asyncio.create_task(made.fit(talk(50), trigger_tokens=3_000))
        await made.summaries.asked(2)
        made.summaries.release()
        fit = await back
    assert fit.report.status is CompactionStatus.APPLIED
    assert forwarded(fit)[-1] == talk(50)[-1]


@asynccontextmanager
async def pair(kind: str, directory: Path, summaries: Summaries) -> AsyncIterator[tuple[Bench, Bench]]:
    """Two replicas on one store, asking one summary model."""
    if kind == "memory":
        shared = MemoryStore()
        async with bench(summaries, store=shared) as one, bench(summaries, store=shared) as other:
            yield one, other
        return
    with RedisServer(directory) as server:
        stores = [open_store(server.url), open_store(server.url)]
        async with bench(summaries, store=stores[0]) as one, bench(summaries, store=stores[1]) as other:
            yield one, other
        for store in stores:
            await store.close()


@pytest.mark.parametrize("kind", ["memory", "redis"])
async def test_two_replicas_on_one_store_make_one_call(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine, a new connection takes long. A replica that has no store makes a call of its own.
    monkeypatch.setattr("compaction_proxy.storage.redis.client.CONNECT_TIMEOUT_S", 60.0)
    summaries = Summaries(hold=asyncio.Event())
    async with pair(kind, tmp_path, summaries) as replicas:
        running = [asyncio.create_task(made.fit(talk(DUE))) for made in replicas for _ in range(10)]
        await summaries.asked()
        await asyncio.sleep(0.05)
        summaries.release()
        fits = await asyncio.gather(*running)
        grown = [await made.fit([*talk(DUE), says("This."), user("Go on.")]) for made in replicas]
    assert len(summaries.calls) == 1
    assert len({fit.raw for fit in fits}) == 1
    assert grown[0].raw == grown[1].raw
    assert {fit.report.status for fit in grown} == {CompactionStatus.REUSED}


@pytest.mark.virtual_time
async def test_a_paused_lease_holder_is_succeeded_and_writes_over_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One stops (no renewal) inside its summary call, the other takes over, and the first wakes."""
    monkeypatch.setattr(leases, "RENEWALS", 0.01)  # it renews too late
    held = leases.wait_for_lease_or_record
    monkeypatch.setattr(
        "compaction_proxy.compaction.round_builder.wait_for_lease_or_record",
        lambda records, key: held(records, key, 0.2),
    )
    sleeping = Summaries([SummaryAnswer(RECORD.replace("fine", "late"))], hold=asyncio.Event())
    store = MemoryStore(clock=asyncio.get_running_loop().time)
    async with bench(sleeping, store=store) as one, bench(store=store) as other:
        first = asyncio.create_task(one.fit(talk(DUE)))
        await sleeping.asked()
        successor = await other.fit(talk(DUE))
        assert successor.report.status is CompactionStatus.APPLIED
        sleeping.release()
        woken = await first
        again = await one.fit(talk(DUE))
    assert successor.raw == woken.raw == again.raw
    assert b"it works late" not in woken.raw
    assert (len(sleeping.calls), len(other.summaries.calls)) == (1, 1)
