"""What is known of one model at one upstream, and the window that follows from it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from proxy.core.calibration import Calibration
from proxy.core.windows import known_window


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

    @property
    def adds_output(self) -> bool:
        """Whether the upstream refuses a prompt that exceeds the window together with its output."""
        return self.adds_output_until > 0

    def window_for(self, model: str, configured: int | None) -> int:
        """The window to reckon with, in tokens (DESIGN.md §5.5).

        An error may make the configured one smaller (ADR 0009). What was answered makes a discovered or
        shipped one larger, never a configured one.
        """
        if configured is not None:
            return min(configured, self.window or configured)
        return self.window or self.told(model)

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
    return Learned(
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
    )


def _tokens(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None
