"""Simulates a provider with a prompt cache, and a summary model that writes summaries by rules.

The provider counts tokens as OpenAI does: the tokens of each message's texts, plus `FRAME_TOKENS` for each
message. The prompt cache contains the beginning of a prompt if an earlier prompt had the same model, tools
and first messages. The cache serves only whole blocks of 128 tokens. It serves no tokens if the cached
beginning has fewer than 1,024 tokens.

Summaries are extracts of realistic size. The same input always gives the same text.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from compaction_proxy.core.errors import SummaryError, UnreadableBodyError
from compaction_proxy.core.message import Message
from compaction_proxy.core.summary.call import SummaryAnswer, SummaryCall
from compaction_proxy.core.summary.extractive import build_extractive_summary
from compaction_proxy.core.summary.prompt import ALIGNED_CLOSING
from compaction_proxy.providers.types import TokenCounter
from compaction_proxy.support.lru import BoundedDict
from compaction_proxy.wires.body import parse_body
from compaction_proxy.wires.chat.wire import CHAT, build_own_members, build_request_body
from compaction_proxy.wires.json.values import encode_json

JsonObject = dict[str, Any]

FRAME_TOKENS = 3  # added for every message, and once more for the reply
PART_TOKENS = 85  # counted for a content part that is not text; OpenAI counts this for a small image
CACHE_MINIMUM_TOKENS = 1024  # OpenAI caches the beginning of a prompt if it has at least this many tokens
CACHE_BLOCK_TOKENS = 128  # the number of cached tokens is rounded down to a multiple of this
# Maximum number of messages whose sizes the provider remembers, and maximum number of beginnings of prompts
# in its cache. Beyond each limit, the provider forgets the entry that was written longest ago.
MAX_REMEMBERED = 200_000


class ProviderPrompt(NamedTuple):
    """A prompt as the provider receives it.

    Attributes:
        model: Requested model.
        definitions: JSON of each member besides the messages that is part of the prompt, such as `tools`.
        messages: JSON of each message.
    """

    model: str
    definitions: tuple[str, ...]
    messages: Sequence[bytes]

    @classmethod
    def from_body(cls, body: JsonObject) -> "ProviderPrompt":
        """Returns the prompt of a request with the decoded body `body`."""
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
        """Counts the tokens of a reply, without `FRAME_TOKENS`.

        `raw` is the assistant message as JSON. If `raw` is empty, returns 0.
        """
        return self._count_message(raw, model) - FRAME_TOKENS if raw else 0

    def count_prompt_tokens(self, prompt: ProviderPrompt) -> int:
        """Counts the tokens of a prompt, with `FRAME_TOKENS` for each message and once for the reply."""
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
    """Returns how many tokens the cache serves if it contains the first `tokens` tokens of a prompt.

    The cache serves only whole blocks of `CACHE_BLOCK_TOKENS` tokens. If these blocks together have fewer
    than `CACHE_MINIMUM_TOKENS` tokens, returns 0.
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
    """Counts the tokens of a message: of its texts, `PART_TOKENS` for each other part, and `FRAME_TOKENS`.

    `count` counts the tokens of a text.
    """
    other_parts = [part for part in _list_parts(message) if not (isinstance(part, dict) and "text" in part)]
    texts = sum(count(text) for text in _iter_texts(message) if text)
    return texts + PART_TOKENS * len(other_parts) + FRAME_TOKENS


def _list_parts(message: JsonObject) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _iter_texts(message: JsonObject) -> Iterator[str]:
    """Yields the parts of a message that count as text: role, content, name and tool calls."""
    yield from (str(message.get("role", "")), extract_text(message), str(message.get("name") or ""))
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            yield from (str(function.get("name", "")), str(function.get("arguments", "")))


TARGET_TOKENS = 700  # largest size of a summary
CHARACTERS_PER_TOKEN = 4
OPENING = "What follows was copied from the messages:"

_FENCED = re.compile(
    r"^<(?P<name>summary|transcript|run-\d+)-(?P<mark>\w+)>\n(?P<text>.*?)\n</(?P=name)-(?P=mark)>$",
    re.MULTILINE | re.DOTALL,
)
_ENTRY = re.compile(r"(?:^|\n\n---\n\n)\[\d+\] ([\w-]*):\n")
_HEADING = re.compile(r"^(?:### |\d\. ).+$", re.MULTILINE)
_RUN_MARK = re.compile(r"^=== RUN \d+ ===$", re.MULTILINE)


