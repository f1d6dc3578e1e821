"""What every store promises (`storage.store.Store`)."""

import asyncio
import math
from contextlib import aclosing

import pytest

from compaction_proxy.storage.keys import conversation_key, conversation_tenant_key, tenant_prefix
from compaction_proxy.storage.store import Lease, ListEntry, Record, Store
from tests.storage.conftest import Bench

DAY_S = 86400.0


async def test_what_was_never_written_is_absent(store: Store) -> None:
    assert await store.read(["{t}k"]) == [None]
    assert await store.read_tail("{t}k", 5) == []


async def test_reading_nothing_gives_nothing(store: Store) -> None:
    assert await store.read([]) == []


async def test_values_come_in_the_order_of_the_keys_asked(store: Store) -> None:
    await store.write([Record("{t}a", b"1", DAY_S), Record("{t}b", b"2", DAY_S)])

    assert await store.read(["{t}b", "{t}x", "{t}a", "{t}b"]) == [b"2", None, b"1", b"2"]


async def test_thousands_of_keys_are_read_at_once(store: Store) -> None:
    await store.write([Record(f"{{t}}k{n}", b"%d" % n, DAY_S) for n in range(0, 3000, 7)])

    found = await store.read([f"{{t}}k{n}" for n in range(3000)])

    assert found == [None if n % 7 else b"%d" % n for n in range(3000)]


async def test_what_stands_in_many_scopes_is_read_at_once(store: Store) -> None:
    for n in range(0, 90, 2):
        await store.write([Record(f"{{t{n}}}k", b"%d" % n, DAY_S)])
    await store.write([ListEntry("{t1}k", b"line", DAY_S, 5)])

    found = await store.read([f"{{t{n}}}k" for n in range(90)])

    assert found == [None if n % 2 else b"%d" % n for n in range(90)]


async def test_a_write_goes_over_what_was_there(store: Store) -> None:
    await store.write([Record("{t}k", b"old", DAY_S)])
    await store.write([Record("{t}k", b"new", DAY_S)])

    assert await store.read(["{t}k"]) == [b"new"]


async def test_a_commit_returns_what_it_wrote(store: Store) -> None:
    standing = await store.commit(Record("{t}k", b"ours", DAY_S), [Record("{t}beside", b"too", DAY_S)])

    assert standing == b"ours"
    assert await store.read(["{t}k", "{t}beside"]) == [b"ours", b"too"]


async def test_a_commit_on_a_taken_key_writes_nothing(store: Store) -> None:
    await store.commit(Record("{t}k", b"first", DAY_S), [ListEntry("{t}log", b"first", DAY_S, 10)])

    standing = await store.commit(
        Record("{t}k", b"second", DAY_S),
        [Record("{t}x", b"x", DAY_S), ListEntry("{t}log", b"second", DAY_S, 10)],
    )

    assert standing == b"first"
    assert await store.read(["{t}k", "{t}x"]) == [b"first", None]
    assert await store.read_tail("{t}log", 10) == [b"first"]


async def test_of_fifty_committers_one_wins_and_all_see_its_bytes(bench: Bench) -> None:
    stores = [bench.open() for _ in range(5 if bench.shared else 1)]

    async def commit(n: int) -> bytes | None:
        also: list[Record | ListEntry] = [
            Record(f"{{t}}archive{n}", b"%d" % n, DAY_S),
            ListEntry("{t}log", b"%d" % n, DAY_S, 100),
        ]
        return await stores[n % len(stores)].commit(Record("{t}k", b"%d" % n, DAY_S), also)

    standing = set(await asyncio.gather(*map(commit, range(50))))

    (winner,) = standing
    assert winner is not None
    archives = await stores[0].read([f"{{t}}archive{n}" for n in range(50)])
    assert [value for value in archives if value is not None] == [winner]
    assert archives[int(winner)] == winner
    assert await stores[0].read_tail("{t}log", 100) == [winner]


async def test_an_expired_claim_is_free_again(bench: Bench, store: Store) -> None:
    await store.commit(Record("{t}k", b"first", 10))
    await bench.fast_forward(11)

    assert await store.commit(Record("{t}k", b"second", 10)) == b"second"


async def test_a_record_lives_for_its_ttl_and_reading_does_not_prolong_it(bench: Bench, store: Store) -> None:
    await store.write([Record("{t}short", b"s", 10), Record("{t}long", b"l", 100)])

    await bench.fast_forward(9)
    assert await store.read(["{t}short", "{t}long"]) == [b"s", b"l"]
    await bench.fast_forward(2)
    assert await store.read(["{t}short", "{t}long"]) == [None, b"l"]


