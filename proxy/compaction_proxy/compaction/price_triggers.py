"""What the fields of a trigger that are about money come to for one request, and why."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from compaction_proxy.compaction.request_view import format_strategy_thread
from compaction_proxy.compaction.types import CompactionStatus, FitRequest, FitResult
from compaction_proxy.config.types import parse_origin
from compaction_proxy.core.cost.optimal_trigger import (
    REWORK_TOKENS,
    GrowthProfile,
    OptimalTrigger,
    compute_optimal_trigger,
)
from compaction_proxy.core.cost.price import ModelPrice
from compaction_proxy.core.cost.savings import LEAST_CACHED_TOKENS
from compaction_proxy.core.strategies import Policy, ScaledLimit
from compaction_proxy.core.trigger import UNKNOWN_PRICE_THRESHOLDS, PriceThresholds, TriggerRule
from compaction_proxy.providers.pricing import PriceBook
from compaction_proxy.wires.wire import TokenUsage

# Fewer requests that continue one another say too little.
LEAST_STEPS = 3
# Means are over about as many requests as this.
MEAN_REQUESTS = 16
MAX_CONVERSATIONS = 4_096


class GrowthStats(NamedTuple):
    """What the requests of a conversation have in common.

    Attributes:
        growth: Tokens that a request has more than the one before, on average.
        cached_share: How much of what was forwarded before is found cached, 0..1, on average.
        tokens_after_round: Tokens of the request for which the last round was made; None if none was.
    """

    growth: float
    cached_share: float
    tokens_after_round: int | None


@dataclass(frozen=True, slots=True)
class _ConversationGrowth:
    """What is known of one conversation: its last request, and means over all.

    Attributes:
        before: Tokens of the client's list.
        forwarded: Tokens of what was forwarded, as the provider counted them.
        baseline_key: What the forwarded list stood on.
        tokens_after_round: Tokens that the last round left.
        steps: Requests that continued the one before.
        growth: Mean of what they had more.
        reads: Requests whose beginning the provider had read before.
        cached_share: Mean of how much of that was cached.
    """

    before: int = 0
    forwarded: int = 0
    baseline_key: bytes = b""
    tokens_after_round: int | None = None
    steps: int = 0
    growth: float = 0.0
    reads: int = 0
    cached_share: float = 0.0


class GrowthTracker:
    """Takes note of answered requests, on one event loop."""

    def __init__(self) -> None:
        self._growth_by_thread: OrderedDict[str, _ConversationGrowth] = OrderedDict()

    def record_request(self, ask: FitRequest, fit: FitResult, usage: TokenUsage) -> None:
        """Take note of a request that was answered. One that was not read says nothing."""
        footing, before = fit.usage_basis, fit.report.tokens_before
        if footing is None or before is None:
            return
        key = format_strategy_thread(ask, footing.root, ask.strategy or ask.settings.compaction.strategy)
        last = self._growth_by_thread.pop(key, _ConversationGrowth())
        seen = _add_cache_read(_add_growth(last, before), footing.baseline_key, usage)
        applied = fit.report.status is CompactionStatus.APPLIED
        self._growth_by_thread[key] = replace(
            seen, tokens_after_round=usage.prompt_tokens if applied else last.tokens_after_round
        )
        if len(self._growth_by_thread) > MAX_CONVERSATIONS:
            self._growth_by_thread.popitem(last=False)

    def get_stats(self, key: str) -> GrowthStats | None:
        """The pace of a conversation (`view.thread`); None where too little is known."""
        seen = self._growth_by_thread.get(key)
        if seen is None or seen.steps < LEAST_STEPS or not seen.reads:
            return None
        return GrowthStats(seen.growth, seen.cached_share, seen.tokens_after_round)


def _update_mean(before: float, number: int, value: float) -> float:
    """A mean over so many values, the new one among them; older ones fade."""
    return before + (value - before) / min(number, MEAN_REQUESTS)


def _add_growth(last: _ConversationGrowth, before: int) -> _ConversationGrowth:
    more = before - last.before
    if not last.before or more <= 0:  # the first one, or one that begins elsewhere
        return replace(last, before=before)
    steps = last.steps + 1
    return replace(last, before=before, steps=steps, growth=_update_mean(last.growth, steps, more))


def _add_cache_read(last: _ConversationGrowth, standing: bytes, usage: TokenUsage) -> _ConversationGrowth:
    seen = replace(last, forwarded=usage.prompt_tokens, baseline_key=standing)
    same = standing == last.baseline_key and usage.prompt_tokens >= last.forwarded >= LEAST_CACHED_TOKENS
    if not same:
        return seen
    reads, share = last.reads + 1, min(1.0, usage.cached_tokens / last.forwarded)
    return replace(seen, reads=reads, cached_share=_update_mean(last.cached_share, reads, share))


# What a round leaves of T where the strategy does not say, until one has shown it.
USUAL_TARGET = ScaledLimit(None, 0.40)
NO_BASIS: Mapping[str, float] = {}


class PriceTriggerSizes(NamedTuple):
    """What a trigger's fields about money come to.

    Attributes:
        aims: The sizes.
        basis: The numbers that they follow from, each with its name.
    """

    aims: PriceThresholds = UNKNOWN_PRICE_THRESHOLDS
    basis: Mapping[str, float] = NO_BASIS


NO_PRICE_TRIGGERS = PriceTriggerSizes()


class PriceTriggers:
    """Works it out from prices and from what the process has seen of the conversation.

    Args:
        pricing: Knows prices.
        growth: Knows how conversations grow.
    """

    def __init__(self, pricing: PriceBook, growth: GrowthTracker) -> None:
        self._pricing = pricing
        self._growth = growth

    def resolve_sizes(self, ask: FitRequest, policy: Policy, thread: str, fixed: int) -> PriceTriggerSizes:
        """What the policy's rows come to for a request.

        Args:
            ask: The request.
            policy: Its strategy.
            thread: The conversation (`view.thread`).
            fixed: Tokens at its beginning that no round changes.
        """
        price = self._pricing.get_price(ask.model, ask.origin)
        if price is None:
            return NO_PRICE_TRIGGERS
        rows = [row for row in policy.trigger if row.active]
        tier = price.surcharge_tokens if any(row.price_tier for row in rows) else None
        basis = {} if tier is None else {"surcharge": float(tier)}
        row = next((row for row in rows if row.cost_optimal), None)
        pace = self._growth.get_stats(thread) if row else None
        if row is None or pace is None:
            return PriceTriggerSizes(PriceThresholds(tier=tier), basis)
        best = _find_optimal_trigger(price, pace, policy, row, fixed, self._find_summary_price(ask))
        if best is None:
            return PriceTriggerSizes(PriceThresholds(tier=tier), basis)
        return PriceTriggerSizes(PriceThresholds(tier, best.trigger), {**basis, **best.basis})

    def _find_summary_price(self, ask: FitRequest) -> ModelPrice | None:
        """What the summary model costs; as much as the request's own where that is not known."""
        route = next(iter(ask.summary_routes), None)
        if route is None:
            return None
        known = self._pricing.get_price(route.model, str(parse_origin(route.url)))
        return known or self._pricing.get_price(ask.model, ask.origin)


def _find_optimal_trigger(
    price: ModelPrice,
    pace: GrowthStats,
    policy: Policy,
    row: TriggerRule,
    fixed: int,
    summary: ModelPrice | None,
) -> OptimalTrigger | None:
    """The optimum for what the strategy wants to leave, else for what the last round has left."""
    rework = REWORK_TOKENS if row.rework_tokens is None else row.rework_tokens
    target = policy.target or (None if pace.tokens_after_round else USUAL_TARGET)
    growing = GrowthProfile(
        growth=pace.growth,
        cached_share=pace.cached_share,
        fixed=fixed,
        after=(target.tokens or 0) if target else (pace.tokens_after_round or 0),
        share=target.share if target and target.tokens is None else 0.0,
        summary=policy.summary.tokens if policy.summary else 0,
    )
    return compute_optimal_trigger(price, growing, summary, rework)
