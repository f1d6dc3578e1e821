"""Those who watch hear what happens, on any replica, in order and once; nobody waits for them."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from compaction_proxy.core.event import COMPACTED, FAILED, MEASURED, Event
from compaction_proxy.storage.keys import live_feed_key
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.telemetry import live_feed as module
from compaction_proxy.telemetry.live_feed import COMPACTION, EXCHANGE, FeedItem
from tests.helpers.journals import Process


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.005)


async def taken(items: AsyncGenerator[FeedItem, None], count: int) -> list[FeedItem]:
    async with asyncio.timeout(100):
        return [await anext(items) for _ in range(count)]


async def started(
    process: Process, after: str | None = None
) -> tuple[AsyncGenerator[FeedItem, None], list[FeedItem]]:
    """A follower that is at work, and where it began: what it heard first."""
    items = process.feed.follow(after)
    first = asyncio.create_task(taken(items, 1))
    await asyncio.sleep(0.002)
    process.feed.publish(COMPACTION, {"kind": "first"})
    await process.feed.flush()
    return items, await first


async def test_a_follower_hears_what_all_processes_tell_once_and_in_order() -> None:
    store = MemoryStore()
    here, there = Process(store), Process(store)
    items, _ = await started(here)
    for number in range(4):
        (here, there)[number % 2].feed.on_event(
            "t", Event(COMPACTED, 1.0, "c_1", round=number, summary="secret")
        )
        await (here, there)[number % 2].feed.flush()
    told = await taken(items, 4)
    assert [(each.kind, each.fields.get("round"), "summary" in each.fields) for each in told] == [
        (COMPACTION, number, False) for number in range(4)
    ]
    there.feed.on_event("t", Event(MEASURED, 1.0, "c_1"))
    there.feed.publish(COMPACTION, {"kind": "last"})
    await there.feed.flush()
    [last] = await taken(items, 1)
    assert last.fields == {"kind": "last"}
    await here.feed.close()
    assert [each async for each in items] == []


async def test_one_who_comes_back_hears_what_has_come_since() -> None:
    process = Process(MemoryStore())
    for number in range(200):
        process.feed.publish(COMPACTION, {"number": number})
    await process.feed.flush()
    newest = await process.feed.list_recent_events(150)
    items = process.feed.follow(newest[-1].id)
    assert await taken(items, 149) == newest[-2::-1]
    process.feed.publish(COMPACTION, {"number": 200})
    await process.feed.flush()
    [then] = await taken(items, 1)
    assert then.fields == {"number": 200}
    await process.feed.close()


async def test_one_whose_place_is_gone_hears_what_is_newer() -> None:
    process = Process(MemoryStore())
    early = f"{int(time.time() * 1000) - 5:012x}ffff"
    process.feed.publish(COMPACTION, {"number": 1})
    await process.feed.flush()
    [item] = await taken(process.feed.follow(early), 1)
    assert item.fields == {"number": 1}
    await process.feed.close()


async def test_a_burst_between_two_looks_is_told_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FOLLOWER_ITEMS", 1_000)
    process = Process(MemoryStore())
    items, _ = await started(process)
    for number in range(300):
        process.feed.publish(COMPACTION, {"number": number})
    await process.feed.flush()
    assert [each.fields["number"] for each in await taken(items, 300)] == list(range(300))
    await process.feed.close()


async def test_a_slow_follower_loses_the_oldest_and_is_told_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FOLLOWER_ITEMS", 3)
    process = Process(MemoryStore())
    slow, _ = await started(process)
    quick, _ = await started(process)
    for number in range(5):
        process.feed.publish(COMPACTION, {"number": number})
        await process.feed.flush()
        assert [each.fields for each in await taken(quick, 1)] == [{"number": number}]
    told = await taken(slow, 4)
    assert [(each.kind, dict(each.fields)) for each in told] == [
        ("lost", {"lost": 3}), *((COMPACTION, {"number": number}) for number in (2, 3, 4)),
    ]  # fmt: skip
    await process.feed.close()


async def test_exchanges_are_told_while_somebody_listens_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    store, now = MemoryStore(), [1_000.0]
    here, there = Process(store, lambda: now[0]), Process(store, lambda: now[0])

    async def told(count: int) -> int:
        for number in range(count):
            there.feed.publish(EXCHANGE, {"number": number})
        await there.feed.flush()
        return len(await there.records.read_tail(live_feed_key("exchanges"), 999))

    assert await told(10) == 0  # nobody listens
    items, _ = await started(here)
    assert await told(10) == 0  # nor is it known yet
    now[0] += module.LISTENER_CHECK_S
    assert await told(70) == 50
    assert [each.fields["number"] for each in await taken(items, 50)] == list(range(20, 70))
    await here.feed.close()
    now[0] += module.LISTENER_TTL_S + module.LISTENER_CHECK_S
    assert await told(10) == 50


async def test_nobody_polls_for_those_who_have_left() -> None:
    process = Process(MemoryStore())
    async with aclosing(process.feed.follow()) as items:
        waiting = asyncio.create_task(taken(items, 1))
        await asyncio.sleep(0.01)
        assert process.feed.has_followers
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert not process.feed.has_followers
    assert len(asyncio.all_tasks()) == 1


async def test_recent_events_come_newest_first_and_failures_alone() -> None:
    process = Process(MemoryStore())
    for number, kind in enumerate((FAILED, COMPACTED, FAILED, COMPACTED)):
        process.feed.on_event("t", Event(kind, float(number), "c_1", message_ids=("m_1",)))
    process.feed.publish(EXCHANGE, {"number": 1})
    await process.feed.flush()
    recent, failures = (
        await process.feed.list_recent_events(2),
        await process.feed.list_recent_events(5, failures=True),
    )
    assert [each.fields["at"] for each in recent] == [3.0, 2.0]
    assert [dict(each.fields) for each in failures] == [
        {"v": 1, "kind": FAILED, "at": at, "conversation": "c_1"} for at in (2.0, 0.0)
    ]


async def test_events_wait_for_a_store_that_is_away() -> None:
    class Away(MemoryStore):
        away = True

        async def write(self, items: object) -> None:
            if self.away:
                raise OSError
            await super().write(items)  # type: ignore[arg-type]

    store = Away()
    process = Process(store)
    process.feed.publish(COMPACTION, {"number": 0})
    await process.feed.flush()
    process.feed.publish(COMPACTION, {"number": 1})
    store.away = False
    async with asyncio.timeout(100):
        while not await process.feed.list_recent_events(5):
            await process.feed.flush()
            await asyncio.sleep(0.002)
    assert [each.fields["number"] for each in await process.feed.list_recent_events(5)] == [1, 0]
    await process.records.close()


async def test_failures_of_upstreams_are_summed_up_by_target_and_cause() -> None:
    process = Process(MemoryStore())
    items, _ = await started(process)
    for cause in ("http-429", "answer-cut", "http-429"):
        process.feed.record_upstream_failure("https://up.example:443", cause)
    await process.feed.flush()
    told = [(each.kind, each.fields["cause"], each.fields["count"]) for each in await taken(items, 2)]
    assert told == [("upstream", "http-429", 2), ("upstream", "answer-cut", 1)]
    await process.feed.flush()
    process.feed.publish(COMPACTION, {"kind": "last"})
    await process.feed.flush()
    [last] = await taken(items, 1)
    assert last.kind == COMPACTION
    await process.feed.close()
