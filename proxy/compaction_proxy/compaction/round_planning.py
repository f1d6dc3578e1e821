"""What a round of a request shall be: the plan, and the text that goes with it and needs no model."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from compaction_proxy.compaction.ledger_cache import Gleanings
from compaction_proxy.compaction.message_reader import Reading
from compaction_proxy.compaction.request_view import View
from compaction_proxy.core.digest import message_id
from compaction_proxy.core.ledger.frontier import Frontier
from compaction_proxy.core.ledger.ledger import Standing, ledger, rendered, rules
from compaction_proxy.core.masking import MASK_TOKENS, first_to_go
from compaction_proxy.core.message import Message, latest_user
from compaction_proxy.core.planner import (
    Plan,
    Room,
    boundary,
    chain_records,
    plan,
    sizes,
    task_index,
    unchanged,
    with_edits,
)
from compaction_proxy.core.strategies import LAYOUT, Limit
from compaction_proxy.support.offload import beside

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
class Draft:
    """A round to be made.

    Attributes:
        plan: What is replaced.
        asked: Size of the summary, in tokens; 0 where there is none.
        pays: Whether enough can be won to be worth a summary.
        ledger: What the user said and what was observed, for a chain of records; else empty.
        rules: What the ledger must hold in any case.
        outdated: What the user said and no longer holds, by index of the message: no model shall see it.
        frontier: Where the conversation stands, for a chain of records; else empty.
    """

    plan: Plan
    asked: int
    pays: bool = True
    ledger: str = ""
    rules: tuple[str, ...] = ()
    outdated: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    frontier: Frontier = field(default_factory=Frontier)


async def drafted(view: View, reading: Reading, gleanings: Gleanings, *, small: bool = False) -> Draft | None:
    """The round that the strategy would make of the request now, or None if there is nothing to take.

    What the client moves stays out of it, unless the request would not fit then.

    Args:
        view: The request.
        reading: What counts.
        gleanings: What messages say and show.
        small: Whether a round is wanted even where little can be won.
    """
    draft = await _drafted(view, reading, gleanings, small=small)
    if not view.moving or not view.exceeds_window(view.effective) or (draft and _fits(view, draft)):
        return draft
    return await _drafted(replace(view, moving=0), reading, gleanings, small=small)


def _fits(view: View, draft: Draft) -> bool:
    """Whether a request will fit once the round is made, as far as its texts can be foreseen."""
    forwarded = sizes(view.body, view.earlier)
    edited = {fill.at for fill in draft.plan.fills if fill.kind in {"mask", "cap"}}
    won = sum(forwarded[index] - MASK_TOKENS for index in edited)
    won += sum(forwarded[index] for index in draft.plan.fresh) - draft.asked - FRAME_TOKENS
    won -= int(len(draft.ledger) / CHARACTERS_A_TOKEN)
    return (view.room.size - won) * view.ratio <= view.budget.input_limit


async def _drafted(view: View, reading: Reading, gleanings: Gleanings, *, small: bool) -> Draft | None:
    """The same, with what the client moves left out of it in any case."""
    room = view.room
    if view.policy.layout is None:
        return await beside(partial(_plain, view, room))
    masked = await beside(partial(_masked, view, room))
    if masked is not None:
        return masked
    held = await beside(partial(_held, view, room, gleanings))
    told = await _tokens(held.words.text, view, reading)
    return await beside(partial(_chained, view, held, told, gleanings, small=small))


def capped(view: View) -> Plan | None:
    """What to shorten before a round: huge results of the newest unit that no round can make room for."""
    layout = view.policy.layout
    results = _unanswered(view.body)
    if layout is None or not results or not view.automatic or view.held_back:
        return None
    forwarded, usable, ratio = sizes(view.body, view.earlier), view.budget.usable, view.ratio
    if (view.fixed + sum(forwarded[index] for index in results)) * ratio <= usable:
        return None
    known = view.earlier.edited if view.earlier else frozenset()
    least = max(layout.cap.of(view.trigger), usable * layout.huge_share / max(ratio, 0.01))
    edits = [index for index in results if index not in known and forwarded[index] > least]
    return with_edits(unchanged(view.earlier), dict.fromkeys(edits, "cap")) if edits else None


def _unanswered(messages: Sequence[Message]) -> range:
    """Indices of the results in the last unit."""
    start = len(messages)
    while start and messages[start - 1].answers:
        start -= 1
    called = start > 0 and bool(messages[start - 1].calls)
    return range(start if called else max(start, len(messages) - 1), len(messages))


def _plain(view: View, room: Room) -> Draft | None:
    """One plan, and nothing beside it."""
    asked = _asked(view, 0)
    made = plan(view.body, view.effective, view.policy, view.earlier, replace(room, records=asked))
    return Draft(made, asked, _pays(view, made, 0, room)) if made else None


class _Held(NamedTuple):
    """What a further record of a chain would have to hold beside its summary.

    Attributes:
        room: With whether the chain must be written anew.
        covered: What is taken if there is room for what is carried over.
        standing: What users have said and still holds.
        frontier: Where the conversation stands.
        words: The ledger.
    """

    room: Room
    covered: frozenset[int]
    standing: Standing
    frontier: Frontier
    words: "CarriedOver"


def _masked(view: View, room: Room) -> Draft | None:
    """Masks, if they suffice."""
    stop = boundary(view.body, view.effective, view.policy, view.earlier, room, least=True)
    masks = _masks(view, room, stop)
    return Draft(with_edits(unchanged(view.earlier), dict.fromkeys(masks, "mask")), 0) if masks else None


def _held(view: View, room: Room, gleanings: Gleanings) -> _Held:
    """What would be carried over."""
    stop = boundary(view.body, view.effective, view.policy, view.earlier, room)
    stay = {latest_user(view.body), task_index(view.body)}
    covered = frozenset(index for index in range(stop) if index not in stay)
    standing = gleanings.standing(view.body)
    said = " ".join(each.text for each in _kept(view)).casefold()
    anew = any(value in said for value in standing.outdated.values)
    frontier = gleanings.frontier(view.body)
    words = _carried_over(view, covered, standing, frontier, gleanings)
    return _Held(replace(room, anew=anew), covered, standing, frontier, words)


def _chained(view: View, held: _Held, told: int, gleanings: Gleanings, *, small: bool) -> Draft | None:
    """A further record of the chain, where what is carried over takes so many tokens."""
    room, covered, words = held.room, held.covered, held.words
    kept = sum(each.tokens for each in _kept(view))
    asked = _asked(view, sum(view.body[index].tokens for index in covered) - kept)
    records = told + asked + FRAME_TOKENS + kept
    made = plan(view.body, view.effective, view.policy, view.earlier, replace(room, records=records))
    if made is None:
        return None
    pays = _pays(view, made, asked, room)
    if not (small or pays):
        return None
    gone = frozenset(made.gone)
    if covered != gone:  # what was carried over took more or less than there was room for
        words = _carried_over(view, gone, held.standing, held.frontier, gleanings)
    outdated = held.standing.outdated.texts
    return Draft(_with_task(view, made, room), asked, pays, *words, outdated, held.frontier)


def _kept(view: View) -> tuple[Message, ...]:
    """The records of the chain so far."""
    return chain_records(view.earlier) if view.earlier else ()


def _asked(view: View, removed: int) -> int:
    """Size of the summary to ask for, in tokens."""
    shape = view.policy.summary
    if shape is None:
        return 0
    asked = shape.asked(max(0, removed))
    return min(asked, int(SUMMARY_SHARE * view.room.trigger)) if shape.share else asked


def _masks(view: View, room: Room, stop: int) -> list[int]:
    """The tool results to mask, if that alone brings the request down to its target; else none."""
    forwarded = sizes(view.body, view.earlier)
    known = view.earlier.edited if view.earlier else frozenset()
    candidates = [
        index
        for index in _old_results(view, stop)
        if index not in known and forwarded[index] > 2 * MASK_TOKENS
    ]
    if room.target is None:
        return []
    goal = room.target
    if room.is_scarce:
        goal = room.fixed + int(MASKED_SHARE * room.free)
    size, masks = room.size + room.growth, []
    for index in first_to_go(view.body, candidates):
        if size <= goal:
            break
        masks.append(index)
        size -= forwarded[index] - MASK_TOKENS
    return masks if size <= goal else []


def _old_results(view: View, stop: int) -> list[int]:
    """Tool results before the tail that are still there, without the newest that always stay."""
    gone = view.earlier.gone if view.earlier else frozenset()
    results = [index for index, each in enumerate(view.body) if each.answers and index not in gone]
    newest = view.policy.keep.tool_results
    return [index for index in (results[:-newest] if newest else results) if index < stop]


def _pays(view: View, made: Plan, asked: int, room: Room) -> bool:
    """Whether what can be removed is worth a round: enough of it, and more than what takes its place."""
    forwarded = sizes(view.body, view.earlier)
    won = sum(forwarded[index] for index in made.fresh) - asked
    return won >= LEAST_SHARE * room.trigger


def _with_task(view: View, made: Plan, room: Room) -> Plan:
    """The plan with a task that is too long shortened, unless it is the latest user message too."""
    task = task_index(view.body)
    known = view.earlier.edited if view.earlier else frozenset()
    moves = task is not None and task >= len(view.body) - view.moving
    if task is None or task == latest_user(view.body) or task in known or moves:
        return made
    too_long = view.body[task].tokens > view.policy.task_tokens.of(room.trigger)
    return with_edits(made, {task: "cap"}) if too_long else made


class CarriedOver(NamedTuple):
    """A ledger as text, and the rules that it must hold."""

    text: str
    rules: tuple[str, ...]


async def carried_over(view: View, covered: Collection[int], gleanings: Gleanings) -> CarriedOver:
    """The ledger of what is covered, within the budget of `anchored`: every strategy falls back on it."""

    def read() -> CarriedOver:
        standing, frontier = gleanings.standing(view.body), gleanings.frontier(view.body)
        return _carried_over(view, covered, standing, frontier, gleanings)

    return await beside(read)


def pins_of(view: View) -> tuple[str, ...]:
    """What people want to be kept word for word."""
    return tuple(dict.fromkeys((*view.wishes.pins, *view.ask.pins)))


def _carried_over(
    view: View, covered: Collection[int], standing: Standing, frontier: Frontier, gleanings: Gleanings
) -> CarriedOver:
    layout = view.policy.layout or LAYOUT
    gone = frozenset(covered) | (view.earlier.gone if view.earlier else frozenset())
    characters = int(_ledger_tokens(view, layout.ledger) * CHARACTERS_A_TOKEN)
    found = ledger(
        view.body,
        gone,
        lambda index: message_id(view.prefixes[index]),
        pins_of(view),
        standing=standing,
        frontier=frontier,
        seen=gleanings.seen,
    )
    return CarriedOver(rendered(found, characters), rules(found))


def _ledger_tokens(view: View, limit: Limit) -> int:
    """Tokens that the ledger may take: its limit, as far as it need not yield to the tail's floor."""
    room, tail = view.room, view.policy.keep.tail
    most = limit.of(room.trigger)
    if room.target is None or tail is None:
        return most
    others = sum(each.tokens for each in _kept(view))
    others += int(SUMMARY_SHARE * room.trigger) + tail.of(room.free)
    usual = min(max(LEDGER_TOKENS, int(LEDGER_SHARE * most)), int(FILLED_SHARE * room.free) - others)
    left = max(room.target - room.fixed - others, usual, int(LEAST_LEDGER_SHARE * most))
    return min(most, left)


