"""Counts the tokens of prompts and replies for the demo provider, and simulates its prompt cache."""

import hashlib
from collections import OrderedDict
from itertools import accumulate

from compaction_proxy.cli.demo.chat import JsonObject, Reply, encode_json
from compaction_proxy.providers.types import TokenCounter
from compaction_proxy.replay.prompt_size import FRAME_TOKENS, count_message_tokens, round_down_to_cache_blocks

MAX_CACHE_PREFIXES = 20_000
MAX_COUNTED_MESSAGES = 20_000


class TokenMeter:
    """Counts the tokens of prompts and replies. The counts of messages are cached."""

    def __init__(self, counter: TokenCounter) -> None:
        self._counter = counter
        self._counted: OrderedDict[tuple[str, bytes], int] = OrderedDict()

    def count_message(self, message: JsonObject, model: str) -> int:
        """Returns the tokens of a message, including those of the frame around each message."""
        key = (model, hashlib.sha256(encode_json(message)).digest())
        if key not in self._counted:
            self._counted[key] = count_message_tokens(message, lambda text: self._counter.count(text, model))
            while len(self._counted) > MAX_COUNTED_MESSAGES:
                self._counted.popitem(last=False)
        return self._counted[key]

    def count_tools(self, body: JsonObject) -> int:
        """Returns the tokens of the tool definitions."""
        tools = body.get("tools")
        return self._counter.count(encode_json(tools).decode(), body["model"]) if tools else 0

    def count_prompt(self, body: JsonObject) -> int:
        """Returns the tokens of a whole request."""
        messages = (self.count_message(message, body["model"]) for message in body["messages"])
        return self.count_tools(body) + sum(messages) + FRAME_TOKENS

    def count_reply(self, reply: Reply, model: str) -> int:
        """Returns the tokens of a reply."""
        texts = [reply.text, *(part for call in reply.calls for part in (call.name, call.arguments))]
        return sum(self._counter.count(text, model) for text in texts if text)


class PrefixCache:
    """Remembers the prefixes of prompts that the provider has read, as a provider's prompt cache does."""

    def __init__(self, meter: TokenMeter) -> None:
        self._meter = meter
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def match_prompt(self, body: JsonObject) -> int:
        """Returns the tokens of the longest stored prefix of a prompt, and stores all prefixes of the prompt.

        The number is rounded down to whole cache blocks (`replay.prompt_size.count_cached_tokens`).
        """
        sizes = accumulate(
            (self._meter.count_message(message, body["model"]) for message in body["messages"]),
            initial=self._meter.count_tools(body),
        )
        next(sizes)
        digest = hashlib.sha256(encode_json([body["model"], body.get("tools")])).digest()
        longest = 0
        for message, size in zip(body["messages"], sizes, strict=True):
            digest = hashlib.sha256(digest + encode_json(message)).digest()
            longest = size if digest in self._known else longest
            self._known[digest] = None
            self._known.move_to_end(digest)
        while len(self._known) > MAX_CACHE_PREFIXES:
            self._known.popitem(last=False)
        return round_down_to_cache_blocks(longest)
