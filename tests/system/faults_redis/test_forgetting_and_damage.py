"""The proxy before a Redis server that forgets between any two steps, or whose every value was changed."""

import asyncio
import base64
import itertools
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from compaction_proxy.app import create_app
from compaction_proxy.cli.demo.provider import DemoProvider, DemoProviderSettings
from compaction_proxy.config.config import Config
from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.providers.tokenizers import TiktokenCounter
from compaction_proxy.storage.encrypted import EncryptedStore
from compaction_proxy.storage.envelope import VERSION
from compaction_proxy.storage.factory import SECRET_KEY
from compaction_proxy.storage.records import RecordStore
from compaction_proxy.storage.redis.store import RedisStore
from compaction_proxy.storage.redis.url import parse_redis_url
from compaction_proxy.storage.store import Store
from tests.helpers.redis_servers import RedisServer

KEY = bytes(range(32))
ADMIN = {"authorization": "Bearer admin"}
FILLER = "and then we looked at the ledger once more, line by line. " * 4


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as made:
        yield made


class Place:
    """A provider that refuses what its window does not hold, and proxies before it on one server."""

    def __init__(self, upstream: str, server: RedisServer) -> None:
        self.upstream = upstream
        self.server = server

    @asynccontextmanager
    async def proxy(
        self, *, store: Store | None = None, sealed: bool = False
    ) -> AsyncIterator[httpx.AsyncClient]:
        keys = [base64.b64encode(KEY).decode()] if sealed else []
        config = Config.model_validate(
            {
                "server": {"admin_key": "admin"},
                "upstream": {"base_url": f"{self.upstream}/v1"},
                "store": {"url": self.server.url, "encryption_keys": keys},
                "summary": {"model": "demo-summary"},
                "models": {"*": {"window": 4_096}},
            }
        )
        app = create_app(config, store=store)
        async with serve_embedded(app) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
            yield client


@pytest.fixture
async def place(server: RedisServer) -> AsyncIterator[Place]:
    async with serve_embedded(
        DemoProvider(DemoProviderSettings(TiktokenCounter(print), window=4_096))
    ) as url:
        yield Place(url, server)


def messages(name: str, count: int) -> list[dict[str, str]]:
    roles = itertools.cycle(("user", "assistant"))
    return [{"role": next(roles), "content": f"{name} {n}: /srv/{name}.py. {FILLER}"} for n in range(count)]


async def ask(client: httpx.AsyncClient, name: str, count: int = 61) -> httpx.Response:
    body = {"model": "demo-agent", "messages": messages(name, count), "max_tokens": 16}
    headers = {"authorization": "Bearer k", "x-session-id": name}
    answer = await client.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


def stored(server: RedisServer) -> list[bytes]:
    """All keys but the secret's."""
    return sorted(key for key in server.admin.scan_iter() if not key.endswith(SECRET_KEY.encode()))


class Forgetful:
    """A store that loses everything before one of its calls, and counts them."""

    def __init__(self, server: RedisServer) -> None:
        self._inner = RedisStore(parse_redis_url(server.url))
        self._server = server
        self.calls = 0
        self.at = -1

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(*arguments: Any, **named: Any) -> Any:
            if self.calls == self.at:
                self._server.admin.flushall()
            self.calls += 1
            return await getattr(self._inner, name)(*arguments, **named)

        return call

    def listen(self, channel: str) -> AsyncGenerator[bytes | None, None]:
        return self._inner.listen(channel)


async def grown(client: httpx.AsyncClient, name: str) -> list[str]:
    """The statuses of a conversation that is compacted, grows, and is compacted again."""
    return [(await ask(client, name, count)).headers["x-compaction-status"] for count in (61, 63, 101)]


async def test_what_is_lost_before_any_call_of_the_store_is_made_again(
    place: Place, pytestconfig: pytest.Config
) -> None:
    rounds, step = (10, 1) if pytestconfig.getoption("--runslow") else (1, 5)
    store: Any = Forgetful(place.server)
    async with place.proxy(store=store) as client:
        await grown(client, "warm")
        await asyncio.sleep(0.1)
        store.calls = 0
        await grown(client, "counted")
        await asyncio.sleep(0.1)
        calls = store.calls
        seen: list[list[str]] = []
        for each in range(rounds):
            for at in range(each % step, calls, step):
                store.calls, store.at = 0, at
                seen.append(await grown(client, f"c{each}-{at}"))

    assert calls > 10
    assert len(seen) >= rounds * calls // step
    assert {first for first, *_ in seen} == {"applied"}
    assert {status for _, *later in seen for status in later} <= {"applied", "reused"}


