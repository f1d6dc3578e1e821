"""Reading the size of an image from its first bytes, without decoding it: PNG, JPEG, GIF and WebP."""

import base64
import binascii
import struct
from collections.abc import Iterator
from typing import NamedTuple

_HEADER_CHARACTERS = 64 * 1024  # of base64; a JPEG with more metadata than that stays unknown
_WEBP_CHUNKS_BYTES = 30  # enough for the fixed part of every WebP flavour


class Size(NamedTuple):
    """Width and height in pixels, both at least 1."""

    width: int
    height: int


def _png(data: bytes) -> Size | None:
    if len(data) < 24 or data[12:16] != b"IHDR":
        return None
    return Size(*struct.unpack_from(">II", data, 16))


def _gif(data: bytes) -> Size | None:
    return Size(*struct.unpack_from("<HH", data, 6)) if len(data) >= 10 else None


def _segments(data: bytes) -> Iterator[tuple[int, int]]:
    """Marker and payload offset of each JPEG segment up to the image data or the end of what is there."""
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
            continue
        yield marker, at + 4
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")


def _jpeg(data: bytes) -> Size | None:
    for marker, at in _segments(data):
        # The frame headers; C4, C8 and CC of their range are something else.
        if 0xC0 <= marker <= 0xCF and marker not in {0xC4, 0xC8, 0xCC} and at + 5 <= len(data):
            height, width = struct.unpack_from(">HH", data, at + 1)
            return Size(width, height)
    return None


def _webp(data: bytes) -> Size | None:
    if len(data) < _WEBP_CHUNKS_BYTES or data[8:12] != b"WEBP":
        return None
    match data[12:16]:
        case b"VP8X":
            return Size(1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little"))
        case b"VP8L":
            bits = int.from_bytes(data[21:25], "little")
            return Size(1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF))
        case b"VP8 ":
            width, height = struct.unpack_from("<HH", data, 26)
            return Size(width & 0x3FFF, height & 0x3FFF)
    return None


_FORMATS = {b"\x89PNG\r\n\x1a\n": _png, b"GIF8": _gif, b"\xff\xd8\xff": _jpeg, b"RIFF": _webp}


def image_size(data: bytes) -> Size | None:
    """The size of an image from its beginning, or None where that does not tell."""
    for magic, read in _FORMATS.items():
        if data.startswith(magic):
            size = read(data)
            return size if size and min(size) > 0 else None
    return None


def data_url_header(url: str) -> bytes:
    """The first bytes that a base64 data URL carries; empty for other URLs and for what does not decode."""
    head, comma, payload = url[: _HEADER_CHARACTERS + 256].partition(",")
    if not (comma and head[:5].lower() == "data:" and head.lower().endswith(";base64")):
        return b""
    payload = payload[: min(len(payload), _HEADER_CHARACTERS) // 4 * 4]
    try:
        return base64.b64decode(payload)
    except (binascii.Error, ValueError):
        return b""
