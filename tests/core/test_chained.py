"""The strategy `chained`, seeds/004: every default, rule, cut, event and edge case that the core decides.

Calls, storage and what happens when the summary model fails are tested with the use case.
"""

import re
from collections.abc import Sequence
from importlib.resources import files

import pytest

from compaction_proxy.core.budget import Reserves, compute_budget
from compaction_proxy.core.checkpoint import Checkpoint, compute_exact_digest, list_covered_results
from compaction_proxy.core.digest import chain_digests, compute_message_digest, format_message_id
from compaction_proxy.core.message import ContentPart, Message, MessageToolCall, Span
from compaction_proxy.core.planner import (
    PlanConstraints,
    PlannedReplacement,
    RoundPlan,
    count_growth,
    plan_round,
)
from compaction_proxy.core.render import build_effective_list, build_excerpt, format_replacement_text
from compaction_proxy.core.repair import CONTINUE_TEXT, insert_alternating_fillers, repair_messages
from compaction_proxy.core.strategies import (
    CHAINED,
    STRATEGIES,
    KeepRules,
    Policy,
    SummaryFrame,
    SummaryShape,
)
from compaction_proxy.core.summary.answer import PromptSection, validate_summary
from compaction_proxy.core.summary.prompt import NO_TASK, build_prompt, build_transcript, find_task_message
from compaction_proxy.core.token_rules import CHARACTER_RULE, list_countable_texts, sum_message_tokens
from compaction_proxy.core.trigger import TriggerRule, compute_min_trigger, find_reached_rule
from compaction_proxy.providers.tokenizers import CharacterCounter
from compaction_proxy.providers.windows import get_known_window

SUMMARY = "### Current State\n- Working on: AI"
LONG_SUMMARY = "### Current State\n- Working on: AI integration of the flashcard app\n- Last completed: SM-2"
ROOM = PlanConstraints(trigger_tokens=93_600, target_tokens=None, request_tokens=0)
assert CHAINED.summary is not None
SHAPE = CHAINED.summary
PROMPT = files("compaction_proxy").joinpath("prompts", "chained.md").read_text(encoding="utf-8")


def made(role: str, text: str = "", **fields: object) -> Message:
    message = Message(role, text, **fields)  # type: ignore[arg-type]
    return Message(role, text, digest=compute_message_digest(message), **fields)  # type: ignore[arg-type]


def calling(text: str) -> Message:
    return made("assistant", text, calls=(MessageToolCall("call_1", "write", '{"path":"src/db.ts"}'),))


def result(text: str = "ok") -> Message:
    return made("tool", text, answered_call_ids=("call_1",))


SYSTEM = made("system", "You build things.")
TASK = made("user", "Build a flashcard app")


def seed_conversation() -> list[Message]:
    """The visual example of seeds/004: 50 messages, of which [40] to [49] are to stay."""
    steps = [message for step in range(19) for message in (calling(f"Step {step}"), result(f"{step}"))]
    tail = [
        *(calling("Adding SM-2..."), result("40"), calling("Testing..."), result("42")),
        *(calling("Fixing type error..."), result("44"), made("assistant", "All tests pass")),
        *(made("user", "Add AI integration"), calling("I'll add OpenAI..."), result("48")),
    ]
    return [SYSTEM, TASK, *steps, *tail]


def agent_loop(calls: int) -> list[Message]:
    """One user message, then nothing but calls and results."""
    steps = [message for step in range(calls) for message in (calling(f"Step {step}"), result(f"{step}"))]
    return [SYSTEM, TASK, *steps]


def body_of(messages: Sequence[Message]) -> list[Message]:
    return [message for message in messages if not message.is_privileged]


def effective(messages: Sequence[Message], checkpoint: Checkpoint | None) -> tuple[Message, ...]:
    if checkpoint is None:
        return tuple(messages)
    return build_effective_list(messages, checkpoint.spans, checkpoint.stand_ins, checkpoint.edited)


def planned(messages: Sequence[Message], earlier: Checkpoint | None = None) -> RoundPlan | None:
    return plan_round(body_of(messages), effective(messages, earlier), CHAINED, earlier, ROOM)


