"""Runs computations that take a millisecond or more in a single worker thread, one after the other.

Several worker threads would not be faster, because all threads share the interpreter lock. Each further
thread would also delay the event loop.

All tenants share the threads of the process. `FairQueue` lets their work take turns.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import TypeVar
from weakref import WeakValueDictionary

# The tenant for which the current task works. Work of no tenant, such as the admin API, has the empty name.
WORK_OWNER: ContextVar[str] = ContextVar("work_owner", default="")

# The executor of `run_in_worker`. It starts its thread at the first call.
_EXECUTOR = ThreadPoolExecutor(max_workers=1, thread_name_prefix="beside")
# The number of threads for work that takes at most some tenths of a second, so that such work does not wait
# for the work of `run_in_worker`, which may take seconds.
SHORT_WORK_THREADS = 2
_SHORT_EXECUTOR = ThreadPoolExecutor(max_workers=SHORT_WORK_THREADS, thread_name_prefix="short")

# Data of at most this many bytes is processed on the event loop, because that takes less than a millisecond.
# More data is usually processed in the worker thread.
MAX_INLINE_BYTES = 256 * 1024
# A list of at most this many messages is processed on the event loop, because that takes a few milliseconds.
MAX_INLINE_MESSAGES = 2_000

_Result = TypeVar("_Result")


class FairQueue:
    """Keeps the work of one owner from delaying the work of others in a shared pool of threads.

    The pool does its work in the order in which it comes. Each owner (`WORK_OWNER`) may give the pool only
    `width` pieces of work at a time. Further pieces of the same owner wait. So a piece of work of another
    owner waits at most for `width` pieces of each owner.

    Args:
        width: The number of threads in the pool, so that an owner that is alone can use all of them.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        # An entry exists as long as a task uses its semaphore.
        self._semaphores: WeakValueDictionary[tuple[asyncio.AbstractEventLoop, str], asyncio.Semaphore] = (
            WeakValueDictionary()
        )

    @asynccontextmanager
    async def wait_for_turn(self) -> AsyncIterator[None]:
        """Waits until the owner may give the pool another piece of work. The block does the work."""
        key = (asyncio.get_running_loop(), WORK_OWNER.get())
        semaphore = self._semaphores.get(key)
        if semaphore is None:
            semaphore = self._semaphores[key] = asyncio.Semaphore(self._width)
        async with semaphore:
            yield


_WORKER_QUEUE = FairQueue(1)
_SHORT_QUEUE = FairQueue(SHORT_WORK_THREADS)


async def run_in_worker(work: Callable[[], _Result]) -> _Result:
    """Runs `work` in the worker thread, and returns its result.

    Pieces of work of the same owner run in the order of the calls. Owners take turns.

    If the caller is cancelled before `work` begins, `work` does not run. If the caller is cancelled later,
    `work` still runs to its end, and later work waits for it.
    """
    async with _WORKER_QUEUE.wait_for_turn():
        return await asyncio.get_running_loop().run_in_executor(_EXECUTOR, work)


async def run_short_work(work: Callable[[], _Result]) -> _Result:
    """Runs `work`, which takes at most some tenths of a second, in a thread, and returns its result.

    It does not wait for work of `run_in_worker`. Pieces of work of the same owner may run at the same time.
    """
    async with _SHORT_QUEUE.wait_for_turn():
        return await asyncio.get_running_loop().run_in_executor(_SHORT_EXECUTOR, work)


async def run_in_worker_if_large(
    size_bytes: int, work: Callable[[], _Result], *, message_count: int = 0
) -> _Result:
    """Runs `work` on the event loop, or in a thread if it processes much. Returns its result.

    Args:
        size_bytes: The size of the data that `work` processes. More than `MAX_INLINE_BYTES` are much.
        work: The work. It takes at most some tenths of a second (`run_short_work`).
        message_count: The number of messages that `work` processes. More than `MAX_INLINE_MESSAGES` are much.
    """
    if size_bytes <= MAX_INLINE_BYTES and message_count <= MAX_INLINE_MESSAGES:
        return work()
    return await run_short_work(work)
