"""Events of a stream that may have to be read again: packed where they are many, let go where too many.

Most of an event is the same in the next one, so that a hundred long answers take little memory while they
are streamed.
"""

import zlib
from collections.abc import Iterator
from typing import Final

# Of a longer answer nothing is kept.
MAX_KEPT_BYTES: Final = 16 * 1024 * 1024
# So much is packed at once, in a third of a millisecond.
BLOCK_BYTES: Final = 64 * 1024
_QUICKLY: Final = 1
# Stands in no JSON, and so in no event that could be read.
_BETWEEN: Final = b"\0"


class Kept:
    """Events in their order.

    Attributes:
        size: Bytes of all that were added.
    """

    __slots__ = ("_blocks", "_late", "_late_bytes", "size")

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._late: list[bytes] = []
        self._late_bytes = 0
        self.size = 0

    @property
    def whole(self) -> bool:
        """Whether all that were added are there."""
        return self.size <= MAX_KEPT_BYTES

    def add(self, event: bytes) -> None:
        """Keep one more."""
        self.size += len(event)
        self._late.append(event)
        self._late_bytes += len(event)
        if self._late_bytes > BLOCK_BYTES:
            self._pack()

    def _pack(self) -> None:
        if self.whole:
            self._blocks.append(zlib.compress(_BETWEEN.join(self._late), _QUICKLY))
        else:
            self._blocks.clear()
        self._late.clear()
        self._late_bytes = 0

    def __iter__(self) -> Iterator[bytes]:
        """Them all, as long as they are `whole`; one that could not be read may come in pieces."""
        for block in self._blocks:
            yield from zlib.decompress(block).split(_BETWEEN)
        yield from self._late
