"""What rounds have taken out is found again, by who it belongs to and by nobody else."""

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any, cast

import pytest

from compaction_proxy.core.message import Message
from compaction_proxy.recall.archive import (
    ArchivedRound,
    ArchiveRef,
    OriginalMessage,
    RecalledMessage,
    RemovedMessage,
    build_archive,
)
from compaction_proxy.recall.fulltext import SqliteTextIndexBuilder
from compaction_proxy.recall.index_cache import SearchIndexCache
from compaction_proxy.recall.retention import ArchiveBounds, ArchiveRetention
from compaction_proxy.recall.search import (
    SNIPPET_CHARACTERS,
    ArchiveSearch,
    SearchHit,
    _extract_snippet,
)
from compaction_proxy.storage.keys import archive_key, scope_prefix, tenant_prefix
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.records import RecordStore
from compaction_proxy.storage.store import Store
from compaction_proxy.telemetry.event_history import EventHistory

DAY_S = 86_400.0
WHO = ("t_1", "c_1")
ROOTS = [bytes([number]) * 32 for number in (1, 2)]


def ignored(_: object) -> None:
    """Nothing fails here."""


def recall(store: Store) -> ArchiveSearch:
    """That of a process that has just started."""
    records = RecordStore(store, ignored, deadline_s=10.0)
    return ArchiveSearch(records, EventHistory(records, DAY_S), holdings(records), SqliteTextIndexBuilder())


def holdings(records: RecordStore) -> ArchiveRetention:
    return ArchiveRetention(records, DAY_S, ArchiveBounds(), now=lambda: 100.0)


async def taken(
    store: Store,
    number: int,
    *texts: str,
    root: bytes = ROOTS[0],
    conversation: str = "c_1",
    strategy: str = "chained",
    tenant: str = "t_1",
) -> ArchivedRound:
    """A round that takes user messages out; their indices and ids go on from `10 * number`."""
    records = RecordStore(store, ignored, deadline_s=10.0)
    await EventHistory(records, DAY_S).record_root(tenant, conversation, root)
    made = ArchivedRound(conversation, strategy, number.to_bytes(64, "big"), number, float(number))
    messages = [
        OriginalMessage(10 * number + index, f"m_{10 * number + index}", number, Message("user", text))
        for index, text in enumerate(texts)
    ]
    archive = build_archive(tenant, root, made, messages, DAY_S)
    key = archive.items[0].key
    await records.save_if_absent(f"{key}:x", {}, ttl_s=DAY_S, other_items=[*archive.items, archive.list_line])
    await holdings(records).add_archive(tenant, ArchiveRef(root, made), archive)
    await records.background_tasks.close()
    return made


async def ids(store: Store, query: str, limit: int = 20) -> list[str]:
    return [hit.message_id for hit in await recall(store).search(*WHO, query, limit)]


async def test_messages_of_every_round_root_and_strategy_are_found(store: Store) -> None:
    await taken(store, 1, "The port is 4141.", "nothing here")
    await taken(store, 2, "Another PORT: 80", root=ROOTS[1], strategy="full")
    await taken(store, 3, "Which port?")
    assert sorted(await ids(store, "port", 3)) == ["m_10", "m_20", "m_30"]


async def test_a_hit_says_where_it_stood_and_what_took_it_out() -> None:
    store = MemoryStore()
    await taken(store, 2, "a", "The secret word is swordfish.")
    [hit] = await recall(store).search(*WHO, "swordfish", 1)
    assert hit == SearchHit(
        "m_21", 21, "user", 2, "chained", 2.0, hit.score, "The secret word is swordfish.", "c_1", 2
    )
    assert hit.score > 0


async def test_a_question_behind_a_long_text_is_looked_for() -> None:
    store = MemoryStore()
    await taken(store, 1, "The secret word is swordfish.")
    assert await ids(store, "0 " * 5_000 + "What is the secret word?") == ["m_10"]


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("quick fox", "m_10"),
        ("fox that was quick", "m_10"),
        ('"quick  brown"', "m_10"),
        ("QUICK", "m_10"),
        ("quic*", "m_10"),
        ("größe", "m_11"),
        ("a.b(c)", "m_12"),
        ("", None),
        ('"brown quick"', None),
        ('""', None),
        ("   ", None),
    ],
)
async def test_what_answers_best_comes_first_by_words_beginnings_and_phrases(
    query: str, found: str | None
) -> None:
    store = MemoryStore()
    await taken(store, 1, "The quick\nbrown fox", "Die GRÖSSE und die Größe", "call a.b(c)", "quiet")
    assert next(iter(await ids(store, query)), None) == found


