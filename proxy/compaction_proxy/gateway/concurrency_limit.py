"""Limits the number of concurrent requests, so that memory and waiting times stay limited under any load.

A request that finds no free slot waits in a queue for a short time. If no slot becomes free, the proxy
refuses the request and tells the client after how many seconds to retry. Without this limit, many concurrent
requests would all be served so slowly that no client would get its answer in time.
"""

import asyncio
from collections import deque

from compaction_proxy.core.errors import OverloadedError
from compaction_proxy.gateway.body_budget import BodyBudget
from compaction_proxy.gateway.decoder_pool import BodyDecoder

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
        decoder: Decodes the bodies of these requests.
    """

    def __init__(
        self, max_requests: int, queue_s: float = QUEUE_S, body_budget: BodyBudget | None = None
    ) -> None:
        self.body_budget = body_budget or BodyBudget()
        self.decoder = BodyDecoder()
        self._places = max_requests
        self._free = max_requests
        self._queue_s = queue_s
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def active_request_count(self) -> int:
        """The number of requests that are being served."""
        return self._places - self._free

    def try_acquire_slot(self) -> bool:
        """Takes a slot if one is free. Returns False if none is; then the caller may `wait_for_slot`."""
        if self._free == 0:
            return False
        self._free -= 1
        return True

    async def wait_for_slot(self) -> None:
        """Waits for a slot that another request releases, and takes it.

        Raises:
            OverloadedError: No slot became free in time, or too many requests wait already.
        """
        if len(self._waiting) >= self._places:
            raise OverloadedError(RETRY_AFTER_S)
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        acquired = False
        try:
            async with asyncio.timeout(self._queue_s):
                await turn
            acquired = True
        except TimeoutError:
            raise OverloadedError(RETRY_AFTER_S) from None
        finally:
            if not acquired:
                self._abandon_wait(turn)

    def _abandon_wait(self, turn: asyncio.Future[None]) -> None:
        if turn.done() and not turn.cancelled():  # a slot was assigned just when the wait ended
            self.release_slot()
        elif turn in self._waiting:
            self._waiting.remove(turn)

    def release_slot(self) -> None:
        """Frees the slot of an ended request, or gives it to the request that has waited longest."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
