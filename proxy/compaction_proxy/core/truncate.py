"""Plans the last rungs of the ladder, which make a request fit without a model where that is possible.

There are three such rungs, tried in this order. The first caps the largest of the older messages. The second
leaves out the oldest units. The third leaves out all units but the last one, and cuts the remaining messages.
Each rung goes only as far as needed.

Privileged messages and the latest user message stay whole. Replacements and the last message of the list are
cut only if nothing else makes the list fit. For this decision, the reserve for errors of estimates counts as
free room. The task and then project instructions are cut last. The newest unit, the task and project
instructions keep at least their beginning and end. If this is not enough, the list cannot be made to fit.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import islice

from compaction_proxy.core.ledger.client_forms import find_user_messages
from compaction_proxy.core.message import Message, find_latest_user_message, iter_units

# A message is capped to no fewer tokens than this as long as other messages can still be left out.
MIN_CAP_TOKENS = 400
# No message is cut to fewer tokens than this. Half of these tokens are for the notice that says how much text
# is missing.
MIN_CUT_TOKENS = 48
# If the limit of the list is small, a message may be capped to fewer tokens than `MIN_CAP_TOKENS`, but not to
# fewer than the limit divided by this number.
MIN_CAP_DIVISOR = 10
# The newest units stay whole as long as they take at most this share of the room. The room is the limit less
# the size of the other messages that stay whole.
NEWEST_SHARE = 0.5

KEEP_WHOLE = None
LEAVE_OUT = 0


@dataclass(frozen=True, slots=True)
class TruncationPlan:
    """The decision for each message of a list: whether it stays, is shortened or is left out.

    Attributes:
        allowances: One entry for each message: `KEEP_WHOLE` keeps the message as it is, `LEAVE_OUT` leaves it
            out, and a number is the number of tokens that it may keep.
        limit_tokens: The size for which the plan is made, in tokens: the requested limit, or a larger one if
            important messages would not fit otherwise.
        fits: Whether the list fits once the plan is carried out.
    """

    allowances: tuple[int | None, ...]
    limit_tokens: int
    fits: bool


def find_largest_cap(sizes: Sequence[int], available_tokens: int, floor_tokens: int) -> int | None:
    """Returns the largest cap with which all sizes together fit into `available_tokens`.

    A size that exceeds the cap is cut to the cap. If all sizes fit uncut, returns the largest size, or
    `floor_tokens` if `sizes` is empty. Returns None if the sizes fit only with a cap below `floor_tokens`, or
    if `available_tokens` is negative.
    """
    for smaller_count, size in enumerate(sorted(sizes)):
        rest = len(sizes) - smaller_count
        if size * rest > available_tokens:
            return cap if (cap := available_tokens // rest) >= floor_tokens else None
        available_tokens -= size
    return max(sizes, default=floor_tokens) if available_tokens >= 0 else None


def _list_units(messages: Sequence[Message]) -> list[list[int]]:
    """Returns the units as lists of indices, oldest first. Fixed messages belong to no unit."""
    body = [index for index, message in enumerate(messages) if not message.is_fixed]
    return [body[unit.start : unit.stop] for unit in iter_units([messages[index] for index in body])]


def _select_newest_units(
    messages: Sequence[Message], units: Iterable[list[int]], whole_indices: set[int], limit: int
) -> set[int]:
    """Returns the indices of the newest units that together take at most `NEWEST_SHARE` of the room.

    The room is the limit less the size of the messages in `whole_indices`.
    """
    room = NEWEST_SHARE * (limit - sum(messages[k].tokens for k in whole_indices))
    newest: set[int] = set()
    for run in units:
        added = set(run) - whole_indices
        room -= sum(messages[k].tokens for k in added)
        if room < 0:
            break
        newest |= added
    return newest


@dataclass(frozen=True, slots=True)
class _TruncationStep:
    """One attempt to make a list fit.

    The attempt determines which messages stay whole, which are left out, and the smallest size to which the
    others may be cut.
    """

    messages: Sequence[Message]
    limit_tokens: int
    whole_indices: set[int]
    dropped_indices: set[int]
    floor_tokens: int

    def list_cuttable(self) -> list[int]:
        return [
            k
            for k in range(len(self.messages))
            if k not in self.whole_indices and k not in self.dropped_indices
        ]

    def compute_least_tokens(self) -> int:
        return sum(self.messages[k].tokens for k in self.whole_indices) + sum(
            min(self.messages[k].tokens, self.floor_tokens) for k in self.list_cuttable()
        )

    def find_cap(self) -> int | None:
        room = self.limit_tokens - sum(self.messages[k].tokens for k in self.whole_indices)
        return find_largest_cap(
            [self.messages[k].tokens for k in self.list_cuttable()], room, self.floor_tokens
        )

    def build_plan(self) -> TruncationPlan:
        cap = self.find_cap()
        allowed = self.floor_tokens if cap is None else cap
        allowances: list[int | None] = [KEEP_WHOLE] * len(self.messages)
        for k in self.list_cuttable():
            allowances[k] = allowed if self.messages[k].tokens > allowed else KEEP_WHOLE
        for k in self.dropped_indices:
            allowances[k] = LEAVE_OUT
        return TruncationPlan(tuple(allowances), self.limit_tokens, fits=cap is not None)


def _flatten_indices(runs: Iterable[list[int]]) -> set[int]:
    return {index for run in runs for index in run}


def plan_truncation(
    messages: Sequence[Message],
    limit_tokens: int,
    replacement_indices: frozenset[int] = frozenset(),
    max_tokens: int = 0,
) -> TruncationPlan:
    """Plans how to bring a list down to `limit_tokens` tokens.

    Args:
        messages: The list. The size of a message is its `tokens`. The limits must be counted in the same way.
        limit_tokens: Size that the list should fit in, in tokens.
        replacement_indices: Indices of the messages that the proxy wrote.
        max_tokens: Size that the list may have before the task, replacements or the latest message are cut;
            at least `limit_tokens`.
    """
    fixed, kept_whole = _find_protected_messages(messages, replacement_indices)
    runs = _list_units(messages)
    newest = _select_newest_units(messages, reversed(runs), kept_whole, limit_tokens)
    staying = kept_whole | newest
    drops = [run for run in runs[:-1] if staying.isdisjoint(run)]

    def drop_oldest(oldest: int) -> _TruncationStep:
        return _TruncationStep(
            messages, limit_tokens, staying, _flatten_indices(drops[:oldest]), MIN_CAP_TOKENS
        )

    fewest = bisect_left(
        range(len(drops) + 1), x=True, key=lambda oldest: drop_oldest(oldest).find_cap() is not None
    )
    if fewest <= len(drops):
        return drop_oldest(fewest).build_plan()
    dropped = _flatten_indices(run for run in runs[:-1] if not kept_whole.intersection(run))
    own_messages = replacement_indices - fixed
    return _plan_last_steps(
        _TruncationStep(messages, limit_tokens, kept_whole, dropped, MIN_CUT_TOKENS),
        fixed,
        own_messages,
        max(limit_tokens, max_tokens),
    )


def _plan_last_steps(
    step: _TruncationStep, fixed_indices: set[int], replacement_indices: AbstractSet[int], max_tokens: int
) -> TruncationPlan:
    """Plans the last steps, after all units but the last one are left out.

    The steps are tried in order until the list fits. The first steps cut the last unit except the latest
    message, then the latest message and the replacements, beginning with the largest of them. The next steps
    leave out the replacements. Then the task is cut, and then project instructions. Messages of the client
    always keep their beginning and end, because a notice alone would not show what they contained. If the
    list is too large even then, the plan has `fits=False`.

    The last step lowers the smallest cap to half of the largest message that may be cut. Otherwise a list of
    small messages that is only a little too large would not fit.
    """
    kept_whole, last = step.whole_indices, len(step.messages) - 1
    older = kept_whole - {last} | fixed_indices
    newest = _flatten_indices(_list_units(step.messages)[-1:])
    nothing: AbstractSet[int] = frozenset()
    own_messages = replacement_indices - {last}
    instructions = {k for k in fixed_indices if step.messages[k].instruction is not None}
    least = max(MIN_CUT_TOKENS, min(MIN_CAP_TOKENS, step.limit_tokens // MIN_CAP_DIVISOR))
    last_resort = replace(
        step, whole_indices=fixed_indices, dropped_indices=step.dropped_indices | own_messages
    )
    largest = max((step.messages[k].tokens for k in last_resort.list_cuttable()), default=0)
    half = max(MIN_CUT_TOKENS, min(least, largest // 2))
    ways = (
        (kept_whole, nothing, least),
        (older - replacement_indices, nothing, MIN_CAP_TOKENS),
        (kept_whole - replacement_indices | newest, nothing, MIN_CUT_TOKENS),
        (kept_whole - replacement_indices, own_messages, least),
        (older - replacement_indices, own_messages, least),
        (fixed_indices, nothing, least),
        (fixed_indices, own_messages, least),
        (fixed_indices - instructions, own_messages, least),
        (fixed_indices, own_messages, half),
    )
    for whole, dropped, floor in ways:
        safe = replace(
            step, whole_indices=whole, dropped_indices=step.dropped_indices | dropped, floor_tokens=floor
        )
        for attempt in (safe, replace(safe, limit_tokens=(safe.compute_least_tokens() + max_tokens) // 2)):
            if attempt.find_cap() is not None:
                return attempt.build_plan()
    return attempt.build_plan()


def _find_protected_messages(
    messages: Sequence[Message], replacement_indices: frozenset[int]
) -> tuple[set[int], set[int]]:
    """Returns the indices of messages that must stay whole, and of those that stay whole if possible.

    The second set includes the first.
    """
    client_indices = [k for k in range(len(messages)) if k not in replacement_indices]
    client_messages = [messages[k] for k in client_indices]
    latest = find_latest_user_message(client_messages)
    fixed = {k for k in client_indices if messages[k].is_fixed}
    fixed |= set() if latest is None else {client_indices[latest]}
    task = {client_indices[k] for k in islice(find_user_messages(client_messages), 1)}
    return fixed, fixed | replacement_indices | task | set(range(len(messages))[-1:])
