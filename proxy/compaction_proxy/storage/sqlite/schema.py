"""Opens the SQLite file of a store. Creates it if absent, for its owner only, and migrates its tables."""

import os
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path

from compaction_proxy.core.errors import StoreUnavailableError

APPLICATION_ID = 0x63707879
"""The application id in the file's header. A file with another id belongs to another program."""

PREPARE_LIMIT_S = 0.5
PREPARE_PAUSE_S = 0.01
BUSY_TIMEOUT_MS = 200
"""Less than the deadline of a store call, so that a locked file causes an error and no timeout."""

_WAL_KEPT_BYTES = 16 * 1024 * 1024

_VERSION_1 = (
    # An item is a record or a list. A record has a value. A list has no value, but rows in `lines`. If the
    # store is full, the items with the oldest `written` are deleted first.
    """CREATE TABLE items (id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, value BLOB,
           expires REAL NOT NULL, written REAL NOT NULL)""",
    "CREATE INDEX items_by_expiry ON items (expires)",
    "CREATE INDEX items_by_age ON items (written)",
    """CREATE TABLE lines (id INTEGER PRIMARY KEY, value BLOB NOT NULL,
           item INTEGER NOT NULL REFERENCES items (id) ON DELETE CASCADE)""",
    "CREATE INDEX lines_by_item ON lines (item, id)",
)

_VERSION_2 = (
    # AUTOINCREMENT ensures that a fence is never used twice, even after its lease was deleted.
    """CREATE TABLE leases (fence INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL UNIQUE,
           expires REAL NOT NULL)""",
    "CREATE INDEX leases_by_expiry ON leases (expires)",
)

MIGRATIONS: tuple[tuple[str, ...], ...] = (_VERSION_1, _VERSION_2)
"""Entry `n` brings a file from schema version `n` to `n + 1`. Entries are never changed, only added."""

_REASONS = {
    sqlite3.SQLITE_BUSY: "store-busy",
    sqlite3.SQLITE_LOCKED: "store-busy",
    sqlite3.SQLITE_FULL: "store-full",
    sqlite3.SQLITE_CORRUPT: "store-corrupt",
    sqlite3.SQLITE_NOTADB: "store-corrupt",
    sqlite3.SQLITE_READONLY: "store-unwritable",
    sqlite3.SQLITE_CANTOPEN: "store-unwritable",
    sqlite3.SQLITE_PERM: "store-unwritable",
}


def to_store_unavailable(error: sqlite3.Error | OSError) -> StoreUnavailableError:
    """Converts an error of SQLite or of the file system.

    Keeps SQLite's message, because it never contains a stored value.
    """
    if isinstance(error, OSError):
        return StoreUnavailableError("store-unwritable", error.strerror or "the file cannot be used")
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the low byte of an extended code is the plain code
    return StoreUnavailableError(_REASONS.get(code, "store-failed"), str(error))


def open_database(path: Path) -> sqlite3.Connection:
    """Opens the store at `path` in autocommit mode, and creates it if absent (file 0600, directory 0700).

    Raises:
        StoreUnavailableError: If the file cannot be used, is damaged, belongs to another program, or has a
            newer schema version. The file is not changed.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Creates the file here, because SQLite would create it with the mode that the umask allows. SQLite's
        # other files (-wal, -shm) get the mode of this file.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        db = sqlite3.connect(path, timeout=BUSY_TIMEOUT_MS / 1000, isolation_level=None)
    except (sqlite3.Error, OSError) as error:
        raise to_store_unavailable(error) from error
    try:
        _prepare_database(db)
    except sqlite3.Error as error:
        db.close()
        raise to_store_unavailable(error) from error
    except StoreUnavailableError:
        db.close()
        raise
    return db


def _prepare_database(db: sqlite3.Connection) -> None:
    """Migrates and configures the database.

    If another process prepares the same new file at the same time, SQLite does not wait for it but raises an
    error immediately. Therefore this function tries again, for about `PREPARE_LIMIT_S` seconds.
    """
    limit = time.monotonic() + PREPARE_LIMIT_S
    while True:
        try:
            migrate(db, MIGRATIONS)
            _apply_pragmas(db)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > limit:
                raise
            time.sleep(PREPARE_PAUSE_S)
        else:
            return


def _apply_pragmas(db: sqlite3.Connection) -> None:
    # With `synchronous = NORMAL`, a power failure may lose the last commits, but does not damage the file.
    # That is acceptable: some summaries may have to be made again, but no request fails.
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    db.execute("PRAGMA foreign_keys = ON")
    db.execute(f"PRAGMA journal_size_limit = {_WAL_KEPT_BYTES}")


def _query_number(db: sqlite3.Connection, sql: str) -> int:
    return int(db.execute(sql).fetchone()[0])


def migrate(db: sqlite3.Connection, migrations: Sequence[Sequence[str]]) -> None:
    """Migrates a file to schema version `len(migrations)` in one transaction.

    Raises:
        StoreUnavailableError: If the file belongs to another program, or has a newer schema version.
    """
    if _read_schema_version(db, len(migrations)) == len(migrations):
        return
    with db:
        db.execute("BEGIN IMMEDIATE")
        # Another process may have migrated the file while this one waited for the lock.
        for steps in migrations[_read_schema_version(db, len(migrations)) :]:
            for step in steps:
                db.execute(step)
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {len(migrations)}")


def _read_schema_version(db: sqlite3.Connection, newest: int) -> int:
    """Returns the file's schema version, 0 for an empty file. Raises as `migrate` does."""
    version = _query_number(db, "PRAGMA user_version")
    empty = not version and not _query_number(db, "SELECT count(*) FROM sqlite_master")
    if not empty and _query_number(db, "PRAGMA application_id") != APPLICATION_ID:
        raise StoreUnavailableError("store-foreign", "the file belongs to another program")
    if version > newest:
        raise StoreUnavailableError(
            "store-newer", f"schema version {version}; {newest} is the newest known here"
        )
    return version
