"""JSON as slices: where the members of an object and the elements of an array stand, as bytes.

Values are checked to be JSON but never built, so whatever they hold survives: big integers, duplicate keys
inside them, the order of keys, white space. msgspec does it fast, but for escapes: where there are many of
them, or some that it refuses although JSON allows it (lone surrogates), it does not get to see them.
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


# The standard decoder, without the NaN and Infinity that are no JSON.
DECODER = json.JSONDecoder(parse_constant=_refuse_constant)

# Containers whose values are left as they are.
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ELEMENTS = msgspec.json.Decoder(list[msgspec.Raw])
# Bytes that are looked at together, and elements that are copied together: the interpreter lock is held
# for as long as a call takes.
_TOGETHER_BYTES = 256 * 1024
_TOGETHER = 4_096
# Less is decoded as it is, in bytes: at the worst, escapes all through, in 4 ms.
SHORT_BYTES = 960 * 1024
# More brackets, commas and colons outside strings are nothing that a model could read.
MAX_STRUCTURAL = 1_000_000
# An object with more members is no request and no message; one takes 300 bytes however short it is.
MAX_MEMBERS = 10_000
# An array of more bytes than this is looked at before it is taken apart, if there is a comma in every eight
# of them: an element takes 140 bytes however short it is, and no message is that short.
MAX_UNSEEN_BYTES = 16 * 1024
SHORTEST_BYTES = 8

_Container = TypeVar("_Container")


class _AnyObject(msgspec.Struct, gc=False):
    """Any object; what it holds is passed over."""


_OBJECTS = msgspec.json.Decoder(list[_AnyObject])


class Slice(NamedTuple):
    """Byte offsets `[start, stop)` of a value."""

    start: int
    stop: int


def find_members(raw: bytes) -> dict[str, Slice]:
    """The members of a JSON object.

    Raises:
        Unreadable: `not-json`, `too-many`, or `duplicate-keys`; that also where keys differ in nothing but
            their escapes, and these had to be passed over.
        RecursionError: It is nested too deeply.
    """
    if len(raw) > MAX_STRUCTURAL and has_excess_structure(raw, MAX_STRUCTURAL):
        raise UnreadableBodyError("too-many")
    if not raw.isascii():
        _check_text(raw)  # msgspec does not look into the strings that it leaves raw
    smooth, decoded = _decode_container(_MEMBERS, raw, "not-json")
    if len(decoded) > MAX_MEMBERS:
        raise UnreadableBodyError("too-many")
    found: dict[str, Slice] = {}
    stop = 0
    for key, value in decoded.items():
        name = _KEY.match(raw, stop)
        start = name.end() if name else 0
        stop = start + len(value)
        if name is None or not smooth.startswith(value, start):
            raise UnreadableBodyError("duplicate-keys")
        found[key if smooth is raw else DECODER.decode(name[1].decode())] = Slice(start, stop)
    if len(found) < len(decoded) or (found and raw[stop:].strip(b" \t\n\r") != b"}"):
        raise UnreadableBodyError("duplicate-keys")
    return found


def read_member(raw: bytes, places: Mapping[str, Slice], name: str) -> bytes:
    """Returns the value of a member; empty where it is absent, null or an empty array."""
    place = places.get(name)
    value = raw[place.start : place.stop] if place else b""
    empty = value == b"null" or (value.startswith(b"[") and skip_space(value, 1) == len(value) - 1)
    return b"" if empty else value


def skip_space(raw: bytes, at: int) -> int:
    """The place of the first byte from `at` on that is no white space."""
    space = _SPACE.match(raw, at)
    return space.end() if space else at


def split_elements(raw: bytes | memoryview) -> tuple[bytes, ...]:
    """The elements of a JSON array, each as its own bytes, none of which keeps `raw`.

    Raises:
        Unreadable: `no-array`; `too-many` if they are very short.
        RecursionError: It is nested too deeply.
    """
    whole = bytes(raw)
    if len(whole) > MAX_UNSEEN_BYTES and whole.count(b",") * SHORTEST_BYTES > len(whole):
        _refuse_short(whole)
    smooth, decoded = _decode_container(_ELEMENTS, whole, "no-array")
    return _copy_elements(decoded) if smooth is whole else _find_elements(whole, decoded)


def _refuse_short(raw: bytes) -> None:
    """Refuse an array whose elements are no objects, or so short that most of them say nothing."""
    _, objects = _decode_container(_OBJECTS, raw, "too-many")
    if len(objects) * SHORTEST_BYTES > len(raw):
        raise UnreadableBodyError("too-many")


def _decode_container(
    decoder: msgspec.json.Decoder[_Container], raw: bytes, reason: str
) -> tuple[bytes | bytearray, _Container]:
    """A container, and the JSON that its values were left in: with escapes passed over, or `raw` itself.

    Raises:
        Unreadable: For this reason.
        RecursionError: It is nested too deeply.
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
    """The elements that are as long as these values."""
    copies: list[bytes] = []
    stop = 0
    for value in values:
        before = _BEFORE_ELEMENT.match(raw, stop)
        start = before.end() if before else stop  # there always is a bracket or a comma
        stop = start + len(value)
        copies.append(raw[start:stop])
    return tuple(copies)


def _copy_elements(values: list[msgspec.Raw]) -> tuple[bytes, ...]:
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
        raise UnreadableBodyError("not-json") from None