class SummaryCallUsage(NamedTuple):
    """The token counts of one summary call, and the name of its model."""

    model: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class ExtractiveSummaryModel:
    """Writes summaries by rules, as a `providers.types.SummaryModel`. Serves one conversation at a time.

    Attributes:
        provider: The simulated provider, which also gets the conversation's requests. Its cache may therefore
            already contain the beginning of an aligned call.
        calls: Usage of each summary call since the last call of `start_conversation`.
    """

    def __init__(self, provider: SimulatedProvider) -> None:
        self.provider = provider
        self.calls: list[SummaryCallUsage] = []

    def start_conversation(self, provider: SimulatedProvider) -> list[SummaryCallUsage]:
        """Begins another conversation. Returns a list to which each later summary call adds its usage.

        `provider` is the simulated provider of the conversation.
        """
        self.provider, self.calls = provider, []
        return self.calls

    async def request_summary(self, call: SummaryCall) -> SummaryAnswer:
        """Writes the summary by rules (`write_summary`), and appends the usage of the call to `calls`.

        Raises:
            SummaryError: With the reason `garbage` if the call cannot be encoded as a request.
        """
        provider, calls = self.provider, self.calls
        try:
            body = parse_body(build_request_body(call, build_own_members(call)), CHAT)
        except UnreadableBodyError:
            raise SummaryError("garbage") from None
        prompt = ProviderPrompt(call.model, body.prompt_members, body.messages)
        size, cached = provider.count_prompt_tokens(prompt), provider.count_and_cache_prompt(prompt)
        text = write_summary(
            body.messages,
            body.max_output or TARGET_TOKENS,
            lambda said: provider.count_text_tokens(said, call.model),
        )
        written = provider.count_text_tokens(text, call.model)
        calls.append(SummaryCallUsage(call.model, size, cached, written))
        return SummaryAnswer(text, "stop", prompt_tokens=size, completion_tokens=written)


def write_summary(raw_messages: Sequence[bytes], max_tokens: int, count: Callable[[str], int]) -> str:
    """Writes the summary for which a summary call asks.

    The last message of an aligned call is the prompt, and the messages before it are summarised. In any other
    call, the transcripts in the last message are summarised, or the message itself if it has none.

    A prompt may ask for one text for each of several groups of messages, which the prompt calls "runs". Each
    group then gets its own extract, below a line with the number of the group. If the prompt names sections
    and asks for one text, the extract is the content of the first section. The other sections have the
    content `None`.

    Args:
        raw_messages: The messages of the call, as JSON.
        max_tokens: The requested limit of output tokens. Limits above `TARGET_TOKENS` count as
            `TARGET_TOKENS`.
        count: Counts the tokens of a text.
    """
    messages = [CHAT.parse_message(raw) for raw in raw_messages]
    instructions = messages[-1].text if is_aligned_call(messages[-1].text) else messages[0].text
    headings = _HEADING.findall(instructions)
    groups = _list_groups(messages)
    tokens = min(TARGET_TOKENS, max_tokens)
    characters = CHARACTERS_PER_TOKEN * tokens
    text = _format_summary(groups, headings, characters)
    while characters and count(text) > tokens:
        characters = characters * 9 // 10
        text = _format_summary(groups, headings, characters)
    return text


def _format_summary(groups: Sequence[Sequence[Message]], headings: Sequence[str], characters: int) -> str:
    size = characters // len(groups)
    texts = [f"{OPENING}\n{build_extractive_summary(group, size, str)}".strip() for group in groups]
    if len(texts) > 1:
        return "\n\n".join(f"=== RUN {number} ===\n{text}" for number, text in enumerate(texts, 1))
    sections = [f"{heading}\nNone" for heading in headings[1:]]
    return "\n\n".join(["\n".join([*headings[:1], *texts]), *sections])


def is_aligned_call(text: str) -> bool:
    """Returns whether a text is the prompt of an aligned call, which summarises the messages before it."""
    return ALIGNED_CLOSING in text


def _list_groups(messages: Sequence[Message]) -> list[list[Message]]:
    """Returns the messages to summarise, one group for each text that the prompt asks for.

    In a call with transcripts, each line of an earlier summary counts as an assistant message of each group.
    """
    prompt = messages[-1].text
    if is_aligned_call(prompt):
        spoken = [each for each in messages[:-1] if not each.is_privileged]
        run_count = len(_RUN_MARK.findall(prompt))
        if not run_count:
            return [spoken]
        rows = groupby(spoken, lambda each: each.role == "user")
        return [list(row) for is_user, row in rows if not is_user][:run_count]
    fenced = [(match["name"], match["text"]) for match in _FENCED.finditer(prompt)]
    earlier = [
        Message("assistant", line) for name, text in fenced if name == "summary" for line in text.splitlines()
    ]
    transcripts = [_parse_transcript(text) for name, text in fenced if name != "summary"]
    return [earlier + transcript for transcript in transcripts] or [[messages[-1]]]


def _parse_transcript(text: str) -> list[Message]:
    pieces = _ENTRY.split(text)[1:]
    return [
        Message(role.lower(), said, answered_call_ids=("",) if role in {"TOOL", "FUNCTION"} else ())
        for role, said in zip(pieces[::2], pieces[1::2], strict=True)
    ]
