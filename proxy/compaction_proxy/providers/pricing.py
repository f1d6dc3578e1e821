"""Finds the prices of models: in the configuration, or else in the shipped table."""

import json
import operator
import re
import time
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime
from functools import cache, lru_cache
from importlib.resources import files
from ipaddress import ip_address
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import urlsplit

from compaction_proxy.config.config import Config, get_model_settings
from compaction_proxy.config.sections import WIRES
from compaction_proxy.config.types import parse_origin
from compaction_proxy.core.cost.price import ModelPrice, PriceTier
from compaction_proxy.core.model_names import normalize_model_name

# Maximum number of cached results of `find_shipped_price`, one for each model, origin and price period. If
# there are more, the cache drops the result that was used longest ago.
MAX_CACHED_PRICES = 1_024
# Maximum number of characters of a model name that the proxy looks up. If a name is longer, the proxy looks
# up only its last characters. This limits the memory of the cache, because clients choose the names in it.
MAX_NAME_CHARACTERS = 200
# Length of a price period, in seconds. Within a period, no price changes: some prices in the table depend on
# the time of day, but they change only at a full or a half hour.
PRICE_PERIOD_S = 1_800

# Endings of host names that exist only on private networks.
PRIVATE_DOMAINS = (".local", ".localhost", ".internal", ".lan", ".home.arpa", ".test")
_DEFAULT_PORTS = {"https": ":443", "http": ":80"}
# A date without hyphens, at the end of a model name or before `-` or `:`, as in `gpt-5.2-20251211`.
_COMPACT_DATE = re.compile(r"-(20[0-9]{6})(?=[-:]|$)")

# A condition on a model name in lower case: an operator (`_OPERATORS`) followed by a text, such as
# `^gpt-4o-`, or a list of conditions that must all be true.
_NameRule: TypeAlias = str | list["_NameRule"]
# Maps each operator to a function that compares a name with a text. For `~`, the text is a regular
# expression. It is not compiled here, because `re` caches compiled patterns.
_OPERATORS: Mapping[str, Callable[[str, str], object]] = {
    "=": operator.eq,
    "^": str.startswith,
    "$": str.endswith,
    "*": operator.contains,
    "~": lambda name, pattern: re.search(pattern, name),
}


class _DatedPrice(NamedTuple):
    """A price of a model, and the dates and times of day at which it applies.

    Attributes:
        tiers: The fields of each `PriceTier`. Empty if the table has no price for text tokens.
        since: First day on which the price applies, as `YYYY-MM-DD`; empty if there is no first day.
        start: Time of day from which the price applies, in UTC.
        stop: Time of day before which the price applies, in UTC.
    """

    tiers: list[tuple[int, float, float, float, float]]
    since: str = ""
    start: str = "00:00:00"
    stop: str = "24:00:00"


# The prices of one model. Each inner list has the fields of one `_DatedPrice`.
_PriceFields: TypeAlias = list[list[Any]]


class _Provider(NamedTuple):
    """A provider in the shipped table.

    Attributes:
        address_pattern: Regular expression for the addresses of the provider's API.
        maker_rules: Conditions on a model name. If one is true, the model counts as made by this provider.
        searched_ids: Ids of the providers whose models are searched for a name, this provider's own id first.
        prices_by_name: Prices by model name.
        price_rules: Conditions on further model names, with the prices. The first true condition counts.
    """

    address_pattern: str
    maker_rules: list[_NameRule]
    searched_ids: list[str]
    prices_by_name: dict[str, _PriceFields]
    price_rules: list[tuple[_NameRule, _PriceFields]]


class PriceTable(NamedTuple):
    """The shipped table of prices.

    Attributes:
        source: Name and version of the library that the prices come from.
        providers: The providers by id, in the order in which a search tries them.
    """

    source: str
    providers: dict[str, _Provider]


@cache
def load_price_table() -> PriceTable:
    """Loads the shipped table once per process. `tools/refresh_prices.py` writes the file of the table."""
    table = json.loads(files("compaction_proxy").joinpath("data", "prices.json").read_text("utf-8"))
    return PriceTable(
        table["source"],
        {
            key: _Provider(
                each["address"],
                each["makes"],
                each["searched"],
                {name: prices for names, _, prices in each["models"] for name in names},
                [(rule, prices) for _, rules, prices in each["models"] for rule in rules],
            )
            for key, each in table["providers"].items()
        },
    )


@lru_cache(maxsize=MAX_CACHED_PRICES)
def find_shipped_price(model: str, origin: str, at: float) -> ModelPrice | None:
    """Returns the price of a model from the shipped table; None if the table has no price for it.

    If several of the model's dated prices apply at the time `at`, the last of them counts. If none applies,
    the first price in the table counts.

    The results are cached, so the caller must limit the number of different arguments, as
    `PriceBook.get_price` does.

    Args:
        model: Model name as clients give it.
        origin: Origin of the upstream, such as `https://api.openai.com:443`. If it belongs to a provider of
            the table, only that provider's prices count. Otherwise the model name determines the provider.
        at: Time of the request, in seconds since the epoch.
    """
    prices = _find_prices(model, origin)
    moment = datetime.fromtimestamp(at, UTC)
    day, clock = f"{moment:%Y-%m-%d}", f"{moment:%H:%M:%S}"
    valid = [each for each in prices if each.since <= day and each.start <= clock < each.stop]
    applied = [*prices[:1], *valid][-1:]
    tiers = tuple(PriceTier(*tier) for each in applied for tier in each.tiers)
    since = max((each.since for each in valid), default="")
    return ModelPrice(tiers, load_price_table().source, since) if tiers else None


