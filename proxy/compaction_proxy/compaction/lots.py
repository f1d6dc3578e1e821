"""Long work on many items, cut into lots, so that others get their turn in between."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

# A lot is about this many bytes.
AT_ONCE_BYTES = 128 * 1024
# So many items are looked at together first: most requests bring one or two.
FEW = 8

_Item = TypeVar("_Item")


def in_lots(items: Sequence[_Item], size: Callable[[_Item], int]) -> Iterable[tuple[int, Sequence[_Item]]]:
    """The items a few at a time, each lot with the index of its first item; others may come between."""
    if len(items) <= 1 or (len(items) <= FEW and sum(map(size, items)) <= AT_ONCE_BYTES):
        return ((0, items),)
    return _cut(items, size)


def _cut(items: Sequence[_Item], size: Callable[[_Item], int]) -> Iterator[tuple[int, Sequence[_Item]]]:
    start = pending = 0
    for index, item in enumerate(items):
        pending += size(item)
        if pending > AT_ONCE_BYTES and index > start:
            yield start, items[start:index]
            start, pending = index, size(item)
    yield start, items[start:]
