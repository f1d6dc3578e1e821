"""What a round takes, and what a conversation has gained since the last one."""

from dataclasses import replace

import pytest

from compaction_proxy.core.checkpoint import Checkpoint
from compaction_proxy.core.message import Message, MessageToolCall, Span
from compaction_proxy.core.planner import (
    PlanConstraints,
    PlannedReplacement,
    RoundPlan,
    add_edits,
    build_unchanged_plan,
    count_growth,
    find_tail_start,
    find_task_index,
    plan_round,
)
from compaction_proxy.core.render import build_effective_list
from compaction_proxy.core.strategies import ANCHORED, CHAINED, FULL, KeepRules, Policy
from compaction_proxy.core.trigger import GrowthCounts

KEEP_3 = replace(CHAINED, keep=KeepRules(messages=3), least_messages=4)
ROOM = PlanConstraints(trigger_tokens=1_000, target_tokens=None, request_tokens=0)
STAND_IN = Message("assistant", "summary")


def user(text: str = "u") -> Message:
    return Message("user", text)


def said(text: str = "a") -> Message:
    return Message("assistant", text)


def calling() -> Message:
    return Message(
        "assistant", calls=(MessageToolCall("c", "read", "{}"), MessageToolCall("d", "read", "{}"))
    )


def answer(call: str = "c") -> Message:
    return Message("tool", "ok", answered_call_ids=(call,))


def chat(turns: int) -> list[Message]:
    return [message for _ in range(turns) for message in (user(), said())]


def made(spans: list[Span], length: int, listed: int = 0) -> Checkpoint:
    stand_ins = ((STAND_IN,), *(() for _ in spans[1:]))
    return Checkpoint(
        "chained", "c_", 1, length, bytes(32), (), tuple(spans), stand_ins, "summary", 9, 3, listed
    )


def planned(
    messages: list[Message], earlier: Checkpoint | None = None, policy: Policy = KEEP_3
) -> RoundPlan | None:
    effective = (
        build_effective_list(messages, earlier.spans, earlier.stand_ins, earlier.edited)
        if earlier
        else messages
    )
    return plan_round(messages, effective, policy, earlier, ROOM)


def one_text(number: int, length: int, spans: list[Span], fresh: tuple[int, ...]) -> RoundPlan:
    """A round whose text stands in the first span."""
    fills = (PlannedReplacement("text"), *(PlannedReplacement("nothing") for _ in spans[1:]))
    return RoundPlan(number, length, tuple(spans), fills, (fresh,))


def test_all_but_the_newest_messages_are_taken() -> None:
    assert planned(chat(4)) == one_text(1, 5, [Span(0, 5)], (0, 1, 2, 3, 4))


def test_with_one_more_message_than_are_kept_nothing_is_taken() -> None:
    assert planned(chat(2)) is None


def test_the_boundary_walks_back_to_the_edge_of_a_unit() -> None:
    messages = [user(), said(), calling(), answer("c"), answer("d"), said(), user()]

    assert planned(messages) == one_text(1, 2, [Span(0, 2)], (0, 1))


def test_when_the_boundary_walks_back_to_the_start_nothing_is_taken() -> None:
    assert planned([calling(), answer("c"), answer("d"), said(), user()]) is None


def test_stray_results_are_read_a_bounded_number_of_times() -> None:
    class CountedList(list[Message]):
        reads = 0

        def __getitem__(self, key):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN204
            type(self).reads += 1
            return super().__getitem__(key)

    messages = CountedList([user(), *(replace(answer(), tokens=1) for _ in range(2_000)), user()])

    assert find_tail_start(messages, messages, ANCHORED, None, replace(ROOM, trigger_tokens=100_000)) == 2_001
    assert CountedList.reads < 20 * len(messages)


def test_the_latest_user_message_is_left_in_its_place() -> None:
    messages = [said(), user(), said(), said(), said(), said(), said()]

    assert planned(messages) == one_text(1, 4, [Span(0, 1), Span(2, 4)], (0, 2, 3))


def test_the_next_round_covers_the_earlier_one_and_summarises_only_what_is_new() -> None:
    assert planned(chat(6), made([Span(0, 5)], 5)) == one_text(2, 9, [Span(0, 9)], (5, 6, 7, 8))


def test_a_message_that_was_kept_as_the_latest_is_summarised_once_it_no_longer_is() -> None:
    messages = [said(), user("first"), *(said() for _ in range(6)), user("second"), said()]

    assert planned(messages, made([Span(0, 1), Span(2, 4)], 4)) == one_text(2, 7, [Span(0, 7)], (1, 4, 5, 6))


def test_a_round_that_would_take_nothing_new_is_not_made() -> None:
    messages = [said(), user(), said(), said(), said(), said(), said()]

    assert planned(messages, made([Span(0, 1), Span(2, 4)], 4)) is None


