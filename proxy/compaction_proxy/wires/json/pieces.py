"""Where JSON may be cut, and its escapes made harmless: a decoder takes up to ten times as long over them.

The interpreter lock is held for as long as a call takes, so a call over megabytes must be one that is fast,
and any other gets a piece at a time.
"""

import re
from collections.abc import Iterator

# Of a string, in bytes; of base64, in characters; whole groups of four.
PIECE_BYTES = 64 * 1024
# A decoder takes as long again over a piece with an escape in so many bytes; a numeric one counts as several.
DENSE_BYTES = 5
NUMERIC = 8
# No escape is longer, in bytes: a pair of surrogates.
_ESCAPE_BYTES = 12
_LOW_SURROGATE = re.compile(rb"\\u[dD][c-fC-F]..", re.DOTALL)
_CONTINUES, _CONTINUATION = 0xC0, 0x80
# What stands in for a backslash and what it quotes: outside a string it is as wrong as they are.
_HASH = bytes.maketrans(b"\\", b"#")
_AS_ZERO = bytes.maketrans(b"123456789abcdefABCDEF", b"0" * 21)
_HEXADECIMAL = rb"\u0000"
# Structural characters (RFC 8259 §2) but for closing brackets: each begins a value, or stands behind one.
_STRUCTURAL = (b",", b":", b"[", b"{")
_LETTERS = (rb"\n", rb"\t", rb"\r", rb"\/", rb"\b", rb"\f")


def iter_pieces(raw: bytes, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Where pieces of JSON stand, from `start` to `end`; none ends inside a character, escaped or not.

    Where strings begin and end does not matter; `start` must not be inside a character itself.
    """
    while start < end:
        stop = _find_cut(raw, start, start + PIECE_BYTES) if start + PIECE_BYTES < end else end
        yield start, min(stop, end)
        start = stop


def _find_cut(raw: bytes, start: int, stop: int) -> int:
    """A place near `stop` where a string can be cut, if it can be at `start`."""
    last = raw.rfind(b"\\", stop - _ESCAPE_BYTES, stop)
    if last >= 0:
        run = raw[start : last + 1]
        if (len(run) - len(run.rstrip(b"\\"))) % 2 == 0:
            return last + 1  # it is escaped itself
        # It begins an escape. Only the second half of a pair belongs to what stands before.
        pair = _LOW_SURROGATE.match(raw, last)
        return pair.end() if pair else last
    for back in range(stop, stop - 4, -1):
        if raw[back] & _CONTINUES != _CONTINUATION:
            return back
    return stop


def mask_escapes(raw: bytes, *, mask_all: bool = False) -> bytes | bytearray:
    """JSON with the same values in the same places, and hash signs for its escapes; or `raw` itself.

    Whatever is no escape stays, so what is no JSON is none afterwards. Lone surrogates are escapes like any.

    Args:
        raw: The JSON.
        mask_all: Replace every escape, not only where there are many.
    """
    made: bytearray | None = None
    for start, stop in iter_pieces(raw, 0, len(raw)):
        escapes = raw.count(b"\\", start, stop)
        if escapes and (mask_all or _has_many_escapes(raw, start, stop, escapes)):
            made = made or bytearray(raw)
            made[start:stop] = _mask_piece(raw[start:stop])
    return raw if made is None else made


def _has_many_escapes(raw: bytes, start: int, stop: int, escapes: int) -> bool:
    enough = (stop - start) // DENSE_BYTES
    if escapes * NUMERIC <= enough:
        return False
    return escapes > enough or escapes + raw.count(rb"\u", start, stop) * (NUMERIC - 1) > enough


def _mask_piece(piece: bytes) -> bytes:
    """The same for a piece that ends with no half of an escape; as it is, if there is one that is none."""
    piece = piece.replace(rb"\\", b"##").replace(rb"\"", b"##")  # in this order: from now on `\` begins one
    left = piece.count(b"\\")
    if left:
        left -= piece.translate(_AS_ZERO).count(_HEXADECIMAL)
    for each in _LETTERS:
        if left:
            left -= piece.count(each)
    return piece if left else piece.translate(_HASH)


def has_excess_structure(raw: bytes, most: int) -> bool:
    """Whether more than `most` brackets open, and commas and colons stand, outside the strings of JSON.

    A decoder takes 5 ns for each to pass over it, and 100 ns to make something of it.
    """
    if sum([_count_structural(raw, start, stop) for start, stop in iter_pieces(raw, 0, len(raw))]) <= most:
        return False
    smooth = mask_escapes(raw, mask_all=True)
    found = inside = 0
    for start, stop in iter_pieces(raw, 0, len(raw)):
        parts = bytes(smooth[start:stop]).split(b'"')
        outside = b"".join(parts[inside::2])
        found += _count_structural(outside, 0, len(outside))
        if found > most:
            return True
        inside = (inside + len(parts) - 1) % 2
    return False


def _count_structural(raw: bytes, start: int, stop: int) -> int:
    return sum([raw.count(each, start, stop) for each in _STRUCTURAL])
