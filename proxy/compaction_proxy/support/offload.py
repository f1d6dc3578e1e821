"""Runs computations that take a millisecond or more in worker threads.

More threads would not be faster, because all threads share the interpreter lock. Each further thread would
also delay the event loop.

All tenants share the threads of the process. `FairQueue` lets their work take turns.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import TypeVar
from weakref import WeakValueDictionary

# The tenant for which the current task works. Work of no tenant, such as the admin API, has the empty name.
WORK_OWNER: ContextVar[str] = ContextVar("work_owner", default="")

# The number of threads of `run_in_worker`, whose work may take seconds. An owner uses only one of the threads
# at a time, so that the work of other owners goes on meanwhile.
LONG_WORK_THREADS = 2
_LONG_EXECUTOR = ThreadPoolExecutor(max_workers=LONG_WORK_THREADS, thread_name_prefix="long")
# The number of threads for work that takes at most some tenths of a second, so that such work does not wait
# for the work of `run_in_worker`, which may take seconds.
SHORT_WORK_THREADS = 2
_SHORT_EXECUTOR = ThreadPoolExecutor(max_workers=SHORT_WORK_THREADS, thread_name_prefix="short")

# Data of at most this many bytes is processed on the event loop, because that takes less than a millisecond.
# More data is usually processed in a worker thread.
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
        width: The largest number of pieces of work of one owner that the pool has at a time.
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
        async with self._get_semaphore():
            yield

    async def run(self, pool: Executor, work: Callable[[], _Result]) -> _Result:
        """Waits for the owner's turn, runs `work` in the pool, and returns its result.

        If the caller is cancelled before `work` begins, `work` does not run. If the caller is cancelled
        later, `work` still runs to its end, and the owner's further work waits for that end.
        """
        semaphore = self._get_semaphore()
        await semaphore.acquire()
        try:
            loop = asyncio.get_running_loop()
            future = loop.run_in_executor(_ReleasingPool(pool, partial(_release, loop, semaphore)), work)
        except RuntimeError:  # the pool was shut down
            semaphore.release()
            raise
        return await future

    def _get_semaphore(self) -> asyncio.Semaphore:
        key = (asyncio.get_running_loop(), WORK_OWNER.get())
        semaphore = self._semaphores.get(key)
        if semaphore is None:
            semaphore = self._semaphores[key] = asyncio.Semaphore(self._width)
        return semaphore


def _release(loop: asyncio.AbstractEventLoop, semaphore: asyncio.Semaphore, _: object) -> None:
    with suppress(RuntimeError):  # the loop is closed, so nobody waits
        loop.call_soon_threadsafe(semaphore.release)


class _ReleasingPool(Executor):
    """A pool that calls `release` when a piece of work has ended, or was cancelled before it began."""

    def __init__(self, pool: Executor, release: Callable[[object], None]) -> None:
        self._pool = pool
        self._release = release

    def submit(self, work: Callable[..., _Result], /, *args: object, **kwargs: object) -> Future[_Result]:
        future = self._pool.submit(work, *args, **kwargs)
        future.add_done_callback(self._release)
        return future


_LONG_QUEUE = FairQueue(1)
_SHORT_QUEUE = FairQueue(SHORT_WORK_THREADS)


async def run_in_worker(work: Callable[[], _Result]) -> _Result:
    """Runs `work` in a worker thread, and returns its result.

    Pieces of work of the same owner run one after the other, in the order of the calls. Pieces of different
    owners may run at the same time.

    If the caller is cancelled before `work` begins, `work` does not run. If the caller is cancelled later,
    `work` still runs to its end, and later work of the owner waits for it.
    """
    return await _LONG_QUEUE.run(_LONG_EXECUTOR, work)


async def run_short_work(work: Callable[[], _Result]) -> _Result:
    """Runs `work`, which takes at most some tenths of a second, in a thread, and returns its result.

    It does not wait for work of `run_in_worker`. Pieces of work of the same owner may run at the same time.
    """
    return await _SHORT_QUEUE.run(_SHORT_EXECUTOR, work)


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
