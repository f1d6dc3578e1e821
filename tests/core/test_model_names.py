"""What is read from a model's name."""

import time

import pytest

from compaction_proxy.core.model_names import find_by_prefix, is_new_claude, normalize_model_name


@pytest.mark.parametrize(
    ("model", "bare"),
    [
        ("gpt-4o", "gpt-4o"),
        ("OpenRouter/openai/GPT-4o", "gpt-4o"),
        ("ft:gpt-4o:acme::id", "gpt-4o:acme::id"),
        ("us.anthropic.claude-sonnet-5-v1:0", "claude-sonnet-5-v1:0"),
        ("", ""),
    ],
)
def test_a_bare_name_is_without_prefixes(model: str, bare: str) -> None:
    assert normalize_model_name(model) == bare


def test_the_longest_prefix_holds() -> None:
    table = {"gpt-4": 1, "gpt-4o": 2}
    assert [find_by_prefix(name, table) for name in ("gpt-4-x", "gpt-4o-x", "o1")] == [1, 2, None]


@pytest.mark.parametrize(
    ("name", "new"),
    [
        ("claude-2.1", False),
        ("claude-v2:1", False),
        ("claude-instant-1.2", False),
        ("claude-3-opus-20240229", False),
        ("claude-3-7-sonnet-latest", False),
        ("claude-sonnet-4", False),
        ("claude-sonnet-4-20250514", False),
        ("claude-sonnet-4-5-20250929", False),
        ("claude-opus-4.6", False),
        ("claude-opus-4-7", True),
        ("claude-opus-4.10", True),
        ("claude-fable-5", True),
        ("claude", True),
        ("gpt-9", False),
    ],
)
def test_new_claudes_are_told_from_old(name: str, new: bool) -> None:  # noqa: FBT001 - a table
    assert is_new_claude(name) is new


def test_a_hostile_name_costs_nothing() -> None:
    started = time.process_time()
    is_new_claude(normalize_model_name("claude-" * 200_000 + "v" * 200_000))
    assert time.process_time() - started < 10
