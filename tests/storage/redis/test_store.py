"""What Redis adds to the contract: keys and their lives, sizes, what others left there, and how many."""

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    MaxConnectionsError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from compaction_proxy.core.errors import StoreUnavailableError
from compaction_proxy.storage.factory import SECRET_KEY, load_shared_secret
from compaction_proxy.storage.keys import conversation_key, conversation_tenant_key
from compaction_proxy.storage.redis.client import to_store_unavailable
from compaction_proxy.storage.redis.store import MAX_VALUE_BYTES, RedisStore
from compaction_proxy.storage.redis.url import parse_redis_url
from compaction_proxy.storage.store import ListEntry, Record
from tests.helpers.redis_servers import RedisServer
from tests.storage.conftest import RedisBench

DAY_S = 86400.0


def scoped(n: int, kind: str = "checkpoint:chained:00") -> str:
    return f"v1:{{tenant.{n:04}}}:{kind}"


async def standing(store: Any, count: int) -> list[int]:
    found = [await store.read([scoped(n)]) for n in range(count)]
    return [n for n, [value] in enumerate(found) if value is not None]


async def test_every_key_has_a_time_to_live_but_the_secret(redis_bench: RedisBench) -> None:
    store = redis_bench.open()
    lease = await store.acquire_lease(scoped(1), 10)
    await store.commit(
        Record(scoped(1), b"v", DAY_S), [ListEntry(scoped(1, "rounds"), b"l", DAY_S, 3)], lease=lease
    )
    await store.write([Record(scoped(1, "conversation"), b"v", DAY_S)])
    await load_shared_secret(store, bytes(32))

    forever = [key for master, key in redis_bench.held() if master.pttl(key) < 0]
    assert forever == [redis_bench.url.prefix.encode() + SECRET_KEY.encode()]
    assert len(redis_bench.held()) == 9


async def test_what_was_answered_while_the_process_was_stopped_is_no_timeout(
    redis_bench: RedisBench,
) -> None:
    store = redis_bench.open()
    await store.write([Record(scoped(1), b"v", DAY_S)])
    await asyncio.gather(*(store.read([scoped(1)]) for _ in range(4)))  # as many connections
    for master in redis_bench.masters:
        master.client_pause(300)
    asking = [asyncio.create_task(store.read([scoped(1)])) for _ in range(4)]
    await asyncio.sleep(0.1)

    # Nothing runs in this process, and a timeout of redis-py would pass.
    time.sleep(1.5)  # noqa: ASYNC251 - the event loop is to stand still

    assert await asyncio.gather(*asking) == [[b"v"]] * 4


async def test_replicas_agree_on_the_first_secret_and_put_it_back(redis_bench: RedisBench) -> None:
    stores = [redis_bench.open() for _ in range(3)]

    agreed = await asyncio.gather(
        *(load_shared_secret(store, bytes([n]) * 32) for n, store in enumerate(stores))
    )

    assert len(set(agreed)) == 1
    await stores[0].delete_prefix("")
    assert (
        await load_shared_secret(stores[0], agreed[0])
        == await load_shared_secret(stores[1], bytes(32))
        == agreed[0]
    )


async def test_something_else_in_the_secrets_place_is_not_taken_for_one(redis_bench: RedisBench) -> None:
    store = redis_bench.open()
    await store.write([Record(SECRET_KEY, b"short", DAY_S)])

    with pytest.raises(StoreUnavailableError):
        await load_shared_secret(store, bytes(32))


