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

_Result = TypeVar("_Result")


async def run_in_worker(work: Callable[[], _Result]) -> _Result:
    """Runs `work` in the worker thread, after all earlier work, and returns its result.

    If the caller is cancelled, `work` is dropped if it has not begun. If it has begun, it continues to its
    end, and later work waits for it.
    """
    return await asyncio.get_running_loop().run_in_executor(_EXECUTOR, work)
