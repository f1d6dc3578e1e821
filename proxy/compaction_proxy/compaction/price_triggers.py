"""Computes the token thresholds of triggers that depend on prices.

The module also tracks how conversations grow from request to request, because some of the thresholds depend
on this growth.
"""

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
from compaction_proxy.core.cost.savings import MIN_CACHED_TOKENS
from compaction_proxy.core.strategies import Policy, ScaledLimit
from compaction_proxy.core.trigger import UNKNOWN_PRICE_THRESHOLDS, PriceThresholds, TriggerRule
from compaction_proxy.providers.pricing import PriceBook
from compaction_proxy.support.lru import BoundedDict
from compaction_proxy.wires.usage import TokenUsage

# The statistics of a conversation are used only if at least this many of its requests continued the request
# before them. The mean of fewer requests is not reliable.
LEAST_STEPS = 3
# A new value enters a mean with at least the weight 1 / `MEAN_REQUESTS`. So the mean depends mainly on about
# this many of the latest requests.
MEAN_REQUESTS = 16
# The growth of at most this many conversations is remembered. If there are more, the conversation whose last
# request is the oldest is forgotten.
MAX_CONVERSATIONS = 4_096


@dataclass(frozen=True, slots=True)
class GrowthStats:
    """Sizes of the last request of a conversation, and mean values over its requests.

    Attributes:
        client_tokens: Tokens of the last request with the messages that the client sent.
        forwarded_tokens: Tokens of the last forwarded request, as the provider counted them.
        baseline_key: Identifies the checkpoint and model of the last request (`UsageBasis.baseline_key`).
        tokens_after_round: Tokens of the last request for which a compaction was made, as the provider
            counted them; None if no compaction was made.
        growth_samples: Number of requests that continued the previous request of the conversation.
        growth_tokens: Mean number of tokens that these requests added.
        cache_samples: Number of requests whose beginning repeated the previously forwarded request, so that
            the provider could read this part from its cache.
        cached_share: Mean share of this part that the provider actually read from its cache, 0..1.
    """

    client_tokens: int = 0
    forwarded_tokens: int = 0
    baseline_key: bytes = b""
    tokens_after_round: int | None = None
    growth_samples: int = 0
    growth_tokens: float = 0.0
    cache_samples: int = 0
    cached_share: float = 0.0


class GrowthTracker:
    """Tracks how conversations grow from request to request. Use it on one event loop only."""

    def __init__(self) -> None:
        self._growth_by_thread: BoundedDict[str, GrowthStats] = BoundedDict(MAX_CONVERSATIONS)

    def record_request(self, ask: FitRequest, fit: FitResult, usage: TokenUsage) -> None:
        """Updates the growth statistics of a conversation with an answered request.

        Ignores a request whose messages the proxy has not parsed, or has cut to make the request fit.
        """
        usage_basis, before = fit.usage_basis, fit.report.tokens_before
        if usage_basis is None or before is None:
            return
        key = format_strategy_thread(ask, usage_basis.root, ask.strategy or ask.settings.compaction.strategy)
        previous = self._growth_by_thread.pop(key, GrowthStats())
        current = _add_cache_read(_add_growth(previous, before), usage_basis.baseline_key, usage)
        is_compacted = fit.report.status is CompactionStatus.APPLIED
        self._growth_by_thread[key] = replace(
            current, tokens_after_round=usage.prompt_tokens if is_compacted else previous.tokens_after_round
        )

    def get_stats(self, thread: str) -> GrowthStats | None:
        """Returns the statistics of a conversation; None if too few of its requests were recorded.

        `thread` is the key of the conversation, from `format_strategy_thread`.
        """
        growth = self._growth_by_thread.get(thread)
        if growth is None or growth.growth_samples < LEAST_STEPS or not growth.cache_samples:
            return None
        return growth


def _update_mean(mean: float, number: int, value: float) -> float:
    """Returns a mean that includes a new value.

    The weight of the new value is 1 / `number`, but at least 1 / `MEAN_REQUESTS`. So the influence of old
    values becomes smaller with each new value.

    Args:
        mean: The mean before the new value.
        number: Number of values, including the new one.
        value: The new value.
    """
    return mean + (value - mean) / min(number, MEAN_REQUESTS)


def _add_growth(last: GrowthStats, client_tokens: int) -> GrowthStats:
    added_tokens = client_tokens - last.client_tokens
    if (
        not last.client_tokens or added_tokens <= 0
    ):  # the first request, or one that does not continue the last
        return replace(last, client_tokens=client_tokens)
    steps = last.growth_samples + 1
    return replace(
        last,
        client_tokens=client_tokens,
        growth_samples=steps,
        growth_tokens=_update_mean(last.growth_tokens, steps, added_tokens),
    )


