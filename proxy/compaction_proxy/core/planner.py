"""What to take: from a policy and a conversation to what shall replace which spans. No effects.

All indices count the client's non-privileged messages; all sizes are counted tokens.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from compaction_proxy.core.checkpoint import Checkpoint
from compaction_proxy.core.ledger.client_forms import find_user_messages
from compaction_proxy.core.message import (
    Message,
    Span,
    find_latest_user_message,
    find_unit_start,
    find_unit_stop,
)
from compaction_proxy.core.strategies import KeepRules, Policy
from compaction_proxy.core.trigger import GrowthCounts

# Hardly any round reaches a target that leaves less than this share of what T leaves beside the fixed part.
SCARCE_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class PlanConstraints:
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
    def free_tokens(self) -> int:
        """What T leaves beside what no round removes."""
        return max(0, self.trigger - self.fixed)

    @property
    def tokens_left(self) -> int:
        """What the target leaves beside the fixed part; a share of what is free where that is more."""
        return max((self.target or 0) - self.fixed, int(SCARCE_SHARE * self.free_tokens))

    @property
    def is_scarce(self) -> bool:
        """Whether the target leaves so little beside the fixed part that hardly any round reaches it."""
        return self.target is not None and self.target - self.fixed < SCARCE_SHARE * self.free_tokens


def find_tail_start(
    messages: Sequence[Message],
    effective: Sequence[Message],
    policy: Policy,
    earlier: Checkpoint | None,
    constraints: PlanConstraints,
    *,
    at_least: bool = False,
) -> int:
    """Where the tail begins that the policy keeps: a unit edge, in front of the last unit at least.

    `at_least` asks for the tail that is kept in any case, even if the target leaves room for more.
    """
    forwarded = [
        0 if k in constraints.stay else size for k, size in enumerate(list_forwarded_sizes(messages, earlier))
    ]
    keep = policy.keep
    stop = min(
        _find_first_kept(messages, effective, keep.messages, earlier),
        _find_iteration_start(messages, keep.iterations),
        _find_fitting_tail_start(
            messages, forwarded, keep, _compute_tail_size(policy, constraints, least=at_least)
        ),
    )
    last = _find_edge(messages, len(messages) - 1) if messages else 0
    if constraints.moving > len(messages) - last:
        last = _find_edge(messages, len(messages) - constraints.moving)
    elif policy.frame.request is not None and find_latest_user_message(messages) == len(messages) - 1:
        last = len(messages)  # the latest user message moves into the stand-in
    return _find_edge(messages, min(stop, last))


def list_chain_records(checkpoint: Checkpoint) -> tuple[Message, ...]:
    """The frozen records of a checkpoint's chain, oldest first."""
    count = len(checkpoint.rounds)
    holders = (
        put for span, put in checkpoint.span_replacements if span.start not in checkpoint.edited and put
    )
    return next(holders, ())[:count]


class _TailSize(NamedTuple):
    """How large a tail is, in tokens.

    Attributes:
        most: Units are added up to this size.
        floor: Below this one, another unit is added if the tail then takes no more than what is
            `tokens_left`.
        left: What the target leaves beside the rest.
    """

    most: int
    floor: int = 0
    left: int = 0


def _compute_tail_size(policy: Policy, constraints: PlanConstraints, *, least: bool) -> _TailSize | None:
    """Size of the tail that the policy keeps, or at least keeps; None where it names none.

    A limit in tokens has a floor, which holds even if the target leaves less: the same share of what is free.
    """
    limit = policy.keep.tail
    if limit is None:
        return None
    if constraints.target is None:
        return _TailSize(limit.compute_tokens(constraints.trigger))
    if limit.tokens is None:
        return _TailSize(max(0, constraints.target - constraints.fixed - constraints.records))
    left = max(0, constraints.tokens_left - constraints.records)
    floor = limit.compute_tokens(constraints.free_tokens)
    most = floor if least else max(floor, min(limit.compute_tokens(constraints.trigger), left))
    return _TailSize(*(max(0, each - constraints.growth) for each in (most, floor, left)))


def list_forwarded_sizes(messages: Sequence[Message], earlier: Checkpoint | None) -> list[int]:
    """Tokens of each message as it is forwarded; 0 for one that is gone."""
    edits, gone = (earlier.edited_messages, earlier.removed_indices) if earlier else ({}, frozenset())
    return [0 if k in gone else edits.get(k, each).tokens for k, each in enumerate(messages)]


