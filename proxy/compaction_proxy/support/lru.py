"""Defines a dict with a limited number of entries, and a cache with a limited number of bytes.

If there is no room for a new entry, the dict and the cache remove old entries.
"""

from collections import OrderedDict
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class BoundedDict(OrderedDict[Key, Value]):
    """A dict with a limited number of entries.

    If a new key would exceed the limit, the dict removes the key that was written longest ago.

    Args:
        max_entries: The largest number of entries.
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
    """A cache with a limited number of bytes.

    If a new value would exceed the limit, the cache removes the values that were used longest ago.

    Args:
        max_bytes: The largest number of bytes of all values together. The caller of `put` gives the size of
            each value.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self._bytes = 0

    def get(self, key: Key) -> Value | None:
        """Returns the value under `key`, or None if there is none. The call counts as a use of the value."""
        entry = self._held.get(key)
        if entry is None:
            return None
        self._held.move_to_end(key)
        return entry[0]

    def put(self, key: Key, value: Value, size_bytes: int) -> None:
        """Stores a value of `size_bytes` bytes under `key`, in place of the earlier value.

        If `size_bytes` exceeds the limit of the whole cache, removes the earlier value and stores nothing.
        """
        self.remove(key)
        if size_bytes > self._max_bytes:
            return
        self._held[key] = (value, size_bytes)
        self._bytes += size_bytes
        while self._bytes > self._max_bytes:
            self._bytes -= self._held.popitem(last=False)[1][1]

    def list_keys(self) -> list[Key]:
        """Returns all keys. The key whose value was used longest ago comes first."""
        return list(self._held)

    def remove(self, key: Key) -> None:
        """Removes the value under `key`. Does nothing if the key is unknown."""
        entry = self._held.pop(key, None)
        if entry is not None:
            self._bytes -= entry[1]
