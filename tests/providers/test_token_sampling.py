"""Properties of cutting and sampling."""

from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.providers.token_counting import extrapolate_counts, iter_slices, sample_slices

TEXT = st.text(alphabet=st.sampled_from("ab \n压😀"), max_size=200)
LIMIT = st.integers(1, 10).map(lambda number: 4 * number)
SIZES = st.lists(st.integers(1, 50), max_size=60)


@given(TEXT, LIMIT)
def test_slices_cover_the_text_in_order(text: str, limit: int) -> None:
    spans = list(iter_slices(text, limit))
    assert "".join(text[start:stop] for start, stop in spans) == text
    assert all(0 < stop - start <= limit for start, stop in spans)


@given(TEXT, LIMIT)
def test_quarters_of_slices_add_up_to_quarters_of_the_text(text: str, limit: int) -> None:
    assert sum(-(-(stop - start) // 4) for start, stop in iter_slices(text, limit)) == -(-len(text) // 4)


def test_a_cut_prefers_the_blank_before_a_word() -> None:
    assert [text[start:stop] for text in ["abc abc def"] for start, stop in iter_slices(text, 8)] == [
        "abc abc ",
        "def",
    ]
    assert [text[start:stop] for text in ["abcd efghij"] for start, stop in iter_slices(text, 8)] == [
        "abcd",
        " efghij",
    ]


@given(SIZES, st.integers(50, 500))
def test_a_sample_stays_within_its_budget(sizes: list[int], budget: int) -> None:
    drawn = list(sample_slices(sizes, budget))
    assert drawn == sorted(set(drawn))
    assert sum(sizes[index] for index in drawn) <= budget
    assert bool(drawn) == bool(sizes)
    assert sum(sizes) > budget or drawn == list(range(len(sizes)))


@given(SIZES, st.integers(50, 500), st.integers(1, 4))
def test_an_even_text_is_extrapolated_to_its_true_count(sizes: list[int], budget: int, density: int) -> None:
    counted = {index: density * sizes[index] for index in sample_slices(sizes, budget)}
    assert extrapolate_counts(sizes, counted) == [density * size for size in sizes]


def test_what_was_counted_stays_as_counted() -> None:
    assert extrapolate_counts([10, 10, 5], {0: 3, 2: 4}) == [3, 5, 4]
