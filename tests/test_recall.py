"""What rounds have taken out is found again, by who it belongs to and by nobody else."""

import pytest

from proxy.adapters.memory_store import MemoryStore
from proxy.archive import Archived, Round
from proxy.archiving import Original, archived
from proxy.core.message import Message
from proxy.history import History
from proxy.ports import Store
from proxy.recall import MAX_TERMS, SNIPPET_CHARACTERS, Hit, Recall, Recalled, terms
from proxy.storage.records import Records

DAY_S = 86_400.0
WHO = ("t_1", "c_1")
ROOTS = [bytes([number]) * 32 for number in (1, 2)]


def ignored(_: object) -> None:
    """Nothing fails here."""


def recall(store: Store) -> Recall:
    """That of a process that has just started."""
    records = Records(store, ignored)
    return Recall(records, History(records, DAY_S))


async def taken(
    store: Store,
    number: int,
    *texts: str,
    root: bytes = ROOTS[0],
    conversation: str = "c_1",
    strategy: str = "chained",
) -> Round:
    """A round that takes user messages out; their indices and ids go on from `10 * number`."""
    records = Records(store, ignored)
    await History(records, DAY_S).rooted("t_1", conversation, root)
    made = Round(conversation, strategy, number.to_bytes(64, "big"), number, float(number))
    messages = [
        Original(10 * number + index, f"m_{10 * number + index}", 1, Message("user", text))
        for index, text in enumerate(texts)
    ]
    items, line, _ = archived("t_1", root, made, messages, DAY_S)
    await records.save(f"{items[0].key}:x", {}, ttl_s=DAY_S, also=[*items, line])
    return made


async def ids(store: Store, query: str, limit: int = 20) -> list[str]:
    return [hit.message_id for hit in await recall(store).search(*WHO, query, limit)]


async def test_messages_of_every_round_root_and_strategy_are_found_newest_first(store: Store) -> None:
    await taken(store, 1, "The port is 4141.", "nothing here")
    await taken(store, 2, "Another PORT: 80", root=ROOTS[1], strategy="full")
    await taken(store, 3, "Which port?")
    assert await ids(store, "port") == ["m_30", "m_20", "m_10"]


async def test_a_hit_says_where_it_stood_and_what_took_it_out() -> None:
    store = MemoryStore()
    await taken(store, 2, "a", "The secret word is swordfish.")
    assert await recall(store).search(*WHO, "swordfish", 5) == [
        Hit("m_21", 21, "user", 2, "chained", 2.0, 1.0, "The secret word is swordfish.", "c_1", 1)
    ]


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("quick fox", ["m_10"]),
        ("fox quick", ["m_10"]),
        ('"quick brown fox"', ["m_10"]),
        ('"quick  brown"', ["m_10"]),
        ('"brown quick"', []),
        ('fox "quick brown"', ["m_10"]),
        ("QUICK FOX", ["m_10"]),
        ("quick cat", []),
        ("größe", ["m_11"]),
        ("a.b(c)", ["m_12"]),
        ("aXb(c)", []),
        ("", []),
        ('""', []),
        ("   ", []),
    ],
)
async def test_a_message_is_found_by_all_words_in_any_order_and_phrases_as_they_are(
    query: str, found: list[str]
) -> None:
    store = MemoryStore()
    await taken(store, 1, "The quick\nbrown fox", "Die GRÖSSE und die Größe", "call a.b(c)")
    assert await ids(store, query) == found


async def test_whole_words_come_before_parts_of_words() -> None:
    store = MemoryStore()
    await taken(store, 1, "the cat sat")
    await taken(store, 2, "concatenate")
    hits = await recall(store).search(*WHO, "cat", 5)
    assert [(hit.message_id, hit.score) for hit in hits] == [("m_10", 1.0), ("m_20", 0.0)]


async def test_no_more_is_given_than_asked_for() -> None:
    store = MemoryStore()
    await taken(store, 1, *["word"] * 9)
    assert await ids(store, "word", 2) == ["m_18", "m_17"]


async def test_a_message_that_two_strategies_took_out_is_found_once() -> None:
    store = MemoryStore()
    await taken(store, 1, "once")
    await taken(store, 1, "once", strategy="full")
    assert await ids(store, "once") == ["m_10"]


async def test_a_snippet_is_short_and_shows_the_match() -> None:
    store = MemoryStore()
    await taken(store, 1, "x " * 5_000 + "needle" + " y" * 5_000, "needle" + "z" * 900, "w" * 900 + " needle")
    hits = await recall(store).search(*WHO, "needle", 5)
    assert [len(hit.snippet) <= SNIPPET_CHARACTERS and "needle" in hit.snippet for hit in hits] == [True] * 3


async def test_a_conversation_that_begins_alike_finds_nothing_of_another_s() -> None:
    store = MemoryStore()
    await taken(store, 1, "shared beginning")
    await taken(store, 2, "secret of another", conversation="c_2")
    assert await ids(store, "secret") == []
    assert await recall(store).message(*WHO, "m_20") is None
    assert await recall(store).search("t_2", "c_2", "secret", 5) == []


async def test_a_branch_finds_what_another_archived_of_messages_that_are_its_own_too() -> None:
    store = MemoryStore()
    await taken(store, 1, "common word", "foreign word", conversation="c_2")
    await taken(store, 2, "own word")
    known = frozenset({"m_10"})
    hits = await recall(store).search(*WHO, "word", 5, known=known)
    assert [hit.message_id for hit in hits] == ["m_20", "m_10"]
    assert await recall(store).message(*WHO, "m_11", known=known) is None
    assert await recall(store).message(*WHO, "m_10", known=known) is not None


async def test_a_message_is_given_whole(store: Store) -> None:
    text = "line\n" * 1_000
    made = await taken(store, 1, "first", text)
    assert await recall(store).message(*WHO, "m_11") == Recalled(Archived("m_11", 11, "user", text, 1), made)
    assert await recall(store).message(*WHO, "m_99") is None


def test_a_query_asks_for_each_word_and_phrase_once_and_not_for_too_many() -> None:
    assert terms('a "b  c" a d"e f"') == ("a", "b c", "d", "e f")
    assert len(terms(" ".join(map(str, range(100))))) == MAX_TERMS
    assert terms('an "open quote') == ("an", "open", "quote")
