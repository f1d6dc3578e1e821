"""What every store promises (`proxy.ports.Store`)."""

import asyncio
from typing import Protocol

import pytest

from proxy.ports import Entry, Record, Store

DAY_S = 86400.0


class Bench(Protocol):
    shared: bool

    def open(self) -> Store: ...

    async def fast_forward(self, seconds: float) -> None: ...


async def test_what_was_never_written_is_absent(store: Store) -> None:
    assert await store.read(["k"]) == [None]
    assert await store.tail("k", 5) == []


async def test_reading_nothing_gives_nothing(store: Store) -> None:
    assert await store.read([]) == []


async def test_values_come_in_the_order_of_the_keys_asked(store: Store) -> None:
    await store.write([Record("a", b"1", DAY_S), Record("b", b"2", DAY_S)])

    assert await store.read(["b", "x", "a", "b"]) == [b"2", None, b"1", b"2"]


async def test_thousands_of_keys_are_read_at_once(store: Store) -> None:
    await store.write([Record(f"k{n}", b"%d" % n, DAY_S) for n in range(0, 3000, 7)])

    found = await store.read([f"k{n}" for n in range(3000)])

    assert found == [None if n % 7 else b"%d" % n for n in range(3000)]


async def test_a_write_goes_over_what_was_there(store: Store) -> None:
    await store.write([Record("k", b"old", DAY_S)])
    await store.write([Record("k", b"new", DAY_S)])

    assert await store.read(["k"]) == [b"new"]


async def test_a_commit_returns_what_it_wrote(store: Store) -> None:
    standing = await store.commit(Record("k", b"ours", DAY_S), [Record("beside", b"too", DAY_S)])

    assert standing == b"ours"
    assert await store.read(["k", "beside"]) == [b"ours", b"too"]


async def test_a_commit_on_a_taken_key_writes_nothing(store: Store) -> None:
    await store.commit(Record("k", b"first", DAY_S), [Entry("log", b"first", DAY_S, 10)])

    standing = await store.commit(
        Record("k", b"second", DAY_S), [Record("x", b"x", DAY_S), Entry("log", b"second", DAY_S, 10)]
    )

    assert standing == b"first"
    assert await store.read(["k", "x"]) == [b"first", None]
    assert await store.tail("log", 10) == [b"first"]


async def test_of_fifty_committers_one_wins_and_all_see_its_bytes(bench: Bench) -> None:
    stores = [bench.open() for _ in range(5 if bench.shared else 1)]

    async def commit(n: int) -> bytes:
        also: list[Record | Entry] = [
            Record(f"archive{n}", b"%d" % n, DAY_S),
            Entry("log", b"%d" % n, DAY_S, 100),
        ]
        return await stores[n % len(stores)].commit(Record("k", b"%d" % n, DAY_S), also)

    standing = set(await asyncio.gather(*map(commit, range(50))))

    (winner,) = standing
    archives = await stores[0].read([f"archive{n}" for n in range(50)])
    assert [value for value in archives if value is not None] == [winner]
    assert archives[int(winner)] == winner
    assert await stores[0].tail("log", 100) == [winner]


async def test_an_expired_claim_is_free_again(bench: Bench, store: Store) -> None:
    await store.commit(Record("k", b"first", 10))
    await bench.fast_forward(11)

    assert await store.commit(Record("k", b"second", 10)) == b"second"


async def test_a_record_lives_for_its_ttl_and_reading_does_not_prolong_it(bench: Bench, store: Store) -> None:
    await store.write([Record("short", b"s", 10), Record("long", b"l", 100)])

    await bench.fast_forward(9)
    assert await store.read(["short", "long"]) == [b"s", b"l"]
    await bench.fast_forward(2)
    assert await store.read(["short", "long"]) == [None, b"l"]


async def test_a_list_lives_for_the_ttl_of_its_newest_line(bench: Bench, store: Store) -> None:
    await store.write([Entry("log", b"1", 10, 5)])
    await bench.fast_forward(9)
    await store.write([Entry("log", b"2", 10, 5)])
    await bench.fast_forward(9)
    assert await store.tail("log", 5) == [b"1", b"2"]

    await bench.fast_forward(2)
    assert await store.tail("log", 5) == []


async def test_an_expired_list_starts_anew(bench: Bench, store: Store) -> None:
    await store.write([Entry("log", b"old", 10, 5)])
    await bench.fast_forward(11)
    await store.write([Entry("log", b"new", 10, 5)])

    assert await store.tail("log", 5) == [b"new"]


async def test_a_list_keeps_its_newest_lines_in_order(store: Store) -> None:
    for n in range(10):
        await store.write([Entry("log", b"%d" % n, DAY_S, 4), Entry("other", b"x", DAY_S, 4)])

    assert await store.tail("log", 100) == [b"6", b"7", b"8", b"9"]
    assert await store.tail("log", 2) == [b"8", b"9"]
    assert await store.tail("log", 0) == []


async def test_a_shorter_keep_shortens_the_list(store: Store) -> None:
    await store.write([Entry("log", b"%d" % n, DAY_S, 10) for n in range(5)])
    await store.write([Entry("log", b"5", DAY_S, 2)])

    assert await store.tail("log", 10) == [b"4", b"5"]


async def test_a_megabyte_of_any_bytes_comes_back(store: Store) -> None:
    value = bytes(range(256)) * 4096
    await store.write(
        [Record("big", value, DAY_S), Record("none", b"", DAY_S), Entry("log", value, DAY_S, 2)]
    )

    assert await store.read(["big", "none"]) == [value, b""]
    assert await store.tail("log", 1) == [value]


@pytest.mark.parametrize(
    "key", ["v1:{ab.cd}:checkpoint:chained:00ff", "ключ 鍵 🔑", "a'b\"c%_*?", " ", "a\nb"]
)
async def test_any_text_is_a_key(store: Store, key: str) -> None:
    assert await store.commit(Record(key, b"v", DAY_S), [Entry(key + "+", b"l", DAY_S, 1)]) == b"v"

    assert await store.read([key, key + "x"]) == [b"v", None]
    assert await store.tail(key + "+", 1) == [b"l"]


async def test_keys_are_told_apart_by_case(store: Store) -> None:
    await store.write([Record("K", b"upper", DAY_S), Record("k", b"lower", DAY_S)])

    assert await store.read(["K", "k"]) == [b"upper", b"lower"]


async def test_closing_twice_does_no_harm(store: Store) -> None:
    await store.write([Record("k", b"v", DAY_S)])

    await store.close()
    await store.close()


async def test_a_store_closes_that_was_never_used(store: Store) -> None:
    await store.close()


async def test_two_stores_on_one_place_see_each_other(bench: Bench) -> None:
    if not bench.shared:
        pytest.skip("this store is not shared")
    one, other = bench.open(), bench.open()
    await one.write([Record("k", b"v", DAY_S), Entry("log", b"1", DAY_S, 5)])
    await other.write([Entry("log", b"2", DAY_S, 5)])

    assert await other.read(["k"]) == [b"v"]
    assert await other.commit(Record("k", b"late", DAY_S)) == b"v"
    assert await one.tail("log", 5) == [b"1", b"2"]


async def test_what_was_written_is_there_after_a_restart(bench: Bench) -> None:
    if not bench.shared:
        pytest.skip("this store ends with its process")
    one = bench.open()
    await one.write([Record("k", b"v", DAY_S)])
    await one.close()

    assert await bench.open().read(["k"]) == [b"v"]
