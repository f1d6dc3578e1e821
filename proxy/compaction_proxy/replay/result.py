"""Builds and sums up the results of replays: sizes, and costs in tokens and dollars."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from compaction_proxy.core.cost.price import ModelPrice
from compaction_proxy.replay.writer import SummaryCallUsage

# Costs are also computed in a unit that needs no prices: uncached input tokens of the conversation's model.
# For this, a cached token is assumed to cost a tenth of an uncached one, a token of a summary model a tenth
# of a token of the conversation's model, and an output token as much as five input tokens. The ratios of most
# providers' prices are close to these.
CACHED_SHARE = 0.1
SUMMARY_SHARE = 0.1
OUTPUT_SHARE = 5.0

# Computes the cost of a call from the name of the model, its input tokens, those of them that the cache
# served, and its output tokens.
ComputeCost = Callable[[str, int, int, int], float]


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


@dataclass(frozen=True, slots=True)
class PlayedRequest:
    """One replayed request.

    Attributes:
        point: Sizes of the request.
        completion_tokens: Tokens of the recorded answer.
        calls: Summary calls that were made for the request, or in the background after its answer.
        trigger: T at this request, in tokens; None if no compaction starts automatically.
        exceeds_window: Whether the request still exceeded the context window after the compactor had fitted
            it, and had to be shortened.
        failed: Whether the request could not be made to fit, or the proxy had a fault.
        has_stable_prefix: Whether the forwarded request began with all messages of the previous forwarded
            request, so that the provider could read them from its cache.
        failed_open: Whether a compaction was due, but the request was forwarded without it.
    """

    point: RequestPoint
    completion_tokens: int
    calls: tuple[SummaryCallUsage, ...]
    trigger: int | None
    exceeds_window: bool
    failed: bool
    has_stable_prefix: bool
    failed_open: bool = False


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
        tokens: Costs in uncached input tokens, at assumed ratios of prices (`CACHED_SHARE`).
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

    def to_fields(self) -> dict[str, Any]:
        """Returns the result as JSON values, including figures that are computed from its fields.

        The shares are between 0 and 1. `prefix_stability` is the share of `steady_requests` in
        `comparable_requests`; 1 if no requests are comparable.
        """
        stability = self.steady_requests / self.comparable_requests if self.comparable_requests else 1.0
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return values | {
            "cached_share": round(self.cached_tokens / max(1, self.forwarded_tokens), 4),
            "cached_share_without": round(self.cached_without_tokens / max(1, self.sent_tokens), 4),
            "prefix_stability": round(stability, 4),
            "tokens": _bill_to_fields(self.tokens),
            "dollars": _bill_to_fields(self.dollars) if self.dollars else None,
            "points": [each._asdict() for each in self.points],
        }


def build_result(
    strategy: str,
    conversation: str,
    model: str,
    window: int,
    requests: Sequence[PlayedRequest],
    prices: Mapping[str, ModelPrice | None],
) -> ReplayResult:
    """Builds the result of a replay from the replayed requests.

    Args:
        strategy: Name of the strategy.
        conversation: Name of the conversation.
        model: Requested model.
        window: Context window of the model, in tokens.
        requests: The replayed requests, in order.
        prices: Prices of the conversation's model and the used summary models, by model name. A price that is
            unknown is None.
    """
    points = tuple(each.point for each in requests)
    calls = [call for each in requests for call in each.calls]
    steady = [later.has_stable_prefix for _, later in pairwise(requests) if not later.point.round]
    known = {name: price for name, price in prices.items() if price is not None}

    def weigh_tokens(name: str, prompt: int, cached: int, completion: int) -> float:
        share = 1.0 if name == model else SUMMARY_SHARE
        return share * (prompt - cached + CACHED_SHARE * cached + OUTPUT_SHARE * completion)

    def compute_dollars(name: str, prompt: int, cached: int, completion: int) -> float:
        return known[name].compute_cost(prompt, cached, completion)

    return ReplayResult(
        strategy=strategy,
        conversation=conversation,
        model=model,
        window=window,
        trigger=requests[-1].trigger,
        requests=len(requests),
        rounds=sum(each.round for each in points),
        summary_calls=len(calls),
        summary_prompt_tokens=sum(call.prompt_tokens for call in calls),
        summary_completion_tokens=sum(call.completion_tokens for call in calls),
        sent_tokens=sum(each.before for each in points),
        forwarded_tokens=sum(each.after for each in points),
        largest_tokens=max(each.after for each in points),
        cached_tokens=sum(each.cached for each in points),
        cached_without_tokens=sum(each.cached_before for each in points),
        comparable_requests=len(steady),
        steady_requests=sum(steady),
        over_without=sum(each.before > window for each in points),
        over_with=sum(each.exceeds_window for each in requests),
        failed_open=sum(each.failed_open for each in requests),
        failed=sum(each.failed for each in requests),
        tokens=build_bill(model, requests, weigh_tokens),
        dollars=build_bill(model, requests, compute_dollars) if len(known) == len(prices) else None,
        price_source=known[model].source if model in known else "",
        points=points,
    )


def build_bill(model: str, requests: Sequence[PlayedRequest], compute_cost: ComputeCost) -> ReplayBill:
    """Adds up the costs of a conversation's requests, and computes `ReplayBill.pays_back_after`."""
    rows = [(each.point, each.completion_tokens) for each in requests]
    uncompacted = [compute_cost(model, point.before, point.cached_before, tokens) for point, tokens in rows]
    compacted = [compute_cost(model, point.after, point.cached, tokens) for point, tokens in rows]
    summaries = [sum(compute_cost(*call) for call in each.calls) for each in requests]
    costs = zip(uncompacted, compacted, summaries, strict=True)
    saved = list(accumulate(without - compact - paid for without, compact, paid in costs))
    first = next((index for index, each in enumerate(requests) if each.point.round or each.calls), None)
    pays_back_after = None
    if first is not None and saved[-1] > 0:
        last_loss = max((index for index, total in enumerate(saved) if total <= 0), default=-1)
        pays_back_after = max(0, last_loss + 1 - first)
    return ReplayBill(sum(uncompacted), sum(compacted), sum(summaries), pays_back_after)


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


_ADDED = (
    "requests", "rounds", "summary_calls", "summary_prompt_tokens", "summary_completion_tokens",
    "sent_tokens", "forwarded_tokens", "cached_tokens", "cached_without_tokens", "comparable_requests",
    "steady_requests", "over_without", "over_with", "failed_open", "failed",
)  # fmt: skip


def _bill_to_fields(bill: ReplayBill) -> dict[str, float | int | None]:
    return {
        "without": round(bill.uncompacted, 6),
        "with": round(bill.compacted, 6),
        "summaries": round(bill.summaries, 6),
        "net": round(bill.net, 6),
        "pays_back_after": bill.pays_back_after,
    }


def _sum_bills(bills: Sequence[ReplayBill]) -> ReplayBill:
    uncompacted, compacted, summaries, _ = zip(*bills, strict=True)
    return ReplayBill(sum(uncompacted), sum(compacted), sum(summaries), None)


def _get_common_value(values: Iterable[Any]) -> Any:  # noqa: ANN401 - the type of the compared values
    """Returns the value if all values are equal; None if they differ."""
    different = set(values)
    return different.pop() if len(different) == 1 else None
