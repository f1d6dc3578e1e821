"""The use case: a request in, a request that fits out, and never a failure of ours in between.

`fit` reads and sizes the request, applies what earlier rounds have made of it, makes a round where one is
due, and goes down the ladder where the result would still not fit. Whatever goes wrong here, the client's own
bytes go on.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import structlog

from proxy.compaction.cutting import cut, sized
from proxy.compaction.fitting import Ask, Fit, Mode, Report, Status
from proxy.compaction.policies import policy_for
from proxy.compaction.rounds import Rounds
from proxy.compaction.summarising import Job
from proxy.compaction.view import View, Viewer
from proxy.config.model import ModelSettings
from proxy.core.checkpoint import exact_digest, place
from proxy.core.keys import checkpoint_keys, root_of
from proxy.core.message import Message
from proxy.core.planner import plan
from proxy.core.repair import alternate, repair
from proxy.core.trigger import automatic, mark
from proxy.dialects.chat import mentioned, write
from proxy.dialects.overflow import Overflow
from proxy.errors import CompactionError, SummaryFailed
from proxy.guard import contained
from proxy.learning import Learning
from proxy.logs import COMPACTION_FAILED
from proxy.reading import Reading

# A waiting client gives at most this share of its patience to a summary.
PATIENCE_SHARE = 0.25
# How often a request that was refused as too long is sent again, shorter each time.
REPLAYS = 3
# Where an overflow error names no limit, the request is made this much smaller than what was refused.
BLIND_SHARE = 0.7
NOTHING_TO_TAKE = "nothing-to-take"

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Settled:
    """What will be forwarded, before it is written.

    Attributes:
        messages: The list.
        changed: Whether it differs from the client's.
        fits: Whether it fits, as far as we can tell.
    """

    messages: tuple[Message, ...]
    changed: bool
    fits: bool


class Compactor:
    """Makes requests fit.

    Args:
        viewer: Reads requests and finds what is stored of them.
        rounds: Makes rounds.
        reading: Counts what was cut.
        learning: Learns from the upstream.
        instructions: System prompt of the summary call for a model's settings.
        minted: A conversation's id, for a tenant and a prefix digest, where the client gave none.
        ttl_s: Seconds that checkpoints are kept.
    """

    def __init__(
        self,
        viewer: Viewer,
        rounds: Rounds,
        reading: Reading,
        learning: Learning,
        *,
        instructions: Callable[[ModelSettings], str],
        minted: Callable[[str, bytes], str],
        ttl_s: float,
    ) -> None:
        self._viewer = viewer
        self._rounds = rounds
        self._reading = reading
        self._learning = learning
        self._instructions = instructions
        self._minted = minted
        self._ttl_s = ttl_s

    async def fit(self, ask: Ask) -> Fit:
        """The request, made to fit; as it came where that was not possible or not needed."""
        if ask.mode is Mode.BYPASS:
            return Fit(ask.body.raw, 0, Report(Status.BYPASSED, ask.conversation))
        return await self._failing_open(ask, self._fitted(ask))

    async def refit(self, ask: Ask, refused: Fit, overflow: Overflow, refusals: int = 1) -> Fit | None:
        """The request made to fit what the upstream has just refused it for; None if it cannot be.

        Learns the limit and the true count that the error names. `refusals` counts this one and those before.
        """
        wanted = ask.mode in {Mode.ACTIVE, Mode.FORCE} and automatic(policy_for(ask.settings).trigger)
        if not wanted or overflow.kind == "bytes":
            return None
        for tightness in range(refusals, REPLAYS + 1):
            fit = await self._failing_open(ask, self._refitted(ask, refused, overflow, tightness))
            if len(fit.raw) < len(refused.raw):
                return fit
        return None

    async def observe(self, ask: Ask, fit: Fit, prompt_tokens: int) -> None:
        """Learn from the usage of an answered request."""
        if fit.estimate:
            await self._learning.observed(ask.tenant, ask.origin, ask.model, fit.estimate, prompt_tokens)

    async def _failing_open(self, ask: Ask, fitting: Awaitable[Fit]) -> Fit:
        """The outcome, or the request as it came if anything at all went wrong."""
        reason = "internal"

        def failed(error: BaseException) -> None:
            nonlocal reason
            if isinstance(error, CompactionError):
                reason = error.reason
            else:
                _log.error(COMPACTION_FAILED, conversation=ask.conversation, exc_info=error)

        with contained(failed):
            return await fitting
        return Fit(ask.body.raw, 0, Report(Status.FAILED_OPEN, ask.conversation, reason=reason))

    async def _fitted(self, ask: Ask) -> Fit:
        view = await self._viewer.view(ask)
        due = "force" if ask.mode is Mode.FORCE else view.due()
        if ask.mode is Mode.SHADOW:
            return self._written(view, Settled(view.messages, changed=False, fits=True), Status.SHADOW, due)
        return await self._finished(view, due)

    async def _refitted(self, ask: Ask, refused: Fit, overflow: Overflow, refusals: int) -> Fit:
        limit = await self._lesson(ask, refused, overflow)
        window = min(filter(None, (limit, ask.settings.window)))
        narrower = replace(ask, settings=replace(ask.settings, window=window))
        return await self._finished(await self._viewer.view(narrower, refusals=refusals), "overflow")

    async def _lesson(self, ask: Ask, refused: Fit, overflow: Overflow) -> int:
        """Learn from a refusal, and say what window the request must fit.

        Errors may echo the request. So nothing is remembered of a number that stands in it.
        """
        estimate = refused.estimate
        if not estimate:  # it had passed the gate uncounted
            view = await self._viewer.view(ask)
            estimate = view.counted(view.messages)
        echoed = mentioned(ask.body.raw)
        if overflow.used and overflow.kind != "tpm" and overflow.used not in echoed:
            await self._learning.observed(ask.tenant, ask.origin, ask.model, estimate, overflow.used)
        if overflow.limit is None:
            learned = await self._learning.of(ask.tenant, ask.origin, ask.model)
            return int(learned.calibration.size(estimate) * BLIND_SHARE)
        if overflow.kind != "tpm" and overflow.limit not in echoed:
            await self._learning.overflowed(ask.tenant, ask.origin, ask.model, overflow.limit)
        return overflow.limit

    async def _finished(self, view: View, due: str | None) -> Fit:
        """The request with a round made if one is due, and brought under the limit."""
        status = Status.REUSED if view.earlier else Status.NONE
        reason = None
        if due is not None:
            try:
                view = await self._compacted(view, due)
                status = Status.APPLIED
            except SummaryFailed as failed:
                reason = failed.reason
                status = status if reason == NOTHING_TO_TAKE else Status.FAILED_OPEN
        settled = await self._settled(view)
        if settled.changed and status in {Status.NONE, Status.FAILED_OPEN}:
            status = Status.APPLIED
        if not settled.fits and view.automatic:
            status = Status.OVER_LIMIT
        return self._written(view, settled, status, reason)

    async def _compacted(self, view: View, due: str) -> View:
        """The view with a new round in force.

        Raises:
            SummaryFailed: There is nothing to take, or no summary.
        """
        made = plan(view.body, view.effective, view.policy, view.earlier)
        root = root_of(view.prefixes)
        if made is None or root is None:
            raise SummaryFailed(NOTHING_TO_TAKE)
        if not view.ask.routes or not view.ask.remembered:
            raise SummaryFailed("no-summary-model")
        ask, settings = view.ask, view.ask.settings
        last = view.prefixes[made.length - 1]
        where = place(last, exact_digest(view.body[: made.length]), made.spans)
        [key] = checkpoint_keys(ask.tenant, root, view.policy.name, [where])
        job = Job(
            plan=made,
            policy=view.policy,
            key=key,
            place=where,
            root=root,
            tenant=ask.tenant,
            conversation=self._conversation(view) or self._minted(ask.tenant, last),
            messages=view.body,
            prefixes=view.prefixes,
            earlier=view.earlier,
            instructions=self._instructions(settings),
            routes=ask.routes,
            gauge=view.gauge,
            ratio=view.calibration.ratio,
            tokens_before=view.size(view.effective),
            reason=due,
            timeout_s=settings.summary.timeout_s,
            ttl_s=self._ttl_s,
        )
        wait_s = settings.compaction.max_block_s or settings.summary.timeout_s
        if ask.patience_s is not None:
            wait_s = min(wait_s, ask.patience_s * PATIENCE_SHARE)
        finish = settings.compaction.on_disconnect == "finish"
        return view.with_checkpoint(await self._rounds.make(job, wait_s, finish=finish))

    async def _settled(self, view: View) -> Settled:
        """The list to forward: as it is if it may be, else repaired, and cut until it fits."""
        over = view.automatic and view.over(view.effective)
        if view.earlier is None and not over:
            return Settled(view.messages, changed=False, fits=True)
        valid = repair(view.effective)
        if view.ask.settings.alternation == "strict":
            valid = alternate(valid)
        messages = tuple(await sized(valid, view, self._reading))
        if over:
            messages = await cut(messages, view, self._reading)
        if view.counted(messages) > view.counted(view.messages):  # never larger
            messages = view.messages
        return Settled(messages, changed=messages is not view.messages, fits=not view.hopeless(messages))

    def _conversation(self, view: View) -> str | None:
        """The id that the headers gave, else the one that the stored rounds carry along."""
        return view.ask.conversation or (view.earlier.conversation if view.earlier else None)

    def _written(self, view: View, settled: Settled, status: Status, reason: str | None) -> Fit:
        raw = write(view.ask.body, settled.messages) if settled.changed else view.ask.body.raw
        report = Report(
            status=status,
            conversation=self._conversation(view),
            strategy=view.policy.name if settled.changed or status is not Status.NONE else None,
            round=view.earlier.round if view.earlier and settled.changed else None,
            messages_before=len(view.messages),
            messages_after=len(settled.messages),
            tokens_before=view.size(view.messages),
            tokens_after=view.size(settled.messages),
            window=view.budget.window,
            trigger=mark(view.rows, view.budget),
            reason=reason,
        )
        return Fit(raw, view.counted(settled.messages), report)
