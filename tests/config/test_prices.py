"""Prices in the configuration: what they come to, and how they are refused."""

from pathlib import Path

import pytest

from compaction_proxy.config.config import Config, get_model_settings
from compaction_proxy.config.loader import load_config
from compaction_proxy.config.sections import TriggerRow
from compaction_proxy.core.cost.price import ModelPrice, PriceTier
from compaction_proxy.core.errors import ConfigError

HOME = {"HOME": "/nowhere"}


def loaded(text: str, folder: Path) -> Config:
    path = folder / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, HOME).config


def refused(text: str, folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded(text, folder)
    return str(caught.value).rpartition("config.yaml:")[2]


def test_what_is_not_said_of_a_model_costs_as_much_as_its_input(tmp_path: Path) -> None:
    config = loaded("models: {a: {prices: {input: 2, output: 8}}, b: {window: 9}}", tmp_path)

    assert get_model_settings(config, "a").prices == ModelPrice((PriceTier(0, 2, 2, 2, 8),), "configuration")
    assert (get_model_settings(config, "b").prices, get_model_settings(config, "c").prices) == (None, None)


def test_a_surcharge_raises_the_price_of_cached_tokens_in_proportion(tmp_path: Path) -> None:
    text = """
models:
  a: {prices: {input: 2, cached: 0.5, output: 8, surcharge: {above_tokens: 900, input: 6}}}
  b:
    prices:
      input: 0
      output: 8
      surcharge: {above_tokens: 9, input: 1, cached: 1, cache_write: 2, output: 9}
"""
    first, second = (get_model_settings(loaded(text, tmp_path), name).prices for name in "ab")

    assert first == ModelPrice((PriceTier(0, 2, 0.5, 2, 8), PriceTier(900, 6, 1.5, 6, 8)), "configuration")
    assert second == ModelPrice((PriceTier(0, 0, 0, 0, 8), PriceTier(9, 1, 1, 2, 9)), "configuration")


@pytest.mark.parametrize(
    ("prices", "problem"),
    [
        ("{output: 1}", "models.a.prices.input: Field required"),
        ("{input: -1, output: 1}", "models.a.prices.input: Input should be greater than or equal to 0"),
        ("{input: .nan, output: 1}", "models.a.prices.input: Input should be greater than or equal to 0"),
        (
            "{input: 1, output: 1.0e+300}",
            "models.a.prices.output: Input should be less than or equal to 1000000",
        ),
        ("{input: 1, output: 1, chached: 1}", "models.a.prices.chached: unknown key, did you mean 'cached'?"),
        (
            "{input: 2, output: 1, surcharge: {above_tokens: 9, input: 2}}",
            "models.a.prices.surcharge: the price of input is 2; it must be higher than 2",
        ),
        (
            "{input: 2, output: 1, surcharge: {above: 9, input: 3}}",
            "models.a.prices.surcharge.above: unknown key",
        ),
    ],
)
def test_a_price_that_cannot_be_is_refused_with_its_place(prices: str, problem: str, tmp_path: Path) -> None:
    assert problem in refused(f"models: {{a: {{prices: {prices}}}}}", tmp_path)


def test_a_row_about_money_may_stand_for_itself_or_beside_others(tmp_path: Path) -> None:
    text = "compaction: {trigger: [{price_tier: true}, {cost_optimal: true, turns: 2, rework_tokens: 0}]}"

    assert loaded(text, tmp_path).compaction.trigger == (
        TriggerRow(price_tier=True),
        TriggerRow(cost_optimal=True, turns=2, rework_tokens=0),
    )


def test_a_condition_that_is_false_is_none(tmp_path: Path) -> None:
    text = "compaction: {trigger: [{tokens: 9, cost_optimal: false}]}"

    assert loaded(text, tmp_path).compaction.trigger == (TriggerRow(tokens=9),)
    assert "a rule must set at least one of tokens" in refused(
        "compaction: {trigger: [{price_tier: false}]}", tmp_path
    )


def test_rework_without_a_condition_that_reckons_with_it_is_refused(tmp_path: Path) -> None:
    text = "compaction: {trigger: [{tokens: 9, rework_tokens: 5}]}"

    assert "compaction.trigger: rework_tokens has an effect only together with cost_optimal" in refused(
        text, tmp_path
    )
