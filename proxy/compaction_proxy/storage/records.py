"""The records kept in a store, and how to live with a store that is slow, broken or away.

A store that fails is left alone until it answers again (`storage.resilient`). What was read or made lately is
held in the process and asked first; a record that could not be saved is used from there.

A store's first open may take longer than the deadline (a log to recover, a migration). `open` gives it more
time at start-up; what takes even longer, or nobody calls, goes on in the store until a probe finds it done.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from compaction_proxy.core.errors import StoreUnavailable
from compaction_proxy.storage import envelope
from compaction_proxy.storage.background import Behind
from compaction_proxy.storage.deletions import Outdated
from compaction_proxy.storage.keys import hash_tag
from compaction_proxy.storage.resilient import DEADLINE_S, PROBE_EVERY_S, RESTING, Reach, within
from compaction_proxy.storage.store import Entry, Lease, Record, Store
from compaction_proxy.support.lru import Cache

Fields = Mapping[str, Any]
"""What a record says: JSON values under names. Records that come back are shared; do not change them."""


@dataclass(frozen=True, slots=True)
class Item:
    """A record to be saved beside another.

    Attributes:
        key: From `storage.keys`.
        fields: What it says.
        ttl_s: Seconds until it is forgotten.
    """

    key: str
    fields: Fields
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Line:
    """A line to be added to a list.

    Attributes:
        key: From `storage.keys`.
        fields: What it says.
        ttl_s: Seconds until the list is forgotten, counted from its newest line.
        keep: Number of newest lines that stay.
    """

    key: str
    fields: Fields
    ttl_s: float
    keep: int


def packed(fields: Fields) -> bytes:
    """The fields in an envelope.

    Raises:
        StoreUnavailable: They are too large, or no JSON values.
    """
    try:
        return envelope.pack(fields)
    except ValueError as error:
        raise StoreUnavailable("record-unfit", str(error)) from error


def sealed(item: Item | Line) -> Record | Entry:
    """As a store takes it.

    Raises:
        StoreUnavailable: As with `packed`.
    """
    value = packed(item.fields)
    if isinstance(item, Line):
        return Entry(item.key, value, item.ttl_s, item.keep)
    return Record(item.key, value, item.ttl_s)


def size_of(value: bytes) -> int:
    """Bytes of the JSON in an envelope: what holding it in memory is about."""
    return len(envelope.content(value) or b"")


__all__ = ["Fields", "Item", "Line", "Records"]

OPEN_LIMIT_S = 1.0
FORGET_LIMIT_S = 60.0
CACHE_BYTES = 16 * 1024 * 1024
KNOWN_FOR_S = 3600.0
"""How long a record that stands in the store is used without asking again; others may have changed it."""

Answer = TypeVar("Answer")

_UNREADABLE = "store-unreadable"


class Records:
    """Records by key, over a store.

    No method raises because of the store; what went wrong goes to `report`, once per attempt (nothing is
    attempted, nor reported of reading, while the store is left alone).

    Args:
        store: Where records are kept.
        report: Told of each failure.
        clock: Monotonic seconds.
        deadline_s: The longest that one call of the store is waited for.
        probe_every_s: Seconds between two probes of a store that is left alone.
        cache_bytes: JSON bytes of the records held in the process.

    Attributes:
        outdated: Knows what was begun before its keys were forgotten; of that nothing is written.
        behind: Looks at records that no request waits for; `close` ends them.
        unanswered: How many reads have got no answer; by it who reads in pieces knows that one is lacking.
        forgetters: Told what keys begin with that are forgotten, so that nothing held of them is written.
    """

    def __init__(
        self,
        store: Store,
        report: Callable[[StoreUnavailable], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        deadline_s: float = DEADLINE_S,
        probe_every_s: float = PROBE_EVERY_S,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._store = store
        self._report = report
        self._reach = Reach(store, clock=clock, deadline_s=deadline_s, probe_every_s=probe_every_s)
        self._cache = Cache(cache_bytes, clock)
        self.outdated = Outdated()
        self.behind = Behind()
        self.unanswered = 0
        self.forgetters: list[Callable[[str], None]] = []

    @property
    def in_use(self) -> bool:
        """Whether the store is in use; False while it is left alone."""
        return self._reach.in_use

    @property
    def reachable(self) -> bool:
        """Whether the store answers, were it with a refusal to write; False from a failure until it does."""
        return self._reach.reachable

    async def open(self, limit_s: float = OPEN_LIMIT_S) -> bool:
        """Let the store open its file or connections, within `limit_s` seconds. Whether that worked."""
        try:
            await self._reach.ask(lambda: self._store.read([]), limit_s)
        except StoreUnavailable as error:
            self._report(error)
            return False
        return True

    async def find(
        self, keys: Sequence[str], *, fresh: bool = False, hold: bool = True
    ) -> list[Fields | None]:
        """The records under `keys`, in their order; None for what is absent, expired or not ours to read.

        What the process holds is taken first, and one read of the store brings the rest. With `fresh` the
        store is asked for all of them, for records that other replicas overwrite; what the process holds
        then stands in for what the store does not give. Without `hold` nothing more is held afterwards, and
        what comes is unpacked beside the loop: for much that is read seldom.
        """
        held = {key: fields for key in keys if (fields := self._cache.get(key)) is not None}
        missing = list(dict.fromkeys(keys)) if fresh else [key for key in keys if key not in held]
        if missing:
            held.update(await self._fetched(missing, hold=hold))
        return [held.get(key) for key in keys]

    async def save(
        self,
        key: str,
        fields: Fields,
        *,
        ttl_s: float,
        also: Sequence[Item | Line] = (),
        lease: Lease | None = None,
    ) -> Fields | None:
        """Claim `key` for a record, with everything in `also`, or nothing; return the record that all use.

        That is ours, or the one that stood there first, in which case nothing of ours was written. If the
        store fails it is ours for this process, and `find` gives it and the records in `also`; if the key was
        forgotten meanwhile it is ours for the caller. None if `lease` was lost, and nothing written.

        Raises:
            ValueError: The keys do not share a hash tag, so no cluster could commit them at once.
        """
        if any(hash_tag(item.key) != hash_tag(key) for item in also):
            raise ValueError("records that are committed together share one scope")
        if self.outdated.covers(key):
            return fields
        claim = Item(key, fields, ttl_s)
        try:
            return await self._committed(claim, also, lease)
        except StoreUnavailable as error:
            self._report(error)
            return self._unsaved(claim, also)

    async def keep(self, key: str, fields: Fields, *, ttl_s: float) -> bool:
        """Overwrite the record under `key`. Whether it was saved; this process uses it in any case.

        A record that is not ours to read, such as a newer version's, is left alone.
        """
        if self.outdated.covers(key):
            return False
        try:
            value = packed(fields)
            self._remember(key, value, ttl_s)
            saved = await self._reach.ask(lambda: self._overwritten(Record(key, value, ttl_s)))
        except StoreUnavailable as error:
            self._note(error)
            return False
        if not saved and not self.outdated.covers(key):
            self._report(StoreUnavailable(_UNREADABLE, "a record of another version is left alone"))
        return saved

    async def append(self, key: str, fields: Fields, *, ttl_s: float, keep: int) -> bool:
        """Add a line to a list of which the newest `keep` stay. Whether it was saved."""
        return await self.write([Line(key, fields, ttl_s, keep)])

    async def write(self, items: Sequence[Item | Line]) -> bool:
        """Overwrite records and add lines of one scope, in one call, or nothing. Whether it was saved.

        Whoever writes records so is the only one who does, or holds a lease.
        """
        if any(self.outdated.covers(item.key) for item in items):
            return False
        try:
            entries = list(map(sealed, items))
            await self._reach.ask(lambda: self._store.write(entries))
        except StoreUnavailable as error:
            self._note(error)
            return False
        return True

    async def tail(self, key: str, limit: int) -> list[Fields]:
        """The newest `limit` lines of a list, oldest first, without those that are not ours to read."""
        try:
            lines = await self._asked(lambda: self._store.tail(key, limit))
        except StoreUnavailable:
            self.unanswered += 1
            return []
        return [fields for line in lines if (fields := envelope.unpack(line)) is not None]

    async def publish(self, channel: str, fields: Fields) -> bool:
        """Tell every process that listens on a channel. Returns whether the store took it.

        A store that refuses only this is used as before.
        """
        if not self.in_use:
            return False
        with suppress(StoreUnavailable, TimeoutError, OSError):
            await within(DEADLINE_S, self._store.publish(channel, packed(fields)))
            return True
        return False

    async def listen(self, channel: str) -> AsyncGenerator[Fields | None, None]:
        """What is published on a channel, as it comes; None at first, and where something may be missing.

        Raises:
            StoreUnavailable: The store cannot tell, or tells no more.
        """
        async with aclosing(self._store.listen(channel)) as messages:
            async for message in messages:
                if message is None:
                    yield None
                elif (fields := envelope.unpack(message)) is not None:
                    yield fields

    async def acquire(self, key: str, ttl_s: float) -> Lease | None:
        """A lease, unless another holds it.

        Raises:
            StoreUnavailable: There is nobody to ask.
        """
        return await self._asked(lambda: self._store.acquire(key, ttl_s))

    async def renew(self, lease: Lease, ttl_s: float) -> bool:
        """Prolong a lease. False if it is another's.

        Raises:
            StoreUnavailable: There is nobody to ask.
        """
        return await self._asked(lambda: self._store.renew(lease, ttl_s))

    async def release(self, lease: Lease) -> None:
        """Give a lease back."""
        with suppress(StoreUnavailable):
            await self._asked(lambda: self._store.release(lease))

    async def forget(self, prefix: str) -> int | None:
        """Forget everything whose key begins with `prefix`; how many, or None if the store failed.

        What this process holds of it is forgotten in any case; another may use what it holds for an hour.
        What was begun before writes nothing of it, once a call that is under way has ended.
        """
        self.outdated.add(prefix)
        self.let_go(prefix)
        for forget in self.forgetters:
            forget(prefix)
        try:
            return await self._reach.ask(lambda: self._store.delete(prefix), FORGET_LIMIT_S)
        except StoreUnavailable as error:
            self._report(error)
            return None

    def let_go(self, prefix: str) -> None:
        """Hold nothing in this process whose key begins with `prefix`."""
        self._cache.forget(prefix)

    async def close(self) -> None:
        """Close the store."""
        await self.behind.close()
        await self._reach.close()
        await self._store.close()

    async def _overwritten(self, record: Record) -> bool:
        (there,) = await self._store.read([record.key])
        if there is not None and envelope.unpack(there) is None:
            return False
        if self.outdated.covers(record.key):  # since the store was asked
            return False
        await self._store.write([record])
        return True

    async def _asked(self, call: Callable[[], Awaitable[Answer]]) -> Answer:
        try:
            return await self._reach.ask(call)
        except StoreUnavailable as error:
            self._note(error)
            raise

    async def _fetched(self, keys: list[str], *, hold: bool) -> dict[str, Fields]:
        try:
            values = await self._asked(lambda: self._store.read(keys))
        except StoreUnavailable:
            self.unanswered += 1
            return {}
        there = {key: value for key, value in zip(keys, values, strict=True) if value is not None}
        found: dict[str, Fields | None]
        if hold:
            found = {key: self._remember(key, value, KNOWN_FOR_S) for key, value in there.items()}
        else:
            found = await asyncio.to_thread(lambda: {key: envelope.unpack(there[key]) for key in there})
        if None in found.values():
            self._report(StoreUnavailable(_UNREADABLE))
        return {key: fields for key, fields in found.items() if fields is not None}

    async def _committed(
        self, claim: Item, also: Sequence[Item | Line], lease: Lease | None
    ) -> Fields | None:
        # Beside the loop: the originals of a round take a while to compress.
        value, entries = await asyncio.to_thread(lambda: (packed(claim.fields), list(map(sealed, also))))
        record = Record(claim.key, value, claim.ttl_s)
        stands = await self._reach.ask(lambda: self._store.commit(record, entries, lease=lease))
        if stands is None:
            return None
        winner = self._remember(claim.key, stands, min(claim.ttl_s, KNOWN_FOR_S))
        if winner is None:
            raise StoreUnavailable(_UNREADABLE, "the key is taken by a record of another version")
        return winner

    def _unsaved(self, claim: Item, also: Sequence[Item | Line]) -> Fields:
        """What this process uses of a record that could not be saved: the first one wins here too."""
        held = self._cache.get(claim.key)
        if held is not None:
            return held
        for item in (claim, *also):
            if isinstance(item, Item):
                with suppress(StoreUnavailable):  # too large for a record; reported when it was to be saved
                    self._remember(item.key, packed(item.fields), item.ttl_s)
        return self._cache.get(claim.key) or claim.fields

    def _remember(self, key: str, value: bytes, ttl_s: float) -> Fields | None:
        fields = envelope.unpack(value)
        if fields is not None and not self.outdated.covers(key):
            self._cache.put(key, fields, size_of(value), ttl_s)
        return fields

    def _note(self, error: StoreUnavailable) -> None:
        if error.reason != RESTING:
            self._report(error)
