"""The shipped table of windows, and how a name finds its row."""

import datetime as dt
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.providers.windows import (
    FALLBACK_WINDOW,
    TABLE,
    WINDOWS,
    find_by_prefix,
    get_known_window,
    normalize_name,
)

MAX_ROWS = 250


@pytest.mark.parametrize(
    ("model", "window"),
    [
        ("gpt-4o", 128_000),
        ("gpt-4o-mini-2024-07-18", 128_000),
        ("gpt-4", 8_192),
        ("gpt-4-0613", 8_192),
        ("gpt-4-turbo", 128_000),
        ("gpt-4.1", 1_047_576),
        ("gpt-5", 272_000),
        ("gpt-5-mini", 272_000),
        ("gpt-5.1-codex", 272_000),
        ("gpt-5.4", 922_000),
        ("gpt-6-sol", 922_000),
        ("o3", 200_000),
        ("o4-mini", 200_000),
        ("claude-3-5-sonnet-20240620", 200_000),
        ("claude-3-haiku-20240307", 200_000),
        ("claude-sonnet-4-20250514", 200_000),
        ("claude-haiku-4-5", 200_000),
        ("claude-opus-4-7", 1_000_000),
        ("gemini-2.5-pro", 1_048_576),
        ("deepseek-chat", 131_072),
        ("mistral-large-latest", 262_144),
        ("llama-3.3-70b-versatile", 131_072),
        ("qwen3-32b", 40_960),
        ("kimi-k2.5", 262_144),
        ("glm-4.6", 200_000),
        ("grok-4", 256_000),
        ("gpt-oss-120b", 131_072),
    ],
)
def test_a_model_in_use_has_its_window(model: str, window: int) -> None:
    assert get_known_window(model) == window


@pytest.mark.parametrize(
    ("model", "same"),
    [
        ("openai/gpt-4.1", "gpt-4.1"),
        ("ft:gpt-4o-mini-2024-07-18:org::id", "gpt-4o-mini"),
        ("anthropic/claude-opus-4.6:beta", "claude-opus-4-6"),
        ("us.anthropic.claude-sonnet-4-5-20250929-v1:0", "claude-sonnet-4-5"),
        ("claude-opus-4@20250514", "claude-opus-4"),
        ("us-gov.xai.grok-4.6", "grok-4.6"),
        ("accounts/fireworks/models/qwen2p5-72b-instruct", "qwen2.5"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3"),
        ("Qwen/Qwen3-32B", "qwen3-32b"),
        ("models/gemini-2.5-flash", "gemini-2.5-flash"),
    ],
)
def test_a_host_s_spelling_finds_the_row(model: str, same: str) -> None:
    assert get_known_window(model) == get_known_window(same)


@pytest.mark.parametrize("model", ["", "nobody-knows", "gpt-4.9", "gpt-41", "o30", "claude", "-", "gpt"])
def test_a_name_that_merely_looks_alike_has_the_fallback(model: str) -> None:
    assert get_known_window(model) == FALLBACK_WINDOW == 128_000


def test_the_longest_row_speaks_for_a_name() -> None:
    table = {"a": 1, "a-b": 2, "a-b:c": 3}
    assert [find_by_prefix(name, table) for name in ("a", "a-x", "a-b", "a-b-d", "a-b:c@e", "ab", "")] == [
        1,
        1,
        2,
        2,
        3,
        None,
        None,
    ]


@given(st.text(max_size=300))
def test_any_name_has_a_window(model: str) -> None:
    assert get_known_window(model) in {FALLBACK_WINDOW, *WINDOWS.values()}


def test_the_table_is_dated_and_names_its_source() -> None:
    assert dt.date.fromisoformat(TABLE["as_of"]) >= dt.date(2026, 11, 1)
    assert re.fullmatch(r"PyPI litellm [\d.]+ and genai-prices [\d.]+ \(both MIT\)", TABLE["source"])


def test_the_table_is_small_sorted_and_without_doubles() -> None:
    names = list(WINDOWS)
    assert len(names) <= MAX_ROWS
    assert names == sorted(names)
    assert {name: normalize_name(name) for name in names if normalize_name(name) != name} == {}
    implied = {
        name: window
        for name, window in WINDOWS.items()
        if (find_by_prefix(name, {key: WINDOWS[key] for key in names if key != name}) or FALLBACK_WINDOW)
        == window
    }
    assert implied == {}
    assert {name: window for name, window in WINDOWS.items() if not 4_096 <= window <= 4_194_304} == {}
