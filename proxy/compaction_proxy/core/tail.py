"""Where the tail begins that a round leaves as it is, and how much room there is.

All indices count the client's non-privileged messages; all sizes are counted tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from compaction_proxy.core.checkpoint import Checkpoint
from compaction_proxy.core.message import Message, latest_user, unit_start, unit_stop
from compaction_proxy.core.strategies import Keep, Policy

# Hardly any round reaches a target that leaves less than this share of what T leaves beside the fixed part.
SCARCE_SHARE = 0.25


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
        growth: Of what will have come by the time the round is put in force: the newest part of its tail.
        stay: Indices of the messages that `fixed` counts; the tail is not charged for them again.
        moving: How many of the last messages the client moves (`core.mover`): they stay out of every span.
    """

    trigger: int
    target: int | None
    size: int
    fixed: int = 0
    records: int = 0
    anew: bool = False
    growth: int = 0
    stay: frozenset[int] = frozenset()
    moving: int = 0

    @property
    def free(self) -> int:
        """What T leaves beside what no round removes."""
        return max(0, self.trigger - self.fixed)

    @property
    def left(self) -> int:
        """What the target leaves beside the fixed part; a share of what is free where that is more."""
        return max((self.target or 0) - self.fixed, int(SCARCE_SHARE * self.free))

    @property
    def is_scarce(self) -> bool:
        """Whether the target leaves so little beside the fixed part that hardly any round reaches it."""
        return self.target is not None and self.target - self.fixed < SCARCE_SHARE * self.free


def boundary(
    messages: Sequence[Message],
    effective: Sequence[Message],
    policy: Policy,
    earlier: Checkpoint | None,
    room: Room,
    *,
    least: bool = False,
) -> int:
    """Where the tail begins that the policy keeps: a unit edge, in front of the last unit at least.

    `least` asks for the tail that is kept in any case, even if the target leaves room for more.
    """
    forwarded = [0 if k in room.stay else size for k, size in enumerate(sizes(messages, earlier))]
    keep = policy.keep
    stop = min(
        _first_kept(messages, effective, keep.messages, earlier),
        _iteration(messages, keep.iterations),
        _tail_start(messages, forwarded, keep, _tail_size(policy, room, least=least)),
    )
    last = _edge(messages, len(messages) - 1) if messages else 0
    if room.moving > len(messages) - last:
        last = _edge(messages, len(messages) - room.moving)
    elif policy.frame.request is not None and latest_user(messages) == len(messages) - 1:
        last = len(messages)  # the latest user message moves into the stand-in
    return _edge(messages, min(stop, last))


def chain_records(checkpoint: Checkpoint) -> tuple[Message, ...]:
    """The frozen records of a checkpoint's chain, oldest first."""
    count = len(checkpoint.rounds)
    holders = (put for span, put in checkpoint.pieces if span.start not in checkpoint.edited and put)
    return next(holders, ())[:count]


class _TailSize(NamedTuple):
    """How large a tail is, in tokens.

    Attributes:
        most: Units are added up to this size.
        floor: Below this one, another unit is added if the tail then takes no more than what is `left`.
        left: What the target leaves beside the rest.
    """

    most: int
    floor: int = 0
    left: int = 0


def _tail_size(policy: Policy, room: Room, *, least: bool) -> _TailSize | None:
    """Size of the tail that the policy keeps, or at least keeps; None where it names none.

    A limit in tokens has a floor, which holds even if the target leaves less: the same share of what is free.
    """
    limit = policy.keep.tail
    if limit is None:
        return None
    if room.target is None:
        return _TailSize(limit.of(room.trigger))
    if limit.tokens is None:
        return _TailSize(max(0, room.target - room.fixed - room.records))
    left = max(0, room.left - room.records)
    floor = limit.of(room.free)
    most = floor if least else max(floor, min(limit.of(room.trigger), left))
    return _TailSize(*(max(0, each - room.growth) for each in (most, floor, left)))


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


def _tail_start(
    messages: Sequence[Message], forwarded: Sequence[int], keep: Keep, size: _TailSize | None
) -> int:
    """Index of the first of the newest units that fit the size; where all do, the rest decides."""
    if size is None:
        return len(messages)
    start, total = len(messages), 0
    while start:
        edge = start - 1 if keep.reaching else _edge(messages, start - 1)
        more = total + sum(forwarded[edge:start])
        if keep.reaching and more >= size.most:
            return edge
        if more > size.most and not (total < size.floor and more <= size.left):
            return start
        start, total = edge, more
    return len(messages)
