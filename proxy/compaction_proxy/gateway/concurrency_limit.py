"""Limits the number of concurrent requests, so that memory and waiting times stay limited under any load.

Each request that is being served holds a slot. A request that finds no free slot waits in a queue for a short
time. If no slot becomes free in this time, the proxy refuses the request and tells the client after how many
seconds to retry. Without this limit, many concurrent requests would all be served so slowly that no client
would get its response in time.

Tenants share the slots: if several tenants send requests, each of them uses at most `TENANT_SHARE` of the
slots, so that requests of others find one. The tenant of a request is the `WORK_OWNER` of its task.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from compaction_proxy.core.errors import OverloadedError
from compaction_proxy.gateway.body_budget import TENANT_SHARE, BodyBudget, BodyHold
from compaction_proxy.support.offload import WORK_OWNER

# A request waits for a slot for at most `QUEUE_S` seconds. Then it is refused, and the response asks the
# client to retry after `RETRY_AFTER_S` seconds.
QUEUE_S = 0.1
RETRY_AFTER_S = 1
# One tenant may use all slots if there are fewer than `MIN_SHARED_SLOTS`, or if no other tenant has sent a
# request in the last `ALONE_S` seconds.
MIN_SHARED_SLOTS = 32
ALONE_S = 300.0


class ConcurrencyLimiter:
    """Limits the number of concurrent requests. It must be used on one event loop only.

    Args:
        max_requests: The most requests that may be served at the same time: the number of slots. The same
            number of further requests may wait for a slot.
        queue_s: The longest wait for a slot, in seconds.
        body_budget: The budget that the bodies of these requests share. None creates a budget without a
            limit.

    Attributes:
        body_budget: The budget that the bodies of these requests share.
        active_request_count: The number of requests that are being served.
    """

    def __init__(
        self, max_requests: int, queue_s: float = QUEUE_S, body_budget: BodyBudget | None = None
    ) -> None:
        self.body_budget = body_budget or BodyBudget()
        self.active_request_count = 0
        self._max_requests = max_requests
        is_shared = max_requests >= MIN_SHARED_SLOTS
        self._tenant_limit = int(TENANT_SHARE * max_requests) if is_shared else 2 * max_requests
        # The number of requests of each tenant that hold a slot or wait for one.
        self._tenant_counts: Counter[str] = Counter()
        # The tenant of the latest request, and the time at which this tenant last followed another one.
        self._latest_tenant = ""
        self._changed_at_s = -ALONE_S
        # One future for each request that waits for a slot, the one that has waited longest first. When a
        # request gets a slot, the result of its future is set.
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._queue_s = queue_s

    @asynccontextmanager
    async def admit_request(self) -> AsyncIterator[BodyHold]:
        """Waits for a slot, and yields the object that counts the bytes of the request's body.

        At the end of the block, frees the slot and releases the object.

        Raises:
            OverloadedError: Under the conditions that `acquire_slot` documents.
        """
        await self.acquire_slot()
        hold = self.body_budget.open_hold()
        try:
            yield hold
        finally:
            hold.release()
            self.release_slot()

    async def acquire_slot(self) -> None:
        """Takes a slot. If none is free, first waits until another request releases one.

        Raises:
            OverloadedError: If no slot became free in time, too many requests wait already, or the tenant
                uses its share and is not alone.
        """
        is_full = self.active_request_count >= self._max_requests
        tenant = WORK_OWNER.get()
        if tenant != self._latest_tenant:
            if self._latest_tenant:
                self._changed_at_s = time.monotonic()
            self._latest_tenant = tenant
        if is_full and len(self._waiting) >= self._max_requests:
            raise OverloadedError(RETRY_AFTER_S)
        is_over_share = self._tenant_counts[tenant] >= self._tenant_limit
        if is_over_share and time.monotonic() - self._changed_at_s < ALONE_S:
            raise OverloadedError(RETRY_AFTER_S)
        self._tenant_counts[tenant] += 1
        if not is_full:
            self.active_request_count += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        has_slot = False
        try:
            async with asyncio.timeout(self._queue_s):
                await turn
            has_slot = True
        except TimeoutError:
            raise OverloadedError(RETRY_AFTER_S) from None
        finally:
            if not has_slot:
                self._leave_queue(turn)

    def _leave_queue(self, turn: asyncio.Future[None]) -> None:
        """Stops waiting for a slot. If the request got one at the same moment, the next request gets it."""
        if turn.done() and not turn.cancelled():
            self.release_slot()
        else:
            self._discount_tenant()
            with suppress(ValueError):  # `release_slot` may have dropped it already
                self._waiting.remove(turn)

    def _discount_tenant(self) -> None:
        """Counts one request less for the tenant of the current task."""
        tenant = WORK_OWNER.get()
        self._tenant_counts[tenant] -= 1
        if not self._tenant_counts[tenant]:
            del self._tenant_counts[tenant]

    def release_slot(self) -> None:
        """Frees the slot of a request that has ended, or gives it to the request that has waited longest.

        The task that took the slot must call this method, because the slot counts for its tenant.
        """
        self._discount_tenant()
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.active_request_count -= 1
