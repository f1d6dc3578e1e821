"""Prices by model name, from the table in genai-prices (Pydantic). It is never refreshed over the network.

Importing this takes half a second and 80 MB, so that the server does not: `price_process` has it run as a
program of its own.
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
# After so long the program ends, whatever it does and whoever waits for it, in seconds.
LIMIT_S = 30
# How much everything else that the machine has to do goes before.
NICENESS = 10
_NAME_CHARACTERS = 200  # a name is the client's to choose
_DEFAULT_PORTS = {"https": ":443", "http": ":80"}


def find_price(model: str, origin: str, at: float) -> ModelPrice | None:
    """What a model costs; see `compaction_proxy.providers.pricing.PriceTable`.

    The library's own search remembers every name that it was ever asked for, so it is not used.
    """
    found = _find_model(model[-_NAME_CHARACTERS:], origin)
    if found is None:
        return None
    moment = datetime.fromtimestamp(at, UTC)
    return _convert_price(found.get_prices(moment), _find_start_date(found, moment))


def main() -> None:
    """Write a line for each line of standard input; `price_process` says what they look like."""
    os.nice(NICENESS)
    signal.alarm(LIMIT_S)
    for line in sys.stdin:
        found = find_price(*json.loads(line))
        told = found and {"tiers": found.tiers, "source": found.source, "date": found.date}
        sys.stdout.write(f"{json.dumps(told)}\n")


def _find_model(model: str, origin: str) -> types.ModelInfo | None:
    """The entry of a model: of the provider whose address this is, else of the one that its name tells.

    A provider that is known but does not list the model says nothing: another one's price is not its own.
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
    """The provider that stands before a model's name, as in `openai/gpt-4o`."""
    named = model.rpartition("/")[0].rpartition("/")[2]
    return next((each for each in providers if each.id == named), None)


def _find_maker(bare: str) -> types.Provider | None:
    """The provider that makes models of such names."""
    return next((each for each in providers if each.model_match and each.model_match.is_match(bare)), None)


def _find_start_date(model: types.ModelInfo, moment: datetime) -> str:
    """The day from which on the price holds, where the table names one."""
    if not isinstance(model.prices, list):
        return ""
    begun = (each.constraint for each in model.prices if each.constraint and each.constraint.active(moment))
    starts = [each.start_date for each in begun if hasattr(each, "start_date")]
    return max(starts).isoformat() if starts else ""


def _convert_price(prices: types.ModelPrice, since: str) -> ModelPrice | None:
    """The table's prices as ours; None where it has none for tokens of text."""
    held = {name: getattr(prices, name, None) for name in ("input_mtok", "output_mtok")}
    if held["input_mtok"] is None:
        return None
    held["cache_read_mtok"] = getattr(prices, "cache_read_mtok", None)
    held["cache_write_mtok"] = getattr(prices, "cache_write_mtok", None)
    starts = sorted({0, *(tier.start for each in held.values() for tier in getattr(each, "tiers", ()))})
    return ModelPrice(tuple(_build_tier(held, start) for start in starts), SOURCE, since)


def _build_tier(prices: dict[str, Decimal | types.TieredPrices | None], above: int) -> PriceTier:
    """The prices of requests with more than so many tokens; what has none of its own costs the input's."""
    asked = _read_dollars(prices["input_mtok"], above) or 0.0
    cached, written = (_read_dollars(prices[f"cache_{name}_mtok"], above) for name in ("read", "write"))
    return PriceTier(
        above=above,
        input=asked,
        cached=asked if cached is None else cached,
        cache_write=asked if written is None else written,
        output=_read_dollars(prices["output_mtok"], above) or 0.0,
    )


def _read_dollars(price: Decimal | types.TieredPrices | None, above: int) -> float | None:
    """A price of requests with more than so many tokens, in dollars per million tokens."""
    if price is None or isinstance(price, Decimal):
        return None if price is None else float(price)
    reached = [tier.price for tier in price.tiers if tier.start <= above]
    return float(reached[-1] if reached else price.base)
