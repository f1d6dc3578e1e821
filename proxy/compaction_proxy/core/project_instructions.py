"""Which instructions of a project go on in a request that is rewritten, and how much of each."""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence

from compaction_proxy.core.message import Instruction, Message

MAX_TOKENS = 12_000
# The share of what may be used that they may take. The output asked for does not count there: it yields
# before content does, and must not change what was kept.
MAX_SHARE = 0.20
MAX_BLOCKS = 32
# What is there to read about surroundings is cut first, to no less than this, in tokens.
LEAST_TOKENS = 200
_ID_DIGITS = 12


def compute_instruction_id(instruction: Instruction) -> str:
    """Returns the name of an instruction, `i_…`: the same for each version of one file."""
    key = "\0".join(instruction).encode("utf-8", "surrogatepass")
    return "i_" + hashlib.sha256(key).hexdigest()[:_ID_DIGITS]


def compute_instruction_budget(limit: int) -> int:
    """Returns how many tokens they may take together, given `Budget.input_limit`."""
    return min(MAX_TOKENS, int(MAX_SHARE * limit))


def allocate_instruction_tokens(
    messages: Sequence[Message], budget: int, removed: Collection[str] = ()
) -> dict[int, int]:
    """Returns the tokens that instructions may keep, by index; those that stay whole are left out.

    Of each the newest version stays; more than 32 lose those in the middle; what is over the budget is to
    keep head and tail, surroundings first.

    Args:
        messages: A whole list.
        budget: Tokens for all of them together, counted as the messages are.
        removed: Names (`compute_instruction_id`) of those that are left out.
    """
    found = {k: each.instruction for k, each in enumerate(messages) if each.instruction is not None}
    newest = {instruction: k for k, instruction in found.items()}
    kept = [
        k for k, each in found.items() if newest[each] == k and compute_instruction_id(each) not in removed
    ]
    half = MAX_BLOCKS // 2
    kept = kept if len(kept) <= MAX_BLOCKS else [*kept[:half], *kept[-half:]]
    allowed = {k: 0 for k in found if k not in set(kept)}
    return allowed | _cut_to_budget({k: messages[k].tokens for k in kept}, found, budget)


def _cut_to_budget(sizes: Mapping[int, int], found: Mapping[int, Instruction], budget: int) -> dict[int, int]:
    """What the kept ones are cut to, where they do not fit."""
    if sum(sizes.values()) <= budget:
        return {}
    around = {k: size for k, size in sizes.items() if found[k].kind == "environment"}
    files = {k: size for k, size in sizes.items() if k not in around}
    least = sum(min(size, LEAST_TOKENS) for size in around.values())
    cap = _find_largest_cap(files.values(), max(0, budget - least))
    left = budget - sum(min(size, cap) for size in files.values())
    caps = dict.fromkeys(files, cap) | dict.fromkeys(around, _find_largest_cap(around.values(), max(0, left)))
    return {k: max(1, caps[k]) for k, size in sizes.items() if size > caps[k]}


def _find_largest_cap(sizes: Iterable[int], room: int) -> int:
    """The largest cap with which the sizes fit the room."""
    ordered = sorted(sizes)
    for done, size in enumerate(ordered):
        if size * (len(ordered) - done) > room:
            return room // (len(ordered) - done)
        room -= size
    return max(ordered, default=0)
