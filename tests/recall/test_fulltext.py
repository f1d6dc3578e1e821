"""Full text in memory: what is found, where, and that no text or query breaks it."""

import random
import string
import threading
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compaction_proxy.recall.fulltext import (
    ROW_CHARACTERS,
    SqliteTextIndexBuilder,
    TextIndex,
    TextIndexBuilder,
    TextMatch,
)

FULL_TEXT: TextIndexBuilder = SqliteTextIndexBuilder()
TALK = (
    "Where did you go in the summer?",
    "I went hiking in the Dolomites with Ana.",
    "And the dog?",
    "It stayed with my parents; they run a bakery.",
    "The deploy failed: connection_pool exhausted in src/storage/pool_12.py:118, error E1024.",
    "Invoice INV-2023-0042 over $1,234.56 is due on 2023-05-08.",
    "func getUserName() calls HTTPServer v2.3.1",
    "会議は金曜日の午後三時に変更されました。",
    "Réunion à l'Élysée, café offert.",
    "Wir treffen uns am Donnerstag in der Küche.",
)


def index(texts: Sequence[str]) -> TextIndex:
    return FULL_TEXT.build(texts)


def places(texts: Sequence[str], query: str, limit: int = 5) -> list[int]:
    return [found.document_index for found in index(texts).search(query, limit)]


@pytest.fixture(scope="module")
def talk() -> TextIndex:
    return index(TALK)


@pytest.mark.parametrize(
    ("query", "place", "begins"),
    [
        ("Who hikes?", 1, "hiking"),
        ("running bakeries", 3, "run"),
        ("Who goes with Ana?", 1, "went"),
        ("src/storage/pool_12.py", 4, "src/storage"),
        ("pool_12.py", 4, "pool_12"),
        ("connection pool", 4, "connection_pool"),
        ("e1024", 4, "E1024"),
        ("1234.56", 5, "1,234.56"),
        ("$1,234.56", 5, "1,234.56"),
        ("inv-2023-0042", 5, "INV-2023"),
        ("2023-05-08", 5, "2023-05-08"),
        ("getusername", 6, "getUserName"),
        ("user name", 6, "getUserName"),
        ("v2.3.1", 6, "v2.3.1"),
        ("hik*", 1, "hiking"),
        ("金曜日", 7, "金曜日"),
        ("午", 7, "午後"),
        ("ELYSEE cafe", 8, "Élysée"),
        ("kuche", 9, "Küche"),
        ('"with my   PARENTS"', 3, "with my parents"),
    ],
)
def test_the_first_hit_is(talk: TextIndex, query: str, place: int, begins: str) -> None:
    first = talk.search(query, 5)[0]
    assert (first.document_index, TALK[first.document_index][first.offset :][: len(begins)]) == (
        place,
        begins,
    )


def test_an_answer_is_found_by_the_words_of_the_message_before_it() -> None:
    texts = ["What is the name of your sister?", "Petra.", *["We talked about the weather."] * 20]
    assert places(texts, "sister's name", 2) == [0, 1]


def test_a_neighbour_that_is_found_for_what_stands_around_it_begins_at_its_start(talk: TextIndex) -> None:
    found = {each.document_index: each.offset for each in talk.search("dolomites", 5)}
    assert found[0] == found[2] == 0


def test_scores_fall_and_newer_messages_come_before_older_ones_that_are_as_good() -> None:
    found = index(["same words", *["pad"] * 20, "same words"]).search("same", 2)
    assert [each.document_index for each in found] == [21, 0]
    assert 1 >= found[0].score == found[1].score > 0


def test_a_phrase_must_be_there(talk: TextIndex) -> None:
    assert [each.document_index for each in talk.search('hiking "the dog"', 5)] == [2]
    assert talk.search('hiking "dog the"', 5) == []
    assert [each.document_index for each in talk.search('"();" hiking "()"', 5)] == []
    assert [each.document_index for each in talk.search('"()"', 5)] == [6]


def test_all_phrases_must_be_there() -> None:
    texts = ["alpha beta", "beta gamma", "alpha beta  gamma"]
    assert places(texts, '"alpha beta" "beta gamma"') == [2]


def test_a_phrase_is_found_across_the_rows_of_a_long_text() -> None:
    text = " ".join(f"w{k}" for k in range(5_000))
    held = index([text, "w1 w2"])
    for k in range(0, 4_990, 397):
        phrase = f"w{k} w{k + 1} w{k + 2}"
        assert held.search(f'"{phrase}"', 1)[0].offset == text.index(phrase)


