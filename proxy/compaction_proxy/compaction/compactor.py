"""The use case: a request in, a request that fits out, and never a failure of ours in between.

`fit_request` reads and sizes the request, applies what earlier rounds have made of it, makes a round where
one is due, and goes down the ladder where the result would still not fit. `prepare_round` makes a round ahead
of need. Whatever goes wrong here, the client's own bytes go on.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from operator import attrgetter, is_
from typing import NamedTuple

import structlog

from compaction_proxy.compaction.fallback_cut import cut_to_fit, fill_token_counts
from compaction_proxy.compaction.message_reader import MessageReader
from compaction_proxy.compaction.request_limits import resolve_policy
from compaction_proxy.compaction.request_loader import TIGHT_SHARE, RequestLoader
from compaction_proxy.compaction.request_view import RequestView, replace_messages
from compaction_proxy.compaction.round_coordinator import QUIET_REASONS, RoundCoordinator
from compaction_proxy.compaction.types import (
    CompactedMessages,
    CompactionMode,
    CompactionReport,
    CompactionStatus,
    FitRequest,
    FitResult,
)
from compaction_proxy.core.budget import LEAST_OUTPUT_TOKENS
from compaction_proxy.core.errors import CompactionError, SummaryError
from compaction_proxy.core.message import Message
from compaction_proxy.core.repair import alternate_roles, is_valid_message_list, repair_messages
from compaction_proxy.core.trigger import has_active_rule
from compaction_proxy.providers.calibration import Calibration
from compaction_proxy.providers.model_limits import ModelLimits
from compaction_proxy.providers.usage_baseline import build_baseline
from compaction_proxy.support.fail_open import suppress_and_report
from compaction_proxy.support.log_events import COMPACTION_FAILED
from compaction_proxy.wires.body import clear_output_limits, rewrite_messages, set_output_limit
from compaction_proxy.wires.context_errors import Overflow
from compaction_proxy.wires.prescan import MentionedNumbers

# How often a request that was refused as too long is sent again, shorter each time.
MAX_REFITS = 2
# Output that is lowered keeps such a share of the window free, for the error of estimates, and at least so
# many tokens: the first share that leaves enough. An answer has as many beside the least budget of thinking.
OUTPUT_MARGIN_SHARES = (0.04, 0.01)
OUTPUT_MARGIN_TOKENS = 64
# Where an overflow error names no limit, the request is made this much smaller than what was refused.
UNKNOWN_LIMIT_SHARE = 0.7
# Where it says what it counted, little is estimated: what matters is cut to this share of the window. After
# the first refusal what matters is not cut at all where the estimate fits the window: one more refusal shows
# whether the estimate was right, and costs less than the task.
REPORTED_SIZE_SHARE = 0.985
# Why a round that was made is not applied.
LONGER = "longer"
# Why a request is bypassed that does not ask for it itself.
BYPASSED_BY_USER = "asked"

# Nothing of a request is changed under these.
_UNTOUCHED = frozenset({CompactionStatus.SHADOW, CompactionStatus.BYPASSED})

_PARTS, _TOKENS = attrgetter("parts"), attrgetter("tokens")

_log = structlog.get_logger()


class FittedMessages(NamedTuple):
    """What will be forwarded, before it is written.

    Attributes:
        messages: The list.
        is_changed: Whether it differs from the client's.
        fits: Whether it fits, as far as we can tell.
        is_whole: Whether it is the effective list, and nothing had to be cut from it.
    """

    messages: tuple[Message, ...]
    is_changed: bool
    fits: bool
    is_whole: bool = True


class Compactor:
    """Makes requests fit.

    Args:
        loader: Reads requests and finds what is stored of them.
        coordinator: Has rounds made and put in force.
        reader: Counts what was cut.
        model_limits: Learns from the upstream.
        auto_recall: Places what was removed and matters now in a request that fits.
    """

    def __init__(
        self,
        loader: RequestLoader,
        coordinator: RoundCoordinator,
        reader: MessageReader,
        model_limits: ModelLimits,
        auto_recall: Callable[[FitResult, FitRequest], Awaitable[FitResult]] | None = None,
    ) -> None:
        self._loader = loader
        self._coordinator = coordinator
        self._reader = reader
        self._model_limits = model_limits
        self._auto_recall = auto_recall

    async def fit_request(self, ask: FitRequest) -> FitResult:
        """The request, made to fit; as it came where that was not possible or not needed.

        What it pins is kept by then: the next request may come before this one has been observed.
        """
        if ask.mode is CompactionMode.BYPASS:
            fit = await self._fit_unchanged(ask)
        else:
            fit = await self._fit_or_fail_open(ask, self._fit_with_rounds(ask))
            if self._auto_recall is not None and ask.settings.recall.auto != "none":
                fit = await self._auto_recall(fit, ask)
        await self._loader.store_pins(ask, fit.report.conversation or ask.known_conversation)
        return fit

    async def find_conversation(self, ask: FitRequest, *, has_tools: bool) -> FitRequest | None:
        """Returns the request with the conversation that its messages continue, if its client names none.

        None if it only stands beside a conversation.
        """
        named = ask.conversation is not None or not ask.uses_checkpoints or ask.mode is CompactionMode.BYPASS
        if not named:
            with suppress_and_report(_log_unexpected_error):
                return await self._loader.find_conversation(ask, has_tools=has_tools)
        return ask

    async def refit_after_refusal(
        self, ask: FitRequest, refused: FitResult, overflow: Overflow, refusals: int = 1
    ) -> FitResult | None:
        """The request made to fit what the upstream has just refused it for; None if it cannot be.

        Learns the limit and the true count that the error names. `refusals` counts this one and those before.
        """
        rows = resolve_policy(ask.settings, ask.strategy).trigger
        wanted = ask.mode in {CompactionMode.ACTIVE, CompactionMode.FORCE} and has_active_rule(rows)
        if not wanted or overflow.kind == "bytes" or refused.report.status is CompactionStatus.BYPASSED:
            return None
        for tightness in range(refusals, MAX_REFITS + 1):
            fit = await self._fit_or_fail_open(
                ask, self._fit_refused_request(ask, refused, overflow, tightness)
            )
            if len(fit.raw) <= len(refused.raw) and fit.raw != refused.raw:
                return fit
        return None

    async def prepare_round(self, ask: FitRequest) -> None:
        """Begin the work that will soon be needed; to be called once the client has its answer."""

        def log_failure(error: BaseException) -> None:
            _log.warning(COMPACTION_FAILED, conversation=ask.known_conversation, error=type(error).__name__)

        with suppress_and_report(log_failure):
            await self._coordinator.prepare_round(await self._loader.load_view(ask, fresh=True))

    async def _fit_or_fail_open(self, ask: FitRequest, fitting: Awaitable[FitResult]) -> FitResult:
        """The outcome, or the request as it came if anything at all went wrong."""
        reason = "internal"

        def record_failure(error: BaseException) -> None:
            nonlocal reason
            if isinstance(error, CompactionError):
                reason = error.reason
            else:
                _log.error(COMPACTION_FAILED, conversation=ask.known_conversation, exc_info=error)

        with suppress_and_report(record_failure):
            return await fitting
        return FitResult(
            ask.body.raw,
            0,
            CompactionReport(CompactionStatus.FAILED_OPEN, ask.known_conversation, reason=reason),
        )

    async def _fit_with_rounds(self, ask: FitRequest) -> FitResult:
        view = await self._loader.load_view(ask)
        if view.directives.bypass:
            return self._build_bypassed_result(view)
        due, uncapped = _find_due_reason(view), None
        if due is not None or self._coordinator.has_huge_results(
            view
        ):  # another replica may have done it already
            view = await self._loader.refresh_view(view)
            if ask.mode is not CompactionMode.SHADOW:
                before, view = view, await self._coordinator.cap_huge_results(view)
                uncapped = None if view is before else before.estimate_tokens(before.effective)
            due = _find_due_reason(view)
        if ask.mode is CompactionMode.SHADOW:
            settled = FittedMessages(view.messages, is_changed=False, fits=True)
            return self._build_result(view, settled, CompactionStatus.SHADOW, due)
        return await self._compact_if_due(view, due, uncapped=uncapped)

    async def _fit_unchanged(self, ask: FitRequest) -> FitResult:
        """The request as it came. It is counted only where its answer may raise a learned limit."""
        estimate = 0

        def log_failure(error: BaseException) -> None:
            _log.warning(COMPACTION_FAILED, conversation=ask.known_conversation, error=type(error).__name__)

        with suppress_and_report(log_failure):
            if await self._model_limits.is_limited(ask.tenant, ask.origin, ask.model):
                view = await self._loader.load_view(ask)
                estimate = view.count_tokens(view.messages)
        return FitResult(
            ask.body.raw, estimate, CompactionReport(CompactionStatus.BYPASSED, ask.known_conversation)
        )

    def _build_bypassed_result(self, view: RequestView) -> FitResult:
        """The request as it came, because people want it so."""
        bare = view.with_checkpoint(None)
        settled = FittedMessages(bare.messages, is_changed=False, fits=True)
        return self._build_result(bare, settled, CompactionStatus.BYPASSED, BYPASSED_BY_USER)

    async def _fit_refused_request(
        self, ask: FitRequest, refused: FitResult, overflow: Overflow, refusals: int
    ) -> FitResult:
        limit, adds_output = await self._learn_from_refusal(ask, refused, overflow, refusals)
        window = min(filter(None, (limit, ask.settings.window)))
        narrower = replace(ask, settings=replace(ask.settings, window=window))
        view = await self._loader.load_view(narrower, refusals=0 if adds_output else refusals, fresh=True)
        if view.directives.bypass:
            return self._build_bypassed_result(view)
        view = _apply_reported_size(view, refused.estimate, overflow, None if adds_output else refusals)
        fits_alone = adds_output and view.estimate_tokens(view.effective) <= view.budget.prompt_limit
        if fits_alone:  # nothing may be cut from it
            taken = max(view.budget.input_limit, view.estimate_upper_bound(view.effective))
            view = replace(view, budget=replace(view.budget, input_limit=taken))
        due = (
            view.find_due_reason()
            if view.budget.sum_limit is not None and ask.can_lower_output
            else "overflow"
        )
        return await self._compact_if_due(view, due)

    async def _learn_from_refusal(
        self, ask: FitRequest, refused: FitResult, overflow: Overflow, refusals: int
    ) -> tuple[int, bool]:
        """Learn from a refusal.

        Returns the window that the request must fit, and whether only its sum with the output asked for did
        not fit. An error that does not say so may mean it, which is supposed once, and never remembered.
        Errors may echo the request. So a number that stands in it is not remembered, unless it only limits
        the output there: clients ask for as much output as the window has. The refused size is, instead.
        """
        estimate = refused.estimate
        if not estimate:  # it had passed the gate uncounted
            view = await self._loader.load_view(ask)
            estimate = view.count_tokens(view.messages)
        echoed = MentionedNumbers(clear_output_limits(ask.body.raw, ask.body.wire))
        if overflow.used and overflow.kind != "tpm" and overflow.used not in echoed:
            await self._model_limits.learn_token_count(
                ask.tenant, ask.origin, ask.model, estimate, overflow.used
            )
        learned = await self._model_limits.get(ask.tenant, ask.origin, ask.model)
        is_told = overflow.limit is not None and overflow.limit not in echoed
        if not is_told and overflow.kind == "context" and overflow.is_sized:
            size_bytes = len(refused.raw)
            await self._model_limits.learn_refused(ask.tenant, ask.origin, ask.model, estimate, size_bytes)
        if overflow.limit is None:
            return int(learned.calibration.predict_tokens(estimate) * UNKNOWN_LIMIT_SHARE), False
        if is_told and overflow.kind != "tpm":
            await self._model_limits.learn_window(ask.tenant, ask.origin, ask.model, overflow.limit)
        if overflow.kind == "context_output":
            await self._model_limits.learn_adds_output(ask.tenant, ask.origin, ask.model)
            return overflow.limit, True
        asked = ask.body.max_output or 0
        return overflow.limit, refusals == 1 and _can_be_output_overflow(
            overflow, learned.calibration, estimate, asked
        )

    async def _compact_if_due(
        self, view: RequestView, due: str | None, *, uncapped: int | None = None
    ) -> FitResult:
        """The request with a round made if one is due, and brought under the limit.

        `uncapped` is its size before results were shortened for this very request; None: none were.
        """
        status = (
            CompactionStatus.APPLIED
            if uncapped is not None
            else CompactionStatus.REUSED
            if view.checkpoint
            else CompactionStatus.NONE
        )
        reason = None
        tokens_due = view.estimate_tokens(view.effective) if uncapped is None else uncapped
        if due is not None:
            try:
                view, reason = await self._coordinator.apply_new_round(view, due)
                status = CompactionStatus.APPLIED
            except SummaryError as failed:
                reason = failed.reason
                status = status if reason in QUIET_REASONS else CompactionStatus.FAILED_OPEN
        settled = await self._choose_messages(view)
        if (
            settled.is_changed
            and not settled.is_whole
            and status in {CompactionStatus.NONE, CompactionStatus.FAILED_OPEN}
        ):
            status = CompactionStatus.APPLIED
        if not settled.is_changed and status in {CompactionStatus.APPLIED, CompactionStatus.REUSED}:
            status, reason = (
                CompactionStatus.NONE,
                reason if status is CompactionStatus.REUSED else reason or LONGER,
            )
        if not settled.fits and view.is_automatic:
            status = CompactionStatus.OVER_LIMIT
        ahead = (
            due is None
            and view.root is not None
            and view.should_prepare_round()
            and bool(view.request.summary_routes)
        )
        if ahead and status is CompactionStatus.NONE:
            status = CompactionStatus.SCHEDULED
        return self._build_result(view, settled, status, reason, tokens_due=tokens_due, ahead=ahead)

    async def _choose_messages(self, view: RequestView) -> FittedMessages:
        """The list to forward: as it is if it may be, else repaired, and cut until it fits."""
        over = view.is_automatic and view.exceeds_window(view.effective)
        replaced = view.checkpoint is not None and bool(view.checkpoint.spans)
        if not replaced and not over:
            return FittedMessages(view.messages, is_changed=False, fits=True)
        messages = (
            view.effective
            if view.checkpoint
            else replace_messages(view.messages, view.shortened_instructions)
        )
        messages = messages if is_valid_message_list(messages) else repair_messages(messages)
        if view.request.settings.alternation == "strict":
            messages = alternate_roles(messages)
        if not all(map(_TOKENS, messages)):
            messages = await fill_token_counts(messages, view, self._reader)
        whole = True
        if over:
            shorter = await cut_to_fit(messages, view, self._reader)
            if not view.is_too_large(shorter):  # else nothing is won by what was cut
                messages, whole = shorter, False
        useless = whole and not replaced  # repair alone does not make it fit
        if (
            useless
            or _are_same_messages(messages, view.messages)
            or view.count_tokens(messages) > view.count_tokens(view.messages)
        ):
            messages = view.messages
        changed = messages is not view.messages
        return FittedMessages(
            messages, changed, fits=not view.is_too_large(messages), is_whole=whole and changed
        )

    def _build_result(
        self,
        view: RequestView,
        fitted: FittedMessages,
        status: CompactionStatus,
        reason: str | None,
        *,
        tokens_due: int | None = None,
        ahead: bool = False,
    ) -> FitResult:
        raw = (
            rewrite_messages(view.request.body, fitted.messages)
            if fitted.is_changed
            else view.request.body.raw
        )
        max_output = None
        if status not in _UNTOUCHED:
            raw, max_output = _lower_output(view, raw, fitted.messages)
        report = CompactionReport(
            status=status,
            conversation=view.conversation_id,
            strategy=view.policy.name if fitted.is_changed or status is not CompactionStatus.NONE else None,
            round=(view.checkpoint.round or None) if view.checkpoint and fitted.is_changed else None,
            messages_before=len(view.messages),
            messages_after=len(fitted.messages),
            tokens_before=view.estimate_tokens(view.messages),
            tokens_after=view.estimate_tokens(fitted.messages),
            window=view.budget.window,
            trigger=view.marks.trigger if view.is_automatic else None,
            reason=reason,
            tokens_without_round=tokens_due,
            checkpoint_id=view.checkpoint_id.hex(),
            max_output=max_output,
        )
        footing = view.build_usage_basis() if fitted.is_whole else None
        guessed = any(map(_PARTS, fitted.messages)) if fitted.is_changed else view.has_guessed_tokens
        listed = view.count_tokens(view.messages)
        put = None
        if view.checkpoint is not None and fitted.is_changed and fitted.is_whole:
            put = CompactedMessages(fitted.messages, view.body, view.checkpoint)
        return FitResult(
            raw, view.count_tokens(fitted.messages), report, footing, guessed, ahead, listed, put
        )


def _are_same_messages(messages: Sequence[Message], sent: Sequence[Message]) -> bool:
    """Whether a list holds the very messages that the client sent."""
    return len(messages) == len(sent) and all(map(is_, messages, sent))


def _log_unexpected_error(error: BaseException) -> None:
    """Leave what is wrong with a request to `fit_request`, which reports it."""
    if not isinstance(error, CompactionError):
        _log.error(COMPACTION_FAILED, exc_info=error)


def _find_due_reason(view: RequestView) -> str | None:
    """What makes a round due now, asked for or not; None if nothing does."""
    forced = view.request.mode is CompactionMode.FORCE or view.directives.compact
    return "force" if forced else view.find_due_reason()


def _apply_reported_size(
    view: RequestView, estimate: int, overflow: Overflow, refusals: int | None
) -> RequestView:
    """The view with what the upstream has counted of the request that it refused, if it said so.

    Where it named a limit only, the prompt was larger than that: so many `refusals` show by how much less it
    may be. None says that the prompt alone fits.
    """
    if overflow.kind not in {"context", "context_output"}:
        return view
    used, told = overflow.used, int(REPORTED_SIZE_SHARE * view.budget.prompt_limit)
    most, goal = max(view.max_prompt_tokens, told), view.budget.prompt_limit if refusals == 1 else told
    estimate = estimate or view.count_tokens(view.messages)
    if used is None and overflow.limit is not None and refusals is not None:
        used, most = overflow.limit + 1, int(overflow.limit * TIGHT_SHARE**refusals)
        goal = most
    elif used is None:
        return view
    anchor = build_baseline(view.prefixes, view.baseline_key, estimate, used)
    return (
        view if anchor is None else replace(view, anchor=anchor, max_prompt_tokens=most, cut_goal_tokens=goal)
    )


def _can_be_output_overflow(overflow: Overflow, calibration: Calibration, estimate: int, asked: int) -> bool:
    """Whether the upstream may have refused only the sum of the prompt and the `asked` tokens of output."""
    if overflow.kind != "context" or overflow.limit is None or overflow.used is not None:
        return False
    return (
        calibration.predict_upper_bound(estimate)
        < overflow.limit
        < calibration.predict_tokens(estimate) + asked
    )


def _lower_output(view: RequestView, raw: bytes, messages: Sequence[Message]) -> tuple[bytes, int | None]:
    """Returns the body asking for as much output as the upstream will take beside the prompt.

    With it the tokens of output that it asks for now; None where it is unchanged.
    """
    most, asked = view.budget.sum_limit, view.request.body.max_output
    if most is None or asked is None or not (view.is_automatic and view.request.can_lower_output):
        return raw, None
    window = view.budget.window
    left = window - max(view.estimate_upper_bound(messages), view.estimate_tokens(messages))
    choices = [left - max(int(share * window), OUTPUT_MARGIN_TOKENS) for share in OUTPUT_MARGIN_SHARES]
    if not view.is_too_large(messages):  # with all that is asked for it is refused for sure
        choices += [
            LEAST_OUTPUT_TOKENS,
            LEAST_OUTPUT_TOKENS + OUTPUT_MARGIN_TOKENS,
        ]  # thinking needs the latter
    for tokens in choices:
        if LEAST_OUTPUT_TOKENS <= tokens < asked:
            lowered = set_output_limit(raw, view.request.body.wire, tokens)
            if lowered is not raw:
                return lowered, tokens
    return raw, None
