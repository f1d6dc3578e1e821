"""Limits the number of concurrent requests, so that memory and waiting times stay limited under any load.

A request that finds no free slot waits in a queue for a short time. If no slot becomes free, the proxy
refuses the request and tells the client after how many seconds to retry. Without this limit, many concurrent
requests would all be served so slowly that no client would get its response in time.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from compaction_proxy.core.errors import OverloadedError
from compaction_proxy.gateway.body_budget import BodyBudget, BodyHold

# The longest wait for a slot, and the time after which a refused client should retry, in seconds.
QUEUE_S = 0.1
RETRY_AFTER_S = 1


class ConcurrencyLimiter:
    """Limits the number of concurrent requests. For use on one event loop.

    Args:
        max_requests: The most requests that may be served at once. The same number of further requests may
            wait.
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
        self._slots = asyncio.Semaphore(max_requests)
        self._max_waiting = max_requests
        self._waiting_count = 0
        self._queue_s = queue_s

    @asynccontextmanager
    async def admit_request(self) -> AsyncIterator[BodyHold]:
        """Waits for a slot, and yields the object that counts the bytes of the request's body.

        Frees the slot and releases the object at the end.

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
        """Takes a slot, at once if one is free. Else waits until another request releases one.

        Raises:
            OverloadedError: If no slot became free in time, or too many requests wait already.
        """
        if self._slots.locked():
            if self._waiting_count >= self._max_waiting:
                raise OverloadedError(RETRY_AFTER_S)
            self._waiting_count += 1
            try:
                async with asyncio.timeout(self._queue_s):
                    await self._slots.acquire()
            except TimeoutError:
                raise OverloadedError(RETRY_AFTER_S) from None
            finally:
                self._waiting_count -= 1
        else:
            await self._slots.acquire()  # returns without waiting
        self.active_request_count += 1

    def release_slot(self) -> None:
        """Frees the slot of an ended request. The request that has waited longest gets it."""
        self.active_request_count -= 1
        self._slots.release()
