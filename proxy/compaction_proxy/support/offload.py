"""Runs computations that take a millisecond or more in a worker thread, one after the other.

Several threads would compute no faster than one, because they share the interpreter lock, and the event loop
would have to wait for each of them in turn.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

# One executor for the whole process, because all threads share one interpreter lock. The thread starts with
# the first call of `run_in_worker`.
_EXECUTOR = ThreadPoolExecutor(max_workers=1, thread_name_prefix="beside")

# Work on at most this many bytes takes less than a millisecond, so that it need not leave the event loop.
MAX_INLINE_BYTES = 256 * 1024

_Result = TypeVar("_Result")


async def run_in_worker(work: Callable[[], _Result]) -> _Result:
    """Runs `work` in the worker thread, after all earlier work, and returns its result.

    If the caller is cancelled, `work` is dropped if it has not begun. If it has begun, it continues to its
    end, and later work waits for it.
    """
    return await asyncio.get_running_loop().run_in_executor(_EXECUTOR, work)


async def run_in_worker_if_large(size_bytes: int, work: Callable[[], _Result]) -> _Result:
    """Runs `work`, which processes `size_bytes` bytes, and returns its result.

    Runs it on the event loop if these are at most `MAX_INLINE_BYTES`, else in the worker thread.
    """
    return work() if size_bytes <= MAX_INLINE_BYTES else await run_in_worker(work)
