"""Limits the bytes of request bodies that this process holds. All code that reads bodies shares one budget.

"Room" means bytes of the budget that are free.

Bytes count as they arrive, so a client that declares a large body and sends nothing uses none of the budget.
When the budget is used up, a request whose body is incomplete stops reading and waits until there is room for
the whole rest of its body, or for a part of it if the length is not declared (`UNKNOWN_BYTES`). That room is
then reserved, so a request whose body arrives fast enough waits only once. If the body arrives too slowly,
the request loses the part of the reserved room that it has not used. A request that waits longer than
`WAIT_S` seconds is refused. The request that has waited longest is refused first, and its bytes become room
for the next one. So if several half-read bodies block each other, the deadlock ends after `WAIT_S` seconds.

Tenants share the budget: the bodies of one tenant together use at most `TENANT_SHARE` of it, so that the rest
is free for others. A tenant's only body may use all of it.

The budget does not limit the first `SMALL_BYTES` bytes of each body. The limit on concurrent requests
(`ConcurrencyLimiter`) also limits the sum of these bytes.
"""

import asyncio
import sys
from collections import Counter
from typing import Final

from compaction_proxy.core.errors import OverloadedError
from compaction_proxy.support.memory_limit import return_free_memory
from compaction_proxy.support.offload import WORK_OWNER

# The budget does not limit this many bytes at the start of each body, so that small requests do not wait for
# large ones.
SMALL_BYTES: Final = 65_536
# A body waits for room for at most `WAIT_S` seconds. Then its request is refused, and the response asks the
# client to retry after `RETRY_AFTER_S` seconds.
WAIT_S: Final = 5.0
RETRY_AFTER_S: Final = 5
# The largest part of the budget that several bodies of one tenant may use together. It also limits which part
# of the `MAX_WAITING` waiting bodies may be of one tenant.
TENANT_SHARE: Final = 0.75
# While room is reserved for the rest of a body, the progress of this body is checked at this interval, in
# seconds. If fewer than `MIN_PROGRESS_BYTES` bytes have arrived since the last check, the request loses the
# unused room. From then on, its bytes count as they arrive, so a slow client uses no more of the budget than
# it has sent.
PROGRESS_CHECK_S: Final = 2.0
MIN_PROGRESS_BYTES: Final = 512 * 1024
# If a request does not declare the length of its body, room is reserved for as many further bytes as have
# already arrived, but for at least this many bytes.
UNKNOWN_BYTES: Final = 1024 * 1024
# The most bodies that may wait at the same time. Requests with further bodies are refused. The budget counts
# a chunk only after it has arrived, so each waiting body may exceed the budget by one chunk. This number
# limits the sum of these chunks.
MAX_WAITING: Final = 64
# The most bodies that one process decodes in threads at the same time. Further bodies wait. Each decoder may
# use 8 MiB of memory that the budget does not count.
MAX_DECODERS: Final = 2
TOO_MANY_BODIES: Final = "The proxy has no memory left for request bodies. Try again later."

# After the process has held this many bytes of large bodies, it returns their memory to the system as soon as
# it holds none, and this many seconds have passed. For 240 MB of freed memory this took 15 ms.
TRIM_BYTES: Final = 16 * 1024 * 1024
TRIM_DELAY_S: Final = 0.5

# The following constants are used to compute the default budget. This one is the memory, in bytes, that a
# worker uses for its code, tokenizer vocabularies and caches while it holds no large bodies.
PROCESS_BYTES: Final = 256 * 1024 * 1024
# The number of bytes by which the address space of a worker still grows after its start, for tokenizer
# vocabularies and thread stacks, if the worker holds no large bodies.
GROWTH_BYTES: Final = 192 * 1024 * 1024
# The most bytes of memory that the process needs for each byte of a body: for the body itself, and for its
# messages while they are parsed and checked. The peak of resident memory was measured with bodies of 40 MB.
# It was 1.1 times the size of the body if the proxy did not parse the body, and 3 to 5 times its size if it
# did.
COST_FACTOR: Final = 5
# The default budget is at least this many bytes, so that a small machine can still serve most requests.
MIN_DEFAULT_BYTES: Final = 8 * 1024 * 1024


