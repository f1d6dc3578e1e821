"""Drafts compactions: plans which spans to replace, and builds the ledger. Neither needs a model."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from compaction_proxy.compaction.ledger_cache import LedgerCache
from compaction_proxy.compaction.message_reader import MessageReader
from compaction_proxy.compaction.request_view import RequestView
from compaction_proxy.core.digest import format_message_id
from compaction_proxy.core.ledger.frontier import Frontier
from compaction_proxy.core.ledger.ledger import build_ledger, list_rules, render_ledger
from compaction_proxy.core.masking import MASK_TOKENS, order_results_to_mask
from compaction_proxy.core.message import Message, find_latest_user_message
from compaction_proxy.core.planner import (
    PlanConstraints,
    RoundPlan,
    add_edits,
    build_unchanged_plan,
    find_tail_start,
    find_task_index,
    list_chain_records,
    list_forwarded_sizes,
    plan_round,
)
from compaction_proxy.core.strategies import ANCHORED_LAYOUT, ScaledLimit
from compaction_proxy.support.offload import run_in_worker, run_in_worker_if_large

# Approximate number of tokens in the introductory and closing lines around the records of a chain.
FRAME_TOKENS = 120
# Some strategies request a longer summary if more tokens are removed. The requested size is then limited to
# this share of the trigger size T.
SUMMARY_SHARE = 0.06
# A compaction that saves less than this share of the trigger size is not worth the cost of a summary.
LEAST_SHARE = 0.10
CHARACTERS_A_TOKEN = 3.5
# If a ledger of the full size would leave too few tokens for the smallest tail, the size limit of the ledger
# is reduced. The reduced limit is LEDGER_TOKENS tokens or this share (LEDGER_SHARE) of the full limit,
# whichever is more.
LEDGER_TOKENS = 2_000
LEDGER_SHARE = 0.4
# The size limit of the ledger is reduced further if ledger, records, summary and tail together would exceed
# this share of the free tokens. The free tokens are the trigger size minus the tokens that no compaction
# removes.
FILLED_SHARE = 0.8
# The size limit of the ledger is never reduced below this share of the full limit.
LEAST_LEDGER_SHARE = 0.1
# This constant applies if the target size is so low that hardly any compaction can reach it. A compaction
# that only masks tool results is then sufficient if it shrinks the removable messages to this share of the
# free tokens (the trigger size minus the tokens that no compaction removes).
MASKED_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class RoundDraft:
    """Describes what a compaction will remove and replace, before any summary is written.

    Attributes:
        plan: The spans to replace, and what replaces them.
        summary_tokens: Size of the summary to request, in tokens; 0 if the compaction needs none.
        is_worth_it: Whether the compaction saves enough tokens to be worth the cost of a summary.
        ledger: Text of the ledger. Empty if the strategy keeps no chain of records, unless an extract
            replaces the summary.
        rules: The user's rules, which the ledger must contain.
        outdated_statements: User statements that later statements have replaced, by message index. The text
            that the summary model reads does not contain them.
        frontier: The states of the user's requests and the last steps; empty unless the strategy keeps a
            chain of records.
    """

    plan: RoundPlan
    summary_tokens: int
    is_worth_it: bool = True
    ledger: str = ""
    rules: tuple[str, ...] = ()
    outdated_statements: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    frontier: Frontier = field(default_factory=Frontier)


def list_edited_indices(plan: RoundPlan) -> set[int]:
    """Returns the indices of the messages that the plan masks or caps."""
    return {fill.reference_index for fill in plan.planned_replacements if fill.kind in {"mask", "cap"}}


def _can_fit(view: RequestView, draft: RoundDraft) -> bool:
    """Returns whether the request will fit after the compaction, if the summary has the planned size."""
    forwarded = list_forwarded_sizes(view.unfixed_messages, view.checkpoint)
    saved_tokens = sum(forwarded[index] - MASK_TOKENS for index in list_edited_indices(draft.plan))
    saved_tokens += (
        sum(forwarded[index] for index in draft.plan.summarized_indices) - draft.summary_tokens - FRAME_TOKENS
    )
    saved_tokens -= int(len(draft.ledger) / CHARACTERS_A_TOKEN)
    return (
        view.plan_constraints.request_tokens - saved_tokens
    ) * view.calibration_ratio <= view.budget.input_limit


def plan_result_caps(view: RequestView) -> RoundPlan | None:
    """Plans to cap huge tool results at the end of the request; returns None if there is nothing to cap.

    The plan caps results only if the request would exceed the usable tokens (`Budget.usable`) even after a
    compaction of everything else. A result counts as huge if it is larger than the strategy allows for a
    single result (`AnchoredLayout`).
    """
    layout = view.policy.layout
    results = _find_newest_results(view.unfixed_messages)
    if layout is None or not results or not view.is_automatic or view.is_suppressed:
        return None
    forwarded, usable, ratio = (
        list_forwarded_sizes(view.unfixed_messages, view.checkpoint),
        view.budget.usable,
        view.calibration_ratio,
    )
    if (view.fixed_tokens + sum(forwarded[index] for index in results)) * ratio <= usable:
        return None
    previously_edited = view.checkpoint.edited if view.checkpoint else frozenset()
    threshold = max(
        layout.cap.compute_tokens(view.trigger_tokens), usable * layout.huge_share / max(ratio, 0.01)
    )
    indices = [index for index in results if index not in previously_edited and forwarded[index] > threshold]
    return (
        add_edits(build_unchanged_plan(view.checkpoint), dict.fromkeys(indices, "cap")) if indices else None
    )


def _find_newest_results(messages: Sequence[Message]) -> range:
    """Returns the indices of the tool results at the end of the list, which answer the latest tool calls.

    If the message before these results contains no tool calls, returns only the last index. Returns an empty
    range if the last message is no tool result.
    """
    start = len(messages)
    while start and messages[start - 1].answered_call_ids:
        start -= 1
    has_call = start > 0 and bool(messages[start - 1].calls)
    return range(start if has_call else max(start, len(messages) - 1), len(messages))


def _draft_plain(view: RequestView, constraints: PlanConstraints) -> RoundDraft | None:
    """Drafts a compaction without masks and without a ledger. Returns None if nothing can be removed."""
    summary_tokens = _compute_summary_tokens(view, 0)
    plan = plan_round(
        view.unfixed_messages,
        view.effective_messages,
        view.policy,
        view.checkpoint,
        replace(constraints, replacement_tokens=summary_tokens),
    )
    return RoundDraft(plan, summary_tokens, _is_worth_it(view, plan, 0, constraints)) if plan else None


def _draft_masks(view: RequestView, constraints: PlanConstraints) -> RoundDraft | None:
    """Drafts a compaction that only masks tool results. Returns None if masks do not save enough tokens."""
    stop = find_tail_start(
        view.unfixed_messages,
        view.effective_messages,
        view.policy,
        view.checkpoint,
        constraints,
        is_minimum=True,
    )
    masks = _choose_masks(view, constraints, stop)
    return (
        RoundDraft(add_edits(build_unchanged_plan(view.checkpoint), dict.fromkeys(masks, "mask")), 0)
        if masks
        else None
    )


def _list_chain_records(view: RequestView) -> tuple[Message, ...]:
    return list_chain_records(view.checkpoint) if view.checkpoint else ()


def _compute_summary_tokens(view: RequestView, removed_tokens: int) -> int:
    """Computes the size of the summary to request, in tokens; 0 if the strategy uses no summaries.

    `removed_tokens` is the size of the messages that the summary replaces, in tokens.
    """
    shape = view.policy.summary
    if shape is None:
        return 0
    summary_tokens = shape.compute_target_tokens(max(0, removed_tokens))
    return (
        min(summary_tokens, int(SUMMARY_SHARE * view.plan_constraints.trigger_tokens))
        if shape.share
        else summary_tokens
    )


def _choose_masks(view: RequestView, constraints: PlanConstraints, tail_start: int) -> list[int]:
    """Chooses which of the tool results before the tail to mask. Returns their indices.

    Returns an empty list if masks alone cannot bring the request to its target size, or if the strategy has
    no target size. If hardly any compaction can reach the target size, a larger size is sufficient
    (`MASKED_SHARE`).
    """
    forwarded = list_forwarded_sizes(view.unfixed_messages, view.checkpoint)
    previously_edited = view.checkpoint.edited if view.checkpoint else frozenset()
    candidates = [
        index
        for index in _list_old_results(view, tail_start)
        if index not in previously_edited and forwarded[index] > 2 * MASK_TOKENS
    ]
    if constraints.target_tokens is None:
        return []
    goal = constraints.target_tokens
    if constraints.is_target_scarce:
        goal = constraints.fixed_tokens + int(MASKED_SHARE * constraints.free_tokens)
    size, masks = constraints.request_tokens + constraints.growth_tokens, []
    for index in order_results_to_mask(view.unfixed_messages, candidates):
        if size <= goal:
            break
        masks.append(index)
        size -= forwarded[index] - MASK_TOKENS
    return masks if size <= goal else []


def _list_old_results(view: RequestView, tail_start: int) -> list[int]:
    """Returns the indices of those tool results before the tail that no compaction has removed yet.

    The strategy always keeps some of the newest tool results (`KeepRules.tool_results`). These are not
    included.
    """
    removed = view.checkpoint.removed_indices if view.checkpoint else frozenset()
    results = [
        index
        for index, each in enumerate(view.unfixed_messages)
        if each.answered_call_ids and index not in removed
    ]
    newest = view.policy.keep.tool_results
    return [index for index in (results[:-newest] if newest else results) if index < tail_start]


def _is_worth_it(
    view: RequestView, plan: RoundPlan, summary_tokens: int, constraints: PlanConstraints
) -> bool:
    """Returns whether the compaction saves enough tokens to be worth its cost (`LEAST_SHARE`).

    The saving is the size of the messages to summarise less the size of the summary.
    """
    forwarded = list_forwarded_sizes(view.unfixed_messages, view.checkpoint)
    saved_tokens = sum(forwarded[index] for index in plan.summarized_indices) - summary_tokens
    return saved_tokens >= LEAST_SHARE * constraints.trigger_tokens


def _find_long_task(view: RequestView) -> int | None:
    """Returns the index of the task if a compaction caps it or has capped it, otherwise None.

    The task is capped if it is too long, unless it is the latest user message, or the client moves it with
    each request. Images do not count, because a cap shortens only text.
    """
    task = find_task_index(view.unfixed_messages)
    if task is None or (view.checkpoint is not None and task in view.checkpoint.edited):
        return task
    is_moved = task >= len(view.unfixed_messages) - view.moving_count
    message, limit = view.unfixed_messages[task], view.policy.task_tokens
    # A text has at most about as many tokens as characters.
    size = min(message.tokens, len(message.text)) if message.parts else message.tokens
    is_too_long = size > limit.compute_tokens(view.plan_constraints.trigger_tokens)
    is_latest = task == find_latest_user_message(view.unfixed_messages)
    return task if is_too_long and not (is_latest or is_moved) else None


def _cap_long_task(view: RequestView, plan: RoundPlan) -> RoundPlan:
    """Returns the plan with a cap for the task, if the task is too long and not capped yet."""
    task, edited = _find_long_task(view), view.checkpoint.edited if view.checkpoint else frozenset()
    return plan if task is None or task in edited else add_edits(plan, {task: "cap"})


def merge_pins(view: RequestView) -> tuple[str, ...]:
    """Returns the pins of the conversation and then those of the request, each text only once."""
    return tuple(dict.fromkeys((*view.directives.pins, *view.request.pins)))


def _compute_ledger_tokens(view: RequestView, limit: ScaledLimit) -> int:
    """Returns the size limit of the ledger, in tokens.

    This is the full limit of the strategy, or less if a ledger of this size would leave too few tokens for
    the tail.
    """
    room, tail = view.plan_constraints, view.policy.keep.tail
    max_tokens = limit.compute_tokens(room.trigger_tokens)
    if room.target_tokens is None or tail is None:
        return max_tokens
    other_tokens = sum(each.tokens for each in _list_chain_records(view))
    other_tokens += int(SUMMARY_SHARE * room.trigger_tokens) + tail.compute_tokens(room.free_tokens)
    reduced_tokens = min(
        max(LEDGER_TOKENS, int(LEDGER_SHARE * max_tokens)),
        int(FILLED_SHARE * room.free_tokens) - other_tokens,
    )
    available_tokens = max(
        room.target_tokens - room.fixed_tokens - other_tokens,
        reduced_tokens,
        int(LEAST_LEDGER_SHARE * max_tokens),
    )
    return min(max_tokens, available_tokens)


class RoundPlanner:
    """Drafts compactions. If two requests need the same draft at the same time, it is made only once.

    Args:
        reader: Counts tokens.
        ledger_cache: Finds statements and facts in messages.
    """

    def __init__(self, reader: MessageReader, ledger_cache: LedgerCache) -> None:
        self._reader = reader
        self._ledger_cache = ledger_cache
        self._running: dict[asyncio.Task[RoundDraft | None], tuple[object, ...]] = {}

    async def draft_round(self, view: RequestView, *, allow_small: bool = False) -> RoundDraft | None:
        """Drafts the compaction that the strategy would make now.

        The draft does not remove messages that the client moves with each request, unless the request would
        otherwise not fit. Returns None if there is nothing to remove. With a strategy that keeps a chain of
        records, also returns None if the compaction saves little (`LEAST_SHARE`) and `allow_small` is False.

        Args:
            view: The request.
            allow_small: Whether to draft a compaction even if it saves little.
        """
        build_key = partial(_build_key, view, allow_small=allow_small)
        key = await run_in_worker_if_large(0, build_key, message_count=len(view.messages))
        task = next((task for task, running_key in self._running.items() if running_key == key), None)
        if task is None:
            task = asyncio.create_task(self._draft_fitting_round(view, allow_small=allow_small))
            self._running[task] = key
            task.add_done_callback(self._finish_task)
        return await asyncio.shield(task)  # if a caller is cancelled, the task continues for the others

    def _finish_task(self, task: asyncio.Task[RoundDraft | None]) -> None:
        del self._running[task]
        if not task.cancelled():
            task.exception()  # else asyncio warns if all callers were cancelled and none reads the error

    async def _draft_fitting_round(self, view: RequestView, *, allow_small: bool) -> RoundDraft | None:
        draft = await self._draft_one_round(view, allow_small=allow_small)
        if not view.moving_count or not view.exceeds_window or (draft and _can_fit(view, draft)):
            return draft
        return await self._draft_one_round(replace(view, moving_count=0), allow_small=allow_small)

    async def _draft_one_round(self, view: RequestView, *, allow_small: bool) -> RoundDraft | None:
        """Drafts a compaction that does not remove the last `view.moving_count` messages."""
        constraints = view.plan_constraints
        if view.policy.layout is None:
            return await run_in_worker(partial(_draft_plain, view, constraints))
        masked = await run_in_worker(partial(_draft_masks, view, constraints))
        if masked is not None:
            return masked
        expected = await run_in_worker(partial(self._predict_removed_indices, view, constraints))
        # Reading the frontier of a long conversation takes seconds, so it is done only once.
        frontier = await run_in_worker(partial(self._ledger_cache.get_frontier, view.unfixed_messages))
        ledger = await run_in_worker(partial(self._build_ledger_text, view, expected, frontier))
        ledger_tokens = 0
        if ledger[0]:
            message = Message(role="user", text=ledger[0])
            [counted] = await self._reader.add_token_counts([message], view.request.counting_options)
            ledger_tokens = counted.tokens
        return await run_in_worker(
            partial(
                self._draft_record, view, expected, ledger, ledger_tokens, frontier, allow_small=allow_small
            )
        )

    def _predict_removed_indices(self, view: RequestView, constraints: PlanConstraints) -> frozenset[int]:
        """Returns the indices of the messages that the compaction will probably remove.

        The final plan also depends on the sizes of the ledger and the records. So it may remove other
        messages.
        """
        stop = find_tail_start(
            view.unfixed_messages, view.effective_messages, view.policy, view.checkpoint, constraints
        )
        staying = {find_latest_user_message(view.unfixed_messages), find_task_index(view.unfixed_messages)}
        return frozenset(index for index in range(stop) if index not in staying)

    def _draft_record(
        self,
        view: RequestView,
        expected: frozenset[int],
        ledger: tuple[str, tuple[str, ...]],
        ledger_tokens: int,
        frontier: Frontier,
        *,
        allow_small: bool,
    ) -> RoundDraft | None:
        """Drafts a compaction that adds a record to the chain, or writes the chain anew as one record.

        Returns None if there is nothing to remove, or if the compaction saves little and `allow_small` is
        False.

        Args:
            view: The request.
            expected: Indices of the messages that will probably be removed.
            ledger: The text of the ledger for these messages, and the rules that it must contain.
            ledger_tokens: Size of this ledger, in tokens.
            frontier: The frontier of the conversation.
            allow_small: Whether to draft the compaction even if it saves little.
        """
        superseded = self._ledger_cache.get_active_statements(view.unfixed_messages).superseded
        records = _list_chain_records(view)
        recorded_text = " ".join(each.text for each in records).casefold()
        must_rewrite = any(value in recorded_text for value in superseded.values)
        constraints = replace(view.plan_constraints, must_rewrite_chain=must_rewrite)
        chain_tokens = sum(each.tokens for each in records)
        expected_tokens = sum(view.unfixed_messages[index].tokens for index in expected)
        summary_tokens = _compute_summary_tokens(view, expected_tokens - chain_tokens)
        plan = plan_round(
            view.unfixed_messages,
            view.effective_messages,
            view.policy,
            view.checkpoint,
            replace(
                constraints, replacement_tokens=ledger_tokens + summary_tokens + FRAME_TOKENS + chain_tokens
            ),
        )
        if plan is None:
            return None
        is_worth_it = _is_worth_it(view, plan, summary_tokens, constraints)
        if not (allow_small or is_worth_it):
            return None
        removed = frozenset(plan.removed_indices)
        if expected != removed:
            ledger = self._build_ledger_text(view, removed, frontier)
        return RoundDraft(
            _cap_long_task(view, plan),
            summary_tokens,
            is_worth_it,
            *ledger,
            superseded.texts_by_message,
            frontier,
        )

    async def build_ledger_text(
        self, view: RequestView, removed_indices: Collection[int]
    ) -> tuple[str, tuple[str, ...]]:
        """Returns the text of the ledger for the removed messages, and the rules that it must contain.

        The strategy `anchored` adds this ledger to its records. The other strategies add it to an extract if
        no summary can be written. If the strategy has no size limit for ledgers, the limit of `anchored`
        applies.
        """
        return await run_in_worker(partial(self._build_ledger_text, view, removed_indices))

    def _build_ledger_text(
        self, view: RequestView, removed_indices: Collection[int], frontier: Frontier | None = None
    ) -> tuple[str, tuple[str, ...]]:
        layout, earlier = view.policy.layout or ANCHORED_LAYOUT, view.checkpoint
        task = _find_long_task(view)
        ledger = build_ledger(
            view.unfixed_messages,
            frozenset(removed_indices) | (earlier.removed_indices if earlier else frozenset()),
            lambda index: format_message_id(view.prefixes[index]),
            merge_pins(view),
            capped=() if task is None else (task,),
            active_statements=self._ledger_cache.get_active_statements(view.unfixed_messages),
            frontier=(
                self._ledger_cache.get_frontier(view.unfixed_messages) if frontier is None else frontier
            ),
            fact_reader=self._ledger_cache.get_shown_facts,
        )
        characters = int(_compute_ledger_tokens(view, layout.ledger) * CHARACTERS_A_TOKEN)
        return render_ledger(ledger, characters), list_rules(ledger)


def _build_key(view: RequestView, *, allow_small: bool) -> tuple[object, ...]:
    """Builds a key from everything on which a draft depends. Equal keys lead to equal drafts."""
    return (
        view.request.tenant,
        tuple(each.digest for each in view.messages),
        view.checkpoint,
        view.policy,
        view.request.counting_options,
        view.plan_constraints,
        merge_pins(view),
        allow_small,
    )
