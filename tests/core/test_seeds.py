"""What each strategy takes and keeps, as its document says: the seeds' examples, minimums and edge cases.

`chained` has a file of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from compaction_proxy.core.budget import Reserves, compute_budget
from compaction_proxy.core.checkpoint import Checkpoint
from compaction_proxy.core.digest import compute_message_digest
from compaction_proxy.core.message import Message, MessageToolCall, Span, iter_units
from compaction_proxy.core.planner import (
    PlanConstraints,
    PlannedReplacement,
    RoundPlan,
    add_edits,
    build_unchanged_plan,
    count_growth,
    list_chain_records,
    plan_round,
)
from compaction_proxy.core.render import build_effective_list, format_replacement_text
from compaction_proxy.core.repair import NO_RESPONSE_TEXT, repair_messages
from compaction_proxy.core.strategies import STRATEGIES, Policy, ScaledLimit
from compaction_proxy.core.trigger import TriggerRule, compute_trigger_marks, find_reached_rule

AsCheckpoint = Callable[[RoundPlan, Sequence[Message], Policy, Checkpoint | None], Checkpoint]

FULL, SELECTIVE, SPLIT, PRUNE, ITERATIONS, ANCHORED = (
    STRATEGIES[name] for name in ("full", "selective", "split", "prune", "iterations", "anchored")
)
AMPLE = PlanConstraints(trigger_tokens=1_000_000, target_tokens=None, request_tokens=0)
# Tokens of each message here.
EACH = 100


def made(role: str, text: str = "", **fields: object) -> Message:
    message = Message(role, text, tokens=EACH, **fields)  # type: ignore[arg-type]
    return replace(message, digest=compute_message_digest(message), raw=f"{role} {text}".encode())


def user(text: str = "u") -> Message:
    return made("user", text)


def said(text: str = "a") -> Message:
    return made("assistant", text)


def calling(text: str = "c", *ids: str) -> Message:
    return made(
        "assistant", text, calls=tuple(MessageToolCall(each, "read", "{}") for each in ids or ("call_1",))
    )


def result(text: str = "r", answered: str = "call_1") -> Message:
    return made("tool", text, answered_call_ids=(answered,))


def loop(count: int, first: int = 0) -> list[Message]:
    """So many iterations of a call and its result."""
    return [
        message
        for k in range(first, first + count)
        for message in (calling(f"call {k}"), result(f"result {k}"))
    ]


SYSTEM = made("system", "You build things.")
TASK = user("Build it")


def applied(messages: Sequence[Message], checkpoint: Checkpoint | None) -> tuple[Message, ...]:
    if checkpoint is None:
        return tuple(messages)
    return build_effective_list(messages, checkpoint.spans, checkpoint.stand_ins, checkpoint.edited)


def body_of(messages: Sequence[Message]) -> list[Message]:
    return [message for message in messages if not message.is_privileged]


def planned(
    messages: Sequence[Message],
    policy: Policy,
    earlier: Checkpoint | None = None,
    room: PlanConstraints = AMPLE,
) -> RoundPlan | None:
    return plan_round(body_of(messages), applied(messages, earlier), policy, earlier, room)


Compacting = Callable[..., Checkpoint]


@pytest.fixture
def compacted(as_checkpoint: AsCheckpoint) -> Compacting:
    """The checkpoint of the next round; there must be one to make."""

    def checkpoint(
        messages: Sequence[Message],
        policy: Policy,
        earlier: Checkpoint | None = None,
        room: PlanConstraints = AMPLE,
    ) -> Checkpoint:
        found = planned(messages, policy, earlier, room)
        assert found is not None
        return as_checkpoint(found, body_of(messages), policy, earlier)

    return checkpoint


def texts(messages: Sequence[Message]) -> list[str]:
    return [message.text for message in messages]


# full, seeds/000


def test_full_its_trigger_is_200_000_tokens_reached() -> None:
    wide = compute_budget(1_000_000, FULL.reserves, None)

    assert find_reached_rule(FULL.trigger, 199_999, count_growth([], None), wide) is None
    assert find_reached_rule(FULL.trigger, 200_000, count_growth([], None), wide) == TriggerRule(
        tokens=200_000
    )


def test_full_two_messages_result(compacted: Compacting) -> None:
    messages = [SYSTEM, TASK, *loop(5), said("Done."), user("Now test it")]
    sent = applied(messages, compacted(messages, FULL))

    assert sent[0] == SYSTEM
    assert [(each.role, each.text) for each in sent[1:]] == [
        ("user", "Summary 1.0\n\nLast request from user was: Now test it")
    ]


def test_full_an_unanswered_tool_unit_at_the_end_follows_and_the_request_before_it_is_carried(
    compacted: Compacting,
) -> None:
    messages = [SYSTEM, TASK, *loop(200)]
    sent = applied(messages, compacted(messages, FULL))

    assert texts(sent) == [
        SYSTEM.text,
        "Summary 1.0\n\nLast request from user was: Build it",
        "call 199",
        "result 199",
    ]


def test_full_parallel_calls_at_the_end_follow_whole_and_missing_results_are_filled(
    compacted: Compacting,
) -> None:
    messages = [TASK, said(), calling("both", "a", "b", "a"), result("1", "a"), result("2", "b")]
    sent = repair_messages(applied(messages, compacted(messages, FULL)))

    assert texts(sent)[1:] == ["both", "1", "2", NO_RESPONSE_TEXT]


def test_full_without_a_user_message_there_is_no_request_line(compacted: Compacting) -> None:
    messages = [SYSTEM, said("Hello"), *loop(3)]
    checkpoint = compacted(messages, FULL)

    assert checkpoint.carried is None
    assert texts(applied(messages, checkpoint)) == [SYSTEM.text, "Summary 1.0", "call 2", "result 2"]


def test_full_the_next_round_integrates_the_one_before(compacted: Compacting) -> None:
    messages = [SYSTEM, TASK, *loop(5), user("Now test it")]
    first = compacted(messages, FULL)
    grown = [*messages, *loop(5), user("And ship it")]
    second = compacted(grown, FULL, first)

    assert planned(grown, FULL, first) == RoundPlan(
        round=2,
        length=23,
        spans=(Span(0, 23),),
        planned_replacements=(PlannedReplacement("text"),),
        groups=(tuple(range(12, 23)),),
        carried_index=22,
    )
    assert texts(applied(grown, second)) == [
        SYSTEM.text,
        "Summary 2.0\n\nLast request from user was: And ship it",
    ]


def test_full_a_request_alone_is_no_conversation_to_summarise(compacted: Compacting) -> None:
    messages = [SYSTEM, TASK, said(), user("next")]
    first = compacted(messages, FULL)

    assert planned([SYSTEM, TASK], FULL) is None
    assert planned(messages, FULL, first) is None
    assert planned([*messages, user("more")], FULL, first) is None


# selective, seeds/001

DEBUGGING = [
    user("Can you debug this code?"),
    calling("Let me take a look."),
    result("(file contents)"),
    said("I found the issue..."),
    calling("Let me fix it."),
    result("(success)"),
    said("The fix is applied. Here's what I changed..."),
    user("Can you explain why that fixed it?"),
]


def selective(retention: int = 6, **fields: bool) -> Policy:
    keep = replace(SELECTIVE.keep, messages=retention)
    return replace(SELECTIVE, keep=keep, one_run=fields.get("one_run", False))


def test_selective_defaults_are_the_seeds() -> None:
    assert (SELECTIVE.trigger, SELECTIVE.keep.messages) == ((TriggerRule(tokens=60_000),), 6)
    assert SELECTIVE.summary is not None
    assert SELECTIVE.summary.max_tokens == 2_000


def test_selective_the_debugging_example_with_retention_1(compacted: Compacting) -> None:
    sent = applied(DEBUGGING, compacted(DEBUGGING, selective(1)))

    assert [(each.role, each.text) for each in sent] == [
        ("user", "Can you debug this code?"),
        ("assistant", "<summary>\nSummary 1.0\n</summary>"),
        ("user", "Can you explain why that fixed it?"),
    ]


def three_runs() -> list[Message]:
    return [SYSTEM, *(each for k in range(3) for each in (user(f"u{k}"), *loop(3, 10 * k))), *loop(3, 50)]


def test_selective_the_earliest_run_is_taken_and_the_next_until_the_request_is_under_its_trigger() -> None:
    # A run of six has 600 tokens, of which its summary is expected to take 180.
    def groups(over: int) -> list[int]:
        found = planned(
            three_runs(),
            selective(),
            None,
            PlanConstraints(trigger_tokens=1_000, target_tokens=None, request_tokens=1_000 + over),
        )
        return [each[0] for each in found.groups] if found else []

    assert [groups(over) for over in (0, 419, 420, 839, 840, 9_000)] == [
        [1],
        [1],
        [1, 8],
        [1, 8],
        [1, 8, 15],
        [1, 8, 15],
    ]


def test_selective_take_one_is_one_run_a_request_and_the_next_one_in_the_next(compacted: Compacting) -> None:
    messages, policy, size = three_runs(), selective(one_run=True), PlanConstraints(1_000, None, 90_000)
    first = compacted(messages, policy, None, size)
    second = compacted(messages, policy, first, size)

    assert (first.spans, second.spans) == ((Span(1, 7),), (Span(1, 7), Span(8, 14)))
    assert second.stand_ins[0] == first.stand_ins[0]


def test_selective_runs_of_one_request_share_a_call_and_get_a_text_each(compacted: Compacting) -> None:
    messages = three_runs()
    sent = applied(messages, compacted(messages, selective(), None, PlanConstraints(1_000, None, 90_000)))

    assert texts(sent)[:7] == [
        SYSTEM.text,
        *("u0", "<summary>\nSummary 1.0\n</summary>"),
        *("u1", "<summary>\nSummary 1.1\n</summary>"),
        *("u2", "<summary>\nSummary 1.2\n</summary>"),
    ]
    assert sent[7:] == tuple(messages[-6:])


@pytest.mark.parametrize(("retention", "stop"), [(1, 5), (2, 5), (3, 3), (4, 3), (5, 1)])
def test_selective_a_run_that_reaches_into_the_retention_window_is_cut_at_a_unit_edge(
    retention: int, stop: int
) -> None:
    found = planned([user(), *loop(3)], selective(retention))

    assert (found.spans if found else (Span(1, 1),)) == (Span(1, stop),)


def test_selective_a_run_that_was_cut_goes_on_later_and_nothing_is_taken_twice(compacted: Compacting) -> None:
    messages = [user(), *loop(5)]
    first = compacted(messages, selective(4))
    grown = [*messages, *loop(2, 20)]
    second = compacted(grown, selective(4), first)

    assert planned(messages, selective(4), first) is None
    assert second.spans == (Span(1, 7), Span(7, 11))
    assert second.stand_ins[0] == first.stand_ins[0]


def test_selective_all_user_and_privileged_messages_are_kept(compacted: Compacting) -> None:
    messages = [*three_runs(), made("developer", "Be brief"), *loop(4, 90)]
    sent = applied(messages, compacted(messages, selective(), None, PlanConstraints(1, None, 90_000)))

    assert [each.text for each in sent if each.role in {"user", "system", "developer"}] == [
        *("You build things.", "Be brief", "u0", "u1", "u2")
    ]


def test_selective_a_closing_tag_inside_a_summary_is_broken_up() -> None:
    assert (
        format_replacement_text(SELECTIVE.frame, 1, "a</summary>b") == "<summary>\na< /summary>b\n</summary>"
    )


# split, seeds/002


def halves(trigger: int, records: int = 0) -> PlanConstraints:
    return PlanConstraints(trigger, trigger // 2, 0, replacement_tokens=records)


def test_split_compacts_at_95_percent_of_the_window() -> None:
    spent = compute_budget(100_000, SPLIT.reserves, None)

    assert find_reached_rule(SPLIT.trigger, 90_000, count_growth([], None), spent) is None
    assert find_reached_rule(SPLIT.trigger, 94_999, count_growth([], None), spent) is None
    assert find_reached_rule(SPLIT.trigger, 95_000, count_growth([], None), spent) == TriggerRule(
        percent_of_window=95
    )
    assert SPLIT.reserves == PRUNE.reserves == Reserves(0, 0, 0)


@pytest.mark.parametrize(
    ("room", "stop"),
    [
        (halves(2_000), 10),  # the tenth from the end reaches 1,000
        (halves(1_990), 10),
        (halves(2_002), 9),
        (halves(2_000, records=200), 12),  # the summary takes part of the target
        (PlanConstraints(9_000, 1_000, 0), 10),  # a target of its own
        (halves(200), 15),  # at least five
        (halves(0), 15),
        (halves(2_000, records=5_000), 15),
        (halves(100_000), 15),  # everything fits
    ],
)
def test_split_the_message_that_reaches_the_target_is_kept_and_five_at_least(
    room: PlanConstraints, stop: int
) -> None:
    messages = [user(f"Message {k}") for k in range(20)]

    assert planned([SYSTEM, *messages], SPLIT, None, room) == RoundPlan(
        round=1,
        length=stop,
        spans=(Span(0, stop),),
        planned_replacements=(PlannedReplacement("text"),),
        groups=(tuple(range(stop)),),
    )


def test_split_the_summary_stands_behind_the_clients_own_system_messages(compacted: Compacting) -> None:
    messages = [SYSTEM, *(user(f"Message {k}") for k in range(100)), made("system", "Late"), user("last")]
    sent = applied(messages, compacted(messages, SPLIT, None, halves(9_500)))

    assert (sent[0], sent[1].role) == (SYSTEM, "system")
    assert sent[1].text == "[Previous conversation summary]\nSummary 1.0\n[End of summary]"
    assert sent[2:] == tuple(messages[-len(sent) + 2 :])
    assert sum(each.tokens for each in sent[2:]) <= 4_750 + 2 * EACH


def test_split_a_split_point_inside_a_tool_unit_moves_before_it() -> None:
    messages = [user(), said(), calling("both", "a", "b"), result("1", "a"), result("2", "b"), said(), said()]
    found = planned([*messages, user(), user()], SPLIT, None, halves(100_000))

    assert found is not None
    assert found.spans == (Span(0, 2),)


def test_split_earlier_summaries_stay_in_place_one_a_round(compacted: Compacting) -> None:
    messages: list[Message] = [SYSTEM]
    checkpoint = None
    for number in range(1, 4):
        messages = [*messages, *(user(f"{number}.{k}") for k in range(20))]
        checkpoint = compacted(messages, SPLIT, checkpoint, halves(2_000))
    sent = applied(messages, checkpoint)

    assert texts(sent)[1:4] == [
        f"[Previous conversation summary]\nSummary {number}.0\n[End of summary]" for number in (1, 2, 3)
    ]
    assert sent[4:] == tuple(messages[-10:])


def test_split_200_messages_are_less_than_200_with_a_summary_all_along(compacted: Compacting) -> None:
    messages: list[Message] = [SYSTEM]
    checkpoint = None
    spent = compute_budget(5_000, SPLIT.reserves, None)
    for number in range(200):
        messages.append(user(f"Message {number}"))
        size = sum(each.tokens for each in applied(messages, checkpoint))
        if find_reached_rule(SPLIT.trigger, size, count_growth(body_of(messages), checkpoint), spent):
            checkpoint = compacted(messages, SPLIT, checkpoint, halves(4_750))
            assert sum(each.tokens for each in applied(messages, checkpoint)) <= 0.6 * size
    sent = applied(messages, checkpoint)

    assert len(sent) < 60
    assert any("Previous conversation summary" in each.text for each in sent)


# prune, seeds/002


def test_prune_the_task_and_the_last_50_stay_and_nothing_stands_in(compacted: Compacting) -> None:
    messages = [SYSTEM, TASK, *(said(f"{k}") for k in range(100))]
    checkpoint = compacted(messages, PRUNE)

    assert applied(messages, checkpoint) == (SYSTEM, TASK, *messages[-50:])
    assert planned(messages, PRUNE, checkpoint) is None


def test_prune_it_asks_for_no_summary_and_goes_on_from_where_it_was(compacted: Compacting) -> None:
    messages = [TASK, *(said(f"{k}") for k in range(60))]
    first = compacted(messages, PRUNE)
    grown = [*messages, user("and"), *(said(f"{k}") for k in range(60, 80))]
    found = planned(grown, PRUNE, first)

    assert found is not None
    assert (found.groups, {fill.kind for fill in found.planned_replacements}) == ((), {"before", "nothing"})
    assert applied(grown, compacted(grown, PRUNE, first)) == (TASK, *grown[-50:])


def test_prune_the_boundary_does_not_part_a_call_from_its_result(compacted: Compacting) -> None:
    messages = [TASK, *loop(30), said("odd")]

    assert len(applied(messages, compacted(messages, PRUNE))) == 1 + 51


# iterations, seeds/003


def test_iterations_it_fires_at_every_eighth_iteration_and_at_80_000_tokens(compacted: Compacting) -> None:
    wide = compute_budget(1_000_000, ITERATIONS.reserves, None)
    messages, first, made_at = [SYSTEM, TASK], None, []
    for number in range(1, 25):
        messages += loop(1, number)
        if find_reached_rule(ITERATIONS.trigger, 0, count_growth(body_of(messages), first), wide):
            first = compacted(messages, ITERATIONS, first)
            made_at.append(number)

    assert made_at == [8, 16, 24]
    assert find_reached_rule(ITERATIONS.trigger, 80_000, count_growth([], None), wide) == TriggerRule(
        tokens=80_000
    )


def test_iterations_the_last_three_stay_whole_which_is_six_messages(compacted: Compacting) -> None:
    messages = [SYSTEM, said("Hello"), *loop(8)]
    sent = applied(messages, compacted(messages, ITERATIONS))

    assert [(each.role, each.tokens) for each in sent[:2]] == [("system", EACH), ("user", 9)]
    assert sent[2:] == tuple(messages[-6:])


def test_iterations_of_parallel_calls_are_more_than_six_messages_and_stay_whole(
    compacted: Compacting,
) -> None:
    parallel = [
        each
        for k in range(8)
        for each in (calling(f"{k}", "a", "b"), result(f"a{k}", "a"), result(f"b{k}", "b"))
    ]
    messages = [TASK, *parallel]
    sent = applied(messages, compacted(messages, ITERATIONS))

    assert sent[0] == TASK  # the latest user message stays in its place
    assert sent[2:] == tuple(messages[-9:])


def test_iterations_without_three_there_is_nothing_to_take() -> None:
    assert planned([SYSTEM, *(user(f"{k}") for k in range(30)), *loop(2)], ITERATIONS) is None


def test_iterations_earlier_rounds_are_part_of_what_is_summarised(compacted: Compacting) -> None:
    messages = [SYSTEM, TASK, *loop(8), user("go on")]
    first = compacted(messages, ITERATIONS)
    grown = [*messages, *loop(8, 20)]
    second = compacted(grown, ITERATIONS, first)

    assert [len(put) for put in second.stand_ins] == [1, 0]
    assert second.spans == (Span(0, 17), Span(18, 28))
    assert "Summary 2.0" in applied(grown, second)[1].text
    assert not any("Summary 1.0" in each.text for each in applied(grown, second))


# anchored

TIGHT = PlanConstraints(trigger_tokens=2_000, target_tokens=800, request_tokens=0)


def test_anchored_the_task_stays_in_place_and_the_records_follow_it(compacted: Compacting) -> None:
    messages = [SYSTEM, TASK, *loop(20), user("next"), *loop(2, 50)]
    sent = applied(messages, compacted(messages, ANCHORED, None, TIGHT))

    assert [(each.role, each.text[:9]) for each in sent] == [
        *(("system", "You build"), ("user", "Build it"), ("user", "[Record 1"), ("user", "Ledger 1")),
        *(("user", "next"), ("assistant", "call 50"), ("tool", "result 50")),
        *(("assistant", "call 51"), ("tool", "result 51")),
    ]


def test_anchored_the_records_follow_the_task_even_where_something_stands_before_it(
    compacted: Compacting,
) -> None:
    messages = [said("Hello"), TASK, *loop(20)]
    checkpoint = compacted(messages, ANCHORED, None, TIGHT)

    assert checkpoint.spans == (Span(0, 1), Span(2, 38))
    assert [len(put) for put in checkpoint.stand_ins] == [0, 2]


def test_anchored_rounds_are_frozen_and_a_further_one_covers_only_what_is_new(compacted: Compacting) -> None:
    messages = [TASK, *loop(20)]
    first = compacted(messages, ANCHORED, None, TIGHT)
    grown = [*messages, *loop(20, 20)]
    found = planned(grown, ANCHORED, first, TIGHT)
    second = compacted(grown, ANCHORED, first, TIGHT)

    assert (first.spans, first.rounds) == ((Span(1, 37),), (37,))
    assert found is not None
    assert (found.frozen_record_count, found.summarized_indices) == (1, tuple(range(37, 77)))
    assert (second.spans, second.rounds) == ((Span(1, 77),), (37, 77))
    assert second.stand_ins[0][0] == first.stand_ins[0][0]
    assert [each.text[:9] for each in second.stand_ins[0]] == ["[Record 1", "[Record 2", "Ledger 2"]


def test_anchored_after_six_rounds_the_chain_is_written_anew(compacted: Compacting) -> None:
    roomy = replace(TIGHT, target_tokens=100_000)
    checkpoint, chains = None, []
    for count in range(20, 180, 20):
        messages = [TASK, *loop(count)]
        checkpoint = compacted(messages, ANCHORED, checkpoint, roomy)
        chains.append(len(checkpoint.rounds))

    assert chains == [1, 2, 3, 4, 5, 6, 1, 2]
    assert checkpoint is not None
    assert [each.text[:9] for each in checkpoint.stand_ins[0]] == ["[Record 7", "[Record 8", "Ledger 8"]


def test_anchored_over_a_quarter_of_the_target_the_chain_is_written_anew(compacted: Compacting) -> None:
    first = compacted([TASK, *loop(20)], ANCHORED, None, TIGHT)
    second = compacted([TASK, *loop(40)], ANCHORED, first, TIGHT)
    size = sum(each.tokens for each in list_chain_records(second))

    def frozen(earlier: Checkpoint, target: int) -> int:
        found = planned([TASK, *loop(60)], ANCHORED, earlier, replace(TIGHT, target_tokens=target))
        assert found is not None
        return found.frozen_record_count

    assert (frozen(second, 4 * size), frozen(second, 4 * size - 1)) == (2, 0)
    assert frozen(first, 1) == 1  # one record instead of one would be no shorter


def test_anchored_edits_inside_what_is_taken_disappear_and_later_ones_stay(
    as_checkpoint: AsCheckpoint, compacted: Compacting
) -> None:
    messages = [TASK, *loop(20), said("odd")]
    edits = add_edits(build_unchanged_plan(None), {2: "mask", 40: "cap"})
    edited = as_checkpoint(edits, messages, ANCHORED, None)
    taken = compacted(messages, ANCHORED, edited, TIGHT)

    assert (edited.round, edited.spans) == (0, (Span(2, 3), Span(40, 41)))
    assert texts(applied(messages, edited))[2].startswith("[read {}: 1 lines, 8 characters; left out, m_2]")
    assert (taken.round, taken.edited, taken.length) == (1, frozenset({40}), 41)
    assert taken.spans == (Span(1, 37), Span(40, 41))
    assert taken.edited_messages[40] == edited.edited_messages[40]


def test_anchored_a_task_that_was_cut_stays_cut_in_later_rounds(
    as_checkpoint: AsCheckpoint, compacted: Compacting
) -> None:
    messages = [user("Build " * 300), *loop(20), user("next")]
    found = planned(messages, ANCHORED, None, TIGHT)
    assert found is not None
    first = as_checkpoint(add_edits(found, {0: "cap"}), messages, ANCHORED, None)
    second = compacted([*messages, *loop(20)], ANCHORED, first, TIGHT)

    assert first.edited == second.edited == frozenset({0})
    assert second.edited_messages == first.edited_messages


@pytest.mark.parametrize("policy", [FULL, ITERATIONS, SPLIT, SELECTIVE], ids=lambda policy: policy.name)
def test_results_that_were_cut_behind_what_is_taken_stay_cut_in_every_strategy(
    policy: Policy, as_checkpoint: AsCheckpoint, compacted: Compacting
) -> None:
    messages = [TASK, *loop(20)]
    edited = as_checkpoint(
        add_edits(build_unchanged_plan(None), {2: "cap", 40: "cap"}), messages, policy, None
    )
    taken = compacted(messages, policy, edited, halves(2_000))

    assert (taken.edited, taken.edited_messages[40]) == (frozenset({40}), edited.edited_messages[40])


def test_an_agent_loop_with_one_user_message_shrinks(compacted: Compacting) -> None:
    messages = [SYSTEM, TASK, *loop(200)]
    sent = applied(
        messages,
        compacted(messages, ANCHORED, None, PlanConstraints(20_000, 8_000, 40_000, replacement_tokens=900)),
    )

    assert sent[:2] == (SYSTEM, TASK)
    assert sum(each.tokens for each in sent) < 0.2 * sum(each.tokens for each in messages)


@pytest.mark.parametrize(
    ("trigger", "target", "fixed", "records", "growth", "tail"),
    [
        (2_000, 800, 0, 0, 0, 4),  # 20 % of T
        (2_000, 800, 0, 900, 0, 4),  # the records yield to it
        (1_500, 600, 0, 0, 0, 4),  # a unit crosses the floor of 300, and the target leaves room for it
        (1_500, 600, 0, 300, 0, 4),  # half of the free tokens leaves room for it
        (1_500, 600, 0, 500, 0, 2),  # half of the free tokens leaves none
        (2_000, 800, 1_800, 0, 0, 2),  # at least the last unit
        (3_000, 1_200, 500, 0, 0, 6),  # 20 % of T, where the target leaves more than the floor
        (3_000, 1_200, 500, 0, 300, 2),  # 300 will have come by the time it is used
        (1_000_000, 400_000, 0, 0, 0, 200),  # 20,000 tokens
    ],
)
def test_anchored_the_tail_has_a_floor_and_ends_where_the_target_or_its_limit_does(
    trigger: int, target: int, fixed: int, records: int, growth: int, tail: int, compacted: Compacting
) -> None:
    messages = [TASK, *loop(300)]
    room = PlanConstraints(
        trigger, target, 0, fixed_tokens=fixed, replacement_tokens=records, growth_tokens=growth
    )

    assert applied(messages, compacted(messages, ANCHORED, None, room))[3:] == tuple(messages[-tail:])


# All


@pytest.mark.parametrize("policy", STRATEGIES.values(), ids=STRATEGIES.keys())
def test_reused_ids_and_parallel_calls_are_never_parted(policy: Policy, compacted: Compacting) -> None:
    unit = [calling("both", "x", "", "x"), result("1", "x"), result("2", ""), result("3", "x")]
    messages = [SYSTEM, TASK, *(unit * 30)]
    sent = applied(messages, compacted(messages, policy, None, halves(2_222)))
    theirs = [each for each in body_of(sent) if each is not TASK and each in unit]
    whole = [theirs[each.start : each.stop] for each in iter_units(theirs)]

    assert whole == [unit] * len(whole)
    assert repair_messages(sent) == sent
    assert len(sent) < len(messages)


@pytest.mark.parametrize(
    ("policy", "window", "trigger"),
    [
        (ANCHORED, 128_000, 88_500),
        (FULL, 1_000_000, 200_000),
        (SELECTIVE, 128_000, 60_000),
        (SPLIT, 128_000, 121_600),
        (PRUNE, 128_000, 121_600),
        (ITERATIONS, 128_000, 80_000),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_t_is_the_number_of_the_row_that_names_tokens(policy: Policy, window: int, trigger: int) -> None:
    spent = compute_budget(window, policy.reserves, None)

    assert (
        compute_trigger_marks(policy.trigger, spent, policy.soft_share, policy.hard_percent).trigger_tokens
        == trigger
    )


def test_a_limit_is_the_smaller_of_a_figure_and_a_share() -> None:
    limit = ScaledLimit(20_000, 0.2)

    assert (
        limit.compute_tokens(2_000),
        limit.compute_tokens(1_000_000),
        ScaledLimit(None, 0.5).compute_tokens(1_000_000),
    ) == (400, 20_000, 500_000)
