"""Replays conversations: passes the requests of a recording to the compactor, in their order.

The compactor is the same as in the proxy, but no model is called. A simulated provider counts tokens and
simulates a prompt cache, and code writes the summaries by rules. The proxy does some work in the background
after a response. A replay waits for this work before it replays the next request, so that the same recording
always gives the same result. The result contains the sizes of the requests, and their costs in tokens and
dollars.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from hashlib import sha256
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from compaction_proxy.compaction.compactor import MAX_REFITS, Compactor
from compaction_proxy.compaction.feedback import UsageFeedback
from compaction_proxy.compaction.request_view import resolve_policy
from compaction_proxy.compaction.summary_request import SummaryRoute
from compaction_proxy.compaction.types import CompactionMode, CompactionStatus, FitRequest, FitResult
from compaction_proxy.config.config import Config, ModelSettings, get_model_settings
from compaction_proxy.config.sections import CompactionSection, SummarySection
from compaction_proxy.core.cost.price import ModelPrice
from compaction_proxy.core.strategies import Policy
from compaction_proxy.providers.types import TokenCounter
from compaction_proxy.providers.windows import get_known_window
from compaction_proxy.replay.provider import (
    ExtractiveSummaryModel,
    ProviderPrompt,
    SimulatedProvider,
    SummaryCallUsage,
)
from compaction_proxy.replay.recordings import DEFAULT_MODEL, Recording, select_lengths
from compaction_proxy.wires.body import RequestBody, parse_body
from compaction_proxy.wires.chat.wire import CHAT
from compaction_proxy.wires.context_errors import Overflow
from compaction_proxy.wires.incremental_reader import KEY_BYTES, IncrementalReader
from compaction_proxy.wires.usage import TokenUsage

# A replay also computes costs in a unit that needs no prices: uncached input tokens of the conversation's
# model. For this, it assumes that a cached token costs a tenth of an uncached one, that a token of a summary
# model costs a tenth of a token of the conversation's model, and that an output token costs as much as five
# input tokens. The price ratios of most providers are similar.
CACHED_SHARE = 0.1
SUMMARY_SHARE = 0.1
OUTPUT_SHARE = 5.0

# Computes the cost of a call. The arguments are the name of the model, the number of input tokens, the number
# of input tokens that the cache served, and the number of output tokens.
ComputeCost = Callable[[str, int, int, int], float]


class RequestPoint(NamedTuple):
    """The sizes of one replayed request, in tokens as the simulated provider counts them.

    Attributes:
        before: Size as the client sent it.
        after: Size as it was forwarded.
        cached: Tokens of the forwarded request that the provider reads from its prompt cache.
        cached_before: Tokens that the provider would read from its prompt cache if all requests were
            forwarded as the client sent them.
        round: Whether this request uses another checkpoint than the previous request. False if this request
            uses no checkpoint.
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
        completion_tokens: Tokens of the recorded reply; 0 if no reply was recorded.
        calls: Summary calls that were made for the request, or in the background after its response.
        trigger: T (the trigger) at this request, in tokens; None if no compaction starts automatically.
        exceeds_window: Whether the request, with the room for its output, still exceeded the context window
            after the first attempt to fit it.
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
    """Costs of a conversation. All costs of a bill have the same unit: dollars, or uncached input tokens.

    Attributes:
        uncompacted: Cost of the requests as the client sent them, without compaction.
        compacted: Cost of the requests as they were forwarded.
        summaries: Cost of the summary calls.
        pays_back_after: Number of requests from the first compaction or summary call until the total saving,
            less the cost of summaries, becomes positive and remains positive. None if this never happens, or
            if the replay had no compaction and no summary call.
    """

    uncompacted: float
    compacted: float
    summaries: float
    pays_back_after: int | None

    @property
    def net(self) -> float:
        """The saving by compaction less the cost of summaries, in the unit of the costs."""
        return self.uncompacted - self.compacted - self.summaries


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Result of the replay of one conversation under a strategy, or the sum of several such results.

    Attributes:
        strategy: Name of the strategy.
        conversation: Name of the conversation.
        model: Requested model.
        window: Context window of the model, in tokens.
        trigger: T (the trigger) at the last request, in tokens; None if no compaction starts automatically.
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
        over_with: Number of requests that still exceeded the context window after the first attempt to fit
            them (`PlayedRequest.exceeds_window`).
        failed_open: Number of requests for which a compaction was due, but which were forwarded without it.
            For example, no summary was written, or the compaction would not have shortened the request.
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
        """Returns the result as JSON values, with three further figures, which are shares between 0 and 1.

        `cached_share` is the share of the forwarded tokens that the provider reads from its cache.
        `cached_share_without` is the same share without compaction. `prefix_stability` is the share of
        `steady_requests` in `comparable_requests`; 1 if no requests are comparable.
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
        prices: Prices of the conversation's model and of the summary models that were called, by model name.
            An unknown price is None.
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
    """Adds up the costs of a conversation's requests and summary calls (`ReplayBill`)."""
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

    `dollars` is None if it is None for one of the conversations. `pays_back_after` is None, because it has a
    meaning only for a single conversation. A model, context window, trigger or price source that differs
    between the conversations becomes empty, 0 or None.
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


