"""The budget of request bodies: what is counted, who waits, and who is refused."""

import asyncio
import ctypes
import itertools
import os
from pathlib import Path

import pytest

from compaction_proxy.core.errors import OverloadedError
from compaction_proxy.gateway import body_budget as module
from compaction_proxy.gateway.body_budget import (
    COST_FACTOR,
    GROWTH_BYTES,
    MAX_WAITING,
    MIN_DEFAULT_BYTES,
    PROCESS_BYTES,
    RETRY_AFTER_S,
    SMALL_BYTES,
    TENANT_SHARE,
    BodyBudget,
    BodyHold,
    compute_default_budget,
)
from compaction_proxy.support.offload import WORK_OWNER

ROOM = 10 * SMALL_BYTES
NEVER_S = 600
MIB = 1024 * 1024
NUMBERS = itertools.count()


def open_hold(budget: BodyBudget, tenant: str | None = None) -> BodyHold:
    """A hold of a tenant; by default, of one that has no other."""
    token = WORK_OWNER.set(f"tenant {next(NUMBERS)}" if tenant is None else tenant)
    try:
        return budget.open_hold()
    finally:
        WORK_OWNER.reset(token)


async def test_small_bodies_pass_while_the_budget_is_used_up_and_a_large_one_waits() -> None:
    budget = BodyBudget(ROOM, wait_s=NEVER_S)
    open_hold(budget).add_bytes(ROOM + SMALL_BYTES + 1)
    waiting = open_hold(budget)
    assert not waiting.add_bytes(SMALL_BYTES + 1)
    wait = asyncio.create_task(waiting.wait_for_room(1))
    await asyncio.sleep(0)
    assert open_hold(budget).add_bytes(SMALL_BYTES)
    assert not wait.done()
    wait.cancel()


