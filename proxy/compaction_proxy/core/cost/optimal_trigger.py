"""Computes the trigger T at which a conversation costs least.

Too many compactions cost more than they save, and too few leave the context too long. The square-root law
gives the optimum: T* = t + sqrt(2 g F / c).

- F is the cost of one compaction. It leaves a context of t tokens, of which the part behind the fixed prefix
  P is no longer cached: this costs (w - c)(t - P). A summary of S tokens and L tokens of rework come on top.
- g is the growth of the context from one request to the next, and D its growth between two compactions. A
  compaction is therefore due every D/g requests.
- Each request in between carries D/2 additional tokens on average, at the price c of a mostly cached token.
  A token that a provider reads for the first time costs w.

The sum g F/D + c D/2 for each request is least at D = sqrt(2 g F / c). The input of the summary model is left
out, because the model reads all removed tokens once, whenever the compaction happens.

A strategy that leaves a share s of T leaves more if it compacts later. With t = s T and D = (1 - s) T the
same sum is least at T* = sqrt(2 g K / (c (1 - s^2))). K is the part of F that does not depend on T: the
summary and the rework, less (w - c) P.

The unit is one input token that is neither cached nor written to a cache.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

from compaction_proxy.core.cost.price import ModelPrice, PriceTier

# Tokens of rework: tools read lost content again, or users write it again.
REWORK_TOKENS = 40_000
# If a compaction removes less than this, in tokens and as a share of T, the next one comes too soon.
LEAST_REMOVED_TOKENS = 8_000
LEAST_REMOVED_SHARE = 0.40
# T is rounded to this step. A conversation's growth and cached share vary, and the cost is flat near the
# optimum.
STEP_TOKENS = 1_000


class GrowthProfile(NamedTuple):
    """How a conversation grows.

    Attributes:
        growth: Tokens by which a request is larger than the one before.
        cached_share: Share of an already read prefix that the provider has cached, 0..1.
        fixed: Tokens at the beginning that no compaction changes: privileged messages, tools and the task.
        after: Minimum number of tokens that a compaction leaves.
        share: Share of T that a compaction leaves if this is more than `after`, 0..1.
        summary: Tokens of the summary.
    """

    growth: float
    cached_share: float
    fixed: int
    after: int
    share: float
    summary: int


@dataclass(frozen=True, slots=True)
class OptimalTrigger:
    """The trigger at which a conversation costs least.

    Attributes:
        trigger: T in tokens. The context window does not limit it here.
        basis: The figures behind T by name: tokens, and ratios to the price of an input token that is not
            cached.
    """

    trigger: int
    basis: Mapping[str, float]


def compute_optimal_trigger(
    price: ModelPrice, profile: GrowthProfile, summary: ModelPrice | None, rework: int = REWORK_TOKENS
) -> OptimalTrigger | None:
    """Returns the T at which a conversation costs least, or None if it does not grow or the model is free.

    Args:
        price: Price of the model that answers the conversation.
        profile: How the conversation grows.
        summary: Price of the summary model. None means that no model is asked.
        rework: L, in tokens.
    """
    tier = price.tiers[0]
    if profile.growth <= 0 or tier.input <= 0:
        return None
    ratios = _compute_price_ratios(tier, profile.cached_share)
    if ratios.cached <= 0:
        return None
    summary_cost = profile.summary * (summary.tiers[0].output / tier.input if summary else 0.0)
    after, size = _compute_optimum(profile, ratios, summary_cost + rework)
    basis = {
        **profile._asdict(),
        "after": after,
        "cached_price": ratios.cached,
        "written_price": ratios.written,
        "broken_cost": ratios.cache_loss * max(0.0, after - profile.fixed),
        "summary_cost": summary_cost,
        "rework_cost": rework,
        "optimum": size,
    }
    return OptimalTrigger(
        _round_to_steps(after, size), {name: round(each, 4) for name, each in basis.items()}
    )


class _PriceRatios(NamedTuple):
    """Relative prices: c of a token that earlier requests held, and w of a token sent for the first time."""

    cached: float
    written: float

    @property
    def cache_loss(self) -> float:
        """The additional price of a token that is no longer cached."""
        return max(0.0, self.written - self.cached)


def _compute_price_ratios(tier: PriceTier, cached_share: float) -> _PriceRatios:
    """Returns the price ratios. A token that is not found in the cache is written to it again."""
    written = max(tier.cache_write, tier.input) / tier.input
    return _PriceRatios(cached_share * tier.cached / tier.input + (1 - cached_share) * written, written)


def _compute_optimum(profile: GrowthProfile, ratios: _PriceRatios, once: float) -> tuple[float, float]:
    """Returns the tokens that a compaction leaves at the optimum, and the optimum.

    `once` is the part of a compaction's cost that does not depend on the tokens that it leaves.
    """
    growth, share = profile.growth, profile.share
    constant = max(0.0, once - ratios.cache_loss * profile.fixed)
    size = sqrt(2 * growth * constant / (ratios.cached * (1 - share * share)))
    least = max(profile.after, profile.fixed)
    if share * size >= least:
        return share * size, size
    cost = ratios.cache_loss * (least - profile.fixed) + once
    return least, least + sqrt(2 * growth * cost / ratios.cached)


def _round_to_steps(tokens_after: float, size: float) -> int:
    """Returns T in whole steps, large enough for a compaction to remove enough tokens."""
    enough = max(tokens_after + LEAST_REMOVED_TOKENS, tokens_after / (1 - LEAST_REMOVED_SHARE))
    return round(max(size, enough) / STEP_TOKENS) * STEP_TOKENS