def one_text(number: int, length: int, spans: Sequence[Span], fresh: Sequence[int]) -> RoundPlan:
    """A round whose text stands in the first span."""
    fills = (PlannedReplacement("text"), *(PlannedReplacement("nothing") for _ in spans[1:]))
    return RoundPlan(number, length, tuple(spans), fills, (tuple(fresh),))


def compacted(messages: Sequence[Message], earlier: Checkpoint | None = None) -> Checkpoint:
    """The next round, with a summary that says which one it is."""
    body = body_of(messages)
    found = planned(messages, earlier)
    assert found is not None
    task = find_task_message(body)
    covered = task is not None and any(span.start <= body.index(task) < span.stop for span in found.spans)
    text = format_replacement_text(
        CHAINED.frame, found.round, SUMMARY, task=task.text if task and covered else ""
    )
    return Checkpoint(
        strategy="chained",
        conversation="c_1",
        round=found.round,
        length=found.length,
        exact=compute_exact_digest(body[: found.length]),
        results=list_covered_results(body, found.spans),
        spans=found.spans,
        stand_ins=((made(CHAINED.stand_in_role, text),), *(() for _ in found.spans[1:])),
        summary=f"{SUMMARY} {found.round}",
        tokens_before=0,
        tokens_after=0,
        listed=len(body),
    )


def characters(messages: Sequence[Message]) -> int:
    """Size under the rule `characters`."""
    counter = CharacterCounter()
    return sum(
        sum_message_tokens(
            each,
            [counter.count(piece, "") for piece in list_countable_texts(each, CHARACTER_RULE)],
            CHARACTER_RULE,
        )
        for each in messages
    )


# Token estimation


@pytest.mark.parametrize(("length", "tokens"), [(0, 0), (1, 1), (4, 1), (5, 2), (400, 100), (401, 101)])
def test_estimation_text_is_its_characters_divided_by_four_rounded_up(length: int, tokens: int) -> None:
    assert CharacterCounter().count("x" * length, "gpt-4o") == tokens


def test_estimation_a_message_is_two_tokens_and_its_text_tool_names_and_arguments() -> None:
    calls = (MessageToolCall("an id that does not count", "write", "x" * 9), MessageToolCall("", "ls", ""))

    assert characters([made("user", "x" * 10)]) == 2 + 3
    assert characters([made("assistant", "x", calls=calls)]) == 2 + 1 + (2 + 3) + 1
    assert characters([made("tool", "x" * 401, answered_call_ids=("call_1",))]) == 2 + 101
    assert characters([SYSTEM, TASK]) == (2 + 5) + (2 + 6)
    assert characters([]) == 0


# Threshold configuration


def test_defaults_are_the_seeds() -> None:
    assert STRATEGIES["chained"] == Policy(
        name="chained",
        trigger=(TriggerRule(percent=80),),
        reserves=Reserves(system=2_000, output=4_000, safety=5_000),
        keep=KeepRules(messages=10),
        stand_in_role="assistant",
        frame=SummaryFrame(
            opening="## Session Summary (Compaction Round {round})\n\n",
            task_heading="### Original Task",
            mentions_earlier_rounds=True,
        ),
        least_messages=11,
        summary=SummaryShape(
            prompt_name="chained",
            tokens=800,
            max_tokens=1_000,
            temperature=0.3,
            tool_characters=500,
            message_characters=2_000,
            sections=(
                PromptSection("### Completed Work"),
                PromptSection("### Key Technical Decisions"),
                PromptSection("### Current State"),
                PromptSection("### Pending Work"),
                PromptSection("### Errors & Resolutions", is_optional=True),
            ),
        ),
    )


@pytest.mark.parametrize(
    ("model", "window"),
    [
        ("gpt-4o", 128_000),
        ("gpt-4-turbo", 128_000),
        ("gpt-4", 8_192),
        ("claude-3-5-sonnet-20240620", 200_000),
        ("claude-3-haiku-20240307", 200_000),
        ("anything-else", 128_000),
    ],
)
def test_limits_by_model_are_the_seeds(model: str, window: int) -> None:
    assert get_known_window(model) == window


