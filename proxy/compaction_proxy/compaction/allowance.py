"""How many summary calls a tenant may have made in an hour, so that none spends without end.

Long calls count as several. So a bound on calls is one on tokens, too.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from itertools import repeat
from math import ceil

from compaction_proxy.core.errors import SummaryFailed

HOUR_S = 3_600.0
MAX_TENANTS = 10_000
# Tokens of a call that counts as one; each further so many count as one more.
CALL_TOKENS = 100_000


class Allowance:
    """Counts each tenant's calls of the last hour; the 10,000 tenants that called last are remembered.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._calls: OrderedDict[str, deque[float]] = OrderedDict()

    def take(self, tenant: str, calls_per_hour: int, tokens: int = 0) -> None:
        """Book one call.

        Args:
            tenant: Whose it is.
            calls_per_hour: How many the tenant may make; 0: no bound, and nothing is booked. The last one may
                be a long one.
            tokens: What it may take, prompt and answer together.

        Raises:
            SummaryFailed: `budget`; there is none left.
        """
        if not calls_per_hour:
            return
        now = self._clock()
        calls = self._calls.setdefault(tenant, deque())
        self._calls.move_to_end(tenant)
        while len(self._calls) > MAX_TENANTS:
            self._calls.popitem(last=False)
        while calls and calls[0] <= now - HOUR_S:
            calls.popleft()
        if len(calls) >= calls_per_hour:
            raise SummaryFailed("budget")
        calls.extend(repeat(now, max(1, ceil(tokens / CALL_TOKENS))))
