"""Events: what has happened to a conversation, one line each.

Events are kept for people, by any version that shares the store. So what is missing or of another type is
taken as unknown, and what is not known here is passed over.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

COMPACTED = "compacted"  # a round was made
FAILED = "failed"  # a round was due, and none was made
MEASURED = "measured"  # the upstream has counted the first request that a round went into
UNDONE = "undone"  # a round is not applied any more
MARKED = "marked"  # the next request is to be compacted
PINNED = "pinned"  # a text was pinned
UNPINNED = "unpinned"  # a pinned text was let go
# A round may replace thousands of messages; its event names so many.
MAX_MESSAGE_IDS = 200


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened. Empty and None mean that it is unknown, or does not apply.

    Attributes:
        kind: One of the words above, or that of another version.
        at: Seconds since the epoch.
        conversation: Its id, `c_…`.
        strategy: Name of the strategy.
        round: Number of the round in its chain, from 1.
        place: Where the round's checkpoint is kept (`core.checkpoint.place`), as hex digits.
        reason: What made it due, or why it failed: a short word.
        outcome: How it ended: a short word, such as the response header's status.
        model: The model that wrote the summary.
        tokens_before: Estimated size of the request it was made for.
        tokens_after: Estimated size of what was forwarded instead.
        tokens_real: Size of what was forwarded, as the upstream counted it.
        messages: Number of messages that were replaced.
        message_ids: Their ids, `m_…`; of the first `MAX_MESSAGE_IDS`.
        seconds: How long it took.
        summary: The text that stands in for them.
    """

    kind: str
    at: float
    conversation: str = ""
    strategy: str = ""
    round: int | None = None
    place: str = ""
    reason: str = ""
    outcome: str = ""
    model: str = ""
    tokens_before: int | None = None
    tokens_after: int | None = None
    tokens_real: int | None = None
    messages: int | None = None
    message_ids: tuple[str, ...] = ()
    seconds: float | None = None
    summary: str = ""


def to_fields(event: Event) -> dict[str, Any]:
    """The event as JSON values, without what is unknown."""
    told = {each.name: getattr(event, each.name) for each in fields(event)}
    return {name: value for name, value in told.items() if value not in (None, "", ())}


def from_fields(told: Mapping[str, Any]) -> Event | None:
    """The event that these fields tell of, or None if they do not say what happened and when."""
    kind, at = _text(told.get("kind")), _number(told.get("at"))
    if not kind or at is None:
        return None
    ids = _ids(told.get("message_ids"))
    messages = _whole(told.get("messages"))
    return Event(
        kind=kind,
        at=at,
        conversation=_text(told.get("conversation")),
        strategy=_text(told.get("strategy")),
        round=_whole(told.get("round")),
        place=_text(told.get("place")),
        reason=_text(told.get("reason")),
        outcome=_text(told.get("outcome")),
        model=_text(told.get("model")),
        tokens_before=_whole(told.get("tokens_before")),
        tokens_after=_whole(told.get("tokens_after")),
        tokens_real=_whole(told.get("tokens_real")),
        messages=len(ids) or None if messages is None else messages,
        message_ids=ids,
        seconds=_number(told.get("seconds")),
        summary=_text(told.get("summary")),
    )


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _number(value: object) -> float | None:
    """A finite number, or None; true and false are none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _ids(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        return ()
    return tuple(each for each in value if isinstance(each, str))
