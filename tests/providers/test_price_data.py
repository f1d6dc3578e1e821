"""The shipped table of prices, held against the library that it is written from."""

import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import cache
from importlib.metadata import version
from pathlib import Path

from genai_prices import types
from genai_prices.data import providers
from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.core.cost.price import ModelPrice
from compaction_proxy.core.model_names import normalize_model_name
from compaction_proxy.providers.pricing import find_shipped_price

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCE = f"genai-prices {version('genai-prices')}"
ELSEWHERE = "https://gateway.example.com:443"
MOMENTS = (datetime(2023, 5, 1, 17, tzinfo=UTC), datetime(2026, 11, 18, 11, 6, 40, tzinfo=UTC))
# Hosts of providers whose pattern is not merely one host.
HOSTS = {
    "aws": "bedrock-runtime.eu-west-1.amazonaws.com",
    "azure": "mine.openai.azure.com",
    "cohere": "api.cohere.ai",
    "elevenlabs": "api.eu.residency.elevenlabs.io",
    "google": "generativelanguage.googleapis.com",
    "minimax": "api.minimaxi.com",
    "modal": "mine.modal.run",
    "moonshotai": "api.moonshot.ai",
    "openrouter": "openrouter.ai",
}


def origin_of(provider: types.Provider) -> str:
    """Where the provider is asked, as an origin; some are told apart by the path only."""
    pattern = provider.api_pattern.replace("\\", "")
    return f"https://{HOSTS.get(provider.id) or pattern.split('/')[2].removesuffix('(?:')}:443"


def literals(clause: types.MatchLogic) -> Iterator[str]:
    """The texts that a name is compared with."""
    match clause:
        case types.ClauseOr(clauses) | types.ClauseAnd(clauses):
            for each in clauses:
                yield from literals(each)
        case types.ClauseRegex(pattern):
            yield re.sub(r"\\d\{(\d)\}", lambda digits: "20251211"[: int(digits[1])], pattern.strip("^$"))
        case _:
            yield from vars(clause).values()


@cache
def find_entry(name: str, origin: str) -> types.ModelInfo | None:
    """The library's model: of the provider at this origin, or else of the one that the name tells."""
    bare, address = normalize_model_name(name), origin.replace(":443", "/")
    provider = next((each for each in providers if re.match(each.api_pattern, address)), None)
    names = [bare] if provider is None else [name, bare]
    named = name.lower().rpartition("/")[0].rpartition("/")[2]
    provider = provider or next((each for each in providers if each.id == named), None)
    makers = (each for each in providers if each.model_match and each.model_match.is_match(bare))
    provider = provider or next(makers, None)
    found = (provider.find_model(each, all_providers=providers) for each in names) if provider else ()
    return next((each for each in found if each is not None), None)


def moments_of(entry: types.ModelInfo) -> Iterator[datetime]:
    """Times just before and just after each change of the model's prices, and some others."""
    yield from MOMENTS
    for each in entry.prices if isinstance(entry.prices, list) else ():
        match each.constraint:
            case types.StartDateConstraint(day):
                changes = [datetime(day.year, day.month, day.day, tzinfo=UTC)]
            case types.TimeOfDateConstraint(start, end):
                changes = [datetime.combine(MOMENTS[1], time) for time in (start, end)]
            case _:
                changes = []
        for change in changes:
            yield from (change - timedelta(seconds=1), change)


def dollars(price: Decimal | types.TieredPrices | None, tokens: int) -> float:
    """What the library takes for a million tokens of a request with so many tokens of input."""
    return float(types.calc_unit_price(price, 1, tokens, 1))


def assert_same_price(name: str, origin: str) -> None:
    entry = find_entry(name, origin)
    if entry is None:
        assert find_shipped_price(name, origin, MOMENTS[1].timestamp()) is None
        return
    for moment in moments_of(entry):
        assert_same(find_shipped_price(name, origin, moment.timestamp()), entry, moment)


def assert_same(found: ModelPrice | None, entry: types.ModelInfo, moment: datetime) -> None:
    prices = entry.get_prices(moment)
    if prices.input_mtok is None:
        assert found is None
        return
    assert found is not None
    cached, written = (
        prices.input_mtok if price is None else price
        for price in (prices.cache_read_mtok, prices.cache_write_mtok)
    )
    used = (prices.input_mtok, cached, written, prices.output_mtok)
    starts = {tier.start for each in used if isinstance(each, types.TieredPrices) for tier in each.tiers}
    expected = [(start, *(dollars(each, start + 1) for each in used)) for start in sorted({0, *starts})]
    listed = entry.prices if isinstance(entry.prices, list) else []
    days = [
        each.constraint.start_date.isoformat()
        for each in listed
        if isinstance(each.constraint, types.StartDateConstraint) and each.constraint.active(moment)
    ]
    assert (list(map(tuple, found.tiers)), found.source, found.date) == (
        expected,
        SOURCE,
        max(days, default=""),
    )


def test_every_model_has_the_library_s_prices_at_all_times() -> None:
    reached = set()
    for provider in providers:
        origin = origin_of(provider)
        reached |= {provider.id} if re.match(provider.api_pattern, origin.replace(":443", "/")) else set()
        for model in provider.models:
            for name in {model.id, *literals(model.match)}:
                assert_same_price(name, origin)
            for name in (model.id, f"{provider.id}/{model.id}", f"router/{provider.id}/{model.id.upper()}"):
                assert_same_price(name, ELSEWHERE)
    assert {provider.id for provider in providers if provider.id not in reached} == {
        "cloudflare",
        "databricks",
        *(provider.id for provider in providers if provider.id.startswith("huggingface_")),
    }


NAMES = st.builds(
    "{}{}{}".format,
    st.sampled_from(
        ["", "openai/", "x/anthropic/", "google/", "azure/", "ft:", "us.anthropic.", "models/", "x"]
    ),
    st.sampled_from([text for each in providers for model in each.models for text in literals(model.match)]),
    st.sampled_from(["", "-latest", "-20251211", "-2025-12-11", "-20259999", ":free", "@001", "-mini", "1"]),
)


@given(NAMES, st.sampled_from([ELSEWHERE, *map(origin_of, providers)]))
def test_any_other_spelling_has_the_library_s_prices(name: str, origin: str) -> None:
    assert_same_price(name, origin)


def test_the_file_is_what_the_script_writes() -> None:
    ended = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "refresh_prices.py"), "--check"], check=False
    )
    assert ended.returncode == 0, "run `python tools/refresh_prices.py`"
