"""A store in the memory of this process. Its content is lost on a restart and not shared with replicas."""

import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from itertools import count

from compaction_proxy.core.errors import StoreUnavailableError
from compaction_proxy.storage.keys import derive_conversation_tenant_key
from compaction_proxy.storage.store import Lease, ListEntry, Record

DEFAULT_MAX_BYTES = 64 * 1024 * 1024
_SWEEP_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class _StoredItem:
    """A record (one value) or a list (its lines, oldest first).

    `expires` is in monotonic seconds. `size` is the length of the key and of all values, in bytes.
    """

    values: tuple[bytes, ...]
    is_list: bool
    expires: float
    size: int


@dataclass(frozen=True, slots=True)
class _HeldLease:
    """A lease that a process holds. `expires` is in monotonic seconds."""

    fence: int
    expires: float


def _count_bytes(items: Sequence[Record | ListEntry]) -> int:
    return sum(len(item.key) + len(item.value) for item in items)


class MemoryStore:
    """Implements `store.Store` in a dict. A full store deletes the items that were written longest ago.

    Args:
        max_bytes: Maximum bytes of all keys and values together.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self, *, max_bytes: int = DEFAULT_MAX_BYTES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._items: OrderedDict[str, _StoredItem] = OrderedDict()
        self._bytes = 0
        self._sweep_at = 0.0
        self._leases: dict[str, _HeldLease] = {}
        self._fences = count(1)

    async def read(self, keys: Sequence[str]) -> list[bytes | None]:
        """Returns the values under `keys`; None for a key that is absent or expired."""
        return [self._get_value(key) for key in keys]

    async def commit(
        self, claim: Record, other_items: Sequence[Record | ListEntry] = (), *, lease: Lease | None = None
    ) -> bytes | None:
        """Commits all items or none, as `Store.commit` specifies."""
        taken = self._get_value(claim.key)
        if taken is not None:
            return taken
        if lease is not None and not self._is_lease_held(lease):
            return None
        await self.write([claim, *other_items])
        return claim.value

    async def write(self, items: Sequence[Record | ListEntry]) -> None:
        """Writes all items or none. If the store is full, deletes the items that were written longest ago.

        Raises:
            StoreUnavailableError: If the items together have more than `max_bytes` bytes.
        """
        if _count_bytes(items) > self._max_bytes:
            raise StoreUnavailableError("store-too-large", "more than the store can contain")
        self._sweep_expired()
        for item in items:
            self._put_item(item)
        while self._bytes > self._max_bytes:
            self._remove_item(next(iter(self._items)))

    async def read_tail(self, key: str, limit: int) -> list[bytes]:
        """Returns the newest `limit` lines of a list, oldest first."""
        item = self._get_live_item(key)
        return list(item.values[-limit:]) if item and item.is_list and limit > 0 else []

    async def acquire_lease(self, key: str, ttl_s: float) -> Lease | None:
        """Returns a lease on `key`, or None if there is a lease on it already."""
        now = self._clock()
        current = self._leases.get(key)
        if current and current.expires > now:
            return None
        self._sweep_expired()
        fence = next(self._fences)
        self._leases[key] = _HeldLease(fence, now + ttl_s)
        return Lease(key, fence)

    async def renew_lease(self, lease: Lease, ttl_s: float) -> bool:
        """Extends a lease to `ttl_s` seconds from now. Returns False if it has expired or was released."""
        if not self._is_lease_held(lease):
            return False
        self._leases[lease.key] = _HeldLease(lease.fence, self._clock() + ttl_s)
        return True

    async def release_lease(self, lease: Lease) -> None:
        """Releases a lease. Does nothing if it has expired or was released."""
        if self._is_lease_held(lease):
            del self._leases[lease.key]

    async def delete_prefix(self, prefix: str) -> int:
        """Deletes keys as `Store.delete_prefix` does. Returns the number of unexpired records and lists."""
        for key in [key for key in self._leases if key.startswith(prefix)]:
            del self._leases[key]
        keys = [key for key in self._items if key.startswith(prefix)]
        live = sum(self._get_live_item(key) is not None for key in keys)
        for key in keys:
            self._remove_item(key)
            self._remove_item(derive_conversation_tenant_key(key) or key)
        return live

    async def publish(self, channel: str, message: bytes) -> None:
        """Does nothing, because no other process shares this store."""

    async def listen(self, channel: str) -> AsyncGenerator[bytes | None, None]:  # noqa: ARG002 - signature of the protocol
        """Yields nothing, because no other process shares this store."""
        return
        yield

    async def close(self) -> None:
        """Deletes all records, lists and leases."""
        self._items.clear()
        self._leases.clear()
        self._bytes = 0

    def _is_lease_held(self, lease: Lease) -> bool:
        current = self._leases.get(lease.key)
        return current is not None and current.fence == lease.fence and current.expires > self._clock()

    def _get_live_item(self, key: str) -> _StoredItem | None:
        item = self._items.get(key)
        return item if item and item.expires > self._clock() else None

    def _get_value(self, key: str) -> bytes | None:
        item = self._get_live_item(key)
        return item.values[0] if item and not item.is_list else None

    def _put_item(self, item: Record | ListEntry) -> None:
        values: tuple[bytes, ...] = (item.value,)
        is_list = isinstance(item, ListEntry)
        if isinstance(item, ListEntry):
            current = self._get_live_item(item.key)
            lines = current.values if current and current.is_list else ()
            values = (lines + values)[-item.max_lines :]
        self._remove_item(item.key)
        size = len(item.key) + sum(map(len, values))
        self._items[item.key] = _StoredItem(values, is_list, self._clock() + item.ttl_s, size)
        self._bytes += size

    def _remove_item(self, key: str) -> None:
        item = self._items.pop(key, None)
        if item is not None:
            self._bytes -= item.size

    def _sweep_expired(self) -> None:
        now = self._clock()
        if now < self._sweep_at:
            return
        self._sweep_at = now + _SWEEP_EVERY_S
        for key in [key for key, held in self._items.items() if held.expires <= now]:
            self._remove_item(key)
        self._leases = {key: lent for key, lent in self._leases.items() if lent.expires > now}
