"""Finds prices by model name in the table of genai-prices (Pydantic), without any network access.

Importing this module takes half a second and 80 MB. The server therefore never imports it: `price_process`
runs it as a separate program.
"""

import json
import os
import re
import signal
import sys
from datetime import UTC, datetime
from decimal import Decimal
from importlib.metadata import version

from genai_prices import types
from genai_prices.data import providers

from compaction_proxy.core.cost.price import ModelPrice, PriceTier
from compaction_proxy.core.model_names import normalize_model_name

LIBRARY = "genai-prices"
SOURCE = f"{LIBRARY} {version(LIBRARY)}"
# The program is ended after this many seconds, even if it has not finished.
TIMEOUT_S = 30
# The program's niceness, so that other work on the machine has priority.
NICENESS = 10
_NAME_CHARACTERS = 200  # only the end of a longer name is looked up, because clients choose the names
_DEFAULT_PORTS = {"https": ":443", "http": ":80"}


def find_price(model: str, origin: str, at: float) -> ModelPrice | None:
    """Returns a model's price; see `compaction_proxy.providers.pricing.PriceTable.find_prices`.

    Does not use the library's own search, because that search remembers every name forever.
    """
    entry = _find_model(model[-_NAME_CHARACTERS:], origin)
    if entry is None:
        return None
    moment = datetime.fromtimestamp(at, UTC)
    return _convert_price(entry.get_prices(moment), _find_start_date(entry, moment))


def main() -> None:
    """Looks up a price for each line of standard input; `price_process.PriceProcess` describes the lines."""
    os.nice(NICENESS)
    signal.alarm(TIMEOUT_S)
    for line in sys.stdin:
        price = find_price(*json.loads(line))
        fields = price and {"tiers": price.tiers, "source": price.source, "date": price.date}
        sys.stdout.write(f"{json.dumps(fields)}\n")


def _find_model(model: str, origin: str) -> types.ModelInfo | None:
    """Finds a model's entry in the list of the provider at this origin.

    If the table has no provider for this origin, the model name determines the provider. Returns None if the
    provider does not list the model, because another provider's price would be wrong.
    """
    bare = normalize_model_name(model)
    address = f"{origin.removesuffix(_DEFAULT_PORTS.get(origin.partition(':')[0], ''))}/"
    provider = next((each for each in providers if re.match(each.api_pattern, address)), None)
    if provider is None:
        provider = _find_named_provider(model.lower()) or _find_maker(bare)
        return provider.find_model(bare, all_providers=providers) if provider else None
    listed = (provider.find_model(name, all_providers=providers) for name in (model, bare))
    return next((entry for entry in listed if entry is not None), None)


def _find_named_provider(model: str) -> types.Provider | None:
    """Finds the provider named before the last slash of a model name, as in `openai/gpt-4o`."""
    named = model.rpartition("/")[0].rpartition("/")[2]
    return next((each for each in providers if each.id == named), None)


def _find_maker(bare: str) -> types.Provider | None:
    """Finds the provider whose pattern of model names matches `bare`: usually the maker of the model."""
    return next((each for each in providers if each.model_match and each.model_match.is_match(bare)), None)


def _find_start_date(model: types.ModelInfo, moment: datetime) -> str:
    """Returns the day since which the price at `moment` is valid; empty if the table names none."""
    if not isinstance(model.prices, list):
        return ""
    begun = (each.constraint for each in model.prices if each.constraint and each.constraint.active(moment))
    starts = [each.start_date for each in begun if hasattr(each, "start_date")]
    return max(starts).isoformat() if starts else ""


def _convert_price(prices: types.ModelPrice, since: str) -> ModelPrice | None:
    """Converts the library's prices. Returns None if there is no price for input tokens."""
    held = {name: getattr(prices, name, None) for name in ("input_mtok", "output_mtok")}
    if held["input_mtok"] is None:
        return None
    held["cache_read_mtok"] = getattr(prices, "cache_read_mtok", None)
    held["cache_write_mtok"] = getattr(prices, "cache_write_mtok", None)
    starts = sorted({0, *(tier.start for each in held.values() for tier in getattr(each, "tiers", ()))})
    return ModelPrice(tuple(_build_tier(held, start) for start in starts), SOURCE, since)


def _build_tier(prices: dict[str, Decimal | types.TieredPrices | None], above: int) -> PriceTier:
    """Builds the price tier for requests with more than `above` tokens.

    If the table has no price for reading or writing the prompt cache, the input price is used.
    """
    uncached = _read_dollars(prices["input_mtok"], above) or 0.0
    cached, written = (_read_dollars(prices[f"cache_{name}_mtok"], above) for name in ("read", "write"))
    return PriceTier(
        above=above,
        input=uncached,
        cached=uncached if cached is None else cached,
        cache_write=uncached if written is None else written,
        output=_read_dollars(prices["output_mtok"], above) or 0.0,
    )


def _read_dollars(price: Decimal | types.TieredPrices | None, above: int) -> float | None:
    """Returns the price for requests with more than `above` tokens, in dollars per million tokens."""
    if price is None or isinstance(price, Decimal):
        return None if price is None else float(price)
    reached = [tier.price for tier in price.tiers if tier.start <= above]
    return float(reached[-1] if reached else price.base)
