"""Makes a request fit the context window of its model. A fault of the proxy never fails the request.

`Compactor.fit_request` reads the request and counts its tokens, applies earlier compactions, and makes a new
compaction if one is due. If the result still does not fit, it shortens messages without a model.
`Compactor.prepare_round` starts a compaction before it is needed. If any of these steps fails, the client's
own bytes are forwarded.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter, is_
from typing import NamedTuple, TypeVar

import structlog

from compaction_proxy.compaction.fallback_cut import cut_to_fit, fill_token_counts
from compaction_proxy.compaction.message_reader import MessageReader
from compaction_proxy.compaction.request_loader import TIGHT_SHARE, RequestLoader
from compaction_proxy.compaction.request_view import RequestView, replace_messages, resolve_policy
from compaction_proxy.compaction.round_coordinator import QUIET_REASONS, RoundCoordinator
from compaction_proxy.compaction.types import (
    CompactedMessages,
    CompactionMode,
    CompactionReport,
    CompactionStatus,
    FitRequest,
    FitResult,
)
from compaction_proxy.core.budget import MIN_OUTPUT_TOKENS
from compaction_proxy.core.errors import OUT_OF_RESOURCES, CompactionError, SummaryError, is_resource_shortage
from compaction_proxy.core.message import Message
from compaction_proxy.core.repair import insert_alternating_fillers, is_valid_message_list, repair_messages
from compaction_proxy.core.trigger import has_active_rule
from compaction_proxy.providers.calibration import Calibration
from compaction_proxy.providers.model_limits import ModelLimits
from compaction_proxy.providers.usage_baseline import build_baseline
from compaction_proxy.support.fail_open import suppress_and_report
from compaction_proxy.support.log_events import COMPACTION_FAILED
from compaction_proxy.support.offload import run_in_worker_if_large
from compaction_proxy.wires.body import (
    RequestBody,
    clear_output_limits,
    lower_output_limits,
    rewrite_messages,
)
from compaction_proxy.wires.context_errors import Overflow
from compaction_proxy.wires.prescan import MentionedNumbers

# If the upstream refuses a request as too long, the proxy shortens the request and sends it again, up to this
# many times. After that, the client gets the refusal.
MAX_REFITS = 2
# If the prompt and the requested output together do not fit the context window, the proxy lowers the output
# limit in the request. It then keeps a share of the context window free, because sizes are estimates. It
# tries these shares in order, and uses the first that leaves enough tokens for the output. At least
# OUTPUT_MARGIN_TOKENS tokens stay free. If the request has a thinking budget, the lowered output limit
# exceeds this budget by at least OUTPUT_MARGIN_TOKENS tokens, which remain for the reply.
OUTPUT_MARGIN_SHARES = (0.04, 0.01)
OUTPUT_MARGIN_TOKENS = 64
# If the error with which the upstream refuses a request names no limit, the request is shortened to this
# share of the size that was refused.
UNKNOWN_LIMIT_SHARE = 0.7
# If the error with which the upstream refuses a request reports the size that the upstream counted, later
# estimates for the request are nearly exact. So after the first refusal, important content such as the task
# is cut only if the estimate exceeds the whole context window. If this estimate is too low, the upstream
# refuses the request once more, which costs less than losing the task. From the second refusal on, important
# content is cut until the request takes at most this share of the context window.
REPORTED_SIZE_SHARE = 0.985
# The reported reason why a finished compaction was not applied: it does not make the request shorter.
LONGER_REASON = "longer"
# The reported reason why a request was forwarded unchanged: a user has switched compaction off for its
# conversation.
BYPASSED_BY_USER = "asked"

# With these outcomes, the client's own bytes are forwarded, and even the output limit is not lowered.
_UNTOUCHED = frozenset({CompactionStatus.SHADOW, CompactionStatus.BYPASSED})

_PARTS, _TOKENS = attrgetter("parts"), attrgetter("tokens")

_Result = TypeVar("_Result")

_log = structlog.get_logger()


class FittedMessages(NamedTuple):
    """The messages that will be forwarded, before they are encoded.

    Attributes:
        messages: The messages.
        is_changed: Whether the list differs from the client's list.
        fits: Whether the list fits the context window, according to the estimate.
        is_whole: Whether nothing was cut from the list to make it fit. Also False if the proxy could not
            shorten the list and therefore forwards the client's list.
    """

    messages: tuple[Message, ...]
    is_changed: bool
    fits: bool
    is_whole: bool = True


class Compactor:
    """Makes requests fit the context window of their model.

    Args:
        loader: Reads requests, counts their tokens, and loads their checkpoints and directives.
        coordinator: Makes compactions and applies them to requests.
        reader: Counts the tokens of messages that have been cut.
        model_limits: Learns the limits of models from the upstream's errors and responses.
        auto_recall: Inserts excerpts of matching removed messages into the request. None disables
            auto-recall.
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
        """Makes the request fit the context window. Leaves it unchanged if that is unnecessary or fails.

        If the request asks for texts to be pinned, the pins are stored before this method returns. The next
        request needs them, and it may arrive before this request is answered.
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
        """Finds the conversation of a request whose client gave no id, and returns the request with the id.

        Returns the request unchanged if the client gave an id, if the request may not use checkpoints, if it
        bypasses compaction, or if an error occurs. Returns None if the request belongs to no conversation,
        for example because it only asks for a title.
        """
        needs_no_id = (
            ask.conversation is not None or not ask.uses_checkpoints or ask.mode is CompactionMode.BYPASS
        )
        if not needs_no_id:
            with suppress_and_report(_log_unexpected_error):
                return await self._loader.find_conversation(ask, has_tools=has_tools)
        return ask

    async def refit_after_refusal(
        self, ask: FitRequest, refused_fit: FitResult, overflow: Overflow, refusals: int = 1
    ) -> FitResult | None:
        """Shortens a request that the upstream has just refused as too long.

        Returns None if compaction is off for the request, if the error is about the number of bytes, or if
        every attempt gives the refused body again or a longer one. If an attempt is made, the method also
        learns the limit and the token count that the error names, for later requests.

        Args:
            ask: The request.
            refused_fit: The result that was forwarded and that the upstream has refused.
            overflow: The limit and the size that the upstream's error names.
            refusals: How often the upstream has refused this request so far, including this time.
        """
        rules = resolve_policy(ask.settings, ask.strategy).trigger
        is_allowed = ask.mode in {CompactionMode.ACTIVE, CompactionMode.FORCE} and has_active_rule(rules)
        if (
            not is_allowed
            or overflow.kind == "bytes"
            or refused_fit.report.status is CompactionStatus.BYPASSED
        ):
            return None
        for tightness in range(refusals, MAX_REFITS + 1):
            fit = await self._fit_or_fail_open(
                ask, self._fit_refused_request(ask, refused_fit, overflow, tightness)
            )
            if len(fit.raw) <= len(refused_fit.raw) and fit.raw != refused_fit.raw:
                return fit
        return None

    async def prepare_round(self, ask: FitRequest) -> None:
        """Starts a compaction that a later request will soon need.

        Call this method after the client has received the response, so that it does not delay the response.
        """
        with suppress_and_report(partial(_log_failure, ask)):
            await self._coordinator.prepare_round(await self._loader.load_view(ask, bypass_cache=True))

    async def _fit_or_fail_open(self, ask: FitRequest, pending_result: Awaitable[FitResult]) -> FitResult:
        """Awaits and returns `pending_result`. If this fails, returns a result with the unchanged request."""
        reason = "internal"

        def record_failure(error: BaseException) -> None:
            nonlocal reason
            if isinstance(error, CompactionError):
                reason = error.reason
            elif is_resource_shortage(error):
                reason = OUT_OF_RESOURCES
                _log_failure(ask, error)
            else:
                _log.error(COMPACTION_FAILED, conversation=ask.known_conversation, exc_info=error)

        with suppress_and_report(record_failure):
            return await pending_result
        return FitResult(
            ask.body.raw,
            0,
            CompactionReport(CompactionStatus.FAILED_OPEN, ask.known_conversation, reason=reason),
        )

    async def _fit_with_rounds(self, ask: FitRequest) -> FitResult:
        view = await self._loader.load_view(ask)
        if view.directives.bypass:
            return await self._build_bypassed_result(view)
        due, uncapped = await _run_if_large(view, partial(_find_due_reason, view)), None
        # Another proxy process may have made the compaction already, so the stored state is loaded again.
        if due is not None or await _run_if_large(view, partial(self._coordinator.has_huge_results, view)):
            view = await self._loader.refresh_view(view)
            if ask.mode is not CompactionMode.SHADOW:
                uncapped_view, view = view, await self._coordinator.cap_huge_results(view)
                uncapped = None if view is uncapped_view else uncapped_view.effective_estimate
            due = await _run_if_large(view, partial(_find_due_reason, view))
        if ask.mode is CompactionMode.SHADOW:
            fitted = FittedMessages(view.messages, is_changed=False, fits=True)
            return await self._build_result(view, fitted, CompactionStatus.SHADOW, due)
        return await self._compact_if_due(view, due, uncapped_tokens=uncapped)

    async def _fit_unchanged(self, ask: FitRequest) -> FitResult:
        """Returns a result that leaves the request unchanged.

        The tokens of the request are counted only if the proxy has learned a context window for the model
        from errors. If the upstream then accepts the request, this count may show that the learned window is
        too small.
        """
        estimate = 0
        with suppress_and_report(partial(_log_failure, ask)):
            if await self._model_limits.is_limited(ask.tenant, ask.origin, ask.model):
                view = await self._loader.load_view(ask)
                estimate = view.count_tokens(view.messages)
        return FitResult(
            ask.body.raw, estimate, CompactionReport(CompactionStatus.BYPASSED, ask.known_conversation)
        )

    async def _build_bypassed_result(self, view: RequestView) -> FitResult:
        """Returns a result with the client's own request, for use if a user has switched compaction off."""
        uncompacted = view.with_checkpoint(None)
        fitted = FittedMessages(uncompacted.messages, is_changed=False, fits=True)
        return await self._build_result(uncompacted, fitted, CompactionStatus.BYPASSED, BYPASSED_BY_USER)

    async def _fit_refused_request(
        self, ask: FitRequest, refused_fit: FitResult, overflow: Overflow, refusals: int
    ) -> FitResult:
        limit, adds_output = await self._learn_from_refusal(ask, refused_fit, overflow, refusals)
        window = min(filter(None, (limit, ask.settings.window)))
        narrowed_ask = replace(ask, settings=replace(ask.settings, window=window))
        view = await self._loader.load_view(
            narrowed_ask, refusals=0 if adds_output else refusals, bypass_cache=True
        )
        if view.directives.bypass:
            return await self._build_bypassed_result(view)
        view = _apply_reported_size(view, refused_fit.estimate, overflow, None if adds_output else refusals)
        fits_alone = adds_output and view.effective_estimate <= view.budget.prompt_limit
        if fits_alone:  # the prompt alone fits, so nothing may be cut from it
            input_limit = max(view.budget.input_limit, view.effective_bound)
            view = replace(view, budget=replace(view.budget, input_limit=input_limit))
        due = (
            view.find_due_reason()
            if view.budget.sum_limit is not None and ask.can_lower_output
            else "overflow"
        )
        return await self._compact_if_due(view, due)

    async def _learn_from_refusal(
        self, ask: FitRequest, refused_fit: FitResult, overflow: Overflow, refusals: int
    ) -> tuple[int, bool]:
        """Learns the model's limits from a refusal. Returns the limit that the request must fit, in tokens.

        The second result is True if the limit applies to the sum of the prompt and the requested output. If
        the error does not say whether it applies to the sum or to the prompt alone, the second result is an
        assumption, which the proxy does not store: after the first refusal it is True if the estimated sum
        exceeds the limit and the estimated prompt does not.

        An error may quote the request. So a limit in the error is learned only if its number does not occur
        in the request. Output limits in the request are ignored in this comparison, because a client may ask
        for as many output tokens as the context window has. If no limit can be learned in this way, and the
        error is about the context window, the size of the refused request is learned instead.
        """
        estimate = refused_fit.estimate
        if not estimate:  # the request passed the size gate uncounted
            view = await self._loader.load_view(ask)
            estimate = view.count_tokens(view.messages)
        echoed = await run_in_worker_if_large(
            len(ask.body.raw), partial(_find_echoed_numbers, ask.body, overflow)
        )
        if overflow.used_tokens and overflow.kind != "tpm" and overflow.used_tokens not in echoed:
            await self._model_limits.learn_token_count(
                ask.tenant, ask.origin, ask.model, estimate, overflow.used_tokens
            )
        learned = await self._model_limits.get(ask.tenant, ask.origin, ask.model)
        is_reliable = overflow.limit_tokens is not None and overflow.limit_tokens not in echoed
        if not is_reliable and overflow.kind == "context" and overflow.is_size_meaningful:
            size_bytes = len(refused_fit.raw)
            await self._model_limits.learn_refused(ask.tenant, ask.origin, ask.model, estimate, size_bytes)
        if overflow.limit_tokens is None:
            return int(learned.calibration.predict_tokens(estimate) * UNKNOWN_LIMIT_SHARE), False
        if is_reliable and overflow.kind != "tpm":
            await self._model_limits.learn_window(ask.tenant, ask.origin, ask.model, overflow.limit_tokens)
        if overflow.kind == "context_output":
            await self._model_limits.learn_that_output_counts(ask.tenant, ask.origin, ask.model)
            return overflow.limit_tokens, True
        output_tokens = ask.body.max_output or 0
        return overflow.limit_tokens, refusals == 1 and _can_be_output_overflow(
            overflow, learned.calibration, estimate, output_tokens
        )

    async def _compact_if_due(
        self, view: RequestView, due_reason: str | None, *, uncapped_tokens: int | None = None
    ) -> FitResult:
        """Makes a compaction if one is due, and then makes the request fit the context window.

        Args:
            view: The request with the stored state of its conversation.
            due_reason: Why a compaction is due; None if none is due.
            uncapped_tokens: The size of the request, in tokens, before its huge tool results were capped;
                None if none were capped.
        """
        status = (
            CompactionStatus.APPLIED
            if uncapped_tokens is not None
            else CompactionStatus.REUSED
            if view.checkpoint
            else CompactionStatus.NONE
        )
        reason = None
        tokens_due = view.effective_estimate if uncapped_tokens is None else uncapped_tokens
        if due_reason is not None:
            try:
                view, reason = await self._coordinator.apply_round(view, due_reason)
                status = CompactionStatus.APPLIED
            except SummaryError as failed:
                reason = failed.reason
                status = status if reason in QUIET_REASONS else CompactionStatus.FAILED_OPEN
        fitted = await self._choose_messages(view)
        if (
            fitted.is_changed
            and not fitted.is_whole
            and status in {CompactionStatus.NONE, CompactionStatus.FAILED_OPEN}
        ):
            status = CompactionStatus.APPLIED
        if not fitted.is_changed and status in {CompactionStatus.APPLIED, CompactionStatus.REUSED}:
            status, reason = (
                CompactionStatus.NONE,
                reason if status is CompactionStatus.REUSED else reason or LONGER_REASON,
            )
        if not fitted.fits and view.is_automatic:
            status = CompactionStatus.OVER_LIMIT
        ahead = (
            due_reason is None
            and view.root is not None
            and await _run_if_large(view, view.should_prepare_round)
            and bool(view.request.summary_routes)
        )
        if ahead and status is CompactionStatus.NONE:
            status = CompactionStatus.SCHEDULED
        return await self._build_result(
            view, fitted, status, reason, tokens_without_round=tokens_due, should_prepare=ahead
        )

    async def _choose_messages(self, view: RequestView) -> FittedMessages:
        """Returns the messages to forward.

        If no compaction applies and the request fits, these are the client's own messages. Otherwise, the
        method starts from the effective list:

        - If the list is invalid, for example because the call of a tool result is missing, repairs the list.
        - If the list does not fit, cuts it without a model. If the cut list does not fit either, keeps the
          uncut list.
        - Returns the client's own messages after all if no compaction applies and the list was not cut, or if
          the result would be longer than the client's own list.
        """
        is_too_long = view.is_automatic and await _run_if_large(view, lambda: view.exceeds_window)
        is_compacted = view.checkpoint is not None and bool(view.checkpoint.spans)
        if not is_compacted and not is_too_long:
            return FittedMessages(view.messages, is_changed=False, fits=True)
        messages = await _run_if_large(view, partial(_build_valid_messages, view))
        if not all(map(_TOKENS, messages)):
            messages = await fill_token_counts(messages, view, self._reader)
        is_whole = True
        if is_too_long:
            shorter = await cut_to_fit(messages, view, self._reader)
            if not view.is_too_large(shorter):  # a cut list that is still too large is useless
                messages, is_whole = shorter, False
        is_useless = is_whole and not is_compacted  # it was only repaired, which does not make it fit
        if (
            is_useless
            or (len(messages) == len(view.messages) and all(map(is_, messages, view.messages)))
            or view.count_tokens(messages) > view.count_tokens(view.messages)
        ):
            messages = view.messages
        is_changed = messages is not view.messages
        return FittedMessages(
            messages, is_changed, fits=not view.is_too_large(messages), is_whole=is_whole and is_changed
        )

    async def _build_result(
        self,
        view: RequestView,
        fitted: FittedMessages,
        status: CompactionStatus,
        reason: str | None,
        *,
        tokens_without_round: int | None = None,
        should_prepare: bool = False,
    ) -> FitResult:
        is_rewritten = fitted.is_changed or view.budget.sum_limit is not None
        return await run_in_worker_if_large(
            len(view.request.body.raw) if is_rewritten else 0,
            partial(
                _build_result,
                view,
                fitted,
                status,
                reason,
                tokens_without_round=tokens_without_round,
                should_prepare=should_prepare,
            ),
            message_count=len(view.messages),
        )


