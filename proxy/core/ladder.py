"""The floor of the ladder: a request is made to fit without any model, so that it always fits.

Rungs, each only as far as needed: cap the largest messages, leave out the oldest units, cut what is left.
Privileged messages and the latest user message stay whole; the task and stand-ins are cut last of all.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from proxy.core.message import Message, latest_user, units
from proxy.core.summary import task_of

# A message is capped to no less than this before others are left out altogether, in tokens.
CAP_FLOOR = 400
# The last rungs leave at least this much of a message, in tokens.
CUT_FLOOR = 24

WHOLE = None
GONE = 0


@dataclass(frozen=True, slots=True)
class Squeeze:
    """What to do to each message of a list.

    Attributes:
        allowances: Per message: `WHOLE` to keep it as it is, `GONE` to leave it out, else the tokens that
            it may keep.
        fits: Whether the list then fits.
    """

    allowances: tuple[int | None, ...]
    fits: bool


def _cap(sizes: Sequence[int], room: int, floor: int) -> int | None:
    """The largest cap, at least `floor`, that brings the sum of the sizes into `room`; None if none does."""
    for done, size in enumerate(sorted(sizes)):
        rest = len(sizes) - done
        if size * rest > room:
            return cap if (cap := room // rest) >= floor else None
        room -= size
    return max(sizes, default=floor) if room >= 0 else None


def _droppable(messages: Sequence[Message], kept: set[int]) -> list[list[int]]:
    """The units that may be left out, as lists of indices, oldest first; never the last unit."""
    body = [index for index, message in enumerate(messages) if not message.privileged]
    runs = [body[unit.start : unit.stop] for unit in units([messages[index] for index in body])]
    return [run for run in runs[:-1] if not kept.intersection(run)]


@dataclass(frozen=True, slots=True)
class _Rung:
    """One way to fit: what stays whole, what goes, and how small a cap may get."""

    messages: Sequence[Message]
    limit: int
    kept: set[int]
    gone: set[int]
    floor: int

    def loose(self) -> list[int]:
        return [k for k in range(len(self.messages)) if k not in self.kept and k not in self.gone]

    def cap(self) -> int | None:
        room = self.limit - sum(self.messages[k].tokens for k in self.kept)
        return _cap([self.messages[k].tokens for k in self.loose()], room, self.floor)

    def squeezed(self) -> Squeeze:
        cap = self.cap()
        allowed = self.floor if cap is None else cap
        allowances: list[int | None] = [WHOLE] * len(self.messages)
        for k in self.loose():
            allowances[k] = allowed if self.messages[k].tokens > allowed else WHOLE
        for k in self.gone:
            allowances[k] = GONE
        return Squeeze(tuple(allowances), fits=cap is not None)


def _flat(runs: Iterable[list[int]]) -> set[int]:
    return {index for run in runs for index in run}


def squeeze(messages: Sequence[Message], limit: int, stand_ins: frozenset[int] = frozenset()) -> Squeeze:
    """How to bring a list down to `limit` tokens; `stand_ins` are the indices of messages of ours.

    Sizes are the messages' own `tokens`, so the limit must be on the same scale.
    """
    theirs = [k for k in range(len(messages)) if k not in stand_ins]
    latest = latest_user([messages[k] for k in theirs])
    fixed = {k for k in theirs if messages[k].privileged} | (set() if latest is None else {theirs[latest]})
    task = task_of(messages[k] for k in theirs)
    kept = fixed | stand_ins | {k for k in theirs if messages[k] is task}
    drops = _droppable(messages, kept)

    def without(oldest: int) -> _Rung:
        return _Rung(messages, limit, kept, _flat(drops[:oldest]), CAP_FLOOR)

    fewest = bisect_left(range(len(drops) + 1), x=True, key=lambda oldest: without(oldest).cap() is not None)
    if fewest <= len(drops):
        return without(fewest).squeezed()
    gone = _flat(drops)
    last = _Rung(messages, limit, kept, gone, CUT_FLOOR)
    return (
        last.squeezed()
        if last.cap() is not None
        else _Rung(messages, limit, fixed, gone, CUT_FLOOR).squeezed()
    )
