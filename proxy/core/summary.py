"""Summaries as data: what the summary model is given, and what of its answer may be used.

Instructions come first and are the same in every call, so that a provider's prompt cache hits; everything
from the conversation is data behind them. What the model writes is data too: it never becomes a rule.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence

from proxy.core.message import Message
from proxy.core.policy import SummaryShape
from proxy.errors import SummaryFailed

CUT_MARK = "\n[...truncated...]"
NO_TASK = "Unknown task"

# Control characters but tab and newline, and the invisible "tag" characters that smuggle instructions.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u2028-\u202e\u2060-\u2069\ufeff\U000e0000-\U000e007f]"
)
_OWN_HEADING = re.compile(r"\A\s*#{1,6}[^\n]*session summary[^\n]*(?:\n+|\Z)", re.IGNORECASE)


def _cut(text: str, characters: int) -> str:
    return text if len(text) <= characters else text[:characters] + CUT_MARK


def _entry(message: Message, shape: SummaryShape) -> str:
    lines = [message.text] if message.text else []
    lines += [f"[{part.kind}]" for part in message.parts]
    lines += [message.refusal] if message.refusal else []
    lines += [f"[Tool: {call.name}({call.arguments})]" for call in message.calls]
    characters = shape.tool_characters if message.answers else shape.message_characters
    return _cut("\n".join(lines), characters)


def transcript(messages: Iterable[Message], shape: SummaryShape) -> str:
    """The messages as numbered text, each cut to the strategy's size."""
    return "\n\n---\n\n".join(
        f"[{index}] {message.role.upper()}:\n{_entry(message, shape)}"
        for index, message in enumerate(messages)
    )


def prompt(messages: Sequence[Message], shape: SummaryShape, task: str, earlier: str) -> str:
    """The data of a summary call: the earlier summary, the task, and the fenced transcript.

    The fence is named after the digest of what it holds, so nothing inside can close it.
    """
    held = transcript(messages, shape)
    fence = "transcript-" + hashlib.sha256(held.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return (
        f"## Previous Summary\n{earlier or 'None: this is the first compaction round.'}\n\n"
        f"## Original User Task\n{task}\n\n"
        f"## Messages to Summarize\n<{fence}>\n{held}\n</{fence}>"
    )


def clean(text: str) -> str:
    """The text without control characters, chat-template marks and a heading that is ours to write."""
    seen = _UNSEEN.sub("", text.replace("\r\n", "\n")).replace("<|", "< |")
    return _OWN_HEADING.sub("", seen).strip()


def validated(text: str, finish_reason: str, *, called_tools: bool, refused: bool) -> str:
    """The answer's text, if it is a usable summary.

    Raises:
        SummaryFailed: with the reason `tool-calls`, `refused`, `truncated`, `content-filter` or `empty`.
    """
    if called_tools:
        raise SummaryFailed("tool-calls")
    if refused:
        raise SummaryFailed("refused")
    if finish_reason in {"length", "content_filter"}:
        raise SummaryFailed("truncated" if finish_reason == "length" else "content-filter")
    cleaned = clean(text)
    if not cleaned:
        raise SummaryFailed("empty")
    return cleaned


def task_of(messages: Iterable[Message]) -> Message | None:
    """The task: the first user message."""
    return next((each for each in messages if each.role == "user" and not each.answers), None)
