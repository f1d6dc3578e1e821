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

from compaction_proxy.core.errors import StoreUnavailableError
from compaction_proxy.storage import envelope
from compaction_proxy.storage.background import BackgroundTasks
from compaction_proxy.storage.deletions import DeletionFence
from compaction_proxy.storage.keys import parse_hash_tag
from compaction_proxy.storage.resilient import (
    DEADLINE_S,
    PROBE_EVERY_S,
    RESTING,
    ResilientStore,
    run_with_deadline,
)
from compaction_proxy.storage.store import Lease, ListEntry, Record, Store
from compaction_proxy.support.lru import ExpiringLruCache

Fields = Mapping[str, Any]
"""What a record says: JSON values under names. Records that come back are shared; do not change them."""


@dataclass(frozen=True, slots=True)
class RecordItem:
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
class ListItem:
    """A line to be added to a list.

    Attributes:
        key: From `storage.keys`.
        fields: What it says.
        ttl_s: Seconds until the list is forgotten, counted from its newest line.
        max_lines: Number of newest lines that stay.
    """

    key: str
    fields: Fields
    ttl_s: float
    max_lines: int


def pack_fields(fields: Fields) -> bytes:
    """The fields in an envelope.

    Raises:
        StoreUnavailable: They are too large, or no JSON values.
    """
    try:
        return envelope.pack(fields)
    except ValueError as error:
        raise StoreUnavailableError("record-unfit", str(error)) from error


def to_entry(item: RecordItem | ListItem) -> Record | ListEntry:
    """As a store takes it.

    Raises:
        StoreUnavailable: As with `pack_fields`.
    """
    value = pack_fields(item.fields)
    if isinstance(item, ListItem):
        return ListEntry(item.key, value, item.ttl_s, item.max_lines)
    return Record(item.key, value, item.ttl_s)


def count_json_bytes(value: bytes) -> int:
    """Bytes of the JSON in an envelope: what holding it in memory is about."""
    return len(envelope.extract_json(value) or b"")


__all__ = ["Fields", "ListItem", "RecordItem", "RecordStore"]

OPEN_LIMIT_S = 1.0
DELETE_LIMIT_S = 60.0
CACHE_BYTES = 16 * 1024 * 1024
CACHE_TTL_S = 3600.0
"""How long a record that stands in the store is used without asking again; others may have changed it."""

ValueT = TypeVar("ValueT")

_UNREADABLE = "store-unreadable"


