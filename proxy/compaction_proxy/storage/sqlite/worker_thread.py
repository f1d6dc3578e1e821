"""One thread that runs blocking calls one after the other."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from compaction_proxy.core.errors import StoreUnavailableError
from compaction_proxy.support.fail_open import suppress_and_report

_T = TypeVar("_T")
_Calls = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


def _run_calls(calls: _Calls) -> None:
    while (call := calls.get()) is not None:
        future, work = call
        if future.set_running_or_notify_cancel():
            # No error is lost here, because the error is raised again where the result is awaited.
            with suppress_and_report(future.set_exception):
                future.set_result(work())


class WorkerThread:
    """A daemon thread that runs calls one after the other.

    It replaces a `ThreadPoolExecutor`: when the process ends, Python waits for the threads of an executor, so
    a call that hangs would keep the process alive forever. The thread starts with the first call.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: _Calls = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    async def run(self, work: Callable[[], _T]) -> _T:
        """Runs `work` on the thread, and returns its result or raises its error.

        If the caller is cancelled, a call that has not begun is dropped.

        Raises:
            StoreUnavailableError: The worker is closed.
        """
        if self._closed:
            raise StoreUnavailableError("store-closed")
        return await asyncio.wrap_future(self._submit_call(work))

    async def close(self, final_call: Callable[[], None], limit_s: float) -> None:
        """Finishes the waiting calls, then runs `final_call` on the thread.

        If this takes longer than `limit_s` seconds, returns before it is finished. If no call was ever made,
        does not run `final_call`.
        """
        if self._closed:
            return
        self._closed = True
        if self._thread is None:
            return
        done = self._submit_call(final_call)
        self._calls.put(None)
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await asyncio.wrap_future(done)

    def _submit_call(self, work: Callable[[], _T]) -> Future[_T]:
        if self._thread is None:
            self._thread = threading.Thread(
                target=_run_calls, args=(self._calls,), name=self._name, daemon=True
            )
            self._thread.start()
        future: Future[_T] = Future()
        self._calls.put((future, work))
        return future
