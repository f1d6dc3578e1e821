"""Caches with a limit in bytes. A full cache drops its least recently used entries."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

# Additional size of each entry of an `ExpiringLruCache`. An entry counts as this many bytes, plus the length
# of its key, plus twice the JSON size of its fields, because the decoded fields take more memory than the
# JSON.
ENTRY_BYTES = 600


@dataclass(frozen=True, slots=True)
class _CachedFields:
    fields: Mapping[str, Any]
    size: int
    expires: float


class ExpiringLruCache:
    """Caches the fields of records by key until they expire. Drops the least recently used first.

    Args:
        max_bytes: Maximum size of all entries (`ENTRY_BYTES`).
        clock: Returns monotonic seconds.
    """

    def __init__(self, max_bytes: int, clock: Callable[[], float]) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._held: OrderedDict[str, _CachedFields] = OrderedDict()
        self._bytes = 0

    def get(self, key: str) -> Mapping[str, Any] | None:
        """Returns the fields under `key`, or None if there are none or they have expired."""
        entry = self._held.get(key)
        if entry is None:
            return None
        if entry.expires <= self._clock():
            self._evict_key(key)
            return None
        self._held.move_to_end(key)
        return entry.fields

    def put(self, key: str, fields: Mapping[str, Any], packed_bytes: int, ttl_s: float) -> None:
        """Stores `fields` for at most `ttl_s` seconds, unless they are too large for the cache.

        `packed_bytes` is the number of bytes of the fields as JSON.
        """
        self._evict_key(key)
        packed_bytes = 2 * packed_bytes + len(key) + ENTRY_BYTES
        if packed_bytes > self._max_bytes:
            return
        now = self._clock()
        self._held[key] = _CachedFields(fields, packed_bytes, now + ttl_s)
        self._bytes += packed_bytes
        oldest = next(iter(self._held))
        while self._bytes > self._max_bytes or (oldest != key and self._held[oldest].expires <= now):
            self._evict_key(oldest)
            oldest = next(iter(self._held))

    def evict_prefix(self, prefix: str) -> None:
        """Removes all entries whose key begins with `prefix`."""
        for key in [key for key in self._held if key.startswith(prefix)]:
            self._evict_key(key)

    def _evict_key(self, key: str) -> None:
        entry = self._held.pop(key, None)
        if entry is not None:
            self._bytes -= entry.size


Key = TypeVar("Key")
Value = TypeVar("Value")


class LruCache(Generic[Key, Value]):
    """Caches values by key. Drops the least recently used values if it is full.

    Args:
        max_bytes: Maximum bytes of all values. A value that is larger is not stored.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self._bytes = 0

    def get(self, key: Key) -> Value | None:
        """Returns the value under `key`, or None if there is none."""
        entry = self._held.get(key)
        if entry is None:
            return None
        self._held.move_to_end(key)
        return entry[0]

    def put(self, key: Key, value: Value, size_bytes: int) -> None:
        """Stores a value that takes `size_bytes` bytes. Replaces the earlier value under the key."""
        self.remove(key)
        if size_bytes > self._max_bytes:
            return
        self._held[key] = (value, size_bytes)
        self._bytes += size_bytes
        while self._bytes > self._max_bytes:
            self._bytes -= self._held.popitem(last=False)[1][1]

    def remove(self, key: Key) -> None:
        """Removes the value under `key`, if there is one."""
        entry = self._held.pop(key, None)
        if entry is not None:
            self._bytes -= entry[1]