async def _run_if_large(view: RequestView, work: Callable[[], _Result]) -> _Result:
    """Runs `work`, which goes through the messages of a request, in a thread if they are very many."""
    return await run_in_worker_if_large(0, work, message_count=len(view.messages))


def _build_valid_messages(view: RequestView) -> tuple[Message, ...]:
    """Returns the effective list, repaired if providers would refuse it."""
    messages = (
        view.effective_messages
        if view.checkpoint
        else replace_messages(view.messages, view.shortened_instructions)
    )
    messages = messages if is_valid_message_list(messages) else repair_messages(messages)
    if view.request.settings.alternation == "strict":
        messages = insert_alternating_fillers(messages)
    return messages


def _build_result(
    view: RequestView,
    fitted: FittedMessages,
    status: CompactionStatus,
    reason: str | None,
    *,
    tokens_without_round: int | None,
    should_prepare: bool,
) -> FitResult:
    raw = rewrite_messages(view.request.body, fitted.messages) if fitted.is_changed else view.request.body.raw
    max_output = None
    if status not in _UNTOUCHED:
        raw, max_output = _lower_output_limit(view, raw, fitted.messages)
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
        trigger=view.automatic_trigger_tokens,
        reason=reason,
        tokens_without_round=tokens_without_round,
        checkpoint_id=view.checkpoint_id.hex(),
        max_output=max_output,
    )
    usage_basis = view.build_usage_basis() if fitted.is_whole else None
    has_guessed_tokens = any(map(_PARTS, fitted.messages)) if fitted.is_changed else view.has_guessed_tokens
    client_tokens = view.count_tokens(view.messages)
    compacted = None
    if view.checkpoint is not None and fitted.is_changed and fitted.is_whole:
        compacted = CompactedMessages(fitted.messages, view.unfixed_messages, view.checkpoint)
    return FitResult(
        raw,
        view.count_tokens(fitted.messages),
        report,
        usage_basis,
        has_guessed_tokens,
        should_prepare,
        client_tokens,
        compacted,
    )


