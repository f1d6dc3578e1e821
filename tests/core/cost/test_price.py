"""Prices: whole requests fall into tiers by their input."""

from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.core.cost.price import ModelPrice, PriceTier

FLAT = ModelPrice((PriceTier(0, 2.0, 0.5, 2.5, 8.0),), "test")
TIERED = ModelPrice((PriceTier(0, 2.0, 0.5, 2.5, 8.0), PriceTier(1_000, 4.0, 1.0, 5.0, 12.0)), "test")
TOKENS = st.integers(0, 3_000)


def test_a_request_costs_its_tokens_by_kind() -> None:
    cost = FLAT.compute_cost(1_000, cached_tokens=600, completion_tokens=100)

    assert round(cost * 1_000_000, 6) == 600 * 0.5 + 400 * 2.0 + 100 * 8.0


def test_above_a_surcharge_every_token_costs_more() -> None:
    below, above = TIERED.compute_cost(1_000, 500, 10), TIERED.compute_cost(1_001, 500, 10)

    assert round(below * 1_000_000, 6) == 500 * 0.5 + 500 * 2 + 10 * 8
    assert round(above * 1_000_000, 6) == 500 * 1.0 + 501 * 4 + 10 * 12


def test_a_surcharge_begins_where_input_first_costs_more() -> None:
    cheaper_output = ModelPrice(
        (PriceTier(0, 2, 1, 2, 8), PriceTier(500, 2, 1, 2, 6), PriceTier(900, 3, 1, 2, 8)), "test"
    )

    assert [each.surcharge_tokens for each in (FLAT, TIERED, cheaper_output)] == [None, 1_000, 900]


@given(TOKENS, TOKENS, TOKENS)
def test_no_count_makes_a_request_cheaper_than_all_of_it_cached_or_dearer_than_none(
    prompt: int, cached: int, completion: int
) -> None:
    cost = TIERED.compute_cost(prompt, cached, completion)

    assert (
        TIERED.compute_cost(prompt, prompt, completion) <= cost <= TIERED.compute_cost(prompt, 0, completion)
    )
