"""How counts add up, against the published numbers."""

import pytest

from compaction_proxy.core.message import Call, Message
from compaction_proxy.core.token_rules import (
    CHARACTERS,
    TIKTOKEN,
    Rule,
    definition_piece,
    message_tokens,
    pieces,
)

CALLING = Message(
    role="assistant",
    text="Looking.",
    refusal="no",
    name="ann",
    calls=(Call("call_1", "search", '{"q":"x"}'), Call("call_2", "stop", "")),
)


def test_pieces_are_every_text_a_model_is_shown_and_none_is_empty() -> None:
    assert pieces(CALLING) == ("Looking.", "search", '{"q":"x"}', "stop", "no", "ann")


def test_pieces_under_the_character_rule_are_text_names_and_arguments() -> None:
    assert pieces(CALLING, CHARACTERS) == ("Looking.", "search", '{"q":"x"}', "stop")


def test_an_unknown_role_is_counted_as_text() -> None:
    message = Message(role="critic", text="Hm.")
    assert pieces(message) == ("Hm.", "critic")
    assert message_tokens(message, [2, 1]) == 3 + 2 + 1


@pytest.mark.parametrize(
    ("message", "rule", "expected"),
    [
        (Message(role="user"), TIKTOKEN, 4),
        (Message(role="user", name="ann"), TIKTOKEN, 5 + 7),
        (Message(role="user", text="x"), TIKTOKEN, 4 + 7),
        (Message(role="user"), CHARACTERS, 2),
        (Message(role="user", name="ann"), CHARACTERS, 2),
        (Message(role="user", text="x"), CHARACTERS, 2 + 7),
    ],
)
def test_a_message_is_its_pieces_and_its_framing(message: Message, rule: Rule, expected: int) -> None:
    assert message_tokens(message, [7 for _ in pieces(message, rule)], rule) == expected


@pytest.mark.parametrize("rule", [TIKTOKEN, CHARACTERS])
def test_content_that_is_not_text_is_added(rule: Rule) -> None:
    message = Message(role="user")
    assert message_tokens(message, [], rule, parts=765) == message_tokens(message, [], rule) + 765


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
    assert definition_piece(text) == expected