def _find_edge(messages: Sequence[Message], at: int) -> int:
    """The unit edge at or before `at`."""
    return find_unit_start(messages, at) if at < len(messages) else len(messages)


def _find_next_edge(messages: Sequence[Message], at: int) -> int:
    """The first unit edge behind `at`."""
    return find_unit_stop(messages, find_unit_start(messages, at))


def _find_first_kept(
    messages: Sequence[Message], effective: Sequence[Message], keep: int, earlier: Checkpoint | None
) -> int:
    """Index of the first of the client's messages that are among the last `keep` of the effective list."""
    gone, edited = (earlier.removed_indices, earlier.edited) if earlier else (frozenset(), frozenset())
    pieces = earlier.span_replacements if earlier else ()
    ours = {id(each) for span, put in pieces if span.start not in edited for each in put}
    tail = effective[max(0, len(effective) - keep) :] if keep else ()
    kept = sum(1 for message in tail if not message.is_fixed and id(message) not in ours)
    present = [index for index in range(len(messages)) if index not in gone]
    return present[-kept] if kept else len(messages)


def _find_iteration_start(messages: Sequence[Message], keep: int) -> int:
    """Index of the assistant message that begins the last `keep` iterations."""
    said = [index for index, message in enumerate(messages) if message.role == "assistant"]
    return said[-keep] if keep and len(said) >= keep else (0 if keep else len(messages))


def _find_fitting_tail_start(
    messages: Sequence[Message], forwarded: Sequence[int], keep: KeepRules, size: _TailSize | None
) -> int:
    """Index of the first of the newest units that fit the size; where all do, the rest decides."""
    if size is None:
        return len(messages)
    start, total = len(messages), 0
    while start:
        edge = start - 1 if keep.reaching else _find_edge(messages, start - 1)
        more = total + sum(forwarded[edge:start])
        if keep.reaching and more >= size.most:
            return edge
        if more > size.most and not (total < size.floor and more <= size.left):
            return start
        start, total = edge, more
    return len(messages)


# Runs smaller than this are not worth a summary, in tokens.
LEAST_RUN_TOKENS = 48
# A run's summary is expected to take this share of it.
RUN_SHARE = 0.3


class ReplacementKind(NamedTuple):
    """What will stand in for a span.

    Attributes:
        kind: `before`: what stood there already. `text`: the summary of a group. `records`: a chain of
            frozen records. `mask` and `cap`: the message itself, shortened. `nothing`.
        at: Of `before` the number of the earlier span, of `text` and `records` that of the group, of `mask`
            and `cap` the index of the message.
    """

    kind: Literal["before", "text", "records", "mask", "cap", "nothing"]
    at: int = 0


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """One round to be made.

    Attributes:
        round: Its number, 1 for the first; that of the round before where nothing is summarised.
        length: The round will speak of the messages `[0, length)`.
        spans: What will be replaced, sorted and disjoint.
        fills: What will stand in for each.
        groups: Indices of what is summarised: one text is wanted for each group.
        carried: Index of the user message whose text moves into the stand-in.
        frozen: Number of the earlier records that stay.
    """

    round: int
    length: int
    spans: tuple[Span, ...]
    fills: tuple[ReplacementKind, ...]
    groups: tuple[tuple[int, ...], ...] = ()
    carried: int | None = None
    frozen: int = 0

    @property
    def fresh_indices(self) -> tuple[int, ...]:
        """Indices of what no earlier round has replaced, in order."""
        return tuple(index for group in self.groups for index in group)

    @property
    def removed_indices(self) -> tuple[int, ...]:
        """Indices of what this round takes out of the effective list, in order."""
        return tuple(
            index
            for span, fill in zip(self.spans, self.fills, strict=True)
            if fill.kind not in {"before", "mask", "cap"}
            for index in range(span.start, span.stop)
        )


