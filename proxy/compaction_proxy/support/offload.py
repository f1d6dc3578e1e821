"""Runs pure work of milliseconds or more off the event loop, one piece at a time.

Several threads would compute no faster than one, because they share the interpreter lock, and the event loop
would have to wait for each of them in turn.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

# One executor for the process, because its threads share one interpreter lock. Its thread starts with the
# first work.
_EXECUTOR = ThreadPoolExecutor(max_workers=1, thread_name_prefix="beside")

_Result = TypeVar("_Result")


async def run_in_worker(work: Callable[[], _Result]) -> _Result:
    """Runs `work` in the worker thread, after all work that was requested earlier, and returns its result.

    If the caller is cancelled, work that has not begun is dropped. Work that has begun continues to its end,
    and later work waits for it.
    """
    return await asyncio.get_running_loop().run_in_executor(_EXECUTOR, work)
