"""How long summary models have lately taken to answer.

As the breaker does, it tells a model apart by who asks it and where: what one tenant's account waits for must
not decide how long another's requests wait.
"""

from collections import OrderedDict

from compaction_proxy.compaction.summary_breaker import Place

# Weight of the newest call in the average.
NEWEST_SHARE = 0.3
MAX_HELD = 10_000


class Pace:
    """A moving average for each model of how long a call takes, in seconds."""

    def __init__(self) -> None:
        self._averages: OrderedDict[Place, float] = OrderedDict()

    def expected_s(self, place: Place) -> float | None:
        """What the next call may be expected to take; None if nothing is known."""
        return self._averages.get(place)

    def took(self, place: Place, seconds: float) -> None:
        """A call was answered after so long."""
        known = self._averages.get(place, seconds)
        self._averages[place] = known + NEWEST_SHARE * (seconds - known)
        self._averages.move_to_end(place)
        while len(self._averages) > MAX_HELD:
            self._averages.popitem(last=False)

    def given_up(self, place: Place, seconds: float) -> None:
        """A call had no answer yet after so long: it would have taken at least that."""
        if seconds >= self._averages.get(place, 0.0):
            self.took(place, seconds)
