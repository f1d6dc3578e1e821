"""What a summary call sends, and what is understood of its answer."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compaction_proxy.core.errors import SummaryError
from compaction_proxy.core.message import Message
from compaction_proxy.core.summary.call import ContinuedConversation, SummaryAnswer, SummaryCall
from compaction_proxy.wires.chat.wire import build_own_members, build_request_body, parse_answer
from compaction_proxy.wires.summary_call import (
    CLIENT_EFFORT_ALLOWANCE_TOKENS,
    REASONING_ALLOWANCE_TOKENS,
    accepts_prompt_cache_key,
    find_refused_member,
)

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
    return json.loads(build_request_body(call, build_own_members(call, frozenset(refused))))


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
        "reasoning_effort": "minimal",
    }


@pytest.mark.parametrize("model", ["gpt-5-chat-latest", "gpt-4o", "olmo", "foo1", "llama-3"])
def test_other_models_take_a_temperature(model: str) -> None:
    assert "temperature" in sent(replace(CALL, model=model))


@pytest.mark.parametrize(
    ("refused", "expected"),
    [
        ({"temperature", "max_tokens"}, {"max_completion_tokens": 1_000}),
        ({"max_tokens", "max_completion_tokens"}, {"temperature": 0.3}),
        ({"max_completion_tokens"}, {"max_tokens": 1_000, "temperature": 0.3}),
    ],
)
def test_what_a_provider_has_refused_is_left_out_or_named_in_another_way(
    refused: set[str], expected: dict[str, Any]
) -> None:
    assert sent(CALL, *refused) == {"model": "gpt-4o-mini", "messages": MESSAGES, **expected}


@pytest.mark.parametrize(
    ("refused", "effort"),
    [
        ([], "minimal"),
        (["minimal"], "none"),
        (["minimal", "none"], "low"),
        (["minimal", "none", "low"], None),
    ],
)
def test_the_effort_falls_down_the_list_of_what_is_refused(refused: list[str], effort: str | None) -> None:
    call = replace(CALL, model="o1")
    assert sent(call, *(f"reasoning_effort={each}" for each in refused)).get("reasoning_effort") == effort
    assert "reasoning_effort" not in sent(call, "reasoning_effort")


def test_without_a_temperature_none_is_sent() -> None:
    assert "temperature" not in sent(replace(CALL, temperature=None))


@pytest.mark.parametrize(
    "url",
    [
        "https://api.openai.com/v1/chat/completions",
        "https://eu.openai.azure.com/openai/deployments/x/chat/completions",
    ],
)
def test_some_providers_are_known_to_take_a_cache_key(url: str) -> None:
    assert accepts_prompt_cache_key(url)
    assert sent(replace(CALL, cache_key="k"))["prompt_cache_key"] == "k"


@pytest.mark.parametrize(
    "url",
    [
        "https://openai.azure.com/",
        "https://api.openai.com.evil.example/v1/chat/completions",
        "https://openrouter.ai/api/v1/chat/completions",
    ],
)
def test_others_may_refuse_one(url: str) -> None:
    assert not accepts_prompt_cache_key(url)


OF_THE_ANSWER = b"""
 "stream":true,"stream_options":{"include_usage":true},"n":2,"stop":["x"],"response_format":{"type":"x"},
 "max_tokens":5,"logprobs":true,"top_logprobs":3,"logit_bias":{"1":1},"audio":{},"modalities":["text"],
 "prediction":{},"metadata":{"a":"b"},"store":true,"tool_choice":"required","temperature":1.5,"top_p":0.1"""
TOOLS = b'[ {"type":"function", "function":{"name":"f"}} ]'
SHAPING = b' "model" : "gpt-4o","tools":' + TOOLS + b',"parallel_tool_calls":false,"prompt_cache_key":"mine"'
ASKED = b'{"role":"user","content":"data"}'
HI = Message(role="user", raw=b'{"role":"user", "content":"hi", "big":12345678901234567890.10}')
RESULT = Message(
    role="tool", text="done", answered_call_ids=("a",), raw=b'{"role":"tool","tool_call_id":"a"}'
)


def continued(raw: bytes, *messages: Message, model: str = "gpt-4o") -> bytes:
    call = replace(CALL, model=model, prompt="data", conversation=ContinuedConversation(raw, messages))
    return build_request_body(call, build_own_members(call))


def test_a_continued_conversation_keeps_what_shapes_the_prefix_byte_for_byte() -> None:
    raw = b"{" + SHAPING + b',"messages":[],' + OF_THE_ANSWER + b"}"
    assert continued(raw, HI) == (
        b'{"model":"gpt-4o","tools":' + TOOLS + b',"parallel_tool_calls":false,"prompt_cache_key":"mine",'
        b'"messages":['
        + HI.raw
        + b","
        + ASKED
        + b'],"max_tokens":1000,"temperature":0.3,"tool_choice":"none"}'
    )


def test_tool_results_at_the_end_are_acknowledged_before_the_question() -> None:
    found = json.loads(continued(b'{"messages":[]}', HI, RESULT))["messages"]
    assert found[2:] == [{"role": "assistant", "content": "Understood."}, {"role": "user", "content": "data"}]


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        (b'"functions":[{"name":"f"}],"function_call":"auto"', {"function_call": "none"}),
        (b'"tools":[],"tool_choice":"auto"', {}),
        (b'"tools": null', {}),
        (b'"messages":[]', {}),
    ],
)
def test_no_tool_is_chosen_where_there_are_tools(members: bytes, expected: dict[str, str]) -> None:
    found = json.loads(continued(b"{" + members + b"}", HI))
    assert {name: found[name] for name in ("tool_choice", "function_call") if name in found} == expected


@pytest.mark.parametrize(
    ("raw", "model", "expected"),
    [
        (b'{"max_completion_tokens":9}', "gpt-4o", {"max_completion_tokens": 1_000, "temperature": 0.3}),
        (
            b'{"reasoning_effort":"high"}',
            "gpt-5",
            {
                "reasoning_effort": "high",
                "max_completion_tokens": 1_000 + CLIENT_EFFORT_ALLOWANCE_TOKENS,
            },
        ),
        (
            b'{"thinking":{"type":"enabled","budget_tokens":4000}}',
            "claude",
            {
                "thinking": {"type": "enabled", "budget_tokens": 4000},
                "max_tokens": 5_000,
                "temperature": 0.3,
            },
        ),
    ],
)
def test_the_client_s_own_thinking_stays_and_has_room(raw: bytes, model: str, expected: Any) -> None:
    found = json.loads(continued(raw, HI, model=model))
    assert found.pop("messages")[-1] == {"role": "user", "content": "data"}
    assert found == expected


OWN = {"temperature": 0, "max_tokens": 9, "reasoning_effort": "minimal", "prompt_cache_key": "k"}


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ({"error": {"param": "temperature", "message": "no"}}, "temperature"),
        ({"error": {"message": "Unsupported parameter: 'max_tokens' is not supported"}}, "max_tokens"),
        ({"error": {"message": "max_tokens: use max_completion_tokens"}}, "max_tokens"),
        ({"error": "unknown field reasoning_effort"}, "reasoning_effort"),
        (
            {"error": {"param": "reasoning_effort", "message": "does not support 'minimal', only 'low'"}},
            "reasoning_effort=minimal",
        ),
        (
            {"detail": [{"loc": ["body", "reasoning_effort"], "msg": "one of 'low'", "input": "minimal"}]},
            "reasoning_effort=minimal",
        ),
        ({"detail": [{"type": "extra_forbidden", "loc": ["body", "prompt_cache_key"]}]}, "prompt_cache_key"),
        ({"error": {"param": "messages", "message": "too long"}}, None),
        ({"error": {"param": "top_p", "message": "no max_completion_tokens"}}, None),
        ({"error": {"param": ["temperature"], "message": None}}, "temperature"),
        ({"error": {"message": "bad"}, "messages": [{"content": "temperature"}]}, None),
        ({"detail": [{"loc": ["body"], "msg": "bad", "input": {"temperature": 0}}]}, None),
        ({"error": None}, None),
        ([], None),
    ],
)
def test_the_refused_member_is_found_in_the_error(error: Any, expected: str | None) -> None:
    assert find_refused_member(json.dumps(error).encode(), OWN) == expected


def test_the_refused_member_is_found_in_plain_text() -> None:
    assert find_refused_member(b"temperature is not supported", OWN) == "temperature"


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
        (completion({"content": "x"}, finish_reason={}), SummaryAnswer("x", "")),
        (
            completion({"content": [{"type": "thinking", "text": "hm"}, {"type": "text", "text": "x"}]}),
            SummaryAnswer("x", "stop"),
        ),
        (completion({"content": 5}, finish_reason=None), SummaryAnswer("", "")),
        (
            {**completion({"content": "x"}), "usage": {"prompt_tokens": -1, "completion_tokens": True}},
            SummaryAnswer("x", "stop"),
        ),
        ({**completion({"content": "x"}), "usage": None}, SummaryAnswer("x", "stop")),
    ],
)
def test_an_answer_says(body: Any, expected: SummaryAnswer) -> None:
    assert parse_answer(json.dumps(body).encode()) == expected


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
    with pytest.raises(SummaryError) as failed:
        parse_answer(body)
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
    find_refused_member(body, OWN)
    try:
        parse_answer(body)
    except SummaryError as failed:
        reason = failed.reason

    assert reason == "garbage"
