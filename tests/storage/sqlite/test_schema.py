"""The SQLite file of a store: its rights and versions, and which files are refused."""

import sqlite3
import stat
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from compaction_proxy.core.errors import StoreUnavailableError
from compaction_proxy.storage.sqlite.schema import (
    APPLICATION_ID,
    MIGRATIONS,
    migrate,
    open_database,
    to_store_unavailable,
)

INSERT = "INSERT INTO items (key, value, expires, written) VALUES ('k', ?, 9e9, 1)"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


@pytest.fixture
def plain(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection of SQLite itself to the file, without the schema."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        yield db


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def read_pragmas(db: sqlite3.Connection, *names: str) -> list[object]:
    return [db.execute(f"PRAGMA {name}").fetchone()[0] for name in names]


def find_refusal(path: Path) -> str:
    """Returns why a file is refused; checks that it stays as it is, and that nothing is put next to it."""
    before = path.read_bytes()
    with pytest.raises(StoreUnavailableError) as caught:
        open_database(path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
    return caught.value.reason


def test_only_the_owner_may_read_the_files_and_their_folder(tmp_path: Path) -> None:
    path = tmp_path / "made" / "state.db"
    with closing(open_database(path)) as db:
        db.execute(INSERT, (b"v",))
        assert mode(path.parent) == 0o700
        assert {file.name: mode(file) for file in path.parent.iterdir()} == {
            "state.db": 0o600,
            "state.db-wal": 0o600,
            "state.db-shm": 0o600,
        }


def test_a_new_file_has_the_application_id_the_newest_version_and_a_write_ahead_log(path: Path) -> None:
    with closing(open_database(path)) as db:
        found = read_pragmas(db, "application_id", "user_version", "journal_mode", "foreign_keys")
    assert found == [APPLICATION_ID, len(MIGRATIONS), "wal", 1]


def test_a_file_that_is_opened_again_keeps_its_records(path: Path) -> None:
    with closing(open_database(path)) as db:
        db.execute(INSERT, (b"v",))
    with closing(open_database(path)) as db:
        assert db.execute("SELECT key, value FROM items").fetchall() == [("k", b"v")]


def test_a_newer_file_is_refused_and_left_alone(path: Path) -> None:
    with closing(open_database(path)) as db:
        db.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    assert find_refusal(path) == "store-newer"


def test_the_file_of_another_program_is_refused_and_left_alone(path: Path, plain: sqlite3.Connection) -> None:
    plain.execute("CREATE TABLE theirs (x)")
    assert find_refusal(path) == "store-foreign"


def test_a_corrupt_file_is_refused_and_left_alone(path: Path) -> None:
    path.write_bytes(b"no database at all" * 1000)
    assert find_refusal(path) == "store-corrupt"


def test_an_older_file_is_migrated_with_its_records(path: Path) -> None:
    with closing(open_database(path)) as db:
        db.execute(INSERT, (b"v",))
        migrate(db, [*MIGRATIONS, ("ALTER TABLE items ADD COLUMN later TEXT NOT NULL DEFAULT 'new'",)])
        assert db.execute("SELECT key, value, later FROM items").fetchall() == [("k", b"v", "new")]
        assert read_pragmas(db, "user_version") == [len(MIGRATIONS) + 1]


def test_a_migration_that_fails_changes_nothing(plain: sqlite3.Connection) -> None:
    migrate(plain, MIGRATIONS)

    with pytest.raises(sqlite3.Error):
        migrate(plain, [*MIGRATIONS, ("CREATE TABLE half (x)", "no SQL")])

    assert read_pragmas(plain, "user_version") == [len(MIGRATIONS)]
    assert plain.execute("SELECT name FROM sqlite_master WHERE name = 'half'").fetchall() == []


def test_whoever_opens_a_new_file_at_once_with_others_can_use_it(tmp_path: Path) -> None:
    failures: list[StoreUnavailableError] = []

    def open_with_others(path: Path, start: threading.Barrier) -> None:
        start.wait()
        try:
            open_database(path).close()
        except StoreUnavailableError as error:
            failures.append(error)

    for round_ in range(150):
        start = threading.Barrier(6)
        file = tmp_path / f"{round_}.db"
        together = [threading.Thread(target=open_with_others, args=(file, start)) for _ in range(6)]
        for thread in together:
            thread.start()
        for thread in together:
            thread.join()
    assert failures == []


def test_an_error_of_the_operating_system_makes_the_store_unwritable_and_names_no_path() -> None:
    error = to_store_unavailable(PermissionError(13, "Permission denied", "/home/ana/state.db"))
    assert (error.reason, str(error)) == ("store-unwritable", "Permission denied")


def test_the_extended_code_of_an_sqlite_error_counts_as_its_plain_code() -> None:
    error = sqlite3.OperationalError("database is locked")
    error.sqlite_errorcode = sqlite3.SQLITE_BUSY_SNAPSHOT
    assert to_store_unavailable(error).reason == "store-busy"


def test_an_sqlite_error_without_a_known_code_is_a_failure_of_the_store() -> None:
    error = to_store_unavailable(sqlite3.OperationalError("out of luck"))
    assert (error.reason, str(error)) == ("store-failed", "out of luck")