async def test_no_more_is_given_than_asked_for() -> None:
    store = MemoryStore()
    await taken(store, 1, *["word"] * 9)
    assert [len(await ids(store, "word", limit)) for limit in (2, 9, 0)] == [2, 9, 0]


async def test_a_message_that_two_strategies_took_out_is_found_once() -> None:
    store = MemoryStore()
    await taken(store, 1, "once")
    await taken(store, 1, "once", strategy="full")
    assert await ids(store, "once") == ["m_10"]


async def test_a_snippet_is_short_and_shows_the_match() -> None:
    store = MemoryStore()
    await taken(
        store, 1, "x " * 5_000 + "needle" + " y" * 5_000, "needle" + " z" * 900, "w " * 900 + "needle"
    )
    hits = await recall(store).search(*WHO, "needle", 3)
    assert [len(hit.snippet) <= SNIPPET_CHARACTERS and "needle" in hit.snippet for hit in hits] == [True] * 3
    [longer, *_] = await recall(store).search(*WHO, "needle", 1, snippet_characters=900)
    assert SNIPPET_CHARACTERS < len(longer.snippet) <= 900
    assert "needle" in longer.snippet


async def test_a_conversation_that_begins_alike_finds_nothing_of_another_s() -> None:
    store = MemoryStore()
    await taken(store, 1, "shared beginning")
    await taken(store, 2, "secret of another", conversation="c_2")
    assert await ids(store, "secret") == []
    assert await recall(store).find_message(*WHO, "m_20") is None
    assert await recall(store).search("t_2", "c_2", "secret", 5) == []


async def test_a_branch_finds_what_another_archived_of_messages_that_are_its_own_too() -> None:
    store = MemoryStore()
    await taken(store, 1, "common word", *["foreign word"] * 9, conversation="c_2")
    await taken(store, 2, "own word")
    known = frozenset({"m_10"})
    hits = await recall(store).search(*WHO, "word", 2, known_ids=known)
    assert sorted((hit.message_id, hit.conversation) for hit in hits) == [("m_10", "c_2"), ("m_20", "c_1")]
    assert await recall(store).find_message(*WHO, "m_11", known_ids=known) is None
    assert await recall(store).find_message(*WHO, "m_10", known_ids=known) is not None


async def test_a_conversation_that_only_reuses_a_compaction_finds_what_it_removed() -> None:
    store = MemoryStore()
    await taken(store, 1, "common word", "foreign word", conversation="c_2")
    known = frozenset({"m_10"})
    hits = await recall(store).search(*WHO, "word", 2, known_ids=known, root=ROOTS[0])
    assert [(hit.message_id, hit.conversation) for hit in hits] == [("m_10", "c_2")]
    assert await recall(store).find_message(*WHO, "m_10", known_ids=known, root=ROOTS[0]) is not None
    assert await recall(store).find_message(*WHO, "m_11", known_ids=known, root=ROOTS[0]) is None
    assert await recall(store).search(*WHO, "word", 2, root=ROOTS[0]) == []


async def test_a_message_that_a_branch_archived_too_stays_the_conversation_s_own() -> None:
    store = MemoryStore()
    await taken(store, 1, "mine as well")
    await taken(store, 1, "mine as well", conversation="c_2", strategy="full")
    [hit] = await recall(store).search(*WHO, "mine", 5, known_ids=frozenset({"m_99"}))
    assert (hit.message_id, hit.conversation) == ("m_10", "c_1")


async def test_a_message_is_given_whole(store: Store) -> None:
    text = "line\n" * 10_000
    made = await taken(store, 1, "first", text)
    assert await recall(store).find_message(*WHO, "m_11") == RecalledMessage(
        RemovedMessage("m_11", 11, "user", text, 1), made
    )
    assert await recall(store).find_message(*WHO, "m_99") is None


async def test_all_of_a_tenant_is_searched_and_nothing_of_another(store: Store) -> None:
    await taken(store, 1, "a port of mine")
    await taken(store, 2, "another port", root=ROOTS[1], conversation="c_2")
    await taken(store, 3, "a port of theirs", conversation="c_3", tenant="t_2")
    hits = await recall(store).search("t_1", None, "port")
    assert sorted((hit.message_id, hit.conversation) for hit in hits) == [("m_10", "c_1"), ("m_20", "c_2")]
    assert await recall(store).find_message("t_1", None, "m_30") is None
    assert await recall(store).find_message("t_1", None, "m_20") is not None