def _find_prices(model: str, origin: str) -> list[_DatedPrice]:
    """Finds the provider at an origin, and returns all prices of a model at that provider.

    If the table has no provider for the origin, the model name determines the provider. Returns an empty list
    if no provider is found, or if `_search_models` finds no price of this provider for the model. The
    function does not try other providers then, because their prices would be wrong.
    """
    providers = load_price_table().providers
    name, bare = model.lower(), normalize_model_name(model)
    address = f"{origin.removesuffix(_DEFAULT_PORTS.get(origin.partition(':')[0], ''))}/"
    provider = next((each for each in providers.values() if re.match(each.address_pattern, address)), None)
    if provider is not None:
        return _search_models(provider, name) or _search_models(provider, bare)
    named = name.rpartition("/")[0].rpartition("/")[2]  # as in `openai/gpt-4o`
    makers = (each for each in providers.values() if any(_is_match(rule, bare) for rule in each.maker_rules))
    provider = providers.get(named) or next(makers, None)
    return [] if provider is None else _search_models(provider, bare)


def _search_models(provider: _Provider, name: str) -> list[_DatedPrice]:
    """Returns the prices of the first model that matches a name; an empty list if none does.

    Searches the models of all providers in `searched_ids`, first for the name as given. If the name contains
    a date without hyphens, then searches for the name with hyphens in this date.
    """
    providers = load_price_table().providers
    for spelling in dict.fromkeys((name, _COMPACT_DATE.sub(_add_hyphens, name))):
        for searched in map(providers.__getitem__, provider.searched_ids):
            matches = (prices for rule, prices in searched.price_rules if _is_match(rule, spelling))
            prices = searched.prices_by_name.get(spelling) or next(matches, None)
            if prices is not None:
                return [_DatedPrice(*fields) for fields in prices]
    return []


def _is_match(rule: _NameRule, name: str) -> bool:
    if isinstance(rule, list):
        return all(_is_match(each, name) for each in rule)
    return bool(_OPERATORS[rule[0]](name, rule[1:]))


def _add_hyphens(compact: re.Match[str]) -> str:
    try:
        return f"-{date.fromisoformat(compact[1])}"
    except ValueError:
        return compact[0]


@lru_cache(maxsize=256)
def is_self_hosted(origin: str) -> bool:
    """Returns whether an upstream is on a private network.

    The result is True if the host in `origin` is a private address, a name without a dot, or a name that ends
    with one of `PRIVATE_DOMAINS`.
    """
    host = urlsplit(origin).hostname or ""
    try:
        return ip_address(host).is_private
    except ValueError:
        return "." not in host or host.endswith(PRIVATE_DOMAINS)


def uses_list_prices(config: Config) -> bool:
    """Returns whether the prices of the shipped table count for at least one configured upstream."""
    upstream = config.upstream
    origins = (str(parse_origin(upstream.get_provider(wire)[0])) for wire in WIRES)
    return upstream.prices == "list" or not all(map(is_self_hosted, origins))


class PriceBook:
    """Finds the prices of models.

    Args:
        config: Configuration. Its prices override the shipped table.
        now: Returns the seconds since the epoch.
    """

    def __init__(self, config: Config, *, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self.reload(config)

    def get_price(self, model: str, origin: str) -> ModelPrice | None:
        """Returns the price of a model, or None if it is unknown.

        For an upstream on a private network (`is_self_hosted`), only configured prices count, because the
        shipped table has no prices for such servers. With `upstream.prices: list`, the upstreams of the
        configuration are excepted: they are gateways, behind which the model name determines the provider.

        Args:
            model: Model name as clients give it.
            origin: Origin of the upstream, such as `https://api.openai.com:443`.
        """
        configured = get_model_settings(self._config, model).prices
        if configured is not None or (is_self_hosted(origin) and origin not in self._gateway_origins):
            return configured
        at = self._now() // PRICE_PERIOD_S * PRICE_PERIOD_S
        return find_shipped_price(model[-MAX_NAME_CHARACTERS:], origin, at)

    def reload(self, config: Config) -> None:
        """Replaces the configuration, and with it the configured prices."""
        self._config = config
        upstream = config.upstream
        self._gateway_origins = {
            str(parse_origin(upstream.get_provider(wire)[0])) for wire in WIRES if upstream.prices == "list"
        }

    def compute_cost(self, model: str, url: str, prompt: int, cached: int, completion: int) -> float | None:
        """Returns the cost of a request, in dollars, or None if no price is known.

        Args:
            model: Model name as clients give it.
            url: URL of the upstream.
            prompt: Number of input tokens, cached tokens included.
            cached: Number of cached input tokens.
            completion: Number of output tokens.
        """
        price = self.get_price(model, str(parse_origin(url)))
        return None if price is None else price.compute_cost(prompt, cached, completion)
