"""Decodes megabytes of JSON in pieces, because a call of a decoder holds the interpreter lock until it ends.

Most of a large message is usually one long string: a text or an image. So the objects and arrays around it
are split without decoding their values. Long strings are decoded piece by piece, all other values in one call
each. The result and the errors are the same as if one call decoded the whole message.
"""

import base64
import hashlib
from typing import Any

import msgspec

from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.wires.json.pieces import PIECE_BYTES, has_excess_structure, iter_pieces
from compaction_proxy.wires.json.slices import DECODER, find_members, split_elements

# JSON of at most this many bytes is decoded in one call.
LONG_BYTES = 128 * 1024
# JSON longer than `LONG_BYTES` is refused if it has more opening brackets, commas and colons outside strings
# than this, because no model could read such a message.
MAX_STRUCTURAL = 60_000
# Objects and arrays are searched for long strings to this depth: message, content, part, the part's value.
_MAX_DEPTH = 4
# Objects and arrays with more items are decoded in one call: splitting is of use only for long strings.
_MAX_ITEMS = 10_000


def decode_value(raw: bytes) -> Any:
    """Decodes JSON that has no white space around it.

    Raises:
        UnreadableBodyError: `not-json` or `too-deep`. `too-many` if the JSON is longer than `LONG_BYTES` and
            exceeds `MAX_STRUCTURAL`.
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

    The result is None if the JSON is neither, is invalid or empty, or has too many items. Then it must be
    decoded in one call, which also reports errors.
    """
    values: dict[str, bytes] | list[bytes] = []
    try:
        if raw.startswith(b"{"):
            values = {key: raw[place.start : place.stop] for key, place in find_members(raw).items()}
        elif raw.startswith(b"["):
            values = list(split_elements(raw))
    except (UnreadableBodyError, RecursionError):
        return None
    return values if 0 < len(values) <= _MAX_ITEMS else None


def decode_plain(raw: bytes) -> Any:
    """Decodes JSON in one call.

    Raises:
        UnreadableBodyError: `not-json` or `too-deep`.
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
    """Returns the SHA-256 of the bytes that base64 text encodes.

    Raises:
        ValueError: The text is not base64.
    """
    hasher = hashlib.sha256()
    # The padding is decoded together with the group of four characters before it, as the decoder requires.
    padded = text.find("=")
    whole = (len(text) if padded < 0 else padded) // 4 * 4
    whole = max(0, whole - 4) if whole < len(text) or padded >= 0 else whole
    for start in range(0, whole, PIECE_BYTES):
        hasher.update(base64.b64decode(text[start : min(start + PIECE_BYTES, whole)], validate=True))
    hasher.update(base64.b64decode(text[whole:], validate=True))
    return hasher.digest()
