"""Caches that drop what was used least recently, bounded by the bytes that they hold."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

# What holding a record takes beside its key and its fields, which take twice what they do when packed.
ENTRY_BYTES = 600


@dataclass(frozen=True, slots=True)
class _CachedFields:
    fields: Mapping[str, Any]
    size: int
    expires: float


class ExpiringLruCache:
    """Fields by key, the least recently used leaving first. `clock` gives monotonic seconds."""

    def __init__(self, max_bytes: int, clock: Callable[[], float]) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._held: OrderedDict[str, _CachedFields] = OrderedDict()
        self._bytes = 0

    def get(self, key: str) -> Mapping[str, Any] | None:
        """What is held under `key`, or None."""
        held = self._held.get(key)
        if held is None:
            return None
        if held.expires <= self._clock():
            self._evict_key(key)
            return None
        self._held.move_to_end(key)
        return held.fields

    def put(self, key: str, fields: Mapping[str, Any], size: int, ttl_s: float) -> None:
        """Hold `fields`, of `size` bytes packed, for at most `ttl_s` seconds, unless they are too large."""
        self._evict_key(key)
        size = 2 * size + len(key) + ENTRY_BYTES
        if size > self._max_bytes:
            return
        now = self._clock()
        self._held[key] = _CachedFields(fields, size, now + ttl_s)
        self._bytes += size
        oldest = next(iter(self._held))
        while self._bytes > self._max_bytes or (oldest != key and self._held[oldest].expires <= now):
            self._evict_key(oldest)
            oldest = next(iter(self._held))

    def evict_prefix(self, prefix: str) -> None:
        """Let go of everything whose key begins with `prefix`."""
        for key in [key for key in self._held if key.startswith(prefix)]:
            self._evict_key(key)

    def _evict_key(self, key: str) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            self._bytes -= held.size


Key = TypeVar("Key")
Value = TypeVar("Value")


class LruCache(Generic[Key, Value]):
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
        self.remove(key)
        if size > self._max_bytes:
            return
        self._held[key] = (value, size)
        self._bytes += size
        while self._bytes > self._max_bytes:
            self._bytes -= self._held.popitem(last=False)[1][1]

    def remove(self, key: Key) -> None:
        """Let go of a value."""
        held = self._held.pop(key, None)
        if held is not None:
            self._bytes -= held[1]
