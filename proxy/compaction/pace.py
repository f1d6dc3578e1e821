"""How long summary models have lately taken to answer."""

from collections import OrderedDict

# Weight of the newest call in the average.
NEWEST_SHARE = 0.3
MAX_MODELS = 1_024


class Pace:
    """A moving average for each model of how long a call takes, in seconds."""

    def __init__(self) -> None:
        self._averages: OrderedDict[tuple[str, str], float] = OrderedDict()

    def expected_s(self, url: str, model: str) -> float | None:
        """What the next call may be expected to take; None if nothing is known."""
        return self._averages.get((url, model))

    def took(self, url: str, model: str, seconds: float) -> None:
        """A call was answered after so long."""
        known = self._averages.get((url, model), seconds)
        self._averages[url, model] = known + NEWEST_SHARE * (seconds - known)
        self._averages.move_to_end((url, model))
        while len(self._averages) > MAX_MODELS:
            self._averages.popitem(last=False)

    def given_up(self, url: str, model: str, seconds: float) -> None:
        """A call had no answer yet after so long: it would have taken at least that."""
        if seconds >= self._averages.get((url, model), 0.0):
            self.took(url, model, seconds)