def _find_echoed_numbers(body: RequestBody, overflow: Overflow) -> frozenset[int]:
    """Returns those numbers of an error that also occur in the request, outside of its output limits."""
    mentioned = MentionedNumbers(clear_output_limits(body.raw, body.wire))
    return frozenset(
        number
        for number in (overflow.used_tokens, overflow.limit_tokens)
        if number is not None and number in mentioned
    )


def _log_failure(ask: FitRequest, error: BaseException) -> None:
    _log.warning(COMPACTION_FAILED, conversation=ask.known_conversation, error=type(error).__name__)


def _log_unexpected_error(error: BaseException) -> None:
    """Logs an error. Ignores a `CompactionError`: it will occur again in `fit_request`, which reports it."""
    if is_resource_shortage(error):
        _log.warning(COMPACTION_FAILED, error=type(error).__name__)
    elif not isinstance(error, CompactionError):
        _log.error(COMPACTION_FAILED, exc_info=error)


def _find_due_reason(view: RequestView) -> str | None:
    """Returns why a compaction is due now; None if none is due.

    The reason is `force` if the client or a user has asked for a compaction. Otherwise, it is the reason that
    `RequestView.find_due_reason` finds.
    """
    forced = view.request.mode is CompactionMode.FORCE or view.directives.compact
    return "force" if forced else view.find_due_reason()


