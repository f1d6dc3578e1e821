"""Decides which project instructions stay in a rewritten request, and how much of each."""

import hashlib
from collections.abc import Collection, Mapping, Sequence

from compaction_proxy.core.message import Instruction, Message
from compaction_proxy.core.truncate import find_largest_cap

MAX_INSTRUCTION_TOKENS = 12_000
# The largest share of `Budget.input_limit` that all project instructions together may take. The input limit
# keeps only a small part of the context window free for output, even if a request asks for much output. So
# the same instructions stay in all requests of a conversation, and the proxy lowers the output limit instead.
MAX_INSTRUCTION_SHARE = 0.20
MAX_INSTRUCTIONS = 32
# If instructions have to be cut, those of the kind `environment` are cut first. Other instructions are cut
# only if an instruction of the kind `environment` would otherwise have to be cut to fewer tokens than this.
MIN_ENVIRONMENT_TOKENS = 200
_ID_DIGITS = 12


def compute_instruction_id(instruction: Instruction) -> str:
    """Computes the id of an instruction, `i_…`. It is the same for every version of one file."""
    key = "\0".join(instruction).encode("utf-8", "surrogatepass")
    return "i_" + hashlib.sha256(key).hexdigest()[:_ID_DIGITS]


def compute_instruction_budget(input_limit: int) -> int:
    """Computes how many tokens all instructions together may take, given `Budget.input_limit`."""
    return min(MAX_INSTRUCTION_TOKENS, int(MAX_INSTRUCTION_SHARE * input_limit))


def allocate_instruction_tokens(
    messages: Sequence[Message], budget_tokens: int, removed_ids: Collection[str] = ()
) -> dict[int, int]:
    """Returns how many tokens each shortened instruction may keep, by message index.

    An instruction that stays whole has no entry. An entry of 0 means that the instruction is left out. Only
    the newest version of each instruction stays. If there are more than 32 instructions, only the first 16
    and the last 16 stay. If the remaining instructions exceed the budget, they are cut to their beginning and
    end. Instructions of the kind `environment` are cut first.

    Args:
        messages: All messages of a list, fixed ones included.
        budget_tokens: Tokens for all instructions together, counted in the same way as the messages' own
            `tokens`.
        removed_ids: Ids (`compute_instruction_id`) of instructions to leave out.
    """
    instructions = {k: each.instruction for k, each in enumerate(messages) if each.instruction is not None}
    newest = {instruction: k for k, instruction in instructions.items()}
    kept_indices = [
        k
        for k, each in instructions.items()
        if newest[each] == k and compute_instruction_id(each) not in removed_ids
    ]
    half = MAX_INSTRUCTIONS // 2
    kept_indices = (
        kept_indices
        if len(kept_indices) <= MAX_INSTRUCTIONS
        else [*kept_indices[:half], *kept_indices[-half:]]
    )
    allowed = {k: 0 for k in instructions if k not in set(kept_indices)}
    return allowed | _cut_to_budget(
        {k: messages[k].tokens for k in kept_indices}, instructions, budget_tokens
    )


def _cut_to_budget(
    sizes: Mapping[int, int], instructions: Mapping[int, Instruction], budget_tokens: int
) -> dict[int, int]:
    """Returns the size in tokens to which each instruction is cut, by index.

    Instructions that stay whole have no entry.
    """
    if sum(sizes.values()) <= budget_tokens:
        return {}
    ambient_sizes = {k: size for k, size in sizes.items() if instructions[k].kind == "environment"}
    files = {k: size for k, size in sizes.items() if k not in ambient_sizes}
    least = sum(min(size, MIN_ENVIRONMENT_TOKENS) for size in ambient_sizes.values())
    cap = find_largest_cap([*files.values()], max(0, budget_tokens - least), 0) or 0
    remaining = budget_tokens - sum(min(size, cap) for size in files.values())
    caps = dict.fromkeys(files, cap) | dict.fromkeys(
        ambient_sizes, find_largest_cap([*ambient_sizes.values()], max(0, remaining), 0) or 0
    )
    return {k: max(1, caps[k]) for k, size in sizes.items() if size > caps[k]}
