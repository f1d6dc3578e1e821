"""A store that measures the duration of its calls."""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TypeVar

from compaction_proxy.storage.store import Lease, ListEntry, Record, Store

_T = TypeVar("_T")


class InstrumentedStore:
    """Implements `store.Store` over another store, and reports the duration of each call.

    Args:
        store: The store that is called.
        record_duration: Called with the name of the operation and its duration in seconds.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        store: Store,
        record_duration: Callable[[str, float], None],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._store = store
        self._record_duration = record_duration
        self._clock = clock

    async def read(self, keys: Sequence[str]) -> list[bytes | None]:
        """Calls `Store.read` and records its duration."""
        return await self._time_call("read", self._store.read(keys))

    async def commit(
        self, claim: Record, other_items: Sequence[Record | ListEntry] = (), *, lease: Lease | None = None
    ) -> bytes | None:
        """Calls `Store.commit` and records its duration."""
        return await self._time_call("commit", self._store.commit(claim, other_items, lease=lease))

    async def write(self, items: Sequence[Record | ListEntry]) -> None:
        """Calls `Store.write` and records its duration."""
        await self._time_call("write", self._store.write(items))

    async def read_tail(self, key: str, limit: int) -> list[bytes]:
        """Calls `Store.read_tail` and records its duration."""
        return await self._time_call("tail", self._store.read_tail(key, limit))

    async def acquire_lease(self, key: str, ttl_s: float) -> Lease | None:
        """Calls `Store.acquire_lease` and records its duration."""
        return await self._time_call("acquire", self._store.acquire_lease(key, ttl_s))

    async def renew_lease(self, lease: Lease, ttl_s: float) -> bool:
        """Calls `Store.renew_lease` and records its duration."""
        return await self._time_call("renew", self._store.renew_lease(lease, ttl_s))

    async def release_lease(self, lease: Lease) -> None:
        """Calls `Store.release_lease` and records its duration."""
        await self._time_call("release", self._store.release_lease(lease))

    async def delete_prefix(self, prefix: str) -> int:
        """Calls `Store.delete_prefix` and records its duration."""
        return await self._time_call("delete", self._store.delete_prefix(prefix))

    async def publish(self, channel: str, message: bytes) -> None:
        """Calls `Store.publish` and records its duration."""
        await self._time_call("publish", self._store.publish(channel, message))

    def listen(self, channel: str) -> AsyncGenerator[bytes | None, None]:
        """Calls `Store.listen`, without a measurement."""
        return self._store.listen(channel)

    async def close(self) -> None:
        """Closes the underlying store, without a measurement."""
        await self._store.close()

    async def _time_call(self, operation: str, call: Awaitable[_T]) -> _T:
        started = self._clock()
        try:
            return await call
        finally:
            self._record_duration(operation, self._clock() - started)
