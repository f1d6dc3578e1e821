"""The floor of the ladder: a request is made to fit without any model, so that it always fits.

Rungs, each only as far as needed: cap the largest messages, leave out the oldest units, cut the rest.
Privileged messages and the latest user message stay whole; the task and stand-ins are cut last.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.core.message import Message, latest_user, units
from proxy.core.summary import task_of

# A message is capped to no less than this before others are left out altogether, in tokens.
CAP_FLOOR = 400
# The last rung leaves at least this much of a message, in tokens.
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


def _cap(sizes: Sequence[int], budget: int, floor: int) -> int | None:
    """The largest cap, at least `floor`, that brings the sum of the sizes under the budget; None if none does."""
    left = budget
    for done, size in enumerate(sorted(sizes)):
        rest = len(sizes) - done
        if size * rest > left:
            cap = left // rest
            return cap if cap >= floor else None
        left -= size
    return max(sizes, default=floor)


def _capped(sizes: Sequence[int], cap: int) -> list[int | None]:
    return [cap if size > cap else WHOLE for size in sizes]


def _spent(messages: Sequence[Message], indices: set[int]) -> int:
    return sum(messages[index].tokens for index in indices)


def _droppable(messages: Sequence[Message], kept: set[int]) -> list[range]:
    """Units that may be left out, oldest first; never the last one."""
    body = [index for index, message in enumerate(messages) if not message.privileged]
    runs = [
        [body[place] for place in range(unit.start, unit.stop)]
        for unit in units([messages[index] for index in body])
    ]
    return [range(run[0], run[-1] + 1) for run in runs[:-1] if not kept.intersection(run)]


def squeeze(messages: Sequence[Message], limit: int, stand_ins: frozenset[int] = frozenset()) -> Squeeze:
    """How to bring a list down to `limit` tokens; `stand_ins` are indices of messages of ours.

    Sizes are the messages' own `tokens`, so the limit must be on the same scale.
    """
    fixed = {index for index, message in enumerate(messages) if message.privileged}
    latest = latest_user([Message("system") if k in stand_ins else m for k, m in enumerate(messages)])
    fixed |= set() if latest is None else {latest}
    task = task_of(message for index, message in enumerate(messages) if index not in stand_ins)
    late = {index for index, message in enumerate(messages) if message is task} | stand_ins
    late -= fixed

    for kept in (fixed | late, fixed):
        gone: set[int] = set()
        drops = _droppable(messages, fixed | late)
        for step in range(len(drops) + 1):
            loose = [k for k in range(len(messages)) if k not in kept and k not in gone]
            floor = CAP_FLOOR if step < len(drops) else CUT_FLOOR
            cap = _cap([messages[k].tokens for k in loose], limit - _spent(messages, kept), floor)
            if cap is not None:
                return Squeeze(_allowances(messages, loose, gone, cap), fits=True)
            if step < len(drops):
                gone.update(k for k in drops[step] if k not in kept and not messages[k].privileged)
    loose = [k for k in range(len(messages)) if k not in fixed and k not in gone]
    return Squeeze(_allowances(messages, loose, gone, CUT_FLOOR), fits=False)


def _allowances(
    messages: Sequence[Message], loose: Sequence[int], gone: set[int], cap: int
) -> tuple[int | None, ...]:
    allowances: list[int | None] = [WHOLE] * len(messages)
    for index in gone:
        allowances[index] = GONE
    for index in loose:
        if messages[index].tokens > cap:
            allowances[index] = cap
    return tuple(allowances)
