"""Prices as everybody asks for them: configured or from a table that loads beside everything else."""

import threading
from collections.abc import Callable

from proxy.config.model import Config
from proxy.core.price import Price, Tier
from proxy.pricing import HELD_S, Pricing

ORIGIN = "https://api.example.com:443"


def price(dollars: float) -> Price:
    return Price((Tier(0, dollars, dollars, dollars, dollars),), "test")


class Table:
    """A table that costs as much as it has been asked, once `go` is set."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.go = threading.Event()
        self.loads: list[str] = []
        self.asked: list[tuple[str, str, float]] = []
        self._failure = failure

    def load(self) -> None:
        self.loads.append(threading.current_thread().name)
        self.go.wait(10)
        if self._failure:
            raise self._failure

    def price(self, model: str, origin: str, at: float) -> Price | None:
        self.asked.append((model, origin, at))
        return None if self._failure else price(len(self.asked))


def clock(*times: float) -> Callable[[], float]:
    return iter(times).__next__


async def test_until_the_table_is_loaded_nothing_is_known_and_nobody_waits() -> None:
    table = Table()
    pricing = Pricing(Config(), table, now=clock(5.0))

    assert [pricing.of("m", ORIGIN), pricing.of("m", ORIGIN), table.asked] == [None, None, []]
    table.go.set()
    await pricing.ready()
    assert pricing.of("m", ORIGIN) == price(1)
    assert (table.loads, table.asked) == (["prices"], [("m", ORIGIN, 5.0)])


async def test_a_configured_price_needs_no_table() -> None:
    table = Table()
    config = Config.model_validate({"models": {"mine-*": {"prices": {"input": 7, "output": 7}}}})

    assert Pricing(config, table).of("mine-1", ORIGIN) == Price((Tier(0, 7, 7, 7, 7),), "configuration")
    assert table.loads == []


async def test_a_price_is_looked_up_once_an_hour() -> None:
    table = Table()
    table.go.set()
    pricing = Pricing(Config(), table, now=clock(0.0, HELD_S - 1, HELD_S))
    await pricing.ready()

    assert [pricing.of("m", ORIGIN) for _ in range(3)] == [price(1), price(1), price(2)]


async def test_without_a_table_no_price_is_known() -> None:
    table = Table(ImportError("no such table"))
    table.go.set()
    pricing = Pricing(Config(), table)
    await pricing.ready()

    assert pricing.of("m", ORIGIN) is None
