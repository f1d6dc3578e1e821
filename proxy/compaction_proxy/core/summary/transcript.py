"""Messages as a numbered text that a summary model reads, and the fences around it."""

import hashlib
import re
from collections.abc import Iterable, Sequence

from compaction_proxy.core.message import Message
from compaction_proxy.core.sanitize import sanitize_text
from compaction_proxy.core.strategies import SummaryShape

CUT_MARK = "\n[...truncated...]"
# A tool result that may take at least so many characters keeps its end, too, where it ends in an error.
TWO_ENDS_CHARACTERS = 1_000
HEAD_SHARE = 0.6
# How much of a dropped end is searched for an error.
ENDING_CHARACTERS = 4_000
FENCE_DIGITS = 16

_ERROR = re.compile(
    r"(?:error|exception)\b|\b(?:traceback|fatal|panic(?:ked)?|failed|failure|denied|not found|"
    r"exit(?:ed)?(?: with)?(?: code| status)? [1-9])",
    re.IGNORECASE,
)
_ROLE = re.compile(r"[^\w-]")


def _format_content(message: Message) -> str:
    lines = [message.text] if message.text else []
    lines += [f"[{part.kind}]" for part in message.parts]
    lines += [message.refusal] if message.refusal else []
    lines += [f"[Tool: {call.name}({call.arguments})]" for call in message.calls]
    return "\n".join(lines)


def _cut_text(text: str, characters: int, *, keep_end: bool) -> str:
    """At most about so many characters: the beginning.

    With `keep_end` the end as well, if an error is there.
    """
    if len(text) <= characters:
        return text
    if not keep_end or characters < TWO_ENDS_CHARACTERS or not _ERROR.search(text[-ENDING_CHARACTERS:]):
        return text[:characters] + CUT_MARK
    head = int(characters * HEAD_SHARE)
    return f"{text[:head]}{CUT_MARK}\n{text[head - characters :]}"


def _format_entry(message: Message, shape: SummaryShape) -> str:
    result = bool(message.answers)
    characters = shape.tool_characters if result else shape.message_characters
    return sanitize_text(_cut_text(_format_content(message), characters, keep_end=result))


def build_transcript(messages: Iterable[Message], shape: SummaryShape, first: int = 0) -> str:
    """The messages as text, numbered from `first`, each cut to the strategy's size and made harmless."""
    return "\n\n---\n\n".join(
        f"[{index}] {_ROLE.sub('', message.role).upper()}:\n{_format_entry(message, shape)}"
        for index, message in enumerate(messages, first)
    )


def compute_nonce(texts: Sequence[str]) -> str:
    """What fences around these texts are named after: nothing in them can hold or guess their own digest."""
    held = "\0".join(texts).encode("utf-8", "surrogatepass")
    return hashlib.sha256(held).hexdigest()[:FENCE_DIGITS]


def wrap_in_fence(name: str, text: str, nonce: str) -> str:
    """The text between two tags on lines of their own; `nonce` comes from `compute_nonce`."""
    return f"<{name}-{nonce}>\n{text}\n</{name}-{nonce}>"
