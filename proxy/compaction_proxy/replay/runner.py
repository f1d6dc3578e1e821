"""Replays a conversation: gives each of its requests to the compactor, in the order in which they were sent.

The compactor is the same as in the proxy, but no model is called. A simulated provider only counts tokens,
and code writes the summaries by fixed rules. The proxy does some work in the background after an answer. A
replay waits for this work before it replays the next request, so that the same recording always gives the
same result.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

from compaction_proxy.compaction.compactor import MAX_REFITS, Compactor
from compaction_proxy.compaction.feedback import UsageFeedback
from compaction_proxy.compaction.request_limits import resolve_policy
from compaction_proxy.compaction.summary_request import SummaryRoute
from compaction_proxy.compaction.types import CompactionMode, CompactionStatus, FitRequest, FitResult
from compaction_proxy.config.config import ModelSettings
from compaction_proxy.config.sections import CompactionSection, SummarySection
from compaction_proxy.core.cost.price import ModelPrice
from compaction_proxy.core.strategies import Policy
from compaction_proxy.providers.types import TokenCounter
from compaction_proxy.providers.windows import get_known_window
from compaction_proxy.replay.costs import PlayedRequest, ReplaySubject, build_result
from compaction_proxy.replay.provider import ProviderPrompt, SimulatedProvider
from compaction_proxy.replay.recordings import DEFAULT_MODEL, Recording, select_lengths
from compaction_proxy.replay.result import ReplayResult, RequestPoint
from compaction_proxy.replay.writer import ExtractiveSummaryModel, SummaryCallUsage
from compaction_proxy.wires.body import RequestBody, parse_body
from compaction_proxy.wires.chat.wire import CHAT
from compaction_proxy.wires.context_errors import Overflow
from compaction_proxy.wires.incremental_reader import KEY_BYTES, IncrementalReader
from compaction_proxy.wires.usage import TokenUsage

# Time limit for the background work after an answer, in seconds. The work normally ends soon, because it does
# not wait for any network.
BACKGROUND_TIMEOUT_S = 30.0

# Called with the number of requests replayed so far, and the number of all requests to replay.
ProgressCallback = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Settings of a replay that differ from the configuration. None keeps the configured value.

    Attributes:
        model: Requested model.
        trigger_tokens: T, in tokens.
        target_tokens: Size after a compaction, in tokens.
        window: Context window of the model, in tokens.
        every: Interval of the requests to replay: 2 replays every second request.
    """

    model: str | None = None
    trigger_tokens: int | None = None
    target_tokens: int | None = None
    window: int | None = None
    every: int = 1


@dataclass(frozen=True, slots=True)
class ReplayComponents:
    """The parts of the proxy that a replay needs.

    They work as in a server, but store everything in memory, separate from any server's data.

    Attributes:
        compactor: Makes requests fit. It uses `summary_model` for its summaries.
        usage_feedback: Records the token counts of answers, from which later sizes are estimated.
        summary_model: Writes summaries by rules, without a model.
        counter: Counts the tokens of texts for the simulated provider.
        get_settings: Returns the settings for a model name.
        resolve_summary_routes: Returns the routes to the summary models, given the settings of the
            conversation's model, the strategy and the name of that model.
        get_price: Returns the price of a model, or None if it is unknown.
        origin: Origin of the upstream.
    """

    compactor: Compactor
    usage_feedback: UsageFeedback
    summary_model: ExtractiveSummaryModel
    counter: TokenCounter
    get_settings: Callable[[str], ModelSettings]
    resolve_summary_routes: Callable[[ModelSettings, Policy, str], tuple[SummaryRoute, ...]]
    get_price: Callable[[str], ModelPrice | None]
    origin: str


