"""Records over a Redis server that is killed, hung, restarted empty, demoted, full, or wants another key.

What a request feels of it: the first calls fail, the others do not reach the store, and the store is in use
again once it is back. How long a call may take is tested in tests/storage, on a clock that the test moves.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from compaction_proxy.core.errors import StoreUnavailableError
from compaction_proxy.storage.records import ListItem, RecordStore
from compaction_proxy.storage.redis.store import RedisStore
from compaction_proxy.storage.redis.url import RedisUrl, parse_redis_url
from compaction_proxy.storage.resilient import DEADLINE_S
from tests.helpers.redis_servers import RedisServer

DAY_S = 86400.0
# A healthy server answers within this on any machine; only a hang takes as long.
PATIENT_S = 30.0
RESTING_CALL_S = 0.001
COSTED = 1_000


class Told(list[str]):
    def __call__(self, error: StoreUnavailableError) -> None:
        self.append(error.reason)


class Scene:
    """A server, and records that are kept on it."""

    def __init__(self, server: RedisServer) -> None:
        self.server = server
        self.told = Told()
        self.n = 0
        self.opened: list[RecordStore] = []
        self.records = self.another()

    def another(self, url: RedisUrl | None = None, deadline_s: float = PATIENT_S) -> RecordStore:
        store = RedisStore(url or parse_redis_url(self.server.url))
        self.opened.append(RecordStore(store, self.told, deadline_s=deadline_s))
        return self.opened[-1]

    async def hang(self) -> None:
        """The server answers nothing more; the records are those of a process that waits as usual."""
        self.records = self.another(deadline_s=DEADLINE_S)
        assert await self.records.open(PATIENT_S)
        self.server.pause()

    async def use(self, records: RecordStore | None = None) -> None:
        """One conversation is looked for and saved."""
        records = records or self.records
        self.n += 1
        await records.get_many([f"{{t}}{self.n}"])
        used = await records.save_if_absent(
            f"{{t}}{self.n}",
            {"n": self.n},
            ttl_s=DAY_S,
            other_items=[ListItem("{t}log", {"n": self.n}, DAY_S, 5)],
        )
        assert used == {"n": self.n}

    async def is_kept(self) -> bool:
        """Whether what one process saves is what another finds."""
        await self.use()
        return await self.another().get_many([f"{{t}}{self.n}"]) == [{"n": self.n}]

    async def is_away(self) -> None:
        """A few calls fail, and then none reaches the store."""
        for _ in range(6):
            await self.use()
        assert not self.records.is_in_use
        told = len(self.told)
        for _ in range(100):
            await self.use()
        assert set(self.told[told:]) == {"store-resting"}
        assert not self.records.is_in_use

    async def is_back(self) -> None:
        """The store comes into use again."""
        async with asyncio.timeout(PATIENT_S):
            while not (self.records.is_in_use and await self.is_kept()):  # noqa: ASYNC110 - nobody is told
                await asyncio.sleep(0.005)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as made:
        yield made


@pytest.fixture
async def scene(server: RedisServer) -> AsyncIterator[Scene]:
    made = Scene(server)
    assert await made.is_kept()
    yield made
    for records in made.opened:
        await records.close()


async def test_a_server_that_is_away_at_the_start(scene: Scene) -> None:
    scene.server.kill()
    scene.records = scene.another()

    assert not await scene.records.open()
    await scene.is_away()
    scene.server.start()
    await scene.is_back()


async def test_a_server_that_is_killed_and_restarted_empty(scene: Scene) -> None:
    await scene.use()
    before = f"{{t}}{scene.n}"
    scene.server.kill()

    await scene.is_away()
    assert set(scene.told) == {"store-down", "store-resting"}
    assert await scene.records.get_many([before]) == [{"n": int(before[3:])}]
    scene.server.start()
    await scene.is_back()
    assert await scene.another().get_many([before]) == [None]


async def test_a_server_that_is_left_alone_costs_a_request_less_than_a_millisecond_of_work(
    scene: Scene,
) -> None:
    async def cost_us() -> float:
        """Of a request that looks for a record and adds a line, which nobody holds."""
        start = time.process_time()
        for _ in range(COSTED):
            await scene.records.get_many(["{t}nobody's"])
            await scene.records.append_line("{t}log", {"n": 1}, ttl_s=DAY_S, max_lines=5)
        return (time.process_time() - start) / COSTED * 1e6

    healthy_us = await cost_us()
    scene.server.kill()
    await scene.is_away()
    resting_us = await cost_us()

    print(f"\nwork for the store: {healthy_us:.0f} us a request, {resting_us:.0f} us while it is left alone")  # noqa: T201 - a figure for people
    assert resting_us < RESTING_CALL_S * 1e6
    assert resting_us < healthy_us


async def test_a_server_that_restarts_between_two_calls_is_not_missed(scene: Scene) -> None:
    for _ in range(5):
        scene.server.kill()
        scene.server.start()
        assert await scene.is_kept()

    assert scene.told == []


async def test_a_server_that_hangs(scene: Scene) -> None:
    await scene.hang()

    await scene.is_away()
    assert set(scene.told) == {"store-timeout", "store-resting"}
    scene.server.resume()
    await scene.is_back()


async def test_a_server_that_hangs_under_many_requests_holds_them_once(scene: Scene) -> None:
    await scene.hang()

    await asyncio.gather(*(scene.use() for _ in range(50)))

    assert scene.told.count("store-timeout") <= 50  # of its two calls each waits for one at most
    assert set(scene.told) == {"store-timeout", "store-resting"}
    assert not scene.records.is_in_use
    scene.server.resume()
    await scene.is_back()


async def test_a_server_that_has_become_a_replica_is_read_from(scene: Scene) -> None:
    await scene.use()
    scene.server.admin.config_set("replica-serve-stale-data", "yes")
    scene.server.admin.replicaof("127.0.0.1", "1")

    for _ in range(20):
        await scene.use()

    assert set(scene.told) == {"store-readonly"}
    assert await scene.another().get_many(["{t}1"]) == [{"n": 1}]
    scene.server.admin.replicaof("NO", "ONE")
    await scene.is_back()


async def test_a_full_server_is_read_from_and_keeps_no_half_of_a_commit(scene: Scene) -> None:
    scene.server.admin.config_set("maxmemory-policy", "noeviction")
    scene.server.admin.config_set("maxmemory", "1")
    kept = scene.server.admin.dbsize()

    for _ in range(20):
        await scene.use()

    assert set(scene.told) == {"store-full"}
    assert scene.server.admin.dbsize() == kept
    assert await scene.another().get_many(["{t}1"]) == [{"n": 1}]
    scene.server.admin.config_set("maxmemory", "0")
    await scene.is_back()


async def test_what_a_server_evicts_is_made_again(scene: Scene) -> None:
    memory = scene.server.admin.info("memory")["used_memory"]
    scene.server.admin.config_set("maxmemory-policy", "allkeys-lru")
    scene.server.admin.config_set("maxmemory", str(memory + 400_000))

    for n in range(300):
        assert (
            await scene.records.save_if_absent(f"{{t}}k{n}", {"text": f"{n}" * 4000}, ttl_s=DAY_S) is not None
        )
    found = await scene.another().get_many([f"{{t}}k{n}" for n in range(300)])

    assert scene.told == []
    assert found[-1] is not None


async def test_a_password_that_is_wrong(scene: Scene) -> None:
    scene.server.admin.acl_setuser(
        "proxy", enabled=True, passwords=["+right"], keys=["*"], categories=["+@all"]
    )
    scene.records = scene.another(parse_redis_url(scene.server.url.replace("://", "://proxy:wrong@")))

    await scene.is_away()
    assert set(scene.told) == {"store-denied", "store-resting"}
    scene.server.admin.acl_setuser(
        "proxy", enabled=True, passwords=["+wrong"], keys=["*"], categories=["+@all"]
    )
    await scene.is_back()


async def test_a_user_who_may_not_do_what_is_needed(scene: Scene) -> None:
    scene.server.admin.acl_setuser("reader", enabled=True, nopass=True, keys=["*"], categories=["+@read"])
    scene.records = scene.another(parse_redis_url(scene.server.url.replace("://", "://reader:any@")))

    await scene.use()
    assert scene.told == ["store-forbidden"]


async def test_scripts_that_are_forgotten_again_and_again(scene: Scene) -> None:
    for _ in range(5):
        scene.server.admin.script_flush()
        assert await scene.is_kept()

    assert scene.told == []


async def test_fifty_tasks_on_one_connection(scene: Scene) -> None:
    records = scene.another(replace(parse_redis_url(scene.server.url), max_connections=1))

    await asyncio.gather(*(scene.use(records) for _ in range(50)))

    assert scene.told == []
    assert scene.server.admin.info("clients")["connected_clients"] <= 4


async def test_clients_that_leave_anywhere_get_nobody_elses_records(scene: Scene) -> None:
    store = RedisStore(replace(parse_redis_url(scene.server.url), max_connections=2))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(store.close)
        for n in range(20):
            await scene.records.save_if_absent(f"{{t}}own{n}", {"canary": f"c{n}" * 50}, ttl_s=DAY_S)
        wrong = 0
        for n in range(120):
            records = RecordStore(store, scene.told, cache_bytes=0)
            calls = [asyncio.ensure_future(records.get_many([f"{{t}}own{(n + m) % 20}"])) for m in range(4)]
            await asyncio.sleep(0.00005 * (n % 30))
            calls[n % 4].cancel()
            for m, answer in enumerate(await asyncio.gather(*calls, return_exceptions=True)):
                left = isinstance(answer, asyncio.CancelledError) and m == n % 4
                wrong += not left and answer != [{"canary": f"c{(n + m) % 20}" * 50}]

        assert (wrong, scene.told) == (0, [])
