"""Learns the true sizes of requests and the effects of compactions from the token usage in responses.

A compaction may save nothing, because estimates may be wrong and because the removable part of a request may
be small. Such a compaction still costs a summary call and breaks the provider's prompt cache. So after two
ineffective compactions in a row, the conversation is not compacted for a while. A compaction may also fail
because of the messages themselves. It would fail again with the next request. So the proxy tries it again
only after some time, or when the request has grown.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from compaction_proxy.compaction.price_triggers import GrowthTracker
from compaction_proxy.compaction.request_view import format_strategy_thread
from compaction_proxy.compaction.types import CompactionStatus, FitRequest, FitResult
from compaction_proxy.core.event import MEASURED, Event
from compaction_proxy.providers.model_limits import ModelLimits
from compaction_proxy.providers.silent_truncation import AnsweredRequest
from compaction_proxy.providers.usage_baseline import UsageBaselineStore, build_baseline
from compaction_proxy.support.lru import BoundedDict
from compaction_proxy.telemetry.event_history import (
    EventHistory,
    EventListener,
    generate_event_id,
    ignore_event,
)
from compaction_proxy.wires.prescan import MentionedNumbers
from compaction_proxy.wires.usage import TokenUsage

# A compaction is ineffective if, by the provider's count, it saves less than this share of the tokens that a
# compaction can remove.
LEAST_SAVING = 0.15
# After this many ineffective compactions in a row, a conversation is paused: it is not compacted for a while.
INEFFECTIVE_ROUNDS = 2
# While a conversation is paused, it is not compacted. The pause ends once the request has grown by the share
# `RETRY_GROWTH`, or after `PAUSE_S` seconds.
RETRY_GROWTH = 0.20
PAUSE_S = 600.0
# A compaction that failed is tried again once the request has grown by the share `FAILURE_GROWTH`, or after
# `PAUSE_S` seconds. If the request would not fit without the compaction, the smaller share `URGENT_GROWTH`
# applies.
FAILURE_GROWTH = 0.05
URGENT_GROWTH = 0.02
MAX_CONVERSATIONS = 10_000


@dataclass(frozen=True, slots=True)
class _RoundEffect:
    """The effect of the latest compactions of one conversation.

    Attributes:
        baseline_key: Identifies the latest compaction whose effect was recorded.
        ineffective: Number of ineffective compactions in a row, including the latest one.
        tokens: Tokens of the request after the latest compaction, as the provider counted them.
        recorded_at_s: When the effect of the latest compaction was recorded, in monotonic seconds.
    """

    baseline_key: bytes = b""
    ineffective: int = 0
    tokens: int = 0
    recorded_at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _RoundFailure:
    """A compaction that failed because of its messages.

    Attributes:
        message_count: Number of messages of the request. Fixed messages are not included.
        prefix: Prefix digest up to the last of these messages.
        window: Context window of the model, in tokens. With another window, the compaction may succeed.
        tokens: Counted tokens of the request.
        recorded_at_s: When the compaction failed, in monotonic seconds.
    """

    message_count: int
    prefix: bytes
    window: int
    tokens: int
    recorded_at_s: float


class RoundEffectiveness:
    """Remembers which compactions were ineffective or failed. Not thread-safe: use it on one event loop.

    Args:
        clock: Returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: BoundedDict[str, _RoundEffect] = BoundedDict(MAX_CONVERSATIONS)
        self._failures: BoundedDict[str, _RoundFailure] = BoundedDict(MAX_CONVERSATIONS)

    def record_round(
        self,
        thread: str,
        baseline_key: bytes,
        *,
        before_tokens: int,
        after_tokens: int,
        fixed_tokens: int = 0,
    ) -> None:
        """Records how many tokens a compaction has saved.

        Call this method after the upstream has answered the compacted request.

        Args:
            thread: Key of the conversation (`request_view.format_strategy_thread`).
            baseline_key: Identifies the compaction. Repeated calls for the same compaction have no effect.
            before_tokens: Tokens that the request would have had without the compaction.
            after_tokens: Tokens of the compacted request, as the provider counted them.
            fixed_tokens: Tokens of the request that no compaction removes.
        """
        effect = self._known.get(thread, _RoundEffect())
        if effect.baseline_key != baseline_key:
            is_ineffective = before_tokens - after_tokens < LEAST_SAVING * max(
                0, before_tokens - fixed_tokens
            )
            effect = replace(
                effect,
                baseline_key=baseline_key,
                ineffective=effect.ineffective + 1 if is_ineffective else 0,
                tokens=after_tokens,
                recorded_at_s=self._clock(),
            )
        self._known[thread] = effect

    def is_paused(self, thread: str, tokens: int) -> bool:
        """Returns whether no more compactions are made in this conversation for now.

        Such a pause begins after `INEFFECTIVE_ROUNDS` ineffective compactions in a row. It ends `PAUSE_S`
        seconds after the last of them, or as soon as the request size `tokens` exceeds the size after that
        compaction by the share `RETRY_GROWTH`.
        """
        effect = self._known.get(thread)
        return (
            effect is not None
            and effect.ineffective >= INEFFECTIVE_ROUNDS
            and self._is_resting(effect, tokens)
        )

    def record_failure(self, thread: str, prefixes: Sequence[bytes], *, window: int, tokens: int) -> None:
        """Records a compaction that failed because of its messages.

        Args:
            thread: Key of the conversation (`request_view.format_strategy_thread`).
            prefixes: Prefix digests of the messages of the request that are not fixed.
            window: Context window of the model, in tokens.
            tokens: Counted tokens of the request. They are not calibrated, because a change of the
                calibration must not look like growth of the request.
        """
        self._failures[thread] = _RoundFailure(len(prefixes), prefixes[-1], window, tokens, self._clock())

    def is_failing(
        self, thread: str, prefixes: Sequence[bytes], *, window: int, tokens: int, is_urgent: bool
    ) -> bool:
        """Returns whether a compaction of this request would probably fail as the last one did.

        Returns True for at most `PAUSE_S` seconds after a failure. In this time, returns True only if the
        request begins with the messages of the failed request, has the same context window, and has grown by
        less than `FAILURE_GROWTH`, or by less than `URGENT_GROWTH` if `is_urgent` is True. The method
        `record_failure` describes the other arguments.
        """
        failure = self._failures.get(thread)
        if failure is None or failure.window != window or len(prefixes) < failure.message_count:
            return False
        growth = URGENT_GROWTH if is_urgent else FAILURE_GROWTH
        return prefixes[failure.message_count - 1] == failure.prefix and self._is_resting(
            failure, tokens, growth
        )

    def _is_resting(
        self, entry: _RoundEffect | _RoundFailure, tokens: int, growth: float = RETRY_GROWTH
    ) -> bool:
        return tokens < (1 + growth) * entry.tokens and self._clock() - entry.recorded_at_s < PAUSE_S


class UsageFeedback:
    """Learns from the token usage that upstreams report for answered requests.

    Args:
        model_limits: Learns the limits of models.
        anchors: Stores the token counts that providers report for requests.
        effectiveness: Records how many tokens compactions have saved.
        history: Stores the events of conversations.
        growth: Tracks how conversations grow. None disables tracking.
        announce: Called with the event that reports the true size of a request after a compaction.
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
        """Learns from one answered request. Ignores requests whose tokens were not counted.

        `usage` is None if the upstream reported no usage.
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
        """Records the true size of a request for which a compaction was made: the provider's count in tokens.

        The proxy uses this size to correct later estimates, and to find out whether the compaction was
        effective. An event reports the size.
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
