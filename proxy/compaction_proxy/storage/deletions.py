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
KEPT = 10_000

_begun: ContextVar[int | None] = ContextVar("begun", default=None)


class Outdated:
    """What was forgotten in this process, in order. For use on one event loop.

    Attributes:
        begun: Gives when what runs here began, for those who ask later whether it `covers` a key. Every
            request asks.
    """

    begun = staticmethod(_begun.get)

    def __init__(self) -> None:
        self._prefixes: deque[str] = deque(maxlen=KEPT)
        self._count = 0

    def begin(self) -> None:
        """What runs from here on begins now. Without this it never is too old."""
        _begun.set(self._count)

    @contextmanager
    def beginning(self) -> Iterator[None]:
        """What runs in this block begins now."""
        token = _begun.set(self._count)
        try:
            yield
        finally:
            _begun.reset(token)

    def add(self, prefix: str) -> None:
        """Every key that begins so is forgotten."""
        self._prefixes.append(prefix)
        self._count += 1

    def covers(self, key: str) -> bool:
        """Whether a key was forgotten since what runs here began."""
        return self.covered(key, _begun.get())

    def covered(self, key: str, begun: int | None) -> bool:
        """Whether a key was forgotten since then."""
        if begun is None or begun == self._count:
            return False
        newer = self._count - begun
        return newer > KEPT or any(map(key.startswith, islice(reversed(self._prefixes), newer)))
