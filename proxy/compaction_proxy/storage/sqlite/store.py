"""The embedded store: one SQLite file, shared by the processes of one machine.

A single thread runs all SQLite calls, so the event loop never waits for a disk. The first call opens the
file, and the first call after a failure opens it again. If the file cannot be used for a while, only the
calls during that time fail.
"""

import sqlite3
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

from compaction_proxy.core.errors import StoreUnavailableError
from compaction_proxy.storage.keys import derive_conversation_tenant_key
from compaction_proxy.storage.sqlite.schema import open_database, to_store_unavailable
from compaction_proxy.storage.sqlite.worker_thread import WorkerThread
from compaction_proxy.storage.store import Lease, ListEntry, Record

LEASE_LIMIT_S = 60.0
"""The longest time of a lease. If a lease has more time left, the clock was set back, and it is deleted."""

_KEYS_PER_QUERY = 500
_SWEEP_BATCH_ITEMS = 200
_EVICTION_BATCH_ITEMS = 8
_LAST_CHARACTER = "\U0010ffff"


def read_live_value(db: sqlite3.Connection, key: str, now: float) -> bytes | None:
    """Returns the value of a record, or None if it is absent or expired."""
    row = db.execute("SELECT value FROM items WHERE key = ? AND expires > ?", (key, now)).fetchone()
    return row[0] if row else None


def read_values(db: sqlite3.Connection, keys: Sequence[str], now: float) -> list[bytes | None]:
    """Returns the values under `keys`, in order; None for a key that is absent or expired."""
    values: dict[str, bytes] = {}
    rest = iter(keys)
    while batch := list(islice(rest, _KEYS_PER_QUERY)):
        marks = ",".join("?" * len(batch))
        sql = f"SELECT key, value FROM items WHERE key IN ({marks}) AND expires > ?"  # noqa: S608 - only `?`
        values.update(db.execute(sql, (*batch, now)))
    return [values.get(key) for key in keys]


def _put_record(db: sqlite3.Connection, record: Record, now: float) -> None:
    db.execute(
        "INSERT OR REPLACE INTO items (key, value, expires, written) VALUES (?, ?, ?, ?)",
        (record.key, record.value, now + record.ttl_s, now),
    )


def _put_entry(db: sqlite3.Connection, entry: ListEntry, now: float) -> None:
    db.execute("DELETE FROM items WHERE key = ? AND expires <= ?", (entry.key, now))
    db.execute(
        "INSERT INTO items (key, expires, written) VALUES (?, ?, ?) ON CONFLICT (key)"
        " DO UPDATE SET value = NULL, expires = excluded.expires, written = excluded.written",
        (entry.key, now + entry.ttl_s, now),
    )
    item = db.execute("SELECT id FROM items WHERE key = ?", (entry.key,)).fetchone()[0]
    db.execute("INSERT INTO lines (item, value) VALUES (?, ?)", (item, entry.value))
    db.execute(
        "DELETE FROM lines WHERE item = ?1 AND id <="
        " (SELECT id FROM lines WHERE item = ?1 ORDER BY id DESC LIMIT 1 OFFSET ?2)",
        (item, entry.max_lines),
    )


def put_items(db: sqlite3.Connection, items: Sequence[Record | ListEntry], now: float) -> None:
    """Writes records, replacing earlier values, and adds lines to lists."""
    for item in items:
        if isinstance(item, Record):
            _put_record(db, item, now)
        else:
            _put_entry(db, item, now)


def read_tail(db: sqlite3.Connection, key: str, limit: int, now: float) -> list[bytes]:
    """Returns the newest `limit` lines of a list, oldest first."""
    rows = db.execute(
        "SELECT lines.value FROM items JOIN lines ON lines.item = items.id"
        " WHERE items.key = ? AND items.expires > ? ORDER BY lines.id DESC LIMIT ?",
        (key, now, max(limit, 0)),
    )
    return [value for (value,) in rows][::-1]


