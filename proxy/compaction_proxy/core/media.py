"""Estimates the tokens of images, audio and files by the rules that each family of models publishes.

The code of each wire reads the size of an image, audio or file from the request, without fetching anything,
and passes it to this module. An image of unknown size counts as the largest possible image. The estimates
need not be exact, because calibration corrects them by the `usage` that the upstream reports.
"""

import base64
import binascii
import math
import struct
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from compaction_proxy.core.model_names import find_by_prefix, is_new_claude, normalize_model_name

_HEADER_CHARACTERS = 64 * 1024  # at most this much base64 is decoded; a JPEG may have more before its size
_WEBP_CHUNKS_BYTES = 30  # enough for the fixed part of every variant of WebP


class ImageSize(NamedTuple):
    """Width and height in pixels, both at least 1."""

    width: int
    height: int


def _read_png_size(data: bytes) -> ImageSize | None:
    if len(data) < 24 or data[12:16] != b"IHDR":
        return None
    return ImageSize(*struct.unpack_from(">II", data, 16))


def _read_gif_size(data: bytes) -> ImageSize | None:
    return ImageSize(*struct.unpack_from("<HH", data, 6)) if len(data) >= 10 else None


def _read_jpeg_size(data: bytes) -> ImageSize | None:
    offset = 2
    while offset + 4 <= len(data) and data[offset] == 0xFF:
        marker = data[offset + 1]
        # The markers C0 to CF begin frame headers, which contain the size. Only C4, C8 and CC mean something
        # else.
        if 0xC0 <= marker <= 0xCF and marker not in {0xC4, 0xC8, 0xCC} and offset + 9 <= len(data):
            height, width = struct.unpack_from(">HH", data, offset + 5)
            return ImageSize(width, height)
        is_fill_byte = marker == 0xFF
        offset += 1 if is_fill_byte else 2 + int.from_bytes(data[offset + 2 : offset + 4], "big")
    return None


def _read_webp_size(data: bytes) -> ImageSize | None:
    if len(data) < _WEBP_CHUNKS_BYTES or data[8:12] != b"WEBP":
        return None
    match data[12:16]:
        case b"VP8X":
            return ImageSize(
                1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
            )
        case b"VP8L":
            bits = int.from_bytes(data[21:25], "little")
            return ImageSize(1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF))
        case b"VP8 ":
            width, height = struct.unpack_from("<HH", data, 26)
            return ImageSize(width & 0x3FFF, height & 0x3FFF)
    return None


_FORMATS = {
    b"\x89PNG\r\n\x1a\n": _read_png_size,
    b"GIF8": _read_gif_size,
    b"\xff\xd8\xff": _read_jpeg_size,
    b"RIFF": _read_webp_size,
}


def read_image_size(data: bytes) -> ImageSize | None:
    """Reads the size of an image from its first bytes.

    Returns None if the bytes do not contain the size, or if the format is unknown.
    """
    for magic, read_size in _FORMATS.items():
        if data.startswith(magic):
            size = read_size(data)
            return size if size and min(size) > 0 else None
    return None