def test_what_stands_deep_in_a_long_text_is_found_where_it_stands() -> None:
    filling = "lorem ipsum dolor " * (20 * ROW_CHARACTERS // 18)
    text = f"{filling}the needle {filling}"
    [found] = index([text, "short"]).search("needle", 1)
    assert text[found.offset :].startswith("needle")


def test_nothing_is_found_by_what_says_nothing(talk: TextIndex) -> None:
    nothing = ("", " ", "*", '""', "!?", "zzz", "\ud800", "\x00")
    assert {query: talk.search(query, 5) for query in nothing} == {query: [] for query in nothing}
    assert talk.search("dog", 0) == talk.search("dog", -1) == []
    assert index([]).search("dog", 5) == index(["", ""]).search("dog", 5) == []


def test_a_limit_is_kept() -> None:
    assert [len(places(["word"] * 30, "word", limit)) for limit in (1, 7, 100)] == [1, 7, 30]


def test_a_closed_index_finds_nothing() -> None:
    held = index(TALK)
    held.close()
    held.close()
    assert held.search("dog", 5) == []


def test_its_size_is_about_that_of_its_texts() -> None:
    text = " ".join(f"word{k % 5_000} and" for k in range(20_000))
    assert len(text) < index([text]).size_bytes < 4 * len(text)


def test_any_thread_may_search() -> None:
    held, found = index(TALK), list[list[TextMatch]]()
    threads = [threading.Thread(target=lambda: found.append(held.search("dog", 1))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [held.search("dog", 1)] * 8


names = st.one_of(
    st.from_regex(r"[A-Z]{3}-[0-9]{6}", fullmatch=True),
    st.uuids().map(str),
    st.from_regex(r"/[a-z]{2,6}/[a-z]{2,6}_[0-9]{1,3}\.(py|ts|log)", fullmatch=True),
    st.builds("${:,}.{:02d}".format, st.integers(1_000, 10**7), st.integers(0, 99)),
    st.from_regex(r"ERR_[A-Z]{2,5}_[0-9]{2,4}", fullmatch=True),
    st.from_regex(r"v[0-9]{1,2}\.[0-9]{1,2}\.[0-9]{1,3}", fullmatch=True),
    st.from_regex(r"[0-9a-f]{40}", fullmatch=True),
    st.from_regex(r"[a-z]{3,7}[A-Z][a-z]{3,7}[A-Z][a-z]{3,7}", fullmatch=True),
    st.from_regex(r"[a-z]{3,7}\.[a-z]{3,7}@[a-z]{3,7}\.com", fullmatch=True),
)


def _nearly(name: str, rng: random.Random) -> str:
    """The name with another letter or digit somewhere."""
    at = rng.choice([k for k, each in enumerate(name) if each.isalnum()])
    others = string.digits if name[at].isdigit() else string.ascii_lowercase
    return name[:at] + rng.choice(others.replace(name[at].lower(), "")) + name[at + 1 :]


@settings(max_examples=30, deadline=None)
@given(name=names, seed=st.integers(0, 2**32), asking=st.sampled_from(["{}", "What about {}?", "({}),"]))
def test_a_planted_name_is_the_first_hit_among_names_like_it(name: str, seed: int, asking: str) -> None:
    rng = random.Random(seed)
    texts = [
        " ".join(
            rng.choice((_nearly(name, rng), "about", "what", "status", "row"))
            for _ in range(rng.randrange(60))
        )
        for _ in range(40)
    ]
    place = rng.randrange(len(texts))
    texts[place] += f" {name} " + "filling " * rng.choice((0, 10, 3_000))
    [found] = index(texts).search(asking.format(name), 1)
    assert found.document_index == place
    assert texts[place][found.offset - 1 :].lstrip("$/ ").startswith(name.lstrip("$/"))


hostile = st.text(
    st.one_of(st.characters(), st.sampled_from('"*()^:+-~{}[]AND OR NOT NEAR\x00\ud800\u202e漢🎉\u0301'))
)


@settings(deadline=None)
@given(texts=st.lists(hostile, max_size=6), query=hostile, limit=st.integers(-1, 8))
def test_any_query_of_any_text_is_answered(texts: list[str], query: str, limit: int) -> None:
    found = index(texts).search(query, limit)
    assert len(found) <= max(0, limit)
    assert len({each.document_index for each in found}) == len(found)
    assert all(0 <= each.offset <= len(texts[each.document_index]) and 0 < each.score <= 1 for each in found)
    assert [each.score for each in found] == sorted((each.score for each in found), reverse=True)


@settings(deadline=None)
@given(texts=st.lists(hostile, min_size=1, max_size=4), at=st.integers(0, 3), query=hostile)
def test_what_a_phrase_finds_holds_it(texts: list[str], at: int, query: str) -> None:
    phrase = " ".join(query.replace('"', " ").split())
    held = [" ".join(text.lower().split()) for text in texts]
    found = index(texts).search(f'"{phrase}"', 10)
    assert all(phrase.lower() in held[each.document_index] for each in found)


def test_the_largest_texts_and_queries_end_in_time() -> None:
    texts = ["a" * 2_000_000, "a " * 50_000, "1,234" + ",567" * 20_000, "漢" * 50_000, " " * 500_000]
    queries = ["a" * 100_000, '"' + "a " * 100_000 + 'b"', "a* " * 1_000, '"' * 100_000, "漢", '"!"', "1,234"]
    began = time.process_time()
    held = index(texts)
    for query in queries:
        held.search(query, 5)
    assert time.process_time() - began < 30  # seconds: ten times what it takes
