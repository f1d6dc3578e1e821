"""Reads archives, indexes their messages in threads, and caches the most recently used indexes.

The cache key of an index consists of the tenant and the archives in the index. An archive never changes, and
each search reads the current list of archives. A cached index with the same key is therefore complete.

The module builds indexes in threads of its own. In the threads that asyncio shares, the building would delay
work for which requests wait, such as the decoding of stored records.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from compaction_proxy.recall.archive import ArchiveReader, ArchiveRef, RecalledMessage, build_archive_key
from compaction_proxy.recall.fulltext import TextIndex, TextIndexBuilder, TextMatch
from compaction_proxy.storage.records import RecordStore
from compaction_proxy.support.offload import FairQueue

# Maximum bytes of all cached indexes together, including their texts. If they have more bytes, the cache
# drops the least recently used indexes.
MAX_CACHE_BYTES = 64 * 1024 * 1024
# Estimated memory for each character of a message, and additional memory for each message, in bytes. Python
# needs one byte for a character in most texts, and up to four in some.
_CHARACTER_BYTES = 2
_MESSAGE_BYTES = 400
# Maximum age of a cached index, in seconds. The cache builds an older index again, because some of its
# archives may have expired in the store.
MAX_AGE_S = 3_600.0
# Number of threads that build and search indexes. More threads would slow down the event loop, because each
# thread can hold Python's global lock for 5 ms at a time.
THREADS = 2
# Maximum number of indexes whose archives the cache reads at the same time. Further loads wait, to limit the
# use of memory and threads: the archives of one index may have 16 MB of text, which a thread decompresses.
MAX_CONCURRENT_LOADS = 2

_Result = TypeVar("_Result")


class MessageIndex:
    """Messages and their search index. The first search builds the index. Use the object on one event loop.

    Args:
        messages: The messages of each conversation in their order, with None between two conversations.
        index_builder: Builds the index.
        threads: The threads that build and search the index.
        turns: Lets the owners of searches take turns in these threads.
        created_at: Time of creation, in monotonic seconds.
    """

    def __init__(
        self,
        messages: Sequence[RecalledMessage | None],
        index_builder: TextIndexBuilder,
        threads: Executor,
        turns: FairQueue,
        created_at: float,
    ) -> None:
        self.created_at = created_at
        self._threads = threads
        self._turns = turns
        self._messages = messages
        self._by_id = {each.message.id: each for each in messages if each is not None}
        characters = sum(len(each.message.text) for each in self._by_id.values())
        self._texts_bytes = characters * _CHARACTER_BYTES + len(self._by_id) * _MESSAGE_BYTES
        self._index_builder = index_builder
        self._index: TextIndex | None = None
        self._build_lock = asyncio.Lock()
        self._search_tasks: set[asyncio.Task[list[TextMatch]]] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def size_bytes(self) -> int:
        """Approximate memory use of the messages and the index, in bytes."""
        return self._texts_bytes + (self._index.size_bytes if self._index else 0)

    def find_message(self, message_id: str) -> RecalledMessage | None:
        """Returns the message with this id, or None if there is none."""
        return self._by_id.get(message_id)

    async def search(self, query: str, limit: int) -> list[tuple[RecalledMessage, TextMatch]]:
        """Returns at most `limit` matching messages, best first."""
        # The index has an empty text between two conversations. A search may find it, because its neighbours
        # match. This method therefore asks for more matches, by the number of empty texts, and leaves the
        # empty texts out of its result.
        padded_limit = limit + len(self._messages) - len(self._by_id)
        task = asyncio.create_task(self._search_in_thread(query, padded_limit))
        self._search_tasks.add(task)
        task.add_done_callback(self._on_search_done)
        # If the caller is cancelled, the task continues. The next search then uses the index that the task
        # has built.
        hits = await asyncio.shield(task)
        return [(each, hit) for hit in hits if (each := self._messages[hit.document_index]) is not None][
            :limit
        ]

    def close(self) -> None:
        """Frees the memory of the index as soon as no search uses it."""
        self._closed = True
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._closed and not self._search_tasks and self._index is not None:
            self._index.close()
            self._index = None

    def _on_search_done(self, task: asyncio.Task[list[TextMatch]]) -> None:
        self._search_tasks.discard(task)
        self._close_if_idle()
        if not task.cancelled():
            task.exception()  # avoids a warning of asyncio; a caller that still waits gets the exception

    async def _search_in_thread(self, query: str, limit: int) -> list[TextMatch]:
        async with self._build_lock:
            if self._index is None:
                # A match in a text counts in part for the neighbouring texts. An empty text between two
                # conversations reduces the effect of the messages of one on those of the other.
                texts = [each.message.text if each else "" for each in self._messages]
                self._index = await self._run_in_thread(partial(self._index_builder.build, texts))
            index = self._index
        return await self._run_in_thread(partial(index.search, query, limit))

    async def _run_in_thread(self, work: Callable[[], _Result]) -> _Result:
        return await self._turns.run(self._threads, work)


def _order_messages(messages: Iterable[RecalledMessage]) -> list[RecalledMessage | None]:
    """Sorts messages by conversation and then by index, and puts None between two conversations.

    If a message occurs several times, because several archives contain it, keeps only the first copy.
    """
    first: dict[str, RecalledMessage] = {}
    for each in messages:
        first.setdefault(each.message.id, each)
    ordered = sorted(first.values(), key=lambda each: (each.round.conversation, each.message.index))
    found: list[RecalledMessage | None] = []
    for each in ordered:
        last = found[-1] if found else None
        if last is not None and last.round.conversation != each.round.conversation:
            found.append(None)
        found.append(each)
    return found


IndexKey = tuple[str, tuple[ArchiveRef, ...]]


class SearchIndexCache:
    """Builds and caches message indexes. Use the object on one event loop.

    Args:
        records: The store of the archives.
        index_builder: Builds the search indexes.
        max_bytes: Maximum bytes of all cached indexes together.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        records: RecordStore,
        index_builder: TextIndexBuilder,
        *,
        max_bytes: int = MAX_CACHE_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._records = records
        self._archive_reader = ArchiveReader(records)
        self._index_builder = index_builder
        self._max_bytes = max_bytes
        self._clock = clock
        self._indexes: OrderedDict[IndexKey, MessageIndex] = OrderedDict()
        self._load_tasks: dict[IndexKey, asyncio.Task[MessageIndex]] = {}
        self._load_slots = asyncio.Semaphore(MAX_CONCURRENT_LOADS)
        self._load_turns = FairQueue(MAX_CONCURRENT_LOADS)
        self._threads, self._turns = ThreadPoolExecutor(THREADS, "recall"), FairQueue(THREADS)
        records.on_delete_callbacks.append(self._forget_prefix)

    async def get_or_load(self, tenant: str, refs: Iterable[ArchiveRef]) -> MessageIndex:
        """Returns an index of the messages in the archives `refs`.

        Uses the cached index of these archives. If there is none, or if it is too old (`MAX_AGE_S`), reads
        the archives and creates a new index.

        If several archives contain the same message, the index contains only the copy of the first archive.
        """
        key = (tenant, tuple(refs))
        index = self._indexes.get(key)
        if index is not None and index.created_at + MAX_AGE_S > self._clock():
            self._indexes.move_to_end(key)
            return index
        return await self._load_once(key)

    def evict_excess(self) -> None:
        """Drops the least recently used indexes until the others have at most `max_bytes` bytes together.

        Call it after each search, because a search may build an index.
        """
        sizes = {name: each.size_bytes for name, each in self._indexes.items()}
        total = sum(sizes.values())
        for name, size in sizes.items():
            if total <= self._max_bytes:
                break
            self._evict_index(name)
            total -= size

    async def close(self) -> None:
        """Cancels all tasks that load an index, frees all indexes and stops the threads."""
        tasks = list(self._load_tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for name in list(self._indexes):
            self._evict_index(name)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _load_once(self, name: IndexKey) -> MessageIndex:
        task = self._load_tasks.get(name)
        if task is None:
            task = asyncio.create_task(self._load_index(name))
            self._load_tasks[name] = task
            task.add_done_callback(partial(self._on_load_done, name))
        # If one caller is cancelled, the task continues for the other callers that wait for it.
        return await asyncio.shield(task)

    def _on_load_done(self, name: IndexKey, task: asyncio.Task[MessageIndex]) -> None:
        if self._load_tasks.get(name) is task:
            del self._load_tasks[name]

    async def _load_index(self, name: IndexKey) -> MessageIndex:
        tenant, places = name
        async with self._load_turns.wait_for_turn(), self._load_slots:
            failed_reads = self._records.failed_reads
            messages = await self._archive_reader.read_messages(tenant, places)
            is_complete = self._records.failed_reads == failed_reads
            if asyncio.current_task() is not self._load_tasks.get(
                name
            ):  # the archives were deleted meanwhile
                messages = []
            ordered = await asyncio.to_thread(_order_messages, messages)
        index = MessageIndex(ordered, self._index_builder, self._threads, self._turns, self._clock())
        if len(index) and is_complete and asyncio.current_task() is self._load_tasks.get(name):
            self._evict_index(name)
            self._indexes[name] = index
        return index

    def _evict_index(self, name: IndexKey) -> None:
        index = self._indexes.pop(name, None)
        if index is not None:
            index.close()

    def _forget_prefix(self, prefix: str) -> None:
        for name in [
            name for name in (*self._indexes, *self._load_tasks) if _has_archive_under_prefix(name, prefix)
        ]:
            self._evict_index(name)
            self._load_tasks.pop(name, None)


def _has_archive_under_prefix(name: IndexKey, prefix: str) -> bool:
    """Returns whether the store key of an archive in the index key `name` begins with `prefix`."""
    tenant, places = name
    return any(build_archive_key(tenant, place).startswith(prefix) for place in places)
