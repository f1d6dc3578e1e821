"""Records through a failover that sentinels make."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from compaction_proxy.storage.records import RecordStore
from compaction_proxy.storage.redis.store import RedisStore
from compaction_proxy.storage.redis.url import parse_redis_url
from tests.helpers.redis_servers import RedisServer, Sentinels

DAY_S = 86400.0
FAILOVER_LIMIT_S = 60.0


@pytest.fixture
def sentinels(tmp_path: Path) -> Iterator[Sentinels]:
    made = Sentinels(tmp_path)
    yield made
    made.close()


async def promoted(server: RedisServer) -> None:
    async with asyncio.timeout(FAILOVER_LIMIT_S):
        while server.admin.role()[0] != b"master":  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["kill", "pause"])
async def test_a_new_master_is_used_and_has_what_was_stored(sentinels: Sentinels, end: str) -> None:
    told: list[str] = []
    records = RecordStore(RedisStore(parse_redis_url(sentinels.url)), lambda error: told.append(error.reason))
    await records.save_if_absent("{t}before", {"n": 1}, ttl_s=DAY_S)
    sentinels.master.admin.wait(1, 5000)  # for the replica
    sentinels.sentinels[0].pause()  # one that hangs must not be in the way

    getattr(sentinels.master, end)()
    for n in range(20):
        await records.save_if_absent(f"{{t}}during{n}", {"n": n}, ttl_s=DAY_S)
    assert told.count("store-resting") > 10  # soon it is left alone
    await promoted(sentinels.replica)
    async with asyncio.timeout(FAILOVER_LIMIT_S):
        while not records.is_in_use:  # noqa: ASYNC110 - nobody is told
            await asyncio.sleep(0.005)

    used = await records.save_if_absent("{t}after", {"n": 2}, ttl_s=DAY_S)
    another = RecordStore(RedisStore(parse_redis_url(sentinels.url)), lambda error: told.append(error.reason))
    assert used == {"n": 2}
    assert await another.open(limit_s=30)
    assert await another.get_many(["{t}before", "{t}after"]) == [{"n": 1}, {"n": 2}]
    await records.close()
    await another.close()
