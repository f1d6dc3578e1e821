"""Replays a conversation: gives each of its requests to the compactor, in the order in which they were sent.

The compactor is the same as in the proxy, but no model is called. A simulated provider only counts tokens,
and code writes the summaries by fixed rules. The proxy does some work in the background after an answer. A
replay waits for this work before it replays the next request, so that the same recording always gives the
same result.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

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
from compaction_proxy.replay.provider import ProviderPrompt, SimulatedProvider
from compaction_proxy.replay.recordings import DEFAULT_MODEL, Recording, select_lengths
from compaction_proxy.replay.result import PlayedRequest, ReplayResult, RequestPoint, build_result
from compaction_proxy.replay.writer import ExtractiveSummaryModel
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
        config: The configuration.
        resolve_summary_routes: Returns the routes to the summary models, given the settings of the
            conversation's model, the strategy and the name of that model.
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
        progress: Called after each request; see `ProgressCallback`.
    """
    model = options.model or recording.model or DEFAULT_MODEL
    settings = _override_settings(get_model_settings(components.config, model), options)
    window = settings.window or get_known_window(model)
    provider = SimulatedProvider(components.counter)
    uncompacted_provider = SimulatedProvider(components.counter)
    calls = components.summary_model.start_conversation(provider)
    # Replays share no stored data, because each has a tenant of its own.
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
    """Returns the prompt that the proxy forwards, and the requested limit of output tokens."""
    if fit.raw is ask.body.raw:
        return sent, ask.body.max_output or 0
    body = parse_body(fit.raw, CHAT)
    return ProviderPrompt(sent.model, body.prompt_members, body.messages), body.max_output or 0


def _find_overflow(
    provider: SimulatedProvider, window: int, prompt: ProviderPrompt, output_tokens: int
) -> Overflow | None:
    """Returns the error with which the provider would refuse a prompt; None if the prompt fits."""
    size = provider.count_prompt_tokens(prompt)
    if size + output_tokens <= window:
        return None
    return Overflow("context" if size > window else "context_output", window, size, output_tokens)


async def _wait_for_background_tasks(earlier_tasks: set[asyncio.Task[Any]]) -> None:
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
