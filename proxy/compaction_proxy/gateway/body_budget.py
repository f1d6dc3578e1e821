"""A budget for the bytes of request bodies that this process holds, shared by all places that read bodies.

Bytes count as they arrive, so a client that declares much and sends nothing holds nothing. When the budget is
used up, requests whose body goes on wait without reading: each for room for all of its rest, so that a
request that comes on at a good pace waits once. A slow one gives the room back. Whoever waits too long is
refused, in order, and its bytes let the next one go on. So a deadlock of bodies that are all half way ends
after one wait.

The first `SMALL_BYTES` of each body are outside the budget. The number of places bounds them
(`ConcurrencyLimiter`).
"""

import asyncio
import sys
from dataclasses import dataclass
from typing import Final

from compaction_proxy.core.errors import OverloadedError

# So much of each body always passes: small requests do not wait behind large ones.
SMALL_BYTES: Final = 65_536
# The longest wait for room, and when to come back after it in vain, in seconds.
WAIT_S: Final = 5.0
RETRY_AFTER_S: Final = 5
# Room that was set aside for the rest of a body is looked at so often, in seconds. If fewer bytes have come
# since, it is given back, and the body counts as it arrives: a slow client holds no more than it has sent.
ASIDE_S: Final = 2.0
LEAST_PROGRESS_BYTES: Final = 512 * 1024
# A body of unknown length gets room for as much again as has come, and for this much at least.
UNKNOWN_BYTES: Final = 1024 * 1024
# No more bodies wait at once. Each one holds what arrived in one read before it was counted.
MAX_WAITING: Final = 64
OUT_OF_MEMORY: Final = "The proxy has no memory left for this request; try again."
TOO_MANY_BODIES: Final = "The proxy holds too many bytes of request bodies; try again."

# What the default is made of. Each worker takes this without large bodies: its code, vocabularies and caches.
PROCESS_BYTES: Final = 256 * 1024 * 1024
# The address space grows by so much after start-up without large bodies: vocabularies and stacks of threads.
GROWTH_BYTES: Final = 192 * 1024 * 1024
# Memory for each byte of a body, at most: itself, its messages cut out, decoded and checked. Measured as the
# peak of resident memory with bodies of 40 MB: 1.1 where it passes unread, 3 to 5 where it is read.
COST_FACTOR: Final = 5
# The default is never less, so that a small machine still serves most requests.
LEAST_BYTES: Final = 8 * 1024 * 1024


