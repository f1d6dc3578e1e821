"""An event loop whose clock stands still while anything can happen, and jumps where nothing can.

A test that is marked `virtual_time` runs on it: a second of a timer or of `asyncio.sleep` costs no time, and
a busy machine makes nothing late. The clock waits for sockets and for work of `run_in_executor`. It does not
wait for other threads or other processes, so a test that asks another process needs the usual loop.
"""

import asyncio
import selectors
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple

# Before the clock moves, the kernel has this long to hand over data between two sockets of this process.
_GRACE_S = 0.001
# Every event loop watches one socket of its own, which wakes it up.
_OWN_SOCKETS = 1


_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


class _Selector(selectors.DefaultSelector):
    """Selects next to without waiting, and moves the clock by the time that it should have waited.

    Attributes:
        now_s: What the clock shows.
        working: Calls in executors that have not ended.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.working = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0 or self.working:
            return super().select(None if timeout else timeout)
        has_sockets = len(self.get_map()) > _OWN_SOCKETS
        ready = super().select(min(timeout, _GRACE_S) if has_sockets else 0)
        if not ready:
            self.now_s += timeout
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop on a clock of its own, in seconds from 0."""

    def __init__(self) -> None:
        self._moved = _Selector()
        super().__init__(self._moved)

    def time(self) -> float:
        return self._moved.now_s

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*_Ts], _T], *args: *_Ts
    ) -> "asyncio.Future[_T]":
        """Run a function in an executor; the clock stands still until it has ended."""
        future = super().run_in_executor(executor, func, *args)
        self._moved.working += 1
        future.add_done_callback(self._end_work)
        return future

    async def shutdown_default_executor(self, *_: Any) -> None:
        """Wait until the threads of the executor have ended, however far the clock would move until then.

        From Python 3.12 on, `asyncio.run` gives them 300 seconds, of which this clock makes none.
        """
        await super().shutdown_default_executor()

    def _end_work(self, _: Any) -> None:
        self._moved.working -= 1
