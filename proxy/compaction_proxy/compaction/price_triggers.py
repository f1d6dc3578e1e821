"""What the fields of a trigger that are about money come to for one request, and why."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from compaction_proxy.compaction.request_view import thread
from compaction_proxy.compaction.types import Ask, Fit, Status
from compaction_proxy.config.types import origin
from compaction_proxy.core.cost.optimal_trigger import REWORK_TOKENS, Growing, Optimum, optimal_trigger
from compaction_proxy.core.cost.price import Price
from compaction_proxy.core.cost.savings import LEAST_CACHED_TOKENS
from compaction_proxy.core.strategies import Limit, Policy
from compaction_proxy.core.trigger import UNKNOWN, Aims, Row
from compaction_proxy.providers.pricing import Pricing
from compaction_proxy.wires.wire import Usage

# Fewer requests that continue one another say too little.
LEAST_STEPS = 3
# Means are over about as many requests as this.
MEMORY = 16
MAX_CONVERSATIONS = 4_096


class Pace(NamedTuple):
    """What the requests of a conversation have in common.

    Attributes:
        growth: Tokens that a request has more than the one before, on average.
        cached_share: How much of what was forwarded before is found cached, 0..1, on average.
        after: Tokens of the request for which the last round was made; None if none was.
    """

    growth: float
    cached_share: float
    after: int | None


@dataclass(frozen=True, slots=True)
class _Seen:
    """What is known of one conversation: its last request, and means over all.

    Attributes:
        before: Tokens of the client's list.
        forwarded: Tokens of what was forwarded, as the provider counted them.
        standing: What the forwarded list stood on.
        after: Tokens that the last round left.
        steps: Requests that continued the one before.
        growth: Mean of what they had more.
        reads: Requests whose beginning the provider had read before.
        cached_share: Mean of how much of that was cached.
    """

    before: int = 0
    forwarded: int = 0
    standing: bytes = b""
    after: int | None = None
    steps: int = 0
    growth: float = 0.0
    reads: int = 0
    cached_share: float = 0.0


class Growth:
    """Takes note of answered requests, on one event loop."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, _Seen] = OrderedDict()

    def note(self, ask: Ask, fit: Fit, usage: Usage) -> None:
        """Take note of a request that was answered. One that was not read says nothing."""
        footing, before = fit.footing, fit.report.tokens_before
        if footing is None or before is None:
            return
        key = thread(ask, footing.root, ask.strategy or ask.settings.compaction.strategy)
        last = self._seen.pop(key, _Seen())
        seen = _read(_grown(last, before), footing.standing, usage)
        applied = fit.report.status is Status.APPLIED
        self._seen[key] = replace(seen, after=usage.prompt_tokens if applied else last.after)
        if len(self._seen) > MAX_CONVERSATIONS:
            self._seen.popitem(last=False)

    def of(self, key: str) -> Pace | None:
        """The pace of a conversation (`view.thread`); None where too little is known."""
        seen = self._seen.get(key)
        if seen is None or seen.steps < LEAST_STEPS or not seen.reads:
            return None
        return Pace(seen.growth, seen.cached_share, seen.after)


def _mean(before: float, number: int, value: float) -> float:
    """A mean over so many values, the new one among them; older ones fade."""
    return before + (value - before) / min(number, MEMORY)


def _grown(last: _Seen, before: int) -> _Seen:
    more = before - last.before
    if not last.before or more <= 0:  # the first one, or one that begins elsewhere
        return replace(last, before=before)
    steps = last.steps + 1
    return replace(last, before=before, steps=steps, growth=_mean(last.growth, steps, more))


def _read(last: _Seen, standing: bytes, usage: Usage) -> _Seen:
    seen = replace(last, forwarded=usage.prompt_tokens, standing=standing)
    same = standing == last.standing and usage.prompt_tokens >= last.forwarded >= LEAST_CACHED_TOKENS
    if not same:
        return seen
    reads, share = last.reads + 1, min(1.0, usage.cached_tokens / last.forwarded)
    return replace(seen, reads=reads, cached_share=_mean(last.cached_share, reads, share))


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
