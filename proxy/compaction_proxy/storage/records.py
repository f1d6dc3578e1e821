"""Reads and writes records in a store that may be slow, broken or unreachable.

A store that does not answer in time, or that fails repeatedly, is suspended. A suspended store gets only test
calls, until one of them succeeds (`storage.resilient`). Each process caches the records that it has recently
read or written, and looks in its cache first. A record that could not be saved stays in the cache, and this
process uses it from there.

When a store opens its file or connections for the first time, this may take longer than the deadline of a
call, for example because the store migrates its tables. `RecordStore.open` allows more time at start-up. If
the opening takes even longer, it continues in the background, and the store is used as soon as a test call
succeeds.
"""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Hashable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from compaction_proxy.core.errors import StoreUnavailableError
from compaction_proxy.storage import envelope
from compaction_proxy.storage.deletions import DeletionFence
from compaction_proxy.storage.keys import parse_hash_tag
from compaction_proxy.storage.resilient import (
    DEADLINE_S,
    PROBE_INTERVAL_S,
    RESTING_REASON,
    ResilientStore,
    run_with_deadline,
)
from compaction_proxy.storage.store import Lease, ListEntry, Record, Store
from compaction_proxy.storage.store_failure import StoreFailure
from compaction_proxy.support.lru import LruCache
from compaction_proxy.support.offload import run_in_worker_if_large

Fields = Mapping[str, Any]
"""The content of a record: JSON values by name. All readers share one cached object; do not change it."""


@dataclass(frozen=True, slots=True)
class RecordItem:
    """A record to write, alone or together with other items.

    Attributes:
        key: The store key, from `storage.keys`.
        fields: The fields of the record, as JSON values.
        ttl_s: Seconds until the record expires.
    """

    key: str
    fields: Fields
    ttl_s: float


@dataclass(frozen=True, slots=True)
class ListItem:
    """A line to add to a list.

    Attributes:
        key: The store key of the list, from `storage.keys`.
        fields: The content of the line.
        ttl_s: Seconds until the list expires, counted from its newest line.
        max_lines: Number of newest lines that the list keeps.
    """

    key: str
    fields: Fields
    ttl_s: float
    max_lines: int


def pack_fields(fields: Fields) -> bytes:
    """Encodes the fields as an envelope (`storage.envelope`).

    Raises:
        StoreUnavailableError: If the fields are too large, or contain a number that is not finite.
    """
    try:
        return envelope.pack(fields)
    except ValueError as error:
        raise StoreUnavailableError("record-unfit", str(error)) from error


def to_entry(item: RecordItem | ListItem) -> Record | ListEntry:
    """Converts an item to the form that a `Store` writes.

    Raises:
        StoreUnavailableError: Under the conditions that `pack_fields` documents.
    """
    value = pack_fields(item.fields)
    if isinstance(item, ListItem):
        return ListEntry(item.key, value, item.ttl_s, item.max_lines)
    return Record(item.key, value, item.ttl_s)


OPEN_LIMIT_S = 1.0
DELETE_LIMIT_S = 60.0
CACHE_BYTES = 16 * 1024 * 1024
# Additional size of each cached record, in bytes. A record counts as this many bytes, plus the length of its
# key, plus twice its JSON size, because the decoded fields take more memory than the JSON.
ENTRY_BYTES = 600
# The JSON of a large record usually has at most this many times as many bytes as its compressed form.
USUAL_DEFLATION = 8
CACHE_TTL_S = 3600.0
"""How long a cached record is used without a new read; other processes may change it meanwhile."""

ValueT = TypeVar("ValueT")

_UNREADABLE = "store-unreadable"
# Maximum number of background tasks that run at the same time. While so many run, `start_once` starts none.
MAX_BACKGROUND_TASKS = 8


