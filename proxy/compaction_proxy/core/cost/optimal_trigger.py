"""Where a conversation costs least: too many rounds cost more than they save, and too few leave too much.

The square-root law: T* = t + sqrt(2 g F / c). A round costs F: what of the context t that it leaves stands
behind the fixed prefix P and so is not cached any more, (w - c)(t - P); a summary of S tokens; and L tokens
of rework. It comes every D/g requests, where g is what a request has more than the one before, and D what
the context may grow by. Each request in between carries D/2 tokens on average, at the price c of what is
mostly cached. The sum, g F/D + c D/2 for each request, is least at D = sqrt(2 g F / c). What a summary model
reads is left out: all that is removed is read by it once, whenever that happens.

A strategy that leaves a share s of T leaves more the later it comes. With t = s T and D = (1 - s) T the same
sum is least at T* = sqrt(2 g K / (c (1 - s^2))), where K is what of F does not depend on T: the summary and
the rework, less (w - c) P.

The unit is one input token that is neither cached nor written to a cache.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

from compaction_proxy.core.cost.price import ModelPrice, PriceTier

# What is lost in a round is read once more by tools, or written once more by users. In tokens.
REWORK_TOKENS = 40_000
# A round that removes less than this, in tokens and as a share of T, comes back too soon.
LEAST_REMOVED_TOKENS = 8_000
LEAST_REMOVED_SHARE = 0.40
# A conversation's growth and cached share wobble; the cost around the optimum is flat.
STEP_TOKENS = 1_000


class GrowthProfile(NamedTuple):
    """How a conversation grows.

    Attributes:
        growth: Tokens that a request has more than the one before.
        cached_share: How much of a prefix that the provider has read is found cached, 0..1.
        fixed: Tokens at the beginning that no round changes: privileged messages, tools, the task.
        after: Tokens that a round leaves, at least.
        share: Share of T that it leaves where that is more, 0..1.
        summary: Tokens of its summary.
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
        trigger: T, in tokens; nothing is known here of the window.
        basis: What it was worked out from, each with its name: tokens, and ratios to the price of an input
            token that is not cached.
    """

    trigger: int
    basis: Mapping[str, float]


def compute_optimal_trigger(
    price: ModelPrice, profile: GrowthProfile, summary: ModelPrice | None, rework: int = REWORK_TOKENS
) -> OptimalTrigger | None:
    """The T at which a conversation costs least; None where nothing grows, or the model costs nothing.

    Args:
        price: Of the model that is asked.
        profile: How the conversation grows.
        summary: Price of the summary model; None where none is asked.
        rework: L, in tokens.
    """
    tier = price.tiers[0]
    if profile.growth <= 0 or tier.input <= 0:
        return None
    ratios = _compute_price_ratios(tier, profile.cached_share)
    if ratios.cached <= 0:
        return None
    told = profile.summary * (summary.tiers[0].output / tier.input if summary else 0.0)
    after, size = _compute_optimum(profile, ratios, told + rework)
    basis = {
        **profile._asdict(),
        "after": after,
        "cached_price": ratios.cached,
        "written_price": ratios.written,
        "broken_cost": ratios.cache_loss * max(0.0, after - profile.fixed),
        "summary_cost": told,
        "rework_cost": rework,
        "optimum": size,
    }
    return OptimalTrigger(
        _round_to_steps(after, size), {name: round(each, 4) for name, each in basis.items()}
    )


class _PriceRatios(NamedTuple):
    """Prices of a token that stands in every request, and of one that does so for the first time: c and w."""

    cached: float
    written: float

    @property
    def cache_loss(self) -> float:
        """What a token costs more that is not cached any more."""
        return max(0.0, self.written - self.cached)


def _compute_price_ratios(tier: PriceTier, cached_share: float) -> _PriceRatios:
    """A token that is not found cached is written again."""
    written = max(tier.cache_write, tier.input) / tier.input
    return _PriceRatios(cached_share * tier.cached / tier.input + (1 - cached_share) * written, written)


def _compute_optimum(profile: GrowthProfile, ratios: _PriceRatios, once: float) -> tuple[float, float]:
    """What a round leaves at the optimum, and the optimum; `once` is what it costs whatever it leaves."""
    growth, share = profile.growth, profile.share
    constant = max(0.0, once - ratios.cache_loss * profile.fixed)
    size = sqrt(2 * growth * constant / (ratios.cached * (1 - share * share)))
    least = max(profile.after, profile.fixed)
    if share * size >= least:
        return share * size, size
    cost = ratios.cache_loss * (least - profile.fixed) + once
    return least, least + sqrt(2 * growth * cost / ratios.cached)


def _round_to_steps(tokens_after: float, size: float) -> int:
    """T in whole steps, such that a round removes enough."""
    enough = max(tokens_after + LEAST_REMOVED_TOKENS, tokens_after / (1 - LEAST_REMOVED_SHARE))
    return round(max(size, enough) / STEP_TOKENS) * STEP_TOKENS
