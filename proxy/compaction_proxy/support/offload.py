"""Runs pure work of milliseconds or more off the event loop, one piece at a time.

Pure computing in several threads is no faster than in one, but the event loop waits for each of the threads
in turn.
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
    """Runs `work` after all work that was requested before, and returns its result.

    If the caller is cancelled, work that has not begun is dropped. Work that has begun goes on, and later
    work waits for it.
    """
    return await asyncio.get_running_loop().run_in_executor(_EXECUTOR, work)
