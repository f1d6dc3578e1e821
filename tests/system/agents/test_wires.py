"""The scripted provider finds what a strict one refuses, on each wire, and nothing in what is sound."""

import json
from typing import Any

import pytest

from tests.system.agents.wires import WIRES, Call, Move

STEP = Move("I read it.", Call("read", {"path": "a.txt"}))
MODEL = {"chat": "gpt-5.4-mini", "responses": "gpt-5.4-mini", "messages": "claude-opus-5-5"}


def make_body(name: str) -> Any:
    """A request that goes on behind an answer of the provider: task, thought, call, result."""
    wire = WIRES[name]
    body: dict[str, Any] = {"model": MODEL[name]}
    if name == "chat":
        body["messages"] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Read."}]
        answer = json.loads(wire.make_answer(body, STEP, 1, 10).body)["choices"][0]["message"]
        body["messages"] += [answer, {"role": "tool", "tool_call_id": "call_1", "content": "the text"}]
    elif name == "responses":
        body |= {"include": ["reasoning.encrypted_content"], "input": [{"role": "user", "content": "Read."}]}
        output = json.loads(wire.make_answer(body, STEP, 1, 10).body)["output"]
        result = {"type": "function_call_output", "call_id": "call_1", "output": "the text"}
        body["input"] += [*output, result]
    else:
        body |= {"thinking": {"type": "adaptive"}, "messages": [{"role": "user", "content": "Read."}]}
        content = json.loads(wire.make_answer(body, STEP, 1, 10).body)["content"]
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "the text"}
        body["messages"] += [
            {"role": "assistant", "content": content},
            {"role": "user", "content": [result]},
        ]
    return body


@pytest.mark.parametrize("name", WIRES)
def test_a_sound_request_has_no_faults(name: str) -> None:
    wire, body = WIRES[name], make_body(name)
    assert wire.find_faults(body) == []
    assert wire.list_newest_results(body) == ["the text"]


@pytest.mark.parametrize(
    ("name", "place", "fault"),
    [
        ("chat", -1, "call call_1 has no result"),
        ("chat", -2, "result of call_1, which was not called"),
        ("responses", -1, "call call_1 has no result"),
        ("responses", -2, "without its required following item"),
        ("messages", -1, "ends with an assistant message"),
        ("messages", 0, "begins with an assistant message"),
        ("messages", 1, "two messages of one role"),
    ],
)
def test_a_request_that_lacks_a_message_is_refused(name: str, place: int, fault: str) -> None:
    wire, body = WIRES[name], make_body(name)
    del body["input" if name == "responses" else "messages"][place]
    assert fault in "; ".join(wire.find_faults(body))


def test_a_thought_is_refused_behind_another_list() -> None:
    wire, body = WIRES["messages"], make_body("messages")
    body["messages"][0]["content"] = "Read on."
    assert wire.find_faults(body) == ["messages[1]: invalid signature in thinking block"]


def test_a_thinking_budget_above_max_tokens_is_refused() -> None:
    wire, body = WIRES["messages"], make_body("messages")
    body |= {"max_tokens": 2_000, "thinking": {"type": "enabled", "budget_tokens": 2_000}}
    assert wire.find_faults(body) == ["max_tokens is not greater than thinking.budget_tokens"]


def test_encrypted_reasoning_is_refused_once_it_is_altered() -> None:
    wire, body = WIRES["responses"], make_body("responses")
    body["input"][1]["encrypted_content"] += "0"
    assert wire.find_faults(body) == ["input[1]: the encrypted content could not be verified"]


@pytest.mark.parametrize("name", WIRES)
@pytest.mark.parametrize("streams", [False, True])
def test_an_answer_holds_text_and_call_streamed_or_not(name: str, *, streams: bool) -> None:
    wire, body = WIRES[name], {**make_body(name), "stream": streams}
    reply = wire.make_answer(body, STEP, 2, 10)
    sent = b"".join(reply.chunks) or reply.body
    assert STEP.text.encode() in sent
    assert b"a.txt" in sent
