"""What a round of a request shall be: the plan, and the text that goes with it and needs no model."""

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

# What the opening and closing lines of records take.
FRAME_TOKENS = 120
# A summary is asked to take no more than this share of T, whatever is removed.
SUMMARY_SHARE = 0.06
# What cannot shrink by this share of T is not worth a summary.
LEAST_SHARE = 0.10
CHARACTERS_A_TOKEN = 3.5
# A ledger yields to the tail's floor down to so many tokens, or to this share of its limit if that is more.
LEDGER_TOKENS = 2_000
LEDGER_SHARE = 0.4
# It yields further where all together would take more than this share of what T leaves beside the fixed part.
FILLED_SHARE = 0.8
# It never yields below this share of its limit.
LEAST_LEDGER_SHARE = 0.1
# Beside a scarce room, masks suffice that bring what rounds can remove down to this share of it.
MASKED_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class RoundDraft:
    """A round to be made.

    Attributes:
        plan: What is replaced.
        summary_tokens: Size of the summary, in tokens; 0 where there is none.
        is_worth_it: Whether enough can be won to be worth a summary.
        ledger: What the user said and what was observed, for a chain of records; else empty.
        rules: What the ledger must hold in any case.
        outdated_statements: What the user said and no longer holds, by index of the message: no model shall
            see it.
        frontier: Where the conversation stands, for a chain of records; else empty.
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
    """The round that the strategy would make of the request now, or None if there is nothing to take.

    What the client moves stays out of it, unless the request would not fit then.

    Args:
        view: The request.
        reader: What counts.
        ledger_cache: What messages say and show.
        allow_small: Whether a round is wanted even where little can be won.
    """
    draft = await _draft_once(view, reader, ledger_cache, allow_small=allow_small)
    if not view.moving_count or not view.exceeds_window(view.effective) or (draft and _can_fit(view, draft)):
        return draft
    return await _draft_once(replace(view, moving_count=0), reader, ledger_cache, allow_small=allow_small)


def _can_fit(view: RequestView, draft: RoundDraft) -> bool:
    """Whether a request will fit once the round is made, as far as its texts can be foreseen."""
    forwarded = list_forwarded_sizes(view.body, view.checkpoint)
    edited = {fill.at for fill in draft.plan.fills if fill.kind in {"mask", "cap"}}
    won = sum(forwarded[index] - MASK_TOKENS for index in edited)
    won += sum(forwarded[index] for index in draft.plan.fresh_indices) - draft.summary_tokens - FRAME_TOKENS
    won -= int(len(draft.ledger) / CHARACTERS_A_TOKEN)
    return (view.plan_constraints.size - won) * view.calibration_ratio <= view.budget.input_limit


async def _draft_once(
    view: RequestView, reader: MessageReader, ledger_cache: LedgerCache, *, allow_small: bool
) -> RoundDraft | None:
    """The same, with what the client moves left out of it in any case."""
    room = view.plan_constraints
    if view.policy.layout is None:
        return await run_in_worker(partial(_draft_plain, view, room))
    masked = await run_in_worker(partial(_draft_masks, view, room))
    if masked is not None:
        return masked
    held = await run_in_worker(partial(_collect_content, view, room, ledger_cache))
    told = await _count_text_tokens(held.words.text, view, reader)
    return await run_in_worker(
        partial(_draft_chain_record, view, held, told, ledger_cache, allow_small=allow_small)
    )


def plan_result_caps(view: RequestView) -> RoundPlan | None:
    """What to shorten before a round: huge results of the newest unit that no round can make room for."""
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
    known = view.checkpoint.edited if view.checkpoint else frozenset()
    least = max(layout.cap.compute_tokens(view.trigger_tokens), usable * layout.huge_share / max(ratio, 0.01))
    edits = [index for index in results if index not in known and forwarded[index] > least]
    return add_edits(build_unchanged_plan(view.checkpoint), dict.fromkeys(edits, "cap")) if edits else None


def _find_newest_results(messages: Sequence[Message]) -> range:
    """Indices of the results in the last unit."""
    start = len(messages)
    while start and messages[start - 1].answers:
        start -= 1
    called = start > 0 and bool(messages[start - 1].calls)
    return range(start if called else max(start, len(messages) - 1), len(messages))


def _draft_plain(view: RequestView, room: PlanConstraints) -> RoundDraft | None:
    """One plan, and nothing beside it."""
    asked = _compute_summary_tokens(view, 0)
    made = plan_round(view.body, view.effective, view.policy, view.checkpoint, replace(room, records=asked))
    return RoundDraft(made, asked, _is_worth_it(view, made, 0, room)) if made else None


class _RecordContent(NamedTuple):
    """What a further record of a chain would have to hold beside its summary.

    Attributes:
        room: With whether the chain must be written anew.
        covered: What is taken if there is room for what is carried over.
        standing: What users have said and still holds.
        frontier: Where the conversation stands.
        words: The ledger.
    """

    room: PlanConstraints
    covered: frozenset[int]
    standing: ActiveStatements
    frontier: Frontier
    words: "LedgerText"


def _draft_masks(view: RequestView, room: PlanConstraints) -> RoundDraft | None:
    """Masks, if they suffice."""
    stop = find_tail_start(view.body, view.effective, view.policy, view.checkpoint, room, at_least=True)
    masks = _choose_masks(view, room, stop)
    return (
        RoundDraft(add_edits(build_unchanged_plan(view.checkpoint), dict.fromkeys(masks, "mask")), 0)
        if masks
        else None
    )


def _collect_content(view: RequestView, room: PlanConstraints, ledger_cache: LedgerCache) -> _RecordContent:
    """What would be carried over."""
    stop = find_tail_start(view.body, view.effective, view.policy, view.checkpoint, room)
    stay = {find_latest_user_message(view.body), find_task_index(view.body)}
    covered = frozenset(index for index in range(stop) if index not in stay)
    standing = ledger_cache.get_active_statements(view.body)
    said = " ".join(each.text for each in _list_chain_records(view)).casefold()
    anew = any(value in said for value in standing.superseded.values)
    frontier = ledger_cache.get_frontier(view.body)
    words = _build_ledger_text(view, covered, standing, frontier, ledger_cache)
    return _RecordContent(replace(room, anew=anew), covered, standing, frontier, words)


def _draft_chain_record(
    view: RequestView,
    content: _RecordContent,
    ledger_tokens: int,
    ledger_cache: LedgerCache,
    *,
    allow_small: bool,
) -> RoundDraft | None:
    """A further record of the chain, where what is carried over takes so many tokens."""
    room, covered, words = content.room, content.covered, content.words
    kept = sum(each.tokens for each in _list_chain_records(view))
    asked = _compute_summary_tokens(view, sum(view.body[index].tokens for index in covered) - kept)
    records = ledger_tokens + asked + FRAME_TOKENS + kept
    made = plan_round(view.body, view.effective, view.policy, view.checkpoint, replace(room, records=records))
    if made is None:
        return None
    pays = _is_worth_it(view, made, asked, room)
    if not (allow_small or pays):
        return None
    gone = frozenset(made.removed_indices)
    if covered != gone:  # what was carried over took more or less than there was room for
        words = _build_ledger_text(view, gone, content.standing, content.frontier, ledger_cache)
    outdated = content.standing.superseded.texts
    return RoundDraft(_cap_long_task(view, made, room), asked, pays, *words, outdated, content.frontier)


def _list_chain_records(view: RequestView) -> tuple[Message, ...]:
    """The records of the chain so far."""
    return list_chain_records(view.checkpoint) if view.checkpoint else ()


def _compute_summary_tokens(view: RequestView, removed: int) -> int:
    """Size of the summary to ask for, in tokens."""
    shape = view.policy.summary
    if shape is None:
        return 0
    asked = shape.compute_target_tokens(max(0, removed))
    return min(asked, int(SUMMARY_SHARE * view.plan_constraints.trigger)) if shape.share else asked


def _choose_masks(view: RequestView, room: PlanConstraints, stop: int) -> list[int]:
    """The tool results to mask, if that alone brings the request down to its target; else none."""
    forwarded = list_forwarded_sizes(view.body, view.checkpoint)
    known = view.checkpoint.edited if view.checkpoint else frozenset()
    candidates = [
        index
        for index in _list_old_results(view, stop)
        if index not in known and forwarded[index] > 2 * MASK_TOKENS
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
    """Tool results before the tail that are still there, without the newest that always stay."""
    gone = view.checkpoint.removed_indices if view.checkpoint else frozenset()
    results = [index for index, each in enumerate(view.body) if each.answers and index not in gone]
    newest = view.policy.keep.tool_results
    return [index for index in (results[:-newest] if newest else results) if index < stop]


def _is_worth_it(view: RequestView, made: RoundPlan, summary_tokens: int, room: PlanConstraints) -> bool:
    """Whether what can be removed is worth a round: enough of it, and more than what takes its place."""
    forwarded = list_forwarded_sizes(view.body, view.checkpoint)
    won = sum(forwarded[index] for index in made.fresh_indices) - summary_tokens
    return won >= LEAST_SHARE * room.trigger


def _cap_long_task(view: RequestView, made: RoundPlan, room: PlanConstraints) -> RoundPlan:
    """The plan with a task that is too long shortened, unless it is the latest user message too."""
    task = find_task_index(view.body)
    known = view.checkpoint.edited if view.checkpoint else frozenset()
    moves = task is not None and task >= len(view.body) - view.moving_count
    if task is None or task == find_latest_user_message(view.body) or task in known or moves:
        return made
    too_long = view.body[task].tokens > view.policy.task_tokens.compute_tokens(room.trigger)
    return add_edits(made, {task: "cap"}) if too_long else made


class LedgerText(NamedTuple):
    """A ledger as text, and the rules that it must hold."""

    text: str
    rules: tuple[str, ...]


async def build_ledger_text(
    view: RequestView, covered: Collection[int], ledger_cache: LedgerCache
) -> LedgerText:
    """The ledger of what is covered, within the budget of `anchored`: every strategy falls back on it."""

    def build_text() -> LedgerText:
        standing, frontier = (
            ledger_cache.get_active_statements(view.body),
            ledger_cache.get_frontier(view.body),
        )
        return _build_ledger_text(view, covered, standing, frontier, ledger_cache)

    return await run_in_worker(build_text)


def merge_pins(view: RequestView) -> tuple[str, ...]:
    """What people want to be kept word for word."""
    return tuple(dict.fromkeys((*view.directives.pins, *view.request.pins)))


def _build_ledger_text(
    view: RequestView,
    covered: Collection[int],
    standing: ActiveStatements,
    frontier: Frontier,
    ledger_cache: LedgerCache,
) -> LedgerText:
    layout = view.policy.layout or LAYOUT
    gone = frozenset(covered) | (view.checkpoint.removed_indices if view.checkpoint else frozenset())
    characters = int(_compute_ledger_tokens(view, layout.ledger) * CHARACTERS_A_TOKEN)
    found = build_ledger(
        view.body,
        gone,
        lambda index: format_message_id(view.prefixes[index]),
        merge_pins(view),
        active=standing,
        frontier=frontier,
        fact_reader=ledger_cache.get_shown_facts,
    )
    return LedgerText(render_ledger(found, characters), list_rules(found))


def _compute_ledger_tokens(view: RequestView, limit: ScaledLimit) -> int:
    """Tokens that the ledger may take: its limit, as far as it need not yield to the tail's floor."""
    room, tail = view.plan_constraints, view.policy.keep.tail
    most = limit.compute_tokens(room.trigger)
    if room.target is None or tail is None:
        return most
    others = sum(each.tokens for each in _list_chain_records(view))
    others += int(SUMMARY_SHARE * room.trigger) + tail.compute_tokens(room.free_tokens)
    usual = min(max(LEDGER_TOKENS, int(LEDGER_SHARE * most)), int(FILLED_SHARE * room.free_tokens) - others)
    left = max(room.target - room.fixed - others, usual, int(LEAST_LEDGER_SHARE * most))
    return min(most, left)


