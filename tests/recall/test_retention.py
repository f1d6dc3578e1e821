"""What is archived stays within bounds: the oldest goes first, and nothing that something newer needs."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from compaction_proxy.core.message import Message
from compaction_proxy.recall.archive import Archive, ArchivedRound, ArchiveRef, OriginalMessage, build_archive
from compaction_proxy.recall.fulltext import SqliteTextIndexBuilder
from compaction_proxy.recall.retention import TENANT_CHECK_INTERVAL_S, ArchiveBounds, ArchiveRetention
from compaction_proxy.recall.search import ArchiveSearch
from compaction_proxy.storage import envelope
from compaction_proxy.storage.keys import tenant_archives_key
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.records import RecordStore
from compaction_proxy.storage.store import ListEntry, Record, Store
from compaction_proxy.telemetry.event_history import EventHistory

DAY_S = 86_400.0
NOW = 1_000.0
ROOTS = [bytes([number]) * 32 for number in (1, 2)]
FILE = "f" * 10_000


def ignored(_: object) -> None:
    """Nothing fails here."""


class Shelf:
    """A tenant's archives within bounds, over a store.

    Attributes:
        time: Seconds, on every clock there is.
    """

    def __init__(self, store: Store, conversation: int = 0, tenant: int = 0) -> None:
        self.time = NOW
        self.records = RecordStore(store, ignored, deadline_s=10.0)
        self.history = EventHistory(self.records, DAY_S)
        self.holdings = ArchiveRetention(
            self.records,
            DAY_S,
            ArchiveBounds(conversation, tenant),
            clock=lambda: self.time,
            now=lambda: self.time,
        )
        self.recall = ArchiveSearch(self.records, self.history, self.holdings, SqliteTextIndexBuilder())

    async def put(self, number: int, *texts: str, root: bytes = ROOTS[0]) -> Archive:
        """The archive of a round; the ids of its messages go on from `10 * number`."""
        conversation = f"c_{root[0]}"
        made = ArchivedRound(conversation, "chained", number.to_bytes(64, "big"), number, NOW + number)
        ids = range(10 * number, 10 * number + len(texts))
        messages = [
            OriginalMessage(k, f"m_{k}", 1, Message("tool", text)) for k, text in zip(ids, texts, strict=True)
        ]
        archive = build_archive("t_1", root, made, messages, DAY_S)
        await self.history.record_root("t_1", conversation, root)
        key = archive.items[0].key
        await self.records.save_if_absent(
            f"{key}:x", {}, ttl_s=DAY_S, other_items=[*archive.items, archive.list_line]
        )
        await self.holdings.add_archive("t_1", ArchiveRef(root, made), archive)
        await self.records.background_tasks.close()
        await self.holdings.enforce_bounds("t_1", root)
        return archive

    async def kept(self, root: bytes = ROOTS[0]) -> list[tuple[str, int]]:
        """Which messages are there, and how many characters of each."""
        found = await self.recall.list_removed_messages("t_1", f"c_{root[0]}")
        return [(each.message.id, len(each.message.text)) for each in found]

    async def listed(self) -> list[tuple[int, int]]:
        """The rounds in the tenant's list, and what each has added, in bytes."""
        return [(each.ref.round.number, each.size_bytes) for each in await self.holdings.list_archives("t_1")]


async def test_the_oldest_archives_of_a_conversation_go_first_and_the_newest_stays(store: Store) -> None:
    shelf = Shelf(store, conversation=250)
    for number in range(1, 5):
        await shelf.put(number, "x" * 100)
    assert await shelf.kept() == [("m_30", 100), ("m_40", 100)]
    assert await shelf.listed() == [(3, 100), (4, 100)]
    await shelf.put(5, "x" * 300)
    assert await shelf.kept() == [("m_50", 300)]


