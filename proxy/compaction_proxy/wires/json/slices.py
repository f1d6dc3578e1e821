"""Finds the members of an object and the elements of an array as slices of the JSON bytes.

The module checks that the values are valid JSON, but builds no Python objects from them. So the bytes of a
value stay exactly as they are, including big integers and white space. msgspec does the check. But it is slow
if strings contain many escapes, and it refuses lone surrogates, which JSON allows. In both cases, msgspec
gets a copy of the JSON in which `mask_escapes` has replaced the escapes. In this copy, all values have the
same positions.

Each call of msgspec, or of another function that is written in C, holds the interpreter lock until it ends.
So only fast functions process megabytes of JSON in one call. All others process a piece of at most about
`PIECE_BYTES` bytes in each call.
"""

import codecs
import json
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple, NoReturn, TypeVar

import msgspec

from compaction_proxy.core.errors import UnreadableBodyError

# The proxy processes long JSON in pieces of about this many bytes, and long base64 text in pieces of this
# many characters. The number is a multiple of four, because base64 is decoded in groups of four characters.
PIECE_BYTES = 64 * 1024
# `contains_bytes` searches this many bytes at a time, which takes less than a millisecond.
SEARCHED_BYTES = 1024 * 1024
# If a piece of JSON has more than one escape per `BYTES_PER_ESCAPE` bytes, `mask_escapes` replaces its
# escapes, because a decoder would take more than twice as long for it as for a piece without escapes. A
# numeric escape, such as `\u00e9`, counts as `NUMERIC_ESCAPE_WEIGHT` escapes, because a decoder takes longer
# for it than for other escapes.
BYTES_PER_ESCAPE = 5
NUMERIC_ESCAPE_WEIGHT = 8
# The length in bytes of the longest escape, a pair of surrogates such as `\ud83d\ude00`.
_ESCAPE_BYTES = 12
_LOW_SURROGATE = re.compile(rb"\\u[dD][c-fC-F]..", re.DOTALL)
_CONTINUATION_MASK, _CONTINUATION = 0xC0, 0x80
# `_mask_piece` replaces backslashes by hash signs. Outside of strings, JSON allows neither, so invalid JSON
# stays invalid.
_BACKSLASH_TO_HASH = bytes.maketrans(b"\\", b"#")
_HEX_DIGIT_TO_ZERO = bytes.maketrans(b"123456789abcdefABCDEF", b"0" * 21)
_HEXADECIMAL = rb"\u0000"
# The structural characters of JSON (RFC 8259 §2) without the closing brackets. JSON contains about as many of
# them as it contains values, so `has_excess_structure` counts them instead of values.
_STRUCTURAL = (b",", b":", b"[", b"{")
_LETTER_ESCAPES = (rb"\n", rb"\t", rb"\r", rb"\/", rb"\b", rb"\f")


