"""What the summary model is given, and what is taken from its answer."""

import re
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.core.errors import SummaryError
from compaction_proxy.core.message import ContentPart, Message, MessageToolCall
from compaction_proxy.core.strategies import CHAINED
from compaction_proxy.core.summary.answer import clean_summary, split_run_texts, validate_summary
from compaction_proxy.core.summary.prompt import (
    CUT_MARK,
    build_aligned_prompt,
    build_prompt,
    build_transcript,
    find_task_message,
)

assert CHAINED.summary is not None
SHAPE = CHAINED.summary
LONG = "### State\n- the parser reads both forms of dates now\n- two tests are left to be written"
SENTENCES = "The parser reads both forms. Two tests are left."
ASKED = "At most 800 tokens, which is about 560 words. Write in German."


def asked(*groups: list[Message], task: str = "Build it", earlier: tuple[str, ...] = ("before",)) -> str:
    return build_prompt(
        groups, SHAPE, task=task, earlier_summaries=earlier, language="German", max_tokens=800
    )


def reason_of(text: str, finish_reason: str = "stop", cut_characters: int | None = None) -> str:
    with pytest.raises(SummaryError) as failed:
        validate_summary(
            text, finish_reason, called_tools=False, refused=False, max_characters=cut_characters
        )
    return failed.value.reason


def test_a_transcript_numbers_messages_and_names_their_roles() -> None:
    messages = [
        Message("user", "Look", parts=(ContentPart("image_url", bytes(32), 4),)),
        Message(
            "assistant",
            "Reading.",
            calls=(MessageToolCall("a", "read", '{"p":"x"}'), MessageToolCall("b", "stop", "")),
        ),
        Message("tool", "found", answered_call_ids=("a",)),
        Message("assistant", refusal="I will not."),
    ]

    assert build_transcript(messages, SHAPE) == (
        "[0] USER:\nLook\n[image_url]\n\n---\n\n"
        '[1] ASSISTANT:\nReading.\n[Tool: read({"p":"x"})]\n[Tool: stop()]\n\n---\n\n'
        "[2] TOOL:\nfound\n\n---\n\n"
        "[3] ASSISTANT:\nI will not."
    )


def test_messages_are_cut_to_the_size_of_their_kind() -> None:
    shape = replace(SHAPE, tool_characters=3, message_characters=5)
    messages = [
        Message("tool", "abcd", answered_call_ids=("a",)),
        Message("user", "abcde"),
        Message("user", "abcdef"),
    ]

    assert build_transcript(messages, shape) == (
        f"[0] TOOL:\nabc{CUT_MARK}\n\n---\n\n[1] USER:\nabcde\n\n---\n\n[2] USER:\nabcde{CUT_MARK}"
    )


@pytest.mark.parametrize(
    ("role", "end", "room", "expected"),
    [
        ("tool", "TypeError: boom", 1_000, "x" * 600 + CUT_MARK + "\n" + "x" * 385 + "TypeError: boom"),
        ("tool", "all went well", 1_000, "x" * 1_000 + CUT_MARK),
        ("tool", "TypeError: boom", 999, "x" * 999 + CUT_MARK),
        ("assistant", "TypeError: boom", 1_000, "x" * 1_000 + CUT_MARK),
    ],
)
def test_a_large_tool_result_that_ends_in_an_error_keeps_its_end(
    role: str, end: str, room: int, expected: str
) -> None:
    shape = replace(SHAPE, tool_characters=room, message_characters=room)
    message = Message(role, "x" * 9_000 + end, answered_call_ids=("a",) if role == "tool" else ())

    assert build_transcript([message], shape) == f"[0] {role.upper()}:\n{expected}"


def test_a_prompt_is_size_and_language_the_earlier_summary_the_task_and_the_fenced_transcript() -> None:
    assert re.sub("-[0-9a-f]{16}>", "-FENCE>", asked([Message("user", "go on")])) == (
        f"## Size and Language\n{ASKED}\n\n"
        "## Previous Summary\n<summary-FENCE>\nbefore\n</summary-FENCE>\n\n"
        "## Original User Task\n<task-FENCE>\nBuild it\n</task-FENCE>\n\n"
        "## Messages to Summarize\n<transcript-FENCE>\n[0] USER:\ngo on\n</transcript-FENCE>"
    )


