"""One thread for calls that block, which take their turns on it."""

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
            # Nothing is forgotten here: what went wrong is raised again where the result is awaited.
            with suppress_and_report(future.set_exception):
                future.set_result(work())


class WorkerThread:
    """A daemon thread that makes calls one after the other.

    An executor of the standard library would be joined when the process ends, and a call that hangs for ever
    would keep the process with it. The thread starts with the first call.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: _Calls = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    async def run(self, work: Callable[[], _T]) -> _T:
        """What `work` returns or raises. If the one who waits is cancelled, a call not yet begun is dropped.

        Raises:
            StoreUnavailable: The worker is closed.
        """
        if self._closed:
            raise StoreUnavailableError("store-closed")
        return await asyncio.wrap_future(self._submit_call(work))

    async def close(self, final_call: Callable[[], None], limit_s: float) -> None:
        """Finish what is waiting, then call `final_call`.

        After `limit_s` seconds a stuck thread is left behind.
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
