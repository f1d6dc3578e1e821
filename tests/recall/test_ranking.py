"""The sums behind a ranking."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compaction_proxy.recall.ranking import (
    PASSAGE_CHARACTERS,
    RankingParameters,
    RowScorer,
    find_densest_match,
)

ROWS = 20
ALONE = RankingParameters(neighbour_weights=())
counts = st.dictionaries(st.integers(0, ROWS - 1), st.integers(1, 9), max_size=ROWS)


def scored(
    ranking: RankingParameters, *words: dict[int, int], lengths: tuple[int, ...] = (10,) * ROWS
) -> dict[int, float]:
    scores = RowScorer(ranking, lengths)
    for each in words:
        scores.add_word(each)
    return scores.compute_relative_scores()


@settings(max_examples=30)
@given(st.lists(counts, max_size=3))
def test_a_score_is_a_share_of_what_could_be_reached(words: list[dict[int, int]]) -> None:
    shares = scored(RankingParameters(), *words)
    assert all(0 < share <= 1 for share in shares.values())
    assert set(shares) >= {row for each in words for row in each}


def test_a_word_counts_half_as_much_for_each_step_away_before_it_saturates() -> None:
    shares = scored(RankingParameters(saturation=1.0), {10: 1})
    assert shares == {
        10 + step: pytest.approx(0.5 ** abs(step) / (0.5 ** abs(step) + 1)) for step in range(-4, 5)
    }


def test_without_neighbours_a_row_has_what_stands_in_it() -> None:
    assert scored(ALONE, {0: 1, 7: 2}) == {0: pytest.approx(1 / 2.2), 7: pytest.approx(2 / 3.2)}


def test_a_rare_word_tells_more_than_a_common_one() -> None:
    shares = scored(ALONE, {3: 1}, dict.fromkeys(range(4, 14), 1))
    assert max(shares, key=lambda row: shares[row]) == 3


def test_more_words_tell_more() -> None:
    shares = scored(ALONE, {1: 1, 2: 1}, {2: 1, 3: 1})
    assert shares[2] > shares[1] == shares[3]


def test_a_long_row_needs_more_of_a_word() -> None:
    lengths = (100, *(10,) * (ROWS - 1))
    even = scored(replace(ALONE, length_weight=0.0), {0: 1, 5: 1}, lengths=lengths)
    shares = scored(ALONE, {0: 1, 5: 1}, lengths=lengths)
    assert shares[0] < shares[5]
    assert even[0] == even[5]


def test_a_word_that_stands_nowhere_leaves_less_of_what_could_be_reached() -> None:
    known, unknown = scored(ALONE, {3: 1}), scored(ALONE, {3: 1}, {})
    assert unknown[3] < known[3]


def test_a_name_outweighs_its_terms() -> None:
    scores = RowScorer(RankingParameters(), [1_000, *[5] * 9])
    scores.add_word({0: 1, 4: 50, 5: 50, 6: 50})
    scores.add_word({0: 1, 4: 50, 5: 50, 6: 50})
    scores.add_code([0], 2)
    shares = scores.compute_relative_scores()
    assert max(shares, key=lambda row: shares[row]) == 0


def test_there_is_nothing_to_score_without_rows() -> None:
    assert RowScorer(RankingParameters(), []).compute_relative_scores() == {}


def test_the_densest_part_begins_with_its_first_match() -> None:
    far = 10 * PASSAGE_CHARACTERS
    matches = [(0, "a", 1.0), (10, "a", 1.0), (far, "a", 1.0), (far + 20, "b", 1.0), (2 * far, "b", 1.0)]
    assert find_densest_match(matches) == 2


def test_without_a_denser_part_the_first_match_counts() -> None:
    assert find_densest_match([(5, "a", 1.0), (9_000, "a", 1.0)]) == 0
    assert find_densest_match([]) == 0
