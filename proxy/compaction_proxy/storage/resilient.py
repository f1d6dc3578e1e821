"""Calls a store with a deadline, and suspends a store that fails (a circuit breaker).

A store is suspended after three failures within a second, one timeout or one failed test call (a read without
keys). A suspended store gets only test calls, until one of them succeeds. If the store does not answer, only
the calls in progress wait for it, each until its deadline (`DEADLINE_S` by default). After that, a background
task makes a test call about twice a second. Therefore no later request waits for an unreachable store, and
requests use the store again about a second after it answers again.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

from compaction_proxy.core.errors import StoreUnavailableError
from compaction_proxy.storage.store import Store
from compaction_proxy.storage.store_failure import StoreFailure
from compaction_proxy.support.lru import BoundedDict

REPEAT_AFTER_S = 60.0
MAX_KEYS = 100

_Key = TypeVar("_Key", bound=Hashable)


class ReportThrottle(Generic[_Key]):
    """Limits how often something is reported: at most once in `REPEAT_AFTER_S` seconds for each key.

    A key is what the caller chooses to tell reports apart, such as the reason of a failure.

    Args:
        max_keys: Maximum number of keys whose reports are counted. Beyond that, the key that was passed to
            `admit_report` least recently is forgotten.
        clock: Returns monotonic seconds.
    """

    def __init__(self, *, max_keys: int = MAX_KEYS, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # For each key: the time from which it may be reported again, and the number of reports suppressed
        # since its last report.
        self._known: BoundedDict[_Key, tuple[float, int]] = BoundedDict(max_keys)

    def admit_report(self, key: _Key) -> int | None:
        """Decides whether to make a report of this key, and counts suppressed reports.

        Returns None if the caller must suppress the report. Otherwise returns how many reports of this key
        were suppressed since the previous report that was made.
        """
        quiet_until, suppressed = self._known.get(key, (0.0, 0))
        now = self._clock()
        if now < quiet_until:
            self._known[key] = (quiet_until, suppressed + 1)
            return None
        self._known[key] = (now + REPEAT_AFTER_S, 0)
        return suppressed


class RateLimitedReporter:
    """Reports store failures, but at most one with each reason in `REPEAT_AFTER_S` seconds.

    Args:
        report: Called with the failure, and the number of failures of the same reason that were suppressed
            since the last report.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        report: Callable[[StoreUnavailableError, int], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._report = report
        self._throttle = ReportThrottle[str](clock=clock)

    def __call__(self, error: StoreUnavailableError) -> None:
        """Reports a failure, unless the same reason was reported less than `REPEAT_AFTER_S` seconds ago.

        Passes to `report` the number of failures of this reason that were suppressed since the last report.
        """
        suppressed = self._throttle.admit_report(error.reason)
        if suppressed is not None:
            self._report(error, suppressed)


# A deadline is divided into this many waits, one after the other. If the event loop is blocked during a wait,
# even for long, this uses up only one of these parts of the deadline.
DEADLINE_PARTS = 25

_T = TypeVar("_T")


async def run_with_deadline(limit_s: float, call: Coroutine[Any, Any, _T] | asyncio.Future[_T]) -> _T:
    """Returns the result of `call` or raises its error. Cancels `call` after `limit_s` seconds.

    The function differs from `asyncio.timeout` in three ways. It returns a result that arrived while the
    event loop was blocked, even if the loop sees the result after the deadline. It does not wait for a call
    that goes on after its cancellation. A call of several steps can make progress although the loop is often
    blocked, because the deadline lasts at least `DEADLINE_PARTS` iterations of the loop.

    Raises:
        TimeoutError: If the call did not end before the deadline.
    """
    task = asyncio.ensure_future(call)
    try:
        for _ in range(DEADLINE_PARTS):
            await asyncio.wait((task,), timeout=limit_s / DEADLINE_PARTS)
            if task.done():
                return task.result()
    finally:
        task.cancel()
    raise TimeoutError


DEADLINE_S = 0.25
PROBE_INTERVAL_S = 0.5
PROBE_LIMIT_S = 1.0
"""Longer than a call's deadline, because a test call may first try sentinels that do not answer."""
CALLS_AT_ONCE = 8
TURN_LIMIT_S = 2.0
"""The longest time that a call waits for its slot."""

RESTING_REASON = "store-resting"
"""The error reason while the store is suspended."""

# Seconds for which a refusal to write counts as the failure of the store. A proxy with traffic writes more
# often than that, so a refusal that lasts is always known.
REFUSAL_SHOWN_S = 60.0
# Reasons with which a store refuses a call. The store has answered and works for other calls, so it is not
# suspended.
TOO_LARGE_REASON = "store-too-large"
_REFUSAL_REASONS = frozenset({"store-full", "store-readonly", TOO_LARGE_REASON})


MAX_FAILURES = 3
FAILURE_WINDOW_S = 1.0


class ResilientStore:
    """Runs calls of a store, and suspends the store while it fails.

    At most `CALLS_AT_ONCE` calls run at a time, each in a slot. Further calls wait for a slot. The deadline
    of a call begins when the call gets its slot, because the wait depends on how busy this process is.

    Args:
        store: The store to which the calls of `run_call` go. Test calls are reads without keys.
        clock: Returns monotonic seconds.
        deadline_s: Maximum duration of one call of the store, in seconds.
        probe_every_s: Seconds between two test calls while the store does not answer.

    Attributes:
        is_in_use: Whether the store is in use; False while it is suspended.
    """

    def __init__(
        self,
        store: Store,
        *,
        clock: Callable[[], float] = time.monotonic,
        deadline_s: float = DEADLINE_S,
        probe_every_s: float = PROBE_INTERVAL_S,
    ) -> None:
        self.is_in_use = True
        self._failure: StoreFailure | None = None
        # The last refusal to write, and the time in monotonic seconds until which it is shown.
        self._refusal: tuple[StoreFailure, float] | None = None
        self._store = store
        self._clock = clock
        self._deadline_s = deadline_s
        self._probe_every_s = probe_every_s
        self._failed_at: deque[float] = deque(maxlen=MAX_FAILURES)
        self._slots = asyncio.Semaphore(CALLS_AT_ONCE)
        self._probe: asyncio.Task[None] | None = None

    @property
    def is_reachable(self) -> bool:
        """Whether no call has failed since the last success, test calls included.

        A refusal to write is not a failure.
        """
        return self._failure is None

    @property
    def failure(self) -> StoreFailure | None:
        """The failure if the store is unreachable or refused a write in the last minute, otherwise None."""
        if self._failure is None and self._refusal is not None and self._clock() < self._refusal[1]:
            return self._refusal[0]
        return self._failure

    async def run_call(self, call: Callable[[], Coroutine[Any, Any, _T]], limit_s: float | None = None) -> _T:
        """Runs a call of the store and returns its result.

        `limit_s` is the call's deadline in seconds; None means `deadline_s` of this object.

        Raises:
            StoreUnavailableError: If the call failed or took too long. The reason is `RESTING_REASON` if the
                call was not made because the store is suspended.
        """
        if not self.is_in_use:
            self._ensure_probing()
            raise StoreUnavailableError(RESTING_REASON)
        try:
            answer = await run_with_deadline(
                limit_s or self._deadline_s, await self._start_call_in_slot(call)
            )
        except TimeoutError as error:
            self._record_failure(error, timed_out=True)
            raise StoreUnavailableError("store-timeout") from error
        except OSError as error:
            self._record_failure(error)
            raise StoreUnavailableError("store-failed", error.strerror or "") from error
        except StoreUnavailableError as error:
            if error.reason in _REFUSAL_REASONS:
                self._record_response()
                if error.reason != TOO_LARGE_REASON:
                    self._refusal = StoreFailure.from_error(error), self._clock() + REFUSAL_SHOWN_S
            elif error.reason != RESTING_REASON:
                self._record_failure(error)
            raise
        self._record_response()
        return answer

    async def close(self) -> None:
        """Stops the background task that makes test calls."""
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.wait((self._probe,))

    async def _start_call_in_slot(self, call: Callable[[], Coroutine[Any, Any, _T]]) -> asyncio.Task[_T]:
        """Waits for a slot and starts the call. The slot becomes free when the call ends.

        Raises:
            StoreUnavailableError: If the store was suspended while this call waited for its slot.
            TimeoutError: If no slot became free within `TURN_LIMIT_S` seconds.
        """
        async with asyncio.timeout(TURN_LIMIT_S):
            await self._slots.acquire()
        if not self.is_in_use:
            self._slots.release()
            raise StoreUnavailableError(RESTING_REASON)
        task = asyncio.create_task(call())
        task.add_done_callback(lambda _: self._slots.release())
        return task

    def _record_response(self) -> None:
        """Records that the store has answered. Does nothing if the store has been suspended meanwhile."""
        if self.is_in_use:
            self._record_success()

    def _record_success(self) -> None:
        self._failed_at.clear()
        self.is_in_use, self._failure = True, None

    def _record_failure(self, error: Exception, *, timed_out: bool = False) -> None:
        """Records a failed call, and starts the test calls.

        Suspends the store after a timeout, and after `MAX_FAILURES` failures in `FAILURE_WINDOW_S` seconds.
        """
        now = self._clock()
        self._failed_at.append(now)
        is_frequent = len(self._failed_at) == MAX_FAILURES and now - self._failed_at[0] <= FAILURE_WINDOW_S
        self._failure = StoreFailure.from_error(error)
        if timed_out or is_frequent:
            self.is_in_use = False
        self._ensure_probing()

    def _ensure_probing(self) -> None:
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._probe_until_reachable())

    async def _probe_until_reachable(self) -> None:
        """Makes test calls until the store answers. Suspends the store after a failed test call."""
        while not self.is_reachable:
            await asyncio.sleep(self._probe_every_s)
            if self.is_reachable:  # a call has reached the store meanwhile
                return
            try:
                await run_with_deadline(PROBE_LIMIT_S, self._store.read([]))
            except (TimeoutError, OSError, StoreUnavailableError) as error:
                self.is_in_use, self._failure = False, StoreFailure.from_error(error)
            else:
                self._record_success()
