"""Undoing gzip and deflate in bounded steps, for the eyes of ours that look at a response in passing.

Whatever cannot be undone is no error: the client gets its bytes as they came, and we see nothing.
"""

import zlib
from typing import Final

IDENTITY: Final = frozenset({"", "identity"})
GZIP: Final = frozenset({"gzip", "x-gzip"})
_AUTO_BITS: Final = 32 + zlib.MAX_WBITS
_RAW_BITS: Final = -zlib.MAX_WBITS
_HEADER_BYTES: Final = 2


def detect_window_bits(head: bytes) -> int:
    """Raw, or with the header of zlib or gzip: servers that say deflate mean any (RFC 9110 §8.4.1.2)."""
    gzip = head == b"\x1f\x8b"
    zlib_header = head[0] & 0x0F == zlib.DEFLATED and int.from_bytes(head, "big") % 31 == 0
    return _AUTO_BITS if gzip or zlib_header else _RAW_BITS


class Inflater:
    """Inflates one body, piece by piece; the result does not depend on how the body was sliced.

    Args:
        encoding: The `content-encoding` as sent. Only gzip and deflate can be undone.
        limit: Bytes after inflation at which it gives up, so that a bomb costs no more than this.
    """

    __slots__ = ("_engine", "_head", "_left", "failed")

    def __init__(self, encoding: str, limit: int) -> None:
        self.failed = encoding.strip().lower() not in GZIP | {"deflate"}
        self._left = limit
        self._head = b""
        self._engine: zlib._Decompress | None = None

    def feed(self, data: bytes) -> bytes:
        """What `data` adds, in bytes; nothing once `failed` is set."""
        if self.failed:
            return b""
        if self._engine is None:
            data = self._head = self._head + data
            if len(data) < _HEADER_BYTES:
                return b""
            self._engine = zlib.decompressobj(detect_window_bits(data[:_HEADER_BYTES]))
            self._head = b""
        if self._engine.eof:
            return b""
        try:
            made = self._engine.decompress(data, self._left + 1)
        except zlib.error:
            self.failed = True
            return b""
        self._left -= len(made)
        self.failed = self._left < 0
        return b"" if self.failed else made