def iter_pieces(raw: bytes, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Divides the bytes of JSON from `start` to `end` into pieces. Yields the start and the stop of each.

    Each piece has about `PIECE_BYTES` bytes. Pieces may end inside strings, but not inside a character or an
    escape. `start` must not be inside a character or an escape either.
    """
    while start < end:
        stop = _find_cut(raw, start, start + PIECE_BYTES) if start + PIECE_BYTES < end else end
        yield start, min(stop, end)
        start = stop


def _find_cut(raw: bytes, start: int, stop: int) -> int:
    """Returns a position near `stop` that is inside neither a character nor an escape.

    `start` must also be inside neither of them.
    """
    last = raw.rfind(b"\\", stop - _ESCAPE_BYTES, stop)
    if last >= 0:
        run = raw[start : last + 1]
        if (len(run) - len(run.rstrip(b"\\"))) % 2 == 0:
            return last + 1  # the backslash is escaped itself
        # The last backslash begins an escape, so the piece ends before the backslash. But if this escape is
        # the second half of a surrogate pair, the piece ends after the escape.
        pair = _LOW_SURROGATE.match(raw, last)
        return pair.end() if pair else last
    for back in range(stop, stop - 4, -1):
        if raw[back] & _CONTINUATION_MASK != _CONTINUATION:
            return back
    return stop


def contains_bytes(raw: bytes, wanted: bytes) -> bool:
    """Returns whether `raw` contains `wanted`. Searches one part of long bytes after the other."""
    overlap = len(wanted) - 1
    return any(
        raw.find(wanted, start, start + SEARCHED_BYTES + overlap) >= 0
        for start in range(0, len(raw), SEARCHED_BYTES)
    )


def mask_escapes(raw: bytes, *, mask_all: bool = False) -> bytes | bytearray:
    """Replaces escapes in JSON, so that a decoder is fast: backslashes and escaped quotes become hash signs.

    All values keep their positions and lengths. Only escapes change, so invalid JSON stays invalid. If
    nothing changes, returns `raw` itself.

    Args:
        raw: The JSON.
        mask_all: Whether to replace every escape. If False, the function replaces escapes only in those
            pieces of the JSON that have many (`BYTES_PER_ESCAPE`).
    """
    masked: bytearray | None = None
    for start, stop in iter_pieces(raw, 0, len(raw)):
        escapes = raw.count(b"\\", start, stop)
        if escapes and (mask_all or _has_many_escapes(raw, start, stop, escapes)):
            masked = masked or bytearray(raw)
            masked[start:stop] = _mask_piece(raw[start:stop])
    return raw if masked is None else masked


def _has_many_escapes(raw: bytes, start: int, stop: int, escapes: int) -> bool:
    enough = (stop - start) // BYTES_PER_ESCAPE
    if escapes * NUMERIC_ESCAPE_WEIGHT <= enough:
        return False
    return escapes > enough or escapes + raw.count(rb"\u", start, stop) * (NUMERIC_ESCAPE_WEIGHT - 1) > enough


def _mask_piece(piece: bytes) -> bytes:
    """Replaces all escapes in a piece of JSON by hash signs; see `mask_escapes`.

    If one of the escapes is invalid, keeps some of the backslashes, so that the JSON stays invalid.
    """
    piece = piece.replace(rb"\\", b"##").replace(rb"\"", b"##")  # `\\` first: any `\` left begins an escape
    unmatched = piece.count(b"\\")
    if unmatched:
        unmatched -= piece.translate(_HEX_DIGIT_TO_ZERO).count(_HEXADECIMAL)
    for each in _LETTER_ESCAPES:
        if unmatched:
            unmatched -= piece.count(each)
    return piece if unmatched else piece.translate(_BACKSLASH_TO_HASH)


def has_excess_structure(raw: bytes, limit: int) -> bool:
    """Returns whether JSON has more than `limit` opening brackets, commas and colons outside its strings.

    Callers refuse such JSON, because it takes long to decode: for each of these characters, a decoder takes
    5 ns if it skips a value, and 100 ns if it builds a Python object.
    """
    if sum([_count_structural(raw, start, stop) for start, stop in iter_pieces(raw, 0, len(raw))]) <= limit:
        return False
    smooth = mask_escapes(raw, mask_all=True)
    total = offset = 0
    for start, stop in iter_pieces(raw, 0, len(raw)):
        parts = bytes(smooth[start:stop]).split(b'"')
        outside = b"".join(parts[offset::2])
        total += _count_structural(outside, 0, len(outside))
        if total > limit:
            return True
        offset = (offset + len(parts) - 1) % 2
    return False


def _count_structural(raw: bytes, start: int, stop: int) -> int:
    return sum([raw.count(each, start, stop) for each in _STRUCTURAL])


_KEY = re.compile(rb'\s*[{,]\s*("[^"\\]*+(?:\\.[^"\\]*+)*+")\s*:\s*')
_SPACE = re.compile(rb"[ \t\n\r]*")
_BEFORE_ELEMENT = re.compile(rb"\s*[\[,]\s*")
_UTF8 = codecs.getincrementaldecoder("utf-8")


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(constant)


# Decodes like `json.loads`, but refuses NaN and Infinity, which are not JSON.
DECODER = json.JSONDecoder(parse_constant=_refuse_constant)

# `_MEMBERS` decodes an object, and `_ELEMENTS` an array. They do not decode the values in the object or
# array, but return them as JSON.
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ELEMENTS = msgspec.json.Decoder(list[msgspec.Raw])
# In one call, `_check_utf8` decodes at most `_BATCH_BYTES` bytes, and `_copy_elements` copies at most
# `_BATCH_ELEMENTS` elements, because a call holds the interpreter lock until it ends.
_BATCH_BYTES = 256 * 1024
_BATCH_ELEMENTS = 4_096
# `_decode_container` decodes JSON of at most this many bytes as it is. In longer JSON, it first replaces
# escapes (`mask_escapes`). Decoding JSON of this length takes at most 4 ms, even if it consists of escapes.
SHORT_BYTES = 960 * 1024
# `find_members` refuses JSON with more opening brackets, commas and colons outside strings than this, because
# no model could read it.
MAX_STRUCTURAL = 1_000_000
# `find_members` refuses an object with more members than this, because no request or message has that many.
# The limit saves memory: each member takes at least 300 bytes.
MAX_MEMBERS = 10_000
# `split_elements` refuses an array whose elements are too short, because each element takes at least 140
# bytes of memory. It checks an array that has more than `MAX_UNCHECKED_ARRAY_BYTES` bytes and more than one
# comma per `MIN_ELEMENT_BYTES` bytes. It refuses such an array if its elements are not objects, or have fewer
# than `MIN_ELEMENT_BYTES` bytes on average. Every message has more bytes than this.
MAX_UNCHECKED_ARRAY_BYTES = 16 * 1024
MIN_ELEMENT_BYTES = 8

_Container = TypeVar("_Container")


class _AnyObject(msgspec.Struct, gc=False):
    """A JSON object of any kind. The decoder skips all its members."""


_OBJECTS = msgspec.json.Decoder(list[_AnyObject])


class Slice(NamedTuple):
    """The position of a value in JSON: the offsets of its first byte and of the first byte after it."""

    start: int
    stop: int


def find_members(raw: bytes) -> dict[str, Slice]:
    """Returns the positions of the values of a JSON object, by key.

    Raises:
        UnreadableBodyError: With the reason `not-json` if `raw` is not a JSON object. With the reason
            `too-many` if it exceeds `MAX_MEMBERS` or `MAX_STRUCTURAL`. With the reason `duplicate-keys` if
            two keys are equal; keys that differ only in their escapes may be treated as equal. With the
            reason `too-deep` if it is nested too deeply.
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
    """Returns the position of the first byte at or after `start` that is not white space."""
    space = _SPACE.match(raw, start)
    return space.end() if space else start


def split_elements(raw: bytes | memoryview) -> tuple[bytes, ...]:
    """Returns the elements of a JSON array. Each is a copy of its bytes, so that `raw` can be freed.

    Raises:
        UnreadableBodyError: With the reason `no-array` if `raw` is not a JSON array. With the reason
            `too-many` if the array has more than `MAX_UNCHECKED_ARRAY_BYTES` bytes and many commas, and its
            elements are shorter than `MIN_ELEMENT_BYTES` on average or are not objects. With the reason
            `too-deep` if it is nested too deeply.
    """
    whole = bytes(raw)
    if len(whole) > MAX_UNCHECKED_ARRAY_BYTES and whole.count(b",") * MIN_ELEMENT_BYTES > len(whole):
        _refuse_short_elements(whole)
    smooth, decoded = _decode_container(_ELEMENTS, whole, "no-array")
    return _copy_elements(decoded) if smooth is whole else _find_elements(whole, decoded)


def _refuse_short_elements(raw: bytes) -> None:
    """Checks that all elements of an array are objects and have enough bytes on average.

    Raises:
        UnreadableBodyError: With the reason `too-many` if an element is not an object, or if the elements
            have fewer than `MIN_ELEMENT_BYTES` bytes on average. With the reason `too-deep` if the array is
            nested too deeply.
    """
    _, objects = _decode_container(_OBJECTS, raw, "too-many")
    if len(objects) * MIN_ELEMENT_BYTES > len(raw):
        raise UnreadableBodyError("too-many")


def _decode_container(
    decoder: msgspec.json.Decoder[_Container], raw: bytes, reason: str
) -> tuple[bytes | bytearray, _Container]:
    """Splits an object or array into its values with `decoder`, which does not decode the values.

    Returns the JSON that the decoder was given, and the decoder's result. This JSON is `raw` itself, or a
    copy in which `mask_escapes` has replaced escapes.

    Raises:
        UnreadableBodyError: With the given `reason` if the JSON is invalid or not of the decoder's type. With
            the reason `too-deep` if it is nested too deeply.
    """
    try:
        try:
            smooth = mask_escapes(raw) if len(raw) > SHORT_BYTES else raw
            return smooth, decoder.decode(smooth)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            smooth = mask_escapes(raw, mask_all=True)
            return smooth, decoder.decode(smooth)
    except RecursionError:
        raise UnreadableBodyError("too-deep") from None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise UnreadableBodyError(reason) from None


def _find_elements(raw: bytes, values: list[msgspec.Raw]) -> tuple[bytes, ...]:
    """Returns the elements of an array. Finds them by the lengths of the elements in a copy of the array.

    Args:
        raw: The array.
        values: The elements of the copy, in which `mask_escapes` has replaced the escapes. They have the same
            lengths as the elements of `raw`.
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
