"""Decodes JSON to Python values, and encodes and shortens such values.

A call of a decoder holds the interpreter lock until it ends. So the module decodes megabytes of JSON in
several calls. Most of a large message is usually one long string, such as a text or an image. So the module
first splits the objects and arrays that contain long strings into undecoded values. Then it decodes each long
string piece by piece, and each other value in one call. The result and the errors are the same as if one call
decoded the whole message.
"""

import base64
import hashlib
import json
from collections.abc import Callable
from typing import Any

import msgspec

from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.core.json_bounds import has_too_many_brackets
from compaction_proxy.wires.json.slices import (
    DECODER,
    PIECE_BYTES,
    find_members,
    has_excess_structure,
    iter_pieces,
    split_elements,
)

JsonObject = dict[str, Any]

# `decode_value` decodes JSON of at most this many bytes in one call, and longer JSON in pieces.
LONG_BYTES = 128 * 1024
# `decode_value` refuses JSON longer than `LONG_BYTES` if it has more opening brackets, commas and colons
# outside strings than this, because no model could read such a message.
MAX_STRUCTURAL = 60_000
# `decode_value` splits long objects and arrays into their values only down to this depth of nesting. It
# decodes deeper ones in one call. The levels are the message, its content, a part of the content, and a value
# in this part.
_MAX_DEPTH = 4
# `decode_value` decodes an object or array with more values than this in one call, and not value by value.
# Decoding value by value helps only if a value is long, and among so many values, each is usually short.
_MAX_ITEMS = 10_000
# Before `decode_plain` decodes JSON of more bytes than this, it makes sure that there is memory.
_CHECKED_BYTES = 16 * 1024
# `decode_plain` refuses values with more levels of objects and arrays than this. The parsers have limits of
# their own, which depend on the version of Python, and so do functions that call themselves for each level.
MAX_NESTING = 150


def decode_value(raw: bytes) -> Any:
    """Decodes JSON that has no white space around it.

    Raises:
        UnreadableBodyError: With the reason `not-json` if `raw` is invalid. With the reason `too-deep` if it
            is nested too deeply. With the reason `too-many` if it is longer than `LONG_BYTES` and has more
            than `MAX_STRUCTURAL` brackets, commas and colons outside strings.
    """
    if len(raw) > LONG_BYTES and has_excess_structure(raw, MAX_STRUCTURAL):
        raise UnreadableBodyError("too-many")
    return _decode_at_depth(raw, _MAX_DEPTH)


def _decode_at_depth(raw: bytes, depth: int) -> Any:
    if len(raw) <= LONG_BYTES:
        return decode_plain(raw)
    if raw.startswith(b'"') and raw.endswith(b'"'):
        strings = [
            _decode_string(b'"%b"' % raw[start:stop]) for start, stop in iter_pieces(raw, 1, len(raw) - 1)
        ]
        del raw  # free each copy of a long value as soon as it is split
        return "".join(strings)
    values = _split_container(raw) if depth else None
    if values is None:
        return decode_plain(raw)
    del raw
    if isinstance(values, dict):
        return {key: _decode_at_depth(values.pop(key), depth - 1) for key in list(values)}
    values.reverse()
    return [_decode_at_depth(values.pop(), depth - 1) for _ in range(len(values))]


def _split_container(raw: bytes) -> dict[str, bytes] | list[bytes] | None:
    """Splits an object or array into its undecoded values.

    Returns None if the JSON is neither an object nor an array, is invalid or empty, or has more than
    `_MAX_ITEMS` values. The caller must then decode it in one call, which also reports errors.
    """
    values: dict[str, bytes] | list[bytes] = []
    try:
        if raw.startswith(b"{"):
            values = {key: raw[place.start : place.stop] for key, place in find_members(raw).items()}
        elif raw.startswith(b"["):
            values = list(split_elements(raw))
    except UnreadableBodyError:
        return None
    return values if 0 < len(values) <= _MAX_ITEMS else None


def decode_plain(raw: bytes) -> Any:
    """Decodes JSON in one call.

    Raises:
        UnreadableBodyError: With the reason `not-json` if `raw` is invalid. With the reason `too-deep` if it
            has more than `MAX_NESTING` levels.
        MemoryError: If there is not enough memory for the value.
    """
    if len(raw) > _CHECKED_BYTES:
        # If no memory is left for a string, msgspec ends the process. This allocation raises an error, and
        # its memory is free again at once.
        bytes(2 * len(raw))
    try:
        try:
            value = msgspec.json.decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            value = DECODER.decode(raw.decode())
    except RecursionError:
        raise UnreadableBodyError("too-deep") from None
    except ValueError:
        raise UnreadableBodyError("not-json") from None
    # Counting brackets is cheap. Brackets in texts count, too, so the levels themselves decide.
    if raw.count(b"[") + raw.count(b"{") > MAX_NESTING and _is_too_deep(value):
        raise UnreadableBodyError("too-deep")
    return value


