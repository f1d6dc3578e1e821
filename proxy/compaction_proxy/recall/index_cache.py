"""Archives made searchable: read, put in order, indexed in a thread, and held while they are asked for.

What is held is named by the very archives that it is made of. An archive never changes, so whoever knows
which there are, from a list that is read each time, knows whether what is held is still all there is.

The threads are of their own: what a request waits for, the store's among it, runs in those that all share.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial

from compaction_proxy.recall.archive import ArchiveReader, ArchiveRef, RecalledMessage, build_archive_key
from compaction_proxy.recall.fulltext import SearchDocument, TextIndex, TextIndexBuilder, TextMatch
from compaction_proxy.storage.records import RecordStore

# What all that is held takes at most, in bytes: texts and indexes.
MAX_HELD_BYTES = 64 * 1024 * 1024
# What a message takes, a character of it and the rest; most texts take one byte a character, some up to four.
_CHARACTER_BYTES = 2
_MESSAGE_BYTES = 400
# The store forgets what has expired; here it is forgotten after so long, in seconds.
MAX_AGE_S = 3_600.0
# More would only take turns with the event loop more often: each has it wait for up to 5 ms at a time.
THREADS = 2
# Conversations, or tenants, whose archives are read at once: each may be 16 MB of text, unpacked in a thread.
READ_AT_ONCE = 2
# Between conversations, so that the last message of one is no neighbour of the first one of the next.
_NOTHING = SearchDocument("", "", "")


class MessageIndex:
    """Messages that can be searched, on one event loop. Their index is made when somebody searches.

    Args:
        messages: The messages, in an order in which neighbours belong together; None between conversations.
        index_builder: Makes the index.
        threads: Where that is made and searched.
        created_at: When it was made, in monotonic seconds.
    """

    def __init__(
        self,
        messages: Sequence[RecalledMessage | None],
        index_builder: TextIndexBuilder,
        threads: Executor,
        created_at: float,
    ) -> None:
        self.created_at = created_at
        self._threads = threads
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
        """About what it takes in memory."""
        return self._texts_bytes + (self._index.size_bytes if self._index else 0)

    def find_message(self, message_id: str) -> RecalledMessage | None:
        """The message with this id; None if there is none."""
        return self._by_id.get(message_id)

    async def search(self, query: str, limit: int) -> list[tuple[RecalledMessage, TextMatch]]:
        """The best hits, the best first."""
        # What stands between conversations may be found for its neighbours' sake.
        most = limit + len(self._messages) - len(self._by_id)
        task = asyncio.create_task(self._search_in_thread(query, most))
        self._search_tasks.add(task)
        task.add_done_callback(self._on_search_done)
        # A thread goes on, whoever stops waiting; what it makes is there for the next one.
        hits = await asyncio.shield(task)
        return [(each, hit) for hit in hits if (each := self._messages[hit.document_index]) is not None][
            :limit
        ]

    def close(self) -> None:
        """Let go of the index, once nobody searches it."""
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
            task.exception()  # for those who wait, if anybody does

    async def _search_in_thread(self, query: str, most: int) -> list[TextMatch]:
        run = asyncio.get_running_loop().run_in_executor
        async with self._build_lock:
            if self._index is None:
                build, passages = self._index_builder.build, self._build_documents()
                self._index = await run(self._threads, build, passages)
            index = self._index
        return await run(self._threads, index.search, query, most)

    def _build_documents(self) -> list[SearchDocument]:
        messages = (each.message if each else None for each in self._messages)
        return [SearchDocument(each.id, each.text, each.role) if each else _NOTHING for each in messages]


def _order_messages(read: Iterable[RecalledMessage]) -> list[RecalledMessage | None]:
    """Each message once, conversation by conversation, in its order; of copies the first."""
    first: dict[str, RecalledMessage] = {}
    for each in read:
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
    """Makes and holds what can be searched, on one event loop.

    Args:
        records: Where archives are kept.
        index_builder: Makes indexes.
        max_bytes: How much is held.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        records: RecordStore,
        index_builder: TextIndexBuilder,
        *,
        max_bytes: int = MAX_HELD_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._records = records
        self._archive_reader = ArchiveReader(records)
        self._index_builder = index_builder
        self._max_bytes = max_bytes
        self._clock = clock
        self._indexes: OrderedDict[IndexKey, MessageIndex] = OrderedDict()
        self._load_tasks: dict[IndexKey, asyncio.Task[MessageIndex]] = {}
        self._load_slots = asyncio.Semaphore(READ_AT_ONCE)
        self._threads = ThreadPoolExecutor(THREADS, "recall")
        records.on_delete_callbacks.append(self._forget_prefix)

    async def get_or_load(self, tenant: str, places: Iterable[ArchiveRef]) -> MessageIndex:
        """The messages of these archives; where several have the same one, it is that of the first."""
        name = (tenant, tuple(places))
        held = self._indexes.get(name)
        if held is not None and held.created_at + MAX_AGE_S > self._clock():
            self._indexes.move_to_end(name)
            return held
        return await self._load_once(name)

    def evict_excess(self) -> None:
        """Let go of what is too much, the least recently used first. After a search, which may add to it."""
        sizes = {name: each.size_bytes for name, each in self._indexes.items()}
        total = sum(sizes.values())
        for name, size in sizes.items():
            if total <= self._max_bytes:
                break
            self._evict_index(name)
            total -= size

    async def close(self) -> None:
        """Let go of everything."""
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
        # Whoever stops waiting does not stop the others.
        return await asyncio.shield(task)

    def _on_load_done(self, name: IndexKey, task: asyncio.Task[MessageIndex]) -> None:
        if self._load_tasks.get(name) is task:
            del self._load_tasks[name]

    async def _load_index(self, name: IndexKey) -> MessageIndex:
        tenant, places = name
        async with self._load_slots:
            unanswered = self._records.failed_reads
            read = await self._archive_reader.read_messages(tenant, places)
            whole = self._records.failed_reads == unanswered
            if asyncio.current_task() is not self._load_tasks.get(name):  # forgotten meanwhile
                read = []
            found = await asyncio.to_thread(_order_messages, read)
        made = MessageIndex(found, self._index_builder, self._threads, self._clock())
        if len(made) and whole and asyncio.current_task() is self._load_tasks.get(name):
            self._evict_index(name)
            self._indexes[name] = made
        return made

    def _evict_index(self, name: IndexKey) -> None:
        held = self._indexes.pop(name, None)
        if held is not None:
            held.close()

    def _forget_prefix(self, prefix: str) -> None:
        for name in [name for name in (*self._indexes, *self._load_tasks) if _has_key_prefix(name, prefix)]:
            self._evict_index(name)
            self._load_tasks.pop(name, None)


def _has_key_prefix(name: IndexKey, prefix: str) -> bool:
    """Whether anything of it is forgotten with everything that begins so."""
    tenant, places = name
    return any(build_archive_key(tenant, place).startswith(prefix) for place in places)