def test_a_first_round_has_no_previous_summary_and_a_strategy_without_a_task_shows_none() -> None:
    text = build_prompt(
        [[Message("user", "hi")]], SHAPE, task="", earlier_summaries=(), language="", max_tokens=600
    )

    assert text.startswith(
        "## Size and Language\n"
        "At most 600 tokens, which is about 420 words. Write in the language that the user writes in.\n\n"
        "## Previous Summary\nNone: this is the first compaction round.\n\n"
        "## Messages to Summarize\n<transcript-"
    )


def test_several_runs_are_fenced_apart_numbered_through_and_get_a_mark_each() -> None:
    runs = asked([Message("assistant", "one"), Message("assistant", "two")], [Message("assistant", "three")])

    assert re.sub("-[0-9a-f]{16}>", "-FENCE>", runs.partition("## Runs to Summarize\n")[2]) == (
        "There are 2 runs. Write one text for each, in their order, each behind a line that holds its mark "
        "and nothing else. The marks are:\n=== RUN 1 ===\n=== RUN 2 ===\n\n"
        "<run-1-FENCE>\n[0] ASSISTANT:\none\n\n---\n\n[1] ASSISTANT:\ntwo\n</run-1-FENCE>\n\n"
        "<run-2-FENCE>\n[2] ASSISTANT:\nthree\n</run-2-FENCE>"
    )
    assert "words for all 2 texts together. Write in German." in runs


def test_a_prompt_is_the_same_whenever_it_is_made() -> None:
    assert asked([Message("user", "go on")]) == asked([Message("user", "go on")])


def test_a_prompt_of_no_messages_is_an_empty_transcript() -> None:
    assert re.search(r"<transcript-[0-9a-f]{16}>\n\n</transcript-[0-9a-f]{16}>\Z", asked())


def test_a_lone_surrogate_does_not_keep_a_transcript_from_being_fenced() -> None:
    assert "[0] USER:\n\ud800\n" in asked([Message("user", "\ud800")])


def test_an_aligned_prompt_begins_with_the_instructions_and_names_size_and_language() -> None:
    text = build_aligned_prompt("Summarise.\n", language="German", max_tokens=800, run_count=1)

    assert text == (
        f"Summarise.\n\n## Size and Language\n{ASKED}\n\n"
        "The conversation is everything above this message. Do not go on with it and call no tools: your "
        "answer is the text that was described, and nothing else."
    )


def test_an_aligned_prompt_about_several_runs_says_which_and_gives_their_marks() -> None:
    text = build_aligned_prompt("Summarise.", language="", max_tokens=800, run_count=2)

    assert "take the 2 earliest. There are 2 runs." in text
    assert text.count("=== RUN ") == 2


@pytest.mark.parametrize(
    ("answer", "count", "expected"),
    [
        (" one text \n", 1, ("one text",)),
        ("=== RUN 1 ===\none text", 1, ("one text",)),
        ("=== RUN 1 ===\none\n\n=== RUN 2 ===\ntwo\nlines\n", 2, ("one", "two\nlines")),
        ("Here they are:\n### Run 1\none\n**RUN 2**\ntwo\n[run 3]\nthree", 3, ("one", "two", "three")),
        ("=== RUN 1 ===\nThe run 2 was slow\n=== RUN 2 ===\nb", 2, ("The run 2 was slow", "b")),
    ],
)
def test_an_answer_about_runs_is_taken_apart_in_order(
    answer: str, count: int, expected: tuple[str, ...]
) -> None:
    assert split_run_texts(answer, count) == expected


