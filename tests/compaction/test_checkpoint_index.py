"""Where checkpoints stand is read again only after a moment, before a round is made, and within bounds."""

import pytest

from compaction_proxy.compaction import checkpoint_index as module
from compaction_proxy.compaction.checkpoint_index import AGING_S, FRESH_S, MAX_KEPT_IDS, CheckpointIndex
from compaction_proxy.compaction.types import CompactionMode, CompactionStatus
from compaction_proxy.core.errors import StoreUnavailableError
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.records import RecordStore
from tests.helpers.compaction_bench import bench, talk

KEY = "v1:{t.root}:checkpoints:anchored"


def ignored(_: StoreUnavailableError) -> None:
    """Nothing fails here."""


def place(number: int) -> bytes:
    return number.to_bytes(64, "big")


class Counted(MemoryStore):
    """A store that counts how often it is asked for anything."""

    asked = 0

    async def read(self, keys: object) -> list[bytes | None]:
        self.asked += 1
        return await super().read(keys)  # type: ignore[arg-type]

    async def read_tail(self, key: str, limit: int) -> list[bytes]:
        self.asked += 1
        return await super().read_tail(key, limit)


class Replica:
    """One of several processes on a store, on a clock that the test sets."""

    def __init__(self, store: MemoryStore) -> None:
        self.time = 100.0
        self.records = RecordStore(store, ignored)
        self.index = CheckpointIndex(self.records, clock=lambda: self.time)

    async def made(self, *numbers: int, key: str = KEY) -> None:
        for number in numbers:
            line = self.index.cache_id_and_build_line(key, place(number), 60.0)
            await self.records.append_line(line.key, line.fields, ttl_s=line.ttl_s, max_lines=line.max_lines)


async def test_places_are_held_for_a_moment() -> None:
    store = MemoryStore()
    one, other = Replica(store), Replica(store)
    assert other.index.get_cached(KEY) is None
    assert await other.index.load_checkpoint_ids(KEY) == frozenset()
    await one.made(1)
    other.time += AGING_S - 0.1
    assert other.index.get_cached(KEY) == frozenset()
    assert not other.records.background_tasks.has_running_tasks
    other.time += FRESH_S
    assert other.index.get_cached(KEY) is None
    assert await other.index.load_checkpoint_ids(KEY) == {place(1)}


async def test_in_a_busy_conversation_they_are_read_again_behind_a_request() -> None:
    store = MemoryStore()
    one, other = Replica(store), Replica(store)
    await other.index.load_checkpoint_ids(KEY)
    await one.made(1)
    other.time += AGING_S
    assert other.index.get_cached(KEY) == frozenset()
    await other.records.background_tasks._tasks[KEY]
    assert other.index.get_cached(KEY) == frozenset({place(1)})


async def test_the_newest_places_of_a_conversation_are_kept_and_so_many_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_CACHED_IDS", 2 * MAX_KEPT_IDS)
    replica = Replica(MemoryStore())
    for key in ("v1:{a}:x", "v1:{b}:x", "v1:{c}:x"):
        await replica.made(*range(MAX_KEPT_IDS + 1), key=key)
    index = replica.index
    known = [index.has_checkpoint(key, place(MAX_KEPT_IDS)) for key in ("v1:{a}:x", "v1:{b}:x", "v1:{c}:x")]
    assert known == [False, True, True]
    assert not index.has_checkpoint("v1:{b}:x", place(0))
    assert index._count == 2 * MAX_KEPT_IDS


async def test_what_is_forgotten_is_not_known_any_more() -> None:
    replica = Replica(MemoryStore())
    await replica.made(1)
    await replica.records.delete_prefix("v1:{t.root}:")
    assert not replica.index.has_checkpoint(KEY, place(1))
    assert replica.index._count == 0


async def test_a_turn_that_follows_soon_asks_the_store_for_nothing() -> None:
    store = Counted()
    async with bench(store=store) as one:
        messages = talk(8)
        await one.fit(messages, mode=CompactionMode.FORCE)
        await one.answered(messages, real=300)
        asked = store.asked
        fits = [await one.answered([*messages, *talk(turns)[1:]]) for turns in range(1, 4)]
        more = store.asked - asked
    assert [fit.report.status for fit in fits] == [CompactionStatus.REUSED] * 3
    assert more == 0


async def test_a_round_of_another_replica_is_seen_before_one_is_made() -> None:
    store = MemoryStore()
    async with bench(store=store) as one, bench(store=store) as other:
        assert (await other.fit(talk(60))).report.status is CompactionStatus.NONE
        made = await one.fit(talk(140))
        used = await other.fit(talk(140))
        calls = len(one.summaries.calls) + len(other.summaries.calls)
    assert [made.report.status, used.report.status] == [CompactionStatus.APPLIED, CompactionStatus.REUSED]
    assert (made.raw, calls) == (used.raw, 1)
