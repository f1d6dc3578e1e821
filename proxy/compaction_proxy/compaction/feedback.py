"""Learning from an answer, once the client has it: true sizes, and whether a round did any good."""

import time
from collections.abc import Callable

from compaction_proxy.compaction.effectiveness import Effects
from compaction_proxy.compaction.price_triggers import Growth
from compaction_proxy.compaction.request_view import thread
from compaction_proxy.compaction.types import Ask, Fit, Status
from compaction_proxy.core.event import MEASURED, Event
from compaction_proxy.providers.model_limits import Learning
from compaction_proxy.providers.silent_truncation import Answered
from compaction_proxy.providers.usage_baseline import Anchors, anchored
from compaction_proxy.telemetry.event_bus import Listener, event_id, unheard
from compaction_proxy.telemetry.event_history import History
from compaction_proxy.wires.prescan import Mentioned
from compaction_proxy.wires.wire import Usage


class Observing:
    """Takes note of answered requests.

    Args:
        learning: What is known of models.
        anchors: What was counted of conversations.
        effects: Whether rounds do any good.
        history: What happened to conversations.
        growth: How they grow; None: nobody wants to know.
        announce: Told of what was counted.
        now: Seconds since the epoch, for events.
    """

    def __init__(
        self,
        learning: Learning,
        anchors: Anchors,
        effects: Effects,
        history: History,
        *,
        growth: Growth | None = None,
        announce: Listener = unheard,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._learning = learning
        self._anchors = anchors
        self._effects = effects
        self._history = history
        self._growth = growth
        self._announce = announce
        self._now = now

    async def observe(self, ask: Ask, fit: Fit, usage: Usage | None) -> None:
        """Take note of one answered request; `usage` is None if the upstream has told none."""
        if not fit.estimate:
            return
        if usage is None:
            await self._learning.learn_accepted(ask.tenant, ask.origin, ask.model, fit.estimate)
            return
        footing = fit.footing
        answer = Answered(
            estimate=fit.estimate,
            prompt=usage.prompt_tokens,
            completion=usage.completion_tokens,
            cached=usage.cached_tokens,
            guessed=fit.guessed,
        )
        truncated = await self._learning.answered(
            ask.tenant,
            ask.origin,
            ask.model,
            answer,
            thread=footing.root if footing else ask.known_as,
            echoed=lambda: Mentioned(ask.body.raw),
            configured=ask.settings.window is not None,
        )
        if footing is not None and not truncated:
            anchor = anchored(footing.prefixes, footing.standing, fit.estimate, usage.prompt_tokens)
            if anchor is not None:
                self._anchors.note(ask.tenant, footing.root, anchor)
            if self._growth is not None:
                self._growth.note(ask, fit, usage)
        if fit.report.status is Status.APPLIED:
            await self._applied(ask, fit, usage.prompt_tokens)

    async def _applied(self, ask: Ask, fit: Fit, real: int) -> None:
        """The first answer after a round: what it has come to, as the provider counts."""
        report, footing = fit.report, fit.footing
        if footing is not None and report.tokens_after:
            self._learning.drifted(ask.tenant, ask.origin, ask.model, report.tokens_after, real)
        if footing is not None and report.tokens_before is not None:
            whose = thread(ask, footing.root, report.strategy or "")
            before = report.tokens_due or report.tokens_before
            self._effects.note(whose, footing.standing, before=before, after=real, fixed=footing.fixed)
        if report.conversation is None:
            return
        event = Event(
            kind=MEASURED,
            at=self._now(),
            conversation=report.conversation,
            id=event_id(),
            asked=ask.model,
            strategy=report.strategy or "",
            round=report.round,
            place=report.place,
            tokens_real=real,
        )
        await self._history.note(ask.tenant, event)
        self._announce(ask.tenant, event)
