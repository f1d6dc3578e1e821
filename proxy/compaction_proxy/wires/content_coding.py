"""Decodes request bodies as a whole, and response bodies chunk by chunk, by their `content-encoding`.

A request body may be encoded as zstd, gzip, deflate or br. The module limits the size of the decoded body,
the memory of the decoder, and the number of gzip members or zstd frames. This also limits the decoding time.

The proxy can decompress a response that is encoded as gzip or deflate. It does so only to read the response
itself; the client gets the bytes unchanged. If the proxy cannot decompress a response, it cannot read it, but
forwards it as usual.
"""

import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final

import brotli

from compaction_proxy.core.errors import UnreadableBodyError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

IDENTITY: Final = frozenset({"", "identity"})
GZIP: Final = frozenset({"gzip", "x-gzip"})
# Maximum number of codings of a request body. If more codings were applied to it one after the other, the
# proxy does not decode it.
MAX_CODINGS: Final = 2
# If a request body has more gzip members or zstd frames than this, the proxy does not decode it, because each
# of them needs a new decoder.
MAX_MEMBERS: Final = 256
# If the window of a zstd frame has more than 2**MAX_WINDOW_LOG bytes, the proxy does not decode the frame.
# RFC 9659 sets this limit for HTTP.
MAX_WINDOW_LOG: Final = 23
# Maximum number of bytes of input for one call of a decoder. When a decoder reaches the end of a gzip member
# or a zstd frame, it copies the rest of its input. The limit keeps each of these copies small.
_STEP_BYTES: Final = 65_536
# One call of brotli's decoder returns at most this many bytes. The limit saves memory, because the decoder
# enlarges its output buffer in large steps.
_OUTPUT_BYTES: Final = 1_048_576
_AUTO_BITS: Final = 32 + zlib.MAX_WBITS
_RAW_BITS: Final = -zlib.MAX_WBITS
_GZIP_BITS: Final = 16 + zlib.MAX_WBITS
_HEAD_BYTES: Final = 2


def parse_codings(values: Iterable[bytes]) -> tuple[str, ...] | None:
    """Returns the codings of a body in the order in which they were applied; empty if there are none.

    Returns None if the body cannot be decoded, because a coding is unknown or because there are more than
    `MAX_CODINGS` codings.

    Args:
        values: The values of all `content-encoding` fields.
    """
    names = (name.strip().lower().decode("latin-1") for value in values for name in value.split(b","))
    codings = tuple(name for name in names if name not in IDENTITY)
    if len(codings) > MAX_CODINGS or not _DECODERS.keys() >= set(codings):
        return None
    return codings


def decode_body(raw: bytes, codings: Sequence[str], limit_bytes: int) -> bytes | None:
    """Returns a body as it was before it was encoded; None if it has more than `limit_bytes` bytes.

    Args:
        raw: The body as received.
        codings: The result of `parse_codings`.
        limit_bytes: The largest size of the decoded body, in bytes. If there are several codings, the limit
            applies to the result of decoding each of them.

    Raises:
        UnreadableBodyError: With the reason `encoded` if the body is damaged or incomplete, or if a decoder
            would need too much memory.
    """
    decoded: bytes | None = raw
    try:
        for coding in reversed(codings):
            if decoded is not None:
                decoded = _DECODERS[coding](decoded, limit_bytes)
    except (zlib.error, zstd.ZstdError, brotli.error):
        raise UnreadableBodyError("encoded") from None
    return decoded


