"""Plans compactions: decides from a policy and a conversation which spans get which replacements.

The module also predicts the ids of the checkpoints that result from plans. It carries out no plan. All
indices count only the client's messages that are not fixed. All sizes are in tokens, as the proxy counts them
before calibration.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal, NamedTuple

from compaction_proxy.core.checkpoint import EXTRACT_WRITER, Checkpoint, build_checkpoint_id
from compaction_proxy.core.ledger.client_forms import find_user_messages
from compaction_proxy.core.message import (
    Message,
    Span,
    find_latest_user_message,
    find_unit_start,
)
from compaction_proxy.core.strategies import KeepRules, Policy
from compaction_proxy.core.trigger import GrowthCounts

# The target is the size to which a compaction shrinks the request. No compaction removes the fixed part of
# the request (`PlanConstraints.fixed_tokens`), so it is first deducted from the target and from T. The target
# is scarce if the rest of it is smaller than this share of the rest of T. Hardly any compaction reaches a
# scarce target.
SCARCE_SHARE = 0.25
# In a small window, a compaction leaves at least half of the rest of T, up to this number of tokens. A few
# thousand tokens cost little, and the model often still needs them (docs/quality.md).
LEAST_CONTEXT_TOKENS = 4_000


@dataclass(frozen=True, slots=True)
class PlanConstraints:
    """The sizes that a plan has to respect, and the messages that it must not replace.

    Attributes:
        trigger_tokens: T.
        target_tokens: Size to which the compaction shrinks the request; None if the strategy has no target.
        request_tokens: Size of the request with its effective list.
        fixed_tokens: Size of the parts that this compaction cannot remove: fixed messages (privileged
            messages and project instructions), tool definitions, the task, the latest user message, and the
            messages that the client moves.
        replacement_tokens: Expected size of the replacements of the removed messages.
        must_rewrite_chain: Whether the chain must be written anew because its records state things that are
            no longer true.
        growth_tokens: Expected size of the messages that the client adds before the compaction is applied.
            They will be the newest part of the tail of the compaction.
        staying_indices: Indices of the messages whose size is part of `fixed_tokens`. They count as 0 in the
            size of the tail.
        moving_count: Number of last messages that the client moves (`core.mover`). They belong to no span.
    """

    trigger_tokens: int
    target_tokens: int | None
    request_tokens: int
    fixed_tokens: int = 0
    replacement_tokens: int = 0
    must_rewrite_chain: bool = False
    growth_tokens: int = 0
    staying_indices: frozenset[int] = frozenset()
    moving_count: int = 0

    @property
    def free_tokens(self) -> int:
        """T less `fixed_tokens`, and at least 0."""
        return max(0, self.trigger_tokens - self.fixed_tokens)

    @property
    def target_tokens_left(self) -> int:
        """The target less `fixed_tokens`, and at least the larger of two limits.

        One is the share `SCARCE_SHARE` of `free_tokens`. The other is half of `free_tokens`, up to
        `LEAST_CONTEXT_TOKENS`.
        """
        half_tokens = min(self.free_tokens // 2, LEAST_CONTEXT_TOKENS)
        least_tokens = max(int(SCARCE_SHARE * self.free_tokens), half_tokens)
        return max((self.target_tokens or 0) - self.fixed_tokens, least_tokens)

    @property
    def is_target_scarce(self) -> bool:
        """Whether hardly any compaction reaches the target.

        The target is then close to `fixed_tokens`, or smaller.
        """
        return (
            self.target_tokens is not None
            and self.target_tokens - self.fixed_tokens < SCARCE_SHARE * self.free_tokens
        )


def find_tail_start(
    messages: Sequence[Message],
    effective: Sequence[Message],
    policy: Policy,
    earlier: Checkpoint | None,
    constraints: PlanConstraints,
    *,
    is_minimum: bool = False,
) -> int:
    """Returns the start of the tail that the policy keeps. The start is a unit edge.

    The tail includes all messages that the client moves. It is empty only if the last message is the user's
    and the policy moves its text into the replacement. Otherwise it includes at least the last unit. With
    `is_minimum`, the tail includes only what must be kept in any case, even if the target leaves room for
    more.
    """
    forwarded = [
        0 if k in constraints.staying_indices else size
        for k, size in enumerate(list_forwarded_sizes(messages, earlier))
    ]
    keep = policy.keep
    stop = min(
        _find_first_kept(messages, effective, keep.messages, earlier),
        _find_iteration_start(messages, keep.iterations),
        _find_fitting_tail_start(
            messages, forwarded, keep, _compute_tail_size(policy, constraints, is_minimum=is_minimum)
        ),
    )
    last = _find_edge_at_or_before(messages, len(messages) - 1) if messages else 0
    if constraints.moving_count > len(messages) - last:
        last = _find_edge_at_or_before(messages, len(messages) - constraints.moving_count)
    elif (
        policy.frame.request_introduction is not None
        and find_latest_user_message(messages) == len(messages) - 1
    ):
        last = len(messages)  # the latest user message moves into the replacement
    return _find_edge_at_or_before(messages, min(stop, last))


def list_chain_records(checkpoint: Checkpoint) -> tuple[Message, ...]:
    """Returns the records in the chain of a checkpoint, oldest first."""
    count = len(checkpoint.rounds)
    holders = (
        replacements
        for span, replacements in checkpoint.span_replacements
        if span.start not in checkpoint.edited and replacements
    )
    return next(holders, ())[:count]


def _compute_tail_size(
    policy: Policy, constraints: PlanConstraints, *, is_minimum: bool
) -> tuple[int, int, int] | None:
    """Computes three limits for the size of the tail, in tokens; None if the policy names no size.

    Newest units are added to the tail as long as it takes at most the first limit. If the tail is then
    smaller than the second limit (the floor), one more unit is added, provided that the tail then takes at
    most the third limit. The third limit is the room that the target leaves for the tail.

    If the policy names a number of tokens, the floor is the policy's limit for a T of `free_tokens`. The
    first limit is never less than the floor, even if the target leaves less room. With `is_minimum`, the
    first limit is the floor. All three limits are then lowered by `growth_tokens`, but not below 0. If the
    policy names no number of tokens or there is no target, the floor is 0, so the third limit has no effect.
    """
    limit = policy.keep.tail
    if limit is None:
        return None
    if constraints.target_tokens is None:
        return limit.compute_tokens(constraints.trigger_tokens), 0, 0
    if limit.tokens is None:
        left = constraints.target_tokens - constraints.fixed_tokens - constraints.replacement_tokens
        return max(0, left), 0, 0
    left_tokens = max(0, constraints.target_tokens_left - constraints.replacement_tokens)
    floor = limit.compute_tokens(constraints.free_tokens)
    max_tokens = (
        floor
        if is_minimum
        else max(floor, min(limit.compute_tokens(constraints.trigger_tokens), left_tokens))
    )
    growth = constraints.growth_tokens
    return max(0, max_tokens - growth), max(0, floor - growth), max(0, left_tokens - growth)


def list_forwarded_sizes(messages: Sequence[Message], earlier: Checkpoint | None) -> list[int]:
    """Returns the size of each message as it is forwarded, in tokens; 0 for a removed message."""
    edits, removed = (earlier.edited_messages, earlier.removed_indices) if earlier else ({}, frozenset())
    return [0 if k in removed else edits.get(k, each).tokens for k, each in enumerate(messages)]


def _find_edge_at_or_before(messages: Sequence[Message], message_index: int) -> int:
    """Returns the last unit edge at or before `message_index`."""
    return find_unit_start(messages, message_index) if message_index < len(messages) else len(messages)


def _find_first_kept(
    messages: Sequence[Message], effective: Sequence[Message], keep_messages: int, earlier: Checkpoint | None
) -> int:
    """Returns the index in `messages` of the first message that is among the last ones of `effective`.

    The last `keep_messages` messages of the effective list count. Fixed messages and replacements among them
    are ignored. If no other message is left, returns the number of all `messages`.
    """
    removed, edited = (earlier.removed_indices, earlier.edited) if earlier else (frozenset(), frozenset())
    pieces = earlier.span_replacements if earlier else ()
    replacement_ids = {
        id(each) for span, replacements in pieces if span.start not in edited for each in replacements
    }
    tail = effective[max(0, len(effective) - keep_messages) :] if keep_messages else ()
    kept_count = sum(1 for message in tail if not message.is_fixed and id(message) not in replacement_ids)
    present = [index for index in range(len(messages)) if index not in removed]
    return present[-kept_count] if kept_count else len(messages)


def _find_iteration_start(messages: Sequence[Message], keep_iterations: int) -> int:
    """Returns the index of the assistant message that begins the last `keep_iterations` iterations.

    Returns 0 if there are fewer iterations, and the number of messages if `keep_iterations` is 0.
    """
    if not keep_iterations:
        return len(messages)
    assistant_indices = [index for index, message in enumerate(messages) if message.role == "assistant"]
    return assistant_indices[-keep_iterations] if len(assistant_indices) >= keep_iterations else 0


def _find_fitting_tail_start(
    messages: Sequence[Message], forwarded: Sequence[int], keep: KeepRules, size: tuple[int, int, int] | None
) -> int:
    """Returns the index at which the tail starts according to its size in tokens alone.

    The tail grows by whole units, the newest first, while it stays within the maximum. While it is smaller
    than the floor, a unit may exceed the maximum if the tail still fits the tokens left. With
    `keep.includes_reaching_message`, the tail grows by messages, and the message that reaches the maximum is
    its first one. If `size` is None, or if all messages fit, the size decides nothing, and the result is the
    number of messages.

    Args:
        messages: The messages that are not fixed.
        forwarded: The tokens that each message takes in the forwarded request.
        keep: What the strategy keeps.
        size: The maximum, the floor and the tokens left (`_compute_tail_size`).
    """
    if size is None:
        return len(messages)
    max_tokens, floor_tokens, tokens_left = size
    start, total = len(messages), 0
    is_stray = False
    while start:
        # A result before a stray result is stray, too. The search for its call would read all of them again.
        if keep.includes_reaching_message or (is_stray and messages[start - 1].answered_call_ids):
            edge = start - 1
        else:
            edge = _find_edge_at_or_before(messages, start - 1)
        is_stray = edge == start - 1 and bool(messages[edge].answered_call_ids)
        larger_total = total + sum(forwarded[edge:start])
        if keep.includes_reaching_message and larger_total >= max_tokens:
            return edge
        if larger_total > max_tokens and not (total < floor_tokens and larger_total <= tokens_left):
            return start
        start, total = edge, larger_total
    return len(messages)


# A group of consecutive assistant and tool messages gets no summary if it has fewer tokens than this.
LEAST_RUN_TOKENS = 48
# The summary of a group of consecutive assistant and tool messages is expected to take this share of the
# tokens of the group.
RUN_SUMMARY_SHARE = 0.3


class PlannedReplacement(NamedTuple):
    """The plan for the replacement of one span.

    Attributes:
        kind: `before` keeps the replacement of the earlier compaction. `text` is the summary of a group of
            messages. `records` are the records of a chain. `mask` and `cap` shorten the message itself.
            `nothing` removes the span without a replacement.
        reference_index: For `before`, the position of the span in the earlier checkpoint, from 0. For `text`
            and `records`, the position of the group in `RoundPlan.groups`, from 0. For `mask` and `cap`, the
            index of the message. For `nothing`, 0.
    """

    kind: Literal["before", "text", "records", "mask", "cap", "nothing"]
    reference_index: int = 0


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """The plan of one compaction.

    Attributes:
        round: Number of the compaction, from 1. A plan that repeats the earlier compaction has the number of
            that compaction, or 0 if there was none.
        length: The checkpoint will be made for the messages `[0, length)`.
        spans: The spans to replace, sorted and disjoint.
        planned_replacements: The plan for the replacement of each span.
        groups: Indices of the messages to summarise, in groups. Each group gets one summary.
        carried_index: Index of the user message whose text moves into the replacement; None if no text moves.
        frozen_record_count: Number of earlier records that stay unchanged at the start of the chain.
    """

    round: int
    length: int
    spans: tuple[Span, ...]
    planned_replacements: tuple[PlannedReplacement, ...]
    groups: tuple[tuple[int, ...], ...] = ()
    carried_index: int | None = None
    frozen_record_count: int = 0

    @property
    def summarized_indices(self) -> tuple[int, ...]:
        """Indices of the messages to summarise, in order."""
        return tuple(index for group in self.groups for index in group)

    @property
    def removed_indices(self) -> tuple[int, ...]:
        """Indices of the messages that this compaction removes from the effective list, in order."""
        return tuple(
            index
            for span, fill in zip(self.spans, self.planned_replacements, strict=True)
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
    """Plans the compaction that the policy would make now, or returns None if there is nothing to replace.

    Args:
        messages: The client's messages that are not fixed.
        effective: The whole effective list, with fixed messages and replacements.
        policy: The policy of the strategy.
        earlier: The checkpoint that was applied to build the effective list; None if there was none.
        constraints: The sizes and messages that limit the plan.
    """
    if len(effective) <= policy.least_messages:
        return None
    stop = find_tail_start(messages, effective, policy, earlier, constraints)
    removed = earlier.removed_indices if earlier else frozenset()
    to_remove = _list_indices_to_remove(messages, policy, removed, stop)
    fresh = tuple(index for index in to_remove if index not in removed)
    carried = latest if (latest := find_latest_user_message(messages)) in to_remove else None
    if not fresh or fresh == (carried,):
        return None
    if policy.removal_scope == "runs":
        return _plan_run_summaries(messages, policy, earlier, constraints, fresh)
    if policy.earlier_rounds == "leave":
        return _plan_added_round(stop, earlier, (fresh,), is_summarized=policy.summary is not None)
    if policy.earlier_rounds == "freeze":
        return _plan_chained_round(messages, policy, earlier, constraints, to_remove)
    return _plan_integrated_round(stop, earlier, to_remove, fresh, carried)


def _list_indices_to_remove(
    messages: Sequence[Message], policy: Policy, removed_indices: frozenset[int], tail_start: int
) -> list[int]:
    """Returns the indices of the messages to remove, in order.

    Messages that earlier compactions have removed are included, even if the policy would keep them now. The
    task and the latest user message are left out if the policy keeps them.
    """
    latest = find_latest_user_message(messages) if policy.frame.request_introduction is None else None
    task = find_task_index(messages) if policy.keep.keeps_task else None
    return sorted((removed_indices | set(range(tail_start))) - {latest, task})


def count_growth(messages: Sequence[Message], earlier: Checkpoint | None) -> GrowthCounts:
    """Counts the messages, turns and iterations that the client has added since the last compaction."""
    new = messages[max(earlier.length, earlier.listed) if earlier else 0 :]
    return GrowthCounts(
        messages=len(new),
        turns=sum(1 for message in new if message.role == "user" and not message.answered_call_ids),
        iterations=sum(1 for message in new if message.role == "assistant"),
    )


def find_task_index(messages: Sequence[Message]) -> int | None:
    """Returns the index of the task, the first message that the user has written; None if there is none."""
    return next(find_user_messages(messages), None)


def _iter_adjacent_spans(indices: Iterable[int]) -> Iterator[Span]:
    """Yields one span for each run of consecutive numbers in the sorted indices."""
    # In a run of consecutive numbers, the difference between a number and its position in the list is
    # constant.
    for _, run in groupby(enumerate(indices), key=lambda item: item[1] - item[0]):
        members = [index for _, index in run]
        yield Span(members[0], members[-1] + 1)


def _list_earlier_replacements(earlier: Checkpoint | None) -> list[tuple[Span, PlannedReplacement]]:
    """Returns the spans of the earlier compaction, each with a plan that keeps its replacement."""
    return [
        (span, PlannedReplacement("before", k)) for k, span in enumerate(earlier.spans if earlier else ())
    ]


def _list_edits_outside(
    earlier: Checkpoint | None, removed_indices: Sequence[int]
) -> list[tuple[Span, PlannedReplacement]]:
    """Returns the spans of messages that the earlier compaction shortened and this one does not remove.

    Each span comes with a plan that keeps its replacement.
    """
    edited = (earlier.edited if earlier else frozenset()).difference(removed_indices)
    return [(span, fill) for span, fill in _list_earlier_replacements(earlier) if span.start in edited]


def _build_next_plan(
    stop: int,
    earlier: Checkpoint | None,
    pieces: Sequence[tuple[Span, PlannedReplacement]],
    groups: Sequence[Sequence[int]],
    carried_index: int | None = None,
    frozen_record_count: int = 0,
) -> RoundPlan:
    """Builds the plan of the compaction after the earlier one.

    The plan's `length` is never less than the length of the earlier checkpoint. A shorter checkpoint would
    never be applied, because the longest matching checkpoint is always chosen.
    """
    placed = sorted(pieces)
    return RoundPlan(
        round=(earlier.round if earlier else 0) + 1,
        length=max(stop, placed[-1][0].stop, earlier.length if earlier else 0),
        spans=tuple(span for span, _ in placed),
        planned_replacements=tuple(fill for _, fill in placed),
        groups=tuple(tuple(group) for group in groups),
        carried_index=carried_index,
        frozen_record_count=frozen_record_count,
    )


def _plan_integrated_round(
    tail_start: int,
    earlier: Checkpoint | None,
    removed_indices: Sequence[int],
    fresh_indices: Sequence[int],
    carried_index: int | None,
) -> RoundPlan:
    """Plans one replacement for all removed messages, including those of earlier compactions."""
    first, *others = _iter_adjacent_spans(removed_indices)
    pieces = [
        (first, PlannedReplacement("text")),
        *((span, PlannedReplacement("nothing")) for span in others),
    ]
    pieces += _list_edits_outside(earlier, removed_indices)
    return _build_next_plan(tail_start, earlier, pieces, (fresh_indices,), carried_index)


def _plan_added_round(
    tail_start: int, earlier: Checkpoint | None, groups: Sequence[Sequence[int]], *, is_summarized: bool
) -> RoundPlan:
    """Plans one replacement for each group of messages, and keeps the replacements of the earlier compaction.

    If the earlier compaction shortened a message that is now in a group, that edit is dropped. If
    `is_summarized` is false, the groups are removed without a replacement.
    """
    new: list[tuple[Span, PlannedReplacement]] = []
    for group_number, group in enumerate(groups):
        first, *others = _iter_adjacent_spans(group)
        text = PlannedReplacement("text", group_number)
        new.append((first, text if is_summarized else PlannedReplacement("nothing")))
        new += [(span, PlannedReplacement("nothing")) for span in others]
    inside = {index for group in groups for index in group}
    earlier_pieces = [each for each in _list_earlier_replacements(earlier) if each[0].start not in inside]
    return _build_next_plan(tail_start, earlier, [*earlier_pieces, *new], groups if is_summarized else ())


def _plan_run_summaries(
    messages: Sequence[Message],
    policy: Policy,
    earlier: Checkpoint | None,
    constraints: PlanConstraints,
    fresh_indices: Sequence[int],
) -> RoundPlan | None:
    """Plans summaries of runs of assistant and tool messages, earliest first.

    A run is an unbroken sequence of such messages. Runs are added until the request is expected to be smaller
    than the target, or than T if there is no target. If the policy demands it (`one_run`), only one run is
    added. Returns None if all runs are too small.
    """
    groups: list[list[int]] = []
    size, forwarded = constraints.request_tokens, list_forwarded_sizes(messages, earlier)
    fitting = (k for k in fresh_indices if messages[k].role == "assistant" or messages[k].answered_call_ids)
    for span in _iter_adjacent_spans(fitting):
        tokens = sum(forwarded[span.start : span.stop])
        if tokens < LEAST_RUN_TOKENS:
            continue
        groups.append(list(range(span.start, span.stop)))
        size -= int(tokens * (1 - RUN_SUMMARY_SHARE))
        if size < (constraints.target_tokens or constraints.trigger_tokens) or policy.one_run:
            break
    if not groups:
        return None
    return _plan_added_round(groups[-1][-1] + 1, earlier, groups, is_summarized=True)


def _plan_chained_round(
    messages: Sequence[Message],
    policy: Policy,
    earlier: Checkpoint | None,
    constraints: PlanConstraints,
    removed_indices: Sequence[int],
) -> RoundPlan:
    """Plans one more record for the chain.

    If the chain must be written anew, plans one record in place of all its records.
    """
    continued = None if _is_chain_too_long(policy, earlier, constraints) else earlier
    earlier_removed = continued.removed_indices if continued else frozenset()
    spans = tuple(_iter_adjacent_spans(removed_indices))
    task = find_task_index(messages)
    holder = next((k for k, span in enumerate(spans) if task is None or span.start > task), 0)
    pieces = [
        (span, PlannedReplacement("records" if k == holder else "nothing")) for k, span in enumerate(spans)
    ]
    fresh = [index for index in removed_indices if index not in earlier_removed]
    pieces += _list_edits_outside(earlier, removed_indices)
    frozen = len(continued.rounds) if continued else 0
    return _build_next_plan(removed_indices[-1] + 1, earlier, pieces, (fresh,), frozen_record_count=frozen)


def _is_chain_too_long(policy: Policy, earlier: Checkpoint | None, constraints: PlanConstraints) -> bool:
    if earlier is None or policy.layout is None or not earlier.rounds:
        return False
    records = list_chain_records(earlier)
    if constraints.must_rewrite_chain:
        return True
    if len(records) == 1:  # replacing one record by one record would save nothing
        return False
    max_tokens = policy.layout.chain_share * (constraints.target_tokens or constraints.trigger_tokens)
    return len(records) >= policy.layout.rounds or sum(each.tokens for each in records) > max_tokens


def build_unchanged_plan(earlier: Checkpoint | None) -> RoundPlan:
    """Builds a plan that repeats the earlier compaction. `add_edits` can add edits to such a plan."""
    if earlier is None:
        return RoundPlan(0, 0, (), ())
    return RoundPlan(
        round=earlier.round,
        length=earlier.length,
        spans=earlier.spans,
        planned_replacements=tuple(fill for _, fill in _list_earlier_replacements(earlier)),
        carried_index=earlier.carried,
        frozen_record_count=len(earlier.rounds),
    )


def add_edits(plan: RoundPlan, edits: Mapping[int, Literal["mask", "cap"]]) -> RoundPlan:
    """Returns the plan with edits added. An edit shortens a message, which stays at its place.

    `edits` gives the kind of each edit by the index of the message.
    """
    earlier = zip(plan.spans, plan.planned_replacements, strict=True)
    pieces = [(span, fill) for span, fill in earlier if span.start not in edits]
    pieces += [(Span(index, index + 1), PlannedReplacement(kind, index)) for index, kind in edits.items()]
    pieces.sort()
    return replace(
        plan,
        length=max(plan.length, pieces[-1][0].stop if pieces else 0),
        spans=tuple(span for span, _ in pieces),
        planned_replacements=tuple(fill for _, fill in pieces),
    )


def format_checkpoint_variant(*, extract: bool, record_count: int, edited_indices: Collection[int]) -> str:
    """Formats the `variant` of a checkpoint id, which distinguishes checkpoints for the same spans.

    Args:
        extract: Whether code made the summary without a model.
        record_count: Number of records in the chain.
        edited_indices: Indices of the messages that are shortened in place.
    """
    marks = (["extract"] if extract else []) + ([f"rounds-{record_count}"] if record_count else [])
    return ",".join([*marks, *(f"edited-{index}" for index in sorted(edited_indices))])


def compute_checkpoint_id(checkpoint: Checkpoint | None, prefix_digests: Sequence[bytes]) -> bytes:
    """Computes the 64-byte id of a checkpoint; empty if there is none.

    `prefix_digests` are the prefix digests of the messages for which the checkpoint was made.
    """
    if checkpoint is None:
        return b""
    variant = format_checkpoint_variant(
        extract=checkpoint.writer == EXTRACT_WRITER,
        record_count=len(checkpoint.rounds),
        edited_indices=checkpoint.edited,
    )
    return build_checkpoint_id(
        prefix_digests[checkpoint.length - 1], checkpoint.exact, checkpoint.spans, variant
    )


def list_edited_indices(plan: RoundPlan, earlier: Checkpoint | None) -> frozenset[int]:
    """Returns the indices of the messages that are shortened in place once the plan is carried out.

    These are the messages that the plan itself shortens, and those that stay as the earlier compaction
    shortened them.
    """
    earlier_edits = earlier.edited if earlier else frozenset()
    return frozenset(
        span.start
        for span, fill in zip(plan.spans, plan.planned_replacements, strict=True)
        if fill.kind in {"mask", "cap"} or (fill.kind == "before" and span.start in earlier_edits)
    )


def predict_checkpoint_id(
    plan: RoundPlan,
    earlier: Checkpoint | None,
    prefix_digests: Sequence[bytes],
    exact_digest: bytes,
    *,
    extract: bool,
) -> bytes:
    """Predicts the id of the checkpoint that results if a plan is carried out.

    Args:
        plan: The plan.
        earlier: The checkpoint that is in force before the plan is carried out; None if there is none.
        prefix_digests: Prefix digests of the messages.
        exact_digest: Exact digest of the first `plan.length` messages.
        extract: Whether code will make the summary without a model.
    """
    chained = any(fill.kind == "records" for fill in plan.planned_replacements)
    rounds = plan.frozen_record_count + (1 if chained else 0)
    variant = format_checkpoint_variant(
        extract=extract, record_count=rounds, edited_indices=list_edited_indices(plan, earlier)
    )
    return build_checkpoint_id(prefix_digests[plan.length - 1], exact_digest, plan.spans, variant)
