"""What the Chat Completions wire reads from a body and writes into one."""

import json
from typing import Any

import pytest

from compaction_proxy.wires.body import (
    build_probe_body,
    lower_output_limits,
    parse_body,
)
from compaction_proxy.wires.chat.wire import CHAT
from tests.wires.test_body import body


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ({}, None),
        ({"max_tokens": 64}, 64),
        ({"max_completion_tokens": 32, "max_tokens": 64}, 32),
        ({"max_completion_tokens": None, "max_tokens": 64}, 64),
        ({"max_tokens": 0}, None),
        ({"max_tokens": -1}, None),
        ({"max_tokens": True}, None),
        ({"max_tokens": "64"}, None),
        ({"max_tokens": 64.0}, None),
        ({"max_tokens": [64]}, None),
    ],
)
def test_the_largest_output_is_a_positive_number_or_unknown(
    members: dict[str, Any], expected: int | None
) -> None:
    assert parse_body(body(**members), CHAT).max_output == expected


def test_definitions_are_prompt_members_in_their_own_order() -> None:
    raw = body(response_format={"type": "json"}, functions=[1], tools=[2], stop=["x"])

    assert parse_body(raw, CHAT).prompt_members == ("[2]", "[1]", '{"type": "json"}')


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ('"max_tokens": 900,', '"max_tokens": 300,'),
        ('"max_completion_tokens":900,"max_tokens":900,', '"max_completion_tokens":300,"max_tokens":300,'),
        ("", ""),
    ],
)
def test_less_output_is_asked_for_where_more_was_and_every_other_byte_stays(
    fields: str, expected: str
) -> None:
    raw = '{{ {}"messages":[{{"role":"user","content":"\\"max_tokens\\": 7"}}] }}'
    body = parse_body(raw.format(fields).encode(), CHAT)
    assert lower_output_limits(body.raw, CHAT, 300) == raw.format(expected).encode()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ('"max_completion_tokens":900,"max_tokens":200,', '"max_completion_tokens":300,"max_tokens":200,'),
    ],
)
def test_less_output_is_never_more_than_was_asked_for(fields: str, expected: str) -> None:
    raw = '{%s"messages":[{"role":"user","content":"Hello"}]}'
    assert lower_output_limits((raw % fields).encode(), CHAT, 300) == (raw % expected).encode()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ('"thinking":{"budget_tokens":8000}', '"thinking":{"budget_tokens":3976}'),
        ('"thinking": { "type":"enabled", "budget_tokens" : 8e3 }', None),
        ('"reasoning":{"max_tokens":8000}', '"reasoning":{"max_tokens":3976}'),
        ('"thinking":{"budget_tokens":3976}', '"thinking":{"budget_tokens":3976}'),
        ('"thinking":{"budget_tokens":"8000"}', '"thinking":{"budget_tokens":"8000"}'),
        ('"thinking":{"budget_tokens":true}', '"thinking":{"budget_tokens":true}'),
        ('"thinking":null,"reasoning":"max_tokens"', '"thinking":null,"reasoning":"max_tokens"'),
    ],
)
def test_the_budget_of_thinking_leaves_room_for_the_answer(given: str, expected: str | None) -> None:
    raw = '{"max_tokens":%d,%s,"messages":[{"role":"user","content":"Hello"}]}'
    expected = given.replace("8e3", "3976") if expected is None else expected
    assert (
        lower_output_limits((raw % (9_000, given)).encode(), CHAT, 5_000)
        == (raw % (5_000, expected)).encode()
    )


@pytest.mark.parametrize(("tokens", "is_lowered"), [(1_024, False), (1_025, True)])
def test_nothing_is_lowered_where_thinking_would_take_all_output(tokens: int, *, is_lowered: bool) -> None:
    raw = b'{"max_tokens":9000,"thinking":{"budget_tokens":8000},"messages":[]}'
    assert (lower_output_limits(raw, CHAT, tokens) is not raw) == is_lowered


def test_a_probe_asks_for_sixteen_tokens_of_the_same_prompt_unstreamed() -> None:
    fields = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [], "user": "u"}
    asked = {**fields, "stream": True, "stream_options": {"include_usage": True}, "n": 3}
    probe = build_probe_body(json.dumps({**asked, "max_completion_tokens": 900}).encode(), CHAT)
    assert json.loads(probe or b"") == {**fields, "max_completion_tokens": 16}
    assert json.loads(build_probe_body(json.dumps(asked).encode(), CHAT) or b"") == {
        **fields,
        "max_tokens": 16,
    }
    assert build_probe_body(b"[]", CHAT) is None
