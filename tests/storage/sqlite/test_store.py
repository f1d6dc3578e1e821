"""What SQLite adds to the contract: files, rights, versions, sizes, and everything that can break."""

import asyncio
import os
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from compaction_proxy.core.errors import StoreUnavailableError
from compaction_proxy.storage.sqlite.schema import MIGRATIONS, migrate
from compaction_proxy.storage.sqlite.store import LEASE_LIMIT_S, SqliteStore
from compaction_proxy.storage.store import ListEntry, Record

DAY_S = 86400.0
Opener = Callable[..., SqliteStore]


@pytest.fixture
async def opened(tmp_path: Path) -> AsyncIterator[Opener]:
    stores = []

    def make(path: Path = tmp_path / "state.db", **settings: object) -> SqliteStore:
        stores.append(SqliteStore(path, **settings))  # type: ignore[arg-type]
        return stores[-1]

    yield make
    for store in stores:
        await store.close()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def files(directory: Path) -> list[Path]:
    return sorted(directory.iterdir())


def pragma(path: Path, sql: str) -> object:
    db = sqlite3.connect(path)
    try:
        return db.execute(f"PRAGMA {sql}").fetchone()[0] if "=" not in sql else db.execute(f"PRAGMA {sql}")
    finally:
        db.close()


async def reason(store: SqliteStore) -> str:
    with pytest.raises(StoreUnavailableError) as caught:
        await store.write([Record("k", b"v", DAY_S)])
    return caught.value.reason


async def test_nothing_is_opened_before_the_first_call(opened: Opener, tmp_path: Path) -> None:
    opened()

    assert files(tmp_path) == []


async def test_a_full_store_lets_the_oldest_leave(opened: Opener, tmp_path: Path) -> None:
    limit = 512 * 1024
    clock = iter(range(1, 10_000))
    store = opened(max_bytes=limit, now=lambda: float(next(clock)))
    for n in range(200):
        await store.write([Record(f"k{n}", bytes(10_000), DAY_S)])

    there = [n for n, value in enumerate(await store.read([f"k{n}" for n in range(200)])) if value]

    assert there == list(range(there[0], 200))
    assert 30 <= len(there) <= 50
    await store.close()
    assert (tmp_path / "state.db").stat().st_size <= limit + 16 * 4096


async def test_a_record_larger_than_the_store_is_refused(opened: Opener) -> None:
    store = opened(max_bytes=100_000)
    await store.write([Record("k", b"v", DAY_S)])

    with pytest.raises(StoreUnavailableError) as caught:
        await store.commit(Record("k2", b"v", DAY_S), [Record("large", bytes(100_000), DAY_S)])

    assert caught.value.reason == "store-too-large"
    assert await store.read(["k", "k2", "large"]) == [b"v", None, None]


async def test_what_has_expired_is_swept_from_the_file(opened: Opener, tmp_path: Path) -> None:
    moment = [1000.0]
    store = opened(now=lambda: moment[0])
    await store.write([Record(f"k{n}", b"v", 10) for n in range(500)] + [ListEntry("log", b"l", 10, 5)])
    moment[0] += 60
    for _ in range(3):
        await store.write([Record("new", b"v", 10)])
    await store.close()

    db = sqlite3.connect(tmp_path / "state.db")
    assert db.execute("SELECT key FROM items").fetchall() == [("new",)]
    assert db.execute("SELECT count(*) FROM lines").fetchall() == [(0,)]
    db.close()


async def test_pages_that_rot_are_an_outage_and_no_crash(opened: Opener, tmp_path: Path) -> None:
    store = opened()
    await store.write([Record(f"k{n}", bytes(5000), DAY_S) for n in range(50)])
    await store.close()
    path = tmp_path / "state.db"
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)
    path.write_bytes(data)

    with pytest.raises(StoreUnavailableError) as caught:
        await opened().read(["k1"])

    assert caught.value.reason == "store-corrupt"


@pytest.mark.parametrize("leftovers", [True, False])
async def test_a_file_deleted_under_the_store_is_made_anew(
    opened: Opener, tmp_path: Path, *, leftovers: bool
) -> None:
    store = opened()
    await store.write([Record("k", b"v", DAY_S)])
    for name in ("state.db",) if leftovers else ("state.db", "state.db-wal", "state.db-shm"):
        (tmp_path / name).unlink()

    await store.write([Record("k2", b"v2", DAY_S)])

    assert (await store.read(["k2"])) == [b"v2"]
    assert pragma(tmp_path / "state.db", "integrity_check") == "ok"


