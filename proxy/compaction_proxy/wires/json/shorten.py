"""Text inside JSON made shorter, and JSON written as compactly as it can be."""

import json
from collections.abc import Callable
from typing import Any

from compaction_proxy.core.json_bounds import has_too_many_brackets
from compaction_proxy.wires.json.slices import DECODER

# Text inside the arguments of a call is shortened where it is at least this long, in characters.
LONG_ARGUMENT = 200

TextCutter = Callable[[str], str]


def dump_json(value: Any) -> str:
    """Compact JSON; ValueError if a number is too large for any, which Python would write as Infinity."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def encode_json(value: Any) -> bytes:
    """The same as bytes. A lone surrogate can travel as an escape only."""
    text = dump_json(value)
    try:
        return text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()


def cut_if_long(text: str, cut: TextCutter) -> str:
    """A text inside the arguments of a call, cut where that is worth it."""
    return cut(text) if len(text) >= LONG_ARGUMENT else text


def cut_inside(value: Any, cut: TextCutter) -> Any:
    """A JSON value with the same keys and its long texts cut."""
    if isinstance(value, str):
        return cut_if_long(value, cut)
    if isinstance(value, list):
        return [cut_inside(each, cut) for each in value]
    if isinstance(value, dict):
        return {key: cut_inside(each, cut) for key, each in value.items()}
    return value


def cut_arguments(arguments: str, cut: TextCutter) -> str:
    """Arguments that parse still do, with the same keys; others, and crowded ones, are plain text."""
    if has_too_many_brackets(arguments):
        return cut_if_long(arguments, cut)
    try:
        value = DECODER.decode(arguments)
    except (ValueError, RecursionError):
        return cut_if_long(arguments, cut)
    try:
        return min(arguments, dump_json(cut_inside(value, cut)), key=len)
    except (ValueError, RecursionError):
        return arguments
