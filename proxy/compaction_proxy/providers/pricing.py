"""Finds the prices of models in the configuration, or in a table that a background thread queries."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import lru_cache
from ipaddress import ip_address
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

import structlog

from compaction_proxy.config.config import Config, get_model_settings
from compaction_proxy.config.types import parse_origin
from compaction_proxy.core.cost.price import ModelPrice
from compaction_proxy.support.fail_open import suppress_and_report
from compaction_proxy.support.log_events import PRICES_FAILED
from compaction_proxy.support.lru import LruCache

# Number of cached prices, and their longest lifetime in seconds. It is an hour, because some prices change
# hourly.
MAX_CACHED_PRICES = 4_096
PRICE_TTL_S = 3_600.0
# Time after a failed lookup until it is repeated, in seconds. Until then, the price is unknown.
FAILURE_TTL_S = 60.0
# Number of names that may wait for a lookup. Clients choose the names, so the number must have a limit.
# Further names have no price.
MAX_QUEUED_LOOKUPS = 1_024
# Number of first lookups without a pause, and the pause after each later lookup, in seconds. The pause limits
# the load: a lookup costs half a second of processor time, and clients may name any number of models.
LOOKUP_BURST = 8
LOOKUP_PAUSE_S = 2.0

# Endings of host names that do not exist on the internet.
PRIVATE_DOMAINS = (".local", ".localhost", ".internal", ".lan", ".home.arpa", ".test")

# Model name and origin of the upstream.
PriceKey = tuple[str, str]

_log = structlog.get_logger()


class PriceTable(Protocol):
    """Looks up model prices."""

    def find_prices(self, names: Sequence[PriceKey], at: float) -> Sequence[ModelPrice | None]:
        """Returns the prices in the order of `names`, with None for unknown prices.

        Never uses the network. May take seconds, so call it in a thread. May raise any exception.

        Args:
            names: Model names as clients give them, each with the origin of its upstream, such as
                `https://api.openai.com:443`. If the origin belongs to a known provider, only the prices of
                this provider are used. Otherwise the model name determines the provider.
            at: Time of the request, in seconds since the epoch. Prices change with time, some of them hourly.
        """
        ...


@lru_cache(maxsize=256)
def is_self_hosted(origin: str) -> bool:
    """Returns whether an upstream has a private address, or a host name that is not on the internet."""
    host = urlsplit(origin).hostname or ""
    try:
        return ip_address(host).is_private
    except ValueError:
        return "." not in host or host.endswith(PRIVATE_DOMAINS)


class _CachedPrice(NamedTuple):
    """A price, or None if it is unknown, and when it expires, in seconds since the epoch."""

    price: ModelPrice | None
    until: float


_UNKNOWN = _CachedPrice(None, 0.0)


class PriceBook:
    """Finds the prices of models.

    Args:
        config: Configuration. Its prices override the table and need no lookup.
        table: Table of public prices.
        now: Returns the seconds since the epoch.
        pause_s: Pause after each lookup except the first `LOOKUP_BURST`, in seconds.
    """

    def __init__(
        self,
        config: Config,
        table: PriceTable,
        *,
        now: Callable[[], float] = time.time,
        pause_s: float = LOOKUP_PAUSE_S,
    ) -> None:
        self._config = config
        self._table = table
        self._now = now
        self._rest_s = pause_s
        self._lock = threading.Lock()
        self._held: LruCache[PriceKey, _CachedPrice] = LruCache(MAX_CACHED_PRICES)
        self._asked: dict[PriceKey, Future[None]] = {}
        self._asking = False
        self._questions = 0

    def get_price(self, model: str, origin: str) -> ModelPrice | None:
        """Returns the price of a model, or None if it is unknown; never waits.

        A model without a configured price is queued for a lookup in a thread if its cached price is missing
        or has expired. Until the lookup has finished, the result is the expired price, or None. For a
        self-hosted upstream (`is_self_hosted`), only a configured price is used, because the table has none.

        Args:
            model: Model name as clients give it.
            origin: Origin of the upstream, such as `https://api.openai.com:443`.
        """
        configured = get_model_settings(self._config, model).prices
        if configured is not None or is_self_hosted(origin):
            return configured
        with self._lock:
            return self._get_or_queue((model, origin))

    def is_resolved(self, model: str, origin: str) -> bool:
        """Returns whether `get_price` would return its result without a lookup. Starts no lookup itself."""
        if is_self_hosted(origin) or get_model_settings(self._config, model).prices is not None:
            return True
        with self._lock:
            held = self._held.get((model, origin)) or _UNKNOWN
        return held.until > self._now()

    def reload(self, config: Config) -> None:
        """Replaces the configuration, and with it the configured prices."""
        self._config = config

    def compute_cost(self, model: str, url: str, prompt: int, cached: int, completion: int) -> float | None:
        """Returns the cost of a request to a URL, in dollars; None if the price is unknown. Never waits.

        Args:
            model: Model name as clients give it.
            url: URL of the request.
            prompt: Number of input tokens, cached tokens included.
            cached: Number of cached input tokens.
            completion: Number of output tokens.
        """
        price = self.get_price(model, str(parse_origin(url)))
        return None if price is None else price.compute_cost(prompt, cached, completion)

    async def wait_for_prices(self, names: Iterable[PriceKey]) -> None:
        """Looks up the prices of these models that are not known, and waits until the lookups have finished.

        Args:
            names: The models, each with the origin of its upstream.
        """
        unpriced = {
            name
            for name in names
            if get_model_settings(self._config, name[0]).prices is None and not is_self_hosted(name[1])
        }
        with self._lock:
            for name in unpriced:
                self._get_or_queue(name)
            asked = [asyncio.wrap_future(self._asked[name]) for name in unpriced & self._asked.keys()]
        await asyncio.gather(*asked)

    def _get_or_queue(self, name: PriceKey) -> ModelPrice | None:
        """Returns the cached price; queues a lookup if none is cached or it has expired.

        The caller holds the lock.
        """
        held = self._held.get(name) or _UNKNOWN
        if held.until <= self._now():
            self._queue_lookup(name)
        return held.price

    def _queue_lookup(self, name: PriceKey) -> None:
        """Queues a model for the next lookup. The caller holds the lock."""
        if name in self._asked or len(self._asked) >= MAX_QUEUED_LOOKUPS:
            return
        self._asked[name] = Future()
        self._asked[name].set_running_or_notify_cancel()  # a waiter that gives up does not cancel the lookup
        if not self._asking:
            self._asking = True
            threading.Thread(target=self._look_up_queued, name="prices", daemon=True).start()

    def _look_up_queued(self) -> None:
        """Looks up all queued models, until the queue is empty."""
        while names := self._get_queued_names():
            now = self._now()
            prices, until = dict.fromkeys(names), now + FAILURE_TTL_S
            with suppress_and_report(_log_failed_lookup):
                prices = dict(zip(names, self._table.find_prices(names, now), strict=True))
                until = (now // PRICE_TTL_S + 1) * PRICE_TTL_S
            self._cache_prices(prices, until)
            self._questions += 1
            if self._questions > LOOKUP_BURST:
                time.sleep(self._rest_s)

    def _get_queued_names(self) -> list[PriceKey]:
        """Returns all queued models. If there are none, also records that the calling thread will end."""
        with self._lock:
            self._asking = bool(self._asked)
            return list(self._asked)

    def _cache_prices(self, found: dict[PriceKey, ModelPrice | None], until: float) -> None:
        with ExitStack() as done, self._lock:
            for name, price in found.items():
                self._held.put(name, _CachedPrice(price, until), 1)
                done.callback(self._asked.pop(name).set_result, None)


def _log_failed_lookup(error: BaseException) -> None:
    _log.warning(PRICES_FAILED, error=type(error).__name__)
