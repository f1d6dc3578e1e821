"""Prevents work that began before a deletion from writing deleted records again.

This process counts its deletions. When a request begins, a context variable stores the present count, which
is called the start mark. All tasks that the request starts have the same start mark. Before a task writes a
key, it checks whether this process has deleted the key since the start mark was set. If so, the task does not
write the key.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice

# Number of newest deletions whose key prefixes stay in memory; older prefixes are dropped. If more deletions
# than this were made after a task began, the task writes no key, because a dropped prefix may match the key.
MAX_DELETIONS = 10_000

_start_mark: ContextVar[int | None] = ContextVar("begun", default=None)


class DeletionFence:
    """Tells a task whether a key was deleted after the task's work began. Use it on one event loop.

    Keeps the key prefixes that this process has deleted. A start mark is the number of deletions that had
    been made when a task's work began. A context variable stores the start mark.

    Attributes:
        get_start_mark: Returns the start mark of the current context, for a later `is_deleted_since`; None if
            the context has none. This attribute is the context variable's own `get`, because every request
            calls it and a method would be slower.
    """

    get_start_mark = staticmethod(_start_mark.get)

    def __init__(self) -> None:
        self._prefixes: deque[str] = deque(maxlen=MAX_DELETIONS)
        self._count = 0

    def set_start_mark(self) -> None:
        """Sets the start mark of the current context to the present number of deletions.

        Work without a start mark may write any key.
        """
        _start_mark.set(self._count)

    @contextmanager
    def scoped_start_mark(self) -> Iterator[None]:
        """Sets the start mark as `set_start_mark` does. Restores the old one after the `with` block."""
        token = _start_mark.set(self._count)
        try:
            yield
        finally:
            _start_mark.reset(token)

    def add_deletion(self, prefix: str) -> None:
        """Records that all keys with this prefix are deleted. Call it before the deletion in the store."""
        self._prefixes.append(prefix)
        self._count += 1

    def is_deleted(self, key: str) -> bool:
        """Returns whether a key was deleted after the current context's start mark; False if it has none."""
        return self.is_deleted_since(key, _start_mark.get())

    def is_deleted_since(self, key: str, start_mark: int | None) -> bool:
        """Returns whether a key was deleted since `start_mark`, which is a value of `get_start_mark`.

        Returns False if `start_mark` is None. Returns True for any key if more than `MAX_DELETIONS` deletions
        were made since `start_mark`.
        """
        if start_mark is None or start_mark == self._count:
            return False
        newer = self._count - start_mark
        return newer > MAX_DELETIONS or any(map(key.startswith, islice(reversed(self._prefixes), newer)))
