"""A deadline holds for a call that hangs, and is no trap for one that a busy event loop keeps waiting."""

import asyncio
import time

import pytest

from compaction_proxy.storage.resilient import run_with_deadline

STEPS = 10


async def stepping() -> str:
    """A call that needs the event loop's attention several times."""
    for _ in range(STEPS):
        await asyncio.sleep(0)
    return "done"


async def busy(seconds: float) -> None:
    """Keeps the event loop from everything else, again and again."""
    while True:
        time.sleep(seconds)  # noqa: ASYNC251 - that is what is tried
        await asyncio.sleep(0)


@pytest.mark.virtual_time
async def test_a_call_that_hangs_ends_at_its_deadline_and_is_cancelled() -> None:
    hanging = asyncio.Event()
    calls: list[asyncio.Task[object]] = []

    async def call() -> bool:
        calls.extend(task for task in [asyncio.current_task()] if task)
        return await hanging.wait()

    clock = asyncio.get_running_loop().time
    started_s = clock()
    with pytest.raises(TimeoutError):
        await run_with_deadline(0.1, call())
    assert clock() - started_s == pytest.approx(0.1)
    await asyncio.wait(calls)
    assert calls[0].cancelled()


async def test_a_call_of_several_steps_gets_its_turns_on_a_busy_loop() -> None:
    other = asyncio.create_task(busy(0.02))
    start = time.perf_counter()
    assert await run_with_deadline(0.1, stepping()) == "done"
    assert time.perf_counter() - start > 0.1  # or nothing was tried
    other.cancel()


async def test_what_a_call_raises_is_passed_on() -> None:
    async def failing() -> None:
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await run_with_deadline(1, failing())