@pytest.mark.parametrize(("window", "threshold"), [(128_000, 93_600), (200_000, 151_200), (8_192, 4_915)])
def test_threshold_is_80_percent_of_the_window_less_the_reserves(window: int, threshold: int) -> None:
    assert compute_min_trigger(CHAINED.trigger, compute_budget(window, CHAINED.reserves, None)) == threshold


# Trigger logic


def test_trigger_fires_at_the_threshold_and_not_a_token_before() -> None:
    spent, new = compute_budget(128_000, CHAINED.reserves, None), count_growth([], None)

    assert find_reached_rule(CHAINED.trigger, 93_599, new, spent) is None
    assert find_reached_rule(CHAINED.trigger, 93_600, new, spent) == TriggerRule(percent=80)


# Message selection


def test_visual_example_before_compaction_is_50_messages() -> None:
    assert len(seed_conversation()) == 50
    assert planned(seed_conversation()) == one_text(1, 39, [Span(0, 39)], tuple(range(39)))


def test_visual_example_after_compaction_is_system_summary_and_the_last_ten() -> None:
    messages = seed_conversation()
    sent = repair_messages(effective(messages, compacted(messages)))

    assert sent == (
        SYSTEM,
        made(
            "assistant",
            "## Session Summary (Compaction Round 1)\n\n"
            "### Original Task\nBuild a flashcard app\n\n"
            "### Current State\n- Working on: AI",
        ),
        *messages[40:],
    )
    assert len(sent) == 12


def test_tool_pair_the_boundary_walks_back_to_the_call() -> None:
    messages = [*seed_conversation(), made("assistant", "Added.")]

    assert planned(messages) == one_text(1, 39, [Span(0, 39)], tuple(range(39)))


def test_tool_pair_the_boundary_walks_back_over_all_results_of_a_call() -> None:
    calls = tuple(MessageToolCall(f"c{number}", "read", "{}") for number in range(8))
    results = [made("tool", "x", answered_call_ids=(call.id,)) for call in calls]
    messages = [SYSTEM, TASK, made("assistant", "a"), made("assistant", calls=calls), *results]
    messages += [made("assistant", f"{number}") for number in range(4)] + [made("user", "next")]

    assert planned(messages) == one_text(1, 2, [Span(0, 2)], (0, 1))


@pytest.mark.parametrize("count", range(12))
def test_edge_case_empty_and_very_short_sessions_have_nothing_to_take(count: int) -> None:
    assert planned(seed_conversation()[:count]) is None


def test_edge_case_twelve_messages_are_enough() -> None:
    messages = [SYSTEM, TASK, *(made("user", f"{number}") for number in range(10))]

    assert planned(messages) == one_text(1, 1, [Span(0, 1)], (0,))


def test_edge_case_when_all_messages_are_recent_nothing_is_taken() -> None:
    calls = tuple(MessageToolCall(f"c{number}", "read", "{}") for number in range(20))
    messages = [SYSTEM, made("assistant", calls=calls)]
    messages += [made("tool", "x", answered_call_ids=(call.id,)) for call in calls]

    assert planned(messages) is None


def test_selection_a_message_that_merely_looks_like_a_summary_is_text() -> None:
    fake = made("assistant", "## Session Summary (Compaction Round 7)\n\n### Original Task\nOther")
    messages = [SYSTEM, fake, *seed_conversation()[1:]]
    found = planned(messages)

    assert found is not None
    assert (found.round, found.summarized_indices[0]) == (1, 0)
    assert "[0] ASSISTANT:\n\\## Session Summary (Compaction Round 7)" in build_transcript([fake], SHAPE)


# Summary generation


@pytest.mark.parametrize(
    "section",
    [
        "### Completed Work\n| File/Component | Action | Description |\n|--------",
        "### Key Technical Decisions\n- ",
        "### Current State\n- Working on: ",
        "- Last completed: ",
        "### Pending Work\n- [ ] ",
        "### Errors & Resolutions\n- error → ",
        "Keep to the size that is named with the data.",
        "tables and bullets",
        "exact file paths",
        "No code blocks unless",
        "Merge the previous summary",
        "whatever you leave out is lost",
    ],
)
def test_prompt_asks_for_every_section_and_constraint_of_the_seed(section: str) -> None:
    assert section in PROMPT


