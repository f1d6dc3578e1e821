"""Records over a server that is busy, still loads, moves slots, or has lost a node of its cluster."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import redis

from compaction_proxy.storage.records import RecordItem, RecordStore
from compaction_proxy.storage.redis.store import RedisStore
from compaction_proxy.storage.redis.url import parse_redis_url
from tests.helpers.free_ports import find_free_port
from tests.helpers.redis_servers import Cluster, RedisServer

DAY_S = 86400.0
BACK_LIMIT_S = 60.0
NODE_TIMEOUT_MS = 2_000


@asynccontextmanager
async def records_on(url: str, told: list[str]) -> AsyncIterator[RecordStore]:
    made = RecordStore(
        RedisStore(parse_redis_url(url)), lambda error: told.append(error.reason), cache_bytes=0
    )
    try:
        yield made
    finally:
        await made.close()


async def use(records: RecordStore, key: str) -> None:
    """One record is looked for and saved."""
    await records.get_many([key])
    assert await records.save_if_absent(key, {"key": key}, ttl_s=DAY_S) == {"key": key}


async def until_back(records: RecordStore, *keys: str) -> None:
    """Wait until these records can be saved and found again."""
    async with asyncio.timeout(BACK_LIMIT_S):
        while True:
            for key in keys:
                await records.save_if_absent(key, {"key": key}, ttl_s=DAY_S)
            if await records.get_many(keys) == [{"key": key} for key in keys]:
                return
            await asyncio.sleep(0.02)


async def test_a_server_that_is_busy_with_a_script_is_soon_left_alone(tmp_path: Path) -> None:
    told: list[str] = []
    with RedisServer(tmp_path) as server:
        server.admin.config_set("lua-time-limit", "20")
        async with records_on(server.url, told) as records:
            await use(records, "{t}before")

            def spin() -> None:
                with redis.Redis(port=server.port) as client, pytest.raises(redis.ResponseError):
                    client.eval("while true do end", 0)

            spinning = threading.Thread(target=spin)
            spinning.start()
            await eventually(partial(says, server.port, b"-BUSY"))
            for n in range(20):
                await use(records, f"{{t}}{n}")
            server.admin.script_kill()
            spinning.join()
            await until_back(records, "{t}after")
            assert await records.get_many(["{t}before"]) == [{"key": "{t}before"}]

    assert set(told) == {"store-busy", "store-resting"}
    assert told.count("store-resting") > 10


def says(port: int, refusal: bytes) -> bool:
    """Whether a server answers a ping with this refusal."""
    try:
        with socket.create_connection(("127.0.0.1", port), 1) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(100).startswith(refusal)
    except OSError:
        return False


async def test_a_server_that_still_loads_is_left_alone_until_it_is_done(tmp_path: Path) -> None:
    told: list[str] = []
    with RedisServer(tmp_path) as server:
        async with records_on(server.url, told) as records:
            server.admin.config_set("rdbcompression", "no")  # the server answers once in so many bytes
            for n in range(200):
                await records.save_if_absent(f"{{t}}{n}", {"text": f"{n}" * 300}, ttl_s=DAY_S)
            server.admin.save()
            server.kill()
            server.launch(
                "--port", str(server.port), "--bind", "127.0.0.1", "--dir", str(tmp_path), "--save", "",
                "--key-load-delay", "10000", "--loading-process-events-interval-bytes", "1024",
            )  # fmt: skip
            await eventually(partial(says, server.port, b"-LOADING"))
            for n in range(50):
                await use(records, f"{{t}}during{n}")
            assert not records.is_in_use
            server.await_answer()
            await until_back(records, "{t}after")
            assert await records.get_many(["{t}199"]) == [{"text": "199" * 300}]

    assert told.count("store-resting") > 25
    assert "store-loading" in told
    assert set(told) <= {"store-down", "store-loading", "store-timeout", "store-resting"}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()


async def test_slots_that_move_between_nodes_cost_no_record(cluster: Cluster) -> None:
    told: list[str] = []
    key, other = "{t}moves", "{t}stays"
    owners = {server.admin.execute_command("CLUSTER", "MYID").decode(): server for server in cluster.masters}
    slot = cluster.masters[0].admin.execute_command("CLUSTER", "KEYSLOT", key)
    source, target, _ = sorted(owners, key=lambda name: key_owner(owners[name], slot))
    async with records_on(cluster.url, told) as records:
        await records.save_if_absent(
            key, {"key": key}, ttl_s=DAY_S, other_items=[RecordItem(other, {"key": other}, DAY_S)]
        )
        stored = parse_redis_url(cluster.url).prefix
        owners[target].admin.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", source)
        owners[source].admin.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", target)
        owners[source].admin.migrate("127.0.0.1", owners[target].port, stored + key, 0, 5000)
        asked = await records.get_many([key])  # the old node says ASK
        both = await records.get_many([key, other])  # neither has both: TRYAGAIN
        assert await records.save_if_absent("{t}new", {"n": 1}, ttl_s=DAY_S) == {"n": 1}
        owners[source].admin.migrate("127.0.0.1", owners[target].port, stored + other, 0, 5000)
        for server in owners.values():
            server.admin.execute_command("CLUSTER", "SETSLOT", slot, "NODE", target)
        await until_back(records, "{t}later")  # the old node says MOVED
        found = await records.get_many([key, other])

    assert asked == [{"key": key}]
    assert both in ([None, None], [{"key": key}, {"key": other}])
    assert found == [{"key": key}, {"key": other}]
    assert set(told) <= {"store-busy", "store-timeout", "store-resting"}  # redis-py asks again for a while


def key_owner(server: RedisServer, slot: int) -> int:
    """Sorts the node that has a slot before those that have not; of these the same one each time."""
    begin, end = next(
        (first, last) for first, last, *owner in server.admin.execute_command("CLUSTER", "SLOTS")
        if owner[0][1] == server.port
    )  # fmt: skip
    return 0 if begin <= slot <= end else 1


@pytest.mark.slow
@pytest.mark.parametrize("end", ["kill", "pause"])
async def test_a_replica_that_takes_a_lost_masters_place_is_found_and_has_what_was_stored(
    cluster: Cluster, tmp_path: Path, end: str
) -> None:
    told: list[str] = []
    port, bus = find_free_port(), find_free_port()
    first = cluster.masters[0]
    options = [
        "--cluster-enabled",
        "yes",
        "--cluster-config-file",
        f"{port}.conf",
        "--cluster-port",
        str(bus),
    ]
    with RedisServer(tmp_path, *options, port=port) as replica:
        known = first.options[first.options.index("--cluster-port") + 1]
        replica.admin.execute_command("CLUSTER", "MEET", "127.0.0.1", first.port, known)
        lost = first.admin.execute_command("CLUSTER", "MYID").decode()
        await eventually(lambda: lost.encode() in replica.admin.execute_command("CLUSTER", "NODES"))
        first.admin.config_set("repl-diskless-sync-delay", 0)
        replica.admin.execute_command("CLUSTER", "REPLICATE", lost)
        await eventually(lambda: replica.admin.info("replication").get("master_link_status") == "up")
        name = replica.admin.execute_command("CLUSTER", "MYID")
        for server in cluster.masters:  # who does not know it does not vote for it
            await eventually(partial(knows, server, name))
        for server in (*cluster.masters, replica):
            server.admin.config_set("cluster-node-timeout", NODE_TIMEOUT_MS)
        names = [f"{{{n}}}before" for n in range(30)]  # on all masters
        async with records_on(cluster.url, told) as records:
            for name in names:
                await use(records, name)
            # WAIT would be about writes of its own connection.
            sent = first.admin.info("replication")["master_repl_offset"]
            await eventually(lambda: replica.admin.info("replication")["slave_repl_offset"] >= sent)

            getattr(first, end)()
            for n in range(30):
                await use(records, f"{{{n}}}during")
            await eventually(lambda: replica.admin.role()[0] == b"master")
            async with asyncio.timeout(BACK_LIMIT_S):
                wanted = [[{"key": name}] for name in names]
                while [await records.get_many([name]) for name in names] != wanted:  # noqa: ASYNC110 - processes
                    await asyncio.sleep(0.05)

    assert set(told) <= {"store-down", "store-timeout", "store-resting"}


def knows(server: RedisServer, replica: bytes) -> bool:
    nodes: bytes = server.admin.execute_command("CLUSTER", "NODES")
    return any(line.startswith(replica) and b"slave" in line for line in nodes.splitlines())


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(BACK_LIMIT_S):
        while not condition():  # noqa: ASYNC110 - it is about other processes
            await asyncio.sleep(0.05)
