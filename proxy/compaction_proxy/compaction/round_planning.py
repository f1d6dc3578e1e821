"""Drafts compactions: makes their plans, and writes the texts for which no model is needed."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from compaction_proxy.compaction.ledger_cache import LedgerCache
from compaction_proxy.compaction.message_reader import MessageReader
from compaction_proxy.compaction.request_view import RequestView
from compaction_proxy.core.digest import format_message_id
from compaction_proxy.core.ledger.frontier import Frontier
from compaction_proxy.core.ledger.ledger import ActiveStatements, build_ledger, list_rules, render_ledger
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
from compaction_proxy.core.strategies import LAYOUT, ScaledLimit
from compaction_proxy.support.offload import run_in_worker

# Tokens of the opening and closing lines around the records of a chain.
FRAME_TOKENS = 120
# A strategy may make the summary longer the more it removes. The size that is asked for is at most this share
# of T.
SUMMARY_SHARE = 0.06
# A compaction that cannot remove this share of T is not worth a summary.
LEAST_SHARE = 0.10
CHARACTERS_A_TOKEN = 3.5
# If the ledger leaves too little room for the smallest tail, its limit is reduced. The reduced limit is
# LEDGER_TOKENS or LEDGER_SHARE of the full limit, whichever is more.
LEDGER_TOKENS = 2_000
LEDGER_SHARE = 0.4
# The ledger's limit is reduced further if ledger, records, summary and tail together would exceed this share
# of the free tokens: those between T and the part of the request that no compaction removes.
FILLED_SHARE = 0.8
# The ledger's limit is never reduced below this share of the full limit.
LEAST_LEDGER_SHARE = 0.1
# If hardly any compaction can reach the target, masks alone suffice if they shrink the removable messages to
# this share of the free tokens.
MASKED_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class RoundDraft:
    """A draft of a compaction.

    Attributes:
        plan: The spans to replace.
        summary_tokens: Size of the summary, in tokens; 0 if there is none.
        is_worth_it: Whether the compaction saves enough tokens to be worth the cost of a summary.
        ledger: Text of the ledger; empty unless the strategy keeps a chain of records.
        rules: Rules that the ledger must contain.
        outdated_statements: User statements that no longer hold, by message index. The summary model must not
            see them.
        frontier: Where the conversation stands; empty unless the strategy keeps a chain of records.
    """

    plan: RoundPlan
    summary_tokens: int
    is_worth_it: bool = True
    ledger: str = ""
    rules: tuple[str, ...] = ()
    outdated_statements: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    frontier: Frontier = field(default_factory=Frontier)


async def draft_round(
    view: RequestView, reader: MessageReader, ledger_cache: LedgerCache, *, allow_small: bool = False
) -> RoundDraft | None:
    """Drafts the compaction that the strategy would make now; returns None if there is nothing to remove.

    The compaction does not touch messages that the client moves, unless the request would not fit otherwise.

    Args:
        view: The request.
        reader: Counts tokens.
        ledger_cache: Reads statements and facts from messages.
        allow_small: Whether a compaction is wanted even if it saves little.
    """
    draft = await _draft_once(view, reader, ledger_cache, allow_small=allow_small)
    if not view.moving_count or not view.exceeds_window(view.effective) or (draft and _can_fit(view, draft)):
        return draft
    return await _draft_once(replace(view, moving_count=0), reader, ledger_cache, allow_small=allow_small)


def _can_fit(view: RequestView, draft: RoundDraft) -> bool:
    """Returns whether the request will fit after the compaction, if its texts have the expected sizes."""
    forwarded = list_forwarded_sizes(view.body, view.checkpoint)
    edited = {fill.at for fill in draft.plan.fills if fill.kind in {"mask", "cap"}}
    saved_tokens = sum(forwarded[index] - MASK_TOKENS for index in edited)
    saved_tokens += (
        sum(forwarded[index] for index in draft.plan.fresh_indices) - draft.summary_tokens - FRAME_TOKENS
    )
    saved_tokens -= int(len(draft.ledger) / CHARACTERS_A_TOKEN)
    return (view.plan_constraints.size - saved_tokens) * view.calibration_ratio <= view.budget.input_limit


async def _draft_once(
    view: RequestView, reader: MessageReader, ledger_cache: LedgerCache, *, allow_small: bool
) -> RoundDraft | None:
    """Drafts a compaction that does not touch the messages that the client moves."""
    constraints = view.plan_constraints
    if view.policy.layout is None:
        return await run_in_worker(partial(_draft_plain, view, constraints))
    mask_draft = await run_in_worker(partial(_draft_masks, view, constraints))
    if mask_draft is not None:
        return mask_draft
    content = await run_in_worker(partial(_collect_content, view, constraints, ledger_cache))
    ledger_tokens = await _count_text_tokens(content.words.text, view, reader)
    return await run_in_worker(
        partial(_draft_chain_record, view, content, ledger_tokens, ledger_cache, allow_small=allow_small)
    )


def plan_result_caps(view: RequestView) -> RoundPlan | None:
    """Plans to cap huge new tool results; returns None if there is nothing to cap.

    Results are capped only if, even after a compaction of everything else, the request would exceed usable.
    """
    layout = view.policy.layout
    results = _find_newest_results(view.body)
    if layout is None or not results or not view.is_automatic or view.is_held_back:
        return None
    forwarded, usable, ratio = (
        list_forwarded_sizes(view.body, view.checkpoint),
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
    """Returns the indices of the tool results in the last unit."""
    start = len(messages)
    while start and messages[start - 1].answers:
        start -= 1
    has_call = start > 0 and bool(messages[start - 1].calls)
    return range(start if has_call else max(start, len(messages) - 1), len(messages))


def _draft_plain(view: RequestView, room: PlanConstraints) -> RoundDraft | None:
    """Drafts a compaction without masks and without a ledger."""
    summary_tokens = _compute_summary_tokens(view, 0)
    plan = plan_round(
        view.body, view.effective, view.policy, view.checkpoint, replace(room, records=summary_tokens)
    )
    return RoundDraft(plan, summary_tokens, _is_worth_it(view, plan, 0, room)) if plan else None


class _RecordContent(NamedTuple):
    """The content of a further record of a chain, apart from its summary.

    Attributes:
        room: Sizes for the planner, and whether the chain must be written anew.
        covered: Indices of the messages that the plan is expected to remove. The plan may remove others if
            the ledger and the records are large.
        standing: User statements that still hold.
        frontier: Where the conversation stands.
        words: The ledger.
    """

    room: PlanConstraints
    covered: frozenset[int]
    standing: ActiveStatements
    frontier: Frontier
    words: "LedgerText"


def _draft_masks(view: RequestView, room: PlanConstraints) -> RoundDraft | None:
    """Drafts a compaction that only masks tool results; returns None if masks alone do not save enough."""
    stop = find_tail_start(view.body, view.effective, view.policy, view.checkpoint, room, at_least=True)
    masks = _choose_masks(view, room, stop)
    return (
        RoundDraft(add_edits(build_unchanged_plan(view.checkpoint), dict.fromkeys(masks, "mask")), 0)
        if masks
        else None
    )


def _collect_content(view: RequestView, room: PlanConstraints, ledger_cache: LedgerCache) -> _RecordContent:
    """Collects the ledger, the statements that hold, and the frontier, for a further record of the chain."""
    stop = find_tail_start(view.body, view.effective, view.policy, view.checkpoint, room)
    staying = {find_latest_user_message(view.body), find_task_index(view.body)}
    covered = frozenset(index for index in range(stop) if index not in staying)
    statements = ledger_cache.get_active_statements(view.body)
    recorded_text = " ".join(each.text for each in _list_chain_records(view)).casefold()
    must_rewrite = any(value in recorded_text for value in statements.superseded.values)
    frontier = ledger_cache.get_frontier(view.body)
    ledger = _build_ledger_text(view, covered, statements, frontier, ledger_cache)
    return _RecordContent(replace(room, anew=must_rewrite), covered, statements, frontier, ledger)


def _draft_chain_record(
    view: RequestView,
    content: _RecordContent,
    ledger_tokens: int,
    ledger_cache: LedgerCache,
    *,
    allow_small: bool,
) -> RoundDraft | None:
    """Drafts a compaction that adds a record to the chain.

    Returns None if there is nothing to remove, or if the compaction saves little and `allow_small` is not
    set.
    """
    room, covered, words = content.room, content.covered, content.words
    chain_tokens = sum(each.tokens for each in _list_chain_records(view))
    summary_tokens = _compute_summary_tokens(
        view, sum(view.body[index].tokens for index in covered) - chain_tokens
    )
    record_tokens = ledger_tokens + summary_tokens + FRAME_TOKENS + chain_tokens
    plan = plan_round(
        view.body, view.effective, view.policy, view.checkpoint, replace(room, records=record_tokens)
    )
    if plan is None:
        return None
    is_worth_it = _is_worth_it(view, plan, summary_tokens, room)
    if not (allow_small or is_worth_it):
        return None
    removed = frozenset(plan.removed_indices)
    # The ledger was built for the messages that were expected to be removed. If the plan removes others, it
    # must be built again.
    if covered != removed:
        words = _build_ledger_text(view, removed, content.standing, content.frontier, ledger_cache)
    outdated = content.standing.superseded.texts
    return RoundDraft(
        _cap_long_task(view, plan, room), summary_tokens, is_worth_it, *words, outdated, content.frontier
    )


def _list_chain_records(view: RequestView) -> tuple[Message, ...]:
    """Lists the records of the chain so far."""
    return list_chain_records(view.checkpoint) if view.checkpoint else ()


def _compute_summary_tokens(view: RequestView, removed: int) -> int:
    """Computes the size of the summary to ask for, in tokens, if `removed` tokens are to be summarised."""
    shape = view.policy.summary
    if shape is None:
        return 0
    summary_tokens = shape.compute_target_tokens(max(0, removed))
    return (
        min(summary_tokens, int(SUMMARY_SHARE * view.plan_constraints.trigger))
        if shape.share
        else summary_tokens
    )


def _choose_masks(view: RequestView, room: PlanConstraints, stop: int) -> list[int]:
    """Chooses the tool results to mask; chooses none if masks alone cannot reach the target size."""
    forwarded = list_forwarded_sizes(view.body, view.checkpoint)
    previously_edited = view.checkpoint.edited if view.checkpoint else frozenset()
    candidates = [
        index
        for index in _list_old_results(view, stop)
        if index not in previously_edited and forwarded[index] > 2 * MASK_TOKENS
    ]
    if room.target is None:
        return []
    goal = room.target
    if room.is_scarce:
        goal = room.fixed + int(MASKED_SHARE * room.free_tokens)
    size, masks = room.size + room.growth, []
    for index in order_results_to_mask(view.body, candidates):
        if size <= goal:
            break
        masks.append(index)
        size -= forwarded[index] - MASK_TOKENS
    return masks if size <= goal else []


def _list_old_results(view: RequestView, stop: int) -> list[int]:
    """Lists the tool results before the tail, except removed ones and the newest, which always stay."""
    removed = view.checkpoint.removed_indices if view.checkpoint else frozenset()
    results = [index for index, each in enumerate(view.body) if each.answers and index not in removed]
    newest = view.policy.keep.tool_results
    return [index for index in (results[:-newest] if newest else results) if index < stop]


def _is_worth_it(view: RequestView, made: RoundPlan, summary_tokens: int, room: PlanConstraints) -> bool:
    """Returns whether the compaction saves enough tokens to be worth its cost.

    The saving is the size of the newly removed messages less the size of the summary.
    """
    forwarded = list_forwarded_sizes(view.body, view.checkpoint)
    saved_tokens = sum(forwarded[index] for index in made.fresh_indices) - summary_tokens
    return saved_tokens >= LEAST_SHARE * room.trigger


def _cap_long_task(view: RequestView, made: RoundPlan, room: PlanConstraints) -> RoundPlan:
    """Adds a cap to the plan if the task is too long and may be shortened.

    The task stays whole if it is also the latest user message, is edited already, or is moved by the client.
    """
    task = find_task_index(view.body)
    edited = view.checkpoint.edited if view.checkpoint else frozenset()
    is_moved = task is not None and task >= len(view.body) - view.moving_count
    if task is None or task == find_latest_user_message(view.body) or task in edited or is_moved:
        return made
    too_long = view.body[task].tokens > view.policy.task_tokens.compute_tokens(room.trigger)
    return add_edits(made, {task: "cap"}) if too_long else made


class LedgerText(NamedTuple):
    """A ledger as text, and the rules that it must contain."""

    text: str
    rules: tuple[str, ...]


async def build_ledger_text(
    view: RequestView, covered: Collection[int], ledger_cache: LedgerCache
) -> LedgerText:
    """Builds the ledger for the covered messages.

    Every strategy uses this ledger if no summary can be written. If the strategy has no size limit for a
    ledger, the limit of `anchored` applies.
    """

    def build_text() -> LedgerText:
        statements, frontier = (
            ledger_cache.get_active_statements(view.body),
            ledger_cache.get_frontier(view.body),
        )
        return _build_ledger_text(view, covered, statements, frontier, ledger_cache)

    return await run_in_worker(build_text)


def merge_pins(view: RequestView) -> tuple[str, ...]:
    """Returns the pins of the conversation together with those of the request, each text once."""
    return tuple(dict.fromkeys((*view.directives.pins, *view.request.pins)))


def _build_ledger_text(
    view: RequestView,
    covered: Collection[int],
    standing: ActiveStatements,
    frontier: Frontier,
    ledger_cache: LedgerCache,
) -> LedgerText:
    layout = view.policy.layout or LAYOUT
    removed = frozenset(covered) | (view.checkpoint.removed_indices if view.checkpoint else frozenset())
    characters = int(_compute_ledger_tokens(view, layout.ledger) * CHARACTERS_A_TOKEN)
    ledger = build_ledger(
        view.body,
        removed,
        lambda index: format_message_id(view.prefixes[index]),
        merge_pins(view),
        active=standing,
        frontier=frontier,
        fact_reader=ledger_cache.get_shown_facts,
    )
    return LedgerText(render_ledger(ledger, characters), list_rules(ledger))


def _compute_ledger_tokens(view: RequestView, limit: ScaledLimit) -> int:
    """Returns the size limit of the ledger, in tokens; reduced if the tail would get too little room."""
    room, tail = view.plan_constraints, view.policy.keep.tail
    max_tokens = limit.compute_tokens(room.trigger)
    if room.target is None or tail is None:
        return max_tokens
    other_tokens = sum(each.tokens for each in _list_chain_records(view))
    other_tokens += int(SUMMARY_SHARE * room.trigger) + tail.compute_tokens(room.free_tokens)
    reduced_tokens = min(
        max(LEDGER_TOKENS, int(LEDGER_SHARE * max_tokens)),
        int(FILLED_SHARE * room.free_tokens) - other_tokens,
    )
    available_tokens = max(
        room.target - room.fixed - other_tokens, reduced_tokens, int(LEAST_LEDGER_SHARE * max_tokens)
    )
    return min(max_tokens, available_tokens)


async def _count_text_tokens(text: str, view: RequestView, reader: MessageReader) -> int:
    if not text:
        return 0
    [counted] = await reader.add_token_counts([Message(role="user", text=text)], view.counting_options)
    return counted.tokens


class RoundPlanner:
    """Drafts compactions. Identical drafts that are requested at the same time share one task.

    Args:
        reader: Counts tokens.
        ledger_cache: Reads statements and facts from messages.
    """

    def __init__(self, reader: MessageReader, ledger_cache: LedgerCache) -> None:
        self._reader = reader
        self._ledger_cache = ledger_cache
        self._running: dict[asyncio.Task[RoundDraft | None], tuple[object, ...]] = {}

    async def draft_round(self, view: RequestView, *, allow_small: bool = False) -> RoundDraft | None:
        """Drafts the compaction that the strategy would make now.

        Returns None if there is nothing to remove, or if the compaction saves little and `allow_small` is not
        set.

        Args:
            view: The request.
            allow_small: Whether a compaction is wanted even if it saves little.
        """
        key = _build_key(view, allow_small=allow_small)
        matching_tasks = (task for task, running_key in self._running.items() if running_key == key)
        task = next(matching_tasks, None) or self._start_task(view, key, allow_small=allow_small)
        return await asyncio.shield(task)  # if a caller is cancelled, the task goes on for the other callers

    def _start_task(
        self, view: RequestView, key: tuple[object, ...], *, allow_small: bool
    ) -> asyncio.Task[RoundDraft | None]:
        task = asyncio.create_task(
            draft_round(view, self._reader, self._ledger_cache, allow_small=allow_small)
        )
        self._running[task] = key

        def finish_task(task: asyncio.Task[RoundDraft | None]) -> None:
            del self._running[task]
            if not task.cancelled():
                task.exception()  # avoids a warning of asyncio if all callers were cancelled and none sees it

        task.add_done_callback(finish_task)
        return task


def _build_key(view: RequestView, *, allow_small: bool) -> tuple[object, ...]:
    """Builds a key from everything on which a draft depends, so that equal keys mean identical drafts."""
    return (
        view.request.tenant,
        tuple(each.digest for each in view.messages),
        view.checkpoint,
        view.policy,
        view.counting_options,
        view.plan_constraints,
        merge_pins(view),
        allow_small,
    )
