"""What is known of one model at one upstream, and the window that follows from it."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

from compaction_proxy.providers.calibration import Calibration
from compaction_proxy.providers.windows import known_window

# The limit that follows from a refusal without a number, as a share of the smallest refused size.
REFUSED_SHARE = 0.9


class Learned(NamedTuple):  # made for each answer: a dataclass costs four times as much
    """What is known of one model at one upstream.

    Attributes:
        calibration: How the upstream's count relates to ours.
        window: Largest input that an error named or a silent cut gave away, in tokens; None if none did.
        until: When the window is no longer believed, in seconds since the epoch.
        discovered: The window that the upstream told when it was asked; None if it told none.
        asked_until: When it may be asked again, in seconds since the epoch.
        accepted: The largest input that it answered, if that was more than was known; else 0.
        accepted_until: When that is no longer believed, in seconds since the epoch.
        adds_output_until: Until when the upstream is believed to count the output asked for, too, in seconds
            since the epoch; 0: it is not.
        lacks_compaction_until: Until when the upstream is believed not to answer a compaction trigger, in
            seconds since the epoch; 0: it is not.
        refused_estimate: The smallest request that was refused as too long without a number, in counted
            tokens before calibration; 0 if none was.
        refused_until: When that is no longer believed, in seconds since the epoch.
        accepted_estimate: The largest request that was answered, in the same unit; 0 if none was.
        accepted_estimate_until: When that is no longer believed, in seconds since the epoch.
    """

    calibration: Calibration
    window: int | None = None
    until: float = 0.0
    discovered: int | None = None
    asked_until: float = 0.0
    accepted: int = 0
    accepted_until: float = 0.0
    adds_output_until: float = 0.0
    lacks_compaction_until: float = 0.0
    refused_estimate: int = 0
    refused_until: float = 0.0
    accepted_estimate: int = 0
    accepted_estimate_until: float = 0.0

    @property
    def adds_output(self) -> bool:
        """Whether the upstream refuses a prompt that exceeds the window together with its output."""
        return self.adds_output_until > 0

    def window_for(self, model: str, configured: int | None) -> int:
        """The window to reckon with, in tokens (DESIGN.md §5.5).

        An error may make the configured one smaller (ADR 0009). What was answered makes a discovered or
        shipped one larger, never a configured one.
        """
        window = self.window or (self.told(model) if configured is None else configured)
        if configured is not None:
            window = min(configured, window)
        limit = self.limit_estimate
        return min(window, self.calibration.size(limit)) if limit else window

    @property
    def limit_estimate(self) -> int:
        """The limit that follows from refusals without a number, before calibration; 0 if there were none.

        It is a share of the smallest refused size, and never under the largest accepted one.
        """
        if not self.refused_estimate:
            return 0
        return max(int(REFUSED_SHARE * self.refused_estimate), self.accepted_estimate)

    @property
    def is_limited(self) -> bool:
        """Whether an error or a silent cut has made the window smaller."""
        return self.window is not None or self.refused_estimate > 0

    def add_refused(self, estimate: int, until: float) -> Self:
        """Returns what is known after a refusal without a number.

        Where so much was accepted before, the upstream takes less than it did, and the newer word counts.
        """
        if self.accepted_estimate >= estimate:
            cleared = self._replace(accepted_estimate=0, accepted_estimate_until=0.0)
        else:
            cleared = self
        smallest = min(estimate, self.refused_estimate or estimate)
        return cleared._replace(refused_estimate=smallest, refused_until=until)

    def add_accepted(self, estimate: int, until: float) -> Self:
        """Returns what is known after an answer; the refusal of a request that is no larger is forgotten."""
        if estimate < self.accepted_estimate:
            return self
        known = self._replace(accepted_estimate=estimate, accepted_estimate_until=until)
        if estimate < self.refused_estimate:
            return known
        return known._replace(refused_estimate=0, refused_until=0.0)

    def told(self, model: str) -> int:
        """The window without errors and configuration, in tokens."""
        return max(self.discovered or known_window(model), self.accepted)


def merged(ours: Learned, theirs: Learned, now: float) -> Learned:
    """What two replicas know, taken together."""
    calibration = max(ours.calibration, theirs.calibration, key=lambda each: each.observations)
    newer = max(ours, theirs, key=lambda each: each.accepted_until)
    accepted, since = newer.accepted if newer.accepted_until > now else 0, newer.accepted_until
    believed = [
        each for each in (ours, theirs) if each.window and each.until > now and each.window >= accepted
    ]
    narrower = min(believed, key=lambda each: (each.window or 0, -each.until), default=ours)
    later = max(ours, theirs, key=lambda each: each.asked_until)
    together = Learned(
        calibration,
        narrower.window,
        narrower.until,
        later.discovered,
        later.asked_until,
        accepted,
        since,
        max(ours.adds_output_until, theirs.adds_output_until),
        max(ours.lacks_compaction_until, theirs.lacks_compaction_until),
    )
    return _add_sizes(together, (ours, theirs), now)


def _add_sizes(together: Learned, parts: Sequence[Learned], now: float) -> Learned:
    """Returns the record with the refused and accepted sizes of others, in the order they were learned."""
    sizes = [(each.refused_until, False, each.refused_estimate) for each in parts]
    sizes += [(each.accepted_estimate_until, True, each.accepted_estimate) for each in parts]
    for until, is_accepted, estimate in sorted(sizes):
        if estimate and until > now:
            add = together.add_accepted if is_accepted else together.add_refused
            together = add(estimate, until)
    return together


def to_fields(learned: Learned) -> dict[str, object]:
    """The record as JSON values, for an envelope."""
    return {
        "window": learned.window,
        "until": learned.until,
        "calibration": learned.calibration.to_dict(),
        "discovered": learned.discovered,
        "asked_until": learned.asked_until,
        "accepted": learned.accepted,
        "accepted_until": learned.accepted_until,
        "adds_output_until": learned.adds_output_until,
        "lacks_compaction_until": learned.lacks_compaction_until,
        "refused_estimate": learned.refused_estimate,
        "refused_until": learned.refused_until,
        "accepted_estimate": learned.accepted_estimate,
        "accepted_estimate_until": learned.accepted_estimate_until,
    }


def from_fields(fields: Mapping[str, Any]) -> Learned:
    """The record that `to_fields` wrote, by this version or an earlier one.

    Raises:
        KeyError, ValueError, TypeError, OverflowError: It is none of ours.
    """
    return Learned(
        Calibration.from_dict(fields["calibration"]),
        _tokens(fields["window"]),
        float(fields["until"]),
        _tokens(fields.get("discovered")),
        float(fields.get("asked_until", 0.0)),
        _tokens(fields.get("accepted")) or 0,
        float(fields.get("accepted_until", 0.0)),
        float(fields.get("adds_output_until", 0.0)),
        float(fields.get("lacks_compaction_until", 0.0)),
        _tokens(fields.get("refused_estimate")) or 0,
        float(fields.get("refused_until", 0.0)),
        _tokens(fields.get("accepted_estimate")) or 0,
        float(fields.get("accepted_estimate_until", 0.0)),
    )


def _tokens(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None
