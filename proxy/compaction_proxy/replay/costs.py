"""From the requests that were played to what they come to, in tokens and in dollars."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from compaction_proxy.core.cost.price import ModelPrice
from compaction_proxy.replay.result import ReplayBill, ReplayResult, RequestPoint, RequestSpending, build_bill
from compaction_proxy.replay.writer import SummaryCallUsage

# Where no price is known, costs are told in uncached input tokens of the conversation's model. Assumed is
# what most providers charge: a cached token a tenth of another one, a token of a cheap summary model
# likewise, and an output token as much as five of its input.
CACHED_SHARE = 0.1
SUMMARY_SHARE = 0.1
OUTPUT_SHARE = 5.0


class ReplaySubject(NamedTuple):
    """What was played: a strategy's name, what the conversation is called, its model, and its window."""

    strategy: str
    conversation: str
    model: str
    window: int


@dataclass(frozen=True, slots=True)
class PlayedRequest:
    """One request that was played.

    Attributes:
        point: Its sizes.
        completion: Tokens of the answer that it got when it was recorded.
        calls: Summary calls made for it, or behind its answer.
        trigger: T, in tokens; None: nothing fires by itself.
        over: Whether it was still over the window once it was compacted, and had to be made shorter.
        failed: Whether it could not be made to fit, or met a fault of ours.
        has_stable_prefix: Whether it began with all that was forwarded before.
        failed_open: Whether a round was due for it, and it went on without.
    """

    point: RequestPoint
    completion: int
    calls: tuple[SummaryCallUsage, ...]
    trigger: int | None
    over: bool
    failed: bool
    has_stable_prefix: bool
    failed_open: bool = False


def build_result(
    subject: ReplaySubject, requests: Sequence[PlayedRequest], prices: Mapping[str, ModelPrice | None]
) -> ReplayResult:
    """What requests come to.

    Args:
        subject: What was played.
        requests: Its requests, in order.
        prices: Of every model that was asked, the conversation's and those that wrote summaries.
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
        summary_prompt_tokens=sum(call.prompt for call in calls),
        summary_completion_tokens=sum(call.completion for call in calls),
        sent_tokens=sum(each.before for each in points),
        forwarded_tokens=sum(each.after for each in points),
        largest_tokens=max(each.after for each in points),
        cached_tokens=sum(each.cached for each in points),
        cached_without_tokens=sum(each.cached_before for each in points),
        comparable_requests=len(steady),
        steady_requests=sum(steady),
        over_without=sum(each.before > subject.window for each in points),
        over_with=sum(each.over for each in requests),
        failed_open=sum(each.failed_open for each in requests),
        failed=sum(each.failed for each in requests),
        tokens=build_bill(list(_compute_token_spendings(subject.model, requests))),
        dollars=_build_dollar_bill(subject.model, requests, prices),
        price_source=own.source if own else "",
        points=points,
    )


def _compute_token_spendings(model: str, requests: Sequence[PlayedRequest]) -> Iterator[RequestSpending]:
    """What requests cost in uncached input tokens of the conversation's model."""
    for each in requests:
        point = each.point
        written = OUTPUT_SHARE * each.completion
        yield RequestSpending(
            _weigh_prompt(point.before, point.cached_before) + written,
            _weigh_prompt(point.after, point.cached) + written,
            sum(_weigh_summary_call(call, model) for call in each.calls),
            point.round,
        )


def _weigh_summary_call(call: SummaryCallUsage, model: str) -> float:
    share = 1.0 if call.model == model else SUMMARY_SHARE
    return share * (_weigh_prompt(call.prompt, call.cached) + OUTPUT_SHARE * call.completion)


def _weigh_prompt(tokens: int, cached: int) -> float:
    return tokens - cached + CACHED_SHARE * cached


def _build_dollar_bill(
    model: str, requests: Sequence[PlayedRequest], prices: Mapping[str, ModelPrice | None]
) -> ReplayBill | None:
    """What requests cost in dollars; None if the price of a model is not known."""
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
            own.compute_cost(point.before, point.cached_before, each.completion),
            own.compute_cost(point.after, point.cached, each.completion),
            sum(
                prices[call.model].compute_cost(call.prompt, call.cached, call.completion)
                for call in each.calls
            ),
            point.round,
        )