def decode_data_url_header(url: str) -> bytes:
    """Decodes the first bytes of a base64 data URL.

    Returns empty bytes for any other URL and for invalid base64.
    """
    head, comma, payload = url[: _HEADER_CHARACTERS + 256].partition(",")
    if not (comma and head[:5].lower() == "data:" and head.lower().endswith(";base64")):
        return b""
    payload = payload[: min(len(payload), _HEADER_CHARACTERS) // 4 * 4]
    try:
        return base64.b64decode(payload)
    except (binascii.Error, ValueError):
        return b""


# Limits for the longest and for the shortest side of an image that is cut into tiles, and the side of a tile,
# in pixels.
_TILED_LONG_PIXELS, _TILED_SHORT_PIXELS, _TILE_PIXELS = 2048, 768, 512
# Gemini models cut a large image into square crops. These are the tokens of a crop, the side of a crop in
# pixels, and the longest side in pixels of an image that is not cut.
_CROP_TOKENS, _CROP_PIXELS, _UNCROPPED_PIXELS = 258, 768, 384
UNKNOWN_IMAGE_TOKENS = 1000  # for a model without a published rule
_OPENAI_AUDIO_TOKENS_PER_S = 10
_GEMINI_AUDIO_TOKENS_PER_S = 32
_WAV_BYTES_PER_S = 32_000  # 16 kHz, 16 bit, one channel
_CODED_AUDIO_BYTES_PER_S = 8_000  # 64 kbit/s
_FILE_TOKENS = 192  # for every file, regardless of its size
_FILE_BYTES_PER_TOKEN = 20  # for a compressed PDF of text and fonts
_FILE_MAX_TOKENS = 150_000  # providers accept a hundred pages, at 1,500 tokens each
UNSEEN_FILE_TOKENS = 1000  # for a file of unknown size, given only by an id or a URL


# A function that returns the tokens of an image of a given size. None means that the size is unknown.
ImageCost = Callable[[ImageSize | None], int]


def _scale_to_fit(size: ImageSize, max_edge_pixels: int) -> tuple[float, float]:
    """Scales a size down, in proportion, until neither side is longer than `max_edge_pixels` pixels."""
    scale = min(1.0, max_edge_pixels / max(size))
    return max(1.0, size.width * scale), max(1.0, size.height * scale)


def _count_flat(_: ImageSize | None, *, tokens: int) -> int:
    """Returns the tokens of an image by the rule of models that charge the same for every image."""
    return tokens


def _count_tiles(size: ImageSize | None, *, base_tokens: int, tile_tokens: int) -> int:
    """Returns the tokens of an image by the rule of models that cut it into square tiles.

    The image is first scaled down until its longest side has at most 2,048 pixels, then until its shortest
    side has at most 768 pixels. Then it is cut into tiles of 512 by 512 pixels. An unknown size counts as
    2,048 by 768 pixels. An image takes `base_tokens`, and `tile_tokens` for each tile.
    """
    width, height = _scale_to_fit(
        size or ImageSize(_TILED_LONG_PIXELS, _TILED_SHORT_PIXELS), _TILED_LONG_PIXELS
    )
    scale = min(1.0, _TILED_SHORT_PIXELS / min(width, height))
    tiles = math.ceil(width * scale / _TILE_PIXELS) * math.ceil(height * scale / _TILE_PIXELS)
    return base_tokens + tile_tokens * tiles


def _count_patches(
    size: ImageSize | None,
    *,
    max_patches: int,
    tokens_per_patch: float = 1.0,
    patch_side_pixels: int = 32,
    max_edge_pixels: int = 0,
) -> int:
    """Returns the tokens of an image by the rule of models that cut it into square patches.

    The image is first scaled down until its longest side has at most `max_edge_pixels` pixels, if that number
    is not 0. An image of unknown size, or with more than `max_patches` patches, counts as `max_patches`
    patches. The provider shrinks an image that has more patches. The shrunk image may have fewer than
    `max_patches` patches, by up to one row.
    """
    if size is None:
        return math.ceil(max_patches * tokens_per_patch)
    width, height = _scale_to_fit(size, max_edge_pixels) if max_edge_pixels else size
    patches = math.ceil(width / patch_side_pixels) * math.ceil(height / patch_side_pixels)
    return math.ceil(min(patches, max_patches) * tokens_per_patch)


def _count_crops(size: ImageSize | None) -> int:
    """Returns the tokens of an image by the rule of Gemini models.

    An image with no side longer than 384 pixels takes 258 tokens. A larger image is cut into crops of 768 by
    768 pixels, and each crop takes 258 tokens. An image of unknown size counts as 16 crops.
    """
    if size is None:
        return 16 * _CROP_TOKENS
    if max(size) <= _UNCROPPED_PIXELS:
        return _CROP_TOKENS
    return _CROP_TOKENS * math.ceil(size.width / _CROP_PIXELS) * math.ceil(size.height / _CROP_PIXELS)


def _build_tiled_costs(base_tokens: int, tile_tokens: int) -> dict[str, ImageCost]:
    return {
        "low": partial(_count_flat, tokens=base_tokens),
        "high": partial(_count_tiles, base_tokens=base_tokens, tile_tokens=tile_tokens),
    }


_GPT_HIGH = partial(_count_patches, max_patches=2500, tokens_per_patch=1.2, max_edge_pixels=2048)
_GPT_ORIGINAL = partial(_count_patches, max_patches=10_000, tokens_per_patch=1.2, max_edge_pixels=6000)
_GPT_HUGE = partial(_count_patches, max_patches=30_000, tokens_per_patch=1.2)
_GPT_LOW = partial(_count_patches, max_patches=256, tokens_per_patch=1.2, max_edge_pixels=512)
# Functions that count the tokens of an image, by a prefix of the model's name and by the detail that the
# client asks for. If several prefixes fit a name, the longest one counts. A detail without an entry counts as
# `high`. The numbers come from the providers' documents and LiteLLM's tables of 2026-11. OpenAI's own pages
# contradict each other.
_IMAGE_COSTS: Mapping[str, Mapping[str, ImageCost]] = {
    "gpt-4o": _build_tiled_costs(85, 170),
    "chatgpt-4o": _build_tiled_costs(85, 170),
    "gpt-4-": _build_tiled_costs(85, 170),
    "gpt-4.1": _build_tiled_costs(85, 170),
    "gpt-4o-mini": _build_tiled_costs(2833, 5667),
    "gpt-5": _build_tiled_costs(70, 140),
    "o1": _build_tiled_costs(75, 150),
    "o3": _build_tiled_costs(75, 150),
    "gpt-4.1-mini": {"high": partial(_count_patches, max_patches=1536, tokens_per_patch=1.62)},
    "gpt-4.1-nano": {"high": partial(_count_patches, max_patches=1536, tokens_per_patch=2.46)},
    "o4-mini": {"high": partial(_count_patches, max_patches=1536, tokens_per_patch=1.72)},
    "gpt-5-mini": {"high": partial(_count_patches, max_patches=1536, tokens_per_patch=1.62)},
    "gpt-5-nano": {"high": partial(_count_patches, max_patches=1536, tokens_per_patch=2.46)},
    "gpt-5.2": {
        "high": partial(_count_patches, max_patches=6144, tokens_per_patch=1.2, max_edge_pixels=2048)
    },
    "gpt-5.4": {
        "low": partial(_count_patches, max_patches=6144, tokens_per_patch=1.2, max_edge_pixels=2048),
        "high": _GPT_HIGH,
        "original": _GPT_ORIGINAL,
    },
    "gpt-5.5": {"low": _GPT_LOW, "high": _GPT_HIGH, "auto": _GPT_ORIGINAL, "original": _GPT_ORIGINAL},
    "gpt-5.6": {"low": _GPT_LOW, "high": _GPT_HIGH, "auto": _GPT_HUGE, "original": _GPT_HUGE},
    "gpt-6": {"low": _GPT_LOW, "high": _GPT_HIGH, "auto": _GPT_HUGE, "original": _GPT_HUGE},
    "claude": {"high": partial(_count_patches, max_patches=4784, patch_side_pixels=28, max_edge_pixels=2576)},
    "gemini": {"high": _count_crops},
}
_CLAUDE_OLD: Mapping[str, ImageCost] = {
    "high": partial(_count_patches, max_patches=1568, patch_side_pixels=28, max_edge_pixels=1568)
}


def estimate_image_tokens(model: str, size: ImageSize | None, detail: str = "auto") -> int:
    """Estimates the tokens of one image.

    Returns `UNKNOWN_IMAGE_TOKENS` for a model without a published rule.

    Args:
        model: Name of the model, with or without a router's prefix.
        size: Size of the image in pixels. None means that the size is unknown, and counts as the largest
            possible size.
        detail: Detail that the client asked for: `low`, `high`, `auto` or `original`.
    """
    name = normalize_model_name(model)
    costs = find_by_prefix(name, _IMAGE_COSTS)
    if name.startswith("claude") and not is_new_claude(name):
        costs = _CLAUDE_OLD
    return costs.get(detail, costs["high"])(size) if costs else UNKNOWN_IMAGE_TOKENS


def estimate_image_url_tokens(model: str, url: str, detail: str = "auto") -> int:
    """Estimates the tokens of the image behind a URL.

    Only data URLs are decoded. Nothing is fetched, so the image behind any other URL has an unknown size.
    """
    return estimate_image_tokens(model, read_image_size(decode_data_url_header(url)), detail)


def estimate_audio_tokens(model: str, size_bytes: int, container: str) -> int:
    """Estimates the tokens of a piece of audio, whose duration is estimated from its size.

    Args:
        model: Name of the model.
        size_bytes: Size of the audio in bytes, which is three quarters of the length of its base64 text.
        container: `wav` or `pcm16` (assumed to be 16 kHz, 16 bit, mono), or the name of a compressed format
            (assumed to have 64 kbit/s).
    """
    rate = _WAV_BYTES_PER_S if container in {"wav", "pcm16"} else _CODED_AUDIO_BYTES_PER_S
    per_second = _GEMINI_AUDIO_TOKENS_PER_S if "gemini" in model.lower() else _OPENAI_AUDIO_TOKENS_PER_S
    return math.ceil(size_bytes / rate * per_second)


def estimate_file_tokens(size_bytes: int | None) -> int:
    """Estimates the tokens of a file such as a PDF.

    A file counts as 192 tokens, plus one token for each 20 bytes. Its bytes count as at most 150,000 tokens.
    A file of unknown size counts as 1,000 tokens.

    Args:
        size_bytes: Size of the file in bytes; None if only an id or a URL is given.
    """
    if size_bytes is None:
        return UNSEEN_FILE_TOKENS
    return _FILE_TOKENS + min(_FILE_MAX_TOKENS, math.ceil(size_bytes / _FILE_BYTES_PER_TOKEN))
