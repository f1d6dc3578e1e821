"""Simulates a summary model: writes extracts of realistic size. The same input always gives the same text."""

import re
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

from compaction_proxy.core.errors import SummaryError, UnreadableBodyError
from compaction_proxy.core.message import Message
from compaction_proxy.core.summary.call import SummaryAnswer, SummaryCall
from compaction_proxy.core.summary.extractive import build_extractive_summary
from compaction_proxy.core.summary.prompt import ALIGNED_CLOSING
from compaction_proxy.replay.provider import ProviderPrompt, SimulatedProvider
from compaction_proxy.wires.body import parse_body
from compaction_proxy.wires.chat.wire import CHAT, build_own_members, build_request_body

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
    """Usage of a summary call, in tokens."""

    model: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class ExtractiveSummaryModel:
    """Implements the protocol `providers.types.SummaryModel` by rules. Serves one conversation at a time.

    Attributes:
        provider: The simulated provider to which the conversation's requests also go. Its cache may therefore
            already hold the beginning of an aligned call.
        calls: Usage of the calls since `start_conversation`.
    """

    def __init__(self, provider: SimulatedProvider) -> None:
        self.provider = provider
        self.calls: list[SummaryCallUsage] = []

    def start_conversation(self, provider: SimulatedProvider) -> list[SummaryCallUsage]:
        """Switches to another conversation. Returns the list to which the usage of its calls is appended."""
        self.provider, self.calls = provider, []
        return self.calls

    async def request_summary(self, call: SummaryCall) -> SummaryAnswer:
        """Writes a summary.

        Raises:
            SummaryError: The reason is `garbage`: the call cannot be encoded as a request.
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

    A prompt may ask for a text for each of several runs of messages. Then each run gets its own extract below
    a line with its number. If the prompt names sections, the extract stands in the first one.

    Args:
        raw_messages: The messages of the call, as JSON.
        max_tokens: The requested limit of output tokens. A summary has at most `TARGET_TOKENS` tokens.
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
    """Returns whether a text asks for a summary of all messages before it."""
    return ALIGNED_CLOSING in text


def _list_groups(messages: Sequence[Message]) -> list[list[Message]]:
    """Returns the messages to summarise, in a group for each text that the prompt asks for."""
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
