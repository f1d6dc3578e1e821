"""The calls of a store are timed; what they return and raise stays what it is."""

import pytest

from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.store import Record, Store
from compaction_proxy.storage.timed import measure_store_calls


class Clock:
    s = 100.0

    def __call__(self) -> float:
        return self.s


class SlowStore(MemoryStore):
    """A store in memory. Each read of a list takes two seconds of a clock and fails."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.passing = clock

    async def read_tail(self, key: str, limit: int) -> list[bytes]:
        self.passing.s += 2
        raise OSError("gone")


def make_timed() -> tuple[Store, list[tuple[str, float]]]:
    clock, durations = Clock(), list[tuple[str, float]]()
    return measure_store_calls(SlowStore(clock), lambda *each: durations.append(each), clock), durations


async def test_a_call_that_fails_is_timed_and_its_error_reaches_the_caller() -> None:
    store, durations = make_timed()
    assert await store.read(["a"]) == [None]
    with pytest.raises(OSError, match="gone"):
        await store.read_tail("a", 1)
    assert durations == [("read", 0.0), ("tail", 2.0)]


async def test_each_call_is_reported_under_the_name_of_its_operation() -> None:
    store, durations = make_timed()
    await store.write([Record("k", b"v", 10)])
    lease = await store.acquire_lease("l", 10)
    assert lease is not None
    assert await store.renew_lease(lease, ttl_s=10)
    assert await store.commit(Record("c", b"v", 10), lease=lease) == b"v"
    await store.release_lease(lease)
    await store.publish("t", b"m")
    await store.delete_prefix("k")
    assert await store.read(["k", "c"]) == [None, b"v"]
    assert [name for name, _ in durations] == [
        "write", "acquire", "renew", "commit", "release", "publish", "delete", "read",
    ]  # fmt: skip


async def test_closing_a_store_is_passed_on_and_not_timed() -> None:
    store, durations = make_timed()
    await store.close()
    assert durations == []