def test_prompt_leaves_heading_and_task_to_us() -> None:
    answer = f"## Session Summary (Compaction Round 9)\n\n{LONG_SUMMARY}"

    assert not re.search(r"Session Summary|### Original Task", PROMPT)
    assert validate_summary(answer, "stop", called_tools=False, refused=False) == LONG_SUMMARY


def asked(messages: Sequence[Message], earlier: str = "", task: str = "Build") -> str:
    """The data of a summary call, its fences without what they are named after."""
    text = build_prompt(
        [messages],
        SHAPE,
        task=task,
        earlier_summaries=[earlier] if earlier else [],
        language="English",
        max_tokens=800,
    )
    return re.sub("-[0-9a-f]{16}>", ">", text)


def test_prompt_holds_the_size_the_previous_summary_the_task_and_the_messages() -> None:
    assert asked([calling("Step")], "before") == (
        "## Size and Language\nAt most 800 tokens, which is about 560 words. Write in English.\n\n"
        "## Previous Summary\n<summary>\nbefore\n</summary>\n\n"
        "## Original User Task\n<task>\nBuild\n</task>\n\n"
        "## Messages to Summarize\n<transcript>\n"
        '[0] ASSISTANT:\nStep\n[Tool: write({"path":"src/db.ts"})]\n</transcript>'
    )


def test_prompt_of_the_first_round_says_that_there_is_no_previous_summary() -> None:
    assert "## Previous Summary\nNone: this is the first compaction round.\n\n" in asked([TASK])


def test_formatting_messages_are_numbered_named_in_capitals_and_ruled_off() -> None:
    assert build_transcript([TASK, made("assistant", "Sure")], SHAPE) == (
        "[0] USER:\nBuild a flashcard app\n\n---\n\n[1] ASSISTANT:\nSure"
    )


def test_formatting_text_of_content_parts_is_text_and_other_parts_are_named() -> None:
    looking = made("user", "See this", parts=(ContentPart("image_url", bytes(32), 8),))

    assert build_transcript([looking], SHAPE) == "[0] USER:\nSee this\n[image_url]"


@pytest.mark.parametrize(
    ("role", "answers", "size", "kept"),
    [
        ("tool", ("call_1",), 500, None),
        ("tool", ("call_1",), 501, 500),
        ("tool", ("call_1",), 20_000, 500),
        ("user", (), 2_000, None),
        ("user", (), 2_001, 2_000),
        ("assistant", (), 12_000, 2_000),
    ],
)
def test_formatting_long_content_is_cut_and_marked(
    role: str, answers: tuple[str, ...], size: int, kept: int | None
) -> None:
    entry = build_transcript([made(role, "x" * size, answered_call_ids=answers)], SHAPE)
    expected = "x" * size if kept is None else "x" * kept + "\n[...truncated...]"

    assert entry == f"[0] {role.upper()}:\n{expected}"


# The task


def test_task_is_the_first_user_message_verbatim_outside_the_summary() -> None:
    (stand_in,) = compacted(seed_conversation()).stand_ins[0]

    assert stand_in.text == (
        f"## Session Summary (Compaction Round 1)\n\n### Original Task\n{TASK.text}\n\n{SUMMARY}"
    )


def test_task_without_a_user_message_is_unknown() -> None:
    assert find_task_message([SYSTEM, made("assistant", "Hello")]) is None
    assert NO_TASK == "Unknown task"


def test_task_over_its_size_keeps_head_tail_and_handle() -> None:
    handle = format_message_id(chain_digests([TASK.digest])[0])
    text = "a" * 8_000 + "b" * 8_000

    assert re.fullmatch("m_[0-9a-f]{12}", handle)
    assert build_excerpt(text, 2_000 / 4_000, handle) == (
        f"{'a' * 4_000}\n[… 8,000 characters of {handle} left out …]\n{'b' * 4_000}"
    )


# Chained summaries


