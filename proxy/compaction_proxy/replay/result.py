"""Defines the results of replays: the figures of each request, and their sums."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import Any, NamedTuple


class RequestPoint(NamedTuple):
    """The sizes of one replayed request, in tokens as the simulated provider counts them.

    Attributes:
        before: Size as the client sent it.
        after: Size as it was forwarded.
        cached: Tokens of the forwarded request that the provider reads from its cache.
        cached_before: Tokens that the provider would read from its cache if all requests were forwarded as
            the client sent them.
        round: Whether this request uses another checkpoint than the previous request.
    """

    before: int
    after: int
    cached: int
    cached_before: int
    round: bool


class ReplayBill(NamedTuple):
    """Cost of a conversation. All costs have the same unit: dollars, or uncached input tokens.

    Attributes:
        uncompacted: Cost of the requests as the client sent them, without compaction.
        compacted: Cost of the requests as they were forwarded.
        summaries: Cost of the summary calls.
        pays_back_after: Number of requests from the first compaction until the total saving, less the cost of
            summaries, becomes positive and stays so. None if it never does, or if there was no compaction.
    """

    uncompacted: float
    compacted: float
    summaries: float
    pays_back_after: int | None

    @property
    def net(self) -> float:
        """Saving by compaction, less the cost of summaries."""
        return self.uncompacted - self.compacted - self.summaries


class RequestSpending(NamedTuple):
    """Cost of one request and of its summary calls.

    Attributes:
        uncompacted: Cost of the request as the client sent it.
        compacted: Cost of the request as it was forwarded.
        summaries: Cost of the summary calls that were made for the request, or in the background after it.
        round: Whether this request uses another checkpoint than the previous request.
    """

    uncompacted: float
    compacted: float
    summaries: float
    round: bool


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Result of the replay of one conversation under a strategy, or the sum of several such results.

    Attributes:
        strategy: Name of the strategy.
        conversation: Name of the conversation.
        model: Requested model.
        window: Context window of the model, in tokens.
        trigger: T at the last request, in tokens; None if no compaction starts automatically.
        requests: Number of requests.
        rounds: Number of requests that use another checkpoint than the request before them.
        summary_calls: Number of summary calls.
        summary_prompt_tokens: Input tokens of summary calls.
        summary_completion_tokens: Output tokens of summary calls.
        sent_tokens: Tokens that the client sent, in all requests together.
        forwarded_tokens: Tokens that were forwarded, in all requests together.
        largest_tokens: Size of the largest forwarded request, in tokens.
        cached_tokens: Forwarded tokens that the provider reads from its cache.
        cached_without_tokens: Tokens that the provider would read from its cache without compaction.
        comparable_requests: Number of requests after the first that use the same checkpoint as the request
            before them.
        steady_requests: Number of comparable requests that begin with all messages of the previous forwarded
            request, so that the provider can read them from its cache.
        over_without: Number of requests that exceed the context window as the client sent them.
        over_with: Number of requests that still exceeded the context window after compaction, and had to be
            shortened.
        failed_open: Number of requests for which a compaction was due but failed: no summary was written, or
            the compaction would not have shortened the request. These requests were forwarded without it.
        failed: Number of requests that could not be made to fit, or during which the proxy had a fault.
        tokens: Costs in uncached input tokens, at assumed ratios of prices (`costs.CACHED_SHARE`).
        dollars: Costs in dollars; None if a price is unknown.
        price_source: Source of the prices.
        points: The sizes of each request; empty for the sum of several conversations.
    """

    strategy: str
    conversation: str
    model: str
    window: int
    trigger: int | None
    requests: int
    rounds: int
    summary_calls: int
    summary_prompt_tokens: int
    summary_completion_tokens: int
    sent_tokens: int
    forwarded_tokens: int
    largest_tokens: int
    cached_tokens: int
    cached_without_tokens: int
    comparable_requests: int
    steady_requests: int
    over_without: int
    over_with: int
    failed_open: int
    failed: int
    tokens: ReplayBill
    dollars: ReplayBill | None
    price_source: str = ""
    points: tuple[RequestPoint, ...] = field(default=(), repr=False)

    @property
    def cached_share(self) -> float:
        """Share of the forwarded tokens that the provider reads from its cache, 0..1."""
        return self.cached_tokens / max(1, self.forwarded_tokens)

    @property
    def cached_share_without(self) -> float:
        """Share of the client's tokens that the cache would serve without compaction, 0..1."""
        return self.cached_without_tokens / max(1, self.sent_tokens)

    @property
    def prefix_stability(self) -> float:
        """Share of `steady_requests` in `comparable_requests`, 0..1; 1 if no requests are comparable."""
        return self.steady_requests / self.comparable_requests if self.comparable_requests else 1.0


