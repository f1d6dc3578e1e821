"""Prices as everybody asks for them: configured, or from a table that is asked beside everything else."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from itertools import count

import pytest

from compaction_proxy.config.config import Config
from compaction_proxy.core.cost.price import ModelPrice, PriceTier
from compaction_proxy.providers.pricing import (
    FAILURE_TTL_S,
    LOOKUP_BURST,
    MAX_QUEUED_LOOKUPS,
    PRICE_TTL_S,
    PriceBook,
    PriceKey,
)

ORIGIN = "https://api.example.com:443"
M, N = ("m", ORIGIN), ("n", ORIGIN)


def price(dollars: float) -> ModelPrice:
    return ModelPrice((PriceTier(0, dollars, dollars, dollars, dollars),), "test")


class Table:
    """A table in which everything costs as many dollars as it has been asked, once `go` is set."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.asked: list[tuple[list[PriceKey], float]] = []
        self.failure = failure

    def find_prices(self, names: Sequence[PriceKey], at: float) -> list[ModelPrice]:
        assert threading.current_thread() is not threading.main_thread()
        self.asked.append((sorted(names), at))
        self.begun.set()
        self.go.wait(10)
        if self.failure:
            raise self.failure
        return [price(len(self.asked)) for _ in names]


def opened(failure: Exception | None = None) -> Table:
    table = Table(failure)
    table.go.set()
    return table


def clock(*times: float) -> Callable[[], float]:
    """The times, of which the last one stays."""
    places = count()
    return lambda: times[min(next(places), len(times) - 1)]


async def test_until_the_table_has_answered_nothing_is_known_and_nobody_waits() -> None:
    table = Table()
    pricing = PriceBook(Config(), table, now=clock(5.0))

    assert [pricing.get_price(*M), pricing.get_price(*M)] == [None, None]
    table.go.set()
    await pricing.wait_for_prices([M])
    assert (pricing.get_price(*M), table.asked) == (price(1), [([M], 5.0)])


async def test_what_comes_while_the_table_is_asked_is_asked_together_afterwards() -> None:
    table = Table()
    pricing = PriceBook(Config(), table, now=clock(5.0))
    pricing.get_price("first", ORIGIN)
    await asyncio.to_thread(table.begun.wait, 10)
    for name in (M, N, M):
        pricing.get_price(*name)
    table.go.set()
    await pricing.wait_for_prices([M, N])

    assert table.asked == [([("first", ORIGIN)], 5.0), ([M, N], 5.0)]
    assert [pricing.get_price(*M), pricing.get_price(*N)] == [price(2), price(2)]


async def test_a_configured_price_needs_no_table() -> None:
    table = opened()
    config = Config.model_validate({"models": {"mine-*": {"prices": {"input": 7, "output": 7}}}})
    pricing = PriceBook(config, table)
    await pricing.wait_for_prices([("mine-1", ORIGIN)])

    assert pricing.get_price("mine-1", ORIGIN) == ModelPrice((PriceTier(0, 7, 7, 7, 7),), "configuration")
    assert table.asked == []


async def test_a_price_is_looked_up_once_an_hour_and_the_old_one_told_meanwhile() -> None:
    table, time = opened(), [PRICE_TTL_S - 1]
    pricing = PriceBook(Config(), table, now=lambda: time[0])
    await pricing.wait_for_prices([M])
    table.go.clear()
    told = [pricing.get_price(*M)]
    time[0] = PRICE_TTL_S
    told.append(pricing.get_price(*M))
    table.go.set()
    await pricing.wait_for_prices([M])

    assert [*told, pricing.get_price(*M)] == [price(1), price(1), price(2)]


async def test_while_the_table_fails_no_price_is_known_and_after_a_minute_it_is_asked_again(
    capfd: pytest.CaptureFixture[str],
) -> None:
    table, time = opened(ImportError("no such table")), [0.0]
    pricing = PriceBook(Config(), table, now=lambda: time[0])
    for time[0] in (0.0, FAILURE_TTL_S - 1):
        await pricing.wait_for_prices([M])
        assert pricing.get_price(*M) is None
    assert len(table.asked) == capfd.readouterr().out.count("prices.failed") == 1

    table.failure, time[0] = None, FAILURE_TTL_S
    await pricing.wait_for_prices([M])
    assert pricing.get_price(*M) == price(2)


async def test_who_ceases_to_wait_takes_nothing_from_the_others() -> None:
    table = Table()
    pricing = PriceBook(Config(), table)
    waiting = [asyncio.create_task(pricing.wait_for_prices([M])) for _ in range(2)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    table.go.set()
    await waiting[1]

    assert pricing.get_price(*M) == price(1)


async def test_names_without_end_are_looked_up_at_leisure_and_not_all_of_them() -> None:
    table = Table()
    pricing = PriceBook(Config(), table, now=clock(5.0), pause_s=0.05)
    await asyncio.to_thread(
        lambda: [pricing.get_price(f"m{number}", ORIGIN) for number in range(MAX_QUEUED_LOOKUPS + 9)]
    )
    table.go.set()
    await pricing.wait_for_prices(
        [(f"m{MAX_QUEUED_LOOKUPS - 1}", ORIGIN), (f"m{MAX_QUEUED_LOOKUPS + 8}", ORIGIN)]
    )
    assert sum(len(names) for names, _ in table.asked) == MAX_QUEUED_LOOKUPS
    assert pricing.get_price(f"m{MAX_QUEUED_LOOKUPS - 1}", ORIGIN) is not None

    loop = asyncio.get_running_loop()
    begun = loop.time()
    for number in range(LOOKUP_BURST + 2):
        await pricing.wait_for_prices([(f"n{number}", ORIGIN)])
    assert loop.time() - begun >= 2 * 0.05


@pytest.mark.parametrize(
    ("origin", "local"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://[::1]:8000", True),
        ("http://10.1.2.3:80", True),
        ("http://vllm:8000", True),
        ("http://host.docker.internal:11434", True),
        ("https://8.8.8.8:443", False),
        (ORIGIN, False),
    ],
)
async def test_of_a_server_of_one_s_own_the_table_is_not_asked(origin: str, local: bool) -> None:  # noqa: FBT001 - a parameter
    table = opened()
    pricing = PriceBook(Config(), table)
    await pricing.wait_for_prices([("gpt-4o", origin)])
    assert (pricing.get_price("gpt-4o", origin) is None, table.asked == []) == (local, local)


async def test_what_is_configured_holds_for_a_server_of_one_s_own_too() -> None:
    config = Config.model_validate({"models": {"mine": {"prices": {"input": 1, "output": 2}}}})
    found = PriceBook(config, Table()).get_price("mine", "http://127.0.0.1:8000")
    assert found is not None
    assert found.compute_cost(1_000_000) == 1.0