def test_nothing_is_gained_right_after_a_round() -> None:
    messages = chat(4)

    assert count_growth(messages, made([Span(0, 5)], 5, listed=8)) == GrowthCounts(
        messages=0, turns=0, iterations=0
    )


def test_what_came_after_a_round_is_gained() -> None:
    messages = [*chat(5), calling(), answer()]

    assert count_growth(messages, made([Span(0, 5)], 5, listed=8)) == GrowthCounts(
        messages=4, turns=1, iterations=2
    )
    assert count_growth(messages, None) == GrowthCounts(messages=12, turns=5, iterations=6)


def test_a_branch_that_is_shorter_than_its_round_was_has_gained_nothing() -> None:
    assert count_growth(chat(3), made([Span(0, 5)], 5, listed=8)) == GrowthCounts(
        messages=0, turns=0, iterations=0
    )


def test_what_an_earlier_round_took_stays_gone_where_more_is_kept_now() -> None:
    messages = [*chat(3), user("was the latest"), *chat(3)]
    earlier = made([Span(0, 6), Span(7, 9)], 9)
    roomy = replace(KEEP_3, keep=KeepRules(iterations=3))  # the third from the end is gone

    assert planned(messages, earlier, roomy) == one_text(2, 9, [Span(0, 9)], (6,))


def test_a_round_never_speaks_of_less_than_the_one_before() -> None:
    messages = [*chat(6), said()]
    earlier = made([Span(0, 3)], 12)
    found = planned(messages, earlier)

    assert found is not None
    assert (found.spans, found.length) == ((Span(0, 10),), 12)


def test_the_task_is_the_first_message_of_the_user_that_answers_no_call() -> None:
    result = Message("user", "a result", answered_call_ids=("c",))

    assert find_task_index([said(), result, user("task"), user("more")]) == 2
    assert find_task_index([said(), result]) is None


def test_edits_alone_make_no_round() -> None:
    assert add_edits(build_unchanged_plan(None), {3: "mask", 1: "cap"}) == RoundPlan(
        round=0,
        length=4,
        spans=(Span(1, 2), Span(3, 4)),
        planned_replacements=(PlannedReplacement("cap", 1), PlannedReplacement("mask", 3)),
    )


def test_edits_stand_beside_what_an_earlier_round_did_and_replace_an_earlier_edit() -> None:
    earlier = replace(
        made([Span(0, 4), Span(6, 7)], 9),
        stand_ins=((STAND_IN,), (STAND_IN,)),
        edited=frozenset({6}),
        carried=2,
    )

    assert build_unchanged_plan(earlier) == RoundPlan(
        1,
        9,
        (Span(0, 4), Span(6, 7)),
        (PlannedReplacement("before", 0), PlannedReplacement("before", 1)),
        carried_index=2,
    )
    assert add_edits(build_unchanged_plan(earlier), {6: "mask", 10: "cap"}) == RoundPlan(
        round=1,
        length=11,
        spans=(Span(0, 4), Span(6, 7), Span(10, 11)),
        planned_replacements=(
            PlannedReplacement("before", 0),
            PlannedReplacement("mask", 6),
            PlannedReplacement("cap", 10),
        ),
        carried_index=2,
    )


def test_a_plan_names_what_is_summarised_and_what_goes() -> None:
    found = RoundPlan(
        2,
        9,
        (Span(0, 2), Span(2, 4), Span(5, 6), Span(7, 8)),
        (
            PlannedReplacement("before"),
            PlannedReplacement("text"),
            PlannedReplacement("nothing"),
            PlannedReplacement("mask", 7),
        ),
        ((2, 3, 5),),
    )

    assert (found.summarized_indices, found.removed_indices) == ((2, 3, 5), (2, 3, 5))


def test_a_list_without_messages_has_nothing_to_take() -> None:
    assert planned([]) is None
    assert planned([], None, FULL) is None


@pytest.mark.parametrize(
    ("target", "fixed", "is_scarce"),
    [(None, 900, False), (500, 0, False), (500, 480, True), (500, 600, True), (500, 300, False)],
)
def test_a_target_that_the_fixed_part_nearly_fills_is_scarce(
    target: int | None, fixed: int, *, is_scarce: bool
) -> None:
    constraints = PlanConstraints(
        trigger_tokens=1_000, target_tokens=target, request_tokens=1_200, fixed_tokens=fixed
    )

    assert constraints.is_target_scarce is is_scarce


@pytest.mark.parametrize(
    ("trigger", "target", "fixed", "left"),
    [
        (2_000, 800, 1_000, 500),  # half of the free tokens
        (20_000, 8_000, 6_000, 4_000),  # at most 4,000
        (100_000, 40_000, 39_000, 15_250),  # a quarter of the free tokens, if that is more
        (100_000, 40_000, 1_000, 39_000),  # the target, if that is more
    ],
)
def test_a_target_leaves_half_of_a_small_window(trigger: int, target: int, fixed: int, left: int) -> None:
    assert PlanConstraints(trigger, target, 0, fixed_tokens=fixed).target_tokens_left == left