def plan_round(
    messages: Sequence[Message],
    effective: Sequence[Message],
    policy: Policy,
    earlier: Checkpoint | None,
    constraints: PlanConstraints,
) -> RoundPlan | None:
    """The round that the policy would make now, or None if there is nothing to take.

    `messages` are the client's non-privileged ones, `effective` is the whole effective list, privileged
    messages and stand-ins included, and `earlier` the checkpoint that has been applied for it.
    """
    if len(effective) <= policy.least_messages:
        return None
    stop = find_tail_start(messages, effective, policy, earlier, constraints)
    gone = earlier.removed_indices if earlier else frozenset()
    taken = _list_indices_to_remove(messages, policy, gone, stop)
    fresh = tuple(index for index in taken if index not in gone)
    carried = latest if (latest := find_latest_user_message(messages)) in taken else None
    if not fresh or fresh == (carried,):
        return None
    if policy.takes == "runs":
        return _plan_run_summaries(messages, policy, earlier, constraints, fresh)
    if policy.earlier == "leave":
        return _plan_added_round(stop, earlier, (fresh,), is_summarized=policy.summary is not None)
    if policy.earlier == "freeze":
        return _plan_chained_round(messages, policy, earlier, constraints, taken)
    return _plan_integrated_round(stop, earlier, taken, fresh, carried)


def _list_indices_to_remove(
    messages: Sequence[Message], policy: Policy, gone: frozenset[int], stop: int
) -> list[int]:
    """What does not stay. What is gone stays gone, even where more is kept now."""
    latest = find_latest_user_message(messages) if policy.frame.request is None else None
    task = find_task_index(messages) if policy.keep.task else None
    return sorted((gone | set(range(stop))) - {latest, task})


def count_growth(messages: Sequence[Message], earlier: Checkpoint | None) -> GrowthCounts:
    """What the client's non-privileged list has gained since the last round was made."""
    new = messages[max(earlier.length, earlier.listed) if earlier else 0 :]
    return GrowthCounts(
        messages=len(new),
        turns=sum(1 for message in new if message.role == "user" and not message.answers),
        iterations=sum(1 for message in new if message.role == "assistant"),
    )


def find_task_index(messages: Sequence[Message]) -> int | None:
    """Index of the task, the first message that the user has written; None if there is none."""
    return next(find_user_messages(messages), None)


def _iter_adjacent_spans(indices: Iterable[int]) -> Iterator[Span]:
    """The spans that sorted indices form."""
    start = last = None
    for index in indices:
        if last is not None and start is not None and index != last + 1:
            yield Span(start, last + 1)
            start = index
        start = index if start is None else start
        last = index
    if start is not None and last is not None:
        yield Span(start, last + 1)


def _list_earlier_replacements(earlier: Checkpoint | None) -> list[tuple[Span, ReplacementKind]]:
    """What the earlier round put where, to be left as it is."""
    return [(span, ReplacementKind("before", k)) for k, span in enumerate(earlier.spans if earlier else ())]


def _list_edits_outside(
    earlier: Checkpoint | None, taken: Sequence[int]
) -> list[tuple[Span, ReplacementKind]]:
    """Messages that the earlier round shortened and this one leaves in place."""
    edited = (earlier.edited if earlier else frozenset()).difference(taken)
    return [(span, fill) for span, fill in _list_earlier_replacements(earlier) if span.start in edited]


def _build_next_plan(
    stop: int,
    earlier: Checkpoint | None,
    pieces: Sequence[tuple[Span, ReplacementKind]],
    groups: Sequence[Sequence[int]],
) -> RoundPlan:
    """The round behind the earlier one. It never speaks of less: the deepest round is the one that holds."""
    placed = sorted(pieces)
    return RoundPlan(
        round=(earlier.round if earlier else 0) + 1,
        length=max(stop, placed[-1][0].stop, earlier.length if earlier else 0),
        spans=tuple(span for span, _ in placed),
        fills=tuple(fill for _, fill in placed),
        groups=tuple(tuple(group) for group in groups),
    )


def _plan_integrated_round(
    stop: int,
    earlier: Checkpoint | None,
    taken: Sequence[int],
    fresh: Sequence[int],
    carried: int | None,
) -> RoundPlan:
    """One stand-in for all that is taken, earlier rounds included."""
    first, *others = _iter_adjacent_spans(taken)
    pieces = [(first, ReplacementKind("text")), *((span, ReplacementKind("nothing")) for span in others)]
    made = _build_next_plan(stop, earlier, [*pieces, *_list_edits_outside(earlier, taken)], (fresh,))
    return replace(made, carried=carried)


def _plan_added_round(
    stop: int, earlier: Checkpoint | None, groups: Sequence[Sequence[int]], *, is_summarized: bool
) -> RoundPlan:
    """These groups replaced beside what the earlier round did; edits inside them go."""
    new: list[tuple[Span, ReplacementKind]] = []
    for group_number, group in enumerate(groups):
        first, *others = _iter_adjacent_spans(group)
        new.append(
            (first, ReplacementKind("text", group_number) if is_summarized else ReplacementKind("nothing"))
        )
        new += [(span, ReplacementKind("nothing")) for span in others]
    inside = {index for group in groups for index in group}
    before = [each for each in _list_earlier_replacements(earlier) if each[0].start not in inside]
    return _build_next_plan(stop, earlier, [*before, *new], groups if is_summarized else ())


