"""The table of prices, as far as its own figures do not matter: they change with each of its versions."""

from importlib.metadata import version

import pytest

from compaction_proxy.core.cost.price import ModelPrice
from compaction_proxy.providers.price_table import find_price

OPENAI = "https://api.openai.com:443"
ELSEWHERE = "http://127.0.0.1:4000"
AT = 1_795_000_000.0  # 2026-11-18


def known(found: ModelPrice | None) -> ModelPrice:
    assert found is not None
    return found


def test_a_model_of_a_known_provider_has_its_prices() -> None:
    found = known(find_price("gpt-4o", OPENAI, AT))
    [tier] = found.tiers

    assert 0 < tier.cached < tier.input < tier.output
    assert (tier.above, found.source) == (0, f"genai-prices {version('genai-prices')}")


@pytest.mark.parametrize("name", ["gpt-4o", "openai/gpt-4o", "router/openai/GPT-4o"])
def test_behind_an_unknown_address_the_name_tells_the_provider(name: str) -> None:
    assert find_price(name, ELSEWHERE, AT) == find_price("gpt-4o", OPENAI, AT)


@pytest.mark.parametrize(
    ("name", "origin"),
    [
        ("my-own-model", OPENAI),
        ("my-own-model", ELSEWHERE),
        ("gpt-4o", "https://api.anthropic.com:443"),
        ("", ELSEWHERE),
        ("/" * 10_000, ELSEWHERE),
    ],
)
def test_what_is_in_no_table_has_no_price(name: str, origin: str) -> None:
    assert find_price(name, origin, AT) is None


def test_prices_by_size_become_tiers() -> None:
    found = known(find_price("gpt-5.4", OPENAI, AT))

    assert found.surcharge_tokens == found.tiers[1].above == 272_000
    assert found.compute_cost(272_001) > 1.5 * found.compute_cost(272_000)


def test_a_price_holds_from_its_day_on() -> None:
    before, after = (known(find_price("gpt-5.6-sol", OPENAI, at)) for at in (1_785_000_000.0, AT))

    assert (before.date, after.date) == ("", "2026-08-21")
    assert after.tiers[0].input < before.tiers[0].input
