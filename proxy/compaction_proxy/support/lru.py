"""Defines a dict and a cache of limited size. Both drop old entries when they are full."""

from collections import OrderedDict
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class BoundedDict(OrderedDict[Key, Value]):
    """A dict of limited size. When it is full, a new entry displaces the entry that was written longest ago.

    Args:
        max_entries: Maximum number of entries.
    """

    def __init__(self, max_entries: int) -> None:
        super().__init__()
        self._max_entries = max_entries

    def __setitem__(self, key: Key, value: Value) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._max_entries:
            self.popitem(last=False)


class LruCache(Generic[Key, Value]):
    """A cache of limited size. When it is full, a new value displaces the least recently used values.

    Args:
        max_bytes: Maximum size of all values together, in bytes.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self._bytes = 0

    def get(self, key: Key) -> Value | None:
        """Returns the value under `key`, which becomes the most recently used, or None if there is none."""
        entry = self._held.get(key)
        if entry is None:
            return None
        self._held.move_to_end(key)
        return entry[0]

    def put(self, key: Key, value: Value, size_bytes: int) -> None:
        """Stores a value of `size_bytes` bytes under `key`, in place of the earlier value.

        Does not store a value that is larger than the whole cache. The earlier value is removed even then.
        """
        self.remove(key)
        if size_bytes > self._max_bytes:
            return
        self._held[key] = (value, size_bytes)
        self._bytes += size_bytes
        while self._bytes > self._max_bytes:
            self._bytes -= self._held.popitem(last=False)[1][1]

    def list_keys(self) -> list[Key]:
        """Returns all keys, the least recently used first."""
        return list(self._held)

    def remove(self, key: Key) -> None:
        """Removes the value under `key`. Does nothing if the key is unknown."""
        entry = self._held.pop(key, None)
        if entry is not None:
            self._bytes -= entry[1]
