"""Messages of megabytes: decoded in pieces, because the interpreter lock is held for as long as a call takes.

A text or an image is one string of a message. So the containers around it are taken apart without looking
into their values, long strings are decoded a piece at a time, and everything else at once. What comes out,
and what is refused, is the same as for the whole.
"""

import base64
import hashlib
from typing import Any

import msgspec

from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.wires.json.pieces import PIECE_BYTES, has_excess_structure, iter_pieces
from compaction_proxy.wires.json.slices import DECODER, find_members, split_elements

# What is shorter is decoded at once.
LONG_BYTES = 128 * 1024
# More brackets, commas and colons outside strings are no message that a model could read.
MAX_STRUCTURAL = 60_000
# How deep long values are looked for: content, part, what it carries, its text.
_DEPTH = 4
# Containers with more items than this are decoded at once: there it is the items that take long.
_MANY = 10_000


def decode_value(raw: bytes) -> Any:
    """The value of JSON without white space around it.

    Raises:
        Unreadable: `not-json` or `too-deep`; `too-many` if it is long and holds more than `MAX_STRUCTURAL`.
    """
    if len(raw) > LONG_BYTES and has_excess_structure(raw, MAX_STRUCTURAL):
        raise UnreadableBodyError("too-many")
    return _decode_at_depth(raw, _DEPTH)


def _decode_at_depth(raw: bytes, depth: int) -> Any:
    if len(raw) <= LONG_BYTES:
        return decode_plain(raw)
    if raw.startswith(b'"') and raw.endswith(b'"'):
        strings = [
            _decode_string(b'"%b"' % raw[start:stop]) for start, stop in iter_pieces(raw, 1, len(raw) - 1)
        ]
        del raw  # copies of a long value are let go of as soon as they are taken apart
        return "".join(strings)
    held = _split_container(raw) if depth else None
    if held is None:
        return decode_plain(raw)
    del raw
    if isinstance(held, dict):
        return {key: _decode_at_depth(held.pop(key), depth - 1) for key in list(held)}
    held.reverse()
    return [_decode_at_depth(held.pop(), depth - 1) for _ in range(len(held))]


def _split_container(raw: bytes) -> dict[str, bytes] | list[bytes] | None:
    """What a container holds; None where that is better decoded, or judged, at once."""
    found: dict[str, bytes] | list[bytes] = []
    try:
        if raw.startswith(b"{"):
            found = {key: raw[at.start : at.stop] for key, at in find_members(raw).items()}
        elif raw.startswith(b"["):
            found = list(split_elements(raw))
    except (UnreadableBodyError, RecursionError):
        return None
    return found if 0 < len(found) <= _MANY else None


def decode_plain(raw: bytes) -> Any:
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
            raise UnreadableBodyError("not-json") from None
    except RecursionError:
        raise UnreadableBodyError("too-deep") from None


def _decode_string(raw: bytes) -> str:
    text = decode_plain(raw)
    if not isinstance(text, str):
        raise UnreadableBodyError("not-json")
    return text


def hash_base64(text: str) -> bytes:
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
