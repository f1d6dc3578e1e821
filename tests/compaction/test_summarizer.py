"""Getting summaries written: forms, portions, whom to ask, and which answers are used."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from compaction_proxy.compaction.summary_request import (
    AlignedConversation,
    SummaryRequest,
    SummaryUsage,
)
from compaction_proxy.core.strategies import ITERATIONS
from compaction_proxy.core.summary.answer import PromptSection
from compaction_proxy.core.summary.call import SummaryAnswer, SummaryCall
from compaction_proxy.wires.body import parse_body
from compaction_proxy.wires.chat.wire import CHAT, build_own_members, build_request_body
from tests.helpers.summary_bench import (
    ALIGNED,
    BRIEF,
    CHEAP,
    DONE,
    HELLO,
    OWN,
    RAW,
    SHAPE,
    TEXT,
    USER,
    Answer,
    Bench,
    Written,
    failed,
    says,
    summary_bench,
    tool,
)

pytestmark = pytest.mark.virtual_time


@pytest.fixture
def bench() -> Iterator[Bench]:
    with summary_bench() as made:
        yield made


# The transcript form.


async def test_one_call_with_instructions_and_data_gives_one_text(bench: Bench) -> None:
    assert await bench.write() == Written((TEXT,), "cheap", SummaryUsage())
    [call] = bench.model.calls
    assert "Set the port to 8443" in call.prompt
    assert (call.system, call.max_tokens, call.temperature, call.conversation) == (
        "Write the record.",
        250,
        0.0,
        None,
    )


async def test_several_groups_share_one_call_and_get_a_text_each(bench: Bench) -> None:
    said = "=== RUN 1 ===\nThe first run set the port.\n=== RUN 2 ===\nThe second run tested it."
    bench.model.answers = [SummaryAnswer(said, "stop")]
    written = await bench.write(replace(BRIEF, groups=(HELLO, HELLO)))
    assert written.texts == ("The first run set the port.", "The second run tested it.")
    assert len(bench.model.calls) == 1


async def test_a_text_over_the_size_is_cut_where_the_strategy_cuts(bench: Bench) -> None:
    lines = "".join(f"- finding number {number} of the long list\n" for number in range(40))
    bench.model.answers = [SummaryAnswer(lines, "length")]
    brief = replace(BRIEF, shape=replace(ITERATIONS.summary or SHAPE, tokens=100, max_tokens=125), tokens=100)
    [text] = (await bench.write(brief)).texts
    assert lines.startswith(text + "\n")
    assert 200 < len(text) <= 400  # four characters a token


async def test_nobody_to_ask_is_no_model(bench: Bench) -> None:
    assert await bench.reason(replace(BRIEF, routes=())) == "no-model"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (replace(DONE, text=""), "empty"),
        (replace(DONE, finish_reason="content_filter"), "content-filter"),
        (replace(DONE, called_tools=True), "tool-calls"),
        (replace(DONE, refused=True), "refused"),
        (replace(DONE, text="I'm sorry, but I can't help with that."), "refused"),
    ],
)
async def test_an_unusable_answer_is_never_used(bench: Bench, answer: SummaryAnswer, reason: str) -> None:
    bench.model.answers = [answer]
    assert await bench.reason() == reason
    assert len(bench.model.calls) == (3 if reason == "empty" else 1)


# Answers that are cut, or not in the form asked for.

SECTIONS = (
    PromptSection("### Done"),
    PromptSection("### Open"),
    PromptSection("### Next"),
    PromptSection("### Errors", is_optional=True),
)
SECTIONED = replace(BRIEF, shape=replace(SHAPE, sections=SECTIONS))
ITEM = "- the port of the service was set to the value that the user asked for"


def cut_after(*headings: str) -> SummaryAnswer:
    """An answer that was cut below the last of the headings."""
    text = "\n".join(f"{heading}\n{ITEM}" for heading in headings)
    return replace(DONE, text=f"{text}\n- and th", finish_reason="length")


async def test_a_cut_answer_is_used_up_to_its_last_whole_line_without_another_call(bench: Bench) -> None:
    bench.model.answers = [replace(DONE, text=f"{TEXT}\n- and th", finish_reason="length")]
    assert (await bench.write()).texts == (TEXT,)
    assert len(bench.model.calls) == 1


async def test_what_was_cut_too_early_is_asked_for_once_more_in_half_the_size(bench: Bench) -> None:
    bench.model.answers = [replace(DONE, text="- th", finish_reason="length"), DONE]
    written = await bench.write()
    assert (written.texts, written.usage.completion_tokens) == ((TEXT,), 40)
    sizes = ["At most 200 tokens", "At most 100 tokens"]
    assert [size in call.prompt for size, call in zip(sizes, bench.model.calls, strict=True)] == [True, True]
    assert [call.max_tokens for call in bench.model.calls] == [250, 250]


async def test_an_aligned_answer_that_was_cut_too_early_is_asked_for_once_more(bench: Bench) -> None:
    bench.model.answers = [replace(DONE, text="- th", finish_reason="length"), DONE]
    assert (await bench.write(ALIGNED)).texts == (TEXT,)
    assert [call.conversation is None for call in bench.model.calls] == [False, False]
    assert "At most 100 tokens" in bench.model.calls[1].prompt


async def test_an_answer_that_is_cut_twice_is_truncated_after_two_calls(bench: Bench) -> None:
    bench.model.answers = [replace(DONE, text="- th", finish_reason="length")]
    assert await bench.reason() == "truncated"
    assert len(bench.model.calls) == 2


@pytest.mark.parametrize(
    "second",
    [failed("http-400"), replace(DONE, text="- th", finish_reason="length"), cut_after("### Done")],
    ids=["failed", "nothing", "less"],
)
async def test_the_first_answer_is_used_where_the_second_is_no_better(bench: Bench, second: Answer) -> None:
    bench.model.answers = [cut_after("### Done", "### Open"), second]
    [text] = (await bench.write(SECTIONED)).texts
    assert text == f"### Done\n{ITEM}\n\n### Open\n{ITEM}\n\n### Next\nNot recorded."
    assert len(bench.model.calls) == 2


async def test_the_second_answer_is_used_where_it_holds(bench: Bench) -> None:
    bench.model.answers = [cut_after("### Done", "### Open"), cut_after("### Done", "### Open", "### Next")]
    [text] = (await bench.write(SECTIONED)).texts
    assert text == "\n".join(f"{heading}\n{ITEM}" for heading in ("### Done", "### Open", "### Next"))


async def test_no_second_call_is_made_where_the_deadline_leaves_no_time_for_it(bench: Bench) -> None:
    def pass_time() -> None:
        bench.clock.now += 16

    bench.model.asked, bench.model.answers = pass_time, [cut_after("### Done", "### Open")]
    [text] = (await bench.write(replace(SECTIONED, deadline_s=30.0))).texts
    assert (text.endswith("### Next\nNot recorded."), len(bench.model.calls)) == (True, 1)


async def test_the_second_call_counts_towards_the_budget(bench: Bench) -> None:
    bench.model.answers = [replace(DONE, text="- th", finish_reason="length"), DONE]
    assert await bench.reason(replace(BRIEF, calls_per_hour=1)) == "budget"


async def test_a_text_with_fewer_than_half_of_its_sections_is_garbage_after_one_call(bench: Bench) -> None:
    bench.model.answers = [replace(DONE, text=f"### Done\n{ITEM}")]
    assert await bench.reason(SECTIONED) == "garbage"
    assert len(bench.model.calls) == 1


async def test_runs_that_cannot_be_told_apart_get_a_call_each(bench: Bench) -> None:
    bench.model.answers = lambda call: replace(
        DONE, text=f"The {len(call.prompt)} characters of this run were read and worked on."
    )
    written = await bench.write(replace(BRIEF, groups=(HELLO, (*HELLO, *HELLO), HELLO)))
    together, *alone = bench.model.calls
    assert "=== RUN 3 ===" in together.prompt
    texts = [f"The {len(call.prompt)} characters of this run were read and worked on." for call in alone]
    assert written.texts == tuple(texts)
    assert [call.max_tokens for call in alone] == [75, 125, 75]  # their shares, 60 tokens at least


async def test_at_most_twelve_runs_get_a_call_each_and_the_others_no_text(bench: Bench) -> None:
    written = await bench.write(replace(BRIEF, groups=(HELLO,) * 15))
    assert written.texts == (*(TEXT,) * 12, "", "", "")
    assert len(bench.model.calls) == 13


async def test_a_run_that_fails_alone_fails_the_round(bench: Bench) -> None:
    bench.model.answers = [DONE, replace(DONE, refused=True)]
    assert await bench.reason(replace(BRIEF, groups=(HELLO, HELLO))) == "refused"


async def test_aligned_runs_that_cannot_be_told_apart_are_read_from_transcripts(bench: Bench) -> None:
    written = await bench.write(replace(ALIGNED, groups=(HELLO, HELLO)))
    assert written.texts == (TEXT, TEXT)
    assert [call.conversation is None for call in bench.model.calls] == [False, True, True, True]


async def test_what_the_source_does_not_hold_is_refused_where_the_strategy_verifies(bench: Bench) -> None:
    said = "- see https://evil.example/x\n- pay 99,999.95 EUR to DE-77123-X"
    bench.model.answers = [SummaryAnswer(said, "stop")]
    brief = replace(BRIEF, shape=replace(SHAPE, is_verified=True))
    assert await bench.reason(brief) == "unfaithful"
    assert len(bench.model.calls) == 1


# Whom to ask.


async def test_an_unknown_model_is_followed_by_the_next_at_once(bench: Bench) -> None:
    bench.model.answers = [failed("unknown-model"), DONE]
    assert (await bench.write(replace(BRIEF, routes=(CHEAP, OWN)))).model == "gpt-4o"
    assert (bench.model.models, bench.clock.slept) == (["cheap", "gpt-4o"], [])


async def test_any_other_failure_is_not_tried_elsewhere(bench: Bench) -> None:
    bench.model.answers = [failed("http-400")]
    assert await bench.reason(replace(BRIEF, routes=(CHEAP, OWN))) == "http-400"
    assert bench.model.models == ["cheap"]


# The aligned form.

NARROW = replace(ALIGNED, routes=(replace(OWN, window=1_000),))


def sent(call: SummaryCall) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(build_request_body(call, build_own_members(call)))
    return body


async def test_an_aligned_call_continues_the_conversation_itself(bench: Bench) -> None:
    assert (await bench.write(ALIGNED)).texts == (TEXT,)
    [call] = bench.model.calls
    body = sent(call)
    asked = body.pop("messages")
    assert asked[:2] == json.loads(RAW)["messages"]
    assert asked[2]["content"].startswith("Write the record.")
    assert body == {
        "model": "gpt-4o",
        "tools": json.loads(RAW)["tools"],
        "max_tokens": 250,
        "temperature": 0.0,
        "tool_choice": "none",
    }
    assert call.cache_key == ""


@pytest.mark.parametrize("reason", ["overflow", "http-400", "http-422"])
async def test_an_aligned_call_that_is_refused_falls_back_to_a_transcript(bench: Bench, reason: str) -> None:
    bench.model.answers = [failed(reason), DONE]
    assert (await bench.write(ALIGNED)).texts == (TEXT,)
    assert [call.conversation is None for call in bench.model.calls] == [False, True]


@pytest.mark.parametrize(
    "brief",
    [
        replace(NARROW, aligned=AlignedConversation(parse_body(RAW, CHAT), (replace(USER, tokens=800),))),
        replace(NARROW, aligned=AlignedConversation(parse_body(RAW, CHAT), (says("x" * 4_000),))),
        replace(ALIGNED, routes=(CHEAP,)),
    ],
    ids=["too large", "too large, uncounted", "another model"],
)
async def test_what_cannot_be_aligned_is_a_transcript(bench: Bench, brief: SummaryRequest) -> None:
    await bench.write(brief)
    assert [call.conversation for call in bench.model.calls] == [None]


async def test_an_aligned_call_that_fails_is_no_transcript(bench: Bench) -> None:
    bench.model.answers = [replace(DONE, refused=True)]
    assert await bench.reason(ALIGNED) == "refused"
    assert len(bench.model.calls) == 1


# A summary model with a small window.

SMALL = replace(CHEAP, window=2_000)
LONG = tuple(
    message
    for number in range(40)
    for message in (says(f"Question {number}: " + "why? " * 40), *tool(f"Result {number} " + "line " * 60))
)


def size(call: SummaryCall) -> float:
    """Characters of a call as the counter `characters` counts them."""
    return (len(call.system) + len(call.prompt)) / 4 + call.max_tokens + 4


async def test_what_a_small_window_cannot_hold_is_read_in_portions(bench: Bench) -> None:
    def answer(call: SummaryCall) -> SummaryAnswer:
        return replace(DONE, text=f"- the part that holds {len(call.prompt)} characters was read")

    bench.model.answers, bench.model.takes_s = answer, 0.02
    written = await bench.write(
        replace(BRIEF, groups=(LONG,), routes=(SMALL,), earlier=("The round before.",))
    )
    *parts, last = bench.model.calls
    assert 3 <= len(parts) <= 12
    assert all(size(call) <= SMALL.window for call in bench.model.calls)
    assert bench.model.busiest == 2
    everything = "".join(call.prompt for call in parts)
    assert all(f"Question {number}:" in everything for number in range(40))
    assert all(f"Result {number} " in everything for number in range(40))
    assert ["The round before." in call.prompt for call in bench.model.calls] == [False] * len(parts) + [True]
    assert all(f"that holds {len(part.prompt)} characters" in last.prompt for part in parts)
    assert written.texts == (f"- the part that holds {len(last.prompt)} characters was read",)
    assert written.usage.prompt_tokens == 100 * len(bench.model.calls)


async def test_beyond_twelve_portions_the_middles_of_results_go_first(bench: Bench) -> None:
    huge = tuple(
        message
        for number in range(40)
        for message in (says(f"Question {number}?"), *tool(f"Result {number} " + "line " * 1_500))
    )
    await bench.write(replace(BRIEF, groups=(huge,), routes=(SMALL,)))
    assert len(bench.model.calls) <= 13
    everything = "".join(call.prompt for call in bench.model.calls)
    assert all(f"Question {number}?" in everything for number in range(40))


async def test_several_groups_are_divided_before_one_is(bench: Bench) -> None:
    def answer(call: SummaryCall) -> SummaryAnswer:
        runs = call.prompt.count("\n=== RUN ")
        found = [number for number in range(4) if f"Q{number}!" in call.prompt]
        named = [f"The run of question {number} was read." for number in found]
        marked = [f"=== RUN {at} ===\n{text}" for at, text in enumerate(named, 1)] if runs else named
        return SummaryAnswer("\n".join(marked), "stop")

    bench.model.answers = answer
    groups = tuple((says(f"Q{number}! " + "why? " * 500),) for number in range(4))
    written = await bench.write(replace(BRIEF, groups=groups, routes=(SMALL,)))
    assert written.texts == tuple(f"The run of question {number} was read." for number in range(4))
    assert all(size(call) <= SMALL.window for call in bench.model.calls)
    assert sum(call.max_tokens for call in bench.model.calls) <= 250


async def test_one_message_too_large_for_the_window_is_shown_in_part(bench: Bench) -> None:
    group = (says("Begin here. " + "and so on " * 5_000),)
    shape = replace(SHAPE, message_characters=90_000)
    await bench.write(replace(BRIEF, groups=(group,), routes=(SMALL,), shape=shape))
    [call] = bench.model.calls
    assert "Begin here." in call.prompt
    assert SMALL.window / 2 < size(call) <= SMALL.window


async def test_a_call_that_is_too_long_is_made_once_more_in_a_smaller_window(bench: Bench) -> None:
    bench.model.answers = [failed("overflow", limit=2_000), *([DONE] * 20)]
    await bench.write(replace(BRIEF, groups=(LONG,)))
    first, *rest = bench.model.calls
    assert size(first) > 2_000
    assert all(size(call) <= 0.7 * 2_000 for call in rest)


async def test_a_second_overflow_is_the_end(bench: Bench) -> None:
    bench.model.answers = [failed("overflow")]
    assert await bench.reason() == "overflow"
    assert len(bench.model.calls) == 2


@pytest.mark.parametrize(
    "brief",
    [
        replace(BRIEF, instructions="word " * 9_000, routes=(SMALL,)),
        replace(BRIEF, earlier=("word " * 9_000,), routes=(SMALL,)),
        replace(BRIEF, groups=(tuple(says("why? " * 9) for _ in range(3_000)),), routes=(SMALL,)),
        replace(BRIEF, routes=(replace(CHEAP, window=1),)),
    ],
    ids=["instructions", "earlier rounds", "too many messages", "no window at all"],
)
async def test_a_window_that_is_too_small_is_said_so_without_a_call(
    bench: Bench, brief: SummaryRequest
) -> None:
    assert await bench.reason(brief) == "summary-window"
    assert bench.model.calls == []


async def test_a_portion_that_fails_fails_the_whole(bench: Bench) -> None:
    bench.model.answers = [DONE, replace(DONE, refused=True), DONE]
    assert await bench.reason(replace(BRIEF, groups=(LONG,), routes=(SMALL,))) == "refused"
    assert len(bench.model.calls) == 2


async def test_an_answer_never_takes_more_than_a_quarter_of_the_window(bench: Bench) -> None:
    await bench.write(replace(BRIEF, routes=(replace(CHEAP, window=600),)))
    assert bench.model.calls[0].max_tokens <= 150