def _read_used_bytes(db: sqlite3.Connection) -> int:
    """Returns the bytes of the file's used pages. SQLite reuses the free pages before the file grows."""
    pages, free, size = (
        int(db.execute(f"PRAGMA {name}").fetchone()[0])
        for name in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * size


def evict_until_fits(db: sqlite3.Connection, max_bytes: int) -> None:
    """Deletes the items that were written longest ago until at most `max_bytes` are used."""
    while _read_used_bytes(db) > max_bytes:
        deletion = db.execute(
            "DELETE FROM items WHERE id IN (SELECT id FROM items ORDER BY written, id LIMIT ?)",
            (_EVICTION_BATCH_ITEMS,),
        )
        if not deletion.rowcount:
            return


def sweep_expired(db: sqlite3.Connection, now: float) -> bool:
    """Deletes at most `_SWEEP_BATCH_ITEMS` expired items. Returns whether no expired item is left."""
    deletion = db.execute(
        "DELETE FROM items WHERE id IN (SELECT id FROM items WHERE expires <= ? LIMIT ?)",
        (now, _SWEEP_BATCH_ITEMS),
    )
    return deletion.rowcount < _SWEEP_BATCH_ITEMS


def delete_prefix(db: sqlite3.Connection, prefix: str, now: float) -> int:
    """Deletes keys as `Store.delete_prefix` does. Returns the number of unexpired records and lists."""
    end = prefix + _LAST_CHARACTER
    db.execute("DELETE FROM leases WHERE key >= ? AND key < ?", (prefix, end))
    db.execute("DELETE FROM items WHERE key >= ? AND key < ? AND expires <= ?", (prefix, end, now))
    keys = db.execute("SELECT key FROM items WHERE key >= ? AND key < ?", (prefix, end)).fetchall()
    tenant_keys = {derive_conversation_tenant_key(key) for (key,) in keys} - {None}
    deleted = db.execute("DELETE FROM items WHERE key >= ? AND key < ?", (prefix, end)).rowcount
    db.executemany("DELETE FROM items WHERE key = ?", [(tenant_key,) for tenant_key in tenant_keys])
    return deleted


def acquire_lease(db: sqlite3.Connection, key: str, ttl_s: float, now: float) -> Lease | None:
    """Returns a lease on `key` for at most `LEASE_LIMIT_S`, or None if another process holds one."""
    db.execute("DELETE FROM leases WHERE expires <= ? OR expires > ?", (now, now + LEASE_LIMIT_S))
    end = now + min(ttl_s, LEASE_LIMIT_S)
    insertion = db.execute("INSERT OR IGNORE INTO leases (key, expires) VALUES (?, ?)", (key, end))
    return Lease(key, insertion.lastrowid) if insertion.rowcount and insertion.lastrowid else None


def is_lease_held(db: sqlite3.Connection, lease: Lease, now: float) -> bool:
    """Returns whether a lease is neither expired nor lost."""
    sql = "SELECT 1 FROM leases WHERE key = ? AND fence = ? AND expires > ?"
    return db.execute(sql, (lease.key, lease.fence, now)).fetchone() is not None


def renew_lease(db: sqlite3.Connection, lease: Lease, ttl_s: float, now: float) -> bool:
    """Extends a lease to `ttl_s`, at most `LEASE_LIMIT_S`, seconds from now. Returns False if it is lost."""
    sql = "UPDATE leases SET expires = ? WHERE key = ? AND fence = ? AND expires > ?"
    end = now + min(ttl_s, LEASE_LIMIT_S)
    return bool(db.execute(sql, (end, lease.key, lease.fence, now)).rowcount)


def release_lease(db: sqlite3.Connection, lease: Lease) -> None:
    """Releases a lease. Does nothing if it is lost."""
    db.execute("DELETE FROM leases WHERE key = ? AND fence = ?", (lease.key, lease.fence))


DEFAULT_MAX_BYTES = 1024 * 1024 * 1024
_SWEEP_EVERY_S = 30.0
_CLOSE_LIMIT_S = 1.0

_T = TypeVar("_T")
_Items = Sequence[Record | ListEntry]


def _run_in_transaction(work: Callable[[sqlite3.Connection], _T], db: sqlite3.Connection) -> _T:
    with db:
        db.execute("BEGIN IMMEDIATE")
        return work(db)


class SqliteStore:
    """Implements `store.Store` in the file at `path`.

    Args:
        path: The file. The first call creates it if absent.
        max_bytes: Maximum bytes of the file's used pages. If they are exceeded, the items that were written
            longest ago are deleted. SQLite's log is a separate file and takes additional space.
        now: Returns the seconds since the epoch. Expiry times are stored in the file, so all processes must
            use the same clock.
    """

    def __init__(
        self, path: Path, *, max_bytes: int = DEFAULT_MAX_BYTES, now: Callable[[], float] = time.time
    ) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._now = now
        self._worker = WorkerThread("compaction-store")
        # Only the worker thread uses the following fields.
        self._db: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None
        self._swept_at = 0.0

    async def read(self, keys: Sequence[str]) -> list[bytes | None]:
        """Returns the values under `keys`; None for a key that is absent or expired."""
        return await self._run_on_thread(partial(read_values, keys=keys, now=self._now()))

    async def commit(
        self, claim: Record, other_items: _Items = (), *, lease: Lease | None = None
    ) -> bytes | None:
        """Commits all items or none, as `Store.commit` specifies."""
        return await self._run_on_thread(
            partial(self._commit_items, claim=claim, other_items=other_items, lease=lease, now=self._now())
        )

    async def write(self, items: _Items) -> None:
        """Writes all items, or raises and writes nothing."""
        await self._run_on_thread(partial(self._write_items, items=items, now=self._now()))

    async def read_tail(self, key: str, limit: int) -> list[bytes]:
        """Returns the newest `limit` lines of a list, oldest first."""
        return await self._run_on_thread(partial(read_tail, key=key, limit=limit, now=self._now()))

    async def acquire_lease(self, key: str, ttl_s: float) -> Lease | None:
        """Returns a lease on `key`, or None if another process holds one."""
        return await self._run_transaction(partial(acquire_lease, key=key, ttl_s=ttl_s, now=self._now()))

    async def renew_lease(self, lease: Lease, ttl_s: float) -> bool:
        """Extends a lease to `ttl_s` seconds from now. Returns False if it is lost."""
        return await self._run_transaction(partial(renew_lease, lease=lease, ttl_s=ttl_s, now=self._now()))

    async def release_lease(self, lease: Lease) -> None:
        """Releases a lease. Does nothing if it is lost."""
        await self._run_transaction(partial(release_lease, lease=lease))

    async def delete_prefix(self, prefix: str) -> int:
        """Deletes keys as `Store.delete_prefix` does. Returns the number of unexpired records and lists."""
        return await self._run_transaction(partial(delete_prefix, prefix=prefix, now=self._now()))

    async def publish(self, channel: str, message: bytes) -> None:
        """Does nothing, because the file offers no way to notify other processes."""

    async def listen(self, channel: str) -> AsyncGenerator[bytes | None, None]:  # noqa: ARG002 - signature of the protocol
        """Yields nothing and ends at once."""
        return
        yield

    async def close(self) -> None:
        """Finishes the waiting calls and closes the file. Waits at most one second for this."""
        await self._worker.close(self._close_connection, _CLOSE_LIMIT_S)

    async def _run_on_thread(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        return await self._worker.run(partial(self._run_with_connection, work))

    async def _run_transaction(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """Runs `work` on the worker thread, in a write transaction."""
        return await self._run_on_thread(partial(_run_in_transaction, work))

    def _run_with_connection(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        try:
            return work(self._get_connection())
        except (sqlite3.Error, OSError) as error:
            self._close_connection()
            raise to_store_unavailable(error) from error

    def _get_connection(self) -> sqlite3.Connection:
        """Returns the connection. Opens the file if it is not open, or if it was removed or replaced."""
        if self._db is not None and self._file != self._read_file_identity():
            self._close_connection()
        if self._db is None:
            self._db = open_database(self._path)
            self._file = self._read_file_identity()
        return self._db

    def _read_file_identity(self) -> tuple[int, int] | None:
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino

    def _close_connection(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            db.close()

    def _commit_items(
        self, db: sqlite3.Connection, claim: Record, other_items: _Items, lease: Lease | None, now: float
    ) -> bytes | None:
        with db:
            db.execute("BEGIN IMMEDIATE")
            stored = read_live_value(db, claim.key, now)
            if stored is not None:
                return stored
            if lease is not None and not is_lease_held(db, lease, now):
                return None
            self._free_space(db, [claim, *other_items], now)
            put_items(db, [claim, *other_items], now)
        return claim.value

    def _write_items(self, db: sqlite3.Connection, items: _Items, now: float) -> None:
        with db:
            db.execute("BEGIN IMMEDIATE")
            self._free_space(db, items, now)
            put_items(db, items, now)

    def _free_space(self, db: sqlite3.Connection, items: _Items, now: float) -> None:
        """Makes room for `items`, and deletes expired items from time to time. Call it in a transaction."""
        needed = sum(len(item.key) + len(item.value) for item in items)
        if needed > self._max_bytes:
            raise StoreUnavailableError("store-too-large", "more than the store may hold")
        if abs(now - self._swept_at) >= _SWEEP_EVERY_S and sweep_expired(db, now):
            self._swept_at = now
        evict_until_fits(db, self._max_bytes - needed)
