from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.cli.demo.chat import Reply, ToolCall, split_words
from compaction_proxy.cli.demo.prompt import PrefixCache, TokenMeter
from compaction_proxy.providers.types import TokenCounter

CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{ }"}}


def body(*messages: dict[str, Any], **more: object) -> dict[str, Any]:
    return {"model": "m", "messages": list(messages), **more}


def test_a_prompt_counts_roles_contents_names_calls_and_frames(words: TokenCounter) -> None:
    meter = TokenMeter(words)
    spoken = {"role": "user", "content": "one two", "name": "Ann"}
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert meter.count_message(spoken, "m") == 1 + 2 + 1 + 3
    assert meter.count_message(called, "m") == 1 + 1 + 2 + 3
    assert meter.count_prompt(body(spoken, called)) == 7 + 7 + 3
    assert meter.count_prompt(body(spoken, tools=[{"a": "b c"}])) == 7 + 3 + 2


def test_a_picture_has_its_price(words: TokenCounter) -> None:
    parts = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    assert TokenMeter(words).count_message({"role": "user", "content": parts}, "m") == 1 + 1 + 85 + 3


def test_an_answer_counts_its_text_and_calls(words: TokenCounter) -> None:
    assert (
        TokenMeter(words).count_reply(Reply("a b", (ToolCall("id", "look", '{"x": 1}'),)), "m") == 2 + 1 + 2
    )


def test_a_known_beginning_is_cached_in_whole_blocks(words: TokenCounter) -> None:
    cache = PrefixCache(TokenMeter(words))
    long, short = ({"role": "user", "content": "word " * count} for count in (1500, 10))
    other = {"role": "user", "content": "else"}
    assert cache.match_prompt(body(long, short)) == 0
    assert cache.match_prompt(body(long, other)) == 1504 - 1504 % 128
    assert cache.match_prompt(body(long, other, tools=[{}])) == 0


def test_a_short_beginning_is_never_cached(words: TokenCounter) -> None:
    cache = PrefixCache(TokenMeter(words))
    assert [cache.match_prompt(body({"role": "user", "content": "word " * 1000})) for _ in range(2)] == [0, 0]


@given(st.text())
def test_the_pieces_of_a_text_are_the_text(text: str) -> None:
    assert "".join(split_words(text)) == text
