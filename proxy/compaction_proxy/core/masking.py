"""Masks tool results: decides which are masked first, and formats the line that replaces each of them.

A tool result matters most while it is new. Later, one line is enough. The line names the call, the error if
there was one, the size, and the handle by which the whole result can be found again.
"""

import re
from collections.abc import Iterator, Sequence

from compaction_proxy.core.ledger.facts import take_head_and_tail
from compaction_proxy.core.message import Message, MessageToolCall
from compaction_proxy.core.sanitize import sanitize_text

# A mask takes about this many tokens. A result is masked only if it has more than twice as many tokens.
MASK_TOKENS = 48
MAX_ARGUMENT_CHARACTERS = 80
MAX_ERROR_CHARACTERS = 120
# If a line reports an error, a mask quotes the word that reports it, what follows it in the line, and at most
# this many characters before it.
LEAD_CHARACTERS = 40
# Errors are searched for in this many characters at each end of a result.
_SEEN_CHARACTERS = 20_000

# The pattern matches only from the start of a word, and reads at most about 70 characters of the word. So its
# time is linear in the length of the text.
_ERROR = re.compile(
    r"\b(?:(?:[A-Z]\w{0,60})?(?:Error|Exception)|ERROR|error|fatal|FAILED|Traceback|panic|denied)\b"
)
# Every text that `_ERROR` matches contains one of these strings. `_ERROR` is used only for a text that
# contains one, because a search for strings is much faster.
_ERROR_SIGNS = ("Error", "Exception", "ERROR", "error", "fatal", "FAILED", "Traceback", "panic", "denied")
_STRING = re.compile(
    r'"((?:path|file_?path|file|command|cmd|query|url|pattern|name|id)\w*)"\s*:\s*"((?:[^"\\]|\\.){1,300})'
)
_BLANK = re.compile(r"\s+")
# A mask is enclosed in square brackets. Inside it, round brackets replace square ones and all characters that
# look like them, so that a model does not take quoted text for the end of the mask.
_BRACKETS = str.maketrans("[\uff3b\u3010\u3014\u27e6]\uff3d\u3011\u3015\u27e7", "(((((" + ")))))")

# Ranks of tool results: results that are empty or repeated, other results that report no error, and results
# that report an error. Results with the lowest rank are masked first.
_WORTHLESS, _OLD, _TELLING = range(3)


def sanitize_to_line(text: str, max_characters: int) -> str:
    """Returns the beginning of a text as one line of at most `max_characters` characters.

    A line that would be longer is cut and ends with `…`. Invisible characters are removed.

    A space is inserted into control tokens of chat templates, and into phrases that imitate texts of the
    proxy (`core.sanitize`).
    """
    plain = _BLANK.sub(" ", sanitize_text(text[: 4 * max_characters])).strip()
    return plain if len(plain) <= max_characters else plain[: max_characters - 1] + "…"


def find_first_error(text: str) -> str:
    """Returns the first line that reports an error in a tool result, shortened; empty if there is none.

    Only the first and the last 20,000 characters of the result are searched.
    """
    excerpt = take_head_and_tail(text, _SEEN_CHARACTERS, _SEEN_CHARACTERS)
    match = _ERROR.search(excerpt) if any(sign in excerpt for sign in _ERROR_SIGNS) else None
    if match is None:
        return ""
    start = max(excerpt.rfind("\n", 0, match.start()) + 1, match.start() - LEAD_CHARACTERS)
    return sanitize_to_line(
        excerpt[start : match.end() + MAX_ERROR_CHARACTERS].partition("\n")[0], MAX_ERROR_CHARACTERS
    )


def find_call_subject(call: MessageToolCall) -> str:
    """Returns the argument that shows what a call is about, such as a file, a command or a query.

    If a call has no such argument, all its arguments are returned. The result is one line of at most
    `MAX_ARGUMENT_CHARACTERS` characters.
    """
    match = _STRING.search(call.arguments[:_SEEN_CHARACTERS])
    return sanitize_to_line(match[2] if match else call.arguments, MAX_ARGUMENT_CHARACTERS)


def map_results_to_calls(messages: Sequence[Message]) -> dict[int, MessageToolCall]:
    """Returns the call to which each tool result belongs, by the index of the result.

    A result whose call is not among the messages is left out. Ids may be reused within a conversation. So a
    result belongs to the nearest earlier call with its id.
    """
    calls_by_id: dict[str, MessageToolCall] = {}
    answered: dict[int, MessageToolCall] = {}
    for index, message in enumerate(messages):
        calls_by_id.update((call.id, call) for call in message.calls)
        for answer in message.answered_call_ids:
            if answer in calls_by_id:
                answered[index] = calls_by_id[answer]
    return answered


def format_mask(message: Message, call: MessageToolCall | None, message_id: str, tool_name: str = "") -> str:
    """Formats the line that replaces a tool result.

    Args:
        message: The tool result.
        call: The call to which the result belongs; None if unknown.
        message_id: Message id of the result.
        tool_name: Name of the tool with which the model can read the whole result; empty if there is no such
            tool.
    """
    subject = (
        sanitize_to_line(
            f"{call.name} {find_call_subject(call)}" if call else "", 2 * MAX_ARGUMENT_CHARACTERS
        )
        or "result"
    )
    lines = message.text.count("\n") + 1 if message.text else 0
    size = f"{lines:,} lines, {len(message.text):,} characters"
    error = find_first_error(message.text)
    error_note = f"; {error}" if error else ""
    lookup = f"{tool_name} id {message_id}" if tool_name else message_id
    return f"[{f'{subject}: {size}{error_note}'.translate(_BRACKETS)}; left out, {lookup}]"


def _find_repeated_results(messages: Sequence[Message]) -> dict[int, bool]:
    """Returns, by the index of each tool result, whether a later result has the same text or an equal call.

    Calls are equal if they have the same tool and the same arguments.
    """
    calls = map_results_to_calls(messages)
    later_texts: set[str] = set()
    later_reads: set[tuple[str, str]] = set()
    repeated: dict[int, bool] = {}
    for index in range(len(messages) - 1, -1, -1):
        message = messages[index]
        if not message.answered_call_ids:
            continue
        call = calls.get(index)
        request = (call.name, call.arguments) if call else None
        repeated[index] = message.text in later_texts or request in later_reads
        later_texts.add(message.text)
        later_reads |= {request} if request else set()
    return repeated


def _rank_result(message: Message, *, is_repeated: bool) -> int:
    if is_repeated or not message.text.strip():
        return _WORTHLESS
    return _TELLING if find_first_error(message.text) else _OLD


def order_results_to_mask(messages: Sequence[Message], indices: Sequence[int]) -> Iterator[int]:
    """Yields the tool results among the given indices, in the order in which to mask them.

    First come results that are empty, or whose text or call a later result repeats. Results that report an
    error come last. Among results of equal rank, older ones come first.
    """
    is_repeated = _find_repeated_results(messages)
    rank = {
        index: _rank_result(messages[index], is_repeated=is_repeated[index])
        for index in indices
        if index in is_repeated
    }
    yield from sorted(rank, key=lambda index: (rank[index], index))
