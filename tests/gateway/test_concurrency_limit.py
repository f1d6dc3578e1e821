"""Places for requests: none is lost, and nobody waits for long."""

import asyncio

import pytest

from compaction_proxy.core.errors import OverloadedError
from compaction_proxy.gateway.concurrency_limit import ConcurrencyLimiter


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
