"""Which JSON inside a text is built into values: a list takes eighty bytes for the two that write it."""

import json

# More brackets than this are left as text. It is the most whose values fit in a mebibyte and thirty times the
# bytes that write them; brackets inside strings count, too, because telling them apart takes longer.
MAX_BRACKETS = 16_000
# JSON longer than this is not built into values where only a part of it is quoted, in characters.
MAX_CHARACTERS = 32 * 1024


def has_too_many_brackets(text: str) -> bool:
    """Whether JSON would take much more memory as values than it takes as text."""
    return text.count("[") + text.count("{") > MAX_BRACKETS


def read_json(text: str) -> object:
    """Returns an object or a list as values; None where a text is neither, too long or nested too deeply."""
    if len(text) > MAX_CHARACTERS or text.lstrip()[:1] not in {"{", "["} or has_too_many_brackets(text):
        return None
    try:
        found: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found
