"""Long computations run in one worker thread, in their order; short ones on the event loop."""

import asyncio
import threading
from functools import partial

import pytest

from compaction_proxy.support.offload import MAX_INLINE_BYTES, run_in_worker, run_in_worker_if_large


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
    ("size_bytes", "is_inline"), [(0, True), (MAX_INLINE_BYTES, True), (MAX_INLINE_BYTES + 1, False)]
)
async def test_only_large_work_leaves_the_event_loop(size_bytes: int, *, is_inline: bool) -> None:
    thread = await run_in_worker_if_large(size_bytes, threading.get_ident)
    assert (thread == threading.get_ident()) is is_inline


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
