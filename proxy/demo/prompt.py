"""How the demo provider counts: tokens of a prompt, and how many of them it has seen before."""

import hashlib
from collections import OrderedDict
from itertools import accumulate

from proxy.demo.wire import JsonObject, Reply, dumps
from proxy.ports import TokenCounter

FRAME_TOKENS = 3  # around every message, and once more for the answer that follows
PART_TOKENS = 85  # a content part that is not text: OpenAI's price of a small picture
CACHE_MINIMUM_TOKENS = 1024  # OpenAI caches prompts from this length on …
CACHE_BLOCK_TOKENS = 128  # … in steps of this size
CACHE_PREFIXES = 20_000
COUNTED_MESSAGES = 20_000


def text_of(message: JsonObject) -> str:
    """All text of a message's content."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))


def _texts(message: JsonObject) -> list[str]:
    """Every string of a message that costs tokens."""
    found = [str(message.get("role", "")), text_of(message), str(message.get("name") or "")]
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        found += [str(function.get("name", "")), str(function.get("arguments", ""))]
    return found


def _other_parts(message: JsonObject) -> int:
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return sum(1 for part in parts if not (isinstance(part, dict) and "text" in part))


class Meter:
    """Counts prompts and answers, remembering each message it has counted."""

    def __init__(self, counter: TokenCounter) -> None:
        self._counter = counter
        self._counted: OrderedDict[tuple[str, bytes], int] = OrderedDict()

    def message(self, message: JsonObject, model: str) -> int:
        """Tokens of one message, its frame included."""
        key = (model, hashlib.sha256(dumps(message)).digest())
        if key not in self._counted:
            counted = sum(self._counter.count(text, model) for text in _texts(message) if text)
            self._counted[key] = counted + PART_TOKENS * _other_parts(message) + FRAME_TOKENS
            while len(self._counted) > COUNTED_MESSAGES:
                self._counted.popitem(last=False)
        return self._counted[key]

    def tools(self, body: JsonObject) -> int:
        """Tokens of the tools offered."""
        tools = body.get("tools")
        return self._counter.count(dumps(tools).decode(), body["model"]) if tools else 0

    def prompt(self, body: JsonObject) -> int:
        """Tokens of a whole request."""
        messages = (self.message(message, body["model"]) for message in body["messages"])
        return self.tools(body) + sum(messages) + FRAME_TOKENS

    def reply(self, reply: Reply, model: str) -> int:
        """Tokens of an answer."""
        texts = [reply.text, *(part for call in reply.calls for part in (call.name, call.arguments))]
        return sum(self._counter.count(text, model) for text in texts if text)


class PrefixCache:
    """Which beginnings of prompts the provider has read before, as a provider's prompt cache knows them."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def hit(self, body: JsonObject) -> int:
        """Tokens of the longest known beginning of this prompt, in whole blocks; then remembers all of it."""
        sizes = accumulate(
            (self._meter.message(message, body["model"]) for message in body["messages"]),
            initial=self._meter.tools(body),
        )
        next(sizes)
        digest = hashlib.sha256(dumps([body["model"], body.get("tools")])).digest()
        longest = 0
        for message, size in zip(body["messages"], sizes, strict=True):
            digest = hashlib.sha256(digest + dumps(message)).digest()
            longest = size if digest in self._known else longest
            self._known[digest] = None
            self._known.move_to_end(digest)
        while len(self._known) > CACHE_PREFIXES:
            self._known.popitem(last=False)
        blocks = longest - longest % CACHE_BLOCK_TOKENS
        return blocks if blocks >= CACHE_MINIMUM_TOKENS else 0
