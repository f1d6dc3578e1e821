"""Says what goes wrong with the store now and then, not each time: a full disk fails every write."""

import time
from collections.abc import Callable

from proxy.errors import StoreUnavailable

AGAIN_AFTER_S = 60.0


class Throttled:
    """Tells of a failure at once, and of more for the same reason once a minute at most.

    Args:
        tell: Is given the failure, and how many of its reason it was not given since the last.
        clock: Monotonic seconds.
    """

    def __init__(
        self, tell: Callable[[StoreUnavailable, int], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tell = tell
        self._clock = clock
        self._told: dict[str, tuple[float, int]] = {}  # reasons are words of ours, so there are few

    def __call__(self, error: StoreUnavailable) -> None:
        """A failure."""
        quiet_until, suppressed = self._told.get(error.reason, (0.0, 0))
        now = self._clock()
        if now < quiet_until:
            self._told[error.reason] = (quiet_until, suppressed + 1)
            return
        self._told[error.reason] = (now + AGAIN_AFTER_S, 0)
        self._tell(error, suppressed)
