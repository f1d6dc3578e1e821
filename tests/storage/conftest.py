"""The stores that the contract is run on. Another one joins by a class like these and a line in `BENCHES`."""

import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest
import redis

from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.redis import client as redis_client
from compaction_proxy.storage.redis.store import RedisStore
from compaction_proxy.storage.redis.url import parse_redis_url
from compaction_proxy.storage.sqlite import schema
from compaction_proxy.storage.sqlite.store import SqliteStore
from compaction_proxy.storage.store import Store
from tests.helpers.redis_servers import Cluster, RedisServer, Sentinels

FAILOVER_LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The contract says what a store does, not how soon.

    A busy machine needs time for 64 connections, and a slow disk for five connections to one new file.
    """
    monkeypatch.setattr(redis_client, "CONNECT_TIMEOUT_S", 30.0)
    monkeypatch.setattr(schema, "PREPARE_LIMIT_S", 30.0)


class Bench(Protocol):
    """Opens stores on one place.

    Attributes:
        shared: Whether they see each other.
        tells: Whether one hears what is published through another.
    """

    shared: bool
    tells: bool

    def open(self) -> Store: ...

    async def fast_forward(self, seconds: float) -> None: ...

    async def close(self) -> None: ...


class MemoryBench:
    """Opens memory stores on a clock of their own."""

    shared = False
    tells = False

    def __init__(self) -> None:
        self.time = 1000.0

    def open(self) -> Store:
        return MemoryStore(clock=lambda: self.time)

    async def fast_forward(self, seconds: float) -> None:
        self.time += seconds

    async def close(self) -> None:
        pass


class SqliteBench:
    """Opens SQLite stores on one file, and on a clock of their own."""

    shared = True
    tells = False

    def __init__(self, directory: Path) -> None:
        self.path = directory / "state.db"
        self.time = 1_700_000_000.0
        self.opened: list[Store] = []

    def open(self) -> Store:
        self.opened.append(SqliteStore(self.path, now=lambda: self.time))
        return self.opened[-1]

    async def fast_forward(self, seconds: float) -> None:
        self.time += seconds

    async def close(self) -> None:
        for store in self.opened:
            await store.close()


class RedisBench:
    """Opens Redis stores below a prefix of their own. Time is the server's: instead of it, the keys age.

    Args:
        url: Where the store is.
        masters: Clients of all servers that keep keys.
    """

    shared = True
    tells = True

    def __init__(self, url: str, masters: list[Any]) -> None:
        self.url = replace(parse_redis_url(url), prefix=f"test-{secrets.token_hex(6)}:")
        self.masters = masters
        self.opened: list[RedisStore] = []

    def open(self, **settings: Any) -> RedisStore:
        self.opened.append(RedisStore(self.url, **settings))
        return self.opened[-1]

    def held(self) -> list[tuple[Any, bytes]]:
        pattern = self.url.prefix + "*"
        return [(master, key) for master in self.masters for key in master.scan_iter(pattern, count=1000)]

    async def fast_forward(self, seconds: float) -> None:
        for master, key in self.held():
            left = master.pttl(key)
            if left >= 0:
                master.pexpire(key, left - round(seconds * 1000))

    async def close(self) -> None:
        for store in self.opened:
            await store.close()
        for master, key in self.held():
            master.delete(key)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any]]:
    """URL and client of a server: that of `$REDIS_URL` (a standalone one), else one of our own."""
    url = os.environ.get("REDIS_URL")
    if url:
        client: Any = redis.Redis.from_url(url)
        yield url, client
        client.close()
        return
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server.url, server.admin


@pytest.fixture(scope="session")
def redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.close()


@pytest.fixture(scope="session")
def redis_sentinels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sentinels]:
    """Sentinels that have just made the replica the master, because the first one was killed."""
    sentinels = Sentinels(tmp_path_factory.mktemp("sentinels"), down_after_ms=2_000)
    sentinels.master.kill()
    limit = time.monotonic() + FAILOVER_LIMIT_S
    while sentinels.replica.admin.role()[0] != b"master" or not sentinels.know(sentinels.replica):
        assert time.monotonic() < limit, "the sentinels name no new master"
        time.sleep(0.05)
    yield sentinels
    sentinels.close()


def _redis(request: pytest.FixtureRequest) -> RedisBench:
    url, client = request.getfixturevalue("redis_server")
    return RedisBench(url, [client])


def _cluster(request: pytest.FixtureRequest) -> RedisBench:
    cluster = request.getfixturevalue("redis_cluster")
    return RedisBench(cluster.url, [master.admin for master in cluster.masters])


def _sentinel(request: pytest.FixtureRequest) -> RedisBench:
    sentinels = request.getfixturevalue("redis_sentinels")
    return RedisBench(sentinels.url, [sentinels.replica.admin])


BENCHES: dict[str, Callable[[pytest.FixtureRequest], Bench]] = {
    "memory": lambda _: MemoryBench(),
    "sqlite": lambda request: SqliteBench(request.getfixturevalue("tmp_path")),
    "redis": _redis,
    "cluster": _cluster,
    "sentinel": _sentinel,
}
SLOW = {"sentinel"}


def _params(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in names]


@pytest.fixture(params=_params(BENCHES))
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    made = BENCHES[request.param](request)
    yield made
    await made.close()


@pytest.fixture(params=_params(["redis", "cluster", "sentinel"]))
async def redis_bench(request: pytest.FixtureRequest) -> AsyncIterator[RedisBench]:
    """For what only Redis does."""
    made = BENCHES[request.param](request)
    assert isinstance(made, RedisBench)
    yield made
    await made.close()


@pytest.fixture
def store(bench: Bench) -> Store:
    return bench.open()