def _apply_reported_size(
    view: RequestView, estimate: int, overflow: Overflow, refusals: int | None
) -> RequestView:
    """Returns the view with the request size, the prompt limit and the cut goal that follow from a refusal.

    The cut goal is the size to which the request is cut if it exceeds the prompt limit. If the error names
    only a limit, the refused prompt is assumed to be one token larger than the limit. The prompt limit of the
    next attempt is then a share of the named limit, and this share becomes smaller with each refusal.

    Returns the view unchanged if the error does not concern the context window, if it names neither a size
    nor a limit, if it names only a limit and `refusals` is None, or if the size is not plausible
    (`build_baseline`).

    Args:
        view: The request.
        estimate: Counted tokens of the refused request; 0 if the request was not counted.
        overflow: The numbers that the upstream's error names.
        refusals: Number of refusals so far, this one included; None if the prompt alone fits and only its sum
            with the requested output is too large.
    """
    if overflow.kind not in {"context", "context_output"}:
        return view
    used, reported_goal = overflow.used_tokens, int(REPORTED_SIZE_SHARE * view.budget.prompt_limit)
    max_tokens, goal = (
        max(view.max_prompt_tokens, reported_goal),
        view.budget.prompt_limit if refusals == 1 else reported_goal,
    )
    estimate = estimate or view.count_tokens(view.messages)
    if used is None and overflow.limit_tokens is not None and refusals is not None:
        used, max_tokens = overflow.limit_tokens + 1, int(overflow.limit_tokens * TIGHT_SHARE**refusals)
        goal = max_tokens
    elif used is None:
        return view
    anchor = build_baseline(view.prefixes, view.baseline_key, estimate, used)
    return (
        view
        if anchor is None
        else replace(view, anchor=anchor, max_prompt_tokens=max_tokens, cut_goal_tokens=goal)
    )