@dataclass(slots=True)
class _ReplayRun:
    """The state of the replay of one conversation under one strategy.

    Attributes:
        recording: The conversation.
        model: Requested model.
        strategy: Name of the strategy.
        settings: The settings for the model, with the options of the replay applied.
        tenant: A tenant that only this replay uses, so that replays do not share stored data.
        provider: Counts and caches the forwarded requests and the summary calls.
        uncompacted_provider: Counts and caches the requests as the client sent them, for the costs without
            compaction.
        calls: Usage of the summary calls so far. The summary model appends to this list.
        reader: Parses the requests.
        earlier_tasks: The tasks that ran before the replay. The replay does not wait for them.
        forwarded: Messages of the previous forwarded request.
        place: Id of the checkpoint that the previous request used, as hex digits; empty if it used none.
    """

    recording: Recording
    model: str
    strategy: str
    settings: ModelSettings
    tenant: str
    provider: SimulatedProvider
    uncompacted_provider: SimulatedProvider
    calls: list[SummaryCallUsage]
    reader: IncrementalReader = field(default_factory=lambda: IncrementalReader(bytes(KEY_BYTES), CHAT))
    earlier_tasks: frozenset[asyncio.Task[Any]] = field(
        default_factory=lambda: frozenset(asyncio.all_tasks())
    )
    forwarded: tuple[bytes, ...] = ()
    place: str = ""

    @property
    def window(self) -> int:
        """Context window of the model, in tokens."""
        return self.settings.window or get_known_window(self.model)


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
        progress: Called after each request; see `ProgressCallback`.
    """
    model = options.model or recording.model or DEFAULT_MODEL
    settings = _override_settings(components.get_settings(model), options)
    provider = SimulatedProvider(components.counter)
    tenant = sha256(f"{recording.name} {strategy} {id(provider)}".encode()).hexdigest()
    calls = components.summary_model.start_conversation(provider)
    unchanged = SimulatedProvider(components.counter)
    run = _ReplayRun(recording, model, strategy, settings, tenant, provider, unchanged, calls)
    requests: list[PlayedRequest] = []
    lengths = select_lengths(recording, options.every)
    for number, length in enumerate(lengths, 1):
        requests.append(await _replay_request(components, run, length))
        progress(number, len(lengths))
    return _build_run_result(components, run, requests)


async def _replay_request(components: ReplayComponents, run: _ReplayRun, length: int) -> PlayedRequest:
    """Replays one request, and finishes the work that the proxy does after an answer."""
    since = len(run.calls)
    raw = run.recording.build_body(length, run.model)
    body = run.reader.read(raw, run.tenant)
    ask = _build_fit_request(components, run, body)
    fit = await components.compactor.fit_request(ask)
    sent = ProviderPrompt(run.model, body.prompt_members, run.recording.messages[:length])
    prompt = _build_prompt(sent, ask, fit)
    over = _find_overflow(run, body, run.provider.count_prompt_tokens(prompt))
    if over is not None:
        fit = await _refit_until_accepted(components, run, ask, fit, over)
        prompt = _build_prompt(sent, ask, fit)
    size, cached = run.provider.count_prompt_tokens(prompt), run.provider.count_and_cache_prompt(prompt)
    point = RequestPoint(
        before=run.uncompacted_provider.count_prompt_tokens(sent),
        after=size,
        cached=cached,
        cached_before=run.uncompacted_provider.count_and_cache_prompt(sent),
        round=fit.report.checkpoint_id != run.place and bool(fit.report.round),
    )
    has_stable_prefix = tuple(prompt.messages[: len(run.forwarded)]) == run.forwarded
    run.forwarded, run.place = tuple(prompt.messages), fit.report.checkpoint_id
    completion = run.provider.count_answer_tokens(run.recording.get_answer(length), run.model)
    failed_open = fit.report.status is CompactionStatus.FAILED_OPEN
    failed = _find_overflow(run, body, size) is not None or (failed_open and fit.report.reason == "internal")
    await components.usage_feedback.learn_from_answer(
        ask, fit, None if failed else TokenUsage(size, completion, cached)
    )
    if fit.should_prepare and not failed:
        await components.compactor.prepare_round(ask)
    await _wait_for_background_tasks(run.earlier_tasks)
    return PlayedRequest(
        point,
        completion,
        tuple(run.calls[since:]),
        fit.report.trigger,
        over is not None,
        failed,
        has_stable_prefix,
        failed_open,
    )


def _build_fit_request(components: ReplayComponents, run: _ReplayRun, body: RequestBody) -> FitRequest:
    policy = resolve_policy(run.settings, run.strategy)
    return FitRequest(
        body=body,
        model=run.model,
        tenant=run.tenant,
        conversation=None,
        origin=components.origin,
        settings=run.settings,
        mode=CompactionMode.ACTIVE,
        trigger_tokens=None,
        resolve_summary_routes=lambda: components.resolve_summary_routes(run.settings, policy, run.model),
        patience_s=None,
        strategy=run.strategy,
    )


def _build_prompt(sent: ProviderPrompt, ask: FitRequest, fit: FitResult) -> ProviderPrompt:
    """Returns the prompt that the proxy forwards; `sent` if the compactor changed nothing."""
    return sent if fit.raw is ask.body.raw else sent._replace(messages=parse_body(fit.raw, CHAT).messages)


def _find_overflow(run: _ReplayRun, body: RequestBody, size_tokens: int) -> Overflow | None:
    """Returns the error with which the provider would refuse a prompt of `size_tokens`; None if it fits."""
    output = body.max_output or 0
    if size_tokens + output <= run.window:
        return None
    return Overflow(
        "context" if size_tokens > run.window else "context_output", run.window, size_tokens, output
    )


async def _refit_until_accepted(
    components: ReplayComponents, run: _ReplayRun, ask: FitRequest, refused: FitResult, over: Overflow
) -> FitResult:
    """Shortens a refused request until it fits or the proxy gives up. Returns the last result."""
    fit, overflow = refused, over
    for refusals in range(1, MAX_REFITS + 1):
        shorter = await components.compactor.refit_after_refusal(ask, fit, overflow, refusals)
        if shorter is None:
            return fit
        fit = shorter
        forwarded = parse_body(fit.raw, CHAT)
        size = run.provider.count_prompt_tokens(
            ProviderPrompt(run.model, forwarded.prompt_members, forwarded.messages)
        )
        again = _find_overflow(run, forwarded, size)
        if again is None:
            return fit
        overflow = again
    return fit


async def _wait_for_background_tasks(earlier_tasks: frozenset[asyncio.Task[Any]]) -> None:
    """Waits for the background work of the proxy: all tasks that are not in `earlier_tasks`."""
    async with asyncio.timeout(BACKGROUND_TIMEOUT_S):
        while pending := asyncio.all_tasks() - earlier_tasks:
            await asyncio.wait(pending)


def _override_settings(settings: ModelSettings, options: ReplayOptions) -> ModelSettings:
    """Returns the settings with the options applied, and without the hourly limit on summary calls.

    The limit must not apply, because a replay makes the summary calls of several days within seconds.
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


def _build_run_result(
    components: ReplayComponents, run: _ReplayRun, requests: list[PlayedRequest]
) -> ReplayResult:
    models = {run.model: None, **{call.model: None for call in run.calls}}
    return build_result(
        ReplaySubject(run.strategy, run.recording.name, run.model, run.window),
        requests,
        {model: components.get_price(model) for model in models},
    )