async def _count_text_tokens(text: str, view: RequestView, reader: MessageReader) -> int:
    if not text:
        return 0
    [counted] = await reader.add_token_counts([Message(role="user", text=text)], view.counting_options)
    return counted.tokens


class RoundPlanner:
    """Works out rounds, each once at a time.

    Args:
        reader: What counts.
        ledger_cache: What messages say and show.
    """

    def __init__(self, reader: MessageReader, ledger_cache: LedgerCache) -> None:
        self._reader = reader
        self._ledger_cache = ledger_cache
        self._running: dict[asyncio.Task[RoundDraft | None], tuple[object, ...]] = {}

    async def draft_round(self, view: RequestView, *, allow_small: bool = False) -> RoundDraft | None:
        """The round that the strategy would make of the request now, or None if there is nothing to take.

        Args:
            view: The request.
            allow_small: Whether a round is wanted even where little can be won.
        """
        asked = _build_key(view, allow_small=allow_small)
        same = (task for task, of in self._running.items() if of == asked)
        task = next(same, None) or self._start_task(view, asked, allow_small=allow_small)
        return await asyncio.shield(task)  # whoever leaves takes nothing from the others

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
                task.exception()  # all who asked may have left: then nobody else looks at it

        task.add_done_callback(finish_task)
        return task


def _build_key(view: RequestView, *, allow_small: bool) -> tuple[object, ...]:
    """Everything that a draft depends on."""
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
