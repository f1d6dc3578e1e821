"""What was begun before something was forgotten, so that nothing of it is written afterwards.

Each request remembers how much had been forgotten when it began. Whatever it starts inherits that, tasks of
their own among them (a context variable), and so a round that is still being made is known to be too old.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice

# Deletions that are remembered. What was begun before more of them than that writes nothing at all.
MAX_DELETIONS = 10_000

_start_mark: ContextVar[int | None] = ContextVar("begun", default=None)


class DeletionFence:
    """What was forgotten in this process, in order. For use on one event loop.

    Attributes:
        begun: Gives when what runs here began, for those who ask later whether it `is_deleted` a key. Every
            request asks.
    """

    get_start_mark = staticmethod(_start_mark.get)

    def __init__(self) -> None:
        self._prefixes: deque[str] = deque(maxlen=MAX_DELETIONS)
        self._count = 0

    def set_start_mark(self) -> None:
        """What runs from here on begins now. Without this it never is too old."""
        _start_mark.set(self._count)

    @contextmanager
    def use_start_mark(self) -> Iterator[None]:
        """What runs in this block begins now."""
        token = _start_mark.set(self._count)
        try:
            yield
        finally:
            _start_mark.reset(token)

    def add_deletion(self, prefix: str) -> None:
        """Every key that begins so is forgotten."""
        self._prefixes.append(prefix)
        self._count += 1

    def is_deleted(self, key: str) -> bool:
        """Whether a key was forgotten since what runs here began."""
        return self.is_deleted_since(key, _start_mark.get())

    def is_deleted_since(self, key: str, start_mark: int | None) -> bool:
        """Whether a key was forgotten since then."""
        if start_mark is None or start_mark == self._count:
            return False
        newer = self._count - start_mark
        return newer > MAX_DELETIONS or any(map(key.startswith, islice(reversed(self._prefixes), newer)))