# Time limit for the background work after a response, in seconds. If the work takes longer, the replay fails
# with `TimeoutError`. The work normally ends soon, because it does not use the network.
BACKGROUND_TIMEOUT_S = 30.0

# Called with the number of requests replayed so far, and the number of all requests to replay.
ProgressCallback = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Settings of a replay that differ from the configuration. None keeps the configured value.

    Attributes:
        model: Requested model.
        trigger_tokens: The trigger (T), in tokens.
        target_tokens: Size to which a compaction shortens a request, in tokens.
        window: Context window of the model, in tokens.
        every: Interval of the requests to replay: 1 replays every request, 2 every second request.
    """

    model: str | None = None
    trigger_tokens: int | None = None
    target_tokens: int | None = None
    window: int | None = None
    every: int = 1


@dataclass(frozen=True, slots=True)
class ReplayComponents:
    """The parts of the proxy that a replay needs.

    The parts work as in a server, but keep all data in memory, and call no model.

    Attributes:
        compactor: Makes requests fit. It uses `summary_model` for its summaries.
        usage_feedback: Records the token counts of responses, from which later sizes are estimated.
        summary_model: Writes summaries by rules, without a model.
        counter: Counts the tokens of texts for the simulated provider.
        config: The configuration.
        resolve_summary_routes: Returns the routes to the summary models. The arguments are the settings of
            the conversation's model, the policy of the strategy, and the name of the model.
        get_price: Returns the price of a model, or None if it is unknown.
        origin: Origin of the upstream.
    """

    compactor: Compactor
    usage_feedback: UsageFeedback
    summary_model: ExtractiveSummaryModel
    counter: TokenCounter
    config: Config
    resolve_summary_routes: Callable[[ModelSettings, Policy, str], tuple[SummaryRoute, ...]]
    get_price: Callable[[str], ModelPrice | None]
    origin: str


async def replay_recording(
    components: ReplayComponents,
    recording: Recording,
    strategy: str,
    options: ReplayOptions,
    progress: ProgressCallback = lambda *_: None,
) -> ReplayResult:
    """Replays a conversation under a strategy.

    Args:
        components: The parts of the proxy that the replay uses.
        recording: The conversation.
        strategy: Name of a strategy.
        options: Settings that differ from the configuration.
        progress: Called after each replayed request; see `ProgressCallback`.

    Raises:
        TimeoutError: If the background work after a response takes more than `BACKGROUND_TIMEOUT_S` seconds.
    """
    model = options.model or recording.model or DEFAULT_MODEL
    settings = _override_settings(get_model_settings(components.config, model), options)
    window = settings.window or get_known_window(model)
    provider = SimulatedProvider(components.counter)
    uncompacted_provider = SimulatedProvider(components.counter)
    calls = components.summary_model.start_conversation(provider)
    # Each replay has a tenant of its own, so that replays do not share stored data.
    tenant = sha256(f"{recording.name} {strategy} {id(provider)}".encode()).hexdigest()
    reader = IncrementalReader(bytes(KEY_BYTES), CHAT)
    earlier_tasks = asyncio.all_tasks()
    lengths = select_lengths(recording, options.every)
    requests: list[PlayedRequest] = []
    previous_messages: tuple[bytes, ...] = ()
    checkpoint_id = ""
    for number, length in enumerate(lengths, 1):
        call_count = len(calls)
        body = reader.read(recording.build_body(length, model), tenant)
        ask = _build_fit_request(components, settings, strategy, model, tenant, body)
        fit = await components.compactor.fit_request(ask)
        sent = ProviderPrompt(model, body.prompt_members, recording.messages[:length])
        prompt, output_tokens = _parse_forwarded(sent, ask, fit)
        over = overflow = _find_overflow(provider, window, prompt, output_tokens)
        for refusals in range(1, MAX_REFITS + 1):
            if overflow is None:
                break
            shorter = await components.compactor.refit_after_refusal(ask, fit, overflow, refusals)
            if shorter is None:
                break
            fit = shorter
            prompt, output_tokens = _parse_forwarded(sent, ask, fit)
            overflow = _find_overflow(provider, window, prompt, output_tokens)
        size, cached = provider.count_prompt_tokens(prompt), provider.count_and_cache_prompt(prompt)
        point = RequestPoint(
            before=uncompacted_provider.count_prompt_tokens(sent),
            after=size,
            cached=cached,
            cached_before=uncompacted_provider.count_and_cache_prompt(sent),
            round=fit.report.checkpoint_id != checkpoint_id and bool(fit.report.round),
        )
        has_stable_prefix = tuple(prompt.messages[: len(previous_messages)]) == previous_messages
        previous_messages = tuple(prompt.messages)
        checkpoint_id = fit.report.checkpoint_id
        completion_tokens = provider.count_answer_tokens(recording.get_answer(length), model)
        failed_open = fit.report.status is CompactionStatus.FAILED_OPEN
        failed = overflow is not None or (failed_open and fit.report.reason == "internal")
        usage = None if failed else TokenUsage(size, completion_tokens, cached)
        await components.usage_feedback.learn_from_answer(ask, fit, usage)
        if fit.should_prepare and not failed:
            await components.compactor.prepare_round(ask)
        await _wait_for_background_tasks(earlier_tasks)
        requests.append(
            PlayedRequest(
                point,
                completion_tokens,
                tuple(calls[call_count:]),
                fit.report.trigger,
                exceeds_window=over is not None,
                failed=failed,
                has_stable_prefix=has_stable_prefix,
                failed_open=failed_open,
            )
        )
        progress(number, len(lengths))
    models = {model, *(call.model for call in calls)}
    prices = {name: components.get_price(name) for name in models}
    return build_result(strategy, recording.name, model, window, requests, prices)


def _build_fit_request(
    components: ReplayComponents,
    settings: ModelSettings,
    strategy: str,
    model: str,
    tenant: str,
    body: RequestBody,
) -> FitRequest:
    policy = resolve_policy(settings, strategy)
    return FitRequest(
        body=body,
        model=model,
        tenant=tenant,
        conversation=None,
        origin=components.origin,
        settings=settings,
        mode=CompactionMode.ACTIVE,
        trigger_tokens=None,
        resolve_summary_routes=lambda: components.resolve_summary_routes(settings, policy, model),
        patience_s=None,
        strategy=strategy,
    )


def _parse_forwarded(sent: ProviderPrompt, ask: FitRequest, fit: FitResult) -> tuple[ProviderPrompt, int]:
    """Returns the forwarded prompt, and the requested limit of output tokens (0 if there is no limit)."""
    if fit.raw is ask.body.raw:
        return sent, ask.body.max_output or 0
    body = parse_body(fit.raw, CHAT)
    return ProviderPrompt(sent.model, body.prompt_members, body.messages), body.max_output or 0


def _find_overflow(
    provider: SimulatedProvider, window: int, prompt: ProviderPrompt, output_tokens: int
) -> Overflow | None:
    """Returns the error with which the provider would refuse a prompt; None if the prompt fits.

    A prompt fits if the prompt and the requested output tokens do not exceed the context window `window`.
    """
    size = provider.count_prompt_tokens(prompt)
    if size + output_tokens <= window:
        return None
    return Overflow("context" if size > window else "context_output", window, size, output_tokens)


async def _wait_for_background_tasks(earlier_tasks: set[asyncio.Task[Any]]) -> None:
    """Waits for the background work of the proxy: all tasks that are not in `earlier_tasks`.

    Raises:
        TimeoutError: If the work takes more than `BACKGROUND_TIMEOUT_S` seconds.
    """
    async with asyncio.timeout(BACKGROUND_TIMEOUT_S):
        while pending := asyncio.all_tasks() - earlier_tasks:
            await asyncio.wait(pending)


def _override_settings(settings: ModelSettings, options: ReplayOptions) -> ModelSettings:
    """Returns the settings with the options applied, and without a limit on summary calls per hour.

    The limit would be wrong here, because a replay makes the summary calls of several days within seconds.
    """
    over: dict[str, object] = {}
    if options.trigger_tokens is not None:
        over["trigger"] = [{"tokens": options.trigger_tokens}]
    if options.target_tokens is not None:
        over["target_tokens"] = options.target_tokens
    compaction = settings.compaction.model_dump(exclude_unset=True) | over
    summary = settings.summary.model_dump(exclude_unset=True) | {"calls_per_hour": 0}
    return replace(
        settings,
        window=options.window or settings.window,
        compaction=CompactionSection.model_validate(compaction),
        summary=SummarySection.model_validate(summary),
    )
