"""Leaving a summary model alone that keeps failing, for longer and longer.

A model is told apart by who asks it and where: one tenant's revoked key is no other tenant's trouble.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from compaction_proxy.core.errors import SummaryFailed

FAILURES = 3
FIRST_REST_S = 30.0
LONGEST_REST_S = 600.0
MAX_HELD = 10_000
# Reasons that waiting does not mend within a few calls: the key is refused, or the account is empty.
_LASTING = frozenset({"http-401", "http-402", "http-403"})
_PASSING = frozenset({"http-408", "http-425", "http-429", "unreachable", "timeout"})


class Place(NamedTuple):
    """A summary model as one tenant sees it."""

    tenant: str
    url: str
    model: str


@dataclass(slots=True)
class _Trouble:
    """What is known of a model that fails; `until` is on the clock, `rest_s` 0 while it is still asked."""

    failures: int = 0
    rest_s: float = 0.0
    until: float = 0.0
    probed: bool = False


def passing(reason: str) -> bool:
    """Whether a failure says that the model cannot be had just now, rather than something of the call."""
    return reason in _PASSING or reason.startswith("http-5")


class SummaryBreaker:
    """Opens after three failures of that kind in a row, or after one refused key; then it rests.

    The first rest is 30 s, and twice the last one, up to 600 s, where the one probe that follows fails. For
    use on one event loop; the 10,000 newest troubles are remembered.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._troubles: OrderedDict[Place, _Trouble] = OrderedDict()

    @contextmanager
    def admitted(self, place: Place) -> Iterator[None]:
        """Calls inside are let through: all of them, or, after a rest, those of one piece of work.

        Raises:
            SummaryFailed: `breaker-open`.
        """
        trouble = self._troubles.get(place)
        if trouble is None or not trouble.rest_s:
            yield
            return
        if trouble.probed or self.rests(place):
            raise SummaryFailed("breaker-open")
        trouble.probed = True
        try:
            yield
        finally:
            trouble.probed = False

    def rests(self, place: Place) -> bool:
        """Whether the model is to be left alone right now."""
        trouble = self._troubles.get(place)
        return trouble is not None and self._clock() < trouble.until

    @property
    def resting(self) -> bool:
        """Whether any model is being left alone right now."""
        now = self._clock()
        return any(now < trouble.until for trouble in self._troubles.values())

    def note(self, place: Place, reason: str) -> None:
        """Learn from a call: its reason of failure, or "" if it was answered.

        What is garbage says nothing of the model behind it; any other answer shows that it is there.
        """
        if reason in _LASTING or passing(reason):
            self._failed(place, lasting=reason in _LASTING)
        elif reason != "garbage":
            self._troubles.pop(place, None)

    def _failed(self, place: Place, *, lasting: bool) -> None:
        trouble = self._troubles.setdefault(place, _Trouble())
        self._troubles.move_to_end(place)
        while len(self._troubles) > MAX_HELD:
            self._troubles.popitem(last=False)
        trouble.failures += 1
        if self.rests(place):
            return  # a call that was under way already
        if lasting or trouble.rest_s or trouble.failures >= FAILURES:
            trouble.rest_s = min(max(FIRST_REST_S, 2 * trouble.rest_s), LONGEST_REST_S)
            trouble.until = self._clock() + trouble.rest_s