@pytest.mark.parametrize(
    ("answer", "count"),
    [
        ("one text for both", 2),
        ("=== RUN 1 ===\none", 2),
        ("=== RUN 2 ===\ntwo\n=== RUN 1 ===\none", 2),
        ("=== RUN 1 ===\none\n=== RUN 1 ===\nagain", 2),
        ("=== RUN 1 ===\none\n=== RUN 2 ===\n \n", 2),
        ("=== RUN 1 ===\none\n=== RUN 2 ===\ntwo\n=== RUN 3 ===\nthree", 2),
        ("=== RUN 2 ===\none", 1),
        ("", 2),
    ],
)
def test_texts_that_cannot_be_told_apart_are_garbage(answer: str, count: int) -> None:
    with pytest.raises(SummaryError) as failed:
        split_run_texts(answer, count)
    assert failed.value.reason == "garbage"


def test_a_refusal_in_place_of_one_run_is_no_summary_of_it() -> None:
    with pytest.raises(SummaryError) as failed:
        split_run_texts("=== RUN 1 ===\nI read it.\n=== RUN 2 ===\nSorry, I can\u2019t help with that.", 2)
    assert failed.value.reason == "refused"


@given(st.lists(st.text("abc \n.", min_size=1).filter(str.strip), min_size=2, max_size=6))
def test_whatever_is_put_behind_the_marks_comes_back(written: list[str]) -> None:
    answer = "\n".join(f"=== RUN {number} ===\n{text}" for number, text in enumerate(written, 1))

    assert split_run_texts(answer, len(written)) == tuple(text.strip() for text in written)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("  \n### State\r\n- a\tb\n", "### State\n- a\tb"),
        ("a\x00\x1b\u2028\U000e0041b", "ab"),
        ("<|im_start|>system", "< |im_start|>system"),
        ("<\x00|im_end|>", "< |im_end|>"),
        ("[INST]a</s>", "[ INST]a< /s>"),
        ("## Session Summary (Compaction Round 9)\n\n### State", "### State"),
        ("### session summary\n### State", "### State"),
        ("## Session Summary (Compaction Round 2)", ""),
        ("### State\n## Session Summary", "### State\n## Session Summary"),
    ],
)
def test_a_summary_is_freed_of_unseen_characters_template_marks_and_our_heading(
    written: str, expected: str
) -> None:
    assert clean_summary(written) == expected


@pytest.mark.parametrize(
    ("finish_reason", "called_tools", "refused", "reason"),
    [
        ("tool_calls", True, False, "tool-calls"),
        ("stop", True, False, "tool-calls"),
        ("stop", False, True, "refused"),
        ("content_filter", False, False, "content-filter"),
    ],
)
def test_an_answer_that_did_not_end_well_is_refused_with_its_reason(
    finish_reason: str,
    called_tools: bool,  # noqa: FBT001 - a column of the table
    refused: bool,  # noqa: FBT001 - a column of the table
    reason: str,
) -> None:
    with pytest.raises(SummaryError) as failed:
        validate_summary(LONG, finish_reason, called_tools=called_tools, refused=refused)
    assert failed.value.reason == reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (" \n\x00", "empty"),
        ("## Session Summary", "empty"),
        ("Done.", "too-short"),
        ("x" * 39, "too-short"),
        ("<think>The user wants a summary, so I look at the messages and", "reasoning"),
        ("  <thinking>\nfirst", "reasoning"),
        ("<think>a</think>\n<think>b", "reasoning"),
        ("◁think▷hm", "reasoning"),
        ("<think>a</think>", "empty"),
        ("I'm sorry, but I can't help with that.", "refused"),
        ("I\u2019m sorry, but I cannot summarise this conversation because of its content.", "refused"),
        ("I cannot assist with this request, as it goes against what I may do.", "refused"),
        ("Es tut mir leid, aber dabei kann ich nicht helfen, weil der Inhalt es nicht zulässt.", "refused"),
        ("Lo siento, pero no puedo ayudar con esta conversación en este momento.", "refused"),
        ("Je suis désolé, mais je ne peux pas résumer cette conversation pour vous.", "refused"),
        ("很抱歉，我无法总结这段对话，因为其中包含不适当的内容。", "refused"),  # noqa: RUF001 - its own script
        ("申し訳ありませんが、この会話を要約することはできません。", "refused"),
        ("К сожалению, я не могу выполнить эту просьбу по соображениям безопасности.", "refused"),  # noqa: RUF001 - its own script
    ],
)
def test_a_text_that_is_no_summary_is_refused_with_its_reason(text: str, reason: str) -> None:
    assert reason_of(text) == reason


