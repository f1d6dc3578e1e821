"""A circuit breaker: decides when to stop calling something that fails."""

from collections import deque
from collections.abc import Callable

MAX_FAILURES = 3
FAILURE_WINDOW_S = 1.0


class CircuitBreaker:
    """Opens after three failures within a second, or after one timeout, and closes with the next success.

    While the breaker is open, callers should only make a trial call from time to time. The breaker does not
    enforce this. `clock` returns monotonic seconds. Use a breaker on one event loop only.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failures: deque[float] = deque(maxlen=MAX_FAILURES)
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
        often = len(self._failures) == MAX_FAILURES and now - self._failures[0] <= FAILURE_WINDOW_S
        self._open = self._open or timed_out or often
