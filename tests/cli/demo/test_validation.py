import json
from typing import Any

import pytest

from compaction_proxy.cli.demo.validation import Refusal, check_overflow, validate_request

USER = {"role": "user", "content": "hello"}


def calling(*ids: str) -> dict[str, Any]:
    calls = [{"id": each, "type": "function", "function": {"name": "f", "arguments": "{}"}} for each in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def answering(call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "done"}


def judged(*messages: object) -> tuple[str | None, str | None] | None:
    wrong = validate_request({"model": "m", "messages": list(messages)})
    return (wrong.param, wrong.code) if wrong else None


@pytest.mark.parametrize(
    "messages",
    [
        [USER],
        [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
        [USER, calling("a", "b"), answering("b"), answering("a"), USER],
        [USER, calling("a"), answering("a"), calling("a"), answering("a")],
        [USER, {"role": "assistant", "content": "", "refusal": "no"}],
    ],
)
def test_a_valid_conversation_is_not_refused(messages: list[object]) -> None:
    assert judged(*messages) is None


@pytest.mark.parametrize(
    ("messages", "refused"),
    [
        ([], ("messages", "empty_array")),
        ([USER, answering("a")], ("messages.[1].role", None)),
        ([calling("a"), answering("b")], ("messages.[1].tool_call_id", None)),
        ([calling("a"), USER], ("messages.[1].role", None)),
        ([USER, calling("a")], ("messages.[2].role", None)),
        ([calling("a", "b"), answering("a"), USER], ("messages.[2].role", None)),
        ([{"role": "robot", "content": "x"}], ("messages[0].role", "invalid_value")),
        ([USER, {"role": "assistant", "content": None}], ("messages.[1].content", None)),
        ([{"role": "user", "content": []}], ("messages[0].content", "empty_array")),
        ([{**calling("a"), "tool_calls": []}], ("messages[0].tool_calls", "empty_array")),
        (["hello"], ("messages[0]", "invalid_type")),
    ],
)
def test_an_invalid_conversation_is_refused_where_it_goes_wrong(
    messages: list[object], refused: tuple[str | None, str | None]
) -> None:
    assert judged(*messages) == refused


def test_unanswered_calls_are_named() -> None:
    wrong = validate_request({"model": "m", "messages": [calling("a", "b"), answering("a"), USER]})
    assert wrong is not None
    assert wrong.message.endswith("The following tool_call_ids did not have response messages: b")


def test_a_request_without_a_model_or_messages_is_refused() -> None:
    assert validate_request({"messages": [USER]}) == Refusal("you must provide a model parameter")
    assert validate_request({"model": "m"}) == Refusal(
        "Missing required parameter: 'messages'.", "messages", "missing_required_parameter"
    )


@pytest.mark.parametrize(("prompt", "output"), [(100, 0), (60, 40), (0, 100)])
def test_what_just_fits_is_accepted(prompt: int, output: int) -> None:
    assert check_overflow(100, prompt, output) is None


def test_an_overflow_has_the_wording_and_numbers_of_openai() -> None:
    refused = check_overflow(100, 60, 41)
    assert refused is not None
    assert json.loads(refused.to_bytes()) == {
        "error": {
            "message": "This model's maximum context length is 100 tokens. However, you requested 101 tokens "
            "(60 in the messages, 41 in the completion). "
            "Please reduce the length of the messages or completion.",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "context_length_exceeded",
        }
    }
    alone = check_overflow(100, 101, 0)
    assert alone is not None
    assert alone.message == (
        "This model's maximum context length is 100 tokens. However, your messages resulted in 101 tokens. "
        "Please reduce the length of the messages."
    )
