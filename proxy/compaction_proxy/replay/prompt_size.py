"""Counts the tokens of messages, and the tokens that a prompt cache serves, by the rules of OpenAI."""

from collections.abc import Callable
from typing import Any

JsonObject = dict[str, Any]

FRAME_TOKENS = 3  # added for every message, and once more for the answer
PART_TOKENS = 85  # counted for a content part that is not text; OpenAI counts this for a small image
CACHE_MINIMUM_TOKENS = 1024  # OpenAI caches the beginning of a prompt if it has at least this many tokens
CACHE_BLOCK_TOKENS = 128  # the number of cached tokens is rounded down to a multiple of this


def extract_text(message: JsonObject) -> str:
    """Returns all text of a message's content."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))


def count_message_tokens(message: JsonObject, count: Callable[[str], int]) -> int:
    """Counts the tokens of a message, including `FRAME_TOKENS`. `count` counts the tokens of a text."""
    return (
        sum(count(text) for text in _list_texts(message) if text)
        + PART_TOKENS * _count_other_parts(message)
        + FRAME_TOKENS
    )


def round_down_to_cache_blocks(tokens: int) -> int:
    """Returns how many tokens the cache serves if it holds the first `tokens` tokens of a prompt.

    The cache serves only whole blocks, and nothing below `CACHE_MINIMUM_TOKENS`.
    """
    blocks = tokens - tokens % CACHE_BLOCK_TOKENS
    return blocks if blocks >= CACHE_MINIMUM_TOKENS else 0


def _list_texts(message: JsonObject) -> list[str]:
    """Returns the strings of a message that cost tokens."""
    texts = [str(message.get("role", "")), extract_text(message), str(message.get("name") or "")]
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            texts += [str(function.get("name", "")), str(function.get("arguments", ""))]
    return texts


def _count_other_parts(message: JsonObject) -> int:
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return sum(1 for part in parts if not (isinstance(part, dict) and "text" in part))
