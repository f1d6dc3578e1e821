import pytest

from compaction_proxy.core.errors import StoreUnavailableError
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.store import ListEntry, Record


async def test_a_full_store_lets_the_oldest_leave() -> None:
    store = MemoryStore(max_bytes=1000)
    for n in range(10):
        await store.write([Record(f"k{n}", bytes(198), 60)])
    await store.write([Record("k6", bytes(198), 60), ListEntry("ll", bytes(198), 60, 5)])

    found = await store.read([f"k{n}" for n in range(10)])
    assert [n for n, value in enumerate(found) if value] == [6, 7, 8, 9]
    assert await store.read_tail("ll", 5) == [bytes(198)]


async def test_more_than_the_store_may_hold_is_refused_as_a_whole() -> None:
    store = MemoryStore(max_bytes=1000)
    await store.write([Record("k", b"v", 60)])

    with pytest.raises(StoreUnavailableError):
        await store.commit(
            Record("k2", b"v", 60), [ListEntry("log", b"l", 60, 5), Record("large", bytes(1000), 60)]
        )

    assert await store.read(["k", "k2", "large"]) == [b"v", None, None]
    assert await store.read_tail("log", 5) == []


async def test_what_has_expired_leaves_before_what_lives() -> None:
    moment = [0.0]
    store = MemoryStore(max_bytes=1000, clock=lambda: moment[0])
    await store.write([Record("old", bytes(500), 3600)])
    await store.write([Record("short", bytes(400), 10)])
    moment[0] = 100
    await store.write([Record("new", bytes(400), 3600)])

    assert await store.read(["old", "short", "new"]) == [bytes(500), None, bytes(400)]
