"""The last rungs of the ladder: a request is made to fit without any model, wherever that is possible.

Rungs, each only as far as needed: cap the largest of the older messages, leave out the oldest units, leave
out all but the last one and cut what is left of it. Privileged messages and the latest user message stay
whole; stand-ins and the latest message, then the task, are cut last of all, and only once even the safety
that is kept for the error of estimates would not hold them. The newest unit and the task keep at least head
and tail: a list that does not fit so does not fit at all.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from compaction_proxy.core.message import Message, find_latest_user_message, iter_units
from compaction_proxy.core.summary.prompt import find_task_message

# A message is capped to no less than this before others are left out altogether, in tokens.
CAP_FLOOR = 400
# Records of ours are cut to no less than this, in tokens; the notice of what is missing takes half.
CUT_FLOOR = 48
# Under small limits a message is capped to no less than this part of the limit.
LEAST_SHARE = 10
# The newest units stay as they are up to this share of the room that may be shared out.
NEWEST_SHARE = 0.5

WHOLE = None
GONE = 0


@dataclass(frozen=True, slots=True)
class TruncationPlan:
    """What to do to each message of a list.

    Attributes:
        allowances: Per message: `WHOLE` to keep it as it is, `GONE` to leave it out, else the tokens that
            it may keep.
        limit: The size it is meant for, in tokens: the limit, or more where only that keeps what matters.
        fits: Whether it then fits.
    """

    allowances: tuple[int | None, ...]
    limit: int
    fits: bool


def _find_largest_cap(sizes: Sequence[int], room: int, floor: int) -> int | None:
    """The largest cap, at least `floor`, that brings the sum of the sizes into `room`; None if none does."""
    for done, size in enumerate(sorted(sizes)):
        rest = len(sizes) - done
        if size * rest > room:
            return cap if (cap := room // rest) >= floor else None
        room -= size
    return max(sizes, default=floor) if room >= 0 else None


def _list_units(messages: Sequence[Message]) -> list[list[int]]:
    """The units, as lists of indices, oldest first; fixed messages are in none."""
    body = [index for index, message in enumerate(messages) if not message.is_fixed]
    return [body[unit.start : unit.stop] for unit in iter_units([messages[index] for index in body])]


def _select_newest_units(
    messages: Sequence[Message], runs: Iterable[list[int]], whole: set[int], limit: int
) -> set[int]:
    """The newest units, as long as they leave older ones their share of what `kept` leaves of the limit."""
    room = NEWEST_SHARE * (limit - sum(messages[k].tokens for k in whole))
    found: set[int] = set()
    for run in runs:
        more = set(run) - whole
        room -= sum(messages[k].tokens for k in more)
        if room < 0:
            break
        found |= more
    return found


@dataclass(frozen=True, slots=True)
class _TruncationStep:
    """One way to fit: what stays whole, what goes, and how small a cap may get."""

    messages: Sequence[Message]
    limit: int
    whole: set[int]
    gone: set[int]
    floor: int

    def list_cuttable(self) -> list[int]:
        return [k for k in range(len(self.messages)) if k not in self.whole and k not in self.gone]

    def compute_least_tokens(self) -> int:
        return sum(self.messages[k].tokens for k in self.whole) + sum(
            min(self.messages[k].tokens, self.floor) for k in self.list_cuttable()
        )

    def find_cap(self) -> int | None:
        room = self.limit - sum(self.messages[k].tokens for k in self.whole)
        return _find_largest_cap([self.messages[k].tokens for k in self.list_cuttable()], room, self.floor)

    def build_plan(self) -> TruncationPlan:
        cap = self.find_cap()
        allowed = self.floor if cap is None else cap
        allowances: list[int | None] = [WHOLE] * len(self.messages)
        for k in self.list_cuttable():
            allowances[k] = allowed if self.messages[k].tokens > allowed else WHOLE
        for k in self.gone:
            allowances[k] = GONE
        return TruncationPlan(tuple(allowances), self.limit, fits=cap is not None)


def _flatten_indices(runs: Iterable[list[int]]) -> set[int]:
    return {index for run in runs for index in run}


def plan_truncation(
    messages: Sequence[Message], limit: int, replacements: frozenset[int] = frozenset(), max_tokens: int = 0
) -> TruncationPlan:
    """How to bring a list down to `limit` tokens.

    Args:
        messages: The list; sizes are the messages' own `tokens`, so the limits must be on the same scale.
        limit: What it should fit in, in tokens.
        replacements: Indices of messages of ours.
        max_tokens: What it may take before the task, stand-ins or the latest message are cut; not under
            `limit`.
    """
    fixed, kept = _find_protected_messages(messages, replacements)
    runs = _list_units(messages)
    newest = _select_newest_units(messages, reversed(runs), kept, limit)
    drops = [run for run in runs[:-1] if not (kept | newest).intersection(run)]

    def drop_oldest(oldest: int) -> _TruncationStep:
        return _TruncationStep(messages, limit, kept | newest, _flatten_indices(drops[:oldest]), CAP_FLOOR)

    fewest = bisect_left(
        range(len(drops) + 1), x=True, key=lambda oldest: drop_oldest(oldest).find_cap() is not None
    )
    if fewest <= len(drops):
        return drop_oldest(fewest).build_plan()
    gone = _flatten_indices(run for run in runs[:-1] if not kept.intersection(run))
    ours = replacements - fixed
    return _plan_last_steps(
        _TruncationStep(messages, limit, kept, gone, CUT_FLOOR), fixed, ours, max(limit, max_tokens)
    )


def _plan_last_steps(
    step: _TruncationStep, fixed: set[int], replacements: AbstractSet[int], max_tokens: int
) -> TruncationPlan:
    """Beside what is kept only the last unit is left: what gives next, until it fits.

    The rest of the last unit; the latest message and ours, the larger first; ours; the task; instructions of
    the project. What is theirs keeps head and tail: a mark alone would hide that it was ever there, so the
    list does not fit then. Where all that may be cut is smaller than the floor, or little larger, the largest
    of it keeps half: else a list that is hardly too large would not fit at all.
    """
    kept, last = step.whole, len(step.messages) - 1
    older = kept - {last} | fixed
    newest = _flatten_indices(_list_units(step.messages)[-1:])
    nothing: AbstractSet[int] = frozenset()
    away = replacements - {last}
    instructions = {k for k in fixed if step.messages[k].instruction is not None}
    least = max(CUT_FLOOR, min(CAP_FLOOR, step.limit // LEAST_SHARE))
    last_resort = replace(step, whole=fixed, gone=step.gone | away)
    largest = max((step.messages[k].tokens for k in last_resort.list_cuttable()), default=0)
    half = max(CUT_FLOOR, min(least, largest // 2))
    ways = (
        (kept, nothing, least),
        (older - replacements, nothing, CAP_FLOOR),
        (kept - replacements | newest, nothing, CUT_FLOOR),
        (kept - replacements, away, least),
        (older - replacements, away, least),
        (fixed, nothing, least),
        (fixed, away, least),
        (fixed - instructions, away, least),
        (fixed, away, half),
    )
    for whole, dropped, floor in ways:
        safe = replace(step, whole=whole, gone=step.gone | dropped, floor=floor)
        for tried in (safe, replace(safe, limit=(safe.compute_least_tokens() + max_tokens) // 2)):
            if tried.find_cap() is not None:
                return tried.build_plan()
    return tried.build_plan()


def _find_protected_messages(
    messages: Sequence[Message], replacements: frozenset[int]
) -> tuple[set[int], set[int]]:
    """What is never cut, and what is kept whole as long as possible."""
    theirs = [k for k in range(len(messages)) if k not in replacements]
    latest = find_latest_user_message([messages[k] for k in theirs])
    fixed = {k for k in theirs if messages[k].is_fixed} | (set() if latest is None else {theirs[latest]})
    task = find_task_message(messages[k] for k in theirs)
    first = next((k for k in theirs if messages[k] is task), None)  # equal messages may be one object
    kept = fixed | replacements | set(range(len(messages))[-1:])
    return fixed, kept | (set() if first is None else {first})
