"""A Redis server that answers is not taken for one that hangs because this process was busy."""

import asyncio
import socket
import time
from collections.abc import Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from compaction_proxy.core.errors import StoreUnavailableError
from compaction_proxy.storage.records import RecordStore
from compaction_proxy.storage.redis import store as redis_store
from compaction_proxy.storage.redis.client import CONNECT_TIMEOUT_S
from compaction_proxy.storage.redis.store import RedisStore
from compaction_proxy.storage.redis.url import parse_redis_url
from compaction_proxy.storage.resilient import DEADLINE_S
from tests.helpers.redis_servers import Cluster, RedisServer


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


async def cancel_after_steps(steps: int, running: Coroutine[Any, Any, object]) -> bool:
    """Cancels a call after so many steps of the event loop. Returns whether it was cancelled."""
    task = asyncio.create_task(running)
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    async with asyncio.timeout(100):
        await asyncio.wait([task])
    return task.cancelled()


async def test_a_call_that_is_cancelled_ends_wherever_it_is(tmp_path: Path) -> None:
    async def listen(store: RedisStore) -> None:
        async with aclosing(store.listen("channel")) as messages:
            async for _ in messages:
                pass

    with RedisServer(tmp_path) as server:
        for steps in range(60):
            store = RedisStore(parse_redis_url(server.url))
            assert await cancel_after_steps(steps, listen(store)), steps
            await store.close()


async def test_a_listener_whose_server_is_silent_when_it_connects_again_gives_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(redis_store, "LISTEN_TIMEOUT_S", 0.5)
    with RedisServer(tmp_path) as server:
        store = RedisStore(parse_redis_url(server.url))
        async with aclosing(store.listen("channel")) as messages:
            assert await anext(messages) is None
            server.kill()
            with socket.create_server(("127.0.0.1", server.port)):  # the kernel accepts, and nobody answers
                async with asyncio.timeout(100):
                    with pytest.raises(StoreUnavailableError):
                        await anext(messages)
        await store.close()


async def connections_end(server: RedisServer) -> None:
    """Waits until the server has no other connection than the test's own."""
    async with asyncio.timeout(100):
        while len(server.admin.client_list()) > 1:  # noqa: ASYNC110 - a server sets no event
            await asyncio.sleep(0.001)


async def test_a_store_that_is_closed_waits_for_its_calls_and_leaves_no_connection(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        for steps in range(0, 60, 3):
            store = RedisStore(parse_redis_url(server.url))
            calls = [asyncio.create_task(store.read(["k"])) for _ in range(4)]
            for _ in range(steps):
                await asyncio.sleep(0)
            await store.close()
            await asyncio.gather(*calls, return_exceptions=True)
            await connections_end(server)


async def test_a_cluster_whose_servers_are_to_be_found_again_is_closed_whole(
    redis_cluster: Cluster,
) -> None:
    store = RedisStore(parse_redis_url(redis_cluster.url))
    await store.read(["k"])
    await store._redis.client.aclose()  # as redis-py does when a server has gone
    [node] = [each for each in store._redis.client.get_nodes() if each.port == redis_cluster.masters[0].port]
    await node.execute_command("PING")
    await store.close()
    await connections_end(redis_cluster.masters[0])
