"""Prices as everybody asks for them: configured, or from the shipped table."""

import subprocess
import sys
from datetime import UTC, datetime

import pytest

from compaction_proxy.config.config import Config
from compaction_proxy.core.cost.price import ModelPrice, PriceTier
from compaction_proxy.providers.pricing import (
    MAX_CACHED_PRICES,
    MAX_NAME_CHARACTERS,
    PriceBook,
    find_shipped_price,
    load_price_table,
    uses_list_prices,
)

OPENAI = "https://api.openai.com:443"
DEEPSEEK = "https://api.deepseek.com:443"
ELSEWHERE = "https://gateway.example.com:443"
AT = 1_795_000_000.0  # 2026-11-18
MINE = {"models": {"gpt-4o": {"prices": {"input": 7, "output": 7}}}}


def known(found: ModelPrice | None) -> ModelPrice:
    assert found is not None
    return found


def test_a_model_of_a_known_provider_has_its_prices() -> None:
    found = known(PriceBook(Config()).get_price("gpt-4o", OPENAI))
    [tier] = found.tiers

    assert 0 < tier.cached < tier.input < tier.output
    assert (tier.above, found.source) == (0, load_price_table().source)


@pytest.mark.parametrize("name", ["gpt-4o", "openai/gpt-4o", "router/openai/GPT-4o", "gpt-4o-20240806"])
def test_behind_an_unknown_address_the_name_tells_the_provider(name: str) -> None:
    assert find_shipped_price(name, ELSEWHERE, AT) == known(find_shipped_price("gpt-4o", OPENAI, AT))


@pytest.mark.parametrize(
    ("name", "origin"),
    [
        ("my-own-model", OPENAI),
        ("my-own-model", ELSEWHERE),
        ("my own\nmödel", ELSEWHERE),
        ("gpt-4o", "https://api.anthropic.com:443"),
        ("gpt-5-mini-20250231", OPENAI),  # no day
        ("", ELSEWHERE),
        ("/" * 10_000, ELSEWHERE),
    ],
)
def test_what_is_in_no_table_has_no_price(name: str, origin: str) -> None:
    assert PriceBook(Config()).get_price(name, origin) is None


def test_prices_by_size_become_tiers() -> None:
    found = known(find_shipped_price("gpt-5.4", OPENAI, AT))

    assert found.surcharge_tokens == found.tiers[1].above == 272_000
    assert found.compute_cost(272_001) > 1.5 * found.compute_cost(272_000)


def test_a_price_holds_from_its_day_on() -> None:
    before, after = (known(find_shipped_price("gpt-5.6-sol", OPENAI, at)) for at in (1_785_000_000.0, AT))

    assert (before.date, after.date) == ("", "2026-08-21")
    assert after.tiers[0].input < before.tiers[0].input


def test_a_price_that_changes_at_half_past_changes_while_the_server_runs() -> None:
    moments = [datetime(2026, 11, 18, 16, minute, 59, tzinfo=UTC).timestamp() for minute in (0, 29, 30, 59)]
    times = list(moments)
    pricing = PriceBook(Config(), now=lambda: times.pop(0))
    found = [pricing.get_price("deepseek-chat", DEEPSEEK) for _ in moments]

    assert found == [find_shipped_price("deepseek-chat", DEEPSEEK, at) for at in moments]
    assert found[0] == found[1] != found[2] == found[3]


def test_a_configured_price_goes_before_the_table_until_it_is_gone() -> None:
    pricing = PriceBook(Config.model_validate(MINE))
    configured = pricing.get_price("gpt-4o", OPENAI)
    pricing.reload(Config())

    assert configured == ModelPrice((PriceTier(0, 7, 7, 7, 7),), "configuration")
    assert known(pricing.get_price("gpt-4o", OPENAI)).source == load_price_table().source