def _add_cache_read(last: GrowthStats, baseline_key: bytes, usage: TokenUsage) -> GrowthStats:
    current = replace(last, forwarded_tokens=usage.prompt_tokens, baseline_key=baseline_key)
    is_comparable = (
        baseline_key == last.baseline_key
        and usage.prompt_tokens >= last.forwarded_tokens >= MIN_CACHED_TOKENS
    )
    if not is_comparable:
        return current
    reads, share = last.cache_samples + 1, min(1.0, usage.cached_tokens / last.forwarded_tokens)
    return replace(current, cache_samples=reads, cached_share=_update_mean(last.cached_share, reads, share))


# If the strategy has no target size, and no compaction of the conversation has been observed yet, a
# compaction is assumed to shorten the request to 40 percent of the trigger size T.
USUAL_TARGET = ScaledLimit(None, 0.40)
NO_BASIS: Mapping[str, float] = {}


class PriceTriggerSizes(NamedTuple):
    """The thresholds of triggers that depend on prices, and how they were computed.

    Attributes:
        thresholds: The thresholds, in tokens.
        basis: The numbers from which the thresholds were computed, by name. Events report these numbers.
    """

    thresholds: PriceThresholds = UNKNOWN_PRICE_THRESHOLDS
    basis: Mapping[str, float] = NO_BASIS


NO_PRICE_TRIGGERS = PriceTriggerSizes()


class PriceTriggers:
    """Computes price-dependent thresholds from prices and from the observed growth of the conversation.

    Args:
        pricing: Looks up prices.
        growth: Provides the growth statistics of conversations.
    """

    def __init__(self, pricing: PriceBook, growth: GrowthTracker) -> None:
        self._pricing = pricing
        self._growth = growth

    def compute_thresholds(
        self, ask: FitRequest, policy: Policy, thread: str, fixed_tokens: int
    ) -> PriceTriggerSizes:
        """Computes the price-dependent thresholds of the policy's trigger rules for a request.

        Returns `NO_PRICE_TRIGGERS` if the price of the request's model is unknown. A threshold that cannot be
        computed is None.

        Args:
            ask: The request.
            policy: The strategy of the request.
            thread: Key of the conversation (`format_strategy_thread`).
            fixed_tokens: Tokens of the parts of the request that no compaction changes, such as the system
                prompt and the tool definitions.
        """
        price = self._pricing.get_price(ask.model, ask.origin)
        if price is None:
            return NO_PRICE_TRIGGERS
        rows = [row for row in policy.trigger if row.active]
        tier = price.surcharge_tokens if any(row.price_tier for row in rows) else None
        basis = {} if tier is None else {"surcharge": float(tier)}
        row = next((row for row in rows if row.cost_optimal), None)
        stats = self._growth.get_stats(thread) if row else None
        if row is None or stats is None:
            return PriceTriggerSizes(PriceThresholds(tier_tokens=tier), basis)
        optimum = _find_optimal_trigger(
            price, stats, policy, row, fixed_tokens, self._find_summary_price(ask)
        )
        if optimum is None:
            return PriceTriggerSizes(PriceThresholds(tier_tokens=tier), basis)
        return PriceTriggerSizes(PriceThresholds(tier, optimum.trigger), {**basis, **optimum.basis})

    def _find_summary_price(self, ask: FitRequest) -> ModelPrice | None:
        """Returns the price of the first summary model; None if there is no summary model.

        If the price of the summary model is unknown, returns the price of the model that the request names.
        If this is unknown as well, returns None.
        """
        route = next(iter(ask.summary_routes), None)
        if route is None:
            return None
        price = self._pricing.get_price(route.model, str(parse_origin(route.url)))
        return price or self._pricing.get_price(ask.model, ask.origin)


def _find_optimal_trigger(
    price: ModelPrice,
    growth_stats: GrowthStats,
    policy: Policy,
    rule: TriggerRule,
    fixed_tokens: int,
    summary_price: ModelPrice | None,
) -> OptimalTrigger | None:
    """Computes the trigger size at which the conversation costs least; returns None if there is none.

    The computation assumes that a compaction shortens the request to the target size of the strategy. If the
    strategy has no target, it assumes the size after the last compaction of the conversation, or
    `USUAL_TARGET` if the conversation had no compaction.
    """
    rework = REWORK_TOKENS if rule.rework_tokens is None else rule.rework_tokens
    target = policy.target or (None if growth_stats.tokens_after_round else USUAL_TARGET)
    growing = GrowthProfile(
        growth=growth_stats.growth_tokens,
        cached_share=growth_stats.cached_share,
        fixed=fixed_tokens,
        after=(target.tokens or 0) if target else (growth_stats.tokens_after_round or 0),
        share=target.share if target and target.tokens is None else 0.0,
        summary=policy.summary.tokens if policy.summary else 0,
    )
    return compute_optimal_trigger(price, growing, summary_price, rework)
