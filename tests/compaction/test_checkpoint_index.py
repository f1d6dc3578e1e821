"""Where checkpoints stand is read again only after a moment, before a round is made, and within bounds."""

import pytest

from compaction_proxy.compaction import checkpoint_index as module
from compaction_proxy.compaction.checkpoint_index import AGING_S, FRESH_S, KEPT_PLACES, CheckpointIndex
from compaction_proxy.compaction.types import Mode, Status
from compaction_proxy.core.errors import StoreUnavailable
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.records import Records
from tests.compaction.bench import bench, talk

KEY = "v1:{t.root}:checkpoints:anchored"


def ignored(_: StoreUnavailable) -> None:
    """Nothing fails here."""


def place(number: int) -> bytes:
    return number.to_bytes(64, "big")


class Counted(MemoryStore):
    """A store that counts how often it is asked for anything."""

    asked = 0

    async def read(self, keys: object) -> list[bytes | None]:
        self.asked += 1
        return await super().read(keys)  # type: ignore[arg-type]

    async def tail(self, key: str, limit: int) -> list[bytes]:
        self.asked += 1
        return await super().tail(key, limit)


class Replica:
    """One of several processes on a store, on a clock that the test sets."""

    def __init__(self, store: MemoryStore) -> None:
        self.time = 100.0
        self.records = Records(store, ignored)
        self.index = CheckpointIndex(self.records, clock=lambda: self.time)

    async def made(self, *numbers: int, key: str = KEY) -> None:
        for number in numbers:
            line = self.index.line(key, place(number), 60.0)
            await self.records.append(line.key, line.fields, ttl_s=line.ttl_s, keep=line.keep)


async def test_places_are_held_for_a_moment() -> None:
    store = MemoryStore()
    one, other = Replica(store), Replica(store)
    assert other.index.held(KEY) is None
    assert await other.index.places(KEY) == frozenset()
    await one.made(1)
    other.time += AGING_S - 0.1
    assert other.index.held(KEY) == frozenset()
    assert not other.records.behind.busy
    other.time += FRESH_S
    assert other.index.held(KEY) is None
    assert await other.index.places(KEY) == {place(1)}


async def test_in_a_busy_conversation_they_are_read_again_behind_a_request() -> None:
    store = MemoryStore()
    one, other = Replica(store), Replica(store)
    await other.index.places(KEY)
    await one.made(1)
    other.time += AGING_S
    assert other.index.held(KEY) == frozenset()
    await other.records.behind._tasks[KEY]
    assert other.index.held(KEY) == frozenset({place(1)})


async def test_the_newest_places_of_a_conversation_are_kept_and_so_many_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_PLACES", 2 * KEPT_PLACES)
    replica = Replica(MemoryStore())
    for key in ("v1:{a}:x", "v1:{b}:x", "v1:{c}:x"):
        await replica.made(*range(KEPT_PLACES + 1), key=key)
    index = replica.index
    known = [index.knows(key, place(KEPT_PLACES)) for key in ("v1:{a}:x", "v1:{b}:x", "v1:{c}:x")]
    assert known == [False, True, True]
    assert not index.knows("v1:{b}:x", place(0))
    assert index._count == 2 * KEPT_PLACES


async def test_what_is_forgotten_is_not_known_any_more() -> None:
    replica = Replica(MemoryStore())
    await replica.made(1)
    await replica.records.forget("v1:{t.root}:")
    assert not replica.index.knows(KEY, place(1))
    assert replica.index._count == 0


async def test_a_turn_that_follows_soon_asks_the_store_for_nothing() -> None:
    store = Counted()
    async with bench(store=store) as one:
        messages = talk(8)
        await one.fit(messages, mode=Mode.FORCE)
        await one.answered(messages, real=300)
        asked = store.asked
        fits = [await one.answered([*messages, *talk(turns)[1:]]) for turns in range(1, 4)]
        more = store.asked - asked
    assert [fit.report.status for fit in fits] == [Status.REUSED] * 3
    assert more == 0


async def test_a_round_of_another_replica_is_seen_before_one_is_made() -> None:
    store = MemoryStore()
    async with bench(store=store) as one, bench(store=store) as other:
        assert (await other.fit(talk(60))).report.status is Status.NONE
        made = await one.fit(talk(140))
        used = await other.fit(talk(140))
        calls = len(one.summaries.calls) + len(other.summaries.calls)
    assert [made.report.status, used.report.status] == [Status.APPLIED, Status.REUSED]
    assert (made.raw, calls) == (used.raw, 1)