def _can_be_output_overflow(
    overflow: Overflow, calibration: Calibration, estimate: int, requested_output: int
) -> bool:
    """Returns whether the prompt alone probably fits the limit, but prompt and output together do not.

    The size of the prompt is estimated. Returns False if the error is of another kind than `context`, if it
    names no limit, or if it names the size that the upstream counted.

    Args:
        overflow: The numbers that the upstream's error names.
        calibration: The calibration of the model.
        estimate: Counted tokens of the refused request.
        requested_output: The output limit in the request, in tokens; 0 if there is none.
    """
    if overflow.kind != "context" or overflow.limit_tokens is None or overflow.used_tokens is not None:
        return False
    return (
        calibration.predict_upper_bound(estimate)
        < overflow.limit_tokens
        < calibration.predict_tokens(estimate) + requested_output
    )


def _lower_output_limit(
    view: RequestView, raw: bytes, messages: Sequence[Message]
) -> tuple[bytes, int | None]:
    """Lowers the output limit so that prompt and requested output together fit the context window.

    Returns the body and the new output limit in tokens. Returns `raw` and None if the upstream does not count
    both together, if the limit may not be lowered, or if no suitable lower limit exists.
    """
    sum_limit, asked = view.budget.sum_limit, view.request.body.max_output
    if sum_limit is None or asked is None or not (view.is_automatic and view.request.can_lower_output):
        return raw, None
    window = view.budget.window
    free_tokens = window - max(view.estimate_upper_bound(messages), view.estimate_tokens(messages))
    choices = [free_tokens - max(int(share * window), OUTPUT_MARGIN_TOKENS) for share in OUTPUT_MARGIN_SHARES]
    if not view.is_too_large(messages):  # with the full output limit, the upstream would refuse the request
        choices += [
            MIN_OUTPUT_TOKENS,
            MIN_OUTPUT_TOKENS + OUTPUT_MARGIN_TOKENS,
        ]  # a request with a thinking budget needs the second value
    for tokens in choices:
        if MIN_OUTPUT_TOKENS <= tokens < asked:
            lowered = lower_output_limits(raw, view.request.body.wire, tokens)
            if lowered is not raw:
                return lowered, tokens
    return raw, None
