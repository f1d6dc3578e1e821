"""Sums of the figures of exchanges and events, for statistics. The sums of several processes can be added."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from operator import add
from typing import Any

from compaction_proxy.core.event import COMPACTED, FAILURE_KINDS, MEASURED, Event, parse_integer, parse_number
from compaction_proxy.core.exchange import STATUS_UNCHANGED, Exchange
from compaction_proxy.telemetry.exchange_batch import ExchangeBatch
from compaction_proxy.telemetry.totals import DOLLARS

# Upper bounds of the overhead buckets, in seconds. One more bucket counts everything above the last bound.
OVERHEAD_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_BUCKETS = len(OVERHEAD_BOUNDS_S) + 1
COUNTS = (
    "requests", "failed", "tokens_before", "tokens_after", "prompt_tokens", "completion_tokens",
    "cached_tokens", "rounds", "failures", "summary_calls", "summary_prompt_tokens",
    "summary_completion_tokens", "unpriced",
)  # fmt: skip
_COUNTS, _DOLLARS = frozenset(COUNTS), frozenset(DOLLARS)


def count_per_bucket(amounts: Iterable[float], bounds: Sequence[float]) -> list[int]:
    """Counts the amounts per bucket, for ascending upper bounds.

    A bucket includes its upper bound. The result has one more bucket for the amounts above the last bound.
    """
    ordered = sorted(amounts)
    marks = [0, *[bisect_right(ordered, bound) for bound in bounds], len(ordered)]
    return [stop - start for start, stop in pairwise(marks)]


@dataclass(slots=True)
class ExchangeCounters:
    """Sums of exchanges and events. Mutable, because every request adds to them.

    Attributes:
        requests: Number of exchanges.
        statuses: Number of exchanges by `Exchange.status`, which says what was done to the request.
        failed: Number of exchanges that the upstream answered with an error status (400 or more).
        tokens_before: Tokens of the requests as clients sent them, as far as the proxy counted their tokens.
        tokens_after: Tokens of the same requests as they were forwarded.
        prompt_tokens: Input tokens, as upstreams counted them.
        completion_tokens: Output tokens, as upstreams counted them.
        cached_tokens: Input tokens that upstreams had cached.
        rounds: Number of compactions.
        failures: Number of failures: a compaction was not made, or a request was forwarded unchanged or too
            long.
        summary_calls: Number of calls of summary models.
        summary_prompt_tokens: Input tokens of summary calls.
        summary_completion_tokens: Output tokens of summary calls.
        unpriced: Number of exchanges without a known price. Failed exchanges are not included.
        cost_usd: Cost of the exchanges whose price is known, in dollars. Summaries are not included.
        gross_usd: Dollars that the same exchanges would have cost more without compaction.
        cache_loss_usd: Dollars that the same exchanges cost more because compaction broke prompt caches.
        summary_usd: Cost of summaries, in dollars.
        overhead: Number of exchanges per bucket of overhead (the time of an exchange without the wait for the
            upstream). There is one bucket for each upper bound in `OVERHEAD_BOUNDS_S`, which includes the
            bound, and a last bucket for everything above.
    """

    requests: int = 0
    failed: int = 0
    tokens_before: int = 0
    tokens_after: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    rounds: int = 0
    failures: int = 0
    summary_calls: int = 0
    summary_prompt_tokens: int = 0
    summary_completion_tokens: int = 0
    unpriced: int = 0
    cost_usd: float = 0.0
    gross_usd: float = 0.0
    cache_loss_usd: float = 0.0
    summary_usd: float = 0.0
    statuses: dict[str, int] = field(default_factory=dict)
    overhead: list[int] = field(default_factory=lambda: [0] * _BUCKETS)

    @property
    def net_usd(self) -> float:
        """Dollars that compaction has saved, less cache loss and the cost of summaries."""
        return self.gross_usd - self.cache_loss_usd - self.summary_usd

    def add_exchange(self, exchange: Exchange) -> None:
        """Adds the counts of one exchange. `add_price` adds its cost."""
        self.requests += 1
        self.failed += exchange.has_failed
        self.tokens_before += exchange.tokens_before or 0
        self.tokens_after += exchange.tokens_after or 0
        self.prompt_tokens += exchange.prompt_tokens or 0
        self.completion_tokens += exchange.completion_tokens or 0
        self.cached_tokens += exchange.cached_tokens or 0
        self.statuses[exchange.status] = self.statuses.get(exchange.status, 0) + 1
        self.overhead[bisect_left(OVERHEAD_BOUNDS_S, exchange.overhead_s)] += 1

    def add_batch(self, batch: ExchangeBatch) -> None:
        """Adds exchanges whose requests were not read, with their cost."""
        count = len(batch.exchanges)
        self.requests += count
        self.statuses[STATUS_UNCHANGED] = self.statuses.get(STATUS_UNCHANGED, 0) + count
        self.failed += count if batch.has_failed else 0
        self.unpriced += 0 if batch.has_failed else count - batch.priced
        self.prompt_tokens += batch.prompt_tokens
        self.completion_tokens += batch.completion_tokens
        self.cached_tokens += batch.cached_tokens
        self.cost_usd += batch.cost_usd
        self.overhead = list(
            map(add, self.overhead, count_per_bucket(batch.columns.overhead_s, OVERHEAD_BOUNDS_S))
        )

    def add_price(self, cost: float, gross: float, cache_loss: float) -> None:
        """Adds the cost and the saving of one exchange, in dollars."""
        self.cost_usd += cost
        self.gross_usd += gross
        self.cache_loss_usd += cache_loss

    def add_event(self, event: Event) -> None:
        """Adds one event. Ignores an event that only reports an upstream's token count (`MEASURED`)."""
        if event.kind == MEASURED:
            return
        self.rounds += event.kind == COMPACTED
        self.failures += event.kind in FAILURE_KINDS
        self.summary_calls += event.calls or 0
        self.summary_prompt_tokens += event.prompt_tokens or 0
        self.summary_completion_tokens += event.completion_tokens or 0
        self.summary_usd += event.cost_usd or 0.0

    def add_counters(self, other: "ExchangeCounters") -> None:
        """Adds all counts of `other`."""
        for name in COUNTS + DOLLARS:
            more = getattr(other, name)
            if more:
                setattr(self, name, getattr(self, name) + more)
        for status, count in other.statuses.items():
            self.statuses[status] = self.statuses.get(status, 0) + count
        self.overhead = list(map(add, self.overhead, other.overhead))

    def compute_overhead_quantile_s(self, share: float) -> float | None:
        """Returns the overhead that a share of the exchanges (0..1) does not exceed, in seconds.

        Returns None without exchanges. The result is interpolated within a bucket and never exceeds the last
        bound.
        """
        wanted = share * sum(self.overhead)
        low, passed = 0.0, 0
        for bound, count in zip(OVERHEAD_BOUNDS_S, self.overhead, strict=False):
            if count and passed + count >= wanted:
                return low + (bound - low) * (wanted - passed) / count
            low, passed = bound, passed + count
        return OVERHEAD_BOUNDS_S[-1] if sum(self.overhead) else None


def to_fields(counters: ExchangeCounters) -> dict[str, Any]:
    """Returns the counters as JSON values. Leaves out counters that are zero."""
    values = {each.name: getattr(counters, each.name) for each in fields(counters)}
    if not any(counters.overhead):
        del values["overhead"]
    return {name: value for name, value in values.items() if value}


def from_fields(stored: Mapping[str, Any]) -> ExchangeCounters:
    """Restores counters from stored fields. A missing or invalid value counts as 0."""
    values: dict[str, Any] = {name: parse_integer(stored[name]) or 0 for name in stored.keys() & _COUNTS}
    values |= {name: parse_number(stored[name]) or 0.0 for name in stored.keys() & _DOLLARS}
    statuses, overhead = stored.get("statuses"), stored.get("overhead")
    if isinstance(statuses, Mapping):
        values["statuses"] = {str(status): parse_integer(count) or 0 for status, count in statuses.items()}
    if isinstance(overhead, list) and len(overhead) == _BUCKETS and set(map(type, overhead)) == {int}:
        values["overhead"] = overhead
    return ExchangeCounters(**values)
