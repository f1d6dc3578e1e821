"""Terms of texts, and what queries ask for."""

import time
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from compaction_proxy.recall.tokenize import (
    MAX_QUERY_WORDS,
    MAX_TERM_CHARACTERS,
    ParsedQuery,
    Term,
    fold_case,
    parse_query,
    split_terms,
)


def texts(of: str) -> list[str]:
    return [term.text for term in split_terms(of)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello, World!", "hello world"),
        ("getUserName", "get user name getusername"),
        ("HTTPServer2 XMLHttpRequest", "http server2 httpserver2 xml http request xmlhttprequest"),
        ("snake_case-name", "snake case name"),
        ("src/storage/pool_12.py:118", "src storage pool 12 py 118"),
        ("ECONNREFUSED E1024 0x80070005", "econnrefused e1024 0x80070005"),
        ("v2.3.1-rc4", "v2 3 1 rc4"),
        ("$1,234.56 and 1,23 and 1234,567", "1234 56 and 1 23 and 1234 567"),
        ("550e8400-e29b-41d4-a716-446655440000", "550e8400 e29b 41d4 a716 446655440000"),
        ("Caroline's don\u2019t we'll 'quoted'", "caroline don we quoted"),
        ("Café ŁÓDŹ naïve straße ﬁne", "cafe lodz naive strasse fine"),
        ("cafe\u0301 \uff21\uff11", "cafe a1"),
        ("日本語の文", "日本 本語 語の の文 文"),
        ("abc漢字def 字", "abc 漢字 字 def 字"),
        ("한국어를", "한국 국어 어를 를"),
        ("Привет مرحبا हिन्दी", "привет مرحبا हिनदी"),
        ("🎉 done \ud800x\x00y \u202eabc", "done x y abc"),
        ("", ""),
    ],
)
def test_a_text_has_these_terms(text: str, expected: str) -> None:
    assert texts(text) == expected.split()


@given(st.text())
@example("ŉ")
@example("İ")
def test_terms_are_for_an_index_of_any_kind(text: str) -> None:
    found = list(split_terms(text))
    assert all(
        0 < len(each) <= MAX_TERM_CHARACTERS * 18 for each, _ in found
    )  # one letter folds to 18 at most
    assert all(not (each.isascii() and not each.isalnum()) for each, _ in found)
    assert all(each.encode() for each, _ in found)
    assert all(0 <= start < len(text) for _, start in found)
    assert all(one.start <= other.start for one, other in pairwise(found))


@given(st.from_regex(r"[a-z0-9]{1,40}", fullmatch=True))
def test_case_does_not_matter(word: str) -> None:
    assert texts(word) == texts(word.upper()) == [fold_case(word.upper())] == [word]


def test_terms_say_where_they_stand() -> None:
    assert list(split_terms("ab, CdEf")) == [
        Term("ab", 0), Term("cd", 4), Term("ef", 4), Term("cdef", 4)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("What did she buy at the market?", ParsedQuery(words=("buy", "market"))),
        ("to be or not to be", ParsedQuery(words=("to", "be", "or", "not"))),
        ("the conf* of", ParsedQuery(prefixes=("conf",))),
        ("pool_1*", ParsedQuery(words=("pool",), prefixes=("1",))),
        (
            'say "Hello  World" now',
            ParsedQuery(words=("say", "hello", "world", "now"), phrases=("Hello World",)),
        ),
        ('an "unclosed quote', ParsedQuery(words=("unclosed", "quote"))),
        ('"=>" ""', ParsedQuery(phrases=("=>",))),
        ("ORD-1234?", ParsedQuery(words=("ord", "1234"), codes=(("ord", "1234"),))),
        ("(see src/a_b.py)", ParsedQuery(words=("see", "src", "b", "py"), codes=(("src", "a", "b", "py"),))),
        ("$1,234.56", ParsedQuery(words=("1234", "56"), codes=(("1234", "56"),))),
        (
            "well-known co-worker, 42 of 2023",
            ParsedQuery(words=("well", "known", "co", "worker", "42", "2023")),
        ),
        ("日本語", ParsedQuery(words=("日本", "本語"), codes=(("日本", "本語"),))),
        ("語", ParsedQuery(prefixes=("語",))),
        ("and/or", ParsedQuery(words=("and", "or"))),
        ('x AND y OR z NOT "q" NEAR(p, 2) col: ^', ParsedQuery(
            words=("x", "y", "z", "q", "near", "p", "2", "col"), phrases=("q",)
        )),
        ("* ** !!! \ud800", ParsedQuery()),
    ],
)  # fmt: skip
def test_a_query_asks_for_this(query: str, expected: ParsedQuery) -> None:
    assert parse_query(query) == expected


@given(st.text())
def test_any_text_is_a_query(query: str) -> None:
    found = parse_query(query)
    assert len(found.words) <= MAX_QUERY_WORDS
    assert set(found.words) <= set(texts(query.replace('"', " ")))


def test_of_a_long_query_both_ends_are_read() -> None:
    found = parse_query("first " + " ".join(f"w{k}" for k in range(20_000)) + " last")
    assert (found.words[0], found.words[-1], len(found.words)) == ("first", "last", MAX_QUERY_WORDS)


def test_the_time_it_takes_grows_with_the_text() -> None:
    began = time.process_time()
    for text in (
        "a",
        " ",
        "a ",
        "aB",
        "1,",
        "1,234",
        "\u0301",
        "漢",
        '"',
        "!",
        "'s",
        "_",
        "a\u0301",
        "\ud800",
    ):
        for _ in split_terms(text * (200_000 // len(text))):
            pass
        parse_query(text * 200_000)
    assert time.process_time() - began < 20  # seconds: ten times what it takes; were it quadratic, hours
