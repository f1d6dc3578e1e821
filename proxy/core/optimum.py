"""Where a conversation costs least: too many rounds cost more than they save, and too few leave too much.

The square-root law: T* = t + sqrt(2 g F / c). A round costs F: what of the context t that it leaves stands
behind the fixed prefix P and so is not cached any more, (w - c)(t - P); a summary of S tokens; and L tokens
of rework. It comes every D/g requests, where g is what a request has more than the one before, and D what
the context may grow by. Each request in between carries D/2 tokens on average, at the price c of what is
mostly cached. The sum, g F/D + c D/2 for each request, is least at D = sqrt(2 g F / c). What a summary model
reads is left out: all that is removed is read by it once, whenever that happens.

The unit is one input token that is neither cached nor written to a cache.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

from proxy.core.price import Price, Tier

# What is lost in a round is read once more by tools, or written once more by users. In tokens.
REWORK_TOKENS = 40_000
# A round that removes less than this, in tokens and as a share of T, comes back too soon.
LEAST_REMOVED_TOKENS = 8_000
LEAST_REMOVED_SHARE = 0.40
# A conversation's growth and cached share wobble; the cost around the optimum is flat.
STEP_TOKENS = 1_000


class Growing(NamedTuple):
    """How a conversation grows.

    Attributes:
        growth: Tokens that a request has more than the one before.
        cached_share: How much of a prefix that the provider has read is found cached, 0..1.
        fixed: Tokens at the beginning that no round changes: privileged messages, tools, the task.
        after: Tokens that a round leaves.
        summary: Tokens of its summary.
    """

    growth: float
    cached_share: float
    fixed: int
    after: int
    summary: int


@dataclass(frozen=True, slots=True)
class Optimum:
    """The trigger at which a conversation costs least.

    Attributes:
        trigger: T, in tokens; nothing is known here of the window.
        basis: What it was worked out from, each with its name: tokens, and ratios to the price of an input
            token that is not cached.
    """

    trigger: int
    basis: Mapping[str, float]


def optimal_trigger(
    price: Price, growing: Growing, summary: Price | None, rework: int = REWORK_TOKENS
) -> Optimum | None:
    """The T at which a conversation costs least; None where nothing grows, or the model costs nothing.

    Args:
        price: Of the model that is asked.
        growing: How the conversation grows.
        summary: Price of the summary model; None where none is asked.
        rework: L, in tokens.
    """
    tier = price.tiers[0]
    if growing.growth <= 0 or tier.input <= 0:
        return None
    ratios = _ratios(tier, growing.cached_share)
    if ratios.cached <= 0:
        return None
    told = growing.summary * (summary.tiers[0].output / tier.input if summary else 0.0)
    broken = max(0.0, ratios.written - ratios.cached) * max(0, growing.after - growing.fixed)
    removed = sqrt(2 * growing.growth * (broken + told + rework) / ratios.cached)
    basis = {
        **growing._asdict(),
        "cached_price": ratios.cached,
        "written_price": ratios.written,
        "broken_cost": broken,
        "summary_cost": told,
        "rework_cost": rework,
        "optimum": growing.after + removed,
    }
    return Optimum(_stepped(growing.after, removed), {name: round(each, 4) for name, each in basis.items()})


class _Ratios(NamedTuple):
    """Prices of a token that stands in every request, and of one that does so for the first time: c and w."""

    cached: float
    written: float


def _ratios(tier: Tier, cached_share: float) -> _Ratios:
    """A token that is not found cached is written again."""
    written = max(tier.cache_write, tier.input) / tier.input
    return _Ratios(cached_share * tier.cached / tier.input + (1 - cached_share) * written, written)


def _stepped(after: int, removed: float) -> int:
    """T, such that a round removes enough."""
    least = max(after + LEAST_REMOVED_TOKENS, after / (1 - LEAST_REMOVED_SHARE))
    return round(max(after + removed, least) / STEP_TOKENS) * STEP_TOKENS
