"""The embedded store of a running proxy: a disk that is full or read-only, a file of another version.

What a disk does is done to a mount namespace of the proxy's own, for which no rights are needed.
"""

import asyncio
import shutil
import sqlite3
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from compaction_proxy.storage.envelope import unpack
from compaction_proxy.storage.sqlite.schema import APPLICATION_ID, MIGRATIONS, migrate

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMIT_S = 60.0
# A shell that prepares the directory $1, changes it once the file $2 is there, and becomes the proxy.
_MOUNTED = """
directory=$1; go=$2; shift 2
{prepare} || exit 9
(while [ ! -e "$go" ]; do sleep 0.05; done; {change}) &
exec "$@"
"""
FULL = _MOUNTED.format(
    prepare='mount -t tmpfs -o size=640k tmpfs "$directory"',
    change='mount -o remount,size=64m "$directory"',
)
READ_ONLY = _MOUNTED.format(
    prepare='mount --bind "$directory" "$directory" && mount -o remount,bind,ro "$directory"',
    change='mount -o remount,bind,rw "$directory"',
)


@cache
def can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    tried = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return subprocess.run(tried, capture_output=True, check=False).returncode == 0


@pytest.fixture
def mounting() -> None:
    if not can_mount():
        pytest.skip("needs unshare and the right to make user namespaces")


@dataclass
class Scene:
    replicated: Any
    upstream: Any
    url: str
    replicas: Any

    async def start(self, directory: Path, *prefix: str) -> Any:
        return await self.replicas.start(self.url, f"sqlite:///{directory}/state.db", prefix=prefix)

    async def ask(self, replica: Any, name: str) -> str:
        answer = await replica.ask(self.replicated.body(self.replicated.conversation(name)))
        assert answer.status_code == 200, answer.text
        status: str = answer.headers["x-compaction-status"]
        return status

    async def until(self, replica: Any, condition: Callable[[], bool]) -> None:
        """Ask on until something holds."""
        async with asyncio.timeout(LIMIT_S):
            number = 0
            while not condition():
                assert await self.ask(replica, f"until-{id(condition)}-{number}") == "applied"
                number += 1


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(replicated: Any) -> AsyncIterator[Scene]:
    async with replicated.scene() as (upstream, url, replicas, _):
        yield Scene(replicated, upstream, url, replicas)


def reasons(replica: Any) -> list[str]:
    return [event["reason"] for event in replica.events("store.failed")]


def mounted(script: str, directory: Path, go: Path) -> tuple[str, ...]:
    return "unshare", "-rm", "sh", "-c", script, "sh", str(directory), str(go)


def checkpoints(directory: Path) -> int:
    """Checkpoints in a store that is in use, of a copy of it."""
    copy = directory.parent / f"{directory.name}-copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(directory, copy)
    with closing(sqlite3.connect(copy / "state.db")) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return int(db.execute("SELECT count(*) FROM items WHERE key LIKE '%:checkpoint:%'").fetchone()[0])


async def test_a_full_disk_fails_no_request_and_is_used_again_when_it_has_room(
    scene: Scene, tmp_path: Path, mounting: None
) -> None:
    directory = tmp_path / "disk"
    directory.mkdir()
    replica = await scene.start(directory, *mounted(FULL, directory, tmp_path / "go"))
    assert await scene.ask(replica, "first") == "applied"
    await scene.until(replica, lambda: "store-full" in reasons(replica))
    assert await scene.ask(replica, "during") == "applied"
    assert await scene.ask(replica, "first") == "reused"

    (tmp_path / "go").touch()
    seen = Path(f"/proc/{replica.process.pid}/root{directory}")
    async with asyncio.timeout(LIMIT_S):
        while shutil.disk_usage(seen).total < 10_000_000:  # noqa: ASYNC110 - another process does it
            await asyncio.sleep(0.02)
    kept = await asyncio.to_thread(checkpoints, seen_in(seen, tmp_path))
    await scene.until(replica, lambda: checkpoints(seen_in(seen, tmp_path)) > kept)
    assert reasons(replica).count("store-full") == 1  # of all that failed: one line a minute
    assert await replica.store() == "ok"


