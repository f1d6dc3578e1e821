"""How counts add up, against the published numbers."""

import pytest

from compaction_proxy.core.message import Message, MessageToolCall
from compaction_proxy.core.token_rules import (
    CHARACTER_RULE,
    TIKTOKEN_RULE,
    TokenRule,
    list_countable_texts,
    minify_json,
    sum_message_tokens,
)

CALLING = Message(
    role="assistant",
    text="Looking.",
    refusal="no",
    name="ann",
    calls=(MessageToolCall("call_1", "search", '{"q":"x"}'), MessageToolCall("call_2", "stop", "")),
)


def test_pieces_are_every_text_a_model_is_shown_and_none_is_empty() -> None:
    assert list_countable_texts(CALLING) == ("Looking.", "search", '{"q":"x"}', "stop", "no", "ann")


def test_pieces_under_the_character_rule_are_text_names_and_arguments() -> None:
    assert list_countable_texts(CALLING, CHARACTER_RULE) == ("Looking.", "search", '{"q":"x"}', "stop")


def test_an_unknown_role_is_counted_as_text() -> None:
    message = Message(role="critic", text="Hm.")
    assert list_countable_texts(message) == ("Hm.", "critic")
    assert sum_message_tokens(message, [2, 1]) == 3 + 2 + 1


@pytest.mark.parametrize(
    ("message", "rule", "expected"),
    [
        (Message(role="user"), TIKTOKEN_RULE, 4),
        (Message(role="user", name="ann"), TIKTOKEN_RULE, 5 + 7),
        (Message(role="user", text="x"), TIKTOKEN_RULE, 4 + 7),
        (Message(role="user"), CHARACTER_RULE, 2),
        (Message(role="user", name="ann"), CHARACTER_RULE, 2),
        (Message(role="user", text="x"), CHARACTER_RULE, 2 + 7),
    ],
)
def test_a_message_is_its_pieces_and_its_framing(message: Message, rule: TokenRule, expected: int) -> None:
    assert sum_message_tokens(message, [7 for _ in list_countable_texts(message, rule)], rule) == expected


@pytest.mark.parametrize("rule", [TIKTOKEN_RULE, CHARACTER_RULE])
def test_content_that_is_not_text_is_added(rule: TokenRule) -> None:
    message = Message(role="user")
    assert (
        sum_message_tokens(message, [], rule, part_tokens=765) == sum_message_tokens(message, [], rule) + 765
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[ {"name" : "a b",\n "n": 1.50} ]', '[{"name":"a b","n":1.5}]'),
        (b'{"d": "\\u00e9"}', '{"d":"é"}'),
        ("not json", "not json"),
        (b"\xff", "\ufffd"),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_a_definition_is_counted_as_its_compact_json(text: str | bytes, expected: str) -> None:
    assert minify_json(text) == expected