@pytest.mark.parametrize("declared", [ROOM + SMALL_BYTES, None])
async def test_room_set_aside_for_a_body_that_does_not_come_is_given_back(
    declared: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PROGRESS_CHECK_S", 0.001)
    budget = BodyBudget(ROOM, wait_s=NEVER_S)
    slow = open_hold(budget)
    slow.add_bytes(SMALL_BYTES + 1)
    await slow.wait_for_rest(declared, ROOM + SMALL_BYTES)
    assert budget.used_bytes > SMALL_BYTES + 1
    waiting = open_hold(budget)
    waiting.add_bytes(ROOM)
    await waiting.wait_for_rest(ROOM, ROOM + SMALL_BYTES)
    assert slow.counted_bytes == SMALL_BYTES + 1


async def test_room_stays_set_aside_for_a_body_that_goes_on_coming(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROGRESS_CHECK_S", 0.001)
    monkeypatch.setattr(module, "MIN_PROGRESS_BYTES", 0)
    budget = BodyBudget(ROOM, wait_s=NEVER_S)
    steady = open_hold(budget)
    steady.add_bytes(SMALL_BYTES + 1)
    await steady.wait_for_rest(ROOM, ROOM)
    await asyncio.sleep(0.01)
    assert steady.counted_bytes == ROOM
    steady.release()


def test_what_is_declared_and_not_sent_holds_nothing() -> None:
    budget = BodyBudget(ROOM)
    idle = [open_hold(budget) for _ in range(100)]
    assert open_hold(budget).add_bytes(ROOM)
    assert sum(each.counted_bytes for each in idle) == 0


async def test_a_body_that_has_waited_has_room_for_all_of_its_rest() -> None:
    budget = BodyBudget(ROOM, wait_s=NEVER_S)
    first, second = open_hold(budget), open_hold(budget)
    first.add_bytes(ROOM + SMALL_BYTES + 1)
    second.add_bytes(SMALL_BYTES * 2)
    wait = asyncio.create_task(second.wait_for_room(SMALL_BYTES * 4))
    await asyncio.sleep(0)
    first.release()
    await wait
    assert budget.used_bytes == 6 * SMALL_BYTES
    assert not open_hold(budget).add_bytes(ROOM)  # uses up what is left
    assert second.add_bytes(SMALL_BYTES * 4)
    second.release()
    assert second.counted_bytes == 0


async def test_of_bodies_that_are_all_half_way_as_many_end_as_the_budget_has_room_for() -> None:
    budget = BodyBudget(ROOM, wait_s=0.01)
    whole, half = 6 * SMALL_BYTES, 3 * SMALL_BYTES
    holds = [open_hold(budget) for _ in range(6)]
    refused = 0

    async def upload(number: int) -> None:
        nonlocal refused
        hold = holds[number]
        try:
            hold.add_bytes(half)
            await asyncio.sleep(0)
            if not hold.add_bytes(1):
                await hold.wait_for_room(whole - half - 1)
            assert hold.add_bytes(whole - half - 1)
        except OverloadedError:
            refused += 1
        finally:
            hold.release()

    await asyncio.gather(*map(upload, range(len(holds))))
    assert 0 < refused < len(holds)
    assert budget.used_bytes == 0


async def test_a_refused_body_gives_its_room_to_the_next_before_that_one_is_refused() -> None:
    budget = BodyBudget(ROOM, wait_s=0.01)
    first, second = open_hold(budget), open_hold(budget)
    first.add_bytes(ROOM)
    second.add_bytes(2 * SMALL_BYTES)
    second.add_bytes(1)
    waits = [asyncio.create_task(hold.wait_for_room(ROOM // 2)) for hold in (first, second)]
    done, _ = await asyncio.wait(waits)
    assert done == set(waits)
    assert isinstance(waits[0].exception(), OverloadedError)
    assert waits[1].exception() is None
    assert budget.used_bytes == second.counted_bytes


@pytest.mark.parametrize("declared", [True, False])
async def test_several_bodies_of_a_tenant_leave_a_part_of_the_budget_to_others(*, declared: bool) -> None:
    budget = BodyBudget(ROOM, wait_s=0.01)
    holds = [open_hold(budget, "greedy") for _ in range(20)]
    fits = []
    for hold in holds:
        size = SMALL_BYTES + ROOM // 20
        fits.append(hold.add_bytes(size if not declared else SMALL_BYTES + 1))
        if declared:
            try:
                await hold.wait_for_rest(size, size)
            except OverloadedError:
                fits[-1] = False
        elif not fits[-1]:
            hold.release()
    assert sum(fits) == TENANT_SHARE * 20
    other = open_hold(budget, "other")
    assert other.add_bytes(SMALL_BYTES + ROOM // 4)
    for hold in holds:
        hold.release()
    assert budget.used_bytes == SMALL_BYTES + ROOM // 4


async def test_the_only_body_of_a_tenant_may_use_the_whole_budget() -> None:
    budget = BodyBudget(ROOM, wait_s=NEVER_S)
    alone = open_hold(budget, "greedy")
    alone.add_bytes(SMALL_BYTES + 1)
    await alone.wait_for_rest(ROOM + SMALL_BYTES, ROOM + SMALL_BYTES)
    assert alone.counted_bytes == ROOM + SMALL_BYTES


async def test_bodies_of_one_tenant_take_no_more_than_their_share_of_the_places_to_wait() -> None:
    budget = BodyBudget(ROOM, wait_s=NEVER_S)
    open_hold(budget).add_bytes(ROOM + SMALL_BYTES)
    waits = []
    for _ in range(int(TENANT_SHARE * MAX_WAITING)):
        waits.append(asyncio.create_task(open_hold(budget, "greedy").wait_for_room(ROOM)))
        await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await open_hold(budget, "greedy").wait_for_room(ROOM)
    waits.append(asyncio.create_task(open_hold(budget, "other").wait_for_room(ROOM)))
    await asyncio.sleep(0)
    assert not any(each.done() for each in waits)
    for each in waits:
        each.cancel()


async def test_no_more_bodies_wait_than_memory_is_reckoned_for() -> None:
    budget = BodyBudget(ROOM, wait_s=NEVER_S)
    open_hold(budget).add_bytes(2 * ROOM)
    waits = [
        asyncio.create_task(open_hold(budget).wait_for_room(SMALL_BYTES + 1)) for _ in range(MAX_WAITING)
    ]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError) as refused:
        await open_hold(budget).wait_for_room(SMALL_BYTES + 1)
    assert (refused.value.status, refused.value.retry_after_s) == (503, RETRY_AFTER_S)
    for each in waits:
        each.cancel()
    await asyncio.gather(*waits, return_exceptions=True)


@pytest.mark.parametrize("moment", ["while it waits", "as it gets its room"])
async def test_room_is_not_lost_with_who_is_cancelled(moment: str) -> None:
    budget = BodyBudget(ROOM, wait_s=NEVER_S)
    other, hold = open_hold(budget), open_hold(budget)
    other.add_bytes(2 * ROOM)
    hold.add_bytes(SMALL_BYTES + 1)

    async def read() -> None:
        try:
            await hold.wait_for_room(SMALL_BYTES)
        finally:
            hold.release()

    reading = asyncio.create_task(read())
    await asyncio.sleep(0)
    if moment == "as it gets its room":
        other.release()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    other.release()
    assert budget.used_bytes == 0
    assert budget.has_room(hold)


def test_a_body_released_twice_is_counted_off_once() -> None:
    budget = BodyBudget()
    kept, hold = open_hold(budget), open_hold(budget)
    kept.add_bytes(5)
    hold.add_bytes(7)
    hold.release()
    hold.release()
    assert budget.used_bytes == 5


@pytest.mark.parametrize(
    ("memory_bytes", "address_bytes", "workers", "expected"),
    [
        (1024 * MIB, None, 1, (1024 * MIB - PROCESS_BYTES) // COST_FACTOR),
        (1024 * MIB, None, 2, (512 * MIB - PROCESS_BYTES) // COST_FACTOR),
        (64 * 1024 * MIB, 700 * MIB, 4, (700 * MIB - GROWTH_BYTES) // COST_FACTOR),
        (128 * MIB, None, 1, MIN_DEFAULT_BYTES),
        (None, None, 1, PROCESS_BYTES // COST_FACTOR),
    ],
)
def test_the_default_follows_the_smallest_limit_and_is_shared_by_workers(
    memory_bytes: int | None, address_bytes: int | None, workers: int, expected: int
) -> None:
    assert compute_default_budget(memory_bytes, address_bytes, workers) == expected


def read_resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the allocator is not glibc's")
async def test_memory_returns_to_the_system_once_many_bytes_of_bodies_have_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "TRIM_DELAY_S", 0.0)
    hold = BodyBudget().open_hold()
    pieces = [b"x" * 60_000 for _ in range(1_000)]
    hold.add_bytes(60_000_000)
    full = read_resident_bytes()
    del pieces[:-1]  # the last one keeps the allocator from giving back what lies below it
    hold.release()
    async with asyncio.timeout(20):
        while read_resident_bytes() > full - 40_000_000:  # noqa: ASYNC110 - the system is no event of ours
            await asyncio.sleep(0.01)
