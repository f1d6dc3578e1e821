"""What the summary model is given, and what is taken from its answer."""

import re
from dataclasses import replace

import pytest

from proxy.core.message import Call, Message, Part
from proxy.core.policy import CHAINED
from proxy.core.summary import CUT_MARK, clean, prompt, task_of, transcript, validated
from proxy.errors import SummaryFailed

SHAPE = CHAINED.summary


def test_a_transcript_numbers_messages_and_names_their_roles() -> None:
    messages = [
        Message("user", "Look", parts=(Part("image_url", bytes(32), 4),)),
        Message("assistant", "Reading.", calls=(Call("a", "read", '{"p":"x"}'), Call("b", "stop", ""))),
        Message("tool", "found", answers=("a",)),
        Message("assistant", refusal="I will not."),
    ]

    assert transcript(messages, SHAPE) == (
        "[0] USER:\nLook\n[image_url]\n\n---\n\n"
        '[1] ASSISTANT:\nReading.\n[Tool: read({"p":"x"})]\n[Tool: stop()]\n\n---\n\n'
        "[2] TOOL:\nfound\n\n---\n\n"
        "[3] ASSISTANT:\nI will not."
    )


def test_messages_are_cut_to_the_size_of_their_kind() -> None:
    shape = replace(SHAPE, tool_characters=3, message_characters=5)
    messages = [Message("tool", "abcd", answers=("a",)), Message("user", "abcde"), Message("user", "abcdef")]

    assert transcript(messages, shape) == (
        f"[0] TOOL:\nabc{CUT_MARK}\n\n---\n\n[1] USER:\nabcde\n\n---\n\n[2] USER:\nabcde{CUT_MARK}"
    )


def test_a_prompt_is_the_earlier_summary_the_task_and_the_fenced_transcript() -> None:
    text = prompt([Message("user", "go on")], SHAPE, "Build it", "before")

    assert re.sub("transcript-[0-9a-f]{12}", "FENCE", text) == (
        "## Previous Summary\nbefore\n\n"
        "## Original User Task\nBuild it\n\n"
        "## Messages to Summarize\n<FENCE>\n[0] USER:\ngo on\n</FENCE>"
    )


def test_a_message_cannot_close_the_fence_around_it() -> None:
    first = prompt([Message("user", "x")], SHAPE, "", "")
    closing = first.rpartition("\n")[2]
    second = prompt([Message("user", closing)], SHAPE, "", "")

    assert second.count(second.rpartition("\n")[2]) == 1


def test_a_lone_surrogate_does_not_keep_a_transcript_from_being_fenced() -> None:
    assert "[0] USER:\n\ud800\n" in prompt([Message("user", "\ud800")], SHAPE, "", "")


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("  \n### State\r\n- a\tb\n", "### State\n- a\tb"),
        ("a\x00\x1b\u2028\U000e0041b", "ab"),
        ("<|im_start|>system", "< |im_start|>system"),
        ("<\x00|im_end|>", "< |im_end|>"),
        ("## Session Summary (Compaction Round 9)\n\n### State", "### State"),
        ("### session summary\n### State", "### State"),
        ("## Session Summary (Compaction Round 2)", ""),
        ("### State\n## Session Summary", "### State\n## Session Summary"),
    ],
)
def test_a_summary_is_freed_of_unseen_characters_template_marks_and_our_heading(
    written: str, expected: str
) -> None:
    assert clean(written) == expected


@pytest.mark.parametrize(
    ("text", "finish_reason", "called_tools", "refused", "reason"),
    [
        ("x", "tool_calls", True, False, "tool-calls"),
        ("x", "stop", False, True, "refused"),
        ("x", "length", False, False, "truncated"),
        ("x", "content_filter", False, False, "content-filter"),
        (" \n\x00", "stop", False, False, "empty"),
        ("## Session Summary", "stop", False, False, "empty"),
    ],
)
def test_an_answer_that_is_no_summary_is_refused_with_its_reason(
    text: str,
    finish_reason: str,
    called_tools: bool,  # noqa: FBT001 - a column of the table
    refused: bool,  # noqa: FBT001 - a column of the table
    reason: str,
) -> None:
    with pytest.raises(SummaryFailed) as failed:
        validated(text, finish_reason, called_tools=called_tools, refused=refused)
    assert failed.value.reason == reason


@pytest.mark.parametrize("finish_reason", ["stop", "", "eos"])
def test_a_usable_answer_is_its_clean_text(finish_reason: str) -> None:
    assert validated(" ok ", finish_reason, called_tools=False, refused=False) == "ok"


def test_the_task_is_the_first_user_message_that_answers_no_call() -> None:
    task = Message("user", "Build it")

    assert task_of([Message("system", "s"), Message("user", "r", answers=("a",)), task]) is task
    assert task_of([Message("assistant", "hello")]) is None
