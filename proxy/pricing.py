"""What models cost: as configured, else as a table knows it. The first question loads the table."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Protocol

import structlog

from proxy.config.model import Config, for_model
from proxy.config.values import origin
from proxy.core.price import Price
from proxy.guard import contained
from proxy.logs import PRICES_FAILED

# Looked-up prices that are held, and for how long: some of them differ by the hour. In seconds.
MAX_HELD = 4_096
HELD_S = 3_600.0

_log = structlog.get_logger()


class PriceTable(Protocol):
    """Knows what models cost, once it is loaded; before that, nothing."""

    def load(self) -> None:
        """Read the table. May take seconds, so that it belongs into a thread; never asks the network.

        Raises:
            ImportError: There is no table.
        """
        ...

    def price(self, model: str, origin: str, at: float) -> Price | None:
        """What a model costs, or None where that is not known.

        Args:
            model: Its name, as clients give it.
            origin: Of the upstream, such as `https://api.openai.com:443`. A provider of this address is
                believed alone; of an address that nobody is known by, the model's name tells the provider.
            at: When, in seconds since the epoch: prices change, some of them by the hour.
        """
        ...


class Pricing:
    """Knows prices.

    Args:
        config: Prices that are configured; they beat the table and need no loading.
        table: Everybody's prices.
        now: Seconds since the epoch.
    """

    def __init__(self, config: Config, table: PriceTable, *, now: Callable[[], float] = time.time) -> None:
        self._config = config
        self._table = table
        self._now = now
        self._loading: threading.Thread | None = None
        self._loaded = threading.Event()
        self._held: dict[tuple[str, str], Price | None] = {}
        self._period = 0

    def of(self, model: str, origin: str) -> Price | None:
        """What a model costs, or None where nothing is known; never waits.

        The first question that the configuration does not answer begins to load the table, in a thread;
        until that is done, the answer is None.

        Args:
            model: Its name, as clients give it.
            origin: Of the upstream that is asked, such as `https://api.openai.com:443`.
        """
        configured = for_model(self._config, model).prices
        if configured is not None:
            return configured
        if not self._loaded.is_set():
            self._load()
            return None
        return self._looked_up(model, origin)

    def reload(self, config: Config) -> None:
        """Take the prices of another configuration."""
        self._config = config

    def cost(self, model: str, url: str, prompt: int, cached: int, completion: int) -> float | None:
        """Dollars for a request that was sent to a URL, or None where no price is known; never waits."""
        price = self.of(model, str(origin(url)))
        return None if price is None else price.of(prompt, cached, completion)

    async def ready(self) -> None:
        """Return once the table is loaded, or has turned out not to be there."""
        self._load()
        if not self._loaded.is_set():
            await asyncio.to_thread(self._loaded.wait)

    def _load(self) -> None:
        if self._loading is None:
            self._loading = threading.Thread(target=self._read, name="prices", daemon=True)
            self._loading.start()

    def _read(self) -> None:
        with contained(_failed):
            self._table.load()
        self._loaded.set()

    def _looked_up(self, model: str, origin: str) -> Price | None:
        now = self._now()
        if self._period != int(now / HELD_S) or len(self._held) >= MAX_HELD:
            self._held.clear()
            self._period = int(now / HELD_S)
        if (model, origin) not in self._held:
            self._held[model, origin] = self._table.price(model, origin, now)
        return self._held[model, origin]


def _failed(error: BaseException) -> None:
    _log.warning(PRICES_FAILED, error=type(error).__name__)
