"""Writes `data/prices.json` of the package from the installed version of `genai-prices`.

    python tools/refresh_prices.py [--check]

The library takes 80 MB of memory. The file holds only what `compaction_proxy.providers.pricing` looks up.
"""

import json
import sys
from collections.abc import Iterator
from datetime import UTC, date, datetime, time
from decimal import Decimal
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

from genai_prices import types
from genai_prices.data import providers

from compaction_proxy.providers.pricing import PRICE_PERIOD_S

TARGET = Path(__file__).resolve().parent.parent / "proxy" / "compaction_proxy" / "data" / "prices.json"
LIBRARY = "genai-prices"
TOKEN_PRICES = ("input_mtok", "cache_read_mtok", "cache_write_mtok", "output_mtok")
OPERATORS = {"equals": "=", "starts_with": "^", "ends_with": "$", "contains": "*"}

Price: TypeAlias = Decimal | types.TieredPrices | None
# Fields of a record of the package, as JSON.
Fields: TypeAlias = list[Any]


def build_table() -> dict[str, Any]:
    """Builds the table, in the form that `load_price_table` of the package reads."""
    known = {provider.id for provider in providers}
    return {
        "source": f"{LIBRARY} {version(LIBRARY)}",
        "providers": {
            provider.id: {
                "address": provider.api_pattern,
                "makes": list_rules(provider.model_match) if provider.model_match else [],
                "searched": [
                    provider.id,
                    *(each for each in provider.fallback_model_providers or () if each in known),
                ],
                "models": [build_model(provider, model) for model in provider.models],
            }
            for provider in providers
        },
    }


def build_model(provider: types.Provider, model: types.ModelInfo) -> Fields:
    """Builds the fields of a model: its names, the rules for its further names, and its prices.

    The first model that matches a name counts, so a name that an earlier model matches is left out.
    """
    rules = list_rules(model.match)
    names = dict.fromkeys(rule[1:] for rule in rules if rule[0] == "=")
    own = [name for name in names if next(each for each in provider.models if each.is_match(name)) is model]
    return [own, [rule for rule in rules if rule[0] != "="], list(iter_dated_prices(model))]


def list_rules(clause: types.MatchLogic) -> Fields:
    """Returns the rules of which a name in lower case must match one, if the clause is to match it.

    A rule is an operator of the package and a text, or a list of rules of which the name must match each.
    """
    match clause:
        case types.ClauseOr(clauses):
            return [rule for each in clauses for rule in list_rules(each)]
        case types.ClauseAnd(clauses):
            return [list(rules) for rules in product(*map(list_rules, clauses))]
        case types.ClauseRegex(pattern):
            return [f"~{pattern}"]
    [(kind, text)] = vars(clause).items()
    return [f"{OPERATORS[kind]}{text.lower()}"]


def iter_dated_prices(model: types.ModelInfo) -> Iterator[Fields]:
    """Yields the prices of a model. Of those that apply at one time, the last one counts."""
    listed = model.prices if isinstance(model.prices, list) else [types.ConditionalPrice(prices=model.prices)]
    for each in listed:
        tiers = build_tiers(each.prices)
        match each.constraint:
            case None:
                yield [tiers]
            case types.StartDateConstraint(start_date):
                yield [tiers, start_date.isoformat()]
            case types.TimeOfDateConstraint(start_time, end_time):
                start, stop = format_time(start_time), format_time(end_time)
                spans = [(start, stop)] if start <= stop else [(start, "24:00:00"), ("00:00:00", stop)]
                yield from ([tiers, "", *span] for span in spans)


def format_time(moment: time) -> str:
    """Returns a time of day in UTC. Prices may change only where the package looks them up again."""
    day = datetime.combine(date(1970, 1, 1), moment, moment.tzinfo or UTC)
    if day.timestamp() % PRICE_PERIOD_S:
        raise ValueError(f"a price changes at {moment}, within {PRICE_PERIOD_S} s")
    return f"{day.astimezone(UTC):%H:%M:%S}"


def build_tiers(prices: types.ModelPrice) -> list[Fields]:
    """Builds the fields of the price tiers; empty if the model has no price for text tokens."""
    held: list[Price] = [getattr(prices, name) for name in TOKEN_PRICES]
    if held[0] is None:
        return []
    starts = {tier.start for each in held if isinstance(each, types.TieredPrices) for tier in each.tiers}
    return [build_tier(held, start) for start in sorted({0, *starts})]


def build_tier(prices: list[Price], above: int) -> Fields:
    """Builds the tier for requests with more than `above` tokens.

    If the library has no price for reading or writing the prompt cache, the input price is used.
    """
    uncached, cached, cache_write, output = (read_dollars(each, above) for each in prices)
    paid = (uncached if each is None else each for each in (uncached, cached, cache_write))
    return [above, *paid, output or 0.0]


def read_dollars(price: Price, above: int) -> float | None:
    """Returns the price for requests with more than `above` tokens, in dollars per million tokens."""
    if isinstance(price, types.TieredPrices):
        reached = [tier.price for tier in price.tiers if tier.start <= above]
        price = reached[-1] if reached else price.base
    return None if price is None else float(price)


def format_table(table: dict[str, Any]) -> str:
    """Formats the table as JSON. Each model is a line, so that a diff shows what has changed."""
    dump = json.JSONEncoder(separators=(",", ":")).encode
    blocks = []
    for key, provider in table["providers"].items():
        head = dump({key: {**provider, "models": []}})[1:-3]
        models = ",\n".join(map(dump, provider["models"]))
        blocks.append(f"{head}\n{models}]}}")
    providers_text = ",\n".join(blocks)
    return f'{{"source":{dump(table["source"])},"providers":{{\n{providers_text}}}}}\n'


def main() -> int:
    """Writes the file. With `--check`, returns 1 if the file differs from what would be written."""
    text = format_table(build_table())
    if "--check" in sys.argv:
        return int(TARGET.read_text("utf-8") != text)
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
