"""The provider that only counts."""

from typing import Any

import pytest

from compaction_proxy.providers.types import TokenCounter
from compaction_proxy.replay import provider as module
from compaction_proxy.replay.provider import (
    FRAME_TOKENS,
    ProviderPrompt,
    SimulatedProvider,
    count_message_tokens,
)
from tests.doubles.word_counter import WordCounter

CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{ }"}}


def prompt(*messages: dict[str, Any], **more: object) -> ProviderPrompt:
    return ProviderPrompt.from_body({"model": "m", "messages": list(messages), **more})


@pytest.fixture
def words() -> TokenCounter:
    return WordCounter()


@pytest.fixture
def provider(words: TokenCounter) -> SimulatedProvider:
    return SimulatedProvider(words)


def test_a_prompt_counts_roles_contents_names_calls_and_frames(provider: SimulatedProvider) -> None:
    spoken = {"role": "user", "content": "one two", "name": "Ann"}
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert provider.count_prompt_tokens(prompt(spoken)) == (1 + 2 + 1 + 3) + 3
    assert provider.count_prompt_tokens(prompt(called)) == (1 + 1 + 2 + 3) + 3
    assert provider.count_prompt_tokens(prompt(spoken, called)) == 7 + 7 + 3
    assert provider.count_prompt_tokens(prompt(spoken, tools=[{"a": "b c"}])) == 7 + 3 + 2


def test_a_picture_has_its_price(provider: SimulatedProvider) -> None:
    parts = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    size = provider.count_prompt_tokens(prompt({"role": "user", "content": parts}))
    assert size == (1 + 1 + 85 + 3) + 3


def test_a_known_beginning_is_cached_in_whole_blocks(provider: SimulatedProvider) -> None:
    long, short = ({"role": "user", "content": "word " * count} for count in (1500, 10))
    other = {"role": "user", "content": "else"}
    assert provider.count_and_cache_prompt(prompt(long, short)) == 0
    assert provider.count_and_cache_prompt(prompt(long, other)) == 1504 - 1504 % 128
    assert provider.count_and_cache_prompt(prompt(long, other, tools=[{}])) == 0


def test_a_short_beginning_is_never_cached(provider: SimulatedProvider) -> None:
    short = prompt({"role": "user", "content": "word " * 1000})
    assert [provider.count_and_cache_prompt(short) for _ in range(2)] == [0, 0]


def test_the_oldest_beginning_is_forgotten(words: TokenCounter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REMEMBERED", 1)
    provider = SimulatedProvider(words)
    first, second = (prompt({"role": "user", "content": f"{word} " * 1500}) for word in ("one", "two"))
    assert provider.count_and_cache_prompt(first) == 0
    assert provider.count_and_cache_prompt(first) == 1504 - 1504 % 128
    assert provider.count_and_cache_prompt(second) == 0
    assert provider.count_and_cache_prompt(first) == 0


@pytest.mark.parametrize("calls", ["find", 5, {}, [None], ["find"], [{"function": "find"}]])
def test_calls_that_are_none_count_as_nothing(calls: object) -> None:
    message = {"role": "assistant", "tool_calls": calls}
    assert count_message_tokens(message, len) == FRAME_TOKENS + len("assistant")
