"""Where the tail begins that a round leaves as it is, and how much room there is.

All indices count the client's non-privileged messages; all sizes are counted tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.core.checkpoint import Checkpoint
from proxy.core.message import Message, latest_user, unit_start, unit_stop
from proxy.core.policy import Keep, Policy


@dataclass(frozen=True, slots=True)
class Room:
    """How large things are and should become.

    Attributes:
        trigger: T.
        target: What to shrink to; None where the strategy has no target.
        size: Of the request with its effective list.
        fixed: Of what no round removes: privileged messages, definitions, task, latest user message.
        records: What will stand in for what is removed.
        anew: Whether a chain of records says what no longer holds, and has to be written anew.
    """

    trigger: int
    target: int | None
    size: int
    fixed: int = 0
    records: int = 0
    anew: bool = False


def boundary(
    messages: Sequence[Message],
    effective: Sequence[Message],
    policy: Policy,
    earlier: Checkpoint | None,
    room: Room,
) -> int:
    """Where the tail begins that the policy keeps: a unit edge, in front of the last unit at least."""
    forwarded = sizes(messages, earlier)
    keep = policy.keep
    stop = min(
        _first_kept(messages, effective, keep.messages, earlier),
        _iteration(messages, keep.iterations),
        _tail_start(messages, forwarded, keep, _tail_tokens(policy, room)),
    )
    last = _edge(messages, len(messages) - 1) if messages else 0
    moves = policy.frame.request is not None and latest_user(messages) == len(messages) - 1
    return _edge(messages, stop if moves else min(stop, last))


def chain_records(checkpoint: Checkpoint) -> tuple[Message, ...]:
    """The frozen records of a checkpoint's chain, oldest first."""
    count = len(checkpoint.rounds)
    holders = (put for span, put in checkpoint.pieces if span.start not in checkpoint.edited and put)
    return next(holders, ())[:count]


def _tail_tokens(policy: Policy, room: Room) -> int | None:
    """Tokens of the tail: its own limit, and what the target leaves beside the rest."""
    if policy.keep.tail is None:
        return None
    own = policy.keep.tail.of(room.trigger)
    if room.target is None:
        return own
    left = max(0, room.target - room.fixed - room.records)
    return left if policy.keep.tail.tokens is None else min(own, left)


def sizes(messages: Sequence[Message], earlier: Checkpoint | None) -> list[int]:
    """Tokens of each message as it is forwarded; 0 for one that is gone."""
    edits, gone = (earlier.edits, earlier.gone) if earlier else ({}, frozenset())
    return [0 if k in gone else edits.get(k, each).tokens for k, each in enumerate(messages)]


def _edge(messages: Sequence[Message], at: int) -> int:
    """The unit edge at or before `at`."""
    return unit_start(messages, at) if at < len(messages) else len(messages)


def _next_edge(messages: Sequence[Message], at: int) -> int:
    """The first unit edge behind `at`."""
    return unit_stop(messages, unit_start(messages, at))


def _first_kept(
    messages: Sequence[Message], effective: Sequence[Message], keep: int, earlier: Checkpoint | None
) -> int:
    """Index of the first of the client's messages that are among the last `keep` of the effective list."""
    gone, edited = (earlier.gone, earlier.edited) if earlier else (frozenset(), frozenset())
    pieces = earlier.pieces if earlier else ()
    ours = {id(each) for span, put in pieces if span.start not in edited for each in put}
    tail = effective[max(0, len(effective) - keep) :] if keep else ()
    kept = sum(1 for message in tail if not message.is_fixed and id(message) not in ours)
    present = [index for index in range(len(messages)) if index not in gone]
    return present[-kept] if kept else len(messages)


def _iteration(messages: Sequence[Message], keep: int) -> int:
    """Index of the assistant message that begins the last `keep` iterations."""
    said = [index for index, message in enumerate(messages) if message.role == "assistant"]
    return said[-keep] if keep and len(said) >= keep else (0 if keep else len(messages))


def _tail_start(messages: Sequence[Message], forwarded: Sequence[int], keep: Keep, tokens: int | None) -> int:
    """Index of the first of the newest units within so many tokens; where all are, the rest decides."""
    if tokens is None:
        return len(messages)
    total = 0
    for index in range(len(messages) - 1, -1, -1):
        total += forwarded[index]
        if keep.reaching and total >= tokens:
            return index
        if total > tokens:
            return _next_edge(messages, index)
    return len(messages)
