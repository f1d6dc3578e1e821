"""Limits which JSON inside a text is parsed: a list of two bytes takes eighty bytes of memory."""

import json

# JSON with more brackets than this stays text. This is the largest number whose values fit into one mebibyte
# plus thirty times the bytes of the text. Brackets inside strings count too, because telling them apart would
# take longer.
MAX_BRACKETS = 16_000
# JSON longer than this many characters is not parsed where only a part of it is quoted.
MAX_CHARACTERS = 32 * 1024


def has_too_many_brackets(text: str) -> bool:
    """Returns whether JSON might take much more memory as values than as text."""
    return text.count("[") + text.count("{") > MAX_BRACKETS


def read_json(text: str) -> object:
    """Parses a JSON object or list. Returns None if the text is neither, is too large or nests too deeply."""
    if len(text) > MAX_CHARACTERS or text.lstrip()[:1] not in {"{", "["} or has_too_many_brackets(text):
        return None
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value
