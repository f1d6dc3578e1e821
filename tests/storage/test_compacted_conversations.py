"""Every store keeps the set of compacted conversations for other processes, and for a restart."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from compaction_proxy.compaction.compacted_conversations import MAX_OF_TENANT, CompactedConversations
from compaction_proxy.core.errors import StoreUnavailableError
from compaction_proxy.storage.records import RecordStore
from tests.storage.conftest import Bench

DAY_S = 86_400.0
LIMIT_S = 30.0


def _ignored(error: StoreUnavailableError) -> None:
    """What a test says is what counts."""


@asynccontextmanager
async def replica(bench: Bench) -> AsyncIterator[CompactedConversations]:
    """A started set on a store of its own."""
    compacted = CompactedConversations(RecordStore(bench.open(), _ignored, deadline_s=10.0), DAY_S)
    await compacted.start()
    yield compacted
    await compacted.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110 - the store is no event of ours
            await asyncio.sleep(0.01)


async def test_a_later_process_knows_what_an_earlier_one_has_added(bench: Bench) -> None:
    async with replica(bench) as first:
        await first.add("t_1", "c_1")
        await first.add("t_2", None)
        assert first.has_rounds("t_1", "c_1")
    async with replica(bench) as second:
        known = second.has_rounds("t_1", "c_1"), second.has_rounds("t_2", None)
        assert known == (bench.shared, bench.shared)
        assert not second.has_rounds("t_2", "c_1")
        assert not second.has_rounds("t_1", None)


async def test_a_process_that_runs_learns_what_another_one_adds(bench: Bench) -> None:
    async with replica(bench) as one, replica(bench) as other:
        await one.add("t_1", "c_1")
        await other.add("t_1", "c_2")
        if bench.shared:
            await until(lambda: one.has_rounds("t_1", "c_2") and other.has_rounds("t_1", "c_1"))
        assert one.has_rounds("t_1", "c_2") is bench.shared


async def test_more_changes_than_one_look_takes_are_all_learned(bench: Bench) -> None:
    async with replica(bench) as one, replica(bench) as other:
        for number in range(40):
            await one.add("t_1", f"c_{number}")
        if bench.shared:
            await until(lambda: all(other.has_rounds("t_1", f"c_{number}") for number in range(40)))
        assert MAX_OF_TENANT > 40
