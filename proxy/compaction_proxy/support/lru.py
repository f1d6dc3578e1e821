"""What was used last, bounded by its size."""

from collections import OrderedDict
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Lru(Generic[Key, Value]):
    """Values by key, the least recently used leaving first.

    Args:
        max_bytes: How much is held; what is larger by itself is not.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self._bytes = 0

    def get(self, key: Key) -> Value | None:
        """What is held under `key`, or None."""
        held = self._held.get(key)
        if held is None:
            return None
        self._held.move_to_end(key)
        return held[0]

    def put(self, key: Key, value: Value, size: int) -> None:
        """Hold a value that takes `size` bytes, in place of what was there."""
        self.drop(key)
        if size > self._max_bytes:
            return
        self._held[key] = (value, size)
        self._bytes += size
        while self._bytes > self._max_bytes:
            self._bytes -= self._held.popitem(last=False)[1][1]

    def drop(self, key: Key) -> None:
        """Let go of a value."""
        held = self._held.pop(key, None)
        if held is not None:
            self._bytes -= held[1]
