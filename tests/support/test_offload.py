"""Long computations run in worker threads, and owners take turns; short ones run on the event loop."""

import asyncio
import threading
from collections.abc import Callable
from functools import partial

import pytest

from compaction_proxy.support.offload import (
    LONG_WORK_THREADS,
    MAX_INLINE_BYTES,
    MAX_INLINE_MESSAGES,
    WORK_OWNER,
    run_in_worker,
    run_in_worker_if_large,
    run_short_work,
)


async def test_work_of_one_owner_runs_piece_by_piece_in_the_order_of_its_calls() -> None:
    done: list[int] = []
    running = threading.Lock()

    def compute(number: int) -> int:
        assert running.acquire(blocking=False)
        threading.Event().wait(0.002)
        done.append(number)
        running.release()
        return threading.get_ident()

    threads = set(await asyncio.gather(*(run_in_worker(partial(compute, number)) for number in range(20))))

    assert done == list(range(20))
    assert threading.get_ident() not in threads


@pytest.mark.parametrize(
    ("size_bytes", "message_count", "is_inline"),
    [
        (0, 0, True),
        (MAX_INLINE_BYTES, MAX_INLINE_MESSAGES, True),
        (MAX_INLINE_BYTES + 1, 0, False),
        (0, MAX_INLINE_MESSAGES + 1, False),
    ],
)
async def test_only_large_work_leaves_the_event_loop(
    size_bytes: int, message_count: int, *, is_inline: bool
) -> None:
    thread = await run_in_worker_if_large(size_bytes, threading.get_ident, message_count=message_count)
    assert (thread == threading.get_ident()) is is_inline


async def run_for(owner: str, work: Callable[[], object]) -> None:
    WORK_OWNER.set(owner)
    await run_in_worker(work)


async def test_long_work_of_one_owner_does_not_delay_that_of_another() -> None:
    gate = threading.Event()
    busy = [asyncio.create_task(run_for("busy", partial(gate.wait, 60))) for _ in range(20)]
    await asyncio.sleep(0)

    await asyncio.create_task(run_for("other", lambda: None))

    assert not any(task.done() for task in busy)
    gate.set()
    await asyncio.gather(*busy)


async def test_owners_take_turns_where_all_threads_are_busy() -> None:
    gates = [threading.Event() for _ in range(LONG_WORK_THREADS)]
    holders = [
        asyncio.create_task(run_for(f"holder {number}", partial(gate.wait, 60)))
        for number, gate in enumerate(gates)
    ]
    await asyncio.sleep(0)
    done: list[str] = []
    tasks = [
        asyncio.create_task(run_for(owner, partial(done.append, owner)))
        for owner in [*["busy"] * 20, "other"]
    ]
    await asyncio.sleep(0)
    gates[0].set()
    await asyncio.gather(*tasks)
    gates[1].set()
    await asyncio.gather(*holders)

    assert done.index("other") == 1
    assert len(done) == 21


async def test_work_whose_caller_is_cancelled_counts_for_its_owner_until_it_ends() -> None:
    gate, began, done = threading.Event(), threading.Event(), list[str]()

    def hold() -> None:
        began.set()
        gate.wait(60)
        done.append("cancelled")

    first = asyncio.create_task(run_for("busy", hold))
    await asyncio.to_thread(began.wait, 60)
    first.cancel()
    await asyncio.wait([first])
    second = asyncio.create_task(run_for("busy", partial(done.append, "next")))
    await asyncio.create_task(run_for("other", partial(done.append, "other")))
    gate.set()
    await second

    assert done == ["other", "cancelled", "next"]


async def test_short_work_does_not_wait_for_long_work() -> None:
    gate = threading.Event()
    long = asyncio.create_task(run_in_worker(lambda: gate.wait(60)))
    await asyncio.sleep(0)
    assert await run_short_work(lambda: 7) == 7
    assert not long.done()
    gate.set()
    await long


async def test_work_that_has_not_begun_is_dropped_with_its_caller() -> None:
    gate, began = threading.Event(), threading.Event()
    done: list[str] = []

    def hold() -> None:
        began.set()
        gate.wait(60)

    first = asyncio.create_task(run_in_worker(hold))
    second = asyncio.create_task(run_in_worker(lambda: done.append("second")))
    await asyncio.to_thread(began.wait, 60)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    gate.set()
    await first
    await run_in_worker(lambda: done.append("third"))

    assert done == ["third"]


async def test_an_error_reaches_the_caller_and_later_work_runs() -> None:
    with pytest.raises(ZeroDivisionError):
        await run_in_worker(lambda: 1 // 0)
    assert await run_in_worker(lambda: 7) == 7
