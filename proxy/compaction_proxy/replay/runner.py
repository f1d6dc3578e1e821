"""Playing a conversation: the real compactor is asked for each request as the conversation grew.

Everything is as in the proxy, but that nobody answers: the provider only counts, and summaries are written by
rule. What the proxy does behind an answer is done before the next request, so that the same recording always
gives the same result.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

from compaction_proxy.compaction.compactor import REPLAYS, Compactor
from compaction_proxy.compaction.feedback import Observing
from compaction_proxy.compaction.request_limits import policy_for
from compaction_proxy.compaction.summary_request import SummaryRoute
from compaction_proxy.compaction.types import Ask, Fit, Mode, Status
from compaction_proxy.config.config import ModelSettings
from compaction_proxy.config.sections import CompactionSection, SummarySection
from compaction_proxy.core.cost.price import Price
from compaction_proxy.core.strategies import Policy
from compaction_proxy.providers.types import TokenCounter
from compaction_proxy.providers.windows import known_window
from compaction_proxy.replay.costs import Played, Subject, result
from compaction_proxy.replay.provider import Prompt, Provider
from compaction_proxy.replay.recordings import DEFAULT_MODEL, Recording, thinned
from compaction_proxy.replay.result import Point, Result
from compaction_proxy.replay.writer import Call, Writer
from compaction_proxy.wires.body import Body, read
from compaction_proxy.wires.chat.wire import CHAT
from compaction_proxy.wires.context_errors import Overflow
from compaction_proxy.wires.incremental_reader import KEY_BYTES, Reader
from compaction_proxy.wires.wire import Usage

# What is begun behind an answer ends soon, since nothing is waited for but the processor; in seconds.
LONGEST_PAUSE_S = 30.0

# Given the requests played so far, and how many there are.
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to play otherwise than configured. None: as it is.

    Attributes:
        model: The model asked.
        trigger_tokens: T.
        target_tokens: What to shrink to.
        window: Of the model, in tokens.
        every: Plays every so many requests only.
    """

    model: str | None = None
    trigger_tokens: int | None = None
    target_tokens: int | None = None
    window: int | None = None
    every: int = 1


@dataclass(frozen=True, slots=True)
class Stage:
    """What a rehearsal needs of the proxy: everything as in one that serves, over a memory of its own.

    Attributes:
        compactor: Makes requests fit. Its summaries are by `writer`.
        observing: Learns from answers.
        writer: Writes summaries.
        counter: Counts as the provider does.
        settings: What is configured for a model.
        routes: Whom to ask for a summary under a model's settings and a strategy.
        price: What a model costs, if that is known.
        priced: Waits until everything is known of what models cost that can be known.
        origin: Of the upstream.
    """

    compactor: Compactor
    observing: Observing
    writer: Writer
    counter: TokenCounter
    settings: Callable[[str], ModelSettings]
    routes: Callable[[ModelSettings, Policy, str], tuple[SummaryRoute, ...]]
    price: Callable[[str], Price | None]
    priced: Callable[[Iterable[str]], Awaitable[None]]
    origin: str


@dataclass(slots=True)
class _Run:
    """One conversation under one strategy, and what is known of it so far."""

    recording: Recording
    model: str
    strategy: str
    settings: ModelSettings
    tenant: str
    provider: Provider
    unchanged: Provider
    calls: list[Call]
    reader: Reader = field(default_factory=lambda: Reader(bytes(KEY_BYTES), CHAT))
    around: frozenset[asyncio.Task[Any]] = field(default_factory=lambda: frozenset(asyncio.all_tasks()))
    forwarded: tuple[bytes, ...] = ()
    place: str = ""

    @property
    def window(self) -> int:
        """Of the model, in tokens."""
        return self.settings.window or known_window(self.model)


async def play(
    stage: Stage, recording: Recording, strategy: str, wanted: Wanted, progress: Progress = lambda *_: None
) -> Result:
    """What a strategy does with a conversation.

    Args:
        stage: The proxy.
        recording: The conversation.
        strategy: Name of a strategy.
        wanted: What is to be otherwise than configured.
        progress: Told after each request.
    """
    model = wanted.model or recording.model or DEFAULT_MODEL
    settings = _changed(stage.settings(model), wanted)
    provider = Provider(stage.counter)
    writers = stage.routes(settings, policy_for(settings, strategy), model)
    await stage.priced({model, *(writer.model for writer in writers)})
    tenant = sha256(f"{recording.name} {strategy} {id(provider)}".encode()).hexdigest()
    calls = stage.writer.begin(provider)
    unchanged = Provider(stage.counter)
    run = _Run(recording, model, strategy, settings, tenant, provider, unchanged, calls)
    played: list[Played] = []
    lengths = thinned(recording, wanted.every)
    for number, length in enumerate(lengths, 1):
        played.append(await _request(stage, run, length))
        progress(number, len(lengths))
    return _result(stage, run, played)