async def test_what_two_rounds_have_counts_once_and_stays_while_one_of_them_does(store: Store) -> None:
    shelf = Shelf(store, conversation=len(FILE) + 150)
    await shelf.put(1, FILE, "a" * 100)
    await shelf.put(2, FILE)
    assert await shelf.kept() == [("m_10", len(FILE)), ("m_11", 100), ("m_20", len(FILE))]
    assert await shelf.listed() == [(1, len(FILE) + 100), (2, 0)]
    await shelf.put(3, "b" * 100)
    assert await shelf.kept() == [("m_20", len(FILE)), ("m_30", 100)]


async def test_of_a_tenant_the_oldest_go_whatever_conversation_they_are_of() -> None:
    shelf = Shelf(MemoryStore(), tenant=250)
    for number in range(1, 5):
        await shelf.put(number, "x" * 100, root=ROOTS[number % 2])
        shelf.time += TENANT_CHECK_INTERVAL_S
    assert [await shelf.kept(root) for root in ROOTS] == [[("m_40", 100)], [("m_30", 100)]]


async def test_all_that_a_tenant_has_is_looked_at_once_in_a_while() -> None:
    shelf = Shelf(MemoryStore(), tenant=150)
    for number in range(1, 4):
        await shelf.put(number, "x" * 100)
    assert len(await shelf.kept()) == 3
    shelf.time += TENANT_CHECK_INTERVAL_S
    await shelf.put(4, "x" * 100)
    assert await shelf.kept() == [("m_40", 100)]


async def test_after_a_cancelled_look_the_next_one_need_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Shelf(MemoryStore(), conversation=100)
    with monkeypatch.context() as patch:
        patch.setattr(shelf.holdings, "_enforce_tenant_bound", _cancel)
        with pytest.raises(asyncio.CancelledError):
            await shelf.put(1, "x" * 100)
    await shelf.put(2, "y" * 100)
    assert await shelf.kept() == [("m_20", 100)]


async def _cancel(_: str) -> None:
    raise asyncio.CancelledError


async def test_without_bounds_everything_stays() -> None:
    shelf = Shelf(MemoryStore())
    for number in range(1, 4):
        await shelf.put(number, FILE + str(number))
    assert len(await shelf.kept()) == 3


async def test_what_is_gone_expired_or_cannot_be_read_is_not_in_the_list_of_a_tenant() -> None:
    store = MemoryStore()
    shelf = Shelf(store)
    for number, root in ((1, ROOTS[0]), (2, ROOTS[1]), (3, ROOTS[1])):
        await shelf.put(number, "x" * 10, root=root)
    await shelf.holdings.record_deleted_roots("t_1", [ROOTS[0]])
    assert await shelf.listed() == [(2, 10), (3, 10)]
    shelf.time = NOW + DAY_S + 2.5
    assert await shelf.listed() == [(3, 10)]


@pytest.mark.parametrize("root", ["zz", 5, None])
async def test_a_line_that_names_no_root_is_passed_over(root: object) -> None:
    shelf = Shelf(MemoryStore())
    archive = await shelf.put(1, "x")
    line = {**archive.list_line.fields, "root": root}
    assert await shelf.records.append_line(tenant_archives_key("t_1"), line, ttl_s=DAY_S, max_lines=10)
    assert await shelf.listed() == [(1, 1)]


class Meanwhile(MemoryStore):
    """A store before which somebody else is quicker, once: right before records are emptied."""

    somebody: Callable[[], Awaitable[object]] | None = None

    async def write(self, items: Sequence[Record | ListEntry]) -> None:
        somebody = self.somebody
        if somebody is not None and not any(envelope.unpack(each.value) for each in items):
            self.somebody = None
            await somebody()
        await super().write(items)


async def test_a_piece_that_another_process_commits_again_while_it_is_let_go_of_stays() -> None:
    store = Meanwhile()
    shelf, other = Shelf(store, conversation=len(FILE) + 50), Shelf(store)
    await shelf.put(1, FILE, "a" * 100)
    store.somebody = lambda: other.put(3, FILE)
    await shelf.put(2, "x" * 100)
    assert store.somebody is None
    assert await other.kept() == [("m_20", 100), ("m_30", len(FILE))]
