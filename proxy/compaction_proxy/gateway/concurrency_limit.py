"""How many requests may be under way at once, so that memory and waiting stay bounded under any load.

Who comes when all places are taken waits for a moment, in order; then it is told when to come back. Without
that, each of many requests would be served so slowly that none of them is of use.
"""

import asyncio
from collections import deque

from compaction_proxy.core.errors import OverloadedError
from compaction_proxy.gateway.body_budget import BodyBudget
from compaction_proxy.gateway.body_decoder import BodyDecoder

# The longest wait for a place, in seconds, and when to come back after it in vain.
QUEUE_S = 0.1
RETRY_AFTER_S = 1


class ConcurrencyLimiter:
    """Places for requests, on one event loop.

    Args:
        places: Requests that may be under way at once; as many more may wait.
        queue_s: The longest wait, in seconds.
        bodies: The budget that the bodies of these requests share; None: one without a bound.

    Attributes:
        bodies: As given.
        decoder: Decodes the bodies of these requests.
    """

    def __init__(self, places: int, queue_s: float = QUEUE_S, bodies: BodyBudget | None = None) -> None:
        self.bodies = bodies or BodyBudget()
        self.decoder = BodyDecoder()
        self._places = places
        self._free = places
        self._queue_s = queue_s
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def active_requests(self) -> int:
        """Requests under way."""
        return self._places - self._free

    def try_acquire(self) -> bool:
        """Take a place if there is one; who is told no may `wait_for_slot`."""
        if self._free == 0:
            return False
        self._free -= 1
        return True

    async def wait_for_slot(self) -> None:
        """Take the place of somebody who leaves.

        Raises:
            Overloaded: Nobody left in time, or too many wait already.
        """
        if len(self._waiting) >= self._places:
            raise OverloadedError(RETRY_AFTER_S)
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        came = False
        try:
            async with asyncio.timeout(self._queue_s):
                await turn
            came = True
        except TimeoutError:
            raise OverloadedError(RETRY_AFTER_S) from None
        finally:
            if not came:
                self._abandon_wait(turn)

    def _abandon_wait(self, turn: asyncio.Future[None]) -> None:
        if turn.done() and not turn.cancelled():  # a place came in the very moment of giving up
            self.release_slot()
        elif turn in self._waiting:
            self._waiting.remove(turn)

    def release_slot(self) -> None:
        """Give a place back, to whoever waits longest."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
