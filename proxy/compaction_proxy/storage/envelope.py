"""The envelope of every stored record: a version byte, a form byte, and the record's fields as JSON.

Byte 0 is the version of the layout. Byte 1 is the form of all later bytes: 0 is plain JSON, 1 is JSON
compressed with zlib, and 2 is a whole encrypted envelope, which `EncryptedStore` decrypts before this module
sees it. The JSON is UTF-8 with sorted keys, so the same fields give the same bytes. Lone surrogates, which
some clients send, are encoded in UTF-8 like any other code point. JSON has no type for bytes, so a record
stores bytes as text, in base64 or hex digits.

Replicas of different versions can share a store. An envelope that cannot be decoded may therefore come from
another version, so `unpack` returns None for it and raises no error.
"""

import json
import zlib
from collections.abc import Mapping
from typing import Any

VERSION = 1
PLAIN = 0
DEFLATED = 1
SEALED = 2
DEFLATE_FROM_BYTES = 1024
MAX_JSON_BYTES = 16 * 1024 * 1024
_HEADER_BYTES = 2
_DEFLATE_LEVEL = 6


def pack(fields: Mapping[str, Any]) -> bytes:
    """Encodes `fields` as an envelope. The values must be JSON values. A tuple becomes a JSON array.

    Raises:
        TypeError: If a value is not a JSON value.
        ValueError: If the JSON would be larger than 16 MiB, or a number is not finite.
    """
    text = json.dumps(fields, ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=True)
    body = text.encode("utf-8", "surrogatepass")
    if len(body) > MAX_JSON_BYTES:
        raise ValueError(f"a record of {len(body)} bytes; {MAX_JSON_BYTES} is the limit")
    if len(body) <= DEFLATE_FROM_BYTES:
        return bytes((VERSION, PLAIN)) + body
    return bytes((VERSION, DEFLATED)) + zlib.compress(body, _DEFLATE_LEVEL)


def _inflate_body(body: bytes) -> bytes | None:
    inflater = zlib.decompressobj()
    try:
        text = inflater.decompress(body, MAX_JSON_BYTES + 1)
    except zlib.error:
        return None
    return text if inflater.eof and not inflater.unused_data else None


def extract_json(data: bytes) -> bytes | None:
    """Returns the JSON text of an envelope.

    Returns None if the version or the form is unknown, if the envelope is encrypted, if the compressed text
    is damaged, or if the text is larger than 16 MiB.
    """
    if len(data) <= _HEADER_BYTES or data[0] != VERSION:
        return None
    body = data[_HEADER_BYTES:]
    if data[1] not in {PLAIN, DEFLATED}:
        return None
    text = _inflate_body(body) if data[1] == DEFLATED else body
    return text if text is not None and len(text) <= MAX_JSON_BYTES else None


def unpack(data: bytes) -> dict[str, Any] | None:
    """Decodes the fields of an envelope. Never raises.

    Returns None if `extract_json` returns None, or if the text is not a JSON object.
    """
    text = extract_json(data)
    if text is None:
        return None
    try:
        fields = json.loads(text.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None