@pytest.mark.parametrize(
    ("origin", "local"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://[::1]:8000", True),
        ("http://10.1.2.3:80", True),
        ("http://vllm:8000", True),
        ("http://host.docker.internal:11434", True),
        ("https://8.8.8.8:443", False),
        (ELSEWHERE, False),
    ],
)
def test_of_a_server_of_one_s_own_the_table_is_not_asked(origin: str, local: bool) -> None:  # noqa: FBT001 - a parameter
    assert (PriceBook(Config()).get_price("gpt-4o", origin) is None) == local


def test_what_is_configured_holds_for_a_server_of_one_s_own_too() -> None:
    found = PriceBook(Config.model_validate(MINE)).get_price("gpt-4o", "http://127.0.0.1:8000")

    assert known(found).compute_cost(1_000_000) == 7.0


GATEWAY = "http://gateway:4000"


@pytest.mark.parametrize(
    ("origin", "has_price"), [(GATEWAY, True), ("http://messages:80", True), ("http://summaries:80", False)]
)
def test_list_prices_hold_for_the_configured_upstreams_only(origin: str, *, has_price: bool) -> None:
    upstream = {
        "base_url": f"{GATEWAY}/v1",
        "prices": "list",
        "wires": {"messages": {"base_url": "http://messages"}},
    }
    found = PriceBook(Config.model_validate({"upstream": upstream})).get_price("gpt-4o", origin)

    assert found == (find_shipped_price("gpt-4o", OPENAI, AT) if has_price else None)


def test_a_configured_price_goes_before_a_list_price_until_a_reload() -> None:
    gateway = {"upstream": {"base_url": GATEWAY, "prices": "list"}}
    pricing = PriceBook(Config.model_validate({**MINE, **gateway}))
    assert known(pricing.get_price("gpt-4o", GATEWAY)).source == "configuration"
    pricing.reload(Config.model_validate({"upstream": {"base_url": GATEWAY}}))
    assert pricing.get_price("gpt-4o", GATEWAY) is None


def test_names_without_end_are_kept_in_bounds() -> None:
    """Clients choose them."""
    find_shipped_price.cache_clear()
    pricing = PriceBook(Config(), now=lambda: AT)
    for start in ("a", "b"):
        pricing.get_price(f"{start * 10_000}{'/' * MAX_NAME_CHARACTERS}", ELSEWHERE)
    assert find_shipped_price.cache_info().currsize == 1

    for number in range(MAX_CACHED_PRICES + 9):
        pricing.get_price(f"m{number}", ELSEWHERE)
    assert find_shipped_price.cache_info().currsize == MAX_CACHED_PRICES


def test_a_cost_is_of_the_provider_that_the_address_belongs_to() -> None:
    pricing = PriceBook(Config())
    price = known(pricing.get_price("gpt-4o", OPENAI))

    assert pricing.compute_cost("gpt-4o", "https://api.openai.com/v1", 9, 3, 2) == price.compute_cost(9, 3, 2)
    assert pricing.compute_cost("gpt-4o", "http://127.0.0.1:8000/v1", 9, 3, 2) is None


def test_a_server_that_prices_nothing_does_not_load_the_table() -> None:
    program = (
        "import compaction_proxy.app\n"
        "from compaction_proxy.providers.pricing import load_price_table\n"
        "print(load_price_table.cache_info().currsize)"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "0\n"


@pytest.mark.parametrize(
    ("upstream", "used"),
    [
        ({}, True),
        ({"base_url": "http://127.0.0.1:9000/v1"}, False),
        ({"base_url": "http://127.0.0.1:9000/v1", "prices": "list"}, True),
        (
            {
                "base_url": "http://127.0.0.1:9000/v1",
                "wires": {"messages": {"base_url": "https://api.anthropic.com/v1"}},
            },
            True,
        ),
    ],
)
def test_list_prices_are_used_for_an_upstream_elsewhere_or_where_they_are_asked_for(
    upstream: dict[str, object], *, used: bool
) -> None:
    assert uses_list_prices(Config.model_validate({"upstream": upstream})) is used
