"""Calls a store behind a deadline and a circuit breaker.

A store is left alone after three failures within a second, one timeout or one failed probe: it gets no more
calls, except probes, until a probe succeeds. If the store is dead or does not answer, only the calls in
progress wait for it, for a fraction of a second. After that, a background task probes the store twice a
second. Therefore no later request waits for an unreachable store, and requests use the store again within a
second after it answers again.
"""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

from compaction_proxy.core.errors import StoreUnavailableError
from compaction_proxy.storage.store import Store
from compaction_proxy.support.circuit_breaker import CircuitBreaker

REPEAT_AFTER_S = 60.0
MAX_KEYS = 100

_Key = TypeVar("_Key", bound=Hashable)


class ReportThrottle(Generic[_Key]):
    """Limits the reports of each key to one in `REPEAT_AFTER_S` seconds.

    Args:
        max_keys: Maximum number of keys that are tracked. If there are more, the key whose last report is
            oldest is dropped.
        clock: Returns monotonic seconds.
    """

    def __init__(self, *, max_keys: int = MAX_KEYS, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_keys = max_keys
        self._clock = clock
        # For each key: the time from which it may be reported again, and the number of reports suppressed
        # since its last report.
        self._known: OrderedDict[_Key, tuple[float, int]] = OrderedDict()

    def admit_report(self, key: _Key) -> int | None:
        """Decides whether to make a report of this key, and counts suppressed reports.

        Returns None if the caller must suppress the report. Otherwise returns the number of reports of this
        key that were suppressed since its last report that was made.
        """
        quiet_until, suppressed = self._known.get(key, (0.0, 0))
        now = self._clock()
        if now < quiet_until:
            self._known[key] = (quiet_until, suppressed + 1)
            return None
        self._known[key] = (now + REPEAT_AFTER_S, 0)
        self._known.move_to_end(key)
        if len(self._known) > self._max_keys:
            self._known.popitem(last=False)
        return suppressed


class RateLimitedReporter:
    """Reports store failures, but at most one of each reason in `REPEAT_AFTER_S` seconds.

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
        """Reports a failure or suppresses it."""
        suppressed = self._throttle.admit_report(error.reason)
        if suppressed is not None:
            self._report(error, suppressed)


# A deadline is divided into this many waits, one after the other. If the event loop is blocked during a wait,
# even for long, this uses up only one of these parts of the deadline.
DEADLINE_PARTS = 25

_T = TypeVar("_T")


async def run_with_deadline(limit_s: float, call: Coroutine[Any, Any, _T] | asyncio.Future[_T]) -> _T:
    """Returns the result of `call` or raises its error. Cancels it after `limit_s` seconds.

    It differs from `asyncio.timeout` in three ways. It returns an answer that arrived while the event loop
    was blocked, even if the loop sees it after the deadline. It does not wait for a call that does not end
    when it is cancelled. A call of several steps can make progress although the loop is often blocked,
    because the deadline lasts at least `DEADLINE_PARTS` iterations of the loop.

    Raises:
        TimeoutError: The call did not end before the deadline.
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
"""Longer than a call's deadline, because a probe may first have to try sentinels that do not answer."""
CALLS_AT_ONCE = 8
TURN_LIMIT_S = 2.0
"""The longest that a call waits for its slot. If the store fails meanwhile, the wait ends at once."""

RESTING_REASON = "store-resting"
"""The error reason while the store is left alone."""

# Reasons with which a store refuses a call. The store has answered and works for other calls, so it is not
# left alone.
_REFUSAL_REASONS = frozenset({"store-full", "store-readonly", "store-too-large"})


class CallSlots:
    """Limits the number of calls in progress. Further calls wait in the order of their arrival.

    Use it on one event loop.

    Args:
        count: Maximum number of calls in progress.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._queue: deque[asyncio.Future[bool]] = deque()

    async def acquire(self, limit_s: float) -> bool:
        """Waits for a slot. Returns True with a slot, False if `refuse_waiting_calls` was called meanwhile.

        Raises:
            TimeoutError: No slot became free within `limit_s` seconds.
        """
        if self._free:
            self._free -= 1
            return True
        place = asyncio.get_running_loop().create_future()
        self._queue.append(place)
        try:
            return await run_with_deadline(limit_s, place)
        except asyncio.CancelledError:
            if not place.cancelled() and place.result():  # it got the slot in the same iteration of the loop
                self.release()
            raise

    def release(self) -> None:
        """Gives a slot back. The call that has waited longest gets it."""
        while self._queue:
            place = self._queue.popleft()
            if not place.done():
                place.set_result(True)
                return
        self._free += 1

    def refuse_waiting_calls(self) -> None:
        """Ends the wait of all waiting calls: their `acquire` returns False."""
        while self._queue:
            place = self._queue.popleft()
            if not place.done():
                place.set_result(False)


class ResilientStore:
    """Runs calls of a store, a few at once, and leaves the store alone while it fails.

    The deadline of a call begins when the call gets its slot. The time before that is not counted, because it
    depends on how busy this process is and not on the store.

    Args:
        store: The store that is probed.
        clock: Returns monotonic seconds.
        deadline_s: Maximum duration of one call of the store, in seconds.
        probe_every_s: Seconds between two probes of a store that is left alone.
    """

    def __init__(
        self,
        store: Store,
        *,
        clock: Callable[[], float] = time.monotonic,
        deadline_s: float = DEADLINE_S,
        probe_every_s: float = PROBE_INTERVAL_S,
    ) -> None:
        self._store = store
        self._deadline_s = deadline_s
        self._probe_every_s = probe_every_s
        self._breaker = CircuitBreaker(clock)
        self._slots = CallSlots(CALLS_AT_ONCE)
        self._probe: asyncio.Task[None] | None = None
        self._reachable = True

    @property
    def is_reachable(self) -> bool:
        """Whether the store answered the last call or probe. A refusal to write is an answer, too."""
        return self._reachable

    @property
    def is_in_use(self) -> bool:
        """Whether the store is in use; False while it is left alone."""
        return self._breaker.is_closed

    async def run_call(self, call: Callable[[], Awaitable[_T]], limit_s: float | None = None) -> _T:
        """Runs a call of the store and returns its result.

        `limit_s` is the call's deadline in seconds; None means `deadline_s` of this object.

        Raises:
            StoreUnavailableError: The call failed or took too long. The reason is `RESTING_REASON` if the
                call was not made because the store is left alone.
        """
        if not self._breaker.is_closed:
            self._ensure_probing()
            raise StoreUnavailableError(RESTING_REASON)
        try:
            answer = await run_with_deadline(
                limit_s or self._deadline_s, await self._start_call_in_slot(call)
            )
        except TimeoutError as error:
            self._record_failure(timed_out=True)
            raise StoreUnavailableError("store-timeout") from error
        except OSError as error:
            self._record_failure()
            raise StoreUnavailableError("store-failed", error.strerror or "") from error
        except StoreUnavailableError as error:
            if error.reason not in _REFUSAL_REASONS | {RESTING_REASON}:
                self._record_failure()
            raise
        if self._breaker.is_closed:  # otherwise another call has failed meanwhile, perhaps after this answer
            self._record_success()
        return answer

    async def close(self) -> None:
        """Stops probing."""
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.wait((self._probe,))

    async def _start_call_in_slot(self, call: Callable[[], Awaitable[_T]]) -> asyncio.Task[_T]:
        """Waits for a slot and starts the call. The slot becomes free when the call ends.

        Raises:
            StoreUnavailableError: The store failed while this call waited for its slot.
            TimeoutError: No slot became free in time.
        """
        has_slot = await self._slots.acquire(TURN_LIMIT_S)
        if not self._breaker.is_closed:
            if has_slot:
                self._slots.release()
            raise StoreUnavailableError(RESTING_REASON)
        task = asyncio.ensure_future(call())
        task.add_done_callback(lambda _: self._slots.release())
        return task

    def _record_success(self) -> None:
        self._breaker.record_success()
        self._reachable = True

    def _record_failure(self, *, timed_out: bool = False) -> None:
        self._breaker.record_failure(timed_out=timed_out)
        self._reachable = False
        if not self._breaker.is_closed:
            self._slots.refuse_waiting_calls()
        self._ensure_probing()

    def _ensure_probing(self) -> None:
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._probe_until_reachable())

    async def _probe_until_reachable(self) -> None:
        """Probes the store until it answers. A failed probe opens the circuit breaker."""
        while not self._reachable:
            await asyncio.sleep(self._probe_every_s)
            if self._reachable:  # a call has reached the store meanwhile
                return
            if await self._probe_once():
                self._record_success()
            else:
                self._breaker.record_failure(timed_out=True)

    async def _probe_once(self) -> bool:
        try:
            await run_with_deadline(PROBE_LIMIT_S, self._store.read([]))
        except (TimeoutError, OSError, StoreUnavailableError):
            return False
        return True