class RecordStore:
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
        report: Callable[[StoreUnavailableError], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        deadline_s: float = DEADLINE_S,
        probe_every_s: float = PROBE_EVERY_S,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._store = store
        self._report = report
        self._resilient_store = ResilientStore(
            store, clock=clock, deadline_s=deadline_s, probe_every_s=probe_every_s
        )
        self._cache = ExpiringLruCache(cache_bytes, clock)
        self.deletion_fence = DeletionFence()
        self.background_tasks = BackgroundTasks()
        self.failed_reads = 0
        self.on_delete_callbacks: list[Callable[[str], None]] = []

    @property
    def is_in_use(self) -> bool:
        """Whether the store is in use; False while it is left alone."""
        return self._resilient_store.is_in_use

    @property
    def is_reachable(self) -> bool:
        """Whether the store answers, were it with a refusal to write; False from a failure until it does."""
        return self._resilient_store.is_reachable

    async def open(self, limit_s: float = OPEN_LIMIT_S) -> bool:
        """Let the store open its file or connections, within `limit_s` seconds. Whether that worked."""
        try:
            await self._resilient_store.run_call(lambda: self._store.read([]), limit_s)
        except StoreUnavailableError as error:
            self._report(error)
            return False
        return True

    async def get_many(
        self, keys: Sequence[str], *, bypass_cache: bool = False, keep_in_cache: bool = True
    ) -> list[Fields | None]:
        """The records under `keys`, in their order; None for what is absent, expired or not ours to read.

        What the process holds is taken first, and one read of the store brings the rest. With `bypass_cache`
        the store is asked for all of them, for records that other replicas overwrite; what the process holds
        then stands in for what the store does not give. Without `keep_in_cache` nothing more is held
        afterwards, and what comes is unpacked beside the loop: for much that is read seldom.
        """
        held = {key: fields for key in keys if (fields := self._cache.get(key)) is not None}
        missing = list(dict.fromkeys(keys)) if bypass_cache else [key for key in keys if key not in held]
        if missing:
            held.update(await self._fetch_records(missing, keep_in_cache=keep_in_cache))
        return [held.get(key) for key in keys]

    async def save_if_absent(
        self,
        key: str,
        fields: Fields,
        *,
        ttl_s: float,
        also: Sequence[RecordItem | ListItem] = (),
        lease: Lease | None = None,
    ) -> Fields | None:
        """Claim `key` for a record, with everything in `also`, or nothing; return the record that all use.

        That is ours, or the one that stood there first, in which case nothing of ours was written. If the
        store fails it is ours for this process, and `get_many` gives it and the records in `also`; if the key
        was forgotten meanwhile it is ours for the caller. None if `lease` was lost, and nothing written.

        Raises:
            ValueError: The keys do not share a hash tag, so no cluster could commit them at once.
        """
        if any(parse_hash_tag(item.key) != parse_hash_tag(key) for item in also):
            raise ValueError("records that are committed together share one scope")
        if self.deletion_fence.is_deleted(key):
            return fields
        claim = RecordItem(key, fields, ttl_s)
        try:
            return await self._commit_record(claim, also, lease)
        except StoreUnavailableError as error:
            self._report(error)
            return self._cache_unsaved(claim, also)

    async def overwrite(self, key: str, fields: Fields, *, ttl_s: float) -> bool:
        """Overwrite the record under `key`. Whether it was saved; this process uses it in any case.

        A record that is not ours to read, such as a newer version's, is left alone.
        """
        if self.deletion_fence.is_deleted(key):
            return False
        try:
            value = pack_fields(fields)
            self._cache_record(key, value, ttl_s)
            saved = await self._resilient_store.run_call(
                lambda: self._overwrite_readable(Record(key, value, ttl_s))
            )
        except StoreUnavailableError as error:
            self._report_failure(error)
            return False
        if not saved and not self.deletion_fence.is_deleted(key):
            self._report(StoreUnavailableError(_UNREADABLE, "a record of another version is left alone"))
        return saved

    async def append_line(self, key: str, fields: Fields, *, ttl_s: float, max_lines: int) -> bool:
        """Add a line to a list of which the newest `keep` stay. Whether it was saved."""
        return await self.write([ListItem(key, fields, ttl_s, max_lines)])

    async def write(self, items: Sequence[RecordItem | ListItem]) -> bool:
        """Overwrite records and add lines of one scope, in one call, or nothing. Whether it was saved.

        Whoever writes records so is the only one who does, or holds a lease.
        """
        if any(self.deletion_fence.is_deleted(item.key) for item in items):
            return False
        try:
            entries = list(map(to_entry, items))
            await self._resilient_store.run_call(lambda: self._store.write(entries))
        except StoreUnavailableError as error:
            self._report_failure(error)
            return False
        return True

    async def read_tail(self, key: str, limit: int) -> list[Fields]:
        """The newest `limit` lines of a list, oldest first, without those that are not ours to read."""
        try:
            lines = await self._call_store(lambda: self._store.read_tail(key, limit))
        except StoreUnavailableError:
            self.failed_reads += 1
            return []
        return [fields for line in lines if (fields := envelope.unpack(line)) is not None]

    async def publish(self, channel: str, fields: Fields) -> bool:
        """Tell every process that listens on a channel. Returns whether the store took it.

        A store that refuses only this is used as before.
        """
        if not self.is_in_use:
            return False
        with suppress(StoreUnavailableError, TimeoutError, OSError):
            await run_with_deadline(DEADLINE_S, self._store.publish(channel, pack_fields(fields)))
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

    async def acquire_lease(self, key: str, ttl_s: float) -> Lease | None:
        """A lease, unless another holds it.

        Raises:
            StoreUnavailable: There is nobody to ask.
        """
        return await self._call_store(lambda: self._store.acquire_lease(key, ttl_s))

    async def renew_lease(self, lease: Lease, ttl_s: float) -> bool:
        """Prolong a lease. False if it is another's.

        Raises:
            StoreUnavailable: There is nobody to ask.
        """
        return await self._call_store(lambda: self._store.renew_lease(lease, ttl_s))

    async def release_lease(self, lease: Lease) -> None:
        """Give a lease back."""
        with suppress(StoreUnavailableError):
            await self._call_store(lambda: self._store.release_lease(lease))

    async def delete_prefix(self, prefix: str) -> int | None:
        """Forget everything whose key begins with `prefix`; how many, or None if the store failed.

        What this process holds of it is forgotten in any case; another may use what it holds for an hour.
        What was begun before writes nothing of it, once a call that is under way has ended.
        """
        self.deletion_fence.add_deletion(prefix)
        self.evict_cached_prefix(prefix)
        for forget in self.on_delete_callbacks:
            forget(prefix)
        try:
            return await self._resilient_store.run_call(
                lambda: self._store.delete_prefix(prefix), DELETE_LIMIT_S
            )
        except StoreUnavailableError as error:
            self._report(error)
            return None

    def evict_cached_prefix(self, prefix: str) -> None:
        """Hold nothing in this process whose key begins with `prefix`."""
        self._cache.evict_prefix(prefix)

    async def close(self) -> None:
        """Close the store."""
        await self.background_tasks.close()
        await self._resilient_store.close()
        await self._store.close()

    async def _overwrite_readable(self, record: Record) -> bool:
        (stored,) = await self._store.read([record.key])
        if stored is not None and envelope.unpack(stored) is None:
            return False
        if self.deletion_fence.is_deleted(record.key):  # since the store was asked
            return False
        await self._store.write([record])
        return True

    async def _call_store(self, call: Callable[[], Awaitable[ValueT]]) -> ValueT:
        try:
            return await self._resilient_store.run_call(call)
        except StoreUnavailableError as error:
            self._report_failure(error)
            raise

    async def _fetch_records(self, keys: list[str], *, keep_in_cache: bool) -> dict[str, Fields]:
        try:
            values = await self._call_store(lambda: self._store.read(keys))
        except StoreUnavailableError:
            self.failed_reads += 1
            return {}
        there = {key: value for key, value in zip(keys, values, strict=True) if value is not None}
        found: dict[str, Fields | None]
        if keep_in_cache:
            found = {key: self._cache_record(key, value, CACHE_TTL_S) for key, value in there.items()}
        else:
            found = await asyncio.to_thread(lambda: {key: envelope.unpack(there[key]) for key in there})
        if None in found.values():
            self._report(StoreUnavailableError(_UNREADABLE))
        return {key: fields for key, fields in found.items() if fields is not None}

    async def _commit_record(
        self, claim: RecordItem, also: Sequence[RecordItem | ListItem], lease: Lease | None
    ) -> Fields | None:
        # Beside the loop: the originals of a round take a while to compress.
        value, entries = await asyncio.to_thread(
            lambda: (pack_fields(claim.fields), list(map(to_entry, also)))
        )
        record = Record(claim.key, value, claim.ttl_s)
        stands = await self._resilient_store.run_call(
            lambda: self._store.commit(record, entries, lease=lease)
        )
        if stands is None:
            return None
        winner = self._cache_record(claim.key, stands, min(claim.ttl_s, CACHE_TTL_S))
        if winner is None:
            raise StoreUnavailableError(_UNREADABLE, "the key is taken by a record of another version")
        return winner

    def _cache_unsaved(self, claim: RecordItem, also: Sequence[RecordItem | ListItem]) -> Fields:
        """What this process uses of a record that could not be saved: the first one wins here too."""
        held = self._cache.get(claim.key)
        if held is not None:
            return held
        for item in (claim, *also):
            if isinstance(item, RecordItem):
                with suppress(
                    StoreUnavailableError
                ):  # too large for a record; reported when it was to be saved
                    self._cache_record(item.key, pack_fields(item.fields), item.ttl_s)
        return self._cache.get(claim.key) or claim.fields

    def _cache_record(self, key: str, value: bytes, ttl_s: float) -> Fields | None:
        fields = envelope.unpack(value)
        if fields is not None and not self.deletion_fence.is_deleted(key):
            self._cache.put(key, fields, count_json_bytes(value), ttl_s)
        return fields

    def _report_failure(self, error: StoreUnavailableError) -> None:
        if error.reason != RESTING:
            self._report(error)
