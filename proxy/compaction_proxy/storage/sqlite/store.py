"""The store in an SQLite file, which the processes of one machine can share.

A single thread runs all SQLite calls, so the event loop never waits for a disk. The first call opens the
file, and the first call after a failure opens it again. If the file cannot be used for a while, only the
calls during that time fail.
"""

import asyncio
import sqlite3
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from compaction_proxy.core.errors import StoreUnavailableError
from compaction_proxy.storage.keys import derive_conversation_tenant_key
from compaction_proxy.storage.sqlite.schema import open_database, to_store_unavailable
from compaction_proxy.storage.store import Lease, ListEntry, Record
from compaction_proxy.support.fail_open import suppress_and_report

DEFAULT_MAX_BYTES = 1024 * 1024 * 1024
LEASE_LIMIT_S = 60.0
"""The longest time of a lease. A lease with more time left is deleted: the clock was set back."""

_KEYS_PER_QUERY = 500
_SWEEP_EVERY_S = 30.0
_SWEEP_BATCH_ITEMS = 200
_EVICTION_BATCH_ITEMS = 8
_CLOSE_LIMIT_S = 1.0
_LAST_CHARACTER = "\U0010ffff"

_T = TypeVar("_T")
_Calls = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


def _run_calls(calls: _Calls) -> None:
    while (call := calls.get()) is not None:
        future, work = call
        if future.set_running_or_notify_cancel():
            # If `work` raises an error, the future raises it again in the caller that awaits the result.
            with suppress_and_report(future.set_exception):
                future.set_result(work())


