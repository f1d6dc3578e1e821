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

from compaction_proxy.recall.archive import Originals, Place, Recalled, archive_at
from compaction_proxy.recall.fulltext import Found, FullText, Passage, TextIndex
from compaction_proxy.storage.records import Records

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
_NOTHING = Passage("", "", "")


class Indexed:
    """Messages that can be searched, on one event loop. Their index is made when somebody searches.

    Args:
        found: The messages, in an order in which neighbours belong together; None between conversations.
        full_text: Makes the index.
        threads: Where that is made and searched.
        made: When it was made, in monotonic seconds.
    """

    def __init__(
        self, found: Sequence[Recalled | None], full_text: FullText, threads: Executor, made: float
    ) -> None:
        self.made = made
        self._threads = threads
        self._found = found
        self._by_id = {each.message.id: each for each in found if each is not None}
        characters = sum(len(each.message.text) for each in self._by_id.values())
        self._texts_bytes = characters * _CHARACTER_BYTES + len(self._by_id) * _MESSAGE_BYTES
        self._full_text = full_text
        self._index: TextIndex | None = None
        self._making = asyncio.Lock()
        self._searching: set[asyncio.Task[list[Found]]] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def size_bytes(self) -> int:
        """About what it takes in memory."""
        return self._texts_bytes + (self._index.size_bytes if self._index else 0)

    def message(self, message_id: str) -> Recalled | None:
        """The message with this id; None if there is none."""
        return self._by_id.get(message_id)

    async def search(self, query: str, limit: int) -> list[tuple[Recalled, Found]]:
        """The best hits, the best first."""
        # What stands between conversations may be found for its neighbours' sake.
        most = limit + len(self._found) - len(self._by_id)
        task = asyncio.create_task(self._hits(query, most))
        self._searching.add(task)
        task.add_done_callback(self._done)
        # A thread goes on, whoever stops waiting; what it makes is there for the next one.
        hits = await asyncio.shield(task)
        return [(each, hit) for hit in hits if (each := self._found[hit.place]) is not None][:limit]

    def close(self) -> None:
        """Let go of the index, once nobody searches it."""
        self._closed = True
        self._let_go()

    def _let_go(self) -> None:
        if self._closed and not self._searching and self._index is not None:
            self._index.close()
            self._index = None

    def _done(self, task: asyncio.Task[list[Found]]) -> None:
        self._searching.discard(task)
        self._let_go()
        if not task.cancelled():
            task.exception()  # for those who wait, if anybody does

    async def _hits(self, query: str, most: int) -> list[Found]:
        run = asyncio.get_running_loop().run_in_executor
        async with self._making:
            if self._index is None:
                build, passages = self._full_text.build, self._passages()
                self._index = await run(self._threads, build, passages)
            index = self._index
        return await run(self._threads, index.search, query, most)

    def _passages(self) -> list[Passage]:
        messages = (each.message if each else None for each in self._found)
        return [Passage(each.id, each.text, each.role) if each else _NOTHING for each in messages]


def _in_order(read: Iterable[Recalled]) -> list[Recalled | None]:
    """Each message once, conversation by conversation, in its order; of copies the first."""
    first: dict[str, Recalled] = {}
    for each in read:
        first.setdefault(each.message.id, each)
    ordered = sorted(first.values(), key=lambda each: (each.round.conversation, each.message.index))
    found: list[Recalled | None] = []
    for each in ordered:
        last = found[-1] if found else None
        if last is not None and last.round.conversation != each.round.conversation:
            found.append(None)
        found.append(each)
    return found


Name = tuple[str, tuple[Place, ...]]


class Indexes:
    """Makes and holds what can be searched, on one event loop.

    Args:
        records: Where archives are kept.
        full_text: Makes indexes.
        max_bytes: How much is held.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        records: Records,
        full_text: FullText,
        *,
        max_bytes: int = MAX_HELD_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._records = records
        self._originals = Originals(records)
        self._full_text = full_text
        self._max_bytes = max_bytes
        self._clock = clock
        self._held: OrderedDict[Name, Indexed] = OrderedDict()
        self._reading: dict[Name, asyncio.Task[Indexed]] = {}
        self._places = asyncio.Semaphore(READ_AT_ONCE)
        self._threads = ThreadPoolExecutor(THREADS, "recall")
        records.forgetters.append(self._forget)

    async def of(self, tenant: str, places: Iterable[Place]) -> Indexed:
        """The messages of these archives; where several have the same one, it is that of the first."""
        name = (tenant, tuple(places))
        held = self._held.get(name)
        if held is not None and held.made + MAX_AGE_S > self._clock():
            self._held.move_to_end(name)
            return held
        return await self._read(name)

    def settle(self) -> None:
        """Let go of what is too much, the least recently used first. After a search, which may add to it."""
        sizes = {name: each.size_bytes for name, each in self._held.items()}
        total = sum(sizes.values())
        for name, size in sizes.items():
            if total <= self._max_bytes:
                break
            self._drop(name)
            total -= size

    async def close(self) -> None:
        """Let go of everything."""
        tasks = list(self._reading.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for name in list(self._held):
            self._drop(name)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _read(self, name: Name) -> Indexed:
        task = self._reading.get(name)
        if task is None:
            task = asyncio.create_task(self._load(name))
            self._reading[name] = task
            task.add_done_callback(partial(self._done, name))
        # Whoever stops waiting does not stop the others.
        return await asyncio.shield(task)

    def _done(self, name: Name, task: asyncio.Task[Indexed]) -> None:
        if self._reading.get(name) is task:
            del self._reading[name]

    async def _load(self, name: Name) -> Indexed:
        tenant, places = name
        async with self._places:
            unanswered = self._records.unanswered
            read = await self._originals.of(tenant, places)
            whole = self._records.unanswered == unanswered
            if asyncio.current_task() is not self._reading.get(name):  # forgotten meanwhile
                read = []
            found = await asyncio.to_thread(_in_order, read)
        made = Indexed(found, self._full_text, self._threads, self._clock())
        if len(made) and whole and asyncio.current_task() is self._reading.get(name):
            self._drop(name)
            self._held[name] = made
        return made

    def _drop(self, name: Name) -> None:
        held = self._held.pop(name, None)
        if held is not None:
            held.close()

    def _forget(self, prefix: str) -> None:
        for name in [name for name in (*self._held, *self._reading) if _begins(name, prefix)]:
            self._drop(name)
            self._reading.pop(name, None)


def _begins(name: Name, prefix: str) -> bool:
    """Whether anything of it is forgotten with everything that begins so."""
    tenant, places = name
    return any(archive_at(tenant, place).startswith(prefix) for place in places)
