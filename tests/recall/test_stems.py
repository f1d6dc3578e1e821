"""The roots of words, by which the search brings their forms together."""

from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.recall.stems import find_word_root, list_irregular_forms


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
    assert list_irregular_forms(find_word_root("going")) == ["go", "goes", "gone", "went"]
    assert list_irregular_forms(find_word_root("table")) == []


@given(st.text())
def test_any_text_has_a_root(word: str) -> None:
    assert find_word_root(word) or not word