def _is_too_deep(value: Any) -> bool:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_NESTING):
        if not level:
            return False
        level = [
            child
            for each in level
            for child in (each.values() if isinstance(each, dict) else each)
            if isinstance(child, dict | list)
        ]
    return bool(level)


def _decode_string(raw: bytes) -> str:
    text = decode_plain(raw)
    if not isinstance(text, str):
        raise UnreadableBodyError("not-json")
    return text


def hash_base64(text: str) -> bytes:
    """Returns the SHA-256 of the bytes that base64 text encodes.

    Raises:
        ValueError: If the text is not base64.
    """
    hasher = hashlib.sha256()
    # The loop decodes complete groups of four characters. If padding, or a rest of fewer than four
    # characters, follows the last complete group, the call after the loop decodes this group together with
    # what follows.
    padded = text.find("=")
    whole = (len(text) if padded < 0 else padded) // 4 * 4
    whole = max(0, whole - 4) if whole < len(text) or padded >= 0 else whole
    for start in range(0, whole, PIECE_BYTES):
        hasher.update(base64.b64decode(text[start : min(start + PIECE_BYTES, whole)], validate=True))
    hasher.update(base64.b64decode(text[whole:], validate=True))
    return hasher.digest()


def as_object(value: object) -> JsonObject:
    """Returns the value if it is a dict, else an empty dict."""
    return value if isinstance(value, dict) else {}


def as_list(value: object) -> list[Any]:
    """Returns the value if it is a list, else an empty list."""
    return value if isinstance(value, list) else []


def as_string(value: object) -> str:
    """Returns the value if it is a string, else an empty string."""
    return value if isinstance(value, str) else ""


def parse_json(data: bytes) -> object:
    """Parses JSON; returns None if it is invalid. Accepts NaN and Infinity, although they are not JSON."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def is_json_object(text: str) -> bool:
    """Returns whether a text is a complete JSON object.

    Returns False without parsing if the text has so many brackets that its value could take too much memory.
    """
    if has_too_many_brackets(text):
        return False
    try:
        return isinstance(DECODER.decode(text), dict)
    except (ValueError, RecursionError):
        return False


def encode_ascii_json(value: object) -> bytes:
    """Returns compact JSON in ASCII, with escapes for all other characters."""
    return json.dumps(value, separators=(",", ":")).encode()


# Texts in the arguments of tool calls stay unchanged if they have fewer characters than this.
LONG_ARGUMENT = 200

TextCutter = Callable[[str], str]


def dump_json(value: Any) -> str:
    """Returns compact JSON. Raises `ValueError` for the numbers Infinity and NaN, which are not JSON."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def encode_json(value: Any) -> bytes:
    """Returns compact JSON in UTF-8. If UTF-8 cannot encode it, because of lone surrogates, returns ASCII."""
    text = dump_json(value)
    try:
        return text.encode()
    except UnicodeEncodeError:
        return encode_ascii_json(value)


def cut_long_argument(text: str, cut: TextCutter) -> str:
    """Returns `cut(text)` if the text has at least `LONG_ARGUMENT` characters, and otherwise the text."""
    return cut(text) if len(text) >= LONG_ARGUMENT else text


def cut_long_texts(value: Any, cut: TextCutter) -> Any:
    """Returns a copy of a decoded JSON value in which `cut` has shortened long texts (`LONG_ARGUMENT`).

    Does not shorten keys.
    """
    if isinstance(value, str):
        return cut_long_argument(value, cut)
    if isinstance(value, list):
        return [cut_long_texts(each, cut) for each in value]
    if isinstance(value, dict):
        return {key: cut_long_texts(each, cut) for key, each in value.items()}
    return value


def cut_arguments(arguments: str, cut: TextCutter) -> str:
    """Returns the arguments of a tool call, in which `cut` has shortened long texts (`LONG_ARGUMENT`).

    If the arguments are valid JSON, the result is valid JSON with the same keys. If they are not valid JSON,
    or have too many brackets for a parser, shortens them like one text.
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
