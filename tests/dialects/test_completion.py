"""What a summary call sends, and what is understood of its answer."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy.dialects.completion import REASONING_ALLOWANCE_TOKENS, answer, refused_member, request_body
from proxy.errors import SummaryFailed
from proxy.ports import SummaryAnswer, SummaryCall

# The machine may be busy.
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

CALL = SummaryCall(
    url="http://x/v1/chat/completions",
    headers={"authorization": "Bearer x"},
    model="gpt-4o-mini",
    system="Write",
    prompt="data \ud800",
    max_tokens=1_000,
    temperature=0.3,
)
MESSAGES = [{"role": "system", "content": "Write"}, {"role": "user", "content": "data \ud800"}]


def sent(call: SummaryCall, *refused: str) -> Any:
    return json.loads(request_body(call, frozenset(refused)))


def test_a_call_is_two_messages_a_limit_and_a_temperature() -> None:
    assert sent(CALL) == {
        "model": "gpt-4o-mini",
        "messages": MESSAGES,
        "max_tokens": 1_000,
        "temperature": 0.3,
    }


@pytest.mark.parametrize("model", ["o1", "o3-mini", "openai/o4-mini", "gpt-5", "openai/gpt-5-nano", "gpt-6"])
def test_a_reasoning_model_thinks_little_on_top_of_the_limit(model: str) -> None:
    assert sent(replace(CALL, model=model)) == {
        "model": model,
        "messages": MESSAGES,
        "max_completion_tokens": 1_000 + REASONING_ALLOWANCE_TOKENS,
        "reasoning_effort": "low",
    }


@pytest.mark.parametrize("model", ["gpt-5-chat-latest", "gpt-4o", "olmo", "foo1", "llama-3"])
def test_other_models_take_a_temperature(model: str) -> None:
    assert "temperature" in sent(replace(CALL, model=model))


def test_what_a_provider_has_refused_is_left_out_or_named_in_another_way() -> None:
    assert sent(CALL, "temperature", "max_tokens") == {
        "model": "gpt-4o-mini",
        "messages": MESSAGES,
        "max_completion_tokens": 1_000,
    }
    assert "reasoning_effort" not in sent(replace(CALL, model="o1"), "reasoning_effort")


def test_without_a_temperature_none_is_sent() -> None:
    assert "temperature" not in sent(replace(CALL, temperature=None))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ({"error": {"param": "temperature", "message": "no"}}, "temperature"),
        ({"error": {"message": "Unsupported parameter: 'max_tokens' is not supported"}}, "max_tokens"),
        ({"error": "unknown field reasoning_effort"}, "reasoning_effort"),
        ({"error": {"param": "messages", "message": "too long"}}, None),
        ({"error": {"param": ["temperature"], "message": None}}, None),
        ({"error": None}, None),
        ([], None),
    ],
)
def test_the_refused_member_is_found_in_the_error(error: Any, expected: str | None) -> None:
    assert refused_member(json.dumps(error).encode()) == expected


def completion(message: Any, **choice: Any) -> dict[str, Any]:
    return {"choices": [{"message": message, "finish_reason": "stop", **choice}]}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            {
                **completion({"role": "assistant", "content": "ok"}),
                "usage": {"prompt_tokens": 9, "completion_tokens": 2},
            },
            SummaryAnswer("ok", "stop", prompt_tokens=9, completion_tokens=2),
        ),
        (
            completion({"content": [{"type": "text", "text": "a"}, {"type": "x"}, {"text": "b"}]}),
            SummaryAnswer("ab", "stop"),
        ),
        (completion({"content": None, "refusal": "no"}), SummaryAnswer("", "stop", refused=True)),
        (completion({"tool_calls": [{}]}), SummaryAnswer("", "stop", called_tools=True)),
        (completion({"function_call": {"name": "x"}}), SummaryAnswer("", "stop", called_tools=True)),
        (completion({"content": 5}, finish_reason=None), SummaryAnswer("", "")),
        (
            {**completion({"content": "x"}), "usage": {"prompt_tokens": -1, "completion_tokens": True}},
            SummaryAnswer("x", "stop"),
        ),
        ({**completion({"content": "x"}), "usage": None}, SummaryAnswer("x", "stop")),
    ],
)
def test_an_answer_says(body: Any, expected: SummaryAnswer) -> None:
    assert answer(json.dumps(body).encode()) == expected


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"null",
        b"[]",
        b"{}",
        b'{"choices":[]}',
        b'{"choices":{}}',
        b'{"choices":[1]}',
        b'{"choices":[{"message":"x"}]}',
        b'{"choices":[{"delta":{}}]}',
        b'{"choices":"\xff"}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_completion_is_garbage(body: bytes) -> None:
    with pytest.raises(SummaryFailed) as failed:
        answer(body)
    assert failed.value.reason == "garbage"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["choices", "message", "content", "usage", "prompt_tokens", "error", "param"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=10,
)


@UNHURRIED
@given(JSON.map(json.dumps).map(str.encode) | st.binary(max_size=20))
def test_any_body_is_an_answer_or_garbage(body: bytes) -> None:
    reason = "garbage"
    refused_member(body)
    try:
        answer(body)
    except SummaryFailed as failed:
        reason = failed.reason

    assert reason == "garbage"
