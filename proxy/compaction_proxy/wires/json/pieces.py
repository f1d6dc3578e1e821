"""Finds where JSON can be cut into pieces, and masks its escapes.

A decoder takes up to ten times as long for JSON with many escapes, and each call holds the interpreter lock
until it ends. So only fast functions get megabytes of JSON in one call; all others get one piece at a time.
"""

import re
from collections.abc import Iterator

# The size of a piece: in bytes for JSON, in characters (whole groups of four) for base64.
PIECE_BYTES = 64 * 1024
# With one escape in this many bytes, a decoder takes twice as long as without escapes. A numeric escape, such
# as `\u00e9`, counts as `NUMERIC_ESCAPE_WEIGHT` escapes.
BYTES_PER_ESCAPE = 5
NUMERIC_ESCAPE_WEIGHT = 8
# The length of the longest escape, a pair of surrogates, in bytes.
_ESCAPE_BYTES = 12
_LOW_SURROGATE = re.compile(rb"\\u[dD][c-fC-F]..", re.DOTALL)
_CONTINUATION_MASK, _CONTINUATION = 0xC0, 0x80
# Masking replaces a backslash by a hash sign. Outside a string, both are invalid, so invalid JSON stays
# invalid.
_BACKSLASH_TO_HASH = bytes.maketrans(b"\\", b"#")
_HEX_DIGIT_TO_ZERO = bytes.maketrans(b"123456789abcdefABCDEF", b"0" * 21)
_HEXADECIMAL = rb"\u0000"
# Structural characters (RFC 8259 §2) except closing brackets. JSON has about as many values as it has of
# these characters.
_STRUCTURAL = (b",", b":", b"[", b"{")
_LETTER_ESCAPES = (rb"\n", rb"\t", rb"\r", rb"\/", rb"\b", rb"\f")


def iter_pieces(raw: bytes, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yields the start and the stop of each piece of the JSON from `start` to `end`.

    No piece ends inside a character or an escape, but pieces may end inside strings. `start` must not be
    inside a character.
    """
    while start < end:
        stop = _find_cut(raw, start, start + PIECE_BYTES) if start + PIECE_BYTES < end else end
        yield start, min(stop, end)
        start = stop


def _find_cut(raw: bytes, start: int, stop: int) -> int:
    """Returns a position near `stop` where JSON can be cut. `start` must itself be such a position."""
    last = raw.rfind(b"\\", stop - _ESCAPE_BYTES, stop)
    if last >= 0:
        run = raw[start : last + 1]
        if (len(run) - len(run.rstrip(b"\\"))) % 2 == 0:
            return last + 1  # the backslash is escaped itself
        # The backslash begins an escape, so the piece ends before it. But if this escape is the second half
        # of a surrogate pair, the piece ends after it.
        pair = _LOW_SURROGATE.match(raw, last)
        return pair.end() if pair else last
    for back in range(stop, stop - 4, -1):
        if raw[back] & _CONTINUATION_MASK != _CONTINUATION:
            return back
    return stop


def mask_escapes(raw: bytes, *, mask_all: bool = False) -> bytes | bytearray:
    """Returns the JSON with hash signs in place of its escapes, or `raw` itself if nothing is masked.

    Every value keeps its position. Everything that is not an escape stays, so invalid JSON stays invalid.
    Lone surrogates count as escapes.

    Args:
        raw: The JSON.
        mask_all: Whether to mask every escape. If False, only pieces with many escapes are masked.
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
    """Masks all escapes of a piece. Returns the piece unchanged if one of its escapes is invalid."""
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

    For each of these characters, a decoder takes 5 ns if it skips the value, and 100 ns if it builds a Python
    object from it.
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
