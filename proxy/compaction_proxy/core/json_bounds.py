"""Limits which JSON texts are parsed, because parsed values may take far more memory than their text.

For example, an empty list takes two bytes as text and eighty bytes of memory as a value.
"""

import json

# JSON with more opening brackets than this is not parsed. With this limit, the parsed values take at most one
# mebibyte of memory plus thirty times the size of the text. Brackets inside strings count too, because it
# would take longer to leave them out.
MAX_BRACKETS = 16_000
# `parse_json_container` does not parse JSON that is longer than this many characters. The limit does little
# harm, because the callers of this function quote only a part of the text.
MAX_CHARACTERS = 32 * 1024


def has_too_many_brackets(text: str) -> bool:
    """Returns whether a JSON text has more than `MAX_BRACKETS` opening brackets.

    The values of such a text might take far more memory than the text itself.
    """
    return text.count("[") + text.count("{") > MAX_BRACKETS


def parse_json_container(text: str) -> object:
    """Parses a JSON object or list.

    Returns None if the text is no object or list, is invalid JSON, is longer than `MAX_CHARACTERS`, has too
    many brackets, or nests too deeply for the parser.
    """
    if len(text) > MAX_CHARACTERS or text.lstrip()[:1] not in {"{", "["} or has_too_many_brackets(text):
        return None
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value
