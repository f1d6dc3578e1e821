"""Records over stores that work, fail, hang, or hold what others wrote."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from typing import Any

import pytest

from compaction_proxy.core.errors import StoreUnavailableError
from compaction_proxy.storage.envelope import pack
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.records import ListItem, RecordItem, RecordStore
from compaction_proxy.storage.resilient import CALLS_AT_ONCE, DEADLINE_S, TURN_LIMIT_S
from compaction_proxy.storage.store import Lease, ListEntry, Record, Store

DAY_S = 86400.0
NEWER = b"\x02\x00{}"


class Clock:
    time = 100.0

    def __call__(self) -> float:
        return self.time


class Watched:
    """A store in memory that counts its calls, and fails or hangs as told."""

    def __init__(self) -> None:
        self.inner = MemoryStore()
        self.trouble: BaseException | None = None
        self.hangs = False
        self.calls: list[str] = []
        self.waiting = 0

    async def _do(self, name: str) -> None:
        self.calls.append(name)
        if self.trouble:
            raise self.trouble
        if self.hangs:
            self.waiting += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.waiting -= 1

    async def read(self, keys: Sequence[str]) -> list[bytes | None]:
        await self._do("read")
        return await self.inner.read(keys)

    async def commit(
        self, claim: Record, also: Sequence[Record | ListEntry] = (), *, lease: Lease | None = None
    ) -> bytes | None:
        await self._do("commit")
        return await self.inner.commit(claim, also, lease=lease)

    async def write(self, items: Sequence[Record | ListEntry]) -> None:
        await self._do("write")
        await self.inner.write(items)

    async def read_tail(self, key: str, limit: int) -> list[bytes]:
        await self._do("tail")
        return await self.inner.read_tail(key, limit)

    async def acquire_lease(self, key: str, ttl_s: float) -> Lease | None:
        await self._do("acquire")
        return await self.inner.acquire_lease(key, ttl_s)

    async def renew_lease(self, lease: Lease, ttl_s: float) -> bool:
        await self._do("renew")
        return await self.inner.renew_lease(lease, ttl_s)

    async def release_lease(self, lease: Lease) -> None:
        await self._do("release")
        await self.inner.release_lease(lease)

    async def delete_prefix(self, prefix: str) -> int:
        await self._do("delete")
        return await self.inner.delete_prefix(prefix)

    async def publish(self, channel: str, message: bytes) -> None:
        await self._do("publish")

    async def listen(self, channel: str) -> AsyncGenerator[bytes | None, None]:
        await self._do("listen")
        yield None

    async def close(self) -> None:
        await self._do("close")


class Told(list[str]):
    def __call__(self, error: StoreUnavailableError) -> None:
        self.append(error.reason)


class Scene:
    """Records over a watched store, on a clock that stands still."""

    def __init__(self, **settings: Any) -> None:
        self.store = Watched()
        self.clock = Clock()
        self.told = Told()
        self.records = self.another(**settings)

    def another(self, **settings: Any) -> RecordStore:
        """Records of another process on the same store."""
        store: Store = self.store
        return RecordStore(store, self.told, clock=self.clock, **settings)


async def test_what_was_saved_is_found_without_asking_the_store_again() -> None:
    scene = Scene()
    saved = await scene.records.save_if_absent("k", {"n": 1}, ttl_s=DAY_S)

    assert saved == {"n": 1}
    assert await scene.records.get_many(["x", "k"]) == [None, {"n": 1}]
    assert await scene.records.get_many(["k"]) == [{"n": 1}]
    assert scene.store.calls == ["commit", "read"]


async def test_another_process_finds_it_with_one_read_for_all_keys() -> None:
    scene = Scene()
    await scene.records.save_if_absent(
        "{t}a", {"n": 1}, ttl_s=DAY_S, other_items=[RecordItem("{t}b", {"n": 2}, DAY_S)]
    )
    other = scene.another()
    scene.store.calls.clear()

    assert await other.get_many(["{t}b", "{t}x", "{t}a"]) == [{"n": 2}, None, {"n": 1}]
    assert await other.get_many(["{t}a", "{t}b"]) == [{"n": 1}, {"n": 2}]
    assert scene.store.calls == ["read"]


async def test_absence_is_asked_again() -> None:
    scene = Scene()
    assert await scene.records.get_many(["k"]) == [None]
    await scene.another().save_if_absent("k", {"n": 1}, ttl_s=DAY_S)

    assert await scene.records.get_many(["k"]) == [{"n": 1}]


async def test_the_first_to_save_decides_what_all_use() -> None:
    scene = Scene()
    await scene.another().save_if_absent("{t}k", {"n": 1}, ttl_s=DAY_S)

    used = await scene.records.save_if_absent(
        "{t}k", {"n": 2}, ttl_s=DAY_S, other_items=[RecordItem("{t}b", {"n": 2}, DAY_S)]
    )

    assert used == {"n": 1}
    assert await scene.records.get_many(["{t}k", "{t}b"]) == [{"n": 1}, None]


async def test_a_fresh_find_sees_what_others_have_overwritten() -> None:
    scene = Scene()
    await scene.records.overwrite("k", {"n": 1}, ttl_s=DAY_S)
    await scene.another().overwrite("k", {"n": 2}, ttl_s=DAY_S)

    assert await scene.records.get_many(["k"]) == [{"n": 1}]
    assert await scene.records.get_many(["k"], bypass_cache=True) == [{"n": 2}]
    assert await scene.records.get_many(["k"]) == [{"n": 2}]


async def test_a_fresh_find_takes_what_is_held_when_the_store_is_away() -> None:
    scene = Scene()
    await scene.records.overwrite("k", {"n": 1}, ttl_s=DAY_S)
    scene.store.trouble = StoreUnavailableError("away")

    assert await scene.records.get_many(["k"], bypass_cache=True) == [{"n": 1}]


async def test_what_is_held_is_asked_for_again_after_an_hour() -> None:
    scene = Scene()
    await scene.records.save_if_absent("k", {"n": 1}, ttl_s=DAY_S)
    scene.clock.time += 3601
    scene.store.calls.clear()

    assert await scene.records.get_many(["k"]) == [{"n": 1}]
    assert scene.store.calls == ["read"]


async def test_a_record_leaves_memory_when_its_time_is_over() -> None:
    scene = Scene()
    scene.store.trouble = StoreUnavailableError("away")
    await scene.records.save_if_absent("k", {"n": 1}, ttl_s=60)
    assert await scene.records.get_many(["k"]) == [{"n": 1}]

    scene.clock.time += 61

    assert await scene.records.get_many(["k"]) == [None]


async def test_what_is_held_is_bounded() -> None:
    scene = Scene(cache_bytes=20_000)
    scene.store.trouble = StoreUnavailableError("away")
    for n in range(100):
        await scene.records.save_if_absent(f"k{n}", {"text": "x" * 2000}, ttl_s=DAY_S)

    found = await scene.records.get_many([f"k{n}" for n in range(100)])

    assert [n for n, fields in enumerate(found) if fields] == [96, 97, 98, 99]


async def test_records_come_back_the_same_from_the_store_and_from_memory() -> None:
    scene = Scene()
    saved = await scene.records.save_if_absent("k", {"span": (1, 2)}, ttl_s=DAY_S)

    assert [saved, *await scene.another().get_many(["k"])] == [{"span": [1, 2]}, {"span": [1, 2]}]


async def test_lines_are_appended_and_read_in_order() -> None:
    scene = Scene()
    await scene.records.save_if_absent(
        "{t}k", {}, ttl_s=DAY_S, other_items=[ListItem("{t}log", {"n": 0}, DAY_S, 3)]
    )
    for n in range(1, 5):
        assert await scene.records.append_line("{t}log", {"n": n}, ttl_s=DAY_S, max_lines=3)

    assert await scene.records.read_tail("{t}log", 2) == [{"n": 3}, {"n": 4}]
    assert await scene.records.read_tail("{t}log", 9) == [{"n": 2}, {"n": 3}, {"n": 4}]


async def test_records_of_two_scopes_cannot_be_committed_together() -> None:
    scene = Scene()

    with pytest.raises(ValueError):
        await scene.records.save_if_absent(
            "{t}k", {}, ttl_s=DAY_S, other_items=[ListItem("{u}log", {}, DAY_S, 3)]
        )

    assert scene.store.calls == []


@pytest.mark.parametrize("value", [NEWER, b"\x01\x01damaged", b"", b"\x01\x00[]"])
async def test_what_is_not_ours_to_read_is_absent_and_stays(value: bytes) -> None:
    scene = Scene()
    await scene.store.write([Record("k", value, DAY_S), ListEntry("log", value, DAY_S, 9)])
    await scene.records.append_line("log", {"n": 1}, ttl_s=DAY_S, max_lines=9)

    assert await scene.records.get_many(["k"]) == [None]
    assert await scene.records.read_tail("log", 9) == [{"n": 1}]
    assert not await scene.records.overwrite("k", {"n": 1}, ttl_s=DAY_S)
    assert await scene.store.read(["k"]) == [value]
    assert scene.told == ["store-unreadable", "store-unreadable"]
    assert scene.records.is_in_use


async def test_a_key_taken_by_a_newer_version_leaves_us_with_our_own() -> None:
    scene = Scene()
    await scene.store.write([Record("k", NEWER, DAY_S)])

    assert await scene.records.save_if_absent("k", {"n": 1}, ttl_s=DAY_S) == {"n": 1}
    assert await scene.records.get_many(["k"]) == [{"n": 1}]
    assert await scene.store.read(["k"]) == [NEWER]
    assert scene.told == ["store-unreadable"]


async def test_what_belongs_to_an_overwritten_record_is_written_with_it_or_not_at_all() -> None:
    scene = Scene()
    line = ListItem("{t}log", {"n": 1}, DAY_S, 9)

    assert await scene.records.overwrite("{t}k", {"n": 1}, ttl_s=DAY_S, other_items=[line])
    assert scene.store.calls == ["read", "write"]
    await scene.store.write([Record("{t}k", NEWER, DAY_S)])
    assert not await scene.records.overwrite("{t}k", {"n": 1}, ttl_s=DAY_S, other_items=[line])
    assert await scene.records.read_tail("{t}log", 9) == [{"n": 1}]


async def everything(records: RecordStore) -> list[object]:
    """One call of each kind; the store holds nothing that they could find."""
    saved = await records.save_if_absent(
        "{t}k",
        {"n": 1},
        ttl_s=DAY_S,
        other_items=[RecordItem("{t}a", {"n": 2}, DAY_S), ListItem("{t}log", {}, DAY_S, 3)],
    )
    return [
        saved,
        await records.get_many(["{t}k", "{t}a", "{t}x"]),
        await records.overwrite("limit", {"n": 3}, ttl_s=DAY_S),
        await records.get_many(["limit"]),
        await records.append_line("log", {}, ttl_s=DAY_S, max_lines=3),
        await records.read_tail("log", 3),
    ]


WITHOUT_STORE: list[object] = [{"n": 1}, [{"n": 1}, {"n": 2}, None], False, [{"n": 3}], False, []]


@pytest.mark.parametrize(
    "trouble", [StoreUnavailableError("away"), ConnectionResetError(104, "reset"), TimeoutError()], ids=repr
)
async def test_with_a_store_that_always_fails_its_own_records_are_used(trouble: BaseException) -> None:
    scene = Scene()
    scene.store.trouble = trouble

    for _ in range(50):
        assert await everything(scene.records) == WITHOUT_STORE

    assert not scene.records.is_in_use
    assert len(scene.store.calls) <= 3


@pytest.mark.virtual_time
async def test_with_a_store_that_hangs_its_own_records_are_used_after_one_deadline() -> None:
    scene = Scene()
    scene.store.hangs = True
    clock = asyncio.get_running_loop().time
    started_s = clock()

    for _ in range(50):
        assert await everything(scene.records) == WITHOUT_STORE

    assert clock() - started_s == pytest.approx(DEADLINE_S)
    await asyncio.sleep(0)
    assert scene.store.calls == ["commit"]
    assert (scene.store.waiting, scene.records.is_in_use) == (0, False)


@pytest.mark.virtual_time
async def test_a_hung_store_holds_a_few_calls_and_the_rest_fail_with_them() -> None:
    scene = Scene()
    scene.store.hangs = True
    clock = asyncio.get_running_loop().time
    started_s = clock()

    found = await asyncio.gather(*(scene.records.get_many(["k"]) for _ in range(200)))

    assert found == [[None]] * 200
    assert len(scene.store.calls) == CALLS_AT_ONCE
    assert clock() - started_s == pytest.approx(DEADLINE_S)


@pytest.mark.virtual_time
async def test_a_burst_of_calls_waits_for_its_turns_though_that_takes_longer_than_a_deadline() -> None:
    scene = Scene()
    await scene.another().save_if_absent("k", {"n": 1}, ttl_s=DAY_S)
    inner = scene.store.read

    async def read(keys: Sequence[str]) -> list[bytes | None]:
        await asyncio.sleep(0.02)
        return await inner(keys)

    scene.store.read = read  # type: ignore[method-assign]
    clock = asyncio.get_running_loop().time
    started_s = clock()

    found = await asyncio.gather(*(scene.records.get_many(["k"], bypass_cache=True) for _ in range(200)))

    assert (found, scene.told, scene.records.is_in_use) == ([[{"n": 1}]] * 200, [], True)
    assert clock() - started_s > DEADLINE_S  # or nothing was tried


@pytest.mark.virtual_time
async def test_a_store_too_slow_for_a_burst_is_left_alone_after_a_bounded_wait() -> None:
    scene = Scene()

    async def read(keys: Sequence[str]) -> list[bytes | None]:
        await asyncio.sleep(0.8 * DEADLINE_S)
        return [None] * len(keys)

    scene.store.read = read  # type: ignore[method-assign]
    clock = asyncio.get_running_loop().time
    started_s = clock()

    await asyncio.gather(*(scene.records.get_many(["k"]) for _ in range(10_000)))

    assert clock() - started_s == pytest.approx(TURN_LIMIT_S)
    assert not scene.records.is_in_use
    await scene.records.close()


@pytest.mark.virtual_time
@pytest.mark.parametrize("patience_s", [0.0, 0.01, 0.05], ids=["at once", "soon", "with its turn"])
async def test_clients_that_leave_while_their_calls_wait_take_no_turns_with_them(patience_s: float) -> None:
    scene = Scene()

    async def read(keys: Sequence[str]) -> list[bytes | None]:
        await asyncio.sleep(0.05)
        return [None] * len(keys)

    scene.store.read = read  # type: ignore[method-assign]
    asking = [asyncio.create_task(scene.records.get_many(["k"])) for _ in range(10 * CALLS_AT_ONCE)]
    await asyncio.sleep(patience_s)
    for each in asking:
        each.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    clock = asyncio.get_running_loop().time
    started_s = clock()
    await asyncio.gather(*(scene.records.get_many(["k"]) for _ in range(CALLS_AT_ONCE)))

    assert clock() - started_s == pytest.approx(0.05)  # all had a turn at once
    assert scene.told == []


async def recovered(records: RecordStore) -> None:
    async with asyncio.timeout(100):
        while not records.is_in_use:  # noqa: ASYNC110 - nobody is told when it recovers
            await asyncio.sleep(0.001)


@pytest.mark.virtual_time
async def test_a_store_that_comes_back_is_used_again_after_one_probe() -> None:
    scene = Scene(probe_every_s=0.01)
    scene.store.trouble = StoreUnavailableError("away")
    for _ in range(5):
        await scene.records.get_many(["k"])
    scene.store.trouble = None
    scene.store.calls.clear()

    assert await scene.records.get_many(["k"]) == [None]
    assert scene.store.calls == []
    await recovered(scene.records)
    assert scene.store.calls == ["read"]
    await scene.another().save_if_absent("k", {"n": 1}, ttl_s=DAY_S)
    assert await scene.records.get_many(["k"]) == [{"n": 1}]
    await scene.records.close()


@pytest.mark.virtual_time
async def test_a_store_that_is_away_is_probed_without_anyone_waiting_or_being_told() -> None:
    scene = Scene(probe_every_s=0.001)
    scene.store.trouble = StoreUnavailableError("away")
    for _ in range(3):
        await scene.records.get_many(["k"])
    scene.store.calls.clear()

    async with asyncio.timeout(100):
        while len(scene.store.calls) < 5:  # noqa: ASYNC110 - the store is a double
            await asyncio.sleep(0.001)

    assert (scene.records.is_in_use, scene.told) == (False, ["away"] * 3)
    with suppress(StoreUnavailableError):
        await scene.records.close()
    scene.store.calls.clear()
    await asyncio.sleep(0.01)
    assert scene.store.calls == []


@pytest.mark.parametrize("reason", ["store-full", "store-readonly", "store-too-large"])
async def test_a_store_that_takes_no_writes_is_read_from(reason: str) -> None:
    scene = Scene()
    await scene.another().save_if_absent("k", {"n": 1}, ttl_s=DAY_S)
    refusal = StoreUnavailableError(reason)

    async def write(items: Sequence[Record | ListEntry]) -> None:
        raise refusal

    scene.store.write = write  # type: ignore[method-assign]
    for _ in range(10):
        assert not await scene.records.append_line("log", {}, ttl_s=DAY_S, max_lines=3)

    assert await scene.records.get_many(["k"]) == [{"n": 1}]
    assert scene.told == [reason] * 10


async def test_what_is_forgotten_is_neither_held_nor_stored() -> None:
    scene = Scene()
    for key in ("{a}1", "{a}2", "{b}1"):
        await scene.records.save_if_absent(key, {"n": 1}, ttl_s=DAY_S)

    assert await scene.records.delete_prefix("{a}") == 2
    assert await scene.records.get_many(["{a}1", "{a}2", "{b}1"]) == [None, None, {"n": 1}]
    scene.store.trouble = StoreUnavailableError("away")
    assert await scene.records.delete_prefix("{b}") is None
    assert await scene.records.get_many(["{b}1"]) == [None]


async def test_of_two_records_that_could_not_be_saved_the_first_is_used() -> None:
    scene = Scene()
    scene.store.trouble = StoreUnavailableError("away")

    used = [await scene.records.save_if_absent("k", {"n": n}, ttl_s=DAY_S) for n in range(3)]

    assert used == [{"n": 0}] * 3


async def test_failures_are_told_once_per_attempt() -> None:
    scene = Scene()
    scene.store.trouble = StoreUnavailableError("away")
    for _ in range(10):
        await scene.records.get_many(["k"])
        await scene.records.append_line("log", {}, ttl_s=DAY_S, max_lines=1)

    assert scene.told == ["away"] * 3


async def test_every_record_that_could_not_be_saved_is_told() -> None:
    scene = Scene()
    scene.store.trouble = StoreUnavailableError("away")
    for n in range(5):
        await scene.records.save_if_absent(f"k{n}", {}, ttl_s=DAY_S)

    assert scene.told == ["away"] * 3 + ["store-resting"] * 2


async def test_a_record_too_large_to_be_kept_is_used_once_and_does_not_open_the_breaker() -> None:
    scene = Scene()
    large = {"text": "x" * (17 * 1024 * 1024)}

    assert await scene.records.save_if_absent("k", large, ttl_s=DAY_S) == large
    assert await scene.records.overwrite("k", large, ttl_s=DAY_S) is False
    assert (scene.store.calls, scene.told) == ([], ["record-unfit", "record-unfit"])
    assert scene.records.is_in_use


async def test_a_client_that_leaves_during_a_call_is_no_failure_of_the_store() -> None:
    scene = Scene()
    scene.store.hangs = True
    finding = asyncio.ensure_future(scene.records.get_many(["k"]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    finding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await finding
    await asyncio.sleep(0)

    assert (scene.records.is_in_use, scene.store.waiting) == (True, 0)


async def test_an_answer_that_came_while_the_event_loop_was_busy_counts() -> None:
    scene = Scene(deadline_s=0.1)

    async def read(keys: Sequence[str]) -> list[bytes | None]:
        await asyncio.to_thread(time.sleep, 0.01)
        return [pack({"n": 1})]

    scene.store.read = read  # type: ignore[method-assign]
    asyncio.get_running_loop().call_later(0.005, time.sleep, 0.3)

    assert await scene.records.get_many(["k"]) == [{"n": 1}]


@pytest.mark.virtual_time
async def test_a_store_that_cannot_be_cancelled_is_left_behind() -> None:
    scene = Scene(deadline_s=0.01)
    end = asyncio.Event()

    async def read(keys: Sequence[str]) -> list[bytes | None]:
        while not end.is_set():
            with suppress(asyncio.CancelledError):
                await end.wait()
        return []

    scene.store.read = read  # type: ignore[method-assign]

    assert await scene.records.get_many(["k"]) == [None]
    end.set()


@pytest.mark.virtual_time
async def test_opening_gives_the_store_the_time_it_needs() -> None:
    scene = Scene(deadline_s=0.01)

    async def slow(keys: Sequence[str]) -> list[bytes | None]:
        await asyncio.sleep(0.05)
        return [pack({})] * len(keys)

    scene.store.read = slow  # type: ignore[method-assign]

    assert await scene.records.open(limit_s=10)
    assert scene.records.is_in_use


@pytest.mark.virtual_time
async def test_opening_a_store_that_hangs_is_reported_and_given_up() -> None:
    scene = Scene()
    scene.store.hangs = True

    assert not await scene.records.open(limit_s=0.01)
    assert (scene.records.is_in_use, scene.told) == (False, ["store-timeout"])


@pytest.mark.virtual_time
async def test_a_store_that_answers_nothing_is_said_not_to_and_left_alone_however_seldom_it_is_asked() -> (
    None
):
    scene = Scene(probe_every_s=0.01)
    scene.store.trouble = StoreUnavailableError("store-unwritable")
    assert scene.records.is_reachable
    assert not await scene.records.open()
    at_once = scene.records.is_reachable
    async with asyncio.timeout(100):
        while scene.records.is_in_use:  # noqa: ASYNC110 - nobody is told
            await asyncio.sleep(0.001)
    scene.store.trouble = None
    await recovered(scene.records)

    assert (at_once, scene.records.is_reachable, scene.told) == (False, True, ["store-unwritable"])
    await scene.records.close()


async def test_a_store_that_lends_no_lease_is_told_of() -> None:
    scene = Scene()
    lease = await scene.records.acquire_lease("k", 10)
    assert lease is not None
    scene.store.trouble = StoreUnavailableError("away")
    with pytest.raises(StoreUnavailableError):
        await scene.records.acquire_lease("k2", 10)
    with pytest.raises(StoreUnavailableError):
        await scene.records.renew_lease(lease, 10)

    assert scene.told == ["away", "away"]


async def test_a_store_that_refuses_to_write_answers() -> None:
    scene = Scene()
    scene.store.trouble = StoreUnavailableError("store-full")
    assert not await scene.records.append_line("log", {}, ttl_s=DAY_S, max_lines=3)
    assert scene.records.is_reachable


async def test_closing_closes_the_store() -> None:
    scene = Scene()
    await scene.records.close()

    assert scene.store.calls == ["close"]
