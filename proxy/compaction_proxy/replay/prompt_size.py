"""How a provider like OpenAI counts a prompt, and how much of it its cache takes in."""

from collections.abc import Callable
from typing import Any

JsonObject = dict[str, Any]

FRAME_TOKENS = 3  # around every message, and once more for the answer that follows
PART_TOKENS = 85  # a content part that is not text: OpenAI's price of a small picture
CACHE_MINIMUM_TOKENS = 1024  # OpenAI caches prompts from this length on …
CACHE_BLOCK_TOKENS = 128  # … in steps of this size


def extract_text(message: JsonObject) -> str:
    """All text of a message's content."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))


def count_message_tokens(message: JsonObject, count: Callable[[str], int]) -> int:
    """Tokens of one message, its frame included; `count` gives those of a text."""
    return (
        sum(count(text) for text in _list_texts(message) if text)
        + PART_TOKENS * _count_other_parts(message)
        + FRAME_TOKENS
    )


def count_cached_tokens(tokens: int) -> int:
    """How many of so many tokens that it has read before a provider's cache gives: whole blocks."""
    blocks = tokens - tokens % CACHE_BLOCK_TOKENS
    return blocks if blocks >= CACHE_MINIMUM_TOKENS else 0


def _list_texts(message: JsonObject) -> list[str]:
    """Every string of a message that costs tokens."""
    found = [str(message.get("role", "")), extract_text(message), str(message.get("name") or "")]
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            found += [str(function.get("name", "")), str(function.get("arguments", ""))]
    return found


def _count_other_parts(message: JsonObject) -> int:
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return sum(1 for part in parts if not (isinstance(part, dict) and "text" in part))