async def test_a_list_lives_for_the_ttl_of_its_newest_line(bench: Bench, store: Store) -> None:
    await store.write([ListEntry("{t}log", b"1", 10, 5)])
    await bench.fast_forward(9)
    await store.write([ListEntry("{t}log", b"2", 10, 5)])
    await bench.fast_forward(9)
    assert await store.read_tail("{t}log", 5) == [b"1", b"2"]

    await bench.fast_forward(2)
    assert await store.read_tail("{t}log", 5) == []


async def test_an_expired_list_starts_anew(bench: Bench, store: Store) -> None:
    await store.write([ListEntry("{t}log", b"old", 10, 5)])
    await bench.fast_forward(11)
    await store.write([ListEntry("{t}log", b"new", 10, 5)])

    assert await store.read_tail("{t}log", 5) == [b"new"]


async def test_a_list_keeps_its_newest_lines_in_order(store: Store) -> None:
    for n in range(10):
        await store.write([ListEntry("{t}log", b"%d" % n, DAY_S, 4), ListEntry("{t}other", b"x", DAY_S, 4)])

    assert await store.read_tail("{t}log", 100) == [b"6", b"7", b"8", b"9"]
    assert await store.read_tail("{t}log", 2) == [b"8", b"9"]
    assert await store.read_tail("{t}log", 0) == []


async def test_a_shorter_keep_shortens_the_list(store: Store) -> None:
    await store.write([ListEntry("{t}log", b"%d" % n, DAY_S, 10) for n in range(5)])
    await store.write([ListEntry("{t}log", b"5", DAY_S, 2)])

    assert await store.read_tail("{t}log", 10) == [b"4", b"5"]


async def test_a_megabyte_of_any_bytes_comes_back(store: Store) -> None:
    value = bytes(range(256)) * 4096
    await store.write(
        [Record("{t}big", value, DAY_S), Record("{t}none", b"", DAY_S), ListEntry("{t}log", value, DAY_S, 2)]
    )

    assert await store.read(["{t}big", "{t}none"]) == [value, b""]
    assert await store.read_tail("{t}log", 1) == [value]


@pytest.mark.parametrize(
    "key", ["v1:{ab.cd}:checkpoint:chained:00ff", "ключ 鍵 🔑", "a'b\"c%_*?", " ", "a\nb"]
)
async def test_any_text_is_a_key(store: Store, key: str) -> None:
    key = "{t}" + key
    assert await store.commit(Record(key, b"v", DAY_S), [ListEntry(key + "+", b"l", DAY_S, 1)]) == b"v"

    assert await store.read([key, key + "x"]) == [b"v", None]
    assert await store.read_tail(key + "+", 1) == [b"l"]


async def test_keys_are_told_apart_by_case(store: Store) -> None:
    await store.write([Record("{t}K", b"upper", DAY_S), Record("{t}k", b"lower", DAY_S)])

    assert await store.read(["{t}K", "{t}k"]) == [b"upper", b"lower"]


async def test_closing_twice_does_no_harm(store: Store) -> None:
    await store.write([Record("{t}k", b"v", DAY_S)])

    await store.close()
    await store.close()


async def test_a_store_closes_that_was_never_used(store: Store) -> None:
    await store.close()


async def test_two_stores_on_one_place_see_each_other(bench: Bench) -> None:
    if not bench.shared:
        pytest.skip("this store is not shared")
    one, other = bench.open(), bench.open()
    await one.write([Record("{t}k", b"v", DAY_S), ListEntry("{t}log", b"1", DAY_S, 5)])
    await other.write([ListEntry("{t}log", b"2", DAY_S, 5)])

    assert await other.read(["{t}k"]) == [b"v"]
    assert await other.commit(Record("{t}k", b"late", DAY_S)) == b"v"
    assert await one.read_tail("{t}log", 5) == [b"1", b"2"]


async def test_what_was_written_is_there_after_a_restart(bench: Bench) -> None:
    if not bench.shared:
        pytest.skip("this store ends with its process")
    one = bench.open()
    await one.write([Record("{t}k", b"v", DAY_S)])
    await one.close()

    assert await bench.open().read(["{t}k"]) == [b"v"]


