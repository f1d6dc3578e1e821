"""Learns the true sizes of requests and the effects of compactions from the token usage in answers."""

import time
from collections.abc import Callable

from compaction_proxy.compaction.effectiveness import RoundEffectiveness
from compaction_proxy.compaction.price_triggers import GrowthTracker
from compaction_proxy.compaction.request_view import format_strategy_thread
from compaction_proxy.compaction.types import CompactionStatus, FitRequest, FitResult
from compaction_proxy.core.event import MEASURED, Event
from compaction_proxy.providers.model_limits import ModelLimits
from compaction_proxy.providers.silent_truncation import AnsweredRequest
from compaction_proxy.providers.usage_baseline import UsageBaselineStore, build_baseline
from compaction_proxy.telemetry.event_bus import EventListener, generate_event_id, ignore_event
from compaction_proxy.telemetry.event_history import EventHistory
from compaction_proxy.wires.prescan import MentionedNumbers
from compaction_proxy.wires.usage import TokenUsage


class UsageFeedback:
    """Records the usage of answered requests.

    Args:
        model_limits: Learns the limits of models.
        anchors: Stores providers' token counts of requests (anchors).
        effectiveness: Judges whether compactions are effective.
        history: Stores the events of conversations.
        growth: Tracks how conversations grow. None disables tracking.
        announce: Receives the event that reports the true size of a request after a compaction.
        now: Returns seconds since the epoch, for events.
    """

    def __init__(
        self,
        model_limits: ModelLimits,
        anchors: UsageBaselineStore,
        effectiveness: RoundEffectiveness,
        history: EventHistory,
        *,
        growth: GrowthTracker | None = None,
        announce: EventListener = ignore_event,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._model_limits = model_limits
        self._anchors = anchors
        self._effectiveness = effectiveness
        self._history = history
        self._growth = growth
        self._announce = announce
        self._now = now

    async def learn_from_answer(self, ask: FitRequest, fit: FitResult, usage: TokenUsage | None) -> None:
        """Learns from one answered request, unless the request was not counted.

        `usage` is None if the upstream reported none.
        """
        if not fit.estimate:
            return
        if usage is None:
            await self._model_limits.learn_accepted(ask.tenant, ask.origin, ask.model, fit.estimate)
            return
        usage_basis = fit.usage_basis
        answer = AnsweredRequest(
            estimate=fit.estimate,
            prompt=usage.prompt_tokens,
            completion=usage.completion_tokens,
            cached=usage.cached_tokens,
            has_media=fit.has_guessed_tokens,
        )
        truncated = await self._model_limits.learn_answer(
            ask.tenant,
            ask.origin,
            ask.model,
            answer,
            thread=usage_basis.root if usage_basis else ask.known_conversation,
            find_mentioned_numbers=lambda: MentionedNumbers(ask.body.raw),
            is_window_configured=ask.settings.window is not None,
        )
        if usage_basis is not None and not truncated:
            anchor = build_baseline(
                usage_basis.prefixes, usage_basis.baseline_key, fit.estimate, usage.prompt_tokens
            )
            if anchor is not None:
                self._anchors.record_baseline(ask.tenant, usage_basis.root, anchor)
            if self._growth is not None:
                self._growth.record_request(ask, fit, usage)
        if fit.report.status is CompactionStatus.APPLIED:
            await self._record_round_effect(ask, fit, usage.prompt_tokens)

    async def _record_round_effect(self, ask: FitRequest, fit: FitResult, actual_tokens: int) -> None:
        """Records the actual size of a request for which a compaction was just made.

        The size is the provider's count. It shows how good the estimate was and whether the compaction was
        effective, and an event reports it.
        """
        report, usage_basis = fit.report, fit.usage_basis
        if usage_basis is not None and report.tokens_after:
            self._model_limits.learn_post_compaction_factor(
                ask.tenant, ask.origin, ask.model, report.tokens_after, actual_tokens
            )
        if usage_basis is not None and report.tokens_before is not None:
            thread = format_strategy_thread(ask, usage_basis.root, report.strategy or "")
            before = report.tokens_without_round or report.tokens_before
            self._effectiveness.record_round(
                thread,
                usage_basis.baseline_key,
                before_tokens=before,
                after_tokens=actual_tokens,
                fixed_tokens=usage_basis.fixed_tokens,
            )
        if report.conversation is None:
            return
        event = Event(
            kind=MEASURED,
            at=self._now(),
            conversation=report.conversation,
            id=generate_event_id(),
            asked=ask.model,
            strategy=report.strategy or "",
            round=report.round,
            place=report.checkpoint_id,
            tokens_real=actual_tokens,
        )
        await self._history.record_event(ask.tenant, event)
        self._announce(ask.tenant, event)