class WorkerThread:
    """A daemon thread that runs calls one after the other.

    It replaces a `ThreadPoolExecutor`: when the process ends, Python waits for the threads of an executor, so
    a call that hangs would keep the process alive forever. The thread starts with the first call.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: _Calls = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    async def run(self, work: Callable[[], _T]) -> _T:
        """Runs `work` on the thread, and returns its result or raises its error.

        If the caller is cancelled, a call that has not begun is dropped.

        Raises:
            StoreUnavailableError: If the worker is closed.
        """
        if self._closed:
            raise StoreUnavailableError("store-closed")
        return await asyncio.wrap_future(self._submit_call(work))

    async def close(self, final_call: Callable[[], None], limit_s: float) -> None:
        """Waits for the calls that were made before, then runs `final_call` on the thread.

        Returns after `limit_s` seconds at the latest, even if the calls are not finished. `final_call` then
        runs after them. If no call was ever made, does not run `final_call`.
        """
        if self._closed:
            return
        self._closed = True
        if self._thread is None:
            return
        done = self._submit_call(final_call)
        self._calls.put(None)
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await asyncio.shield(asyncio.wrap_future(done))

    def _submit_call(self, work: Callable[[], _T]) -> Future[_T]:
        if self._thread is None:
            self._thread = threading.Thread(
                target=_run_calls, args=(self._calls,), name=self._name, daemon=True
            )
            self._thread.start()
        future: Future[_T] = Future()
        self._calls.put((future, work))
        return future


_Items = Sequence[Record | ListEntry]


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
        now = self._now()
        return await self._run_on_thread(lambda db: _read_values(db, keys, now))

    async def commit(
        self, claim: Record, other_items: _Items = (), *, lease: Lease | None = None
    ) -> bytes | None:
        """Commits all items or none, as `Store.commit` specifies."""
        now = self._now()

        def commit_items(db: sqlite3.Connection) -> bytes | None:
            [stored] = _read_values(db, [claim.key], now)
            if stored is not None:
                return stored
            if lease is not None and not _is_lease_held(db, lease, now):
                return None
            self._write_items(db, [claim, *other_items], now)
            return claim.value

        return await self._run_transaction(commit_items)

    async def write(self, items: _Items) -> None:
        """Writes all items, or raises and writes nothing."""
        now = self._now()
        await self._run_transaction(lambda db: self._write_items(db, items, now))

    async def read_tail(self, key: str, limit: int) -> list[bytes]:
        """Returns the newest `limit` lines of a list, oldest first."""
        sql = (
            "SELECT lines.value FROM items JOIN lines ON lines.item = items.id"
            " WHERE items.key = ? AND items.expires > ? ORDER BY lines.id DESC LIMIT ?"
        )
        row = (key, self._now(), max(limit, 0))
        return await self._run_on_thread(lambda db: [value for (value,) in db.execute(sql, row)][::-1])

    async def acquire_lease(self, key: str, ttl_s: float) -> Lease | None:
        """Returns a lease on `key`, or None if there is a lease on it already.

        The lease lasts `ttl_s` seconds, but at most `LEASE_LIMIT_S`.
        """

        def insert_lease(db: sqlite3.Connection) -> Lease | None:
            # The time is read inside the transaction. If it were read before, a process that waits for the
            # file would take a lease that another process got meanwhile for one from before a change of the
            # clock.
            now = self._now()
            row = (key, now + min(ttl_s, LEASE_LIMIT_S))
            db.execute("DELETE FROM leases WHERE expires <= ? OR expires > ?", (now, now + LEASE_LIMIT_S))
            insertion = db.execute("INSERT OR IGNORE INTO leases (key, expires) VALUES (?, ?)", row)
            return Lease(key, insertion.lastrowid) if insertion.rowcount and insertion.lastrowid else None

        return await self._run_transaction(insert_lease)

    async def renew_lease(self, lease: Lease, ttl_s: float) -> bool:
        """Extends a lease to `ttl_s` or `LEASE_LIMIT_S` seconds from now, whichever is less.

        Returns False if the lease has expired or was released.
        """
        sql = "UPDATE leases SET expires = ? WHERE key = ? AND fence = ? AND expires > ?"
        now = self._now()
        row = (now + min(ttl_s, LEASE_LIMIT_S), lease.key, lease.fence, now)
        return await self._run_transaction(lambda db: db.execute(sql, row).rowcount > 0)

    async def release_lease(self, lease: Lease) -> None:
        """Releases a lease. Does nothing if it has expired or was released."""
        sql, row = "DELETE FROM leases WHERE key = ? AND fence = ?", (lease.key, lease.fence)
        await self._run_transaction(lambda db: db.execute(sql, row))

    async def delete_prefix(self, prefix: str) -> int:
        """Deletes keys as `Store.delete_prefix` does. Returns how many records and lists it deleted.

        Those that had already expired are deleted, too, but not counted.
        """
        now, span = self._now(), (prefix, prefix + _LAST_CHARACTER)

        def delete_keys(db: sqlite3.Connection) -> int:
            db.execute("DELETE FROM leases WHERE key >= ? AND key < ?", span)
            db.execute("DELETE FROM items WHERE key >= ? AND key < ? AND expires <= ?", (*span, now))
            keys = db.execute("SELECT key FROM items WHERE key >= ? AND key < ?", span).fetchall()
            tenant_keys = {derive_conversation_tenant_key(key) for (key,) in keys} - {None}
            deleted = db.execute("DELETE FROM items WHERE key >= ? AND key < ?", span).rowcount
            db.executemany("DELETE FROM items WHERE key = ?", [(key,) for key in tenant_keys])
            return deleted

        return await self._run_transaction(delete_keys)

    async def publish(self, channel: str, message: bytes) -> None:
        """Does nothing, because the file offers no way to notify other processes."""

    async def listen(self, channel: str) -> AsyncGenerator[bytes | None, None]:  # noqa: ARG002 - signature of the protocol
        """Yields nothing, because the file offers no way to notify other processes."""
        return
        yield

    async def close(self) -> None:
        """Waits for the earlier calls and closes the file. Returns after at most one second in any case."""
        await self._worker.close(self._close_connection, _CLOSE_LIMIT_S)

    async def _run_on_thread(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        return await self._worker.run(lambda: self._run_with_connection(work))

    async def _run_transaction(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        def run_and_commit(db: sqlite3.Connection) -> _T:
            with db:
                db.execute("BEGIN IMMEDIATE")
                return work(db)

        return await self._run_on_thread(run_and_commit)

    def _run_with_connection(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        try:
            return work(self._get_connection())
        except (sqlite3.Error, OSError) as error:
            self._close_connection()
            raise to_store_unavailable(error) from error

    def _get_connection(self) -> sqlite3.Connection:
        """Returns the connection. Opens the file first if it is not open, was removed or was replaced."""
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

    def _write_items(self, db: sqlite3.Connection, items: _Items, now: float) -> None:
        """Deletes the items written longest ago until there is room, then writes `items`.

        Call this method within a transaction. From time to time, it also deletes expired items.

        Raises:
            StoreUnavailableError: If the items together have more than `max_bytes` bytes.
        """
        needed = sum(len(item.key) + len(item.value) for item in items)
        if needed > self._max_bytes:
            raise StoreUnavailableError("store-too-large", "more than the store can contain")
        if abs(now - self._swept_at) >= _SWEEP_EVERY_S and _sweep_expired(db, now):
            self._swept_at = now
        _evict_until_fits(db, self._max_bytes - needed)
        for item in items:
            if isinstance(item, Record):
                db.execute(
                    "INSERT OR REPLACE INTO items (key, value, expires, written) VALUES (?, ?, ?, ?)",
                    (item.key, item.value, now + item.ttl_s, now),
                )
            else:
                _append_line(db, item, now)


def _read_values(db: sqlite3.Connection, keys: Sequence[str], now: float) -> list[bytes | None]:
    """Returns the values under `keys`, in order; None for a key that is absent or expired."""
    values: dict[str, bytes] = {}
    for start in range(0, len(keys), _KEYS_PER_QUERY):
        batch = keys[start : start + _KEYS_PER_QUERY]
        marks = ",".join("?" * len(batch))
        sql = f"SELECT key, value FROM items WHERE key IN ({marks}) AND expires > ?"  # noqa: S608 - only `?`
        values.update(db.execute(sql, (*batch, now)))
    return [values.get(key) for key in keys]


def _append_line(db: sqlite3.Connection, entry: ListEntry, now: float) -> None:
    db.execute("DELETE FROM items WHERE key = ? AND expires <= ?", (entry.key, now))
    db.execute(
        "INSERT INTO items (key, expires, written) VALUES (?, ?, ?) ON CONFLICT (key)"
        " DO UPDATE SET value = NULL, expires = excluded.expires, written = excluded.written",
        (entry.key, now + entry.ttl_s, now),
    )
    item = db.execute("SELECT id FROM items WHERE key = ?", (entry.key,)).fetchone()[0]
    db.execute("INSERT INTO lines (item, value) VALUES (?, ?)", (item, entry.value))
    db.execute(
        "DELETE FROM lines WHERE item = :item AND id <="
        " (SELECT id FROM lines WHERE item = :item ORDER BY id DESC LIMIT 1 OFFSET :max_lines)",
        {"item": item, "max_lines": entry.max_lines},
    )


def _read_used_bytes(db: sqlite3.Connection) -> int:
    """Returns the bytes of the file's used pages. SQLite reuses the free pages before the file grows."""
    pages, free, size = (
        int(db.execute(f"PRAGMA {name}").fetchone()[0])
        for name in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * size


def _evict_until_fits(db: sqlite3.Connection, max_bytes: int) -> None:
    """Deletes the items that were written longest ago until at most `max_bytes` are used."""
    while _read_used_bytes(db) > max_bytes:
        deletion = db.execute(
            "DELETE FROM items WHERE id IN (SELECT id FROM items ORDER BY written, id LIMIT ?)",
            (_EVICTION_BATCH_ITEMS,),
        )
        if not deletion.rowcount:
            return


def _sweep_expired(db: sqlite3.Connection, now: float) -> bool:
    """Deletes at most `_SWEEP_BATCH_ITEMS` expired items. Returns whether no expired item is left."""
    deletion = db.execute(
        "DELETE FROM items WHERE id IN (SELECT id FROM items WHERE expires <= ? LIMIT ?)",
        (now, _SWEEP_BATCH_ITEMS),
    )
    return deletion.rowcount < _SWEEP_BATCH_ITEMS


def _is_lease_held(db: sqlite3.Connection, lease: Lease, now: float) -> bool:
    sql = "SELECT 1 FROM leases WHERE key = ? AND fence = ? AND expires > ?"
    return db.execute(sql, (lease.key, lease.fence, now)).fetchone() is not None
