"""Builds the result of a replay: adds up the sizes of its requests, and their costs in tokens and dollars."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from compaction_proxy.core.cost.price import ModelPrice
from compaction_proxy.replay.result import ReplayBill, ReplayResult, RequestPoint, RequestSpending, build_bill
from compaction_proxy.replay.writer import SummaryCallUsage

# Costs are also computed in a unit that needs no prices: uncached input tokens of the conversation's model.
# For this, a cached token is assumed to cost a tenth of an uncached one, a token of a summary model a tenth
# of a token of the conversation's model, and an output token as much as five input tokens. The ratios of most
# providers' prices are close to these.
CACHED_SHARE = 0.1
SUMMARY_SHARE = 0.1
OUTPUT_SHARE = 5.0


class ReplaySubject(NamedTuple):
    """The subject of a replay: strategy, name of the conversation, its model, and the context window."""

    strategy: str
    conversation: str
    model: str
    window: int


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


def build_result(
    subject: ReplaySubject, requests: Sequence[PlayedRequest], prices: Mapping[str, ModelPrice | None]
) -> ReplayResult:
    """Builds the result of a replay from the replayed requests.

    Args:
        subject: Subject of the replay.
        requests: The replayed requests, in order.
        prices: Prices of the conversation's model and the used summary models, by model name. A price that is
            unknown is None.
    """
    points = tuple(each.point for each in requests)
    calls = [call for each in requests for call in each.calls]
    steady = [later.has_stable_prefix for _, later in pairwise(requests) if not later.point.round]
    own = prices[subject.model]
    return ReplayResult(
        strategy=subject.strategy,
        conversation=subject.conversation,
        model=subject.model,
        window=subject.window,
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
        over_without=sum(each.before > subject.window for each in points),
        over_with=sum(each.exceeds_window for each in requests),
        failed_open=sum(each.failed_open for each in requests),
        failed=sum(each.failed for each in requests),
        tokens=build_bill(list(_compute_token_spendings(subject.model, requests))),
        dollars=_build_dollar_bill(subject.model, requests, prices),
        price_source=own.source if own else "",
        points=points,
    )


def _compute_token_spendings(model: str, requests: Sequence[PlayedRequest]) -> Iterator[RequestSpending]:
    """Yields the cost of each request in uncached input tokens of the conversation's model."""
    for each in requests:
        point = each.point
        written = OUTPUT_SHARE * each.completion_tokens
        yield RequestSpending(
            _weigh_prompt(point.before, point.cached_before) + written,
            _weigh_prompt(point.after, point.cached) + written,
            sum(_weigh_summary_call(call, model) for call in each.calls),
            point.round,
        )


def _weigh_summary_call(call: SummaryCallUsage, model: str) -> float:
    share = 1.0 if call.model == model else SUMMARY_SHARE
    return share * (
        _weigh_prompt(call.prompt_tokens, call.cached_tokens) + OUTPUT_SHARE * call.completion_tokens
    )


def _weigh_prompt(tokens: int, cached: int) -> float:
    return tokens - cached + CACHED_SHARE * cached


def _build_dollar_bill(
    model: str, requests: Sequence[PlayedRequest], prices: Mapping[str, ModelPrice | None]
) -> ReplayBill | None:
    """Computes the bill in dollars; None if the price of a model is unknown."""
    known = {name: price for name, price in prices.items() if price is not None}
    return (
        build_bill(list(_compute_dollar_spendings(model, requests, known)))
        if len(known) == len(prices)
        else None
    )


def _compute_dollar_spendings(
    model: str, requests: Sequence[PlayedRequest], prices: Mapping[str, ModelPrice]
) -> Iterator[RequestSpending]:
    own = prices[model]
    for each in requests:
        point = each.point
        yield RequestSpending(
            own.compute_cost(point.before, point.cached_before, each.completion_tokens),
            own.compute_cost(point.after, point.cached, each.completion_tokens),
            sum(
                prices[call.model].compute_cost(
                    call.prompt_tokens, call.cached_tokens, call.completion_tokens
                )
                for call in each.calls
            ),
            point.round,
        )