async def test_a_locked_file_fails_within_the_deadline_and_recovers(opened: Opener, tmp_path: Path) -> None:
    store = opened()
    await store.write([Record("k", b"v", DAY_S)])
    other = sqlite3.connect(tmp_path / "state.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")

    async with asyncio.timeout(100):
        assert await reason(store) == "store-busy"
    assert await store.read(["k"]) == [b"v"]

    other.execute("ROLLBACK")
    other.close()
    await store.write([Record("k2", b"v", DAY_S)])


async def test_a_full_disk_leaves_everything_as_it_was(tmp_path: Path) -> None:
    script = f"""
import asyncio, resource, signal
from pathlib import Path
from compaction_proxy.storage.sqlite.store import SqliteStore
from compaction_proxy.core.errors import StoreUnavailableError
from compaction_proxy.storage.store import ListEntry, Record

async def main():
    store = SqliteStore(Path({str(tmp_path / "state.db")!r}))
    await store.write([Record("k", b"v", 1000)])
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
    try:
        large = Record("k2", bytes(500_000), 1000)
        await store.write([Record("k", b"new", 1000), ListEntry("log", b"l", 1000, 5), large])
    except StoreUnavailableError as error:
        print(error.reason)
    print(await store.read(["k", "k2"]), await store.read_tail("log", 5))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    await store.write([Record("k", b"after", 1000)])
    print(await store.read(["k"]))
    await store.close()

asyncio.run(main())
"""
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", script], capture_output=True, text=True
    )

    assert done.stderr == ""
    first, *rest = done.stdout.splitlines()
    assert first in {"store-full", "store-failed"}
    assert rest == ["[b'v', None] []", "[b'after']"]


async def test_a_directory_that_cannot_be_made_is_an_outage_that_ends(opened: Opener, tmp_path: Path) -> None:
    in_the_way = tmp_path / "directory"
    in_the_way.write_bytes(b"")
    store = opened(in_the_way / "state.db")

    assert await reason(store) == "store-unwritable"
    in_the_way.unlink()
    await store.write([Record("k", b"v", DAY_S)])
    assert await store.read(["k"]) == [b"v"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
async def test_a_directory_without_rights_is_an_outage(opened: Opener, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)

    assert await reason(opened(closed / "state.db")) == "store-unwritable"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system that nobody can write to")
async def test_a_read_only_file_system_is_an_outage(opened: Opener) -> None:
    assert await reason(opened(Path("/proc/self/state.db"))) == "store-unwritable"


async def test_closing_waits_for_what_is_under_way_and_refuses_the_rest(opened: Opener) -> None:
    store = opened()
    writes = [asyncio.ensure_future(store.write([Record(f"k{n}", b"v", DAY_S)])) for n in range(20)]
    await asyncio.sleep(0)

    await store.close()

    assert [write.done() and write.exception() for write in writes] == [None] * 20
    assert await reason(store) == "store-closed"


@pytest.mark.virtual_time
async def test_closing_leaves_a_stuck_call_behind_after_a_second(tmp_path: Path) -> None:
    stuck = threading.Event()
    store = SqliteStore(tmp_path / "state.db")
    hanging = asyncio.ensure_future(store._run_on_thread(lambda db: stuck.wait()))
    await asyncio.sleep(0)  # it is under way
    clock = asyncio.get_running_loop().time
    started_s = clock()

    await store.close()

    assert clock() - started_s == pytest.approx(1)
    stuck.set()
    assert await hanging is True
    thread = store._worker._thread
    assert thread is not None
    thread.join()
    assert store._db is None  # the file is closed as soon as the call has ended


async def test_a_call_that_was_given_up_before_its_turn_is_not_made(opened: Opener) -> None:
    store = opened()
    gate = threading.Event()
    first = asyncio.ensure_future(store._run_on_thread(lambda db: gate.wait()))
    given_up = asyncio.ensure_future(store.write([Record("k", b"v", DAY_S)]))
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.sleep(0)
    gate.set()
    await first

    assert await store.read(["k"]) == [None]


async def test_a_mistake_in_the_thread_reaches_the_caller_and_the_thread_goes_on(opened: Opener) -> None:
    store = opened()

    with pytest.raises(ZeroDivisionError):
        await store._run_on_thread(lambda db: 1 / 0)

    assert await store.read(["k"]) == [None]


async def test_of_two_processes_that_commit_at_once_one_wins(tmp_path: Path) -> None:
    script = f"""
import asyncio, os
from pathlib import Path
from compaction_proxy.storage.sqlite.store import SqliteStore
from compaction_proxy.storage.store import ListEntry, Record

async def main():
    store = SqliteStore(Path({str(tmp_path / "state.db")!r}))
    me = b"%d" % os.getpid()
    for n in range(100):
        print((await store.commit(Record(f"k{{n}}", me, 1000), [ListEntry("log", me, 1000, 1000)])).decode())
    await store.close()

asyncio.run(main())
"""
    running = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(2)
    ]
    (one, errors), (other, more_errors) = await asyncio.gather(
        *(process.communicate() for process in running)
    )

    assert (errors, more_errors) == (b"", b"")
    assert one == other
    store = SqliteStore(tmp_path / "state.db")
    assert sorted(await store.read_tail("log", 1000)) == sorted(one.split())
    await store.close()


