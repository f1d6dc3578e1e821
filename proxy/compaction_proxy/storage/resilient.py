"""Calls a store behind a deadline and a circuit breaker.

A store is left alone after three failures within a second, one timeout or one failed probe: it gets no more
calls, except probes, until a probe succeeds. If the store is dead or does not answer, the calls in progress
wait a fraction of a second for it, once. After that only a background task probes the store, twice a second.
So no later request waits for an unreachable store, and all requests use the store again within a second of
its return.
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
    """Lets the first report of a key through, and then at most one report of that key each minute.

    Args:
        max_keys: The most keys that are remembered. Beyond them, the key reported longest ago is forgotten.
        clock: Returns monotonic seconds.
    """

    def __init__(self, *, max_keys: int = MAX_KEYS, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_keys = max_keys
        self._clock = clock
        # For each key: when it may be reported again, and how many reports were suppressed since.
        self._known: OrderedDict[_Key, tuple[float, int]] = OrderedDict()

    def count_suppressed(self, key: _Key) -> int | None:
        """Counts a report of this key. Returns None if the report must be suppressed.

        Else returns how many reports of this key were suppressed since the last one that was let through.
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
    """Reports the first failure of each reason, and then at most one failure of that reason each minute.

    Args:
        report: Called with the failure, and the number of earlier failures of the same reason that were
            suppressed since the last report.
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
        suppressed = self._throttle.count_suppressed(error.reason)
        if suppressed is not None:
            self._report(error, suppressed)


# A deadline is divided into this many waits, one after the other. If the event loop is blocked during one of
# them, for however long, only this part of the deadline is used up.
DEADLINE_PARTS = 25

_T = TypeVar("_T")


async def run_with_deadline(limit_s: float, call: Coroutine[Any, Any, _T] | asyncio.Future[_T]) -> _T:
    """Returns the result of `call`, or raises its error, or TimeoutError after the deadline.

    It differs from `asyncio.timeout` in three ways. An answer that came while the event loop was busy is
    used, however late the loop sees it. If the call does not end when it is cancelled, this function does not
    wait for it. A call of several steps can make progress while the loop is busy: the deadline then lasts at
    least `DEADLINE_PARTS` iterations of the loop.
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

# Reasons of refusals. The store answered and works for other calls, so it is not left alone.
_REFUSAL_REASONS = frozenset({"store-full", "store-readonly", "store-too-large"})


class CallSlots:
    """Limits the calls in progress. Further calls wait in the order in which they came.

    For use on one event loop.

    Args:
        count: The most calls that may be in progress.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._queue: deque[asyncio.Future[bool]] = deque()

    async def acquire(self, limit_s: float) -> bool:
        """Waits for a slot. Returns True once it has one, or False if `refuse_waiting` was called meanwhile.

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
            if not place.cancelled() and place.result():  # the slot came in the same iteration of the loop
                self.release()
            raise

    def release(self) -> None:
        """Passes a slot on to the call that has waited longest, or makes it free."""
        while self._queue:
            place = self._queue.popleft()
            if not place.done():
                place.set_result(True)
                return
        self._free += 1

    def refuse_waiting(self) -> None:
        """Refuses a slot to all calls that are waiting now."""
        while self._queue:
            place = self._queue.popleft()
            if not place.done():
                place.set_result(False)


class ResilientStore:
    """Runs calls of a store, a few at once, and leaves the store alone while it fails.

    The deadline of a call begins when the call gets its slot. The time before that is not counted: it shows
    how busy this process is, and says nothing about the store.

    Args:
        store: The store, used for probes.
        clock: Returns monotonic seconds.
        deadline_s: The longest time that one call of the store may take.
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
        """Whether the last call or probe got an answer, even a refusal to write."""
        return self._reachable

    @property
    def is_in_use(self) -> bool:
        """Whether the store is in use; False while it is left alone."""
        return self._breaker.is_closed

    async def run_call(self, call: Callable[[], Awaitable[_T]], limit_s: float | None = None) -> _T:
        """Runs a call of the store and returns its result.

        `limit_s` is the call's deadline in seconds; None sets the store's usual deadline.

        Raises:
            StoreUnavailableError: The call failed or took too long. With the reason `RESTING_REASON`, it was
                not made.
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
        if self._breaker.is_closed:  # else another call has failed since, and this answer may be older
            self._record_success()
        return answer

    async def close(self) -> None:
        """Stops probing."""
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.wait((self._probe,))

    async def _start_call_in_slot(self, call: Callable[[], Awaitable[_T]]) -> asyncio.Task[_T]:
        """Starts a call once it has a slot. The slot is free again once the store has finished the call.

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
            self._slots.refuse_waiting()
        self._ensure_probing()

    def _ensure_probing(self) -> None:
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._probe_until_reachable())

    async def _probe_until_reachable(self) -> None:
        """Probes the store until it answers. If a probe fails, the store is left alone."""
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
