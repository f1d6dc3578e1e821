"""Finds the members of an object and the elements of an array as slices of the JSON bytes.

Values are checked to be JSON, but no Python objects are built from them. So everything in them is preserved:
big integers, duplicate keys, the order of keys, white space. msgspec does this, but it is slow if there are
many escapes, and refuses lone surrogates, which JSON allows. In both cases, msgspec gets a copy of the JSON
in which the escapes are masked.
"""

import codecs
import json
import re
from collections.abc import Mapping
from typing import NamedTuple, NoReturn, TypeVar

import msgspec

from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.wires.json.pieces import has_excess_structure, mask_escapes

_KEY = re.compile(rb'\s*[{,]\s*("[^"\\]*+(?:\\.[^"\\]*+)*+")\s*:\s*')
_SPACE = re.compile(rb"[ \t\n\r]*")
_BEFORE_ELEMENT = re.compile(rb"\s*[\[,]\s*")
_UTF8 = codecs.getincrementaldecoder("utf-8")


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(constant)


# The decoder of Python's `json`, except that it refuses NaN and Infinity, which are not JSON.
DECODER = json.JSONDecoder(parse_constant=_refuse_constant)

# Decoders for objects and arrays that leave the values as raw JSON.
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ELEMENTS = msgspec.json.Decoder(list[msgspec.Raw])
# How many bytes are checked as UTF-8, and how many elements are copied, in one call. A call holds the
# interpreter lock until it ends.
_BATCH_BYTES = 256 * 1024
_BATCH_ELEMENTS = 4_096
# JSON of at most this many bytes is decoded unmasked. In the worst case, if it is full of escapes, this takes
# 4 ms.
SHORT_BYTES = 960 * 1024
# JSON with more opening brackets, commas and colons outside strings than this is refused: no model could read
# it.
MAX_STRUCTURAL = 1_000_000
# An object with more members is refused: it is neither a request nor a message. Each member takes 300 bytes
# of memory, however short it is.
MAX_MEMBERS = 10_000
# An array with more than `MAX_UNCHECKED_ARRAY_BYTES`, and with more than one comma per `MIN_ELEMENT_BYTES`,
# is checked for short elements before it is split. Each element takes 140 bytes of memory, however short it
# is, and no message is shorter than `MIN_ELEMENT_BYTES`.
MAX_UNCHECKED_ARRAY_BYTES = 16 * 1024
MIN_ELEMENT_BYTES = 8

_Container = TypeVar("_Container")


class _AnyObject(msgspec.Struct, gc=False):
    """Any object; the decoder skips its members."""


_OBJECTS = msgspec.json.Decoder(list[_AnyObject])


class Slice(NamedTuple):
    """Byte offsets `[start, stop)` of a value."""

    start: int
    stop: int


def find_members(raw: bytes) -> dict[str, Slice]:
    """Returns the positions of the values of a JSON object, by key.

    Raises:
        UnreadableBodyError: `not-json`; `too-many` for more than `MAX_MEMBERS` or `MAX_STRUCTURAL`;
            `duplicate-keys`. Keys that differ only in their escapes may count as duplicates.
        RecursionError: The object is nested too deeply.
    """
    if len(raw) > MAX_STRUCTURAL and has_excess_structure(raw, MAX_STRUCTURAL):
        raise UnreadableBodyError("too-many")
    if not raw.isascii():
        _check_utf8(raw)  # msgspec does not check strings in values that it leaves raw
    smooth, decoded = _decode_container(_MEMBERS, raw, "not-json")
    if len(decoded) > MAX_MEMBERS:
        raise UnreadableBodyError("too-many")
    members: dict[str, Slice] = {}
    stop = 0
    for key, value in decoded.items():
        key_match = _KEY.match(raw, stop)
        start = key_match.end() if key_match else 0
        stop = start + len(value)
        if key_match is None or not smooth.startswith(value, start):
            raise UnreadableBodyError("duplicate-keys")
        members[key if smooth is raw else DECODER.decode(key_match[1].decode())] = Slice(start, stop)
    if len(members) < len(decoded) or (members and raw[stop:].strip(b" \t\n\r") != b"}"):
        raise UnreadableBodyError("duplicate-keys")
    return members


