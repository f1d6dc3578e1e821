"""What to take: from a policy and a conversation to the spans to replace. A decision without effects."""

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.core.checkpoint import Checkpoint
from proxy.core.message import Message, Span, latest_user, units
from proxy.core.policy import Policy
from proxy.core.trigger import Gained


@dataclass(frozen=True, slots=True)
class Plan:
    """One round to be made. Indices count non-privileged messages.

    Attributes:
        round: Its number, 1 for the first.
        length: The round will speak of the messages `[0, length)`.
        spans: What will be replaced, sorted and disjoint; the first gets the stand-in.
        fresh: Indices of what no earlier round has summarised, in order.
    """

    round: int
    length: int
    spans: tuple[Span, ...]
    fresh: tuple[int, ...]


def _without(span: Span, index: int | None) -> tuple[Span, ...]:
    """The span less one index, as the one or two spans that remain."""
    if index is None or not span.start <= index < span.stop:
        return (span,)
    parts = (Span(span.start, index), Span(index + 1, span.stop))
    return tuple(part for part in parts if part.start < part.stop)


def _boundary(messages: Sequence[Message], at: int) -> int:
    """The unit edge at or before `at`."""
    return max((unit.start for unit in units(messages) if unit.start <= at), default=0)


def _tail(
    messages: Sequence[Message], effective: Sequence[Message], keep: int, earlier: Checkpoint | None
) -> int:
    """Where the tail begins: the last `keep` messages of the effective list, back to a unit edge."""
    ours = {id(stand_in) for stand_in in earlier.stand_ins} if earlier else set()
    tail = effective[max(0, len(effective) - keep) :]
    kept = sum(1 for message in tail if not message.privileged and id(message) not in ours)
    return _boundary(messages, len(messages) - kept)


def plan(
    messages: Sequence[Message], effective: Sequence[Message], policy: Policy, earlier: Checkpoint | None
) -> Plan | None:
    """The round that the policy would make now, or None if there is nothing to take.

    Args:
        messages: The client's non-privileged messages.
        effective: The whole effective list, privileged messages and stand-ins included.
        policy: The strategy.
        earlier: The checkpoint that has been applied, if any.
    """
    done = earlier.length if earlier else 0
    stop = _tail(messages, effective, policy.keep_messages, earlier)
    if len(effective) <= policy.keep_messages + 1 or stop <= done:
        return None
    latest = latest_user(messages)
    spans = _without(Span(0, stop), latest)
    fresh = tuple(
        index
        for span in spans
        for index in range(span.start, span.stop)
        if not (earlier and earlier.covers(index))
    )
    if not fresh:
        return None
    return Plan(round=(earlier.round if earlier else 0) + 1, length=stop, spans=spans, fresh=fresh)


def gained(messages: Sequence[Message], earlier: Checkpoint | None) -> Gained:
    """What the client's non-privileged list has gained since the last round was made."""
    new = messages[max(earlier.length, earlier.listed) if earlier else 0 :]
    return Gained(
        messages=len(new),
        turns=sum(1 for message in new if message.role == "user" and not message.answers),
        iterations=sum(1 for message in new if message.role == "assistant"),
    )
