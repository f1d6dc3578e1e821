"""Places for requests: none is lost, and nobody waits for long."""

import asyncio

import pytest

from compaction_proxy.core.errors import Overloaded
from compaction_proxy.gateway.concurrency_limit import Admission


async def test_a_request_that_comes_when_all_places_are_taken_is_told_when_to_come_back() -> None:
    admission = Admission(1, queue_s=0.01)
    assert [admission.entered(), admission.entered()] == [True, False]
    with pytest.raises(Overloaded) as refused:
        await admission.wait()
    assert (refused.value.status, refused.value.code, refused.value.retry_after_s) == (503, "overloaded", 1)
    assert admission.taken == 1


async def test_who_waits_longest_takes_the_place_of_who_leaves() -> None:
    admission = Admission(2, queue_s=5)
    came = []

    async def enter(name: str) -> None:
        await admission.wait()
        came.append(name)

    assert [admission.entered(), admission.entered()] == [True, True]
    waiting = [asyncio.create_task(enter(name)) for name in "ab"]
    await asyncio.sleep(0)
    admission.leave()
    await waiting[0]
    assert (came, admission.taken, admission.entered()) == (["a"], 2, False)
    admission.leave()
    await waiting[1]
    assert came == ["a", "b"]
    admission.leave()
    admission.leave()
    assert admission.taken == 0


async def test_no_more_wait_than_there_are_places() -> None:
    admission = Admission(1, queue_s=5)
    assert admission.entered()
    first = asyncio.create_task(admission.wait())
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await admission.wait()
    admission.leave()
    await first


@pytest.mark.parametrize("moment", ["while it waits", "as it gets its place"])
async def test_a_place_is_not_lost_with_who_is_cancelled(moment: str) -> None:
    admission = Admission(1, queue_s=5)
    assert admission.entered()
    waiting = asyncio.create_task(admission.wait())
    await asyncio.sleep(0)
    if moment == "as it gets its place":
        admission.leave()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert admission.taken == (0 if moment == "as it gets its place" else 1)
    if moment == "while it waits":
        admission.leave()
    assert admission.entered()
