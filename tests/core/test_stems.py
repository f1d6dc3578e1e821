"""Stems, held against those of SQLite's own stemmer."""

import sqlite3
import string

from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.recall.stems import find_word_root, list_irregular_forms, stem_word

_ENDINGS = """
s sses ies ed eed ing ational tional enci anci izer bli alli entli eli ousli ization ation ator alism iveness
fulness ousness aliti iviti biliti logi icate ative alize iciti ical ful ness al ance ence er ic able ible ant
ement ment ent ion sion tion ou ism ate iti ous ive ize e ll y
"""
letters = st.text(string.ascii_lowercase, min_size=1, max_size=9)
ended = st.builds(
    lambda start, ends: start + "".join(ends),
    letters,
    st.lists(st.sampled_from(_ENDINGS.split()), max_size=3),
)


def of_sqlite(words: list[str]) -> list[str]:
    database = sqlite3.connect(":memory:")
    database.execute("CREATE VIRTUAL TABLE held USING fts5(text, tokenize='porter ascii')")
    database.execute("CREATE VIRTUAL TABLE places USING fts5vocab('held', 'instance')")
    database.executemany("INSERT INTO held (rowid, text) VALUES (?, ?)", enumerate(words))
    found = [term for (term,) in database.execute("SELECT term FROM places ORDER BY doc")]
    database.close()
    return found


@given(st.lists(ended.filter(lambda word: len(word) > 3), max_size=20))
def test_a_stem_is_that_of_porter(words: list[str]) -> None:
    assert [stem_word(word) for word in words] == of_sqlite(words)


def test_forms_of_a_word_have_one_root() -> None:
    families = (
        "run runs running ran",
        "go goes went going gone",
        "relate related relating relates",
        "child children",
        "buy buying bought",
        "index indices indexes",
        "happy happiness",
    )
    assert [len({find_word_root(word) for word in family.split()}) for family in families] == [1] * len(
        families
    )


def test_words_that_mean_something_else_do_not() -> None:
    assert (
        len({find_word_root(word) for word in ("general", "gender", "run", "ring", "rug", "child", "chill")})
        == 7
    )


def test_irregular_forms_are_known_by_their_root() -> None:
    assert list_irregular_forms(find_word_root("going")) == ("go", "goes", "gone", "went")
    assert list_irregular_forms(find_word_root("table")) == ()


@given(st.text())
def test_any_text_has_a_root(word: str) -> None:
    assert find_word_root(word) or not word