async def test_a_process_that_is_killed_leaves_whole_commits(tmp_path: Path) -> None:
    script = f"""
import asyncio
from pathlib import Path
from compaction_proxy.storage.sqlite.store import SqliteStore
from compaction_proxy.storage.store import ListEntry, Record

async def main():
    store = SqliteStore(Path({str(tmp_path / "state.db")!r}))
    for n in range(1_000_000):
        await store.commit(Record(f"k{{n}}", b"%d" % n, 1000), [ListEntry("log", b"%d" % n, 1000, 1_000_000)])
        print(n, flush=True)

asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=subprocess.PIPE)
    assert process.stdout is not None
    done = [int(await process.stdout.readline()) for _ in range(200)]
    process.kill()
    await process.wait()

    store = SqliteStore(tmp_path / "state.db")
    log = await store.read_tail("log", 1_000_000)
    found = await store.read([f"k{n}" for n in range(len(log) + 100)])
    await store.close()
    assert found == log + [None] * 100
    assert len(log) >= len(done)


async def test_a_file_of_the_first_version_gets_leases_and_keeps_its_records(
    opened: Opener, tmp_path: Path
) -> None:
    path = tmp_path / "state.db"
    db = sqlite3.connect(path, isolation_level=None)
    migrate(db, MIGRATIONS[:1])
    db.execute("INSERT INTO items (key, value, expires, written) VALUES ('k', ?, 9e9, 1)", (b"v",))
    db.close()
    store = opened()

    assert await store.read(["k"]) == [b"v"]
    lease = await store.acquire_lease("k", 60)
    assert lease is not None
    assert await store.commit(Record("k2", b"v2", DAY_S), lease=lease) == b"v2"
    assert pragma(path, "user_version") == 2


@pytest.mark.parametrize("alive", [True, False], ids=["holder alive", "holder dead"])
async def test_a_lease_from_before_the_clock_was_set_back_blocks_nobody_and_makes_no_stale_commit(
    opened: Opener, *, alive: bool
) -> None:
    moment = [1_700_000_000.0]
    holder, other = (opened(now=lambda: moment[0]) for _ in range(2))
    lease = await holder.acquire_lease("k", 10)
    assert lease is not None
    moment[0] -= 3600
    if alive:
        assert await holder.renew_lease(lease, 10)  # its end is then of the new time
        assert await other.acquire_lease("k", 10) is None
        moment[0] -= 3600

    successor = await other.acquire_lease("k", 10)
    assert successor is not None
    assert successor.fence > lease.fence
    assert await holder.renew_lease(lease, 10) is False
    assert await holder.commit(Record("c", b"late", DAY_S), lease=lease) is None
    assert await other.commit(Record("c", b"ours", DAY_S), lease=successor) == b"ours"


async def test_a_lease_that_another_process_got_meanwhile_is_no_lease_from_the_future(
    opened: Opener, tmp_path: Path
) -> None:
    moment = [1_700_000_000.0]
    store = opened(now=lambda: moment[0])
    await store.read(["k"])  # opens the file
    other = sqlite3.connect(tmp_path / "state.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    asked = asyncio.create_task(store.acquire_lease("k", LEASE_LIMIT_S))
    await asyncio.sleep(0.1)  # it waits for the file
    moment[0] += 0.1
    other.execute("INSERT INTO leases (key, expires) VALUES (?, ?)", ("k", moment[0] + LEASE_LIMIT_S))
    other.execute("COMMIT")
    other.close()
    assert await asked is None


async def test_a_lease_is_never_lent_for_longer_than_the_limit(opened: Opener) -> None:
    moment = [1_700_000_000.0]
    store = opened(now=lambda: moment[0])
    lease = await store.acquire_lease("k", DAY_S)
    assert lease is not None
    assert await store.renew_lease(lease, DAY_S)
    assert await store.acquire_lease("k", DAY_S) is None

    moment[0] += LEASE_LIMIT_S
    assert await store.renew_lease(lease, DAY_S) is False
