"""Requests that clients send beside a conversation are recognised by what they ask for."""

import pytest

from compaction_proxy.core.title_request import (
    EDGE_CHARACTERS,
    is_side_request_prompt,
    is_title_or_side_prompt,
    is_title_request,
)

LONG = "The worker reads the next job from the queue. " * 40


@pytest.mark.parametrize(
    "text",
    [
        "Generate a concise title for this conversation.",
        "Suggest three follow-up questions for the chat above",
        "Please create 1-3 tags categorizing the main themes of the chat history",
        f"{LONG}\n\nWrite a short title of the discussion above.",
        f"Write a title for this session:\n{LONG}",
    ],
)
def test_a_message_that_asks_for_a_title_is_recognised_at_either_end(text: str) -> None:
    assert is_title_request(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Write a title for the report and save it in docs/title.md.",
        "The chat needs a title. Please fix the bug that hides it.",
        "Make the tests pass.",
    ],
)
def test_work_on_titles_is_no_side_request(text: str) -> None:
    assert not is_title_request(text)


def test_what_stands_in_the_middle_of_a_long_message_is_the_conversation_s() -> None:
    quoted = "Generate a title for this conversation."
    assert not is_title_request("x" * EDGE_CHARACTERS + quoted + "y" * EDGE_CHARACTERS)


def test_a_system_prompt_may_ask_for_the_title_of_anything() -> None:
    assert is_title_or_side_prompt("You are a title generator. You output ONLY a thread title.")
    assert not is_title_or_side_prompt("You are a coding agent.")


def test_prompts_of_known_clients_for_side_requests_are_recognised_by_their_beginning() -> None:
    prompt = "*Briefly* summarize this partial conversation about programming."
    assert is_side_request_prompt(f"{prompt} Include less detail about older parts.")
    assert is_title_or_side_prompt(prompt)
    assert not is_side_request_prompt(f"Do this: {prompt}")
