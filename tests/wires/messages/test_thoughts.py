"""Thoughts in a rewritten list: a provider checks what stands before them, or that they open a turn."""

import json
from typing import Any

import pytest

from compaction_proxy.wires.body import parse_body, rewrite_messages
from compaction_proxy.wires.messages.wire import MESSAGES

THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "c2ln"}
SEALED = {"type": "redacted_thinking", "data": "c2VhbGVk"}
SAID = {"type": "text", "text": "Well."}


def use(name: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": name, "name": "look", "input": {}}


def result(name: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": name, "content": "seen"}]}


def answer(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


OLD = {"role": "user", "content": "old"}
ASKED = {"role": "user", "content": "What is there?"}
LOOP = [
    ASKED,
    answer(THOUGHT, SAID, use("a")),
    result("a"),
    answer(use("b")),
    result("b"),
    answer(SEALED, use("c")),
    result("c"),
]


def rewritten(thinking: Any, listed: list[dict[str, Any]], kept: slice) -> dict[str, Any]:
    """The body of a request of which only a part of the list goes on."""
    fields = {"model": "claude-x", "messages": listed, "max_tokens": 9, "thinking": thinking}
    if thinking is None:
        del fields["thinking"]
    body = parse_body(json.dumps(fields).encode(), MESSAGES)
    made: dict[str, Any] = json.loads(
        rewrite_messages(body, [MESSAGES.parse_message(raw) for raw in body.messages][kept])
    )
    assert {key: value for key, value in made.items() if key not in {"messages", "thinking"}} == {
        "model": "claude-x",
        "max_tokens": 9,
    }
    return made


def kinds(made: dict[str, Any]) -> list[list[str]]:
    return [
        [block["type"] for block in each["content"]]
        for each in made["messages"]
        if each["role"] == "assistant"
    ]


@pytest.mark.parametrize("thinking", [None, {"type": "adaptive"}, {"type": "disabled"}, {"type": []}, 5])
def test_thoughts_leave_with_the_list_that_they_were_made_for(thinking: Any) -> None:
    made = rewritten(thinking, [OLD, answer(THOUGHT), *LOOP], slice(1, None))
    assert kinds(made) == [["text", "tool_use"], ["tool_use"], ["tool_use"]]
    assert made.get("thinking") == thinking
    assert [each["role"] for each in made["messages"]][:2] == ["user", "assistant"]


def test_a_list_of_nothing_but_thoughts_keeps_them() -> None:
    made = rewritten(None, [answer(THOUGHT), answer(SEALED)], slice(0, 1))
    assert kinds(made) == [["thinking"]]


def test_a_refused_list_of_nothing_but_thoughts_is_not_sent_again() -> None:
    fields = {"model": "claude-x", "messages": [answer(THOUGHT), answer(SEALED)], "max_tokens": 9}
    refusal = b"messages.0.content.0: Invalid `signature` in `thinking` block"
    assert MESSAGES.drop_refused_content(json.dumps(fields).encode(), refusal) is None


def test_thoughts_stay_where_the_provider_was_asked_to_drop_what_does_not_fit() -> None:
    thinking = {"type": "adaptive", "block_binding": {"prefix_mismatch_behavior": "drop_block"}}
    made = rewritten(thinking, [OLD, answer(SAID), *LOOP], slice(2, None))
    assert kinds(made) == [["thinking", "text", "tool_use"], ["tool_use"], ["redacted_thinking", "tool_use"]]


@pytest.mark.parametrize(
    ("kept", "expected", "thinking"),
    [
        (
            slice(2, None),
            [["thinking", "text", "tool_use"], ["tool_use"], ["redacted_thinking", "tool_use"]],
            "enabled",
        ),
        (slice(5, None), [["tool_use"], ["tool_use"]], "disabled"),
        (slice(7, None), [["redacted_thinking", "tool_use"]], "enabled"),
    ],
    ids=["the whole turn", "without its first thought", "from a later thought on"],
)
def test_a_model_that_is_told_how_much_to_think_opens_its_turn_with_a_thought_or_does_not_think(
    kept: slice, expected: list[list[str]], thinking: str
) -> None:
    told = {"type": "enabled", "budget_tokens": 1024}
    made = rewritten(told, [OLD, answer(SAID), *LOOP], kept)
    assert kinds(made) == expected
    assert made["thinking"]["type"] == thinking
