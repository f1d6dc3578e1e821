"""What an exchange has saved whose answer went on."""

import pytest

from compaction_proxy.core.cost.price import ModelPrice, PriceTier
from compaction_proxy.core.cost.savings import compute_saving, compute_single_answer_saving
from compaction_proxy.core.exchange import Exchange

PRICE = ModelPrice((PriceTier(0, 2.0, 1.0, 2.0, 10.0),), "test")
ALONE = Exchange(
    at=1.0, model="m", status="reused", code=200, strategy="anchored", round=1, tokens_before=3_000,
    tokens_after=1_000, prompt_tokens=1_000, completion_tokens=50, cached_tokens=400,
)  # fmt: skip


def test_an_exchange_of_one_answer_saves_what_it_did() -> None:
    assert compute_saving(ALONE, (), None, PRICE) == compute_single_answer_saving(ALONE, (), None, PRICE)


def test_later_answers_are_paid_for_out_of_what_was_saved() -> None:
    went_on = ALONE._replace(
        prompt_tokens=2_100,
        cached_tokens=1_400,
        recalls=1,
        recall_prompt_tokens=1_100,
        recall_cached_tokens=1_000,
    )
    more = (100 * 2.0 + 1_000 * 1.0) / 1_000_000
    (alone, known), (made, learned) = (compute_saving(each, (), None, PRICE) for each in (ALONE, went_on))
    assert alone is not None
    assert made == pytest.approx((alone.cost + more, alone.gross - more, alone.cache_loss, alone.net - more))
    assert learned == known


def test_without_a_price_nothing_is_known() -> None:
    went_on = ALONE._replace(prompt_tokens=2_100, recalls=1, recall_prompt_tokens=1_100)
    assert compute_saving(went_on, (), None, None)[0] is None