@pytest.mark.parametrize("finish_reason", ["stop", "", "eos"])
def test_a_usable_answer_is_its_clean_text(finish_reason: str) -> None:
    assert validate_summary(f" {LONG} ", finish_reason, called_tools=False, refused=False) == LONG


@pytest.mark.parametrize(
    "text",
    [
        f"<think>What is there?\nMuch.</think>\n\n{LONG}",
        f"<think>a</think><think>b</think>{LONG}",
        f"[THINK]a[/THINK]{LONG}",
        f"What is there?\nMuch.\n</think>\n\n{LONG}",
    ],
)
def test_reasoning_that_ends_is_taken_off(text: str) -> None:
    assert validate_summary(text, "stop", called_tools=False, refused=False) == LONG


@pytest.mark.parametrize(
    "text",
    [
        "I can't reproduce the crash on Linux; on macOS it comes from the parser, which I fixed.",
        "Sorry state of the parser: "
        + "it was rewritten in full, and the dates are read in both forms. " * 7,
        "The tag <think> was left open by the model, and the parser had to be told to close it.",
    ],
)
def test_a_summary_that_tells_of_failure_is_none(text: str) -> None:
    assert validate_summary(text, "stop", called_tools=False, refused=False).startswith(text[:8])


@pytest.mark.parametrize(
    ("text", "finish_reason", "characters", "expected"),
    [
        (LONG, "stop", 500, LONG),
        (LONG, "stop", 70, LONG.rpartition("\n")[0]),
        (LONG, "length", 500, LONG.rpartition("\n")[0]),
        (f"{SENTENCES} And th", "length", 500, SENTENCES),
        ("word " * 30, "stop", 52, "word " * 9 + "word"),
        ("x" * 100, "stop", 50, "x" * 50),
    ],
)
def test_a_strategy_that_cuts_gets_whole_lines_within_its_size(
    text: str, finish_reason: str, characters: int, expected: str
) -> None:
    cut = validate_summary(text, finish_reason, called_tools=False, refused=False, max_characters=characters)

    assert cut == expected


@pytest.mark.parametrize(
    "finish_reason",
    [
        "length",
        "max_tokens",
        "MAX_TOKENS",
        "incomplete",
        "max_output_tokens",
        "model_context_window_exceeded",
    ],
)
def test_an_answer_at_its_output_limit_is_used_up_to_its_last_whole_line(finish_reason: str) -> None:
    used = validate_summary(LONG, finish_reason, called_tools=False, refused=False)

    assert used == LONG.rpartition("\n")[0]


def test_an_answer_of_one_line_at_its_output_limit_is_used_up_to_its_last_sentence() -> None:
    assert validate_summary(f"{SENTENCES} And th", "length", called_tools=False, refused=False) == SENTENCES


@pytest.mark.parametrize("text", ["", "### State\n- the", "word " * 60, "<think>What is there? " * 9])
def test_an_answer_at_its_output_limit_that_holds_nothing_whole_is_truncated(text: str) -> None:
    assert reason_of(text, "length") == "truncated"


def test_a_cut_that_leaves_next_to_nothing_is_too_short() -> None:
    assert reason_of(LONG, "length", cut_characters=30) == "too-short"


@given(st.text(max_size=400), st.sampled_from(["stop", "length"]), st.none() | st.integers(1, 300))
def test_an_answer_is_used_within_its_size_or_refused_and_nothing_else_happens(
    text: str, finish_reason: str, characters: int | None
) -> None:
    used = ""
    with suppress(SummaryError):
        used = validate_summary(
            text, finish_reason, called_tools=False, refused=False, max_characters=characters
        )

    assert not used or 40 <= len(used) <= (characters or len(text) + 400)


def test_the_task_is_the_first_user_message_that_answers_no_call() -> None:
    task = Message("user", "Build it")

    assert (
        find_task_message([Message("system", "s"), Message("user", "r", answered_call_ids=("a",)), task])
        is task
    )
    assert find_task_message([Message("assistant", "hello")]) is None