def build_bill(spendings: Sequence[RequestSpending]) -> ReplayBill:
    """Adds up the costs of a conversation's requests, and computes `ReplayBill.pays_back_after`."""
    first = next((index for index, each in enumerate(spendings) if each.round or each.summaries), None)
    saved = list(accumulate(each.uncompacted - each.compacted - each.summaries for each in spendings))
    losing = [index for index, sum_ in enumerate(saved) if sum_ <= 0]
    paid = None
    if first is not None and saved[-1] > 0:
        paid = max(0, max(losing, default=-1) + 1 - first)
    without, compacted, summaries = (sum(column) for column in list(zip(*spendings, strict=True))[:3])
    return ReplayBill(without, compacted, summaries, paid)


def sum_results(results: Sequence[ReplayResult], name: str) -> ReplayResult:
    """Sums up the results of several conversations under one strategy.

    The costs in dollars are None if they are unknown for one of the conversations. In the sum,
    `pays_back_after` is None, because it is useful only for a single conversation.
    """
    dollars = [each.dollars for each in results if each.dollars is not None]
    added: dict[str, Any] = {field: sum(getattr(each, field) for each in results) for field in _ADDED}
    return ReplayResult(
        strategy=results[0].strategy,
        conversation=name,
        model=_get_common_value(each.model for each in results) or "",
        window=_get_common_value(each.window for each in results) or 0,
        trigger=_get_common_value(each.trigger for each in results),
        largest_tokens=max(each.largest_tokens for each in results),
        tokens=_sum_bills([each.tokens for each in results]),
        dollars=_sum_bills(dollars) if len(dollars) == len(results) else None,
        price_source=_get_common_value(each.price_source for each in results) or "",
        **added,
    )


def to_fields(result: ReplayResult) -> dict[str, Any]:
    """Returns the result as JSON values, including figures that are computed from its fields."""
    values = {each.name: getattr(result, each.name) for each in fields(result)}
    return values | {
        "cached_share": round(result.cached_share, 4),
        "cached_share_without": round(result.cached_share_without, 4),
        "prefix_stability": round(result.prefix_stability, 4),
        "tokens": _bill_to_fields(result.tokens),
        "dollars": _bill_to_fields(result.dollars) if result.dollars else None,
        "points": [each._asdict() for each in result.points],
    }


_ADDED = (
    "requests", "rounds", "summary_calls", "summary_prompt_tokens", "summary_completion_tokens",
    "sent_tokens", "forwarded_tokens", "cached_tokens", "cached_without_tokens", "comparable_requests",
    "steady_requests", "over_without", "over_with", "failed_open", "failed",
)  # fmt: skip


def _bill_to_fields(bill_sums: ReplayBill) -> dict[str, float | int | None]:
    figures = {
        "without": bill_sums.uncompacted,
        "with": bill_sums.compacted,
        "summaries": bill_sums.summaries,
        "net": bill_sums.net,
    }
    rounded = {name: round(value, 6) for name, value in figures.items()}
    return {**rounded, "pays_back_after": bill_sums.pays_back_after}


def _sum_bills(bills: Sequence[ReplayBill]) -> ReplayBill:
    return ReplayBill(
        sum(each.uncompacted for each in bills),
        sum(each.compacted for each in bills),
        sum(each.summaries for each in bills),
        None,
    )


def _get_common_value(values: Iterable[Any]) -> Any:  # noqa: ANN401 - the type of the compared values
    """Returns the value if all values are equal; None if they differ."""
    different = set(values)
    return different.pop() if len(different) == 1 else None
