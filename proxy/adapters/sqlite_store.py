"""The embedded store: one SQLite file, shared by the processes of one machine.

A single thread does all the work, so the event loop never waits for a disk. The file is opened by the first
call and again after any failure: a store that is broken at start, or breaks later, costs only the calls
made while it is broken.
"""

import sqlite3
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

from proxy.adapters.sqlite_schema import open_file, unavailable
from proxy.adapters.worker import Worker
from proxy.errors import StoreUnavailable
from proxy.ports import Entry, Record

DEFAULT_MAX_BYTES = 1024 * 1024 * 1024
_KEYS_PER_QUERY = 500
_SWEEP_EVERY_S = 30.0
_SWEEP_ITEMS = 200
_EVICT_ITEMS = 8
_CLOSE_LIMIT_S = 1.0

_T = TypeVar("_T")
_Items = Sequence[Record | Entry]


def _live_value(db: sqlite3.Connection, key: str, now: float) -> bytes | None:
    row = db.execute("SELECT value FROM items WHERE key = ? AND expires > ?", (key, now)).fetchone()
    return row[0] if row else None


def _read(db: sqlite3.Connection, keys: Sequence[str], now: float) -> list[bytes | None]:
    found: dict[str, bytes] = {}
    rest = iter(keys)
    while some := list(islice(rest, _KEYS_PER_QUERY)):
        marks = ",".join("?" * len(some))
        sql = f"SELECT key, value FROM items WHERE key IN ({marks}) AND expires > ?"  # noqa: S608 - only `?`
        found.update(db.execute(sql, (*some, now)))
    return [found.get(key) for key in keys]


def _put_record(db: sqlite3.Connection, record: Record, now: float) -> None:
    db.execute(
        "INSERT OR REPLACE INTO items (key, value, expires, written) VALUES (?, ?, ?, ?)",
        (record.key, record.value, now + record.ttl_s, now),
    )


def _put_entry(db: sqlite3.Connection, entry: Entry, now: float) -> None:
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
        (item, entry.keep),
    )


def _put(db: sqlite3.Connection, items: _Items, now: float) -> None:
    for item in items:
        if isinstance(item, Record):
            _put_record(db, item, now)
        else:
            _put_entry(db, item, now)


def _tail(db: sqlite3.Connection, key: str, limit: int, now: float) -> list[bytes]:
    rows = db.execute(
        "SELECT lines.value FROM items JOIN lines ON lines.item = items.id"
        " WHERE items.key = ? AND items.expires > ? ORDER BY lines.id DESC LIMIT ?",
        (key, now, max(limit, 0)),
    )
    return [value for (value,) in rows][::-1]


def _used_bytes(db: sqlite3.Connection) -> int:
    """Bytes of the file that hold something; pages of what was deleted are free, and used again first."""
    pages, free, size = (
        int(db.execute(f"PRAGMA {name}").fetchone()[0])
        for name in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * size


def _make_room(db: sqlite3.Connection, max_bytes: int) -> None:
    """Delete what was written longest ago until no more than `max_bytes` are used."""
    while _used_bytes(db) > max_bytes:
        gone = db.execute(
            "DELETE FROM items WHERE id IN (SELECT id FROM items ORDER BY written, id LIMIT ?)",
            (_EVICT_ITEMS,),
        )
        if not gone.rowcount:
            return


class SqliteStore:
    """Implements `ports.Store` in the file at `path`.

    Args:
        path: The file; made at the first call if absent.
        max_bytes: The file holds no more than this; what was written longest ago leaves first. The log beside
            the file comes on top.
        now: Wall-clock seconds; records outlive the process, so their ends do too.
    """

    def __init__(
        self, path: Path, *, max_bytes: int = DEFAULT_MAX_BYTES, now: Callable[[], float] = time.time
    ) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._now = now
        self._worker = Worker("compaction-store")
        # The rest belongs to the worker's thread.
        self._db: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None
        self._swept_at = 0.0

    async def read(self, keys: Sequence[str]) -> list[bytes | None]:
        """The live values under `keys`."""
        return await self._run(partial(_read, keys=keys, now=self._now()))

    async def commit(self, claim: Record, also: _Items = ()) -> bytes:
        """Write everything unless the claim is taken; return what stands there."""
        return await self._run(partial(self._commit, claim=claim, also=also, now=self._now()))

    async def write(self, items: _Items) -> None:
        """Write everything, or raise and write nothing."""
        await self._run(partial(self._write, items=items, now=self._now()))

    async def tail(self, key: str, limit: int) -> list[bytes]:
        """The newest `limit` lines, oldest first."""
        return await self._run(partial(_tail, key=key, limit=limit, now=self._now()))

    async def close(self) -> None:
        """Finish what is under way and let go of the file, leaving a stuck call behind after a second."""
        await self._worker.close(self._drop, _CLOSE_LIMIT_S)

    async def _run(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        return await self._worker.run(partial(self._attempt, work))

    def _attempt(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        try:
            return work(self._opened())
        except (sqlite3.Error, OSError) as error:
            self._drop()
            raise unavailable(error) from error

    def _opened(self) -> sqlite3.Connection:
        """The connection, opened anew if someone has removed or replaced the file under it."""
        if self._db is not None and self._file != self._identity():
            self._drop()
        if self._db is None:
            self._db = open_file(self._path)
            self._file = self._identity()
        return self._db

    def _identity(self) -> tuple[int, int] | None:
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    def _drop(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            db.close()

    def _commit(self, db: sqlite3.Connection, claim: Record, also: _Items, now: float) -> bytes:
        with db:
            db.execute("BEGIN IMMEDIATE")
            taken = _live_value(db, claim.key, now)
            if taken is not None:
                return taken
            self._tidy(db, [claim, *also], now)
            _put(db, [claim, *also], now)
        return claim.value

    def _write(self, db: sqlite3.Connection, items: _Items, now: float) -> None:
        with db:
            db.execute("BEGIN IMMEDIATE")
            self._tidy(db, items, now)
            _put(db, items, now)

    def _tidy(self, db: sqlite3.Connection, items: _Items, now: float) -> None:
        """Within a write's transaction: sweep some of what has expired, and make room for what comes."""
        needed = sum(len(item.key) + len(item.value) for item in items)
        if needed > self._max_bytes:
            raise StoreUnavailable("store-too-large", "more than the store may hold")
        if abs(now - self._swept_at) >= _SWEEP_EVERY_S:
            swept = db.execute(
                "DELETE FROM items WHERE id IN (SELECT id FROM items WHERE expires <= ? LIMIT ?)",
                (now, _SWEEP_ITEMS),
            )
            if swept.rowcount < _SWEEP_ITEMS:
                self._swept_at = now
        _make_room(db, self._max_bytes - needed)