def seen_in(seen: Path, tmp_path: Path) -> Path:
    """A copy of a directory of another mount namespace."""
    copy = tmp_path / "seen"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(seen, copy)
    return copy


async def test_a_read_only_disk_fails_no_request_and_is_used_again_when_it_is_not(
    scene: Scene, tmp_path: Path, mounting: None
) -> None:
    directory = tmp_path / "disk"
    directory.mkdir()
    before = await scene.start(directory)
    assert await scene.ask(before, "kept") == "applied"
    await scene.replicas.end(before)

    replica = await scene.start(directory, *mounted(READ_ONLY, directory, tmp_path / "go"))
    during = [await scene.ask(replica, f"during-{n % 3}") for n in range(9)]
    down = await replica.store()
    (tmp_path / "go").touch()
    async with asyncio.timeout(LIMIT_S):
        while await replica.store() != "ok":  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.02)
    kept = await scene.ask(replica, "kept")

    assert during == ["applied"] * 3 + ["reused"] * 6
    assert down == "down"
    assert sorted(reasons(replica)) == ["store-resting", "store-unwritable"]  # once each
    assert kept == "reused"


async def test_files_that_may_not_grow_fail_no_request_nor_does_a_log_that_takes_no_line(
    scene: Scene, tmp_path: Path
) -> None:
    limited = await scene.start(tmp_path, "sh", "-c", 'ulimit -f 300 && exec "$@"', "sh")
    muted = await scene.start(tmp_path / "muted", "sh", "-c", 'exec "$@" 2>/dev/full', "sh")
    for n in range(30):
        assert await scene.ask(limited, f"limited-{n}") == "applied"
        assert n >= 6 or await scene.ask(muted, f"muted-{n % 3}") == ("applied" if n < 3 else "reused")

    assert set(reasons(limited)) & {"store-full", "store-failed"} != set()
    assert (await limited.client.get("/readyz")).status_code == 200
    assert muted.errors.read_bytes() == b""


async def test_a_file_of_a_newer_schema_is_left_alone_and_one_line_says_so(
    scene: Scene, tmp_path: Path
) -> None:
    path = tmp_path / "state.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        migrate(db, [*MIGRATIONS, ("CREATE TABLE later (x)",)])
    before = path.read_bytes()
    replica = await scene.start(tmp_path)
    started = reasons(replica)
    asked = [await scene.ask(replica, f"newer-{n % 2}") for n in range(6)]

    assert started == ["store-newer"]
    assert reasons(replica).count("store-newer") == 1
    assert await replica.store() == "down"
    assert asked == ["applied"] * 2 + ["reused"] * 4
    assert path.read_bytes() == before


async def test_a_file_of_an_older_schema_is_migrated_at_the_start_with_its_records(
    scene: Scene, tmp_path: Path
) -> None:
    first = await scene.start(tmp_path)
    assert await scene.ask(first, "older") == "applied"
    await scene.replicas.end(first)
    with closing(sqlite3.connect(tmp_path / "state.db", isolation_level=None)) as db:
        db.execute("DROP TABLE leases")
        db.execute("PRAGMA user_version = 1")
    second = await scene.start(tmp_path)
    assert await scene.ask(second, "older") == "reused"
    assert await scene.ask(second, "older and more") == "applied"
    await scene.replicas.end(second)

    assert reasons(second) == []
    with closing(sqlite3.connect(tmp_path / "state.db")) as db:
        told = [db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")]
        values = [value for (value,) in db.execute("SELECT value FROM items WHERE value IS NOT NULL")]
    assert told == [APPLICATION_ID, len(MIGRATIONS)]
    assert None not in map(unpack, values)
