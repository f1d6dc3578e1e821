"""Sizing a request by what its provider counted of the one before."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.providers.calibration import MIN_RATIO, Calibration
from compaction_proxy.providers.usage_baseline import (
    DIFFERENCE_MARGIN,
    UsageBaseline,
    build_baseline,
    build_baseline_key,
    from_fields,
    matches_request,
    predict_tokens,
    predict_upper_bound,
    select_deepest_baseline,
    to_fields,
)

PLACE = build_baseline_key("https://up.test:443", "m")
PREFIXES = tuple(bytes([number]) * 32 for number in range(1, 6))
ANCHOR = UsageBaseline(PREFIXES[1], 2, PLACE, 10_000, 12_100)
EVEN = Calibration(0.0, 0.02, 5)

estimates = st.integers(1, 10**7)
anchors = st.builds(
    lambda estimate, ratio: UsageBaseline(PREFIXES[0], 1, PLACE, estimate, max(1, round(estimate * ratio))),
    estimates,
    st.floats(0.3, 4.0),
)


def test_what_was_added_counts_at_the_mean_of_both_ratios() -> None:
    assert predict_tokens(ANCHOR, 11_000, EVEN) == 12_100 + 1_100
    assert predict_upper_bound(ANCHOR, 11_000, EVEN) == 12_100 + math.ceil(1_100 * DIFFERENCE_MARGIN)


def test_what_was_taken_away_takes_less_off_the_bound() -> None:
    assert predict_tokens(ANCHOR, 9_000, EVEN) == 12_100 - 1_100
    assert predict_upper_bound(ANCHOR, 9_000, EVEN) == 12_100 - math.floor(1_100 / DIFFERENCE_MARGIN)


@given(anchors, estimates, st.floats(-1.2, 1.3))
def test_a_prediction_is_no_less_than_any_provider_counts_nor_above_its_bound(
    anchor: UsageBaseline, now: int, mean: float
) -> None:
    least, calibration = math.floor(now * MIN_RATIO), Calibration(mean, 0.02, 5)
    assert least <= predict_tokens(anchor, now, calibration) <= predict_upper_bound(anchor, now, calibration)


@given(anchors, st.floats(-1.2, 1.3))
def test_the_same_request_again_is_as_large_as_it_was(anchor: UsageBaseline, mean: float) -> None:
    assert predict_tokens(anchor, anchor.estimate, Calibration(mean, 0.02, 5)) == anchor.actual


@given(anchors, estimates, estimates)
def test_a_larger_request_is_predicted_no_smaller(anchor: UsageBaseline, one: int, other: int) -> None:
    small, large = sorted((one, other))
    assert predict_tokens(anchor, small, EVEN) <= predict_tokens(anchor, large, EVEN)
    assert predict_upper_bound(anchor, small, EVEN) <= predict_upper_bound(anchor, large, EVEN)


@pytest.mark.parametrize(
    ("anchor", "prefixes", "place"),
    [
        (ANCHOR, (PREFIXES[0], PREFIXES[2]), PLACE),  # edited before its end
        (ANCHOR, PREFIXES[:1], PLACE),  # a shorter list
        (ANCHOR, PREFIXES, build_baseline_key("https://up.test:443", "m", b"\x01" * 64)),  # compacted since
        (ANCHOR, PREFIXES, build_baseline_key("https://up.test:443", "other")),
        (ANCHOR, PREFIXES, build_baseline_key("https://other.test:443", "m")),
        (replace(ANCHOR, length=0), PREFIXES, PLACE),
    ],
)
def test_an_anchor_does_not_stand_for_something_else(
    anchor: UsageBaseline, prefixes: tuple[bytes, ...], place: bytes
) -> None:
    assert not matches_request(anchor, prefixes, place)


def test_the_anchor_that_covers_most_is_taken_and_the_newest_of_equal_ones() -> None:
    longer = UsageBaseline(PREFIXES[3], 4, PLACE, 20_000, 24_000)
    again = replace(longer, actual=25_000)
    edited = UsageBaseline(b"\x09" * 32, 5, PLACE, 30_000, 36_000)
    assert select_deepest_baseline([ANCHOR, longer, again, edited], PREFIXES, PLACE) == again
    assert select_deepest_baseline([edited], PREFIXES, PLACE) is None


def test_an_answered_request_becomes_an_anchor() -> None:
    assert build_baseline(PREFIXES[:2], PLACE, 10_000, 12_100) == ANCHOR


@pytest.mark.parametrize(
    ("prefixes", "estimate", "actual"),
    [
        ((), 1_000, 1_000),
        (PREFIXES, 0, 1_000),
        (PREFIXES, 199, 199),
        (PREFIXES, 1_000, 299),
        (PREFIXES, 1_000, 4_001),
    ],
)
def test_a_count_that_says_nothing_is_no_anchor(
    prefixes: tuple[bytes, ...], estimate: int, actual: int
) -> None:
    assert build_baseline(prefixes, PLACE, estimate, actual) is None


@given(st.lists(anchors, max_size=4))
def test_stored_anchors_are_read_as_they_were(given_: list[UsageBaseline]) -> None:
    assert from_fields({"anchors": [to_fields(anchor) for anchor in given_]}) == tuple(given_)


def test_what_is_no_anchor_of_ours_is_left_out() -> None:
    odd = [None, 7, [], ["zz", 1, "aa", 1, 1], ["aa", 0, "aa", 1, 1], ["aa", 1, "aa", None, 1], {"a": 1}]
    assert from_fields({"anchors": [*odd, to_fields(ANCHOR)]}) == (ANCHOR,)
    assert [from_fields(fields) for fields in (None, {}, {"anchors": 3})] == [(), (), ()]