async def test_what_is_to_stay_stays(bench: Bench, store: Store) -> None:
    await store.commit(Record("v1:secret", b"v", math.inf))
    await bench.fast_forward(1000 * DAY_S)

    assert await store.read(["v1:secret"]) == [b"v"]
    assert await store.commit(Record("v1:secret", b"another", math.inf)) == b"v"


async def test_a_lease_is_exclusive_until_it_is_given_back(store: Store) -> None:
    lease = await store.acquire_lease("{t}k", 60)

    assert lease is not None
    assert lease.key == "{t}k"
    assert await store.acquire_lease("{t}k", 60) is None
    await store.release_lease(lease)
    assert await store.acquire_lease("{t}k", 60) is not None


async def test_leases_on_different_keys_have_nothing_to_do_with_each_other(store: Store) -> None:
    assert None not in [await store.acquire_lease("{t}k", 60), await store.acquire_lease("{t}kk", 60)]


async def test_a_lease_and_a_record_may_have_the_same_key(store: Store) -> None:
    lease = await store.acquire_lease("{t}k", 60)

    assert await store.read(["{t}k"]) == [None]
    assert await store.commit(Record("{t}k", b"v", DAY_S), lease=lease) == b"v"
    assert await store.acquire_lease("{t}k", 60) is None


async def test_of_two_hundred_who_want_a_lease_one_gets_it(bench: Bench) -> None:
    stores = [bench.open() for _ in range(5 if bench.shared else 1)]

    calls = [stores[n % len(stores)].acquire_lease("{t}k", 60) for n in range(200)]
    found = await asyncio.gather(*calls, return_exceptions=True)

    failed = [each for each in found if isinstance(each, BaseException)]
    assert len([each for each in found if isinstance(each, Lease)]) == 1
    # On a busy machine, one process that waits for the lock of a file may wait too long.
    assert {getattr(each, "reason", repr(each)) for each in failed} <= {"store-busy"}
    assert len(failed) < len(found) / 2


async def test_a_lease_expires(bench: Bench, store: Store) -> None:
    lease = await store.acquire_lease("{t}k", 10)
    assert lease is not None

    await bench.fast_forward(9)
    assert await store.acquire_lease("{t}k", 10) is None
    await bench.fast_forward(2)
    assert await store.renew_lease(lease, 10) is False
    assert await store.acquire_lease("{t}k", 10) is not None


async def test_a_renewed_lease_lives_on(bench: Bench, store: Store) -> None:
    lease = await store.acquire_lease("{t}k", 10)
    assert lease is not None
    await bench.fast_forward(9)

    assert await store.renew_lease(lease, 10) is True
    await bench.fast_forward(9)
    assert await store.acquire_lease("{t}k", 10) is None
    assert await store.commit(Record("{t}c", b"v", DAY_S), lease=lease) == b"v"


async def test_only_its_holder_renews_or_releases_a_lease(bench: Bench, store: Store) -> None:
    late = await store.acquire_lease("{t}k", 10)
    assert late is not None
    await bench.fast_forward(11)
    holder = await store.acquire_lease("{t}k", 10)
    assert holder is not None

    assert await store.renew_lease(late, 1000) is False
    await store.release_lease(late)
    assert await store.acquire_lease("{t}k", 10) is None
    assert await store.renew_lease(holder, 10) is True
    await bench.fast_forward(11)
    assert await store.acquire_lease("{t}k", 10) is not None


async def test_fences_rise_with_every_holder(bench: Bench, store: Store) -> None:
    leases: list[Lease | None] = [await store.acquire_lease("{t}k", 10)]
    await bench.fast_forward(11)
    leases.append(await store.acquire_lease("{t}k", 10))
    assert leases[-1] is not None
    await store.release_lease(leases[-1])
    leases.append(await store.acquire_lease("{t}k", 10))
    await store.delete_prefix("{t}")
    leases.append(await store.acquire_lease("{t}k", 10))
    await bench.fast_forward(100 * DAY_S)
    leases.append(
        await bench.open().acquire_lease("{t}k", 10)
        if bench.shared
        else await store.acquire_lease("{t}k", 10)
    )

    fences = [lease.fence for lease in leases if lease]
    assert len(fences) == 5
    assert fences == sorted(set(fences))


