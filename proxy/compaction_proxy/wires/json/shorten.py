"""Shortens text inside JSON, and writes JSON compactly."""

import json
from collections.abc import Callable
from typing import Any

from compaction_proxy.core.json_bounds import has_too_many_brackets
from compaction_proxy.wires.json.slices import DECODER

# A text in the arguments of a tool call is shortened only if it has at least this many characters.
LONG_ARGUMENT = 200

TextCutter = Callable[[str], str]


def dump_json(value: Any) -> str:
    """Returns compact JSON. Raises ValueError for numbers that Python would write as Infinity or NaN."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def encode_json(value: Any) -> bytes:
    """Returns compact JSON as bytes. Lone surrogates, which UTF-8 cannot encode, are written as escapes."""
    text = dump_json(value)
    try:
        return text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()


def cut_long_argument(text: str, cut: TextCutter) -> str:
    """Returns a text from the arguments of a tool call, cut if it has at least `LONG_ARGUMENT` characters."""
    return cut(text) if len(text) >= LONG_ARGUMENT else text


def cut_long_texts(value: Any, cut: TextCutter) -> Any:
    """Returns a JSON value in which texts of at least `LONG_ARGUMENT` characters are cut. Keys stay."""
    if isinstance(value, str):
        return cut_long_argument(value, cut)
    if isinstance(value, list):
        return [cut_long_texts(each, cut) for each in value]
    if isinstance(value, dict):
        return {key: cut_long_texts(each, cut) for key, each in value.items()}
    return value


def cut_arguments(arguments: str, cut: TextCutter) -> str:
    """Returns the arguments of a tool call with long texts cut.

    Valid JSON stays valid JSON with the same keys. Arguments that are not valid JSON, or have too many
    brackets to be parsed, are cut like plain text.
    """
    if has_too_many_brackets(arguments):
        return cut_long_argument(arguments, cut)
    try:
        value = DECODER.decode(arguments)
    except (ValueError, RecursionError):
        return cut_long_argument(arguments, cut)
    try:
        return min(arguments, dump_json(cut_long_texts(value, cut)), key=len)
    except (ValueError, RecursionError):
        return arguments
