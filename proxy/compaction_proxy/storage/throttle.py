"""Says what goes wrong now and then, not each time: a full disk fails every write."""

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from compaction_proxy.core.errors import StoreUnavailable

AGAIN_AFTER_S = 60.0
MAX_KEYS = 100

_Key = TypeVar("_Key", bound=Hashable)


class Throttle(Generic[_Key]):
    """Lets a report through at once, and more reports with the same key once a minute at most.

    Args:
        max_keys: Keys that are remembered; beyond it, those that were reported longest ago are forgotten.
        clock: Monotonic seconds.
    """

    def __init__(self, *, max_keys: int = MAX_KEYS, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_keys = max_keys
        self._clock = clock
        # When a key may be reported again, and the reports that were suppressed since the last one.
        self._known: OrderedDict[_Key, tuple[float, int]] = OrderedDict()

    def count_suppressed(self, key: _Key) -> int | None:
        """How many reports with this key were suppressed since the last one; None: suppress this one."""
        quiet_until, suppressed = self._known.get(key, (0.0, 0))
        now = self._clock()
        if now < quiet_until:
            self._known[key] = (quiet_until, suppressed + 1)
            return None
        self._known[key] = (now + AGAIN_AFTER_S, 0)
        self._known.move_to_end(key)
        if len(self._known) > self._max_keys:
            self._known.popitem(last=False)
        return suppressed


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
        self._throttle = Throttle[str](clock=clock)

    def __call__(self, error: StoreUnavailable) -> None:
        """A failure."""
        suppressed = self._throttle.count_suppressed(error.reason)
        if suppressed is not None:
            self._tell(error, suppressed)
