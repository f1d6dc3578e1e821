"""A circuit breaker: tells when something that fails is to be left alone."""

from collections import deque
from collections.abc import Callable

FAILURES = 3
WITHIN_S = 1.0


class CircuitBreaker:
    """Opens after three failures within a second, or after one timeout, and closes with the next success.

    Who uses it leaves the failing thing alone while it is open, but for a probe. `clock` gives monotonic
    seconds. For use on one event loop.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failures: deque[float] = deque(maxlen=FAILURES)
        self._open = False

    @property
    def is_closed(self) -> bool:
        """Whether calls may be made."""
        return not self._open

    def record_success(self) -> None:
        """A call went through: close, and forget what failed."""
        self._failures.clear()
        self._open = False

    def record_failure(self, *, timed_out: bool = False) -> None:
        """A call failed."""
        now = self._clock()
        self._failures.append(now)
        often = len(self._failures) == FAILURES and now - self._failures[0] <= WITHIN_S
        self._open = self._open or timed_out or often
