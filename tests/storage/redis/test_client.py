"""A Redis server that answers is not taken for one that hangs because this process was busy."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from compaction_proxy.storage.records import RecordStore
from compaction_proxy.storage.redis.client import CONNECT_TIMEOUT_S
from compaction_proxy.storage.redis.store import RedisStore
from compaction_proxy.storage.redis.url import parse_redis_url
from compaction_proxy.storage.resilient import DEADLINE_S
from tests.helpers.redis_servers import RedisServer


async def test_a_connection_that_was_made_while_the_event_loop_was_busy_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = asyncio.open_connection

    async def connect_on_busy_loop(*where: Any, **options: Any) -> Any:
        time.sleep(DEADLINE_S + CONNECT_TIMEOUT_S)  # noqa: ASYNC251 - the event loop is to stand still
        return await connect(*where, **options)

    monkeypatch.setattr(asyncio, "open_connection", connect_on_busy_loop)
    with RedisServer(tmp_path) as server:
        store = RedisStore(parse_redis_url(server.url))
        told: list[str] = []
        records = RecordStore(store, lambda error: told.append(error.reason))
        assert await records.get_many(["k"]) == [None]
        assert told == []
        await records.close()