class BackgroundTasks:
    """Runs background tasks on one event loop, at most one per key at a time. No task may raise."""

    def __init__(self) -> None:
        self._tasks: dict[Hashable, asyncio.Task[object]] = {}

    @property
    def has_running_tasks(self) -> bool:
        """Whether any task is running."""
        return bool(self._tasks)

    def start_once(self, key: Hashable, create_work: Callable[[], Coroutine[object, object, object]]) -> bool:
        """Starts the coroutine that `create_work` returns as a task. Returns whether it was started.

        Does not start it while a task with the same key or `MAX_BACKGROUND_TASKS` other tasks are running.
        """
        if key in self._tasks or len(self._tasks) >= MAX_BACKGROUND_TASKS:
            return False
        self._tasks[key] = task = asyncio.create_task(create_work())
        task.add_done_callback(lambda _: self._tasks.pop(key, None))
        return True

    async def close(self) -> None:
        """Cancels the running tasks and waits until they have ended."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class RecordStore:
    """Reads and writes records by key, with a cache in the process.

    No method raises if the store fails, except `listen`, `acquire_lease` and `renew_lease`. Each failure is
    passed to `report` once, except failures of `publish` and `listen`. While the store is suspended, every
    call of the store fails immediately, and only `open`, `save_if_absent` and `delete_prefix` report these
    failures.

    Args:
        store: The store that keeps the records.
        report: Called with each failure.
        clock: Returns monotonic seconds.
        deadline_s: Maximum duration of one call of the store, in seconds.
        probe_every_s: Seconds between two test calls of a store that does not answer.
        cache_bytes: Maximum size of the cache, in bytes. See `ENTRY_BYTES` for the size of a record.

    Attributes:
        deletion_fence: Prevents work that began before the deletion of a key from writing the key again.
        background_tasks: Runs work for which no request waits. `close` cancels it.
        failed_reads: Number of failed reads since the start. A caller that makes several reads compares the
            number before and after them. If it has changed, data may be missing.
        on_delete_callbacks: Functions that are called with the prefix of deleted keys. Each must drop what it
            has in memory for these keys, so that it is not written again.
    """

    def __init__(
        self,
        store: Store,
        report: Callable[[StoreUnavailableError], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        deadline_s: float = DEADLINE_S,
        probe_every_s: float = PROBE_INTERVAL_S,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._store = store
        self._report = report
        self._resilient_store = ResilientStore(
            store, clock=clock, deadline_s=deadline_s, probe_every_s=probe_every_s
        )
        # The fields of each record, and the time in monotonic seconds until which they are used.
        self._cache: LruCache[str, tuple[Fields, float]] = LruCache(cache_bytes)
        self._clock = clock
        self.deletion_fence = DeletionFence()
        self.background_tasks = BackgroundTasks()
        self.failed_reads = 0
        self.on_delete_callbacks: list[Callable[[str], None]] = []

    @property
    def is_in_use(self) -> bool:
        """Whether the store is in use; False while it is suspended."""
        return self._resilient_store.is_in_use

    @property
    def is_reachable(self) -> bool:
        """Whether no store call has failed since the last success. A refusal to write is not a failure."""
        return self._resilient_store.is_reachable

    @property
    def failure(self) -> StoreFailure | None:
        """The failure if the store is unreachable or refused a write in the last minute, otherwise None."""
        return self._resilient_store.failure

    async def open(self, limit_s: float = OPEN_LIMIT_S) -> bool:
        """Opens the store's file or connections. Returns whether this succeeded within `limit_s` seconds."""
        try:
            await self._resilient_store.run_call(lambda: self._store.read([]), limit_s)
        except StoreUnavailableError as error:
            self._report(error)
            return False
        return True

    async def get_many(
        self, keys: Sequence[str], *, bypass_cache: bool = False, keep_in_cache: bool = True
    ) -> list[Fields | None]:
        """Returns the records under `keys`, in order; None for each that is absent, expired or unreadable.

        If the store fails, also returns None for each record that is not in the cache.

        Uses cached records first, and reads the others from the store in one call.

        Args:
            keys: The store keys of the records.
            bypass_cache: Whether to read all records from the store, because other replicas may have
                overwritten them. A cached record is then used only if the store does not return it.
            keep_in_cache: Whether to cache the records that are read. If False, they are decoded in a thread.
                Use False for large amounts of data that are seldom read.
        """
        records = {key: fields for key in keys if (fields := self._get_cached(key)) is not None}
        missing = list(dict.fromkeys(keys)) if bypass_cache else [key for key in keys if key not in records]
        if missing:
            records.update(await self._fetch_records(missing, keep_in_cache=keep_in_cache))
        return [records.get(key) for key in keys]

    async def save_if_absent(
        self,
        key: str,
        fields: Fields,
        *,
        ttl_s: float,
        other_items: Sequence[RecordItem | ListItem] = (),
        lease: Lease | None = None,
    ) -> Fields | None:
        """Commits a record and `other_items` together, unless a record is already stored under `key`.

        Returns the record that is valid from now on. If a record is stored already, that record stays valid
        and nothing is written. Otherwise the new record is valid. If the store fails, returns the record
        under `key` in the cache. If there is none, caches the new record and those in `other_items`, and
        returns the new record. If the key was deleted after the caller's work began, returns the new record,
        but neither stores nor caches it. Returns None, and writes nothing, if `lease` has expired or was
        released.

        Raises:
            ValueError: If the keys do not share a hash tag, so a cluster could not commit them together.
        """
        if any(parse_hash_tag(item.key) != parse_hash_tag(key) for item in other_items):
            raise ValueError("records of one commit must have the same scope")
        if self.deletion_fence.is_deleted(key):
            return fields
        claim = RecordItem(key, fields, ttl_s)
        try:
            return await self._commit_record(claim, other_items, lease)
        except StoreUnavailableError as error:
            self._report(error)
            return self._cache_unsaved(claim, other_items)

    async def overwrite(
        self, key: str, fields: Fields, *, ttl_s: float, other_items: Sequence[RecordItem | ListItem] = ()
    ) -> bool:
        """Overwrites a record and writes `other_items` together. Returns whether the new record was saved.

        If the store fails, this process uses the new record from its cache. A stored record that cannot be
        decoded, such as one of a newer version, is not overwritten. A key that was deleted after the caller's
        work began is not written. In both cases, `other_items` are not written either. Their keys must share
        the scope of `key`.
        """
        if self.deletion_fence.is_deleted(key):
            return False
        try:
            value = pack_fields(fields)
            entries = list(map(to_entry, other_items))
            self._cache_record(key, value, ttl_s)
            saved = await self._resilient_store.run_call(
                lambda: self._overwrite_readable(Record(key, value, ttl_s), entries)
            )
        except StoreUnavailableError as error:
            self._report_failure(error)
            return False
        if not saved and not self.deletion_fence.is_deleted(key):
            self._report(StoreUnavailableError(_UNREADABLE, "a record of another version is not changed"))
        return saved

    async def append_line(self, key: str, fields: Fields, *, ttl_s: float, max_lines: int) -> bool:
        """Adds a line to a list, which keeps its newest `max_lines` lines. Returns whether this succeeded."""
        return await self.write([ListItem(key, fields, ttl_s, max_lines)])

    async def write(self, items: Sequence[RecordItem | ListItem]) -> bool:
        """Overwrites records and adds lines in one call. Returns whether all were saved.

        All keys must share a scope. The caller must be the only writer of these records, or hold a lease.
        Writes nothing if one of the keys was deleted after the caller's work began.
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
        """Returns the newest `limit` lines of a list, oldest first. Skips lines that cannot be decoded.

        Returns an empty list if the store fails.
        """
        try:
            lines = await self._call_store(lambda: self._store.read_tail(key, limit))
        except StoreUnavailableError:
            self.failed_reads += 1
            return []
        return [fields for line in lines if (fields := envelope.unpack(line)) is not None]

    async def publish(self, channel: str, fields: Fields) -> bool:
        """Sends a message to every process that listens on a channel. Returns whether the store accepted it.

        Does not call the store while it is suspended. Does not report a failure or suspend the store for it.
        """
        if not self.is_in_use:
            return False
        with suppress(StoreUnavailableError, TimeoutError, OSError):
            await run_with_deadline(DEADLINE_S, self._store.publish(channel, pack_fields(fields)))
            return True
        return False

    async def listen(self, channel: str) -> AsyncGenerator[Fields | None, None]:
        """Yields the messages that any process publishes on a channel.

        Yields None when the subscription begins, and again whenever messages may have been missed.

        Raises:
            StoreUnavailableError: If the store cannot deliver messages, or has stopped delivering them.
        """
        async with aclosing(self._store.listen(channel)) as messages:
            async for message in messages:
                if message is None:
                    yield None
                elif (fields := envelope.unpack(message)) is not None:
                    yield fields

    async def acquire_lease(self, key: str, ttl_s: float) -> Lease | None:
        """Returns a lease on `key`, or None if there is a lease on it already.

        Raises:
            StoreUnavailableError: If the store does not answer.
        """
        return await self._call_store(lambda: self._store.acquire_lease(key, ttl_s))

    async def renew_lease(self, lease: Lease, ttl_s: float) -> bool:
        """Extends a lease to `ttl_s` seconds from now. Returns False if it has expired or was released.

        Raises:
            StoreUnavailableError: If the store does not answer.
        """
        return await self._call_store(lambda: self._store.renew_lease(lease, ttl_s))

    async def release_lease(self, lease: Lease) -> None:
        """Releases a lease. Reports a failure, but does not raise."""
        with suppress(StoreUnavailableError):
            await self._call_store(lambda: self._store.release_lease(lease))

    async def delete_prefix(self, prefix: str) -> int | None:
        """Deletes all records and lists whose keys begin with `prefix`.

        Returns their number, or None if the store failed.

        Removes these records from the cache of this process even if the store fails. Other processes may use
        their cached records for up to an hour. Work of this process that began before the deletion does not
        write these keys again, except in store calls that are already in progress.
        """
        self.deletion_fence.add_deletion(prefix)
        self.evict_cached_prefix(prefix)
        for callback in self.on_delete_callbacks:
            callback(prefix)
        try:
            return await self._resilient_store.run_call(
                lambda: self._store.delete_prefix(prefix), DELETE_LIMIT_S
            )
        except StoreUnavailableError as error:
            self._report(error)
            return None

    def evict_cached_prefix(self, prefix: str) -> None:
        """Removes all cached records whose keys begin with `prefix`."""
        for key in self._cache.list_keys():
            if key.startswith(prefix):
                self._cache.remove(key)

    async def close(self) -> None:
        """Cancels the background tasks and closes the store."""
        await self.background_tasks.close()
        await self._resilient_store.close()
        await self._store.close()

    async def _overwrite_readable(self, record: Record, others: Sequence[Record | ListEntry]) -> bool:
        (stored,) = await self._store.read([record.key])
        if stored is not None and envelope.unpack(stored) is None:
            return False
        if self.deletion_fence.is_deleted(record.key):  # deleted during the read
            return False
        await self._store.write([record, *others])
        return True

    async def _call_store(self, call: Callable[[], Coroutine[Any, Any, ValueT]]) -> ValueT:
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
        present = {key: value for key, value in zip(keys, values, strict=True) if value is not None}
        decoded: dict[str, Fields | None]
        if keep_in_cache:
            decoded = {
                key: await self._decode_and_cache(key, value, CACHE_TTL_S) for key, value in present.items()
            }
        else:
            decoded = await asyncio.to_thread(lambda: {key: envelope.unpack(present[key]) for key in present})
        if None in decoded.values():
            self._report(StoreUnavailableError(_UNREADABLE))
        return {key: fields for key, fields in decoded.items() if fields is not None}

    async def _commit_record(
        self, claim: RecordItem, other_items: Sequence[RecordItem | ListItem], lease: Lease | None
    ) -> Fields | None:
        # A thread encodes the items, because they may contain the original messages of a compaction.
        # Compressing these on the event loop would delay other requests.
        value, entries = await asyncio.to_thread(
            lambda: (pack_fields(claim.fields), list(map(to_entry, other_items)))
        )
        record = Record(claim.key, value, claim.ttl_s)
        stored = await self._resilient_store.run_call(
            lambda: self._store.commit(record, entries, lease=lease)
        )
        if stored is None:
            return None
        winner = await self._decode_and_cache(claim.key, stored, min(claim.ttl_s, CACHE_TTL_S))
        if winner is None:
            raise StoreUnavailableError(_UNREADABLE, "the key belongs to a record of another version")
        return winner

    def _cache_unsaved(self, claim: RecordItem, other_items: Sequence[RecordItem | ListItem]) -> Fields:
        """Caches records that could not be saved, unless `claim.key` is cached already.

        Returns the fields that are cached under `claim.key`, or those of `claim` if nothing could be cached.
        """
        cached = self._get_cached(claim.key)
        if cached is not None:
            return cached
        for item in (claim, *other_items):
            if isinstance(item, RecordItem):
                with suppress(
                    StoreUnavailableError
                ):  # too large for a record; the failed save has reported it
                    self._cache_record(item.key, pack_fields(item.fields), item.ttl_s)
        return self._get_cached(claim.key) or claim.fields

    def _get_cached(self, key: str) -> Fields | None:
        fields, expires = self._cache.get(key) or (None, math.inf)
        if expires <= self._clock():
            self._cache.remove(key)
            return None
        return fields

    async def _decode_and_cache(self, key: str, value: bytes, ttl_s: float) -> Fields | None:
        """Decodes a record, in a thread if it is large, and caches it."""
        json_bytes = USUAL_DEFLATION * len(value)
        decoded = await run_in_worker_if_large(json_bytes, partial(_decode_record, value))
        return self._cache_record(key, value, ttl_s, decoded)

    def _cache_record(
        self, key: str, value: bytes, ttl_s: float, decoded: tuple[Fields | None, int] | None = None
    ) -> Fields | None:
        fields, json_bytes = decoded or _decode_record(value)
        if fields is not None and not self.deletion_fence.is_deleted(key):
            size = 2 * json_bytes + len(key) + ENTRY_BYTES
            self._cache.put(key, (fields, self._clock() + ttl_s), size)
        return fields

    def _report_failure(self, error: StoreUnavailableError) -> None:
        if error.reason != RESTING_REASON:
            self._report(error)


def _decode_record(value: bytes) -> tuple[Fields | None, int]:
    """Returns the fields of a record, or None if they cannot be read, and the size of its JSON in bytes."""
    return envelope.unpack(value), len(envelope.extract_json(value) or b"")
