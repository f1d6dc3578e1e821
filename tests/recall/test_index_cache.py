"""However many search, and leave, an index is made once, and others find free threads."""

import asyncio
import threading
from collections.abc import Sequence

from compaction_proxy.core.message import Message
from compaction_proxy.recall.archive import (
    ARCHIVES_AT_ONCE,
    ArchivedRound,
    ArchiveRef,
    OriginalMessage,
    build_archive,
)
from compaction_proxy.recall.fulltext import TextMatch
from compaction_proxy.recall.index_cache import MAX_CONCURRENT_LOADS, SearchIndexCache
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.records import RecordStore

DAY_S = 86_400.0
LIMIT_S = 60.0
# More than there are threads in the pool that everybody shares.
MANY = 40


def ignored(_: object) -> None:
    """Nothing fails here."""


class Slow:
    """Full text that takes until it is let go on, both to make an index and to search one.

    Attributes:
        begun: Set once an index is being made.
        searched: Set once one is being searched.
        go: What it waits for.
        built: How many indexes were made.
        closed: How many of them were closed.
        ended: Set once one was closed.
        busy: Whether one was closed while it was searched.
    """

    size_bytes = 1

    def __init__(self) -> None:
        self.begun, self.searched, self.go = threading.Event(), threading.Event(), threading.Event()
        self.ended = threading.Event()
        self.built = self.closed = 0
        self.busy = False
        self._lock = threading.Lock()

    def build(self, _texts: Sequence[str]) -> "Slow":
        self.begun.set()
        assert self.go.wait(LIMIT_S)
        self.built += 1
        return self

    def search(self, _query: str, _limit: int) -> list[TextMatch]:
        with self._lock:
            self.searched.set()
            assert self.go.wait(LIMIT_S)
            return [TextMatch(0, 1.0, 0)]

    def close(self) -> None:
        self.busy = self._lock.locked()
        self.closed += 1
        self.ended.set()


async def archive(records: RecordStore, number: int) -> ArchiveRef:
    """Where an archive of one message is."""
    made = ArchivedRound("c_1", "chained", number.to_bytes(64, "big"), number, float(number))
    root = number.to_bytes(32, "big")
    written = build_archive(
        "t_1", root, made, [OriginalMessage(0, f"m_{number}", 1, Message("user", "word"))], DAY_S
    )
    assert await records.write([*written.items, written.list_line])
    return ArchiveRef(root, made)


async def test_an_index_is_made_once_though_whoever_asked_first_has_left() -> None:
    records, slow = RecordStore(MemoryStore(), ignored), Slow()
    indexes = SearchIndexCache(records, slow)
    indexed = await indexes.get_or_load("t_1", [await archive(records, 1)])
    first = asyncio.create_task(indexed.search("word", 1))
    assert await asyncio.to_thread(slow.begun.wait, LIMIT_S)
    first.cancel()
    await asyncio.wait([first])
    second = asyncio.create_task(indexed.search("word", 1))
    await asyncio.sleep(0)
    slow.go.set()
    assert [(found.message.id, hit.score) for found, hit in await second] == [("m_1", 1.0)]
    assert (first.cancelled(), slow.built) == (True, 1)
    await indexes.close()
    assert await asyncio.to_thread(slow.ended.wait, LIMIT_S)  # the search of the first one ends some time
    assert slow.closed == 1


async def test_an_index_is_closed_only_when_its_search_has_ended_though_nobody_waits_for_it() -> None:
    records, slow = RecordStore(MemoryStore(), ignored), Slow()
    indexes = SearchIndexCache(records, slow)
    indexed = await indexes.get_or_load("t_1", [await archive(records, 1)])
    slow.go.set()
    await indexed.search("word", 1)
    slow.go.clear()
    slow.searched.clear()
    leaving = asyncio.create_task(indexed.search("word", 1))
    assert await asyncio.to_thread(slow.searched.wait, LIMIT_S)
    leaving.cancel()
    await asyncio.wait([leaving])
    await records.delete_prefix("")
    assert slow.closed == 0
    slow.go.set()
    assert await asyncio.to_thread(slow.ended.wait, LIMIT_S)
    assert not slow.busy
    await indexes.close()


async def test_however_many_search_at_once_others_find_a_free_thread() -> None:
    records, slow = RecordStore(MemoryStore(), ignored), Slow()
    indexes = SearchIndexCache(records, slow)
    indexed = [await indexes.get_or_load("t_1", [await archive(records, number)]) for number in range(MANY)]
    searches = [asyncio.create_task(each.search("word", 1)) for each in indexed]
    await asyncio.sleep(0.01)
    async with asyncio.timeout(LIMIT_S / 2):
        assert await asyncio.to_thread(lambda: slow.built) == 0
    slow.go.set()
    assert [len(found) for found in await asyncio.gather(*searches)] == [1] * MANY
    await indexes.close()


class Crowded(MemoryStore):
    """A store that knows how many have read it at once."""

    readers = most = 0

    async def read(self, keys: Sequence[str]) -> list[bytes | None]:
        self.readers += 1
        self.most = max(self.most, self.readers)
        await asyncio.sleep(0.001)
        self.readers -= 1
        return await super().read(keys)


async def test_the_archives_of_two_at_once_are_read_and_no_more() -> None:
    store = Crowded()
    records = RecordStore(store, ignored)
    indexes = SearchIndexCache(records, Slow())
    places = [await archive(records, number) for number in range(6)]
    read = await asyncio.gather(*(indexes.get_or_load("t_1", [place]) for place in places))
    assert ([len(each) for each in read], store.most) == ([1] * 6, MAX_CONCURRENT_LOADS)
    await indexes.close()


class Faltering(MemoryStore):
    """A store that fails at one read, and answers those before and after."""

    fails_at = reads = 0

    async def read(self, keys: Sequence[str]) -> list[bytes | None]:
        self.reads += 1
        if self.reads == self.fails_at:
            raise OSError("once")
        return await super().read(keys)


async def test_what_was_read_in_part_is_not_held() -> None:
    store = Faltering()
    records = RecordStore(store, ignored)
    indexes = SearchIndexCache(records, Slow())
    places = [await archive(records, number) for number in range(ARCHIVES_AT_ONCE + 1)]
    store.fails_at = 2  # the record of the last archive, after those of the others
    assert len(await indexes.get_or_load("t_1", places)) == ARCHIVES_AT_ONCE
    assert len(await indexes.get_or_load("t_1", places)) == ARCHIVES_AT_ONCE + 1
    await indexes.close()
