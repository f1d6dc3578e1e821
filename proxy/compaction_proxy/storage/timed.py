"""A store whose calls are timed."""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TypeVar

from compaction_proxy.storage.store import Entry, Lease, Record, Store

_T = TypeVar("_T")


class Timed:
    """A store; `told` hears of each call that has ended or was given up: its name, and how long it took.

    Args:
        store: What is called.
        told: Given the name of the operation, and seconds.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        store: Store,
        told: Callable[[str, float], None],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._store = store
        self._told = told
        self._clock = clock

    async def read(self, keys: Sequence[str]) -> list[bytes | None]:
        """As the port says."""
        return await self._timed("read", self._store.read(keys))

    async def commit(
        self, claim: Record, also: Sequence[Record | Entry] = (), *, lease: Lease | None = None
    ) -> bytes | None:
        """As the port says."""
        return await self._timed("commit", self._store.commit(claim, also, lease=lease))

    async def write(self, items: Sequence[Record | Entry]) -> None:
        """As the port says."""
        await self._timed("write", self._store.write(items))

    async def tail(self, key: str, limit: int) -> list[bytes]:
        """As the port says."""
        return await self._timed("tail", self._store.tail(key, limit))

    async def acquire(self, key: str, ttl_s: float) -> Lease | None:
        """As the port says."""
        return await self._timed("acquire", self._store.acquire(key, ttl_s))

    async def renew(self, lease: Lease, ttl_s: float) -> bool:
        """As the port says."""
        return await self._timed("renew", self._store.renew(lease, ttl_s))

    async def release(self, lease: Lease) -> None:
        """As the port says."""
        await self._timed("release", self._store.release(lease))

    async def delete(self, prefix: str) -> int:
        """As the port says."""
        return await self._timed("delete", self._store.delete(prefix))

    async def publish(self, channel: str, message: bytes) -> None:
        """As the port says."""
        await self._timed("publish", self._store.publish(channel, message))

    def listen(self, channel: str) -> AsyncGenerator[bytes | None, None]:
        """As the port says; not timed."""
        return self._store.listen(channel)

    async def close(self) -> None:
        """As the port says; not timed."""
        await self._store.close()

    async def _timed(self, operation: str, call: Awaitable[_T]) -> _T:
        started = self._clock()
        try:
            return await call
        finally:
            self._told(operation, self._clock() - started)
