"""The provider that only counts agrees with the demo's, which answers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compaction_proxy.cli.demo.prompt import PrefixCache, TokenMeter
from compaction_proxy.replay.prompt_size import FRAME_TOKENS, JsonObject, count_message_tokens
from compaction_proxy.replay.provider import ProviderPrompt, SimulatedProvider
from compaction_proxy.replay.recordings import dump_json
from tests.doubles.word_counter import WordCounter

TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {}}}]
MESSAGES: st.SearchStrategy[list[JsonObject]] = st.lists(
    st.builds(
        dict,
        role=st.sampled_from(["user", "assistant", "tool"]),
        content=st.one_of(
            st.integers(0, 900).map(lambda words: "word " * words),
            st.just([{"type": "text", "text": "a b"}, {"type": "image_url", "image_url": {"url": "x"}}]),
        ),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=40)
@given(st.lists(MESSAGES, min_size=1, max_size=5), st.sampled_from([[], TOOLS]))
def test_sizes_and_cached_tokens_are_those_of_the_demo_provider(
    lists: list[list[JsonObject]], tools: list[JsonObject]
) -> None:
    meter = TokenMeter(WordCounter())
    cache, provider = PrefixCache(meter), SimulatedProvider(WordCounter())
    for messages in [part for each in lists for part in (each[: len(each) // 2 + 1], each)]:
        body = {"model": "m", "messages": messages, **({"tools": tools} if tools else {})}
        prompt = ProviderPrompt(
            "m", (dump_json(TOOLS).decode(),) if tools else (), [dump_json(each) for each in messages]
        )
        assert (provider.count_prompt_tokens(prompt), provider.count_and_cache_prompt(prompt)) == (
            meter.count_prompt(body),
            cache.match_prompt(body),
        )


@pytest.mark.parametrize("calls", ["find", 5, {}, [None], ["find"], [{"function": "find"}]])
def test_calls_that_are_none_count_as_nothing(calls: object) -> None:
    message = {"role": "assistant", "tool_calls": calls}
    assert count_message_tokens(message, len) == FRAME_TOKENS + len("assistant")