def _plan_run_summaries(
    messages: Sequence[Message],
    policy: Policy,
    earlier: Checkpoint | None,
    constraints: PlanConstraints,
    fresh: Sequence[int],
) -> RoundPlan | None:
    """Runs of assistant and tool messages, the earliest first, until the request is under T."""
    groups: list[list[int]] = []
    size, forwarded = constraints.size, list_forwarded_sizes(messages, earlier)
    for run in _iter_assistant_runs(messages, fresh):
        tokens = sum(forwarded[index] for index in run)
        if tokens < LEAST_RUN_TOKENS:
            continue
        groups.append(run)
        size -= int(tokens * (1 - RUN_SHARE))
        if size < (constraints.target or constraints.trigger) or policy.one_run:
            break
    if not groups:
        return None
    return _plan_added_round(groups[-1][-1] + 1, earlier, groups, is_summarized=True)


def _iter_assistant_runs(messages: Sequence[Message], indices: Sequence[int]) -> Iterator[list[int]]:
    """Runs of neighbouring assistant and tool messages among these."""
    run: list[int] = []
    for index in indices:
        ours = messages[index].role == "assistant" or bool(messages[index].answers)
        if run and (not ours or index != run[-1] + 1):
            yield run
            run = []
        if ours:
            run.append(index)
    if run:
        yield run


def _plan_chained_round(
    messages: Sequence[Message],
    policy: Policy,
    earlier: Checkpoint | None,
    constraints: PlanConstraints,
    taken: Sequence[int],
) -> RoundPlan:
    """A further record of a growing chain; or all of it anew, once it has grown too long."""
    rounds = earlier.rounds if earlier else ()
    anew = _is_chain_too_long(policy, earlier, constraints)
    kept = 0 if anew else len(rounds)
    gone = earlier.removed_indices if earlier and not anew else frozenset()
    spans = tuple(_iter_adjacent_spans(taken))
    task = find_task_index(messages)
    holder = next((k for k, span in enumerate(spans) if task is None or span.start > task), 0)
    pieces = [
        (span, ReplacementKind("records" if k == holder else "nothing")) for k, span in enumerate(spans)
    ]
    fresh = [index for index in taken if index not in gone]
    made = _build_next_plan(taken[-1] + 1, earlier, [*pieces, *_list_edits_outside(earlier, taken)], (fresh,))
    return replace(made, frozen=kept)


def _is_chain_too_long(policy: Policy, earlier: Checkpoint | None, constraints: PlanConstraints) -> bool:
    if earlier is None or policy.layout is None or not earlier.rounds:
        return False
    records = list_chain_records(earlier)
    if constraints.anew:
        return True
    if len(records) == 1:  # one record instead of one would be no shorter
        return False
    most = policy.layout.chain_share * (constraints.target or constraints.trigger)
    return len(records) >= policy.layout.rounds or sum(each.tokens for each in records) > most


def build_unchanged_plan(earlier: Checkpoint | None) -> RoundPlan:
    """What the earlier round did and nothing more, for `add_edits`."""
    if earlier is None:
        return RoundPlan(0, 0, (), ())
    return RoundPlan(
        round=earlier.round,
        length=earlier.length,
        spans=earlier.spans,
        fills=tuple(fill for _, fill in _list_earlier_replacements(earlier)),
        carried=earlier.carried,
        frozen=len(earlier.rounds),
    )


def add_edits(plan: RoundPlan, edits: Mapping[int, Literal["mask", "cap"]]) -> RoundPlan:
    """The plan with these messages shortened where they stand."""
    new = [(Span(index, index + 1), ReplacementKind(kind, index)) for index, kind in edits.items()]
    pieces = sorted(
        [
            *(
                (span, fill)
                for span, fill in zip(plan.spans, plan.fills, strict=True)
                if span.start not in edits
            ),
            *new,
        ]
    )
    return replace(
        plan,
        length=max(plan.length, pieces[-1][0].stop if pieces else 0),
        spans=tuple(span for span, _ in pieces),
        fills=tuple(fill for _, fill in pieces),
    )
