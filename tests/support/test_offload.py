"""Long computations run in one worker thread, owners take turns; short ones run on the event loop."""

import asyncio
import threading
from functools import partial

import pytest

from compaction_proxy.support.offload import (
    MAX_INLINE_BYTES,
    MAX_INLINE_MESSAGES,
    WORK_OWNER,
    run_in_worker,
    run_in_worker_if_large,
    run_short_work,
)


async def test_work_runs_in_the_order_of_its_calls_in_one_thread() -> None:
    done: list[int] = []

    def compute(number: int) -> int:
        done.append(number)
        return threading.get_ident()

    threads = set(await asyncio.gather(*(run_in_worker(partial(compute, number)) for number in range(20))))

    assert done == list(range(20))
    assert len(threads) == 1
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


async def test_the_work_of_one_owner_does_not_delay_that_of_others() -> None:
    gate, done = threading.Event(), list[str]()

    async def run(owner: str) -> None:
        WORK_OWNER.set(owner)
        await run_in_worker(partial(gate.wait, 60))
        done.append(owner)

    busy = [asyncio.create_task(run("busy")) for _ in range(20)]
    await asyncio.sleep(0)
    other = asyncio.create_task(run("other"))
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*busy, other)

    assert done.index("other") == 1
    assert len(done) == 21


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