def replaced(value: bytes, kind: str, rng: random.Random) -> bytes:
    at = rng.randrange(len(value))
    return {
        "an older version": bytes([VERSION - 1]) + value[1:],
        "a newer version": bytes([VERSION + 8]) + value[1:],
        "cut": value[:at],
        "empty": b"",
        "a flipped bit": value[:at] + bytes([value[at] ^ 1 << rng.randrange(8)]) + value[at + 1 :],
        "noise": rng.randbytes(len(value)),
    }[kind]


def damage(server: RedisServer, kind: str, rng: random.Random) -> dict[bytes, bytes]:
    """Changes every record and line; what the records are now."""
    now: dict[bytes, bytes] = {}
    for key in stored(server):
        if server.admin.type(key) == b"string":
            now[key] = replaced(server.admin.get(key), kind, rng)
            server.admin.set(key, now[key], keepttl=True)
        elif server.admin.type(key) == b"list":
            lines = [replaced(line, kind, rng) for line in server.admin.lrange(key, 0, -1)]
            server.admin.delete(key)
            server.admin.rpush(key, *lines)
    return now


KINDS = ("an older version", "a newer version", "a flipped bit", "cut", "empty", "noise")
QUICK = {("an older version", False), ("a newer version", False), ("a flipped bit", True)}


@pytest.mark.parametrize(
    ("kind", "sealed"),
    [
        pytest.param(
            kind,
            sealed,
            id=f"{kind}, {'sealed' if sealed else 'open'}",
            marks=[] if (kind, sealed) in QUICK else [pytest.mark.slow],
        )
        for kind in KINDS
        for sealed in (False, True)
    ],
)
async def test_whatever_a_record_has_become_requests_are_answered(
    place: Place, kind: str, *, sealed: bool
) -> None:
    rng = random.Random(kind)
    async with place.proxy(sealed=sealed) as client:
        await grown(client, "c")
    now = damage(place.server, kind, rng)
    async with place.proxy(sealed=sealed) as client:
        statuses = await grown(client, "c")
        session = (await ask(client, "c", 101)).headers["x-compaction-session"]
        shown = await client.get(f"/admin/v1/conversations/{session}", headers=ADMIN)

    assert set(statuses) <= {"applied", "reused"}
    assert sealed is False or statuses[0] == "applied"
    assert shown.status_code in {200, 404}
    if "version" in kind:
        ours = [key for key in now if b"#" not in key and (b":checkpoint:" in key or b":archive:" in key)]
        kept = {key: place.server.admin.get(key) for key in ours}
        assert len(kept) >= 2
        assert kept == {key: now[key] for key in kept}


@pytest.mark.parametrize("kind", ["list", pytest.param("hash", marks=pytest.mark.slow), "string"])
async def test_keys_of_another_type_are_misses_and_are_taken_over(place: Place, kind: str) -> None:
    async with place.proxy() as client:
        await grown(client, "c")
    for key in stored(place.server):
        place.server.admin.delete(key)
        if kind == "list":
            place.server.admin.rpush(key, "theirs")
        elif kind == "hash":
            place.server.admin.hset(key, "theirs", "1")
        else:
            place.server.admin.set(key, "theirs")
    async with place.proxy() as client:
        statuses = await grown(client, "c")

    assert statuses == ["applied", "reused", "applied"]


async def test_every_flipped_byte_and_every_value_moved_to_another_key_is_a_miss(
    place: Place, pytestconfig: pytest.Config
) -> None:
    async with place.proxy(sealed=True) as client:
        await ask(client, "mine")
        await ask(client, "yours")
    store = RedisStore(parse_redis_url(place.server.url))
    told: list[str] = []
    records = RecordStore(
        EncryptedStore(store, [KEY]), lambda error: told.append(error.reason), cache_bytes=0
    )
    prefix = parse_redis_url(place.server.url).prefix
    keys = [key for key in stored(place.server) if b":checkpoint:" in key and b"#" not in key]
    assert len(keys) == 2
    values: list[bytes] = place.server.admin.mget(keys)
    first = keys[0].decode().removeprefix(prefix)
    assert await records.get_many([first]) != [None]

    step = 1 if pytestconfig.getoption("--runslow") else 10
    flipped = range(0, min(len(values[0]), 4_096), step)
    for at in flipped:
        place.server.admin.set(keys[0], values[0][:at] + bytes([values[0][at] ^ 0xFF]) + values[0][at + 1 :])
        assert await records.get_many([first]) == [None]
    place.server.admin.mset(dict(zip(keys, reversed(values), strict=True)))
    assert await records.get_many([first]) == [None]
    await records.close()
    assert told == ["store-unreadable"] * (len(flipped) + 1)
    async with place.proxy(sealed=True) as client:
        assert [(await ask(client, name)).headers["x-compaction-status"] for name in ("mine", "yours")] == [
            "applied"
        ] * 2


