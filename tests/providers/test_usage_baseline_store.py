"""What a provider counted is found again: in the process, after a restart, and by other replicas."""

import asyncio
from collections.abc import Sequence

import pytest

from compaction_proxy.core.errors import StoreUnavailableError
from compaction_proxy.providers import usage_baseline as module
from compaction_proxy.providers.usage_baseline import (
    ANCHORS_PER_ROOT,
    BASELINE_TTL_S,
    REFRESH_INTERVAL_S,
    UsageBaseline,
    UsageBaselineStore,
)
from compaction_proxy.storage.keys import usage_anchors_key
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.records import RecordStore
from compaction_proxy.storage.store import ListEntry, Record, Store

TENANT, ROOT, PLACE = "t", b"\x07" * 32, b"\x08" * 16
PREFIXES = [bytes([number]) * 32 for number in range(1, 12)]


def ignored(_: StoreUnavailableError) -> None:
    """What a broken store says is not the subject."""


def anchor(length: int, actual: int = 1_200) -> UsageBaseline:
    return UsageBaseline(PREFIXES[length - 1], length, PLACE, 1_000, actual)


class Counted(MemoryStore):
    """A store that counts, and waits with its answers where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        self.written: list[str] = []
        self.open = asyncio.Event()
        self.open.set()

    async def read(self, keys: Sequence[str]) -> list[bytes | None]:
        self.reads += 1
        await self.open.wait()
        return await super().read(keys)

    async def write(self, items: Sequence[Record | ListEntry]) -> None:
        self.written += [item.key for item in items]
        await super().write(items)


class Replica:
    """One of several processes on a store, on a clock that the test sets."""

    def __init__(self, store: Store) -> None:
        self.time = 1_000.0
        self.records = RecordStore(store, ignored)
        self.anchors = UsageBaselineStore(self.records, clock=lambda: self.time)

    async def found(self, length: int = 11, root: bytes = ROOT) -> UsageBaseline | None:
        await self.anchors.load_baselines(TENANT, root)
        return self.anchors.peek_deepest(TENANT, root, PREFIXES[:length], PLACE)

    def note(self, *anchors: UsageBaseline) -> None:
        for each in anchors:
            self.anchors.record_baseline(TENANT, ROOT, each)

    async def settled(self) -> None:
        while self.records.background_tasks.has_running_tasks:  # noqa: ASYNC110 - nobody is told
            await asyncio.sleep(0)


async def test_the_deepest_anchor_of_a_conversation_is_found() -> None:
    replica = Replica(MemoryStore())
    replica.note(anchor(4), anchor(6), anchor(5))
    assert await replica.found() == anchor(6)
    assert await replica.found(5) == anchor(5)
    assert await replica.found(3) is None


async def test_another_tenant_and_another_root_find_nothing() -> None:
    replica = Replica(MemoryStore())
    replica.note(anchor(4))
    await replica.anchors.load_baselines("other", ROOT)
    assert replica.anchors.peek_deepest("other", ROOT, PREFIXES, PLACE) is None
    assert await replica.found(root=b"\x09" * 32) is None


async def test_a_newer_count_of_the_same_request_holds() -> None:
    replica = Replica(MemoryStore())
    replica.note(anchor(4), anchor(4, 1_300))
    assert await replica.found() == anchor(4, 1_300)


async def test_the_oldest_anchors_of_a_root_are_let_go() -> None:
    replica = Replica(MemoryStore())
    replica.note(*map(anchor, range(1, ANCHORS_PER_ROOT + 2)))
    assert await replica.found(1) is None
    assert await replica.found(2) == anchor(2)


async def test_no_more_roots_are_held_than_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ROOTS", 3)
    anchors = Replica(MemoryStore()).anchors
    for number in range(10):
        root = bytes([number]) * 32
        await anchors.load_baselines(TENANT, root)
        anchors.record_baseline(TENANT, root, anchor(4))
    assert len(anchors._known) == 3


async def test_an_anchor_outlives_the_process_for_a_day() -> None:
    store = MemoryStore()
    before = Replica(store)
    before.note(anchor(4))
    await before.anchors.close()
    assert await Replica(store).found() == anchor(4)
    [_] = await store.read([usage_anchors_key(TENANT, ROOT)])
    assert BASELINE_TTL_S == 86_400


async def test_what_two_replicas_have_counted_is_kept_of_both() -> None:
    store = MemoryStore()
    one, other = Replica(store), Replica(store)
    one.note(anchor(4))
    other.note(anchor(6))
    await one.anchors.flush()
    await other.anchors.flush()
    started = Replica(store)
    assert [await started.found(length) for length in (4, 6)] == [anchor(4), anchor(6)]


async def test_what_another_replica_counts_is_found_while_this_one_runs() -> None:
    store = MemoryStore()
    one, other = Replica(store), Replica(store)
    assert await other.found() is None
    one.note(anchor(4))
    await one.anchors.flush()
    other.time += REFRESH_INTERVAL_S - 1
    assert await other.found() is None
    await other.settled()
    assert await other.found() is None
    other.time += 1
    await other.found()
    await other.settled()
    assert await other.found() == anchor(4)


async def test_the_store_is_waited_for_once_a_root() -> None:
    store = Counted()
    replica = Replica(store)
    await replica.found()
    replica.note(anchor(4))
    store.open.clear()
    replica.time += REFRESH_INTERVAL_S
    async with asyncio.timeout(100):
        assert [await replica.found() for _ in range(5)] == [anchor(4)] * 5
    await asyncio.sleep(0.01)
    assert store.reads == 2
    store.open.set()
    await replica.settled()


async def test_many_counts_of_a_conversation_are_written_once() -> None:
    store = Counted()
    replica = Replica(store)
    replica.note(*map(anchor, range(1, 9)))
    await replica.anchors.flush()
    await replica.anchors.flush()
    assert store.written == [usage_anchors_key(TENANT, ROOT)]


async def test_what_is_noted_is_written_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FLUSH_INTERVAL_S", 0.01)
    store = Counted()
    replica = Replica(store)
    replica.anchors.start()
    replica.note(anchor(4))
    async with asyncio.timeout(100):
        while not store.written:  # noqa: ASYNC110 - nobody is told
            await asyncio.sleep(0.01)
    await replica.anchors.close()
    assert await Replica(store).found() == anchor(4)


async def test_what_stands_in_the_store_and_is_no_record_of_ours_does_no_harm() -> None:
    records = RecordStore(MemoryStore(), ignored)
    await records.overwrite(usage_anchors_key(TENANT, ROOT), {"anchors": [[1, 2]]}, ttl_s=60)
    anchors = UsageBaselineStore(records)
    await anchors.load_baselines(TENANT, ROOT)
    assert anchors.peek_deepest(TENANT, ROOT, PREFIXES, PLACE) is None


async def test_what_is_forgotten_is_not_written_again() -> None:
    store = Counted()
    replica = Replica(store)
    replica.note(anchor(4))
    await replica.records.delete_prefix(usage_anchors_key(TENANT, ROOT))
    await replica.anchors.flush()
    assert (store.written, await replica.found()) == ([], None)
