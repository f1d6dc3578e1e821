"""What came of a rehearsal: figures of each request, and what they come to."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import Any, NamedTuple


class RequestPoint(NamedTuple):
    """One request, in tokens as the provider counts them.

    Attributes:
        before: What the client sent.
        after: What was forwarded.
        cached: How much of that the provider had cached.
        cached_before: How much it would have had cached of what the client sent.
        round: Whether another checkpoint came into force.
    """

    before: int
    after: int
    cached: int
    cached_before: int
    round: bool


class ReplayBill(NamedTuple):
    """What a conversation costs.

    Attributes:
        without: Its requests as they came, never compacted.
        compacted: Its requests as they were forwarded.
        summaries: The summary calls.
        pays_back_after: Requests from the first round until all that it cost has come back for good; None if
            it does not, or there was no round.
    """

    without: float
    compacted: float
    summaries: float
    pays_back_after: int | None

    @property
    def net(self) -> float:
        """What compacting saves, what it costs taken off."""
        return self.without - self.compacted - self.summaries


class RequestSpending(NamedTuple):
    """What one request costs, and the summary calls made for it or since the one before."""

    without: float
    compacted: float
    summaries: float
    round: bool


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What a strategy does with a conversation, or with several together.

    Attributes:
        strategy: Its name.
        conversation: What the conversation is called.
        model: The model that it asks.
        window: Of the model, in tokens.
        trigger: T at the last request, in tokens; None: nothing fires by itself.
        requests: Number of requests.
        rounds: How often another checkpoint came into force.
        summary_calls: Calls to a summary model.
        summary_prompt_tokens: Input of them.
        summary_completion_tokens: Output of them.
        sent_tokens: What the client sent, in all requests together.
        forwarded_tokens: What was forwarded.
        largest_tokens: The largest request that was forwarded.
        cached_tokens: What the provider had cached of what was forwarded.
        cached_without_tokens: What it would have had cached of what the client sent.
        comparable_requests: Requests after the first that no round came into force in.
        steady_requests: How many of them began with all that was forwarded before.
        over_without: Requests that are over the window as the client sent them.
        over_with: Requests that were over it, and had to be made shorter after all.
        failed_open: Requests that a round was due for, and that went on without: no summary came, or it would
            have made nothing shorter.
        failed: Requests that could not be made to fit, or met a fault of ours.
        tokens: The bill in uncached input tokens, at assumed shares.
        dollars: The bill in dollars; None where a price is not known.
        price_source: Where the prices are from.
        points: Its requests; empty for several conversations.
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
        """How much of what was forwarded the provider had cached, 0..1."""
        return self.cached_tokens / max(1, self.forwarded_tokens)

    @property
    def cached_share_without(self) -> float:
        """How much it would have had cached of what the client sent, 0..1."""
        return self.cached_without_tokens / max(1, self.sent_tokens)

    @property
    def prefix_stability(self) -> float:
        """Of the requests that no round came into force in, the share that began as the one before, 0..1."""
        return self.steady_requests / self.comparable_requests if self.comparable_requests else 1.0


def build_bill(spendings: Sequence[RequestSpending]) -> ReplayBill:
    """What requests come to."""
    first = next((index for index, each in enumerate(spendings) if each.round or each.summaries), None)
    saved = list(accumulate(each.without - each.compacted - each.summaries for each in spendings))
    losing = [index for index, sum_ in enumerate(saved) if sum_ <= 0]
    paid = None
    if first is not None and saved[-1] > 0:
        paid = max(0, max(losing, default=-1) + 1 - first)
    without, compacted, summaries = (sum(column) for column in list(zip(*spendings, strict=True))[:3])
    return ReplayBill(without, compacted, summaries, paid)


def sum_results(results: Sequence[ReplayResult], name: str) -> ReplayResult:
    """Several conversations under one strategy, together.

    Dollars are told only if all have them. Pay-back is of each conversation, and so not of their sum.
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
    """The result as JSON values, with what follows from its figures."""
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


def _get_common_value(values: Iterable[Any]) -> Any:  # noqa: ANN401 - the type of whatever is compared
    """What all of them are; None if they differ."""
    different = set(values)
    return different.pop() if len(different) == 1 else None
