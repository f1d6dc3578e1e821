"""What a summary call on the Responses wire sends, and what is understood of its answer."""

import json
from dataclasses import replace
from typing import Any

import pytest

from compaction_proxy.core.errors import SummaryError
from compaction_proxy.core.summary.call import ContinuedConversation, SummaryAnswer, SummaryCall
from compaction_proxy.wires.responses.wire import RESPONSES
from compaction_proxy.wires.summary_call import (
    CLIENT_EFFORT_ALLOWANCE_TOKENS,
    REASONING_ALLOWANCE_TOKENS,
    find_refused_member,
)

CALL = SummaryCall(
    url="http://x/v1/responses",
    headers={},
    model="gpt-4o-mini",
    system="Write",
    prompt="data \ud800",
    max_tokens=1_000,
    temperature=0.3,
    wire="responses",
)
ASKED = {"model": "gpt-4o-mini", "instructions": "Write", "input": "data \ud800", "store": False}
ANSWER = b'{"type":"function_call_output","call_id":"a","output":"x"}'
RAW = (
    b'{"model":"gpt-5","instructions":"be","tools":[{"type" : "function"}],"reasoning":{"effort":"high"},'
    b'"stream":true,"text":{"format":{"type":"json_object"}},"include":["x"],"input":[],"store":true,"x":1.0}'
)


def sent(call: SummaryCall, *refused: str) -> Any:
    asking = RESPONSES.summary_call_format
    return json.loads(asking.build_request(call, asking.build_own_members(call, frozenset(refused))))


def test_a_call_is_instructions_an_input_a_limit_and_a_temperature() -> None:
    assert sent(CALL) == {**ASKED, "max_output_tokens": 1_000, "temperature": 0.3}
    assert sent(CALL, "store", "temperature") == {
        **{key: value for key, value in ASKED.items() if key != "store"},
        "max_output_tokens": 1_000,
    }


def test_a_reasoning_model_thinks_little_on_top_of_the_limit() -> None:
    limit = 1_000 + REASONING_ALLOWANCE_TOKENS
    asked = {**ASKED, "model": "gpt-5", "max_output_tokens": limit}

    assert sent(replace(CALL, model="gpt-5")) == {**asked, "reasoning": {"effort": "low"}}
    assert sent(replace(CALL, model="gpt-5"), "reasoning") == asked


def test_the_member_that_an_error_names_is_found() -> None:
    own = RESPONSES.summary_call_format.build_own_members(replace(CALL, model="gpt-5"), frozenset())
    error = {"message": "Unsupported value: 'low' is not supported.", "param": "reasoning.effort"}

    assert find_refused_member(json.dumps({"error": error}).encode(), own) == "reasoning"


def test_a_continued_conversation_keeps_what_shapes_the_prefix_byte_for_byte() -> None:
    messages = (RESPONSES.parse_message(ANSWER),)
    call = replace(CALL, model="gpt-5", cache_key="k", conversation=ContinuedConversation(RAW, messages))
    asking = RESPONSES.summary_call_format
    raw = asking.build_request(call, asking.build_own_members(call, frozenset()))

    assert raw.startswith(
        b'{"model":"gpt-5","instructions":"be","tools":[{"type" : "function"}],"reasoning":{"effort":"high"},'
        b'"x":1.0,"input":[' + ANSWER
    )
    assert {**json.loads(raw), "input": json.loads(raw)["input"][1:]} == {
        "model": "gpt-5",
        "instructions": "be",
        "tools": [{"type": "function"}],
        "reasoning": {"effort": "high"},
        "x": 1.0,
        "input": [
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "Understood."}],
            },
            {"role": "user", "content": "data \ud800"},
        ],
        "max_output_tokens": 1_000 + CLIENT_EFFORT_ALLOWANCE_TOKENS,
        "store": False,
        "prompt_cache_key": "k",
        "tool_choice": "none",
    }


def answered(*output: Any, **fields: Any) -> SummaryAnswer:
    return RESPONSES.summary_call_format.parse_answer(
        json.dumps({"status": "completed", "output": output, **fields}).encode()
    )


def test_an_answer_is_the_text_of_its_messages() -> None:
    said = {
        "type": "message",
        "content": [{"type": "output_text", "text": "a"}, {"type": "other", "text": "b"}],
    }
    used = {"input_tokens": 9, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 4}}

    assert answered({"type": "reasoning", "summary": []}, said, said, usage=used) == SummaryAnswer(
        "aa", "stop", prompt_tokens=9, completion_tokens=2, cached_tokens=4
    )


@pytest.mark.parametrize(
    ("reason", "expected"),
    [("max_output_tokens", "length"), ("content_filter", "content_filter"), ("steered", "steered")],
)
def test_an_answer_that_was_cut_says_why(reason: str, expected: str) -> None:
    cut = answered(status="incomplete", incomplete_details={"reason": reason})

    assert cut == SummaryAnswer("", expected)


def test_calls_and_refusals_are_told() -> None:
    refused = {"type": "message", "content": [{"type": "refusal", "refusal": "no"}]}

    assert answered({"type": "function_call", "name": "f"}) == SummaryAnswer("", "stop", called_tools=True)
    assert answered(refused) == SummaryAnswer("", "stop", refused=True)


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{}", b'{"output":null}', b'{"output":[],"status":"failed"}', b"\xff", b"[" * 100_000],
)
def test_what_is_no_answer_is_garbage(body: bytes) -> None:
    with pytest.raises(SummaryError) as failed:
        RESPONSES.summary_call_format.parse_answer(body)
    assert failed.value.reason == "garbage"
