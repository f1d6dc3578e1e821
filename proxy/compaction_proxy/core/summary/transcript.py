"""Formats messages as a numbered transcript for a summary model, and puts texts between tags."""

import hashlib
import re
from collections.abc import Iterable, Sequence

from compaction_proxy.core.message import Message
from compaction_proxy.core.sanitize import sanitize_text
from compaction_proxy.core.strategies import SummaryShape

CUT_MARK = "\n[...truncated...]"
# If at least this many characters may be shown of a tool result, and its end reports an error, both its
# beginning and its end are kept.
TWO_ENDS_CHARACTERS = 1_000
# Share of the shown characters that such a beginning gets. The end gets the rest.
HEAD_SHARE = 0.6
# Characters at the end of a result that are searched for an error.
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
    """Cuts a text to its first `characters` characters, plus a mark that shows the cut.

    If `keep_end` is true, a long enough text whose end reports an error is cut in the middle instead.
    """
    if len(text) <= characters:
        return text
    if not keep_end or characters < TWO_ENDS_CHARACTERS or not _ERROR.search(text[-ENDING_CHARACTERS:]):
        return text[:characters] + CUT_MARK
    head = int(characters * HEAD_SHARE)
    return f"{text[:head]}{CUT_MARK}\n{text[head - characters :]}"


def _format_entry(message: Message, shape: SummaryShape) -> str:
    result = bool(message.answered_call_ids)
    characters = shape.tool_characters if result else shape.message_characters
    return sanitize_text(_cut_text(_format_content(message), characters, keep_end=result))


def build_transcript(messages: Iterable[Message], shape: SummaryShape, first: int = 0) -> str:
    """Returns the messages as text, numbered from `first`, each sanitised and cut to the strategy's size."""
    return "\n\n---\n\n".join(
        f"[{index}] {_ROLE.sub('', message.role).upper()}:\n{_format_entry(message, shape)}"
        for index, message in enumerate(messages, first)
    )


def compute_fence_digest(texts: Sequence[str]) -> str:
    """Returns a digest of the texts, which becomes part of the names of the tags around them.

    Nobody can write a text that contains its own digest, so nothing in the texts can close the tags.
    """
    joined = "\0".join(texts).encode("utf-8", "surrogatepass")
    return hashlib.sha256(joined).hexdigest()[:FENCE_DIGITS]


def wrap_in_fence(name: str, text: str, nonce: str) -> str:
    """Returns the text between two tags on lines of their own. `nonce` comes from `compute_fence_digest`."""
    return f"<{name}-{nonce}>\n{text}\n</{name}-{nonce}>"
