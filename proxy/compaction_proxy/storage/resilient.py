"""A store behind a deadline and a circuit breaker: one that fails is left alone until a probe succeeds.

A dead or hung store costs a fraction of a second once. After that nobody asks it but a task of our own,
twice a second, so that no request pays for finding out that it is still away, and all have it again within a
second of its return.
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


class Throttle(Generic[_Key]):
    """Lets a report through at once, and more reports with the same key once a minute at most.

    Args:
        max_keys: Keys that are remembered; beyond it, those that were reported longest ago are forgotten.
        clock: Monotonic seconds.
    """

    def __init__(self, *, max_keys: int = MAX_KEYS, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_keys = max_keys
        self._clock = clock
        # When a key may be reported again, and the reports that were suppressed since the last one.
        self._known: OrderedDict[_Key, tuple[float, int]] = OrderedDict()

    def count_suppressed(self, key: _Key) -> int | None:
        """How many reports with this key were suppressed since the last one; None: suppress this one."""
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


class RateLimitedLog:
    """Tells of a failure at once, and of more for the same reason once a minute at most.

    Args:
        report: Is given the failure, and how many of its reason it was not given since the last.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        report: Callable[[StoreUnavailableError, int], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._report = report
        self._throttle = Throttle[str](clock=clock)

    def __call__(self, error: StoreUnavailableError) -> None:
        """A failure."""
        suppressed = self._throttle.count_suppressed(error.reason)
        if suppressed is not None:
            self._report(error, suppressed)


# A deadline is spent in parts, so that the time in which the event loop looked at nothing counts as one.
DEADLINE_PARTS = 25

_T = TypeVar("_T")


async def run_with_deadline(limit_s: float, call: Coroutine[Any, Any, _T] | asyncio.Future[_T]) -> _T:
    """What `call` returns or raises, or TimeoutError.

    Unlike under `asyncio.timeout`, an answer that came while the event loop itself was busy is taken, however
    late the loop looks, and a call that does not end when it is cancelled is left behind. A call that needs
    several steps gets its turns: while the loop is busy, a deadline lasts as many of its rounds as there are
    parts.
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
PROBE_EVERY_S = 0.5
PROBE_LIMIT_S = 1.0
"""More than a call's deadline: a probe may have to find its way first, past sentinels that are away."""
CALLS_AT_ONCE = 8
TURN_LIMIT_S = 2.0
"""The longest that a call waits for its turn behind other calls of this process, while the store answers."""

RESTING = "store-resting"
"""The reason while the store is left alone."""

# The store answered, and works for other calls: no reason to leave it alone.
_REFUSAL_REASONS = frozenset({"store-full", "store-readonly", "store-too-large"})


class CallSlots:
    """Slots for calls that are under way at once. Further calls wait in the order in which they came.

    For use on one event loop.

    Args:
        count: How many calls may be under way.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._queue: deque[asyncio.Future[bool]] = deque()

    async def take(self, limit_s: float) -> bool:
        """Wait for a slot. Returns whether there is one; False after `refuse_waiting`.

        Raises:
            TimeoutError: There was none within `limit_s` seconds.
        """
        if self._free:
            self._free -= 1
            return True
        place = asyncio.get_running_loop().create_future()
        self._queue.append(place)
        try:
            return await run_with_deadline(limit_s, place)
        except asyncio.CancelledError:
            if not place.cancelled() and place.result():  # the slot came in the same turn of the loop
                self.give_back()
            raise

    def give_back(self) -> None:
        """Pass a slot on to the call that has waited longest."""
        while self._queue:
            place = self._queue.popleft()
            if not place.done():
                place.set_result(True)
                return
        self._free += 1

    def refuse_waiting(self) -> None:
        """Let no call that waits now have a slot."""
        while self._queue:
            place = self._queue.popleft()
            if not place.done():
                place.set_result(False)


class ResilientStore:
    """Calls of a store, of which only a few are under way at once.

    The deadline of a call begins with its turn. How long a call waits behind others of this process says
    how busy the process is, and nothing of the store.

    Args:
        store: What is called.
        clock: Monotonic seconds.
        deadline_s: The longest that the store is waited for in one call.
        probe_every_s: Seconds between two probes of a store that is left alone.
    """

    def __init__(
        self,
        store: Store,
        *,
        clock: Callable[[], float] = time.monotonic,
        deadline_s: float = DEADLINE_S,
        probe_every_s: float = PROBE_EVERY_S,
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
        """Whether the last call or probe got an answer, though it may have been a refusal to write."""
        return self._reachable

    @property
    def is_in_use(self) -> bool:
        """Whether the store is in use; False while it is left alone."""
        return self._breaker.is_closed

    async def run_call(self, call: Callable[[], Awaitable[_T]], limit_s: float | None = None) -> _T:
        """What `call`, a call of the store, returns within `limit_s` seconds (None: the deadline).

        Raises:
            StoreUnavailable: It failed or took too long; or, with the reason `RESTING`, was not made at all.
        """
        if not self._breaker.is_closed:
            self._ensure_probing()
            raise StoreUnavailableError(RESTING)
        try:
            answer = await run_with_deadline(limit_s or self._deadline_s, await self._begin(call))
        except TimeoutError as error:
            self._record_failure(timed_out=True)
            raise StoreUnavailableError("store-timeout") from error
        except OSError as error:
            self._record_failure()
            raise StoreUnavailableError("store-failed", error.strerror or "") from error
        except StoreUnavailableError as error:
            if error.reason not in _REFUSAL_REASONS | {RESTING}:
                self._record_failure()
            raise
        if (
            self._breaker.is_closed
        ):  # an answer that was under way says nothing of a store that has failed since
            self._record_success()
        return answer

    async def close(self) -> None:
        """Stop probing."""
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.wait((self._probe,))

    async def _begin(self, call: Callable[[], Awaitable[_T]]) -> asyncio.Task[_T]:
        """Begin a call when its turn comes. The slot is free again once the call itself has ended.

        Raises:
            StoreUnavailable: The store broke while this call waited for its turn.
            TimeoutError: The turn did not come.
        """
        has_slot = await self._slots.take(TURN_LIMIT_S)
        if not self._breaker.is_closed:
            if has_slot:
                self._slots.give_back()
            raise StoreUnavailableError(RESTING)
        task = asyncio.ensure_future(call())
        task.add_done_callback(lambda _: self._slots.give_back())
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
        """Until it answers. One that fails a probe is left alone, however few its calls are."""
        while not self._reachable:
            await asyncio.sleep(self._probe_every_s)
            if self._reachable:  # to a call, meanwhile
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
