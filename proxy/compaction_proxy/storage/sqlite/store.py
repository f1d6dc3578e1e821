"""The embedded store: one SQLite file, shared by the processes of one machine.

A single thread does all the work, so the event loop never waits for a disk. The file is opened by the first
call and again after any failure: a store that is broken at start, or breaks later, costs only the calls
made while it is broken.
"""

import sqlite3
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from compaction_proxy.core.errors import StoreUnavailable
from compaction_proxy.storage.sqlite import rows
from compaction_proxy.storage.sqlite.schema import open_file, unavailable
from compaction_proxy.storage.sqlite.worker_thread import Worker
from compaction_proxy.storage.store import Entry, Lease, Record

DEFAULT_MAX_BYTES = 1024 * 1024 * 1024
_SWEEP_EVERY_S = 30.0
_CLOSE_LIMIT_S = 1.0

_T = TypeVar("_T")
_Items = Sequence[Record | Entry]


def _changed(work: Callable[[sqlite3.Connection], _T], db: sqlite3.Connection) -> _T:
    with db:
        db.execute("BEGIN IMMEDIATE")
        return work(db)


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
        return await self._run(partial(rows.read, keys=keys, now=self._now()))

    async def commit(self, claim: Record, also: _Items = (), *, lease: Lease | None = None) -> bytes | None:
        """Write everything unless the claim is taken or the lease is lost; return what stands there."""
        return await self._run(partial(self._commit, claim=claim, also=also, lease=lease, now=self._now()))

    async def write(self, items: _Items) -> None:
        """Write everything, or raise and write nothing."""
        await self._run(partial(self._write, items=items, now=self._now()))

    async def tail(self, key: str, limit: int) -> list[bytes]:
        """The newest `limit` lines, oldest first."""
        return await self._run(partial(rows.tail, key=key, limit=limit, now=self._now()))

    async def acquire(self, key: str, ttl_s: float) -> Lease | None:
        """A lease on `key`, unless another holds one."""
        return await self._change(partial(rows.acquire, key=key, ttl_s=ttl_s, now=self._now()))

    async def renew(self, lease: Lease, ttl_s: float) -> bool:
        """Prolong a lease, if it is still ours."""
        return await self._change(partial(rows.renew, lease=lease, ttl_s=ttl_s, now=self._now()))

    async def release(self, lease: Lease) -> None:
        """Give a lease back, if it is still ours."""
        await self._change(partial(rows.release, lease=lease))

    async def delete(self, prefix: str) -> int:
        """Forget all keys that begin with `prefix`, leases too; how many records and lists there were."""
        return await self._change(partial(rows.delete, prefix=prefix, now=self._now()))

    async def publish(self, channel: str, message: bytes) -> None:
        """Tell nobody: there is no way to other processes."""

    async def listen(self, channel: str) -> AsyncGenerator[bytes | None, None]:  # noqa: ARG002 - as the port says
        """Nothing comes."""
        return
        yield

    async def close(self) -> None:
        """Finish what is under way and let go of the file, leaving a stuck call behind after a second."""
        await self._worker.close(self._drop, _CLOSE_LIMIT_S)

    async def _run(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        return await self._worker.run(partial(self._attempt, work))

    async def _change(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """The same, within a transaction that writes."""
        return await self._run(partial(_changed, work))

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

    def _commit(
        self, db: sqlite3.Connection, claim: Record, also: _Items, lease: Lease | None, now: float
    ) -> bytes | None:
        with db:
            db.execute("BEGIN IMMEDIATE")
            taken = rows.live_value(db, claim.key, now)
            if taken is not None:
                return taken
            if lease is not None and not rows.is_held(db, lease, now):
                return None
            self._tidy(db, [claim, *also], now)
            rows.put(db, [claim, *also], now)
        return claim.value

    def _write(self, db: sqlite3.Connection, items: _Items, now: float) -> None:
        with db:
            db.execute("BEGIN IMMEDIATE")
            self._tidy(db, items, now)
            rows.put(db, items, now)

    def _tidy(self, db: sqlite3.Connection, items: _Items, now: float) -> None:
        """Within a write's transaction: sweep some of what has expired, and make room for what comes."""
        needed = sum(len(item.key) + len(item.value) for item in items)
        if needed > self._max_bytes:
            raise StoreUnavailable("store-too-large", "more than the store may hold")
        if abs(now - self._swept_at) >= _SWEEP_EVERY_S and rows.sweep(db, now):
            self._swept_at = now
        rows.make_room(db, self._max_bytes - needed)
