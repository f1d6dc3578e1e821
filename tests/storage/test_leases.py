"""Two processes on one store, as two record stores on one memory store: one at a time creates a record."""

import asyncio

import pytest

from compaction_proxy.core.errors import StoreUnavailableError
from compaction_proxy.storage.keys import lease_key
from compaction_proxy.storage.leases import wait_for_lease_or_record
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.records import RecordStore
from compaction_proxy.storage.store import Lease

pytestmark = pytest.mark.virtual_time

KEY = "v1:{t.r}:checkpoint:chained:00"


def ignored(_: StoreUnavailableError) -> None:
    """Failures of a store that the test makes fail on purpose."""


def make_store() -> MemoryStore:
    """A store on the loop's clock."""
    return MemoryStore(clock=asyncio.get_running_loop().time)


async def save(records: RecordStore, text: str, lease: Lease | None) -> str | None:
    fields = await records.save_if_absent(KEY, {"text": text}, ttl_s=60, lease=lease)
    return None if fields is None else str(fields["text"])


async def make(records: RecordStore, text: str, made: list[str], lease_s: float = 10) -> str | None:
    async with wait_for_lease_or_record(records, KEY, lease_s) as current:
        if current.record is not None:
            return str(current.record["text"])
        await asyncio.sleep(0.02)
        made.append(text)
        return await save(records, text, current.lease)


async def test_of_many_on_two_replicas_one_makes_the_record_and_all_use_it() -> None:
    shared = make_store()
    replicas = [RecordStore(shared, ignored), RecordStore(shared, ignored)]
    made: list[str] = []
    texts = await asyncio.gather(*(make(replicas[n % 2], str(n), made) for n in range(50)))
    assert len(made) == 1
    assert set(texts) == set(made)


async def test_who_finds_it_made_is_not_asked_to_make_it() -> None:
    shared = make_store()
    await save(RecordStore(shared, ignored), "there", None)
    async with wait_for_lease_or_record(RecordStore(shared, ignored), KEY) as current:
        assert (current.lease, current.record) == (None, {"text": "there"})


async def test_a_holder_that_died_is_succeeded_when_its_lease_runs_out() -> None:
    shared = make_store()
    dead = await shared.acquire_lease(lease_key(KEY), 0.2)
    assert dead is not None
    made: list[str] = []
    async with asyncio.timeout(100):
        assert await make(RecordStore(shared, ignored), "successor", made) == "successor"


async def test_a_holder_that_wakes_up_too_late_writes_nothing_and_uses_its_successors() -> None:
    shared = make_store()
    late, successor = RecordStore(shared, ignored), RecordStore(shared, ignored)
    paused = await shared.acquire_lease(lease_key(KEY), 0.05)
    await asyncio.sleep(0.06)
    async with wait_for_lease_or_record(successor, KEY) as current:
        assert await save(late, "stale", paused) is None
        assert await late.get_many([KEY]) == [None]
        assert await save(successor, "new", current.lease) == "new"
    assert await save(late, "stale", paused) == "new"


async def test_a_living_holder_keeps_its_lease_for_as_long_as_it_works() -> None:
    shared = make_store()
    async with wait_for_lease_or_record(RecordStore(shared, ignored), KEY, lease_s=0.06) as current:
        await asyncio.sleep(0.2)
        assert await shared.acquire_lease(lease_key(KEY), 1) is None
        assert current.lease is not None
    assert await shared.acquire_lease(lease_key(KEY), 1) is not None


async def test_without_a_store_everybody_may_make_it() -> None:
    class Away(MemoryStore):
        async def acquire_lease(self, key: str, ttl_s: float) -> Lease | None:
            raise StoreUnavailableError("store-down")

    async with wait_for_lease_or_record(RecordStore(Away(), ignored), KEY) as current:
        assert (current.record, current.lease) == (None, None)


async def test_a_lease_that_comes_once_nobody_waits_for_it_is_given_back() -> None:
    shared = make_store()
    waiting = asyncio.create_task(make(RecordStore(shared, ignored), "x", []))
    while not shared._leases:  # noqa: ASYNC110 - a store sets no event
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert shared._leases == {}
