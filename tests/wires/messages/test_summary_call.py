"""What a summary call sends on the Messages wire, and what is understood of its answer."""

import json
from dataclasses import replace
from typing import Any

import pytest

from compaction_proxy.core.errors import SummaryError
from compaction_proxy.core.message import Message
from compaction_proxy.core.summary.call import ContinuedConversation, SummaryAnswer, SummaryCall
from compaction_proxy.wires.body import parse_body
from compaction_proxy.wires.messages.messages import PARSER
from compaction_proxy.wires.messages.wire import (
    CLIENT_ALLOWANCE_TOKENS,
    DEFAULT_ALLOWANCE_TOKENS,
    MESSAGES,
    build_own_members,
    get_thinking_allowance,
)

CALL = SummaryCall(
    url="http://x/v1/messages",
    headers={"x-api-key": "x"},
    model="claude-haiku-4-5",
    system="Write",
    prompt="data \ud800",
    max_tokens=1_000,
    temperature=0.3,
)
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": "ok", "cache_control": {"type": "ephemeral"}}
LISTED = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "n", "input": {}}]},
    {"role": "user", "content": [RESULT, RESULT]},
]


def sent(call: SummaryCall, *refused: str) -> Any:
    return json.loads(
        MESSAGES.summary_call_format.build_request(call, build_own_members(call, frozenset(refused)))
    )


def continued(**members: Any) -> SummaryCall:
    raw = json.dumps({"model": "claude-x-4-5", "max_tokens": 9, "messages": LISTED, **members}).encode()
    messages = tuple(map(PARSER.parse_message, parse_body(raw, MESSAGES).messages))
    return replace(CALL, prompt="Sum up", conversation=ContinuedConversation(raw, messages))


def test_a_call_is_a_system_prompt_and_a_message() -> None:
    assert sent(CALL) == {
        "model": "claude-haiku-4-5",
        "system": "Write",
        "messages": [{"role": "user", "content": "data \ud800"}],
        "max_tokens": 1_000,
        "temperature": 0.3,
    }


@pytest.mark.parametrize("refused", ["temperature", "max_tokens"])
def test_what_a_provider_refuses_is_left_out_but_for_the_limit(refused: str) -> None:
    assert ("temperature" in sent(CALL, refused)) is (refused != "temperature")
    assert sent(CALL, refused)["max_tokens"] == 1_000


def test_a_continuation_is_the_clients_request_with_one_more_thing_asked() -> None:
    tools = [{"name": "n", "input_schema": {}}]
    call = continued(
        system=[{"type": "text", "text": "s"}],
        tools=tools,
        tool_choice={"type": "any"},
        stream=True,
        metadata={"user_id": "u"},
        output_config={"effort": "low", "format": {"type": "json_schema"}},
        temperature=1.0,
    )

    assert sent(call) == {
        "model": "claude-x-4-5",
        "system": [{"type": "text", "text": "s"}],
        "tools": tools,
        "output_config": {"effort": "low"},
        "messages": [
            *LISTED[:2],
            {"role": "user", "content": [RESULT, RESULT, {"type": "text", "text": "Sum up"}]},
        ],
        "max_tokens": 1_000,
        "temperature": 0.3,
        "tool_choice": {"type": "none"},
    }


def test_a_message_of_ours_among_the_clients_is_written_too() -> None:
    call = continued()
    assert call.conversation is not None
    ours = replace(call, conversation=replace(call.conversation, messages=(Message("system", "Summary"),)))

    both = [{"type": "text", "text": "Summary"}, {"type": "text", "text": "Sum up"}]
    assert sent(ours)["messages"] == [{"role": "user", "content": both}]


@pytest.mark.parametrize(
    ("members", "allowance", "temperature"),
    [
        ({}, 0, True),
        ({"thinking": {"type": "disabled"}}, 0, True),
        ({"thinking": {"type": "enabled", "budget_tokens": 4_096}}, 4_096, False),
        ({"thinking": {"type": "adaptive"}}, CLIENT_ALLOWANCE_TOKENS, False),
    ],
)
def test_where_the_client_has_the_model_think_there_is_room_and_no_temperature(
    members: dict[str, Any],
    allowance: int,
    temperature: bool,  # noqa: FBT001 - parametrised
) -> None:
    made = sent(continued(**members))

    assert (made["max_tokens"], "temperature" in made) == (1_000 + allowance, temperature)
    assert made.get("thinking") == members.get("thinking")


@pytest.mark.parametrize(
    ("model", "allowance"),
    [("claude-haiku-4-5", 0), ("anthropic/claude-opus-4-8", DEFAULT_ALLOWANCE_TOKENS), ("qwen", 0)],
)
def test_models_that_think_unasked_have_room_for_it(model: str, allowance: int) -> None:
    assert get_thinking_allowance(model) == allowance


def answered(content: Any, reason: str | None, **usage: int) -> SummaryAnswer:
    body = {"type": "message", "content": content, "stop_reason": reason, "usage": usage}
    return MESSAGES.summary_call_format.parse_answer(json.dumps(body).encode())


def test_an_answer_is_its_text_and_all_that_was_read_for_it() -> None:
    blocks = [
        {"type": "thinking", "thinking": "hm"},
        {"type": "text", "text": "a"},
        {"type": "text", "text": "b"},
    ]
    counts = {"cache_creation_input_tokens": 20, "cache_read_input_tokens": 300}

    assert answered(blocks, "end_turn", input_tokens=1, output_tokens=7, **counts) == SummaryAnswer(
        text="ab", finish_reason="end_turn", prompt_tokens=321, completion_tokens=7, cached_tokens=300
    )


@pytest.mark.parametrize(
    ("content", "reason", "expected"),
    [
        ([], "refusal", SummaryAnswer("", "refusal", refused=True)),
        ([{"type": "tool_use"}], "tool_use", SummaryAnswer("", "tool_use", called_tools=True)),
        ([], "max_tokens", SummaryAnswer("", "max_tokens")),
        ([], "model_context_window_exceeded", SummaryAnswer("", "length")),
        ([1, {"type": "text", "text": 2}], None, SummaryAnswer("")),
    ],
)
def test_how_an_answer_ended_is_told(content: Any, reason: str | None, expected: SummaryAnswer) -> None:
    assert answered(content, reason) == expected


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"content":"x"}'])
def test_what_is_no_answer_is_garbage(body: bytes) -> None:
    with pytest.raises(SummaryError, match="garbage"):
        MESSAGES.summary_call_format.parse_answer(body)
