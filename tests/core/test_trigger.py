"""Rows of thresholds: alternatives of conjunctions."""

import pytest

from compaction_proxy.core.budget import Budget
from compaction_proxy.core.trigger import (
    UNKNOWN_PRICE_THRESHOLDS,
    GrowthCounts,
    PriceThresholds,
    TriggerMarks,
    TriggerRule,
    compute_min_trigger,
    compute_trigger_marks,
    find_reached_rule,
    has_active_rule,
    set_price_thresholds,
)

BUDGET = Budget(10_000, usable=8_000, compaction_limit=9_000, input_limit=9_500)
NOTHING_NEW = GrowthCounts(messages=0, turns=0, iterations=0)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (TriggerRule(tokens=5_000), 5_000),
        (TriggerRule(percent=75), 6_000),
        (TriggerRule(percent_of_window=95), 9_500),
        (TriggerRule(percent=99.99), 7_999),
        (TriggerRule(tokens=5_000, percent=75), 6_000),
        (TriggerRule(messages=8), 0),
    ],
)
def test_a_row_fires_at_its_mark_and_not_a_token_before(row: TriggerRule, expected: int) -> None:
    enough = GrowthCounts(messages=8, turns=8, iterations=8)

    assert row.compute_token_threshold(BUDGET) == expected
    assert find_reached_rule([row], expected, enough, BUDGET) == row
    assert find_reached_rule([row], expected - 1, enough, BUDGET) is None


@pytest.mark.parametrize("row", [TriggerRule(messages=8), TriggerRule(turns=8), TriggerRule(iterations=8)])
def test_a_count_fires_when_it_is_reached(row: TriggerRule) -> None:
    seven, eight = (GrowthCounts(messages=count, turns=count, iterations=count) for count in (7, 8))

    assert [find_reached_rule([row], 0, gained, BUDGET) for gained in (seven, eight)] == [None, row]


def test_the_fields_of_a_row_must_all_be_reached() -> None:
    row = TriggerRule(tokens=100, turns=2)

    assert find_reached_rule([row], 100, GrowthCounts(messages=9, turns=1, iterations=9), BUDGET) is None
    assert find_reached_rule([row], 99, GrowthCounts(messages=9, turns=2, iterations=9), BUDGET) is None
    assert find_reached_rule([row], 100, GrowthCounts(messages=0, turns=2, iterations=0), BUDGET) == row


def test_rows_are_alternatives_and_the_first_reached_is_named() -> None:
    rows = (TriggerRule(tokens=900), TriggerRule(tokens=100), TriggerRule(tokens=50))

    assert find_reached_rule(rows, 100, NOTHING_NEW, BUDGET) == rows[1]
    assert compute_min_trigger(rows, BUDGET) == 50


@pytest.mark.parametrize(
    "row", [TriggerRule(), TriggerRule(tokens=0), TriggerRule(tokens=100, turns=0), TriggerRule(percent=0.0)]
)
def test_a_row_without_fields_or_with_a_zero_is_off(row: TriggerRule) -> None:
    assert not has_active_rule([row])
    assert compute_min_trigger([row], BUDGET) is None
    assert find_reached_rule([row], 10**9, GrowthCounts(9, 9, 9), BUDGET) is None


def test_without_rows_nothing_is_automatic() -> None:
    assert (
        has_active_rule([]),
        compute_min_trigger([], BUDGET),
        find_reached_rule([], 10**9, NOTHING_NEW, BUDGET),
    ) == (False, None, None)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([TriggerRule(percent=75)], TriggerMarks(soft_tokens=4_980, trigger_tokens=6_000, hard_tokens=7_200)),
        ([TriggerRule(percent=95)], TriggerMarks(soft_tokens=6_308, trigger_tokens=7_600, hard_tokens=7_600)),
        (
            [TriggerRule(percent_of_window=95)],
            TriggerMarks(soft_tokens=6_640, trigger_tokens=8_000, hard_tokens=8_000),
        ),
        (
            [TriggerRule(iterations=8)],
            TriggerMarks(soft_tokens=None, trigger_tokens=8_000, hard_tokens=8_000),
        ),
        (
            [TriggerRule(iterations=8), TriggerRule(tokens=5_000)],
            TriggerMarks(soft_tokens=4_150, trigger_tokens=5_000, hard_tokens=7_200),
        ),
        (
            [TriggerRule(tokens=5_000), TriggerRule(tokens=4_000)],
            TriggerMarks(soft_tokens=3_320, trigger_tokens=4_000, hard_tokens=7_200),
        ),
        ([TriggerRule(tokens=0)], TriggerMarks(soft_tokens=None, trigger_tokens=8_000, hard_tokens=8_000)),
        ([], TriggerMarks(soft_tokens=None, trigger_tokens=8_000, hard_tokens=8_000)),
    ],
)
def test_marks_are_those_of_the_rows_that_name_tokens_and_never_above_what_is_usable(
    rows: list[TriggerRule], expected: TriggerMarks
) -> None:
    assert compute_trigger_marks(rows, BUDGET, soft_share=0.83, hard_percent=90) == expected


def test_without_a_soft_share_nothing_is_done_ahead_of_need() -> None:
    assert compute_trigger_marks(
        [TriggerRule(percent=75)], BUDGET, soft_share=0, hard_percent=100
    ) == TriggerMarks(None, 6_000, 8_000)


LARGE = Budget(200_000, usable=190_000, compaction_limit=195_000, input_limit=198_000)


@pytest.mark.parametrize(
    ("row", "aims", "expected"),
    [
        (
            TriggerRule(price_tier=True),
            PriceThresholds(tier_tokens=100_000),
            90_000,
        ),  # an answer of 8,000 and an error of 2,000 stay below
        (
            TriggerRule(price_tier=True),
            PriceThresholds(tier_tokens=20_000),
            15_000,
        ),  # no more than a quarter is left free
        (TriggerRule(price_tier=True), PriceThresholds(tier_tokens=272_000), 190_000),
        (TriggerRule(price_tier=True), UNKNOWN_PRICE_THRESHOLDS, 190_000),
        (TriggerRule(cost_optimal=True), PriceThresholds(optimum_tokens=60_000), 60_000),
        (TriggerRule(cost_optimal=True), PriceThresholds(optimum_tokens=5_000), 32_000),
        (TriggerRule(cost_optimal=True), PriceThresholds(optimum_tokens=900_000), 142_500),
        (TriggerRule(cost_optimal=True), UNKNOWN_PRICE_THRESHOLDS, 142_500),
        (TriggerRule(cost_optimal=True, tokens=70_000), PriceThresholds(optimum_tokens=60_000), 70_000),
        (TriggerRule(tokens=70_000), PriceThresholds(tier_tokens=1, optimum_tokens=1), 70_000),
    ],
)
def test_what_a_row_about_money_comes_to_is_kept_within_bounds(
    row: TriggerRule, aims: PriceThresholds, expected: int
) -> None:
    [made] = set_price_thresholds([row], aims)

    assert (made.compute_token_threshold(LARGE), compute_min_trigger([made], LARGE), made.active) == (
        expected,
        expected,
        True,
    )


def test_a_small_window_comes_before_the_least_optimum() -> None:
    [row] = set_price_thresholds([TriggerRule(cost_optimal=True)], PriceThresholds(optimum_tokens=5_000))

    assert row.compute_token_threshold(BUDGET) == 6_000
