"""A circuit breaker: leaves something that fails alone for a while, then tries it with one call."""

from collections import deque
from collections.abc import Callable

FAILURES = 3
WITHIN_S = 1.0
FIRST_REST_S = 1.0
LONGEST_REST_S = 30.0


class Breaker:
    """Opens after three failures within a second, or after one timeout, and rests before one probe.

    The rest starts at one second and doubles with each failed probe, up to 30. `clock` gives monotonic
    seconds. For use on one event loop.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failures: deque[float] = deque(maxlen=FAILURES)
        self._rest_s = 0.0
        self._rests_until = 0.0
        self._probing = False

    @property
    def closed(self) -> bool:
        """Whether calls may go through freely."""
        return not self._rest_s

    def allows(self) -> bool:
        """Whether a call may be made now. While open, each rest ends in one True: the probe."""
        if self.closed:
            return True
        now = self._clock()
        if now < self._rests_until:
            return False
        # A probe whose caller goes away reports nothing; the next one is due after another rest.
        self._rests_until = now + self._rest_s
        self._probing = True
        return True

    def succeeded(self) -> None:
        """A call went through: close, and forget what failed."""
        self._failures.clear()
        self._rest_s = 0.0
        self._probing = False

    def failed(self, *, timed_out: bool = False) -> None:
        """A call failed. Calls that were under way when the breaker opened change nothing."""
        now = self._clock()
        if not self.closed:
            if self._probing:
                self._rest(now, min(self._rest_s * 2, LONGEST_REST_S))
            return
        self._failures.append(now)
        often = len(self._failures) == FAILURES and now - self._failures[0] <= WITHIN_S
        if timed_out or often:
            self._rest(now, FIRST_REST_S)

    def _rest(self, now: float, seconds: float) -> None:
        self._rest_s = seconds
        self._rests_until = now + seconds
        self._probing = False