def read_member(raw: bytes, member_slices: Mapping[str, Slice], name: str) -> bytes:
    """Returns the value of a member; empty if it is absent, null or an empty array."""
    place = member_slices.get(name)
    value = raw[place.start : place.stop] if place else b""
    empty = value == b"null" or (value.startswith(b"[") and skip_space(value, 1) == len(value) - 1)
    return b"" if empty else value


def skip_space(raw: bytes, start: int) -> int:
    """Returns the position of the first byte from `start` on that is not white space."""
    space = _SPACE.match(raw, start)
    return space.end() if space else start


def split_elements(raw: bytes | memoryview) -> tuple[bytes, ...]:
    """Returns the elements of a JSON array, each as a copy of its bytes that does not keep `raw` alive.

    Raises:
        UnreadableBodyError: With the reason `no-array` if `raw` is no JSON array. With the reason `too-many`
            if the array is long and has many commas, and its elements are shorter than `MIN_ELEMENT_BYTES` on
            average or are not objects.
        RecursionError: The array is nested too deeply.
    """
    whole = bytes(raw)
    if len(whole) > MAX_UNCHECKED_ARRAY_BYTES and whole.count(b",") * MIN_ELEMENT_BYTES > len(whole):
        _refuse_short_elements(whole)
    smooth, decoded = _decode_container(_ELEMENTS, whole, "no-array")
    return _copy_elements(decoded) if smooth is whole else _find_elements(whole, decoded)


def _refuse_short_elements(raw: bytes) -> None:
    """Refuses an array whose elements are not objects, or on average are shorter than `MIN_ELEMENT_BYTES`.

    Raises:
        UnreadableBodyError: `too-many`.
    """
    _, objects = _decode_container(_OBJECTS, raw, "too-many")
    if len(objects) * MIN_ELEMENT_BYTES > len(raw):
        raise UnreadableBodyError("too-many")


def _decode_container(
    decoder: msgspec.json.Decoder[_Container], raw: bytes, reason: str
) -> tuple[bytes | bytearray, _Container]:
    """Decodes an object or array, and leaves its values undecoded.

    Returns the JSON that was decoded (`raw` itself, or a copy in which escapes are masked) and the result.

    Raises:
        UnreadableBodyError: The JSON is not what `decoder` expects. The error has the given `reason`.
        RecursionError: The JSON is nested too deeply.
    """
    try:
        smooth = mask_escapes(raw) if len(raw) > SHORT_BYTES else raw
        return smooth, decoder.decode(smooth)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        smooth = mask_escapes(raw, mask_all=True)
    try:
        return smooth, decoder.decode(smooth)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise UnreadableBodyError(reason) from None


def _find_elements(raw: bytes, values: list[msgspec.Raw]) -> tuple[bytes, ...]:
    """Returns the elements of an array, given the elements of its masked copy.

    Args:
        raw: The array.
        values: The elements of the masked copy. They have the same lengths as those of `raw`.
    """
    copies: list[bytes] = []
    stop = 0
    for value in values:
        before = _BEFORE_ELEMENT.match(raw, stop)
        # The pattern always matches, because every element follows a bracket or a comma.
        start = before.end() if before else stop
        stop = start + len(value)
        copies.append(raw[start:stop])
    return tuple(copies)


def _copy_elements(values: list[msgspec.Raw]) -> tuple[bytes, ...]:
    if len(values) <= _BATCH_ELEMENTS:
        return tuple(map(bytes, values))
    copies: list[bytes] = []
    for start in range(0, len(values), _BATCH_ELEMENTS):
        copies += map(bytes, values[start : start + _BATCH_ELEMENTS])
    return tuple(copies)


def _check_utf8(raw: bytes) -> None:
    """Raises `UnreadableBodyError` if the bytes are not UTF-8."""
    decoder = _UTF8()
    try:
        for start in range(0, len(raw), _BATCH_BYTES):
            decoder.decode(raw[start : start + _BATCH_BYTES])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        raise UnreadableBodyError("not-json") from None
