"""Triggers that are about money: below a surcharge, and where the conversation costs least."""

from typing import Any

import pytest

from compaction_proxy.compaction.price_triggers import (
    NO_PRICE_TRIGGERS,
    GrowthTracker,
    PriceTriggers,
    PriceTriggerSizes,
)
from compaction_proxy.compaction.request_view import format_strategy_thread, resolve_policy
from compaction_proxy.compaction.types import (
    CompactionReport,
    CompactionStatus,
    FitRequest,
    FitResult,
    UsageBasis,
)
from compaction_proxy.config.config import Config
from compaction_proxy.core.event import COMPACTED
from compaction_proxy.core.trigger import PriceThresholds
from compaction_proxy.providers.pricing import PriceBook
from compaction_proxy.wires.usage import TokenUsage
from tests.helpers.compaction_bench import ask, bench, talk, user

PRICES = {"input": 1.0, "cached": 0.1, "output": 5.0}
SURCHARGE = {"above_tokens": 6_000, "input": 2.0}
COSTLY: dict[str, Any] = {**PRICES, "surcharge": SURCHARGE}
ROOT = b"r" * 32


def priced(prices: dict[str, Any] | None = None) -> PriceBook:
    """Prices of every model: these, or none."""
    models = {"*": {"prices": prices}} if prices else {}
    return PriceBook(Config.model_validate({"models": models}))


def triggered(*rows: dict[str, Any], strategy: str = "anchored") -> dict[str, Any]:
    """A model's section with these rows."""
    return {"compaction": {"trigger": list(rows), "strategy": strategy}}


def answered(
    growth: GrowthTracker,
    asked: FitRequest,
    *requests: tuple[int, int, int],
    status: CompactionStatus = CompactionStatus.NONE,
) -> None:
    """Requests that were answered: tokens that the client sent, tokens that were counted, cached ones."""
    for before, prompt, cached in requests:
        report = CompactionReport(status, tokens_before=before, tokens_after=prompt)
        fit = FitResult(b"", prompt, report, UsageBasis(ROOT, (b"p",), b"standing"))
        growth.record_request(asked, fit, TokenUsage(prompt, 10, cached))


def key(asked: FitRequest) -> str:
    return format_strategy_thread(asked, ROOT, "anchored")


@pytest.mark.parametrize("strategy", ["anchored", "chained", "full"])
async def test_a_request_below_a_surcharge_is_compacted_before_it_passes_that(strategy: str) -> None:
    async with bench(pricing=priced(COSTLY)) as here:
        model = triggered({"price_tier": True}, strategy=strategy)
        over: dict[str, Any] = {"model": model, "strategy": None}
        below, above = [await here.fit(talk(turns, 240), **over) for turns in (8, 11)]

    # a quarter of the 6,000 tokens is left free: an answer of 8,000 would not fit into more
    assert [fit.report.trigger for fit in (below, above)] == [4_500, 4_500]
    assert below.report.status in {"none", "scheduled"}
    assert (above.report.status, (above.report.tokens_after or 0) < 4_500) == ("applied", True)
    [made] = [event for event in here.heard if event.kind == COMPACTED]
    assert (made.trigger, made.basis, made.reason) == (4_500, {"surcharge": 6_000.0}, "price_tier")


async def test_without_a_surcharge_such_a_row_fires_where_a_request_hardly_fits() -> None:
    reports = []
    for pricing in (priced(PRICES), priced()):
        async with bench(pricing=pricing) as here:
            fit = await here.fit(talk(2), model=triggered({"price_tier": True}))
            reports.append((fit.report.status, fit.report.trigger))

    assert reports == [("none", 12_000), ("none", 12_000)]


async def test_a_conversation_is_compacted_where_it_costs_least_once_that_is_known() -> None:
    async with bench(window=200_000, pricing=priced(PRICES)) as here:
        over = {"model": triggered({"cost_optimal": True, "rework_tokens": 0})}
        sizes = [(1, 0), (9, 0), (18, 4_000), (27, 8_000), (36, 12_000)]
        first = [
            await here.answered(talk(turns, 240), real=480 * turns, cached=cached, **over)
            for turns, cached in sizes
        ]
        later = await here.fit([*talk(72, 240), user("Go on.")], **over)

    assert [fit.report.trigger for fit in first[:4]] == [142_500] * 4
    assert (later.report.status, later.report.trigger) == ("applied", 32_000)
    [made] = [event for event in here.heard if event.kind == COMPACTED]
    assert (made.trigger, made.reason) == (32_000, "cost_optimal")
    assert made.basis["growth"] == pytest.approx(4_300, rel=0.1)
    assert {"cached_share", "cached_price", "after", "fixed", "optimum"} < set(made.basis)


