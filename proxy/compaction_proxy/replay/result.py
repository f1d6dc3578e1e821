"""Results of rehearsals: figures of each request, and their sums."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import Any, NamedTuple


class RequestPoint(NamedTuple):
    """One request, in tokens as the provider counts them.

    Attributes:
        before: Size as the client sent it.
        after: Size as it was forwarded.
        cached: Part of the forwarded request that the provider had cached.
        cached_before: Part of the client's request that the provider would have had cached.
        round: Whether another checkpoint came into force.
    """

    before: int
    after: int
    cached: int
    cached_before: int
    round: bool


class ReplayBill(NamedTuple):
    """Cost of a conversation, in one unit.

    Attributes:
        without: Cost of the requests as they came, without compaction.
        compacted: Cost of the requests as they were forwarded.
        summaries: Cost of the summary calls.
        pays_back_after: Number of requests from the first compaction until its costs are recovered for good;
            None if they never are, or without a compaction.
    """

    without: float
    compacted: float
    summaries: float
    pays_back_after: int | None

    @property
    def net(self) -> float:
        """Saving by compaction, less the cost of summaries."""
        return self.without - self.compacted - self.summaries


class RequestSpending(NamedTuple):
    """Cost of one request, and of the summary calls for it or since the previous request."""

    without: float
    compacted: float
    summaries: float
    round: bool


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Result of a strategy for one conversation, or for several together.

    Attributes:
        strategy: Name of the strategy.
        conversation: Name of the conversation.
        model: Requested model.
        window: Context window of the model, in tokens.
        trigger: T at the last request, in tokens; None if no compaction starts automatically.
        requests: Number of requests.
        rounds: Number of times that another checkpoint came into force.
        summary_calls: Number of summary calls.
        summary_prompt_tokens: Input tokens of summary calls.
        summary_completion_tokens: Output tokens of summary calls.
        sent_tokens: Tokens that the client sent, in all requests together.
        forwarded_tokens: Tokens that were forwarded, in all requests together.
        largest_tokens: Size of the largest forwarded request, in tokens.
        cached_tokens: Forwarded tokens that the provider had cached.
        cached_without_tokens: Tokens of the client's requests that the provider would have had cached.
        comparable_requests: Number of requests after the first in which no other checkpoint came into force.
        steady_requests: Number of comparable requests that began with everything that was forwarded before.
        over_without: Number of requests that exceed the context window as the client sent them.
        over_with: Number of compacted requests that exceeded the context window and had to be shortened.
        failed_open: Number of requests that were forwarded without a due compaction, because there was no
            summary, or because it would not have shortened the request.
        failed: Number of requests that could not be made to fit, or met a fault of the proxy.
        tokens: Bill in uncached input tokens, at assumed prices.
        dollars: Bill in dollars; None if a price is unknown.
        price_source: Source of the prices.
        points: The requests; empty for several conversations.
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
        """Share of the forwarded tokens that the provider had cached, 0..1."""
        return self.cached_tokens / max(1, self.forwarded_tokens)

    @property
    def cached_share_without(self) -> float:
        """Share of the client's tokens that the provider would have had cached, 0..1."""
        return self.cached_without_tokens / max(1, self.sent_tokens)

    @property
    def prefix_stability(self) -> float:
        """Share of comparable requests that began with everything that was forwarded before, 0..1."""
        return self.steady_requests / self.comparable_requests if self.comparable_requests else 1.0


def build_bill(spendings: Sequence[RequestSpending]) -> ReplayBill:
    """Sums up the cost of requests."""
    first = next((index for index, each in enumerate(spendings) if each.round or each.summaries), None)
    saved = list(accumulate(each.without - each.compacted - each.summaries for each in spendings))
    losing = [index for index, sum_ in enumerate(saved) if sum_ <= 0]
    paid = None
    if first is not None and saved[-1] > 0:
        paid = max(0, max(losing, default=-1) + 1 - first)
    without, compacted, summaries = (sum(column) for column in list(zip(*spendings, strict=True))[:3])
    return ReplayBill(without, compacted, summaries, paid)


def sum_results(results: Sequence[ReplayResult], name: str) -> ReplayResult:
    """Sums up the results of several conversations under one strategy.

    The dollars are summed only if all results have them. Pay-back applies to single conversations, so the sum
    has none.
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
    """Returns the result as JSON values, including derived figures."""
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
        "without": bill_sums.without,
        "with": bill_sums.compacted,
        "summaries": bill_sums.summaries,
        "net": bill_sums.net,
    }
    rounded = {name: round(value, 6) for name, value in figures.items()}
    return {**rounded, "pays_back_after": bill_sums.pays_back_after}


def _sum_bills(bills: Sequence[ReplayBill]) -> ReplayBill:
    return ReplayBill(
        sum(each.without for each in bills),
        sum(each.compacted for each in bills),
        sum(each.summaries for each in bills),
        None,
    )


def _get_common_value(values: Iterable[Any]) -> Any:  # noqa: ANN401 - the type of the compared values
    """Returns the value that all have in common; None if they differ."""
    different = set(values)
    return different.pop() if len(different) == 1 else None
