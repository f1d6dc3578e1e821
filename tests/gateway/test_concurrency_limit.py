"""Places for requests: none is lost, and nobody waits for long."""

import asyncio

import pytest

from compaction_proxy.core.errors import OverloadedError
from compaction_proxy.gateway.concurrency_limit import MIN_SHARED_SLOTS, ConcurrencyLimiter
from compaction_proxy.support.offload import WORK_OWNER


async def test_a_request_that_comes_when_all_places_are_taken_is_told_when_to_come_back() -> None:
    admission = ConcurrencyLimiter(1, queue_s=0.01)
    await admission.acquire_slot()
    with pytest.raises(OverloadedError) as refused:
        await admission.acquire_slot()
    assert (refused.value.status, refused.value.code, refused.value.retry_after_s) == (503, "overloaded", 1)
    assert admission.active_request_count == 1


async def test_who_waits_longest_takes_the_place_of_who_leaves() -> None:
    admission = ConcurrencyLimiter(2, queue_s=5)
    came = []

    async def enter(name: str) -> None:
        await admission.acquire_slot()
        came.append(name)

    await admission.acquire_slot()
    await admission.acquire_slot()
    waiting = [asyncio.create_task(enter(name)) for name in "ab"]
    await asyncio.sleep(0)
    admission.release_slot()
    await waiting[0]
    assert (came, admission.active_request_count) == (["a"], 2)
    admission.release_slot()
    await waiting[1]
    assert came == ["a", "b"]
    admission.release_slot()
    admission.release_slot()
    assert admission.active_request_count == 0


async def test_no_more_wait_than_there_are_places() -> None:
    admission = ConcurrencyLimiter(1, queue_s=5)
    await admission.acquire_slot()
    first = asyncio.create_task(admission.acquire_slot())
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await admission.acquire_slot()
    admission.release_slot()
    await first


@pytest.mark.parametrize("moment", ["while it waits", "as it gets its place"])
async def test_a_place_is_not_lost_with_who_is_cancelled(moment: str) -> None:
    admission = ConcurrencyLimiter(1, queue_s=5)
    await admission.acquire_slot()
    waiting = asyncio.create_task(admission.acquire_slot())
    await asyncio.sleep(0)
    if moment == "as it gets its place":
        admission.release_slot()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert admission.active_request_count == (0 if moment == "as it gets its place" else 1)
    if moment == "while it waits":
        admission.release_slot()
    await admission.acquire_slot()


async def test_a_tenant_leaves_places_to_others() -> None:
    admission = ConcurrencyLimiter(100, queue_s=5)
    WORK_OWNER.set("b")
    async with admission.admit_request():
        WORK_OWNER.set("a")
        await admission.acquire_slot()
        WORK_OWNER.set("b")
    WORK_OWNER.set("a")
    for _ in range(74):
        await admission.acquire_slot()
    with pytest.raises(OverloadedError):
        await admission.acquire_slot()
    WORK_OWNER.set("b")
    for _ in range(25):
        await admission.acquire_slot()
    waiting = asyncio.create_task(admission.acquire_slot())
    await asyncio.sleep(0)
    WORK_OWNER.set("a")
    admission.release_slot()
    await waiting
    assert admission.active_request_count == 100
    admission.release_slot()
    await admission.acquire_slot()


async def test_a_tenant_that_is_alone_takes_all_places() -> None:
    admission = ConcurrencyLimiter(100, queue_s=5)
    WORK_OWNER.set("a")
    for _ in range(100):
        await admission.acquire_slot()
    assert admission.active_request_count == 100


async def test_a_tenant_takes_all_places_if_they_are_few() -> None:
    admission = ConcurrencyLimiter(MIN_SHARED_SLOTS - 1, queue_s=5)
    for _ in range(MIN_SHARED_SLOTS - 1):
        await admission.acquire_slot()
    waiting = asyncio.create_task(admission.acquire_slot())
    await asyncio.sleep(0)
    admission.release_slot()
    await waiting


async def test_who_stops_waiting_counts_no_longer_for_a_tenant() -> None:
    admission = ConcurrencyLimiter(MIN_SHARED_SLOTS, queue_s=0.01)
    for number in range(MIN_SHARED_SLOTS):
        WORK_OWNER.set(str(number))
        await admission.acquire_slot()
    WORK_OWNER.set("late")
    for _ in range(MIN_SHARED_SLOTS):
        with pytest.raises(OverloadedError):
            await admission.acquire_slot()
    WORK_OWNER.set("0")
    admission.release_slot()
    WORK_OWNER.set("late")
    await admission.acquire_slot()
