"""Masking tool results: which ones can go first, and the line that is left of each.

What a tool said matters most while it is new. Later a line is enough: which call, how it ended, how much
there was, and the handle by which all of it can be found again.
"""

import re
from collections.abc import Iterator, Sequence

from compaction_proxy.core.message import Message, MessageToolCall
from compaction_proxy.core.sanitize import sanitize_text

# A masked result takes about this much, in tokens; shorter ones are left as they are.
MASK_TOKENS = 48
ARGUMENT_CHARACTERS = 80
ERROR_CHARACTERS = 120
# So much of a line is shown in front of the word that tells of an error.
LEAD_CHARACTERS = 40
# Characters at both ends of a result in which an error is looked for.
_SEEN_CHARACTERS = 20_000

# It matches from the start of a word only and looks at 70 characters of it: time is linear in the text.
_ERROR = re.compile(
    r"\b(?:(?:[A-Z]\w{0,60})?(?:Error|Exception)|ERROR|error|fatal|FAILED|Traceback|panic|denied)\b"
)
# One of these is in every text that `_ERROR` finds, and they are found in no time.
_ERROR_SIGNS = ("Error", "Exception", "ERROR", "error", "fatal", "FAILED", "Traceback", "panic", "denied")
_STRING = re.compile(
    r'"((?:path|file_?path|file|command|cmd|query|url|pattern|name|id)\w*)"\s*:\s*"((?:[^"\\]|\\.){1,300})'
)
_BLANK = re.compile(r"\s+")
# A mask stands in square brackets; nothing inside may look like them.
_BRACKETS = str.maketrans("[\uff3b\u3010\u3014\u27e6]\uff3d\u3011\u3015\u27e7", "(((((" + ")))))")

# Ranks, from what goes first.
_WORTHLESS, _OLD, _TELLING = range(3)


def to_sanitized_line(text: str, characters: int) -> str:
    """The text on one line, cut, without what cannot be seen and without the marks of chat templates."""
    plain = _BLANK.sub(" ", sanitize_text(text[: 4 * characters])).strip()
    return plain if len(plain) <= characters else plain[: characters - 1] + "…"


def find_first_error(text: str) -> str:
    """The first line of a result that tells of an error, cut; empty if none does."""
    seen = (
        text
        if len(text) <= 2 * _SEEN_CHARACTERS
        else text[:_SEEN_CHARACTERS] + "\n" + text[-_SEEN_CHARACTERS:]
    )
    found = _ERROR.search(seen) if any(sign in seen for sign in _ERROR_SIGNS) else None
    if found is None:
        return ""
    start = max(seen.rfind("\n", 0, found.start()) + 1, found.start() - LEAD_CHARACTERS)
    return to_sanitized_line(
        seen[start : found.end() + ERROR_CHARACTERS].partition("\n")[0], ERROR_CHARACTERS
    )


def find_call_subject(call: MessageToolCall) -> str:
    """What a call is about: the argument that names a file, a command or a query, on one line."""
    found = _STRING.search(call.arguments[:_SEEN_CHARACTERS])
    return to_sanitized_line(found[2] if found else call.arguments, ARGUMENT_CHARACTERS)


def find_answered_calls(messages: Sequence[Message]) -> dict[int, MessageToolCall]:
    """The call that each result answers, by the result's index. Ids may be reused: the nearest before it."""
    made: dict[str, MessageToolCall] = {}
    found: dict[int, MessageToolCall] = {}
    for index, message in enumerate(messages):
        made.update((call.id, call) for call in message.calls)
        for answer in message.answers:
            if answer in made:
                found[index] = made[answer]
    return found


def format_mask(message: Message, call: MessageToolCall | None, handle: str, tool_name: str = "") -> str:
    """The line that is left of a tool result.

    Args:
        message: The result.
        call: What it answers, if known.
        handle: Its message id.
        tool_name: Name of the tool by which the model gets at it; empty where there is none.
    """
    asked = (
        to_sanitized_line(f"{call.name} {find_call_subject(call)}" if call else "", 2 * ARGUMENT_CHARACTERS)
        or "result"
    )
    lines = message.text.count("\n") + 1 if message.text else 0
    size = f"{lines:,} lines, {len(message.text):,} characters"
    error = find_first_error(message.text)
    told = f"; {error}" if error else ""
    found_by = f"{tool_name} id {handle}" if tool_name else handle
    return f"[{f'{asked}: {size}{told}'.translate(_BRACKETS)}; left out, {found_by}]"


def _find_repeated_results(messages: Sequence[Message]) -> dict[int, bool]:
    """Whether each tool result was said again, or read again, later; by index."""
    calls = find_answered_calls(messages)
    later_texts: set[str] = set()
    later_reads: set[tuple[str, str]] = set()
    found: dict[int, bool] = {}
    for index in range(len(messages) - 1, -1, -1):
        message = messages[index]
        if not message.answers:
            continue
        call = calls.get(index)
        read = (call.name, call.arguments) if call else None
        found[index] = message.text in later_texts or read in later_reads
        later_texts.add(message.text)
        later_reads |= {read} if read else set()
    return found


def _rank_result(message: Message, *, is_repeated: bool) -> int:
    if is_repeated or not message.text.strip():
        return _WORTHLESS
    return _TELLING if find_first_error(message.text) else _OLD


def order_results_to_mask(messages: Sequence[Message], indices: Sequence[int]) -> Iterator[int]:
    """The tool results among the given indices, in the order in which to mask them.

    First what is empty, was said again later, or was read again later; last what tells of an error.
    """
    again = _find_repeated_results(messages)
    rank = {
        index: _rank_result(messages[index], is_repeated=again[index]) for index in indices if index in again
    }
    yield from sorted(rank, key=lambda index: (rank[index], index))
