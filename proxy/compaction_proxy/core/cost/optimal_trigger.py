"""Computes the trigger T at which a conversation costs least.

Compactions that are too frequent cost more than they save. Compactions that are too rare leave the context
too long. The optimum is T* = t + sqrt(2 g F / c). The symbols are:

- t: the tokens of the context that a compaction leaves.
- g: the tokens by which the context grows from one request to the next.
- w: the price of a token that the provider reads for the first time.
- c: the average price of a token that earlier requests contained. Most of these tokens are cached.
- P: the tokens at the beginning that no compaction changes. They stay cached.
- F: the cost of one compaction. The t - P tokens after the unchanged beginning are no longer cached, which
  costs (w - c)(t - P). F also includes the price of a summary of S tokens, and L tokens of rework: removed
  content that tools read again or users write again.

D is the growth of the context between two compactions, so a compaction is due every D/g requests. The
requests between two compactions contain D/2 additional tokens on average, each at the price c. The cost for
each request is therefore g F/D + c D/2, which is least at D = sqrt(2 g F / c). The price of the
summary model's input is left out, because this model reads every removed token once, however often
compactions happen.

Some strategies leave a share s of T, so a compaction at a larger T leaves more tokens. With t = s T and
D = (1 - s) T, the cost for each request is least at T* = sqrt(2 g K / (c (1 - s^2))). K is the part of F that
does not depend on T: the summary and the rework, less (w - c) P.

All costs and prices are relative to the price of one input token that is neither read from a cache nor
written to one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

from compaction_proxy.core.cost.price import ModelPrice

# The number of tokens of rework that one compaction is assumed to cause. Rework is content that the
# compaction removed, and that tools read again or users write again.
REWORK_TOKENS = 40_000
# T is raised until a compaction removes at least this many tokens, and at least this share of T. If a
# compaction removed less, the next compaction would be due too soon.
MIN_REMOVED_TOKENS = 8_000
MIN_REMOVED_SHARE = 0.40
# T is rounded to a multiple of this number of tokens. More precision is useless: a conversation's growth and
# cached share vary, and near the optimum the cost hardly depends on T.
STEP_TOKENS = 1_000


class GrowthProfile(NamedTuple):
    """The figures of a conversation's growth and of its compactions, from which T is computed.

    Attributes:
        growth: Tokens by which a request is larger than the request before it.
        cached_share: Share of the tokens from earlier requests that the provider has cached, 0..1.
        fixed: Tokens at the beginning that no compaction changes: privileged messages, tools and the task.
        after: Minimum number of tokens that a compaction leaves.
        share: Share of T that a compaction leaves, 0..1. It is used only if it amounts to at least `after`
            and at least `fixed` tokens.
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
        trigger: T in tokens. It may exceed the context window.
        basis: The figures from which T was computed, by name: token counts, and costs and prices relative to
            the price of an input token that is not cached.
    """

    trigger: int
    basis: Mapping[str, float]


def compute_optimal_trigger(
    price: ModelPrice,
    profile: GrowthProfile,
    summary_price: ModelPrice | None,
    rework_tokens: int = REWORK_TOKENS,
) -> OptimalTrigger | None:
    """Returns the T at which a conversation costs least.

    The result is None if the conversation does not grow or its input tokens cost nothing.

    Args:
        price: Price of the model that the conversation uses.
        profile: The figures of the conversation's growth and of its compactions.
        summary_price: Price of the summary model. None means that no model writes summaries.
        rework_tokens: Tokens of removed content that tools read again, or users write again, after one
            compaction.
    """
    tier = price.tiers[0]
    if profile.growth <= 0 or tier.input <= 0:
        return None
    # The provider is assumed to put each token that it reads for the first time into its cache.
    written = max(tier.cache_write, tier.input) / tier.input
    cached = profile.cached_share * tier.cached / tier.input + (1 - profile.cached_share) * written
    if cached <= 0:
        return None
    cache_loss = max(0.0, written - cached)
    summary_cost = profile.summary * (summary_price.tiers[0].output / tier.input if summary_price else 0.0)
    after, size = _compute_optimum(profile, cached, cache_loss, summary_cost + rework_tokens)
    basis = {
        **profile._asdict(),
        "after": after,
        "cached_price": cached,
        "written_price": written,
        "broken_cost": cache_loss * max(0.0, after - profile.fixed),
        "summary_cost": summary_cost,
        "rework_cost": rework_tokens,
        "optimum": size,
    }
    enough = max(after + MIN_REMOVED_TOKENS, after / (1 - MIN_REMOVED_SHARE))
    trigger = round(max(size, enough) / STEP_TOKENS) * STEP_TOKENS
    return OptimalTrigger(trigger, {name: round(each, 4) for name, each in basis.items()})


def _compute_optimum(
    profile: GrowthProfile, cached_price: float, cache_loss: float, constant_cost: float
) -> tuple[float, float]:
    """Returns the number of tokens that a compaction leaves at the optimal T, and the optimal T.

    `cached_price` is the price c in the docstring of this module. `cache_loss` is w - c there, and at least
    0. `constant_cost` is the cost of the summary and the rework, which does not depend on the number of
    tokens that a compaction leaves.
    """
    growth, share = profile.growth, profile.share
    constant = max(0.0, constant_cost - cache_loss * profile.fixed)
    size = sqrt(2 * growth * constant / (cached_price * (1 - share * share)))
    least = max(profile.after, profile.fixed)
    if share * size >= least:
        return share * size, size
    cost = cache_loss * (least - profile.fixed) + constant_cost
    return least, least + sqrt(2 * growth * cost / cached_price)