def compute_default_budget(memory_bytes: int | None, address_bytes: int | None, workers: int) -> int:
    """Returns the default budget of one process in bytes of bodies.

    Args:
        memory_bytes: Memory that all workers together may take; None if it is not known.
        address_bytes: Address space that this process may still take; None without a limit.
        workers: Processes that share the memory.
    """
    rooms = []
    if memory_bytes is not None:
        rooms.append(memory_bytes // workers - PROCESS_BYTES)
    if address_bytes is not None:
        rooms.append(address_bytes - GROWTH_BYTES)
    return max(min(rooms, default=PROCESS_BYTES) // COST_FACTOR, LEAST_BYTES)


class BodyBudget:
    """The budget of one process, on one event loop.

    Args:
        most_bytes: Bytes that may be held at once of bodies, beyond the first `SMALL_BYTES` of each. No body
            may be larger, so that a request alone always gets to its end.
        wait_s: The longest wait for room, in seconds.

    Attributes:
        most_bytes: As given.
        used_bytes: Bytes of bodies that are held now, the first ones of each included, and what is set aside
            for those that have waited.
    """

    __slots__ = ("_large_bytes", "_wait_s", "_waiting", "most_bytes", "used_bytes")

    def __init__(self, most_bytes: int = sys.maxsize, wait_s: float = WAIT_S) -> None:
        self.most_bytes = most_bytes
        self.used_bytes = 0
        self._large_bytes = 0  # of `used_bytes`, those that are bounded
        self._wait_s = wait_s
        self._waiting: dict[BodyHold, _BodyWaiter] = {}

    def open_hold(self) -> "BodyHold":
        """Returns the account of one request. The caller releases it, however the request ends."""
        return BodyHold(self)

    @property
    def has_room(self) -> bool:
        """Whether bodies may go on: the budget is not used up, and nobody waits."""
        return not self._waiting and self._large_bytes <= self.most_bytes

    def update_hold(self, hold: "BodyHold", counted_bytes: int) -> None:
        """Count a body as so many bytes. Room that becomes free goes to those who wait."""
        before, hold.counted_bytes = hold.counted_bytes, counted_bytes
        self.used_bytes += counted_bytes - before
        self._large_bytes += _count_bounded_bytes(counted_bytes) - _count_bounded_bytes(before)
        if self._waiting and counted_bytes < before:
            self._wake_waiters()

    def try_reserve(self, hold: "BodyHold", size_bytes: int) -> bool:
        """Set room aside for a body to grow to this size. Returns whether there was room."""
        fits = self._has_room_for(hold, size_bytes)
        if fits:
            self.update_hold(hold, max(size_bytes, hold.counted_bytes))
        return fits

    async def wait_for_room(self, hold: "BodyHold", size_bytes: int) -> None:
        """Wait until a body may grow to this size, and set the room aside for it.

        Raises:
            Overloaded: There was no room in time, or too many wait already. The body is counted no more.
        """
        if self.try_reserve(hold, size_bytes):
            return
        if len(self._waiting) >= MAX_WAITING:
            hold.release()
            raise OverloadedError(RETRY_AFTER_S, TOO_MANY_BODIES)
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._wait_s, self._refuse_waiter, hold)
        self._waiting[hold] = wait = _BodyWaiter(size_bytes, loop.create_future(), timer)
        try:
            await wait.turn
        finally:
            timer.cancel()
            self._waiting.pop(hold, None)

    def _has_room_for(self, hold: "BodyHold", size_bytes: int) -> bool:
        """Whether there is room for a body of this size, of which some is counted already."""
        more = _count_bounded_bytes(max(size_bytes, hold.counted_bytes)) - _count_bounded_bytes(
            hold.counted_bytes
        )
        return self._large_bytes + more <= self.most_bytes

    def _wake_waiters(self) -> None:
        """Let those go on, in order, for whom there is room now."""
        for hold, wait in list(self._waiting.items()):
            if self._has_room_for(hold, wait.size_bytes):
                del self._waiting[hold]
                wait.timer.cancel()
                self.update_hold(hold, wait.size_bytes)
                if not wait.turn.done():
                    wait.turn.set_result(None)

    def _refuse_waiter(self, hold: "BodyHold") -> None:
        """Refuse one that has waited too long. Its room is free before the next timer is looked at."""
        wait = self._waiting.pop(hold, None)
        if wait is not None and not wait.turn.done():
            wait.turn.set_exception(OverloadedError(RETRY_AFTER_S, TOO_MANY_BODIES))
            hold.release()


class BodyHold:
    """What one request holds of the budget.

    Attributes:
        size_bytes: Bytes of its body that have arrived.
        counted_bytes: Bytes that the budget counts for it: those, and more while room is set aside.
    """

    __slots__ = ("_budget", "counted_bytes", "size_bytes")

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.size_bytes = self.counted_bytes = 0

    @property
    def most_bytes(self) -> int:
        """The largest body that the budget allows."""
        return self._budget.most_bytes

    def add_bytes(self, count: int) -> bool:
        """Count bytes that have arrived. Returns whether to go on at once, without `wait_for_room`."""
        self.size_bytes = size = self.size_bytes + count
        if size <= self.counted_bytes:
            return True
        if size <= SMALL_BYTES:  # nearly all, and none of them is bounded
            self._budget.used_bytes += size - self.counted_bytes
            self.counted_bytes = size
            return True
        self._budget.update_hold(self, size)
        return self._budget.has_room

    def try_reserve_rest(self, rest_bytes: int) -> bool:
        """Set room aside for so many bytes that are still to come. Returns whether there was room."""
        size = self.size_bytes + rest_bytes
        return size <= self.counted_bytes or self._budget.try_reserve(self, size)

    async def wait_for_room(self, rest_bytes: int) -> None:
        """Wait for room for so many bytes that are still to come.

        Raises:
            Overloaded: There was none in time.
        """
        await self._budget.wait_for_room(self, self.size_bytes + rest_bytes)

    async def wait_for_rest(self, declared_bytes: int | None, limit_bytes: int) -> None:
        """Wait for room for what is still to come of a body, and set it aside while the body comes.

        Args:
            declared_bytes: Size of the body, if its head said so.
            limit_bytes: The largest size that it may have.

        Raises:
            Overloaded: There was none in time.
        """
        size_bytes = self.size_bytes
        unknown_bytes = size_bytes + max(size_bytes, UNKNOWN_BYTES)
        whole_bytes = min(unknown_bytes if declared_bytes is None else declared_bytes, limit_bytes)
        await self.wait_for_room(max(whole_bytes - size_bytes, 0))
        self._watch_progress(self.size_bytes)

    def _watch_progress(self, before_bytes: int) -> None:
        """Give the room back that was set aside, unless the body goes on coming."""
        if self.counted_bytes <= self.size_bytes:
            return

        def check_progress() -> None:
            if self.size_bytes - before_bytes < LEAST_PROGRESS_BYTES:
                self.release_unused()
            else:
                self._watch_progress(self.size_bytes)

        asyncio.get_running_loop().call_later(ASIDE_S, check_progress)

    def release_unused(self) -> None:
        """The body is whole: give back what was set aside for more."""
        if self.counted_bytes > self.size_bytes:
            self._budget.update_hold(self, self.size_bytes)

    def release(self) -> None:
        """The request holds its body no more. Calling it twice does no harm."""
        if self.counted_bytes > SMALL_BYTES:
            self._budget.update_hold(self, 0)
        else:
            self._budget.used_bytes -= self.counted_bytes
            self.counted_bytes = 0


@dataclass(frozen=True, slots=True)
class _BodyWaiter:
    """A body that waits.

    Attributes:
        size_bytes: What it grows to.
        turn: Done when it may go on, or is refused.
        timer: Ends the wait.
    """

    size_bytes: int
    turn: asyncio.Future[None]
    timer: asyncio.TimerHandle


def _count_bounded_bytes(size_bytes: int) -> int:
    """Bytes of a body that the budget bounds."""
    return size_bytes - SMALL_BYTES if size_bytes > SMALL_BYTES else 0
