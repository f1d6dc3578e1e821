"""Rows of thresholds: alternatives of conjunctions."""

import pytest

from compaction_proxy.core.budget import Budget
from compaction_proxy.core.trigger import (
    UNKNOWN,
    Aims,
    Gained,
    Marks,
    Row,
    aimed,
    automatic,
    fired,
    mark,
    marks,
)

BUDGET = Budget(10_000, usable=8_000, limit=9_000, input_limit=9_500)
NOTHING_NEW = Gained(messages=0, turns=0, iterations=0)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (Row(tokens=5_000), 5_000),
        (Row(percent=75), 6_000),
        (Row(percent_of_window=95), 9_500),
        (Row(percent=99.99), 7_999),
        (Row(tokens=5_000, percent=75), 6_000),
        (Row(messages=8), 0),
    ],
)
def test_a_row_fires_at_its_mark_and_not_a_token_before(row: Row, expected: int) -> None:
    enough = Gained(messages=8, turns=8, iterations=8)

    assert row.token_mark(BUDGET) == expected
    assert fired([row], expected, enough, BUDGET) == row
    assert fired([row], expected - 1, enough, BUDGET) is None


@pytest.mark.parametrize("row", [Row(messages=8), Row(turns=8), Row(iterations=8)])
def test_a_count_fires_when_it_is_reached(row: Row) -> None:
    seven, eight = (Gained(messages=count, turns=count, iterations=count) for count in (7, 8))

    assert [fired([row], 0, gained, BUDGET) for gained in (seven, eight)] == [None, row]


def test_the_fields_of_a_row_must_all_be_reached() -> None:
    row = Row(tokens=100, turns=2)

    assert fired([row], 100, Gained(messages=9, turns=1, iterations=9), BUDGET) is None
    assert fired([row], 99, Gained(messages=9, turns=2, iterations=9), BUDGET) is None
    assert fired([row], 100, Gained(messages=0, turns=2, iterations=0), BUDGET) == row


def test_rows_are_alternatives_and_the_first_reached_is_named() -> None:
    rows = (Row(tokens=900), Row(tokens=100), Row(tokens=50))

    assert fired(rows, 100, NOTHING_NEW, BUDGET) == rows[1]
    assert mark(rows, BUDGET) == 50


@pytest.mark.parametrize("row", [Row(), Row(tokens=0), Row(tokens=100, turns=0), Row(percent=0.0)])
def test_a_row_without_fields_or_with_a_zero_is_off(row: Row) -> None:
    assert not automatic([row])
    assert mark([row], BUDGET) is None
    assert fired([row], 10**9, Gained(9, 9, 9), BUDGET) is None


def test_without_rows_nothing_is_automatic() -> None:
    assert (automatic([]), mark([], BUDGET), fired([], 10**9, NOTHING_NEW, BUDGET)) == (False, None, None)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([Row(percent=75)], Marks(soft=4_980, trigger=6_000, hard=7_200)),
        ([Row(percent=95)], Marks(soft=6_308, trigger=7_600, hard=7_600)),
        ([Row(percent_of_window=95)], Marks(soft=6_640, trigger=8_000, hard=8_000)),
        ([Row(iterations=8)], Marks(soft=None, trigger=8_000, hard=8_000)),
        ([Row(iterations=8), Row(tokens=5_000)], Marks(soft=4_150, trigger=5_000, hard=7_200)),
        ([Row(tokens=5_000), Row(tokens=4_000)], Marks(soft=3_320, trigger=4_000, hard=7_200)),
        ([Row(tokens=0)], Marks(soft=None, trigger=8_000, hard=8_000)),
        ([], Marks(soft=None, trigger=8_000, hard=8_000)),
    ],
)
def test_marks_are_those_of_the_rows_that_name_tokens_and_never_above_what_is_usable(
    rows: list[Row], expected: Marks
) -> None:
    assert marks(rows, BUDGET, soft_share=0.83, hard_percent=90) == expected


def test_without_a_soft_share_nothing_is_done_ahead_of_need() -> None:
    assert marks([Row(percent=75)], BUDGET, soft_share=0, hard_percent=100) == Marks(None, 6_000, 8_000)


LARGE = Budget(200_000, usable=190_000, limit=195_000, input_limit=198_000)


@pytest.mark.parametrize(
    ("row", "aims", "expected"),
    [
        (
            Row(price_tier=True),
            Aims(tier=100_000),
            90_000,
        ),  # an answer of 8,000 and an error of 2,000 stay below
        (Row(price_tier=True), Aims(tier=20_000), 15_000),  # no more than a quarter is left free
        (Row(price_tier=True), Aims(tier=272_000), 190_000),
        (Row(price_tier=True), UNKNOWN, 190_000),
        (Row(cost_optimal=True), Aims(optimum=60_000), 60_000),
        (Row(cost_optimal=True), Aims(optimum=5_000), 32_000),
        (Row(cost_optimal=True), Aims(optimum=900_000), 142_500),
        (Row(cost_optimal=True), UNKNOWN, 142_500),
        (Row(cost_optimal=True, tokens=70_000), Aims(optimum=60_000), 70_000),
        (Row(tokens=70_000), Aims(tier=1, optimum=1), 70_000),
    ],
)
def test_what_a_row_about_money_comes_to_is_kept_within_bounds(row: Row, aims: Aims, expected: int) -> None:
    [made] = aimed([row], aims)

    assert (made.token_mark(LARGE), mark([made], LARGE), made.active) == (expected, expected, True)


def test_a_small_window_comes_before_the_least_optimum() -> None:
    [row] = aimed([Row(cost_optimal=True)], Aims(optimum=5_000))

    assert row.token_mark(BUDGET) == 6_000