def _decode_members(
    raw: bytes,
    limit_bytes: int,
    open_decoder: Callable[[bytes], "zlib._Decompress | zstd.ZstdDecompressor"],
    max_members: int,
) -> bytes | None:
    """Decodes the gzip members, zlib streams or zstd frames of a body, one after the other.

    Returns None if the output has more than `limit_bytes` bytes.

    Raises:
        UnreadableBodyError: With the reason `encoded` if the body is incomplete, or has more than
            `max_members` members, streams or frames.
    """
    view, start, remaining_bytes, parts = memoryview(raw), 0, limit_bytes, []
    for _ in range(max_members):
        decoder = open_decoder(raw[start : start + _HEAD_BYTES])
        while not decoder.eof:
            piece = view[start : start + _STEP_BYTES]
            if not piece:
                raise UnreadableBodyError("encoded")
            # The maximum for the output is one byte more than the limit. So if the output does not exceed the
            # limit, the decoder has not stopped early, but has read the whole piece of input.
            part = decoder.decompress(piece, remaining_bytes + 1)
            remaining_bytes -= len(part)
            if remaining_bytes < 0:
                return None
            parts.append(part)
            start += len(piece) - len(decoder.unused_data)
        if start == len(raw):
            return b"".join(parts)
    raise UnreadableBodyError("encoded")


def _open_gzip(_: bytes) -> "zlib._Decompress":
    return zlib.decompressobj(_GZIP_BITS)


def _open_deflate(head: bytes) -> "zlib._Decompress":
    if len(head) < _HEAD_BYTES:
        raise UnreadableBodyError("encoded")
    return zlib.decompressobj(detect_zlib_wbits(head))


def _open_zstd(_: bytes) -> zstd.ZstdDecompressor:
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
_DECODERS: Final[Mapping[str, Callable[[bytes, int], bytes | None]]] = {
    "br": _decode_br,
    "deflate": partial(_decode_members, open_decoder=_open_deflate, max_members=1),
    "zstd": partial(_decode_members, open_decoder=_open_zstd, max_members=MAX_MEMBERS),
    **dict.fromkeys(GZIP, _decode_gzip),
}


def detect_zlib_wbits(head: bytes) -> int:
    """Returns zlib's `wbits` argument for data that begins with the two bytes `head`.

    Senders that declare deflate may send raw deflate data, or data with a zlib or gzip header
    (RFC 9110 §8.4.1.2).
    """
    gzip = head == b"\x1f\x8b"
    zlib_header = head[0] & 0x0F == zlib.DEFLATED and int.from_bytes(head, "big") % 31 == 0
    return _AUTO_BITS if gzip or zlib_header else _RAW_BITS


class Inflater:
    """Decompresses one body chunk by chunk. The chunks may have any size.

    If the body is not compressed, `feed` returns the chunks unchanged, and does not limit their size.

    Args:
        encoding: The `content-encoding` as sent. Only gzip and deflate are supported.
        limit_bytes: The largest number of decompressed bytes. If the body has more, `feed` sets `has_failed`
            and returns no more bytes. This protects against bodies that are small when compressed but huge
            when decompressed.

    Attributes:
        is_identity: Whether the body is not compressed.
        has_failed: Whether the body cannot be decompressed, or has more than `limit_bytes` bytes.
    """

    def __init__(self, encoding: str, limit_bytes: int) -> None:
        coding = encoding.strip().lower()
        self.is_identity = coding in IDENTITY
        self.has_failed = not self.is_identity and coding not in GZIP | {"deflate"}
        self._remaining_bytes = limit_bytes
        self._head = b""
        self._engine: zlib._Decompress | None = None

    def feed(self, data: bytes) -> bytes:
        """Takes the next chunk of the body, and returns the bytes that can be decompressed now.

        Returns no bytes if `has_failed` is True, or after the end of the compressed data.
        """
        if self.is_identity:
            return data
        if self.has_failed:
            return b""
        if self._engine is None:
            data = self._head = self._head + data
            if len(data) < _HEAD_BYTES:
                return b""
            self._engine = zlib.decompressobj(detect_zlib_wbits(data[:_HEAD_BYTES]))
            self._head = b""
        if self._engine.eof:
            return b""
        try:
            output = self._engine.decompress(data, self._remaining_bytes + 1)
        except zlib.error:
            self.has_failed = True
            return b""
        self._remaining_bytes -= len(output)
        self.has_failed = self._remaining_bytes < 0
        return b"" if self.has_failed else output