def compute_default_budget(memory_bytes: int | None, address_bytes: int | None, workers: int) -> int:
    """Returns the default budget of one process, in bytes of request bodies.

    This is the memory or the address space that the process has left, whichever is less, divided by
    `COST_FACTOR`. The result is at least `MIN_DEFAULT_BYTES`. If both `memory_bytes` and `address_bytes` are
    None, the function assumes that `PROCESS_BYTES` bytes are left.

    Args:
        memory_bytes: Memory that all workers together may use; None if it is unknown.
        address_bytes: Address space that this process may still allocate; None if it is unlimited.
        workers: The number of processes that share the memory.
    """
    rooms = []
    if memory_bytes is not None:
        rooms.append(memory_bytes // workers - PROCESS_BYTES)
    if address_bytes is not None:
        rooms.append(address_bytes - GROWTH_BYTES)
    return max(min(rooms, default=PROCESS_BYTES) // COST_FACTOR, MIN_DEFAULT_BYTES)


class BodyBudget:
    """The budget for the request bodies of one process. It must be used on one event loop only.

    Args:
        limit_bytes: The most bytes of bodies that the process may hold at the same time. The first
            `SMALL_BYTES` of each body do not count. No body may be larger than this limit, so a request that
            is alone can always be read to its end.
        wait_s: The longest wait for room, in seconds.

    Attributes:
        limit_bytes: The limit that was passed to the constructor.
        used_bytes: Bytes of bodies that the process holds now, including the first `SMALL_BYTES` of each body
            and the reserved room.
        decoder_slots: A semaphore that limits how many bodies are decoded in threads at the same time.
    """

    __slots__ = (
        "_large_bytes",
        "_peak_bytes",
        "_tenant_bytes",
        "_wait_s",
        "_waiting",
        "decoder_slots",
        "limit_bytes",
        "used_bytes",
    )

    def __init__(self, limit_bytes: int = sys.maxsize, wait_s: float = WAIT_S) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.decoder_slots = asyncio.Semaphore(MAX_DECODERS)
        self._large_bytes = 0  # the part of `used_bytes` that `limit_bytes` limits
        self._tenant_bytes: Counter[str] = Counter()  # the same part by tenant
        self._peak_bytes = 0  # the largest value of `_large_bytes` since it was last 0
        self._wait_s = wait_s
        # For each body that waits: the size in bytes for which it needs room, and the future that completes
        # when the room is reserved.
        self._waiting: dict[BodyHold, tuple[int, asyncio.Future[None]]] = {}

    def open_hold(self) -> "BodyHold":
        """Returns a new object that counts the bytes of one request's body.

        The caller must release the object, however the request ends.
        """
        return BodyHold(self)

    def has_room(self, hold: "BodyHold") -> bool:
        """Returns whether a request may read more of its body: no limit is exceeded, and no body waits."""
        return not self._waiting and self._can_add(hold, 0)

    def _can_add(self, hold: "BodyHold", added_bytes: int) -> bool:
        """Returns whether the limits of the budget and of the tenant allow that a body grows."""
        tenant_bytes = self._tenant_bytes[hold.tenant]
        is_alone = tenant_bytes == _count_limited_bytes(hold.counted_bytes)
        return self._large_bytes + added_bytes <= self.limit_bytes and (
            is_alone or tenant_bytes + added_bytes <= TENANT_SHARE * self.limit_bytes
        )

    def set_counted_bytes(self, hold: "BodyHold", counted_bytes: int) -> None:
        """Sets the number of bytes that the budget counts for one request.

        If the number becomes smaller, the method reserves the free room for bodies that wait, beginning with
        the one that has waited longest. It skips bodies for which there is still not enough room.
        """
        before, hold.counted_bytes = hold.counted_bytes, counted_bytes
        self.used_bytes += counted_bytes - before
        if counted_bytes > SMALL_BYTES or before > SMALL_BYTES:
            added_bytes = _count_limited_bytes(counted_bytes) - _count_limited_bytes(before)
            self._large_bytes += added_bytes
            self._tenant_bytes[hold.tenant] += added_bytes
            if not self._tenant_bytes[hold.tenant]:
                del self._tenant_bytes[hold.tenant]
            self._peak_bytes = max(self._peak_bytes, self._large_bytes)
            if not self._large_bytes:
                self._end_peak()
        if self._waiting and counted_bytes < before:
            for waiter, (size_bytes, turn) in list(self._waiting.items()):  # oldest first
                if not turn.done() and self.try_reserve(waiter, size_bytes):
                    del self._waiting[waiter]
                    turn.set_result(None)

    def _end_peak(self) -> None:
        """Lets the process return the memory of the bodies that have just gone, if they were many bytes."""
        peak_bytes, self._peak_bytes = self._peak_bytes, 0
        if peak_bytes >= TRIM_BYTES:
            # The objects of the last request go when its task has ended.
            asyncio.get_running_loop().call_later(TRIM_DELAY_S, return_free_memory)

    def try_reserve(self, hold: "BodyHold", size_bytes: int) -> bool:
        """Reserves room in the budget for a body to grow to `size_bytes` bytes, if there is enough.

        Returns whether there was enough room.
        """
        size_bytes = max(size_bytes, hold.counted_bytes)
        added_bytes = _count_limited_bytes(size_bytes) - _count_limited_bytes(hold.counted_bytes)
        fits = self._can_add(hold, added_bytes)
        if fits:
            self.set_counted_bytes(hold, size_bytes)
        return fits

    async def wait_for_room(self, hold: "BodyHold", size_bytes: int) -> None:
        """Waits until the budget has room for a body to grow to `size_bytes` bytes, and reserves the room.

        Raises:
            OverloadedError: If no room became free in time, or too many bodies wait already. The method has
                then released `hold`.
        """
        if self.try_reserve(hold, size_bytes):
            return
        same_tenant_count = sum(each.tenant == hold.tenant for each in self._waiting)
        if len(self._waiting) >= MAX_WAITING or same_tenant_count >= TENANT_SHARE * MAX_WAITING:
            hold.release()
            raise OverloadedError(RETRY_AFTER_S, TOO_MANY_BODIES)
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiting[hold] = size_bytes, turn
        timer = loop.call_later(self._wait_s, self._refuse_waiter, hold, turn)
        try:
            await turn
        finally:
            timer.cancel()
            self._waiting.pop(hold, None)

    def _refuse_waiter(self, hold: "BodyHold", turn: asyncio.Future[None]) -> None:
        """Refuses a body that has waited too long.

        Frees the body's room immediately, so that the next body may get this room before its own wait ends.
        """
        if not turn.done():
            turn.set_exception(OverloadedError(RETRY_AFTER_S, TOO_MANY_BODIES))
            del self._waiting[hold]
            hold.release()


class BodyHold:
    """The part of the budget that one request uses.

    Args:
        budget: The budget of which this is a part.

    Attributes:
        budget: The same object as the argument.
        size_bytes: Bytes of the request's body that have arrived.
        counted_bytes: Bytes that the budget counts for the request: those that have arrived, and more while
            room is reserved.
        tenant: The tenant whose share of the budget the request uses.
    """

    __slots__ = ("budget", "counted_bytes", "size_bytes", "tenant")

    def __init__(self, budget: BodyBudget) -> None:
        self.budget = budget
        self.size_bytes = self.counted_bytes = 0
        self.tenant = WORK_OWNER.get()

    def add_bytes(self, count_bytes: int) -> bool:
        """Counts bytes that have arrived. Returns False if the caller must wait for room to read more."""
        self.size_bytes += count_bytes
        if self.size_bytes <= self.counted_bytes:
            return True
        self.budget.set_counted_bytes(self, self.size_bytes)
        return self.size_bytes <= SMALL_BYTES or self.budget.has_room(self)

    def try_reserve_rest(self, rest_bytes: int) -> bool:
        """Reserves room in the budget for `rest_bytes` further bytes of the body, if there is enough.

        Returns whether there was enough room.
        """
        return self.budget.try_reserve(self, self.size_bytes + rest_bytes)

    async def wait_for_room(self, rest_bytes: int) -> None:
        """Waits until the budget has room for `rest_bytes` further bytes of the body, and reserves the room.

        Raises:
            OverloadedError: If no room became free in time, or too many bodies wait already.
        """
        await self.budget.wait_for_room(self, self.size_bytes + rest_bytes)

    async def wait_for_rest(self, declared_bytes: int | None, limit_bytes: int) -> None:
        """Waits until the budget has room for the rest of a body, and reserves the room.

        The request later loses the unused room if the body arrives too slowly (`PROGRESS_CHECK_S`).

        Args:
            declared_bytes: The size of the body, as declared by the request. If it is None, the method
                reserves room for as many further bytes as have arrived, but for at least `UNKNOWN_BYTES`.
            limit_bytes: The largest size that the body may have. No room beyond this size is reserved.

        Raises:
            OverloadedError: If no room became free in time, or too many bodies wait already.
        """
        unknown_bytes = self.size_bytes + max(self.size_bytes, UNKNOWN_BYTES)
        whole_bytes = min(unknown_bytes if declared_bytes is None else declared_bytes, limit_bytes)
        await self.wait_for_room(max(whole_bytes - self.size_bytes, 0))
        self._schedule_progress_check()

    def _schedule_progress_check(self) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(PROGRESS_CHECK_S, self._check_progress, self.size_bytes)

    def _check_progress(self, previous_size_bytes: int) -> None:
        """Frees the unused room if the body arrives too slowly.

        Otherwise schedules the next check, unless no unused room is left.
        """
        if self.size_bytes - previous_size_bytes < MIN_PROGRESS_BYTES:
            self.release_unused()
        elif self.counted_bytes > self.size_bytes:
            self._schedule_progress_check()

    def release_unused(self) -> None:
        """Frees the room that is reserved for bytes of the body that have not arrived."""
        if self.counted_bytes > self.size_bytes:
            self.budget.set_counted_bytes(self, self.size_bytes)

    def release(self) -> None:
        """Stops counting the body, because the request no longer holds it. A second call has no effect."""
        if self.counted_bytes:
            self.budget.set_counted_bytes(self, 0)


def _count_limited_bytes(size_bytes: int) -> int:
    """Returns how many bytes of a body of `size_bytes` bytes count toward the budget's `limit_bytes`."""
    return max(size_bytes - SMALL_BYTES, 0)
