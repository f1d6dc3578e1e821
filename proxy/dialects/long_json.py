"""Messages of megabytes: decoded in pieces, because the interpreter lock is held for as long as a call takes.

A text or an image is one string of a message. So the containers around it are taken apart without looking
into their values, long strings are decoded a piece at a time, and everything else at once. What comes out,
and what is refused, is the same as for the whole.
"""

import base64
import hashlib
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from proxy.dialects.json_slices import DECODER, ELEMENTS, MEMBERS
from proxy.errors import Unreadable

# What is shorter is decoded at once.
LONG_BYTES = 128 * 1024
# Of a string, in bytes; of base64, in characters; whole groups of four.
PIECE_BYTES = 64 * 1024
# How deep long values are looked for: content, part, what it carries, its text.
_DEPTH = 4
# Containers with more items than this are decoded at once: there it is the items that take long.
_MANY = 10_000
# No escape is longer, in bytes: a pair of surrogates.
_ESCAPE_BYTES = 12
_LOW_SURROGATE = re.compile(rb"\\u[dD][c-fC-F]..", re.DOTALL)
_CONTINUES, _CONTINUATION = 0xC0, 0x80


def value(raw: bytes, depth: int = _DEPTH) -> Any:
    """The value of JSON without white space around it.

    Raises:
        Unreadable: `not-json` or `too-deep`.
    """
    if len(raw) <= LONG_BYTES or not depth:
        return plain(raw)
    try:
        return _inside(raw, depth)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return plain(raw)  # refuses what is no JSON, but not lone surrogates


def _inside(raw: bytes, depth: int) -> Any:
    if raw.startswith(b'"') and raw.endswith(b'"'):
        return "".join([_string(b'"%b"' % raw[start:stop]) for start, stop in pieces(raw)])
    if raw.startswith(b"{"):
        members = MEMBERS.decode(raw)
        if len(members) <= _MANY:
            return {key: value(bytes(each), depth - 1) for key, each in members.items()}
    if raw.startswith(b"["):
        elements = ELEMENTS.decode(raw)
        if len(elements) <= _MANY:
            return [value(bytes(each), depth - 1) for each in elements]
    return plain(raw)


def plain(raw: bytes) -> Any:
    """The value of JSON, decoded at once.

    Raises:
        Unreadable: `not-json` or `too-deep`.
    """
    try:
        return msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        try:
            return DECODER.decode(raw.decode())
        except (ValueError, RecursionError):
            raise Unreadable("not-json") from None
    except RecursionError:
        raise Unreadable("too-deep") from None


def _string(raw: bytes) -> str:
    text = plain(raw)
    if not isinstance(text, str):
        raise Unreadable("not-json")
    return text


def pieces(raw: bytes) -> Iterator[tuple[int, int]]:
    """Where the pieces of a JSON string stand, its quotes left out; none ends inside a character."""
    start, end = 1, len(raw) - 1
    while start < end:
        stop = _stop(raw, start, start + PIECE_BYTES) if start + PIECE_BYTES < end else end
        yield start, min(stop, end)
        start = stop


def _stop(raw: bytes, start: int, stop: int) -> int:
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


def base64_sha256(text: str) -> bytes:
    """SHA-256 of what base64 says.

    Raises:
        ValueError: It is none.
    """
    hasher = hashlib.sha256()
    # Padding, and what stands in front of it, is left to the decoder to judge.
    padded = text.find("=")
    whole = (len(text) if padded < 0 else padded) // 4 * 4
    whole = max(0, whole - 4) if whole < len(text) or padded >= 0 else whole
    for start in range(0, whole, PIECE_BYTES):
        hasher.update(base64.b64decode(text[start : min(start + PIECE_BYTES, whole)], validate=True))
    hasher.update(base64.b64decode(text[whole:], validate=True))
    return hasher.digest()
