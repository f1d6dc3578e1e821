"""A store in the memory of this process: nothing survives a restart, nothing is shared with a replica."""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from proxy.errors import StoreUnavailable
from proxy.ports import Entry, Record

DEFAULT_MAX_BYTES = 64 * 1024 * 1024
_SWEEP_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class _Held:
    """A record (one value) or a list (its lines, oldest first)."""

    values: tuple[bytes, ...]
    is_list: bool
    expires: float
    size: int


def _needed(items: Sequence[Record | Entry]) -> int:
    return sum(len(item.key) + len(item.value) for item in items)


class MemoryStore:
    """Implements `ports.Store` in a dict; what was written longest ago leaves first.

    Args:
        max_bytes: Keys and values together take no more than this.
        clock: Monotonic seconds.
    """

    def __init__(
        self, *, max_bytes: int = DEFAULT_MAX_BYTES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._bytes = 0
        self._sweep_at = 0.0

    async def read(self, keys: Sequence[str]) -> list[bytes | None]:
        """The live values under `keys`."""
        return [self._value(key) for key in keys]

    async def commit(self, claim: Record, also: Sequence[Record | Entry] = ()) -> bytes:
        """Write everything unless the claim is taken; return what stands there."""
        taken = self._value(claim.key)
        if taken is not None:
            return taken
        await self.write([claim, *also])
        return claim.value

    async def write(self, items: Sequence[Record | Entry]) -> None:
        """Write everything, or raise and write nothing."""
        if _needed(items) > self._max_bytes:
            raise StoreUnavailable("store-too-large", "more than the store may hold")
        self._sweep()
        for item in items:
            self._put(item)
        while self._bytes > self._max_bytes:
            self._drop(next(iter(self._held)))

    async def tail(self, key: str, limit: int) -> list[bytes]:
        """The newest `limit` lines, oldest first."""
        held = self._live(key)
        return list(held.values[-limit:]) if held and held.is_list and limit > 0 else []

    async def close(self) -> None:
        """Forget everything."""
        self._held.clear()
        self._bytes = 0

    def _live(self, key: str) -> _Held | None:
        held = self._held.get(key)
        return held if held and held.expires > self._clock() else None

    def _value(self, key: str) -> bytes | None:
        held = self._live(key)
        return held.values[0] if held and not held.is_list else None

    def _put(self, item: Record | Entry) -> None:
        values: tuple[bytes, ...] = (item.value,)
        is_list = isinstance(item, Entry)
        if isinstance(item, Entry):
            held = self._live(item.key)
            before = held.values if held and held.is_list else ()
            values = (before + values)[-item.keep :]
        self._drop(item.key)
        size = len(item.key) + sum(map(len, values))
        self._held[item.key] = _Held(values, is_list, self._clock() + item.ttl_s, size)
        self._bytes += size

    def _drop(self, key: str) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            self._bytes -= held.size

    def _sweep(self) -> None:
        now = self._clock()
        if now < self._sweep_at:
            return
        self._sweep_at = now + _SWEEP_EVERY_S
        for key in [key for key, held in self._held.items() if held.expires <= now]:
            self._drop(key)
