"""Decodes request bodies that are encoded as a whole (`content-encoding`): zstd, gzip, deflate and br.

Every step is bounded: the size of what comes out, the memory that a stream may ask for, and the number of
streams that follow one another. The time follows from these and from the size of what came in.
"""

import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final, Protocol

import brotli

from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.wires.decompress import GZIP, IDENTITY, detect_window_bits

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

# An encoded body may be encoded once more, and no oftener.
MAX_CODINGS: Final = 2
# A body may consist of so many gzip members or zstd frames. Each one costs a decoder.
MAX_MEMBERS: Final = 256
# The window of a zstd frame has at most so many bytes, as a logarithm: the bound of RFC 9659 for HTTP.
MAX_WINDOW_LOG: Final = 23
# Decoders are given so much at once. What follows a member is copied, and this bounds the copies.
_STEP_BYTES: Final = 65_536
# Brotli's output buffer grows in large blocks; it gives back so much at once.
_OUTPUT_BYTES: Final = 1_048_576
_GZIP_BITS: Final = 16 + zlib.MAX_WBITS
_HEAD_BYTES: Final = 2


class Decoder(Protocol):
    """Decodes one gzip member, zlib stream or zstd frame."""

    @property
    def eof(self) -> bool:
        """Whether its end was reached."""

    @property
    def unused_data(self) -> bytes:
        """What was given beyond its end."""

    def decompress(self, data: memoryview, max_length: int, /) -> bytes:
        """Returns what `data` adds, at most `max_length` bytes."""


def parse_codings(values: Iterable[bytes]) -> tuple[str, ...] | None:
    """Returns the codings of a body in the order in which they were applied; empty if there are none.

    None stands for codings that cannot be undone: they are unknown, or too many.

    Args:
        values: The values of all its `content-encoding` fields.
    """
    names = (name.strip().lower().decode("latin-1") for value in values for name in value.split(b","))
    codings = tuple(name for name in names if name not in IDENTITY)
    if len(codings) > MAX_CODINGS or not _DECODE.keys() >= set(codings):
        return None
    return codings


def decode_body(raw: bytes, codings: Sequence[str], limit_bytes: int) -> bytes | None:
    """Returns a body as it was before it was encoded; None if it is longer than the limit.

    Args:
        raw: The body as it came.
        codings: What `parse_codings` gave.
        limit_bytes: The most that any coding may decode to.

    Raises:
        Unreadable: `encoded`, the body is damaged or torn, or a decoder would need too much memory.
    """
    decoded: bytes | None = raw
    try:
        for coding in reversed(codings):
            if decoded is not None:
                decoded = _DECODE[coding](decoded, limit_bytes)
    except (zlib.error, zstd.ZstdError, brotli.error):
        raise UnreadableBodyError("encoded") from None
    return decoded


def _decode_members(
    raw: bytes, limit_bytes: int, open_decoder: Callable[[bytes], Decoder], max_members: int
) -> bytes | None:
    """Decode streams that follow one another, each to its end."""
    view, start, remaining_bytes, parts = memoryview(raw), 0, limit_bytes, []
    for _ in range(max_members):
        decoder = open_decoder(raw[start : start + _HEAD_BYTES])
        while not decoder.eof:
            piece = view[start : start + _STEP_BYTES]
            if not piece:
                raise UnreadableBodyError("encoded")
            part = decoder.decompress(
                piece, remaining_bytes + 1
            )  # with room for more, it takes all of the piece
            remaining_bytes -= len(part)
            if remaining_bytes < 0:
                return None
            parts.append(part)
            start += len(piece) - len(decoder.unused_data)
        if start == len(raw):
            return b"".join(parts)
    raise UnreadableBodyError("encoded")


def _open_gzip(_: bytes) -> Decoder:
    return zlib.decompressobj(_GZIP_BITS)


def _open_deflate(head: bytes) -> Decoder:
    if len(head) < _HEAD_BYTES:
        raise UnreadableBodyError("encoded")
    return zlib.decompressobj(detect_window_bits(head))


def _open_zstd(_: bytes) -> Decoder:
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: MAX_WINDOW_LOG})


def _decode_br(raw: bytes, limit_bytes: int) -> bytes | None:
    decoder, remaining_bytes, parts = brotli.Decompressor(), limit_bytes, []
    data = raw
    while True:
        part: bytes = decoder.process(data, output_buffer_limit=min(remaining_bytes + 1, _OUTPUT_BYTES))
        remaining_bytes -= len(part)
        if remaining_bytes < 0:
            return None
        parts.append(part)
        if decoder.is_finished():
            return b"".join(parts)
        if decoder.can_accept_more_data():
            raise UnreadableBodyError("encoded")
        data = b""


_decode_gzip = partial(_decode_members, open_decoder=_open_gzip, max_members=MAX_MEMBERS)
_DECODE: Final[Mapping[str, Callable[[bytes, int], bytes | None]]] = {
    "br": _decode_br,
    "deflate": partial(_decode_members, open_decoder=_open_deflate, max_members=1),
    "zstd": partial(_decode_members, open_decoder=_open_zstd, max_members=MAX_MEMBERS),
    **dict.fromkeys(GZIP, _decode_gzip),
}
