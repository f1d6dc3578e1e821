"""Simulates a provider that counts the tokens of prompts and keeps a prompt cache, but writes no answers.

It counts tokens as OpenAI does: the texts of each message plus a fixed number of tokens for each message. Its
cache holds the beginning of a prompt if an earlier prompt had the same model, tools and first messages. The
cache serves whole blocks of 128 tokens, and nothing if the beginning has fewer than 1,024 tokens.
"""

import json
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from compaction_proxy.providers.types import TokenCounter
from compaction_proxy.replay.prompt_size import (
    FRAME_TOKENS,
    JsonObject,
    count_message_tokens,
    round_down_to_cache_blocks,
)


class ProviderPrompt(NamedTuple):
    """A prompt as the provider receives it.

    Attributes:
        model: Requested model.
        definitions: JSON of each member other than the messages that is part of the prompt, such as tools.
        messages: JSON of each message.
    """

    model: str
    definitions: tuple[str, ...]
    messages: Sequence[bytes]


class SimulatedProvider:
    """Counts the tokens of prompts, and simulates a prompt cache.

    It remembers the size of every message, and every beginning of a prompt. It never forgets any, so use a
    separate instance for each conversation.

    Args:
        counter: Token counter for texts.
    """

    def __init__(self, counter: TokenCounter) -> None:
        self._counter = counter
        self._sizes: dict[str, dict[bytes, int]] = {}
        self._known: set[int] = set()

    def count_text_tokens(self, text: str, model: str) -> int:
        """Counts the tokens of a text."""
        return self._counter.count(text, model) if text else 0

    def count_answer_tokens(self, raw: bytes, model: str) -> int:
        """Counts the tokens of an answer; `raw` is its message as JSON, or empty if there is no answer."""
        return self._count_message(raw, model) - FRAME_TOKENS if raw else 0

    def count_prompt_tokens(self, prompt: ProviderPrompt) -> int:
        """Counts the tokens of a prompt."""
        return self._count_definitions(prompt) + sum(self._count_each_message(prompt)) + FRAME_TOKENS

    def count_and_cache_prompt(self, prompt: ProviderPrompt) -> int:
        """Returns how many tokens of a prompt the cache serves, and adds the whole prompt to the cache."""
        beginning = hash((prompt.model, prompt.definitions))
        longest = 0
        sizes = accumulate(self._count_each_message(prompt), initial=self._count_definitions(prompt))
        next(sizes)
        for raw, size in zip(prompt.messages, sizes, strict=True):
            beginning = hash((beginning, raw))
            if beginning in self._known:
                longest = size
            else:
                self._known.add(beginning)
        return round_down_to_cache_blocks(longest)

    def _count_each_message(self, prompt: ProviderPrompt) -> list[int]:
        return [self._count_message(raw, prompt.model) for raw in prompt.messages]

    def _count_message(self, raw: bytes, model: str) -> int:
        sizes = self._sizes.setdefault(model, {})
        size = sizes.get(raw)
        if size is None:
            message: JsonObject = json.loads(raw)
            size = sizes[raw] = count_message_tokens(message, self._build_text_counter(model))
        return size

    def _count_definitions(self, prompt: ProviderPrompt) -> int:
        sizes = self._sizes.setdefault(prompt.model, {})
        raw = "".join(prompt.definitions).encode()
        if raw not in sizes:
            sizes[raw] = sum(map(self._build_text_counter(prompt.model), prompt.definitions))
        return sizes[raw]

    def _build_text_counter(self, model: str) -> Callable[[str], int]:
        return lambda text: self._counter.count(text, model)