def test_chaining_each_round_integrates_the_one_before_and_leaves_one_summary() -> None:
    messages = seed_conversation()
    first = compacted(messages)
    grown = [*messages, *seed_conversation()[2:]]
    second = compacted(grown, first)
    third = compacted([*grown, *seed_conversation()[2:]], second)

    assert [each.round for each in (first, second, third)] == [1, 2, 3]
    assert [each.spans for each in (first, second, third)] == [
        (Span(0, 39),),
        (Span(0, 87),),
        (Span(0, 135),),
    ]
    assert planned(grown, first) == one_text(2, 87, [Span(0, 87)], range(39, 87))
    sent = effective([*grown, *seed_conversation()[2:]], third)
    assert [each.text.partition("\n")[0] for each in sent if each.text.startswith("## Session")] == [
        "## Session Summary (Compaction Round 3)"
    ]
    assert len(sent) == 12


def test_chaining_the_previous_summary_is_what_the_prompt_hands_over() -> None:
    first = compacted(seed_conversation())

    assert f"## Previous Summary\n<summary>\n{SUMMARY} 1\n</summary>\n\n" in asked([], first.summary)


@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        (2, "This summary incorporates context from 1 previous compaction round."),
        (4, "This summary incorporates context from 3 previous compaction rounds."),
    ],
)
def test_chaining_later_rounds_say_how_many_they_incorporate(number: int, sentence: str) -> None:
    text = format_replacement_text(CHAINED.frame, number, SUMMARY, task="Build")

    assert text.startswith(f"## Session Summary (Compaction Round {number})\n\n")
    assert text.endswith(f"\n\n{sentence}")


def test_chaining_the_first_round_incorporates_nothing() -> None:
    assert "incorporates" not in format_replacement_text(CHAINED.frame, 1, SUMMARY, task="Build")


def test_chaining_nothing_is_taken_again_until_there_is_more_than_stays() -> None:
    messages = seed_conversation()
    first = compacted(messages)

    assert planned(messages, first) is None
    assert planned([*messages, made("user", "next")], first) is None


# One user message and hundreds of calls


def test_agent_loop_the_user_message_stays_in_place_and_is_not_repeated() -> None:
    messages = agent_loop(300)
    checkpoint = compacted(messages)
    sent = repair_messages(effective(messages, checkpoint))

    assert sent == (
        SYSTEM,
        TASK,
        made("assistant", f"## Session Summary (Compaction Round 1)\n\n{SUMMARY}"),
        *messages[-10:],
    )


def test_agent_loop_shrinks_again_in_every_round() -> None:
    checkpoint = None
    for calls in range(20, 400, 20):
        checkpoint = compacted(agent_loop(calls), checkpoint)

        assert len(effective(agent_loop(calls), checkpoint)) == 13
    assert checkpoint is not None
    assert (checkpoint.round, checkpoint.spans) == (19, (Span(1, 751),))


def test_agent_loop_the_task_enters_the_summary_once_a_later_request_has_come() -> None:
    messages = agent_loop(30)
    first = compacted(messages)
    grown = [*messages, made("user", "Add AI"), *agent_loop(10)[2:]]
    second = compacted(grown, first)

    assert effective(grown, second)[:2] == (
        SYSTEM,
        made(
            "assistant",
            f"## Session Summary (Compaction Round 2)\n\n### Original Task\n{TASK.text}\n\n{SUMMARY}\n\n"
            "This summary incorporates context from 1 previous compaction round.",
        ),
    )
    assert planned(grown, first) == one_text(
        2, 72, [Span(0, 61), Span(62, 72)], (0, *range(51, 61), *range(62, 72))
    )


# Roles


def test_role_is_assistant_and_follows_a_one_line_user_message_where_roles_must_alternate() -> None:
    messages = seed_conversation()
    checkpoint = compacted(messages)
    sent = insert_alternating_fillers(repair_messages(effective(messages, checkpoint)))

    assert [each.role for each in sent[:4]] == ["system", "user", "assistant", "user"]
    assert sent[1].text == CONTINUE_TEXT


def test_event_names_every_message_that_was_summarised() -> None:
    body = body_of(seed_conversation())
    found = planned(seed_conversation())
    names = [format_message_id(prefix) for prefix in chain_digests(each.digest for each in body)]

    assert found is not None
    assert len({names[index] for index in found.summarized_indices}) == 39
