"""Simulates a provider that counts the tokens of prompts and keeps a prompt cache, but writes no answers.

It counts tokens as OpenAI does: the texts of each message plus a fixed number of tokens for each message. Its
cache holds the beginning of a prompt if an earlier prompt had the same model, tools and first messages. The
cache serves whole blocks of 128 tokens, and nothing if the beginning has fewer than 1,024 tokens.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from compaction_proxy.providers.types import TokenCounter
from compaction_proxy.support.lru import BoundedDict
from compaction_proxy.wires.json.values import encode_json

JsonObject = dict[str, Any]

FRAME_TOKENS = 3  # added for every message, and once more for the answer
PART_TOKENS = 85  # counted for a content part that is not text; OpenAI counts this for a small image
CACHE_MINIMUM_TOKENS = 1024  # OpenAI caches the beginning of a prompt if it has at least this many tokens
CACHE_BLOCK_TOKENS = 128  # the number of cached tokens is rounded down to a multiple of this
# The provider remembers the sizes of this many messages, and this many beginnings of prompts, by their
# hashes. It forgets the oldest ones.
MAX_REMEMBERED = 200_000


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

    @classmethod
    def from_body(cls, body: JsonObject) -> "ProviderPrompt":
        """Returns the prompt of a request."""
        tools = (encode_json(body["tools"]).decode(),) if body.get("tools") else ()
        return cls(body["model"], tools, [encode_json(message) for message in body["messages"]])


class SimulatedProvider:
    """Counts the tokens of prompts, and simulates a prompt cache.

    Args:
        counter: Token counter for texts.
    """

    def __init__(self, counter: TokenCounter) -> None:
        self._counter = counter
        self._sizes: BoundedDict[int, int] = BoundedDict(MAX_REMEMBERED)
        self._known: BoundedDict[int, None] = BoundedDict(MAX_REMEMBERED)

    def count_text_tokens(self, text: str, model: str) -> int:
        """Counts the tokens of a text."""
        return self._counter.count(text, model) if text else 0

    def count_answer_tokens(self, raw: bytes, model: str) -> int:
        """Counts the tokens of an answer; `raw` is its message as JSON, or empty if there is no answer."""
        return self._count_message(raw, model) - FRAME_TOKENS if raw else 0

    def count_prompt_tokens(self, prompt: ProviderPrompt) -> int:
        """Counts the tokens of a prompt."""
        messages = sum(self._count_message(raw, prompt.model) for raw in prompt.messages)
        return self._count_definitions(prompt) + messages + FRAME_TOKENS

    def count_and_cache_prompt(self, prompt: ProviderPrompt) -> int:
        """Returns how many tokens of a prompt the cache serves, and adds the whole prompt to the cache."""
        beginning = hash((prompt.model, prompt.definitions))
        longest, size = 0, self._count_definitions(prompt)
        for raw in prompt.messages:
            beginning = hash((beginning, raw))
            size += self._count_message(raw, prompt.model)
            if beginning in self._known:
                longest = size
            self._known[beginning] = None
        return round_down_to_cache_blocks(longest)

    def _count_message(self, raw: bytes, model: str) -> int:
        key = hash((model, raw))
        if key not in self._sizes:
            self._sizes[key] = count_message_tokens(
                json.loads(raw), lambda text: self._counter.count(text, model)
            )
        return self._sizes[key]

    def _count_definitions(self, prompt: ProviderPrompt) -> int:
        key = hash((prompt.model, prompt.definitions))
        if key not in self._sizes:
            self._sizes[key] = sum(self._counter.count(text, prompt.model) for text in prompt.definitions)
        return self._sizes[key]


def round_down_to_cache_blocks(tokens: int) -> int:
    """Returns how many tokens the cache serves if it holds the first `tokens` tokens of a prompt.

    The cache serves only whole blocks, and nothing below `CACHE_MINIMUM_TOKENS`.
    """
    blocks = tokens - tokens % CACHE_BLOCK_TOKENS
    return blocks if blocks >= CACHE_MINIMUM_TOKENS else 0


def extract_text(message: JsonObject) -> str:
    """Returns all text of a message's content."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in _list_parts(message) if isinstance(part, dict))


def count_message_tokens(message: JsonObject, count: Callable[[str], int]) -> int:
    """Counts the tokens of a message, including `FRAME_TOKENS`. `count` counts the tokens of a text."""
    other_parts = [part for part in _list_parts(message) if not (isinstance(part, dict) and "text" in part)]
    texts = sum(count(text) for text in _iter_texts(message) if text)
    return texts + PART_TOKENS * len(other_parts) + FRAME_TOKENS


def _list_parts(message: JsonObject) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _iter_texts(message: JsonObject) -> Iterator[str]:
    """Yields the strings of a message that cost tokens."""
    yield from (str(message.get("role", "")), extract_text(message), str(message.get("name") or ""))
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            yield from (str(function.get("name", "")), str(function.get("arguments", "")))
