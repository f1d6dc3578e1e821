"""A provider that counts what it is sent and keeps what it has read in a prompt cache, and says nothing.

It counts like OpenAI's: a message's texts and a frame. Its cache knows the beginnings of prompts in whole
messages, and gives them in blocks of 128 tokens from 1,024 tokens on.
"""

import json
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from compaction_proxy.providers.types import TokenCounter
from compaction_proxy.replay.prompt_size import FRAME_TOKENS, JsonObject, cached, message_tokens


class Prompt(NamedTuple):
    """What a provider reads.

    Attributes:
        model: The model asked.
        definitions: The JSON of tools and the like.
        messages: Each message's JSON.
    """

    model: str
    definitions: tuple[str, ...]
    messages: Sequence[bytes]


class Provider:
    """Counts prompts, remembering each message that it has counted and each beginning that it has read.

    What it remembers is as large as what it was sent: it is made for one conversation.

    Args:
        counter: Counts texts.
    """

    def __init__(self, counter: TokenCounter) -> None:
        self._counter = counter
        self._sizes: dict[str, dict[bytes, int]] = {}
        self._known: set[int] = set()

    def text_tokens(self, text: str, model: str) -> int:
        """Tokens of a text."""
        return self._counter.count(text, model) if text else 0

    def answer_tokens(self, raw: bytes, model: str) -> int:
        """Tokens of an answer; `raw` is its message, or empty."""
        return self._message(raw, model) - FRAME_TOKENS if raw else 0

    def size(self, prompt: Prompt) -> int:
        """Tokens of a prompt."""
        return self._definitions(prompt) + sum(self._each(prompt)) + FRAME_TOKENS

    def read(self, prompt: Prompt) -> int:
        """How many tokens of a prompt the cache gives; from then on it knows all of it."""
        beginning = hash((prompt.model, prompt.definitions))
        longest = 0
        sizes = accumulate(self._each(prompt), initial=self._definitions(prompt))
        next(sizes)
        for raw, size in zip(prompt.messages, sizes, strict=True):
            beginning = hash((beginning, raw))
            if beginning in self._known:
                longest = size
            else:
                self._known.add(beginning)
        return cached(longest)

    def _each(self, prompt: Prompt) -> list[int]:
        return [self._message(raw, prompt.model) for raw in prompt.messages]

    def _message(self, raw: bytes, model: str) -> int:
        sizes = self._sizes.setdefault(model, {})
        size = sizes.get(raw)
        if size is None:
            message: JsonObject = json.loads(raw)
            size = sizes[raw] = message_tokens(message, self._count(model))
        return size

    def _definitions(self, prompt: Prompt) -> int:
        sizes = self._sizes.setdefault(prompt.model, {})
        raw = "".join(prompt.definitions).encode()
        if raw not in sizes:
            sizes[raw] = sum(map(self._count(prompt.model), prompt.definitions))
        return sizes[raw]

    def _count(self, model: str) -> Callable[[str], int]:
        return lambda text: self._counter.count(text, model)