async def _request(stage: Stage, run: _Run, length: int) -> Played:
    """One request, and what follows its answer."""
    since = len(run.calls)
    raw = run.recording.body(length, run.model)
    body = run.reader.read(raw, run.tenant)
    ask = _ask(stage, run, body)
    fit = await stage.compactor.fit(ask)
    sent = Prompt(run.model, body.prompt_members, run.recording.messages[:length])
    prompt = _prompt(sent, ask, fit)
    over = _excess(run, body, run.provider.size(prompt))
    if over is not None:
        fit = await _shorter(stage, run, ask, fit, over)
        prompt = _prompt(sent, ask, fit)
    size, cached = run.provider.size(prompt), run.provider.read(prompt)
    point = Point(
        before=run.unchanged.size(sent),
        after=size,
        cached=cached,
        cached_before=run.unchanged.read(sent),
        round=fit.report.place != run.place and bool(fit.report.round),
    )
    kept = tuple(prompt.messages[: len(run.forwarded)]) == run.forwarded
    run.forwarded, run.place = tuple(prompt.messages), fit.report.place
    completion = run.provider.answer_tokens(run.recording.answer(length), run.model)
    failed_open = fit.report.status is Status.FAILED_OPEN
    failed = _excess(run, body, size) is not None or (failed_open and fit.report.reason == "internal")
    await stage.observing.observe(ask, fit, None if failed else Usage(size, completion, cached))
    if fit.ahead and not failed:
        await stage.compactor.prepare(ask)
    await _quiet(run.around)
    return Played(
        point,
        completion,
        tuple(run.calls[since:]),
        fit.report.trigger,
        over is not None,
        failed,
        kept,
        failed_open,
    )


def _ask(stage: Stage, run: _Run, body: Body) -> Ask:
    policy = policy_for(run.settings, run.strategy)
    return Ask(
        body=body,
        model=run.model,
        tenant=run.tenant,
        conversation=None,
        origin=stage.origin,
        settings=run.settings,
        mode=Mode.ACTIVE,
        trigger_tokens=None,
        whom=lambda: stage.routes(run.settings, policy, run.model),
        patience_s=None,
        strategy=run.strategy,
    )


def _prompt(sent: Prompt, ask: Ask, fit: Fit) -> Prompt:
    """What a fit forwards."""
    return sent if fit.raw is ask.body.raw else sent._replace(messages=read(fit.raw, CHAT).messages)


def _excess(run: _Run, body: Body, size: int) -> Overflow | None:
    """What a provider would say of a prompt that does not fit; None if it does."""
    output = body.max_output or 0
    if size + output <= run.window:
        return None
    return Overflow("context" if size > run.window else "context_output", run.window, size, output)


async def _shorter(stage: Stage, run: _Run, ask: Ask, refused: Fit, over: Overflow) -> Fit:
    """What is sent in the end where the provider refuses a request as too long."""
    fit, overflow = refused, over
    for refusals in range(1, REPLAYS + 1):
        shorter = await stage.compactor.refit(ask, fit, overflow, refusals)
        if shorter is None:
            return fit
        fit = shorter
        forwarded = read(fit.raw, CHAT)
        size = run.provider.size(Prompt(run.model, forwarded.prompt_members, forwarded.messages))
        again = _excess(run, forwarded, size)
        if again is None:
            return fit
        overflow = again
    return fit


async def _quiet(around: frozenset[asyncio.Task[Any]]) -> None:
    """Wait until the proxy has done what it does behind an answer."""
    async with asyncio.timeout(LONGEST_PAUSE_S):
        while behind := asyncio.all_tasks() - around:
            await asyncio.wait(behind)


def _changed(settings: ModelSettings, wanted: Wanted) -> ModelSettings:
    """What holds for the conversation. No bound of the hour does: requests of days come in seconds."""
    over: dict[str, object] = {}
    if wanted.trigger_tokens is not None:
        over["trigger"] = [{"tokens": wanted.trigger_tokens}]
    if wanted.target_tokens is not None:
        over["target_tokens"] = wanted.target_tokens
    compaction = settings.compaction.model_dump(exclude_unset=True) | over
    summary = settings.summary.model_dump(exclude_unset=True) | {"calls_per_hour": 0}
    return replace(
        settings,
        window=wanted.window or settings.window,
        compaction=CompactionSection.model_validate(compaction),
        summary=SummarySection.model_validate(summary),
    )


def _result(stage: Stage, run: _Run, played: list[Played]) -> Result:
    models = {run.model: None, **{call.model: None for call in run.calls}}
    return result(
        Subject(run.strategy, run.recording.name, run.model, run.window),
        played,
        {model: stage.price(model) for model in models},
    )
