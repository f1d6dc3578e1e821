"""What models cost: as configured, else as a table knows it, which is asked beside everything else."""

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

# Looked-up prices that are held, and for how long: some of them differ by the hour. In seconds.
MAX_HELD = 4_096
HELD_S = 3_600.0
# How long one is taken as unknown after the table could not be asked, in seconds.
FAILED_S = 60.0
# Names that may wait to be looked up: clients choose them. Of those beyond, nothing is known.
MAX_ASKED = 1_024
# Questions that the table is asked as they come, and the seconds that lie between those after them: each
# costs half a second of a processor, and clients may name models without end.
AT_ONCE = 8
REST_S = 2.0

# Domains that no server on the internet has.
PRIVATE_DOMAINS = (".local", ".localhost", ".internal", ".lan", ".home.arpa", ".test")

# A model, and the origin of its upstream.
PriceKey = tuple[str, str]

_log = structlog.get_logger()


class PriceTable(Protocol):
    """Knows what models cost."""

    def find_prices(self, names: Sequence[PriceKey], at: float) -> Sequence[ModelPrice | None]:
        """What models cost, in the order of `names`; None where that is not known.

        May take seconds, so that it belongs into a thread; never asks the network. It may fail in any way.

        Args:
            names: Models as clients name them, each with the origin of the upstream that is asked, such as
                `https://api.openai.com:443`. A provider of this address is believed alone; of an address that
                nobody is known by, the model's name tells the provider.
            at: When, in seconds since the epoch: prices change, some of them by the hour.
        """
        ...


@lru_cache(maxsize=256)
def is_local(origin: str) -> bool:
    """Whether an upstream is a server of one's own: on this machine, in a private network, with no domain."""
    host = urlsplit(origin).hostname or ""
    try:
        return ip_address(host).is_private
    except ValueError:
        return "." not in host or host.endswith(PRIVATE_DOMAINS)


class _CachedPrice(NamedTuple):
    """A price, and until when it is believed, in seconds since the epoch."""

    price: ModelPrice | None
    until: float


_UNKNOWN = _CachedPrice(None, 0.0)


class PriceBook:
    """Knows prices.

    Args:
        config: Prices that are configured; they beat the table, and cost nothing.
        table: Everybody's prices.
        now: Seconds since the epoch.
        rest_s: Seconds between two questions to the table, once it has been asked `AT_ONCE`.
    """

    def __init__(
        self,
        config: Config,
        table: PriceTable,
        *,
        now: Callable[[], float] = time.time,
        rest_s: float = REST_S,
    ) -> None:
        self._config = config
        self._table = table
        self._now = now
        self._rest_s = rest_s
        self._lock = threading.Lock()
        self._held: LruCache[PriceKey, _CachedPrice] = LruCache(MAX_HELD)
        self._asked: dict[PriceKey, Future[None]] = {}
        self._asking = False
        self._questions = 0

    def get_price(self, model: str, origin: str) -> ModelPrice | None:
        """What a model costs, or None where nothing is known; never waits.

        What neither the configuration tells nor an earlier answer is asked of the table, in a thread. Until
        that is done the answer is the one of before, or None. Nobody's table knows what a server of one's
        own costs: there the configuration alone is believed.

        Args:
            model: Its name, as clients give it.
            origin: Of the upstream that is asked, such as `https://api.openai.com:443`.
        """
        configured = get_model_settings(self._config, model).prices
        if configured is not None or is_local(origin):
            return configured
        with self._lock:
            return self._get_or_queue((model, origin))

    def is_resolved(self, model: str, origin: str) -> bool:
        """Whether `get_price` tells all that will be known for now; nothing is asked."""
        if is_local(origin) or get_model_settings(self._config, model).prices is not None:
            return True
        with self._lock:
            held = self._held.get((model, origin)) or _UNKNOWN
        return held.until > self._now()

    def reload(self, config: Config) -> None:
        """Take the prices of another configuration."""
        self._config = config

    def compute_cost(self, model: str, url: str, prompt: int, cached: int, completion: int) -> float | None:
        """Dollars for a request that was sent to a URL, or None where no price is known; never waits."""
        price = self.get_price(model, str(parse_origin(url)))
        return None if price is None else price.compute_cost(prompt, cached, completion)

    async def wait_for_prices(self, names: Iterable[PriceKey]) -> None:
        """Return once everything is known of these models that can be known.

        Args:
            names: The models, each with the origin of the upstream that is asked.
        """
        unpriced = {
            name
            for name in names
            if get_model_settings(self._config, name[0]).prices is None and not is_local(name[1])
        }
        with self._lock:
            for name in unpriced:
                self._get_or_queue(name)
            asked = [asyncio.wrap_future(self._asked[name]) for name in unpriced & self._asked.keys()]
        await asyncio.gather(*asked)

    def _get_or_queue(self, name: PriceKey) -> ModelPrice | None:
        """What the table has said of a model; where it is to be asked, it will be. The lock is held."""
        held = self._held.get(name) or _UNKNOWN
        if held.until <= self._now():
            self._queue_lookup(name)
        return held.price

    def _queue_lookup(self, name: PriceKey) -> None:
        """Have a model looked up with the next question to the table. The lock is held."""
        if name in self._asked or len(self._asked) >= MAX_ASKED:
            return
        self._asked[name] = Future()
        self._asked[name].set_running_or_notify_cancel()  # whoever ceases to wait does not cancel it
        if not self._asking:
            self._asking = True
            threading.Thread(target=self._look_up_queued, name="prices", daemon=True).start()

    def _look_up_queued(self) -> None:
        """Ask the table as long as there is anything to ask."""
        while names := self._get_queued_names():
            now = self._now()
            found, until = dict.fromkeys(names), now + FAILED_S
            with suppress_and_report(_log_failed_lookup):
                found = dict(zip(names, self._table.find_prices(names, now), strict=True))
                until = (now // HELD_S + 1) * HELD_S
            self._cache_prices(found, until)
            self._questions += 1
            if self._questions > AT_ONCE:
                time.sleep(self._rest_s)

    def _get_queued_names(self) -> list[PriceKey]:
        """Every model that is to be looked up; where there is none, the thread is over."""
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
