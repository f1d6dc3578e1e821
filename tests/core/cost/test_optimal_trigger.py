"""The size at which a conversation costs least, held against a conversation that is played through."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.core.cost.optimal_trigger import GrowthProfile, OptimalTrigger, compute_optimal_trigger
from compaction_proxy.core.cost.price import ModelPrice, PriceTier

REQUESTS, GROWTH, FIXED, AFTER, SUMMARY = 200, 2_000, 8_000, 20_000, 2_000
CHEAP = ModelPrice((PriceTier(0, 0.1, 0.1, 0.1, 0.5),), "test")
# A conversation of 200 requests at triggers from 32,000 to 160,000 costs least near T*: c, w, L, T*.
CASES = [
    (0.02, 1.0, 0, 71_000),
    (0.1, 1.0, 0, 42_000),
    (0.1, 1.25, 0, 44_000),
    (0.1, 1.25, 40_000, 67_000),
    (0.25, 1.0, 40_000, 48_000),
    (0.5, 1.0, 40_000, 39_000),
]


def price(cached: float, written: float) -> ModelPrice:
    return ModelPrice((PriceTier(0, 1.0, cached, written, 5.0),), "test")


def found(made: OptimalTrigger | None) -> OptimalTrigger:
    assert made is not None
    return made


def played(trigger: int, cached: float, written: float, rework: int, share: float = 0.0) -> float:
    """What a conversation costs that is compacted at a trigger, request by request, in input tokens."""
    cost, size, after = 0.0, float(FIXED), share * trigger or AFTER
    for _ in range(REQUESTS):
        known, size = size, size + GROWTH
        if size >= trigger:
            removed, size, known = size - after, after, FIXED
            cost += 0.1 * removed + 0.1 * 5 * SUMMARY + rework
        cost += cached * known + written * (size - known)
    return cost


@pytest.mark.parametrize(("cached", "written", "rework", "expected"), CASES)
def test_nothing_that_is_played_costs_much_less_than_the_optimum(
    cached: float, written: float, rework: int, expected: int
) -> None:
    growing = GrowthProfile(GROWTH, 1.0, FIXED, AFTER, 0.0, SUMMARY)
    made = found(compute_optimal_trigger(price(cached, written), growing, CHEAP, rework))
    least = min(played(trigger, cached, written, rework) for trigger in range(24_000, 160_000, 1_000))

    assert made.trigger == expected
    assert played(made.trigger, cached, written, rework) <= 1.05 * least


@pytest.mark.parametrize(("cached", "written", "rework"), [case[:3] for case in CASES if case[2]])
def test_what_a_round_leaves_may_be_a_share_of_the_trigger(
    cached: float, written: float, rework: int
) -> None:
    growing = GrowthProfile(GROWTH, 1.0, FIXED, 0, 0.4, SUMMARY)
    made = found(compute_optimal_trigger(price(cached, written), growing, CHEAP, rework))
    least = min(played(trigger, cached, written, rework, 0.4) for trigger in range(24_000, 160_000, 1_000))

    assert played(made.trigger, cached, written, rework, 0.4) <= 1.05 * least


def test_the_numbers_that_led_to_it_are_told() -> None:
    made = found(
        compute_optimal_trigger(
            price(0.1, 1.25), GrowthProfile(2_000, 1.0, 8_000, 20_000, 0.0, 2_000), CHEAP, 40_000
        )
    )

    assert made.basis == {
        "growth": 2_000,
        "cached_share": 1.0,
        "fixed": 8_000,
        "after": 20_000,
        "share": 0.0,
        "summary": 2_000,
        "cached_price": 0.1,
        "written_price": 1.25,
        "broken_cost": 13_800.0,
        "summary_cost": 1_000.0,
        "rework_cost": 40_000,
        "optimum": 66_818.7996,
    }


def test_what_is_seldom_found_cached_is_removed_earlier() -> None:
    sizes = [
        found(
            compute_optimal_trigger(
                price(0.1, 1.25), GrowthProfile(GROWTH, share, FIXED, AFTER, 0.0, 0), None, 0
            )
        ).trigger
        for share in (1.0, 0.9, 0.5)
    ]

    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 3


@pytest.mark.parametrize(
    ("tier", "growth"),
    [(PriceTier(0, 0, 0, 0, 5), 100.0), (PriceTier(0, 1, 0, 1, 5), 100.0), (PriceTier(0, 1, 0.1, 1, 5), 0.0)],
)
def test_where_nothing_grows_or_costs_there_is_no_such_size(tier: PriceTier, growth: float) -> None:
    assert (
        compute_optimal_trigger(ModelPrice((tier,), "test"), GrowthProfile(growth, 1.0, 0, 9, 0.0, 0), None)
        is None
    )


@given(st.integers(0, 200_000), st.integers(1, 20_000), st.floats(0, 1), st.sampled_from([0.0, 0.4, 0.5]))
def test_a_round_at_the_optimum_removes_enough(after: int, growth: int, hit: float, share: float) -> None:
    growing = GrowthProfile(growth, hit, 0, after, share, 0)
    made = found(compute_optimal_trigger(price(0.1, 1.25), growing, None, 9_000))

    assert made.trigger - made.basis["after"] >= max(8_000, 0.4 * made.trigger) - 1_000