async def test_a_connection_that_the_library_closed_under_a_command_costs_no_error(
    redis_bench: RedisBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = redis_bench.open()
    await store.write([Record(scoped(1), b"v", DAY_S)])
    client = store._redis.client
    ask, failures = client.execute_command, [AttributeError("writelines")]

    async def failing_once(*command: Any, **where: Any) -> Any:
        if failures:
            raise failures.pop()
        return await ask(*command, **where)

    monkeypatch.setattr(client, "execute_command", failing_once)
    assert await store.read([scoped(1)]) == [b"v"]
    assert failures == []


async def test_of_too_many_conversations_the_oldest_leave(redis_bench: RedisBench) -> None:
    store = redis_bench.open(max_scopes=3)
    for n in (0, 1, 2, 0, 3, 4):
        await store.commit(
            Record(scoped(n, f"checkpoint:chained:{len(redis_bench.held()):02}"), b"v", DAY_S),
            [Record(scoped(n), b"v", DAY_S), ListEntry(scoped(n, "rounds"), b"l", DAY_S, 3)],
        )
        await asyncio.sleep(0.002)  # the server counts milliseconds
    await store.commit(Record("v1:{another.0000}:checkpoint:chained:00", b"v", DAY_S))

    assert await standing(store, 5) == [0, 3, 4]
    assert await store.read(["v1:{another.0000}:checkpoint:chained:00"]) == [b"v"]
    gone = [key for _, key in redis_bench.held() if b"tenant.0001" in key or b"tenant.0002" in key]
    assert gone == []


async def test_what_is_written_counts_apart_from_what_is_committed(redis_bench: RedisBench) -> None:
    store = redis_bench.open(max_scopes=2)
    await store.commit(Record(scoped(0), b"v", DAY_S))
    for n in range(1, 6):
        await store.write([Record(scoped(n), b"v", DAY_S)])
        await asyncio.sleep(0.002)

    assert await standing(store, 6) == [0, 4, 5]


async def test_one_tenant_s_conversations_push_out_no_note_but_their_own(redis_bench: RedisBench) -> None:
    store = redis_bench.open(max_scopes=3)
    noted = [("t_1", "c_first"), *(("t_2", f"c_{n}") for n in range(8))]
    for tenant, name in noted:
        await store.write([Record(conversation_tenant_key(name), tenant.encode(), DAY_S)])
        await store.write([Record(conversation_key(tenant, name), b"v", DAY_S)])
        await asyncio.sleep(0.002)

    left = [(await store.read([conversation_tenant_key(name)]))[0] for _, name in noted]
    assert left == [b"t_1", *[None] * 5, *[b"t_2"] * 3]


async def test_a_value_over_the_limit_is_refused_as_a_whole(redis_bench: RedisBench) -> None:
    store = redis_bench.open()
    large = bytes(MAX_VALUE_BYTES + 1)

    attempts: list[list[Record | ListEntry]] = [
        [Record("{t}k", large, DAY_S)],
        [Record("{t}k", b"v", DAY_S), ListEntry("{t}l", large, DAY_S, 3)],
    ]

    for items in attempts:
        with pytest.raises(StoreUnavailableError) as caught:
            await store.write(items)
        assert caught.value.reason == "store-too-large"

    assert redis_bench.held() == []


async def test_what_another_program_left_is_absent_and_written_over(redis_bench: RedisBench) -> None:
    store = redis_bench.open()
    await store.write([Record("{t}value", b"v", DAY_S), ListEntry("{t}list", b"l", DAY_S, 3)])

    assert await store.read(["{t}list", "{t}value"]) == [None, b"v"]
    assert await store.read_tail("{t}value", 3) == []
    assert await store.commit(Record("{t}list", b"v", DAY_S), [ListEntry("{t}value", b"l", DAY_S, 3)]) == b"v"
    assert await store.read(["{t}list"]) == [b"v"]
    assert await store.read_tail("{t}value", 3) == [b"l"]


async def test_scripts_that_the_server_has_forgotten_are_sent_again(redis_bench: RedisBench) -> None:
    store = redis_bench.open()
    await store.write([Record("{t}k", b"v", DAY_S)])
    for master in redis_bench.masters:
        master.script_flush()

    assert await store.commit(Record("{t}k2", b"v", DAY_S)) == b"v"
    assert await store.acquire_lease("{t}k", 10) is not None


async def test_fifty_at_once_take_turns_on_one_connection(redis_bench: RedisBench) -> None:
    redis_bench.url = replace(redis_bench.url, max_connections=1)
    store = redis_bench.open()
    await store.write([Record(f"{{t}}k{n}", b"%d" % n, DAY_S) for n in range(50)])

    found = await asyncio.gather(*(store.read([f"{{t}}k{n}"]) for n in range(50)))

    assert found == [[b"%d" % n] for n in range(50)]


async def test_a_call_that_is_cancelled_anywhere_mixes_up_no_answers(redis_bench: RedisBench) -> None:
    redis_bench.url = replace(redis_bench.url, max_connections=2)
    store = redis_bench.open()
    await store.write([Record(f"{{t}}{n}", b"%d" % n * 100, DAY_S) for n in range(20)])
    wrong = []

    for steps in range(120):
        calls = [asyncio.ensure_future(store.read([f"{{t}}{n % 20}"])) for n in range(4)]
        for _ in range(steps % 40):  # turns of the event loop: from before the first byte to after the last
            await asyncio.sleep(0)
        cancelled = calls[steps % 4]
        cancelled.cancel()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        wrong += [
            answer
            for n, answer in enumerate(answers)
            if answer != [b"%d" % n * 100] and not (calls[n] is cancelled and calls[n].cancelled())
        ]

    assert wrong == []
    assert await store.read([f"{{t}}{n}" for n in range(20)]) == [b"%d" % n * 100 for n in range(20)]


async def test_a_closed_store_says_so(redis_bench: RedisBench) -> None:
    store = redis_bench.open()
    await store.read([])
    await store.close()

    with pytest.raises(StoreUnavailableError) as caught:
        await store.read(["{t}k"])
    assert caught.value.reason == "store-closed"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RedisConnectionError("Error 111 connecting to h:6379."), "store-down"),
        (ConnectionResetError(104, "reset"), "store-down"),
        (RedisTimeoutError("Timeout"), "store-timeout"),
        (BusyLoadingError("Redis is loading the dataset in memory"), "store-loading"),
        (AuthenticationError("invalid username-password pair"), "store-denied"),
        (NoPermissionError("no permissions"), "store-forbidden"),
        (ResponseError("NOAUTH Authentication required."), "store-denied"),
        (ReadOnlyError("You can't write against a read only replica."), "store-readonly"),
        (ResponseError("Error running script: @user_script:1: -READONLY You can't write"), "store-readonly"),
        (ResponseError("MISCONF Redis is configured to save RDB snapshots"), "store-readonly"),
        (OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), "store-full"),
        (
            ResponseError("Error running script (call to f_1): @user_script: 1: -OOM command not"),
            "store-full",
        ),
        (ResponseError("BUSY Redis is busy running a script."), "store-busy"),
        (MaxConnectionsError("Too many connections"), "store-busy"),
        (ClusterDownError("The cluster is down"), "store-down"),
        (ResponseError("ERR wrong number of arguments, near 'secret'"), "store-failed"),
    ],
)
def test_errors_have_reasons_and_show_nothing_that_was_sent(error: Exception, reason: str) -> None:
    found = to_store_unavailable(error, "p:")

    assert found.reason == reason
    assert "secret" not in str(found)


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (NoPermissionError("User u has no permissions to run the 'mget' command"), "the command mget"),
        (NoPermissionError("No permissions to access a key"), "the keys ~p:*"),
        (
            NoPermissionError("this user has no permissions to access one of the keys used as arguments"),
            "the keys ~p:*",
        ),
        (
            ResponseError(
                "ACL failure in script: User u has no permissions to run the 'set' command script:"
            ),
            "the command set",
        ),
        (
            ResponseError("The user executing the script can't run this command or subcommand script: e7"),
            "a command of a script",
        ),
    ],
)
def test_a_missing_permission_is_named(error: Exception, what: str) -> None:
    found = to_store_unavailable(error, "p:")

    assert (found.reason, str(found)) == ("store-forbidden", what)


async def test_a_server_is_reached_through_a_socket_of_this_machine(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    directory = tmp_path_factory.mktemp("s")  # short: a socket's path has 107 characters at most
    with RedisServer(directory, "--unixsocket", str(directory / "s")) as server:
        store = RedisStore(parse_redis_url(f"redis+unix://{directory}/s?db=2"))
        assert await store.commit(Record("{t}k", b"v", DAY_S)) == b"v"
        await store.close()
        assert server.admin.info("keyspace")["db2"]["keys"] == 1
