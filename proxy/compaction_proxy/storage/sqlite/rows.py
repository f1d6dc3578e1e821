"""What the SQLite store says to its database: records, lists, leases, and room for more.

`now` is in wall-clock seconds. What writes needs a transaction around it.
"""

import sqlite3
from collections.abc import Sequence
from itertools import islice

from compaction_proxy.storage.keys import owner_key
from compaction_proxy.storage.store import Entry, Lease, Record

LEASE_LIMIT_S = 60.0
"""No lease is lent for longer. One with more than that left was lent before the clock was set back."""

_KEYS_PER_QUERY = 500
_SWEPT_ITEMS = 200
_EVICTED_ITEMS = 8
_LAST_CHARACTER = "\U0010ffff"


def live_value(db: sqlite3.Connection, key: str, now: float) -> bytes | None:
    """The value of a record, None if it is absent or expired."""
    row = db.execute("SELECT value FROM items WHERE key = ? AND expires > ?", (key, now)).fetchone()
    return row[0] if row else None


def read(db: sqlite3.Connection, keys: Sequence[str], now: float) -> list[bytes | None]:
    """The live values under `keys`, in their order."""
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


def put(db: sqlite3.Connection, items: Sequence[Record | Entry], now: float) -> None:
    """Write everything over what was there."""
    for item in items:
        if isinstance(item, Record):
            _put_record(db, item, now)
        else:
            _put_entry(db, item, now)


def tail(db: sqlite3.Connection, key: str, limit: int, now: float) -> list[bytes]:
    """The newest `limit` lines of a list, oldest first."""
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


def make_room(db: sqlite3.Connection, max_bytes: int) -> None:
    """Delete what was written longest ago until no more than `max_bytes` are used."""
    while _used_bytes(db) > max_bytes:
        gone = db.execute(
            "DELETE FROM items WHERE id IN (SELECT id FROM items ORDER BY written, id LIMIT ?)",
            (_EVICTED_ITEMS,),
        )
        if not gone.rowcount:
            return


def sweep(db: sqlite3.Connection, now: float) -> bool:
    """Delete some of what has expired. Whether that was all of it."""
    swept = db.execute(
        "DELETE FROM items WHERE id IN (SELECT id FROM items WHERE expires <= ? LIMIT ?)", (now, _SWEPT_ITEMS)
    )
    return swept.rowcount < _SWEPT_ITEMS


def delete(db: sqlite3.Connection, prefix: str, now: float) -> int:
    """Delete what begins with `prefix`, leases too; how many live records and lists there were."""
    end = prefix + _LAST_CHARACTER
    db.execute("DELETE FROM leases WHERE key >= ? AND key < ?", (prefix, end))
    db.execute("DELETE FROM items WHERE key >= ? AND key < ? AND expires <= ?", (prefix, end, now))
    keys = db.execute("SELECT key FROM items WHERE key >= ? AND key < ?", (prefix, end)).fetchall()
    notes = {owner_key(key) for (key,) in keys} - {None}
    gone = db.execute("DELETE FROM items WHERE key >= ? AND key < ?", (prefix, end)).rowcount
    db.executemany("DELETE FROM items WHERE key = ?", [(note,) for note in notes])
    return gone


def acquire(db: sqlite3.Connection, key: str, ttl_s: float, now: float) -> Lease | None:
    """A lease on `key`, unless another holds one; for `LEASE_LIMIT_S` at most."""
    db.execute("DELETE FROM leases WHERE expires <= ? OR expires > ?", (now, now + LEASE_LIMIT_S))
    end = now + min(ttl_s, LEASE_LIMIT_S)
    made = db.execute("INSERT OR IGNORE INTO leases (key, expires) VALUES (?, ?)", (key, end))
    return Lease(key, made.lastrowid) if made.rowcount and made.lastrowid else None


def is_held(db: sqlite3.Connection, lease: Lease, now: float) -> bool:
    """Whether a lease is its holder's still."""
    sql = "SELECT 1 FROM leases WHERE key = ? AND fence = ? AND expires > ?"
    return db.execute(sql, (lease.key, lease.fence, now)).fetchone() is not None


def renew(db: sqlite3.Connection, lease: Lease, ttl_s: float, now: float) -> bool:
    """Prolong a lease, if it is its holder's still; to `LEASE_LIMIT_S` from now at most."""
    sql = "UPDATE leases SET expires = ? WHERE key = ? AND fence = ? AND expires > ?"
    end = now + min(ttl_s, LEASE_LIMIT_S)
    return bool(db.execute(sql, (end, lease.key, lease.fence, now)).rowcount)


def release(db: sqlite3.Connection, lease: Lease) -> None:
    """End a lease, if it is its holder's still."""
    db.execute("DELETE FROM leases WHERE key = ? AND fence = ?", (lease.key, lease.fence))
