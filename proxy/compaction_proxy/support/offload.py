"""Runs computations that take a millisecond or more in a single worker thread, one after the other.

Several worker threads would not be faster, because all threads share the interpreter lock. Each further
thread would also delay the event loop.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

# The only executor of the process. It starts its thread at the first call of `run_in_worker`.
_EXECUTOR = ThreadPoolExecutor(max_workers=1, thread_name_prefix="beside")

# Data of at most this many bytes is processed on the event loop, because that takes less than a millisecond.
# More data is usually processed in the worker thread.
MAX_INLINE_BYTES = 256 * 1024

_Result = TypeVar("_Result")


async def run_in_worker(work: Callable[[], _Result]) -> _Result:
    """Runs `work` in the worker thread, after all work of earlier calls, and returns its result.

    If the caller is cancelled before `work` begins, `work` does not run. If the caller is cancelled later,
    `work` still runs to its end, and later work waits for it.
    """
    return await asyncio.get_running_loop().run_in_executor(_EXECUTOR, work)


async def run_in_worker_if_large(size_bytes: int, work: Callable[[], _Result]) -> _Result:
    """Runs `work` in the worker thread if it processes more than `MAX_INLINE_BYTES`. Returns its result.

    Otherwise, runs it directly, on the event loop. `size_bytes` is the size of the data that `work`
    processes.
    """
    return work() if size_bytes <= MAX_INLINE_BYTES else await run_in_worker(work)