async def test_an_archive_of_a_version_before_is_still_found() -> None:
    store = MemoryStore()
    await taken(store, 1, "new words")
    records = RecordStore(store, ignored, deadline_s=10.0)
    made = ArchivedRound("c_1", "chained", (2).to_bytes(64, "big"), 2, 2.0)
    _, line, _ = build_archive("t_1", ROOTS[0], made, [], DAY_S)
    before = {name: value for name, value in line.fields.items() if name != "bytes"}
    key = archive_key("t_1", ROOTS[0], "chained", made.checkpoint_place)
    rows = {"messages": [["m_20", 20, "user", "old words"]]}
    await records.save_if_absent(key, before | rows, ttl_s=DAY_S, other_items=[replace(line, fields=before)])
    assert sorted(await ids(store, "words")) == ["m_10", "m_20"]
    assert [each.message.turn for each in await recall(store).list_removed_messages(*WHO)] == [1, None]


class Reads:
    """A store that counts what is asked of it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.asked: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.asked[name] += 1
        return getattr(self._store, name)


async def test_asked_again_only_lists_are_read_until_there_is_another_archive() -> None:
    store = Reads(MemoryStore())
    await taken(cast("Store", store), 1, "word")
    found = recall(cast("Store", store))
    await found.search(*WHO, "word")
    store.asked.clear()
    await found.search(*WHO, "another word")
    await found.find_message(*WHO, "m_10")
    assert store.asked == {"read_tail": 4}
    await taken(cast("Store", store), 2, "word")
    assert len(await found.search(*WHO, "word")) == 2


@pytest.mark.parametrize("prefix", [scope_prefix("t_1", ROOTS[0]), tenant_prefix("t_1")])
async def test_what_is_forgotten_is_found_no_more_at_once(prefix: str) -> None:
    store = MemoryStore()
    place = ArchiveRef(ROOTS[0], await taken(store, 1, "word"))
    records = RecordStore(store, ignored, deadline_s=10.0)
    indexes = SearchIndexCache(records, SqliteTextIndexBuilder())
    reading = asyncio.create_task(indexes.get_or_load("t_1", [place]))
    await asyncio.sleep(0)  # it has begun to read
    await records.delete_prefix(prefix)
    assert len(await reading) == 0
    await taken(store, 1, "word")
    assert len(await indexes.get_or_load("t_1", [place])) == 1
    await records.delete_prefix(prefix)
    assert len(await indexes.get_or_load("t_1", [place])) == 0
    await indexes.close()


async def test_indexes_that_are_too_much_go_and_the_one_used_last_stays() -> None:
    store = MemoryStore()
    places = [ArchiveRef(root, await taken(store, 1, "word " * 9_000, root=root)) for root in ROOTS]
    indexes = SearchIndexCache(
        RecordStore(store, ignored, deadline_s=10.0), SqliteTextIndexBuilder(), max_bytes=300_000
    )
    held = [await indexes.get_or_load("t_1", [place]) for place in places]
    for each in held:
        assert [found.message.id for found, _ in await each.search("word", 1)] == ["m_10"]
    indexes.evict_excess()
    assert await indexes.get_or_load("t_1", [places[1]]) is held[1]
    assert await indexes.get_or_load("t_1", [places[0]]) is not held[0]
    await indexes.close()


async def test_of_what_a_forgotten_conversation_had_another_process_finds_nothing(store: Store) -> None:
    await taken(store, 1, "word")
    await taken(store, 2, "word", root=ROOTS[1], conversation="c_2")
    found = recall(store)
    assert len(await found.search("t_1", None, "word")) == 2
    here = RecordStore(store, ignored, deadline_s=10.0)
    await here.delete_prefix(scope_prefix("t_1", ROOTS[0]))
    await holdings(here).record_deleted_roots("t_1", [ROOTS[0]])
    assert [hit.message_id for hit in await found.search("t_1", None, "word")] == ["m_20"]
    assert await found.search(*WHO, "word") == []


@pytest.mark.parametrize("at", [0, 150, 400, 880])
def test_a_snippet_begins_and_ends_with_whole_words(at: int) -> None:
    text = " ".join(f"word{number}" for number in range(130))
    shown = _extract_snippet(text, at)
    assert (shown.startswith("… "), shown.endswith(" …")) == (at != 0, at != 880)
    assert shown.removeprefix("… ").removesuffix(" …") in text
    assert 250 < len(shown) <= 300
    assert text[at + 10 :].split()[1] in shown


def test_a_snippet_of_one_long_run_is_cut_anywhere() -> None:
    assert _extract_snippet("x" * 1_000, 500) == f"… {'x' * 296} …"


def test_a_snippet_of_a_whole_text_has_no_mark() -> None:
    assert _extract_snippet(" two\n words \n", 2) == "two words"
