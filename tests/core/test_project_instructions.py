"""Which instructions of a project go on whole, shortened, or not at all."""

import pytest

from compaction_proxy.core.message import Instruction, Message, Span, find_latest_user_message
from compaction_proxy.core.planner import find_task_index
from compaction_proxy.core.project_instructions import (
    MAX_INSTRUCTIONS,
    allocate_instruction_tokens,
    compute_instruction_budget,
    compute_instruction_id,
)
from compaction_proxy.core.render import build_effective_list
from compaction_proxy.core.summary.prompt import find_task_message


def block(path: str, tokens: int = 100, kind: str = "instructions") -> Message:
    return Message("user", f"text of {path}", tokens=tokens, instruction=Instruction("c", kind, path))


SAID = Message("user", "Fix it.", tokens=5)
ANSWER = Message("assistant", "Done.", tokens=5)


@pytest.mark.parametrize(("limit", "tokens"), [(10_000, 2_000), (60_000, 12_000), (1_000_000, 12_000)])
def test_the_budget_is_a_fifth_of_the_limit_and_12000_tokens_at_most(limit: int, tokens: int) -> None:
    assert compute_instruction_budget(limit) == tokens


def test_what_fits_stays_whole() -> None:
    assert allocate_instruction_tokens([block("a"), block("b"), SAID], 200) == {}


def test_the_newest_version_of_a_file_stays() -> None:
    assert allocate_instruction_tokens([block("a"), SAID, block("b"), block("a"), SAID], 1_000) == {0: 0}


def test_what_was_removed_is_left_out_in_every_version() -> None:
    name = compute_instruction_id(Instruction("c", "instructions", "a"))
    assert allocate_instruction_tokens([block("a"), block("b"), block("a")], 1_000, {name}) == {0: 0, 2: 0}


def test_files_share_what_there_is_and_small_ones_stay_whole() -> None:
    assert allocate_instruction_tokens([block("a", 50), block("b", 900), block("c", 700)], 1_050) == {
        1: 500,
        2: 500,
    }


def test_surroundings_are_cut_before_files() -> None:
    messages = [block("a", 700), block("", 900, "environment"), block("x", 100, "environment")]
    assert allocate_instruction_tokens(messages, 1_100) == {1: 300}
    assert allocate_instruction_tokens(messages, 600) == {0: 300, 1: 200}


def test_of_too_many_the_first_and_the_last_stay() -> None:
    messages = [block(str(k), 1) for k in range(MAX_INSTRUCTIONS + 8)]
    assert allocate_instruction_tokens(messages, 10_000) == dict.fromkeys(range(16, 24), 0)


def test_without_room_a_token_is_left_of_each() -> None:
    assert allocate_instruction_tokens([block("a"), block("b")], 0) == {0: 1, 1: 1}


def test_instructions_are_neither_task_nor_latest_message_and_stay_in_their_place() -> None:
    messages = (block("a"), SAID, ANSWER, block("b"), SAID, ANSWER)
    assert find_task_index(messages) == 1
    assert find_task_message(messages) is SAID
    assert find_latest_user_message(messages) == 4
    assert find_latest_user_message([block("a")]) is None
    assert all(each.is_fixed for each in (messages[0], Message("system", "x")))
    record = Message("user", "record", tokens=1)
    made = build_effective_list(messages, [Span(1, 3)], [(record,)])
    assert made == (messages[0], SAID, record, messages[3], ANSWER)