async def deleted(client: httpx.AsyncClient, path: str) -> int:
    answer = await client.delete(f"/admin/v1/conversations/{path}", headers=ADMIN)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["deleted"])


def words_in(server: RedisServer, words: Sequence[str]) -> list[str]:
    """The words that stand in a dump of the whole server."""
    server.admin.save()
    dump = (server.directory / "dump.rdb").read_bytes()
    return [word for word in words if word.encode() in dump]


async def test_every_key_expires_and_of_what_is_deleted_nothing_is_left(
    place: Place, pytestconfig: pytest.Config
) -> None:
    count = 40 if pytestconfig.getoption("--runslow") else 4
    names = [f"canary{n:04}" for n in range(count)]
    place.server.admin.config_set("rdbcompression", "no")
    async with place.proxy(sealed=True) as client:
        sessions = {}
        for name in names:
            await grown(client, name)
            sessions[name] = (await ask(client, name, 101)).headers["x-compaction-session"]
            pins = f"/admin/v1/conversations/{sessions[name]}/pins"
            await client.post(pins, json={"text": f"Keep {name}."}, headers=ADMIN)
        await asyncio.sleep(1.5)  # totals are written once a second
        forever = [key for key in place.server.admin.scan_iter() if place.server.admin.ttl(key) < 0]
        found = words_in(place.server, names)
        before = len(stored(place.server))
        assert await deleted(client, sessions[names[0]]) > 5
        left = len(stored(place.server))
        search = await client.get(
            f"/admin/v1/conversations/{sessions[names[0]]}/search?q=ledger", headers=ADMIN
        )
        assert await deleted(client, f"{sessions[names[1]]}/tenant") > 5 * (count - 1)
        at_last = stored(place.server)

    assert [key.endswith(SECRET_KEY.encode()) for key in forever] == [True]
    assert found == []
    assert left < before
    assert search.status_code == 404
    # Figures of a day or an hour, what happened lately, and lists of tenants are nobody's: they go by age.
    kinds = {key.rpartition(b"}:")[2].partition(b":")[0] for key in at_last if b"#" not in key}
    assert kinds <= {b"hours", b"writers", b"recent", b"feed", b"compacted"}


async def test_under_eviction_requests_go_on_and_no_key_is_too_many(
    place: Place, pytestconfig: pytest.Config
) -> None:
    count = 100 if pytestconfig.getoption("--runslow") else 15
    admin = place.server.admin
    admin.config_set("maxmemory-policy", "allkeys-lru")
    admin.config_set("maxmemory-samples", "10")
    async with place.proxy() as client:
        await ask(client, "first")
        admin.config_set("maxmemory", str(admin.info("memory")["used_memory"] + 60_000))
        answers = [await ask(client, f"c{n}") for n in range(count)]

    assert {answer.headers["x-compaction-status"] for answer in answers} == {"applied"}
    assert admin.info("stats")["evicted_keys"] > 0


async def test_one_tenant_has_a_bounded_number_of_keys(
    server: RedisServer, pytestconfig: pytest.Config
) -> None:
    conversations, cap = (20_000, 1_000) if pytestconfig.getoption("--runslow") else (1_000, 50)
    store = RedisStore(parse_redis_url(server.url), max_scopes=cap)
    told: list[str] = []
    records = RecordStore(store, lambda error: told.append(error.reason))
    for start in range(0, conversations, 100):
        saving = (
            records.save_if_absent(f"v1:{{t.{n:06}}}:checkpoint:chained:00", {"n": n}, ttl_s=3600)
            for n in range(start, start + 100)
        )
        await asyncio.gather(*saving)
    await records.close()

    assert told == []
    assert server.admin.dbsize() <= 2 * cap + 10  # each conversation's record and the list of its keys
