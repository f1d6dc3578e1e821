"""JSON as slices: where the members of an object and the elements of an array stand, as bytes.

Values are checked to be JSON but never built, so whatever they hold survives: big integers, duplicate keys
inside them, the order of keys, white space. msgspec does it fast; what it refuses although JSON allows it
(lone surrogates) is done by the standard decoder.
"""

import codecs
import json
import re
from collections.abc import Iterator
from typing import NamedTuple, NoReturn

import msgspec

from proxy.errors import Unreadable

_KEY = re.compile(rb'\s*[{,]\s*"[^"\\]*+(?:\\.[^"\\]*+)*+"\s*:\s*')
_SPACE = re.compile(rb"[ \t\n\r]*")
_UTF8 = codecs.getincrementaldecoder("utf-8")
_TEXT_SPACE = re.compile(r"[ \t\n\r]*")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


# The standard decoder, without the NaN and Infinity that are no JSON.
DECODER = json.JSONDecoder(parse_constant=_refuse)

# Containers whose values are left as they are.
MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
ELEMENTS = msgspec.json.Decoder(list[msgspec.Raw])
# Bytes that are looked at together, and elements that are copied together: the interpreter lock is held
# for as long as a call takes.
_TOGETHER_BYTES = 256 * 1024
_TOGETHER = 4_096


class Slice(NamedTuple):
    """Byte offsets `[start, stop)` of a value."""

    start: int
    stop: int


def members(raw: bytes) -> dict[str, Slice]:
    """The members of a JSON object.

    Raises:
        Unreadable: `not-json`, or `duplicate-keys`.
        RecursionError: It is nested too deeply.
    """
    if not raw.isascii():
        _check_text(raw)  # msgspec does not look into the strings that it leaves raw
    try:
        decoded = MEMBERS.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return _members_slowly(raw)
    found: dict[str, Slice] = {}
    stop = 0
    for key, value in decoded.items():
        name = _KEY.match(raw, stop)
        start = name.end() if name else 0
        stop = start + len(value)
        if name is None or not raw.startswith(value, start):
            raise Unreadable("duplicate-keys")
        found[key] = Slice(start, stop)
    if found and raw[stop:].strip(b" \t\n\r") != b"}":
        raise Unreadable("duplicate-keys")
    return found


def skip(raw: bytes, at: int) -> int:
    """The place of the first byte from `at` on that is no white space."""
    space = _SPACE.match(raw, at)
    return space.end() if space else at


def elements(raw: bytes | memoryview) -> tuple[bytes, ...]:
    """The elements of a JSON array, each as its own bytes, none of which keeps `raw`.

    Raises:
        Unreadable: `no-array`.
        RecursionError: It is nested too deeply.
    """
    try:
        return _copied(ELEMENTS.decode(raw))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        text = _text(bytes(raw))
        return tuple(text[start:stop].encode() for _, start, stop in _items(text, "[]"))


def _copied(values: list[msgspec.Raw]) -> tuple[bytes, ...]:
    if len(values) <= _TOGETHER:
        return tuple(map(bytes, values))
    copies: list[bytes] = []
    for start in range(0, len(values), _TOGETHER):
        copies += map(bytes, values[start : start + _TOGETHER])
    return tuple(copies)


def _check_text(raw: bytes) -> None:
    """Refuse what is no UTF-8."""
    decoder = _UTF8()
    try:
        for start in range(0, len(raw), _TOGETHER_BYTES):
            decoder.decode(raw[start : start + _TOGETHER_BYTES])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        raise Unreadable("not-json") from None


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise Unreadable("not-json") from None


def _members_slowly(raw: bytes) -> dict[str, Slice]:
    text = _text(raw)
    found: dict[str, Slice] = {}
    at = offset = 0
    for key, start, stop in _items(text, "{}"):
        if key in found:
            raise Unreadable("duplicate-keys")
        first = offset + len(text[at:start].encode())
        offset = first + len(text[start:stop].encode())
        found[key] = Slice(first, offset)
        at = stop
    return found


def _items(text: str, brackets: str) -> Iterator[tuple[str, int, int]]:
    """Key (empty in an array) and character offsets of each item of one container."""
    try:
        at = _after(text, 0, brackets[0])
        more = text[at] != brackets[1]
        while more:
            key, at = _key(text, at) if brackets == "{}" else ("", at)
            _, stop = DECODER.raw_decode(text, at)
            yield key, at, stop
            at = _space(text, stop)
            more = text[at] == ","
            at = _after(text, at, ",") if more else at
        _end(text, at, brackets[1])
    except (ValueError, TypeError, IndexError):
        raise Unreadable("no-array" if brackets == "[]" else "not-json") from None


def _key(text: str, at: int) -> tuple[str, int]:
    """A key, and the place of its value."""
    key, stop = DECODER.raw_decode(text, at)
    if not isinstance(key, str):
        raise TypeError(key)
    return key, _after(text, stop, ":")


def _space(text: str, at: int) -> int:
    space = _TEXT_SPACE.match(text, at)
    return space.end() if space else at


def _after(text: str, at: int, mark: str) -> int:
    """The place of the next value behind a mark that must stand here."""
    at = _space(text, at)
    if text[at] != mark:
        raise ValueError(mark)
    return _space(text, at + 1)


def _end(text: str, at: int, mark: str) -> None:
    """See that a mark stands here and nothing but space behind it."""
    if _after(text, at, mark) < len(text):
        raise ValueError(mark)
