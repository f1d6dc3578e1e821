"""A circuit breaker: decides when to stop calling something that fails."""

from collections import deque
from collections.abc import Callable

FAILURES = 3
WITHIN_S = 1.0


class CircuitBreaker:
    """Opens after three failures within a second, or after one timeout, and closes with the next success.

    While it is open, its user makes no calls except probes. `clock` gives monotonic seconds. It is for use on
    one event loop.
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
        """Records a successful call: closes the breaker and forgets earlier failures."""
        self._failures.clear()
        self._open = False

    def record_failure(self, *, timed_out: bool = False) -> None:
        """Records a failed call, and opens the breaker after a timeout or too many failures."""
        now = self._clock()
        self._failures.append(now)
        often = len(self._failures) == FAILURES and now - self._failures[0] <= WITHIN_S
        self._open = self._open or timed_out or often
