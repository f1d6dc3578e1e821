"""Prevents work that began before a deletion from writing deleted records again.

Each request remembers, as its start mark, how many deletions this process had made when the request began. A
context variable passes the start mark on to all tasks that the request starts. So a compaction that began
before a deletion is recognised, and does not write the deleted keys.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice

# The most deletions that are remembered. If more deletions than this follow the start of some work, that work
# writes nothing.
MAX_DELETIONS = 10_000

_start_mark: ContextVar[int | None] = ContextVar("begun", default=None)


class DeletionFence:
    """Remembers the key prefixes that this process has deleted. For use on one event loop.

    Attributes:
        get_start_mark: Returns the start mark of the running context, for a later `is_deleted_since`. It is
            the context variable's own `get`, because every request calls it and a method would cost more.
    """

    get_start_mark = staticmethod(_start_mark.get)

    def __init__(self) -> None:
        self._prefixes: deque[str] = deque(maxlen=MAX_DELETIONS)
        self._count = 0

    def set_start_mark(self) -> None:
        """Marks the start of the work in this context. Work without a start mark may write any key."""
        _start_mark.set(self._count)

    @contextmanager
    def scoped_start_mark(self) -> Iterator[None]:
        """Marks the start of the work in this block, and restores the earlier mark after it."""
        token = _start_mark.set(self._count)
        try:
            yield
        finally:
            _start_mark.reset(token)

    def add_deletion(self, prefix: str) -> None:
        """Records that all keys with this prefix are deleted."""
        self._prefixes.append(prefix)
        self._count += 1

    def is_deleted(self, key: str) -> bool:
        """Whether a key was deleted since the work in this context began."""
        return self.is_deleted_since(key, _start_mark.get())

    def is_deleted_since(self, key: str, start_mark: int | None) -> bool:
        """Whether a key was deleted since `start_mark`. None means that the work has no start mark."""
        if start_mark is None or start_mark == self._count:
            return False
        newer = self._count - start_mark
        return newer > MAX_DELETIONS or any(map(key.startswith, islice(reversed(self._prefixes), newer)))
