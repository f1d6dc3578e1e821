"""What the fields of a trigger that are about money come to for one request, and why."""

from collections.abc import Mapping
from typing import NamedTuple

from compaction_proxy.compaction.growth import Growth, Pace
from compaction_proxy.compaction.types import Ask
from compaction_proxy.config.types import origin
from compaction_proxy.core.cost.optimal_trigger import REWORK_TOKENS, Growing, Optimum, optimal_trigger
from compaction_proxy.core.cost.price import Price
from compaction_proxy.core.strategies import Limit, Policy
from compaction_proxy.core.trigger import UNKNOWN, Aims, Row
from compaction_proxy.providers.pricing import Pricing

# What a round leaves of T where the strategy does not say, until one has shown it.
USUAL_TARGET = Limit(None, 0.40)
NOTHING: Mapping[str, float] = {}


class Aimed(NamedTuple):
    """What a trigger's fields about money come to.

    Attributes:
        aims: The sizes.
        basis: The numbers that they follow from, each with its name.
    """

    aims: Aims = UNKNOWN
    basis: Mapping[str, float] = NOTHING


UNAIMED = Aimed()


class Aiming:
    """Works it out from prices and from what the process has seen of the conversation.

    Args:
        pricing: Knows prices.
        growth: Knows how conversations grow.
    """

    def __init__(self, pricing: Pricing, growth: Growth) -> None:
        self._pricing = pricing
        self._growth = growth

    def of(self, ask: Ask, policy: Policy, thread: str, fixed: int) -> Aimed:
        """What the policy's rows come to for a request.

        Args:
            ask: The request.
            policy: Its strategy.
            thread: The conversation (`view.thread`).
            fixed: Tokens at its beginning that no round changes.
        """
        price = self._pricing.of(ask.model, ask.origin)
        if price is None:
            return UNAIMED
        rows = [row for row in policy.trigger if row.active]
        tier = price.surcharge_tokens if any(row.price_tier for row in rows) else None
        basis = {} if tier is None else {"surcharge": float(tier)}
        row = next((row for row in rows if row.cost_optimal), None)
        pace = self._growth.of(thread) if row else None
        if row is None or pace is None:
            return Aimed(Aims(tier=tier), basis)
        best = _optimum(price, pace, policy, row, fixed, self._summary(ask))
        if best is None:
            return Aimed(Aims(tier=tier), basis)
        return Aimed(Aims(tier, best.trigger), {**basis, **best.basis})

    def _summary(self, ask: Ask) -> Price | None:
        """What the summary model costs; as much as the request's own where that is not known."""
        route = next(iter(ask.routes), None)
        if route is None:
            return None
        known = self._pricing.of(route.model, str(origin(route.url)))
        return known or self._pricing.of(ask.model, ask.origin)


def _optimum(
    price: Price, pace: Pace, policy: Policy, row: Row, fixed: int, summary: Price | None
) -> Optimum | None:
    """The optimum for what the strategy wants to leave, else for what the last round has left."""
    rework = REWORK_TOKENS if row.rework_tokens is None else row.rework_tokens
    target = policy.target or (None if pace.after else USUAL_TARGET)
    growing = Growing(
        growth=pace.growth,
        cached_share=pace.cached_share,
        fixed=fixed,
        after=(target.tokens or 0) if target else (pace.after or 0),
        share=target.share if target and target.tokens is None else 0.0,
        summary=policy.summary.tokens if policy.summary else 0,
    )
    return optimal_trigger(price, growing, summary, rework)