def test_growth_is_what_requests_have_more_and_the_cached_share_of_what_was_read_before() -> None:
    growth, asked = GrowthTracker(), ask([user("Go.")])
    answered(growth, asked, (10_000, 10_000, 0), (12_000, 12_000, 9_000), (15_000, 15_000, 12_000))
    assert growth.get_stats(key(asked)) is None  # two steps say too little

    answered(growth, asked, (14_000, 14_000, 0))  # a branch: no step, and no beginning in common
    answered(growth, asked, (18_000, 18_000, 7_000))
    stats = growth.get_stats(key(asked))
    assert stats is not None
    assert (stats.growth_tokens, stats.cached_share) == pytest.approx((3_000, (0.9 + 1 + 0.5) / 3))
    assert stats.tokens_after_round is None


def test_what_the_last_round_left_is_known_from_its_first_answer() -> None:
    growth, asked = GrowthTracker(), ask([user("Go.")])
    answered(growth, asked, (10_000, 10_000, 0), (12_000, 12_000, 9_000), (14_000, 14_000, 9_000))
    answered(growth, asked, (16_000, 5_000, 1_000), status=CompactionStatus.APPLIED)
    answered(growth, asked, (18_000, 7_000, 5_000))

    pace = growth.get_stats(key(asked))
    assert pace is not None
    assert (pace.growth_tokens, pace.tokens_after_round) == (2_000, 5_000)


def test_a_request_that_stood_on_nothing_says_nothing() -> None:
    growth, asked = GrowthTracker(), ask([user("Go.")])
    for tokens in (None, 1, 2, 3, 4):
        fit = FitResult(b"", 9, CompactionReport(CompactionStatus.NONE, tokens_before=tokens), None)
        growth.record_request(asked, fit, TokenUsage(9))

    assert growth.get_stats(format_strategy_thread(asked, b"", "anchored")) is None


def aimed(
    prices: dict[str, Any] | None, growth: GrowthTracker, *rows: dict[str, Any], strategy: str = "anchored"
) -> PriceTriggerSizes:
    asked = ask([user("Go.")], model=triggered(*rows, strategy=strategy))
    return PriceTriggers(priced(prices), growth).compute_thresholds(
        asked, resolve_policy(asked.settings), key(asked), 8_000
    )


def test_the_optimum_stands_on_prices_growth_and_what_rounds_leave() -> None:
    growth, asked = GrowthTracker(), ask([user("Go.")])
    answered(growth, asked, *((2_000 * step, 2_000 * step, 2_000 * step - 2_000) for step in range(10, 16)))
    share = aimed(PRICES, growth, {"cost_optimal": True})
    before = aimed(PRICES, growth, {"cost_optimal": True}, strategy="full")
    answered(growth, asked, (32_000, 20_000, 8_000), status=CompactionStatus.APPLIED)
    after = aimed(PRICES, growth, {"cost_optimal": True}, strategy="full")

    # `anchored` leaves 40 percent; `full` does not say, until a round of it has shown what it leaves
    assert (share.thresholds.optimum_tokens, round(share.basis["after"])) == (48_000, 19_084)
    assert (before.thresholds.optimum_tokens, after.basis["after"]) == (48_000, 20_000)
    assert after.thresholds.optimum_tokens == 71_000


@pytest.mark.parametrize(
    ("prices", "rows", "expected"),
    [
        (None, [{"cost_optimal": True}, {"price_tier": True}], NO_PRICE_TRIGGERS),
        (PRICES, [{"cost_optimal": True}], NO_PRICE_TRIGGERS),
        (COSTLY, [{"cost_optimal": True}], NO_PRICE_TRIGGERS),
        (
            COSTLY,
            [{"price_tier": True}],
            PriceTriggerSizes(PriceThresholds(tier_tokens=6_000), {"surcharge": 6_000.0}),
        ),
    ],
)
def test_where_too_little_is_known_nothing_is_made_up(
    prices: dict[str, Any] | None, rows: list[dict[str, Any]], expected: PriceTriggerSizes
) -> None:
    assert aimed(prices, GrowthTracker(), *rows) == expected