async def _tokens(text: str, view: View, reading: Reading) -> int:
    if not text:
        return 0
    [counted] = await reading.counted([Message(role="user", text=text)], view.gauge)
    return counted.tokens


class Drafting:
    """Works out rounds, each once at a time.

    Args:
        reading: What counts.
        gleanings: What messages say and show.
    """

    def __init__(self, reading: Reading, gleanings: Gleanings) -> None:
        self._reading = reading
        self._gleanings = gleanings
        self._running: dict[asyncio.Task[Draft | None], tuple[object, ...]] = {}

    async def drafted(self, view: View, *, small: bool = False) -> Draft | None:
        """The round that the strategy would make of the request now, or None if there is nothing to take.

        Args:
            view: The request.
            small: Whether a round is wanted even where little can be won.
        """
        asked = _find_key(view, small=small)
        same = (task for task, of in self._running.items() if of == asked)
        task = next(same, None) or self._begun(view, asked, small=small)
        return await asyncio.shield(task)  # whoever leaves takes nothing from the others

    def _begun(self, view: View, asked: tuple[object, ...], *, small: bool) -> asyncio.Task[Draft | None]:
        task = asyncio.create_task(drafted(view, self._reading, self._gleanings, small=small))
        self._running[task] = asked

        def ended(task: asyncio.Task[Draft | None]) -> None:
            del self._running[task]
            if not task.cancelled():
                task.exception()  # all who asked may have left: then nobody else looks at it

        task.add_done_callback(ended)
        return task


def _find_key(view: View, *, small: bool) -> tuple[object, ...]:
    """Everything that a draft depends on."""
    return (
        view.ask.tenant,
        tuple(each.digest for each in view.messages),
        view.earlier,
        view.policy,
        view.gauge,
        view.room,
        pins_of(view),
        small,
    )