async def test_a_commit_under_a_lost_lease_writes_nothing_and_says_so(bench: Bench, store: Store) -> None:
    late = await store.acquire_lease("{t}k", 10)
    await bench.fast_forward(11)
    holder = await store.acquire_lease("{t}k", 10)
    beside: list[Record | ListEntry] = [Record("{t}x", b"x", DAY_S), ListEntry("{t}log", b"x", DAY_S, 3)]

    assert await store.commit(Record("{t}c", b"late", DAY_S), beside, lease=late) is None
    assert await store.read(["{t}c", "{t}x"]) == [None, None]
    assert await store.read_tail("{t}log", 3) == []
    assert await store.commit(Record("{t}c", b"ours", DAY_S), beside, lease=holder) == b"ours"
    assert await store.commit(Record("{t}c", b"late", DAY_S), lease=late) == b"ours"


@pytest.mark.parametrize("end", ["expired", "released", "deleted"])
async def test_a_lease_that_nobody_else_has_taken_is_lost_all_the_same(
    bench: Bench, store: Store, end: str
) -> None:
    lease = await store.acquire_lease("{t}k", 10)
    assert lease is not None
    match end:
        case "expired":
            await bench.fast_forward(11)
        case "released":
            await store.release_lease(lease)
        case _:
            await store.delete_prefix("{t}")

    assert await store.commit(Record("{t}c", b"late", DAY_S), lease=lease) is None
    assert await store.read(["{t}c"]) == [None]


async def test_what_begins_with_a_prefix_is_forgotten_and_counted(store: Store) -> None:
    for scope in ("v1:{aa.1}", "v1:{aa.2}", "v1:{ab.1}"):
        await store.commit(
            Record(f"{scope}:checkpoint:x", b"v", DAY_S), [ListEntry(f"{scope}:rounds", b"l", DAY_S, 3)]
        )
        await store.write([Record(f"{scope}:conversation", b"v", DAY_S)])
        await store.acquire_lease(f"{scope}:checkpoint:y", 10)

    assert await store.delete_prefix("v1:{aa.") == 6
    left = [await store.read([f"v1:{{{scope}}}:checkpoint:x"]) for scope in ("aa.1", "aa.2", "ab.1")]
    assert left == [[None], [None], [b"v"]]
    assert await store.read_tail("v1:{aa.1}:rounds", 3) == []
    assert await store.read_tail("v1:{ab.1}:rounds", 3) == [b"l"]
    assert await store.acquire_lease("v1:{aa.1}:checkpoint:y", 10) is not None
    assert await store.acquire_lease("v1:{ab.1}:checkpoint:y", 10) is None
    assert await store.delete_prefix("v1:{aa.") == 0


async def test_with_a_tenant_s_keys_the_notes_of_whose_they_are_are_forgotten(store: Store) -> None:
    names = [f"c_{n}" for n in range(3)]
    for name, tenant in zip(names, ("t_1", "t_1", "t_2"), strict=True):
        await store.write([Record(conversation_key(tenant, name), b"v", DAY_S)])
        await store.write([Record(conversation_tenant_key(name), b"note", DAY_S)])

    assert await store.delete_prefix(tenant_prefix("t_1")) == 2
    assert [await store.read([conversation_tenant_key(name)]) for name in names] == [
        [None],
        [None],
        [b"note"],
    ]
    assert await store.delete_prefix("") == 2


async def test_a_prefix_is_no_pattern(store: Store) -> None:
    names = ["{t}*a", "{t}?a", "{t}[x]a", "{t}\\a", "{t}^-a", "{t}%a", "{t}_a", "{t}xa"]
    await store.write([Record(name, b"v", DAY_S) for name in names])

    assert [await store.delete_prefix(name[:-1]) for name in names] == [1] * len(names)


async def test_thousands_of_keys_are_forgotten_at_once(store: Store) -> None:
    await store.write([Record(f"{{t}}k{n}", b"v", DAY_S) for n in range(3000)])

    assert await store.delete_prefix("{t}k") == 3000
    assert await store.delete_prefix("") == 0


async def test_who_listens_hears_what_is_published_or_that_nothing_will_come(bench: Bench) -> None:
    listener, other = bench.open(), bench.open()
    heard: list[bytes | None] = []
    async with asyncio.timeout(100), aclosing(listener.listen("news")) as messages:
        async for message in messages:
            heard.append(message)
            if message is None:
                await other.publish("other-news", b"not this")
                await other.publish("news", b"\x01one")
                await listener.publish("news", b"two")
            if message == b"two":
                break
    assert heard == ([None, b"\x01one", b"two"] if bench.tells else [])


async def test_what_is_published_is_not_kept(store: Store) -> None:
    await store.publish("{t}k", b"news")
    assert await store.read(["{t}k"]) == [None]
    assert await store.read_tail("{t}k", 5) == []
