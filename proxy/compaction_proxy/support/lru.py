"""Defines a dict with a limited number of entries and a cache with limited bytes. Both drop old entries."""

from collections import OrderedDict
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class BoundedDict(OrderedDict[Key, Value]):
    """A dict with a limited number of entries.

    If the dict is full, a new key displaces the key that was written longest ago.

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
    """A cache with limited bytes. If a new value does not fit, it displaces the least recently used values.

    Args:
        max_bytes: Maximum bytes of all values together, as given in the calls of `put`.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self._bytes = 0

    def get(self, key: Key) -> Value | None:
        """Returns the value under `key`, or None if there is none.

        The value then counts as the most recently used.
        """
        entry = self._held.get(key)
        if entry is None:
            return None
        self._held.move_to_end(key)
        return entry[0]

    def put(self, key: Key, value: Value, size_bytes: int) -> None:
        """Stores a value of `size_bytes` bytes under `key`, in place of the earlier value.

        If `size_bytes` exceeds the limit of the whole cache, only removes the earlier value.
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
