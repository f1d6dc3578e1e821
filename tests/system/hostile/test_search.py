"""Searching what was removed is no way to anything else: not to others, not to files, not for ever."""

import random
import time

import pytest

from compaction_proxy.core.message import Message
from compaction_proxy.recall.archive import ArchivedRound, ArchiveRef, OriginalMessage, build_archive
from compaction_proxy.recall.fulltext import SqliteTextIndexBuilder
from compaction_proxy.recall.retention import ArchiveBounds, ArchiveRetention
from compaction_proxy.recall.search import MAX_HITS, SNIPPET_CHARACTERS, ArchiveSearch
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.records import RecordStore
from compaction_proxy.storage.store import Store
from compaction_proxy.telemetry.event_history import EventHistory

DAY_S = 86_400.0
PATIENCE_S = 5.0
ROOT = bytes(32)
CONVERSATION = "c_1"
# What means something to a search engine, a regex, SQL, a shell, a template, a terminal, or to nobody.
PIECES = [
    "canary", "CANARY", "can*", "*", "^", '"', '""', "'", "''", "(", ")", "{", "}", "[", "]", ":", "-", "+",
    "AND", "OR", "NOT", "NEAR(a b, 5)", "NEAR/3", "terms:", "rowid:1", "rows MATCH", "' OR 1=1 --", ";", "%",
    ".*", "(a+)+$", "[^x]", "(?s).+", "\\d{9}", "|", "\\", "_", "$(id)", "`id`", "../../etc/passwd",
    "\x00", "\x1b[2J", "\n", "\t", "\u200b", "\u202e", "\ud83d", "\U0001f600", "größe", "GRÖẞE", "e\u0301",
    "漢字", "かな", "한국어", "\ufb00", "\u0130", "\u017f", "m_b0", "a" * 300, "1" * 40, "-" * 50, "x" * 900,
]  # fmt: skip


def ignored(_: object) -> None:
    """Nothing fails here."""


async def recall(texts: dict[str, list[str]], store: Store | None = None) -> ArchiveSearch:
    """Over what a round has taken out of each tenant's conversation; all have one id and begin alike."""
    records = RecordStore(store or MemoryStore(), ignored)
    history, holdings = (
        EventHistory(records, DAY_S),
        ArchiveRetention(records, DAY_S, ArchiveBounds(), now=lambda: 2.0),
    )
    for tenant, taken in texts.items():
        await history.record_root(tenant, CONVERSATION, ROOT)
        made = ArchivedRound(CONVERSATION, "chained", bytes(64), 1, 1.0)
        messages = [
            OriginalMessage(k, f"m_{tenant}{k}", 1, Message("tool", text)) for k, text in enumerate(taken)
        ]
        archive = build_archive(tenant, ROOT, made, messages, DAY_S)
        key = archive.items[0].key
        await records.save_if_absent(
            f"{key}:x", {}, ttl_s=DAY_S, other_items=[*archive.items, archive.list_line]
        )
        await holdings.add_archive(tenant, ArchiveRef(ROOT, made), archive)
    await records.background_tasks.close()
    return ArchiveSearch(records, history, holdings, SqliteTextIndexBuilder())


def queries(number: int) -> list[str]:
    """So many queries, the same each time: each of the pieces, then runs of them."""
    chance = random.Random(8)
    runs = ("".join(chance.choices([*PIECES, " "], k=chance.randint(2, 8))) for _ in range(number))
    return [*PIECES, *runs][:number]


async def test_a_thousand_queries_find_nothing_of_another_tenant_and_none_raises(store: Store) -> None:
    mine = ["all is well here", "m_b0 { is } *", "größe 漢字 canary of mine"]
    theirs = [f"{piece} theirs-only" for piece in PIECES if piece.strip()]
    found = await recall({"a": mine, "b": theirs}, store)
    known = frozenset({"m_b0", "m_b1"})
    started = time.process_time()
    for number, query in enumerate(queries(1_000)):
        where = CONVERSATION if number % 2 else None
        hits = await found.search("a", where, query, 20, known_ids=known)
        assert [hit for hit in hits if not hit.message_id.startswith("m_a")] == []
        assert not [hit for hit in hits if "theirs-only" in hit.snippet]
    assert await found.find_message("a", CONVERSATION, "m_b0", known_ids=known) is None
    assert await found.find_message("a", None, "m_b0", known_ids=known) is None
    assert len(await found.search("b", None, "canary", 20)) > 1
    assert time.process_time() - started < 2 * PATIENCE_S


@pytest.mark.parametrize("query", [".*", "(a+)+$", "[abc]+", "\\w+", "^abc"])
async def test_a_pattern_in_quotes_is_a_text_like_any_other(query: str) -> None:
    found = await recall({"a": ["abc and a longer text", f"exactly {query} stands here"]})
    assert [hit.index for hit in await found.search("a", CONVERSATION, f'"{query}"')] == [1]


async def test_what_is_found_is_bounded_and_found_in_time_whatever_is_asked() -> None:
    found = await recall({"a": ["a" * 20_000 + " end"] * 200})
    started = time.process_time()
    await found.search("a", CONVERSATION, "(a+)+$ aaaa " + "a" * 100_000, limit=10_000)
    hits = await found.search("a", CONVERSATION, "end " * 100_000, limit=10_000)
    assert time.process_time() - started < PATIENCE_S
    assert len(hits) == MAX_HITS
    assert max(len(hit.snippet) for hit in hits) <= SNIPPET_CHARACTERS
