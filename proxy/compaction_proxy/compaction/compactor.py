"""The use case: a request in, a request that fits out, and never a failure of ours in between.

`fit` reads and sizes the request, applies what earlier rounds have made of it, makes a round where one is
due, and goes down the ladder where the result would still not fit. `prepare` makes a round ahead of need.
Whatever goes wrong here, the client's own bytes go on.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from operator import attrgetter, is_
from typing import NamedTuple

import structlog

from compaction_proxy.compaction.fallback_cut import cut, sized
from compaction_proxy.compaction.message_reader import Reading
from compaction_proxy.compaction.request_limits import policy_for
from compaction_proxy.compaction.request_loader import TIGHT_SHARE, Viewer
from compaction_proxy.compaction.request_view import View, with_shorter
from compaction_proxy.compaction.round_coordinator import QUIET, Replacing
from compaction_proxy.compaction.types import Ask, Fit, Forwarded, Mode, Report, Status
from compaction_proxy.core.budget import LEAST_OUTPUT_TOKENS
from compaction_proxy.core.errors import CompactionError, SummaryFailed
from compaction_proxy.core.message import Message
from compaction_proxy.core.repair import alternate, repair, sound
from compaction_proxy.core.trigger import automatic
from compaction_proxy.providers.calibration import Calibration
from compaction_proxy.providers.model_limits import Learning
from compaction_proxy.providers.usage_baseline import anchored
from compaction_proxy.support.fail_open import contained
from compaction_proxy.support.log_events import COMPACTION_FAILED
from compaction_proxy.wires.body import with_output, without_output, write
from compaction_proxy.wires.context_errors import Overflow
from compaction_proxy.wires.prescan import Mentioned

# How often a request that was refused as too long is sent again, shorter each time.
REPLAYS = 2
# Output that is lowered keeps such a share of the window free, for the error of estimates, and at least so
# many tokens: the first share that leaves enough. An answer has as many beside the least budget of thinking.
OUTPUT_MARGIN_SHARES = (0.04, 0.01)
OUTPUT_MARGIN_TOKENS = 64
# Where an overflow error names no limit, the request is made this much smaller than what was refused.
BLIND_SHARE = 0.7
# Where it says what it counted, little is estimated: what matters is cut to this share of the window. After
# the first refusal what matters is not cut at all where the estimate fits the window: one more refusal shows
# whether the estimate was right, and costs less than the task.
TOLD_SHARE = 0.985
# Why a round that was made is not applied.
LONGER = "longer"
# Why a request is bypassed that does not ask for it itself.
ASKED = "asked"

# Nothing of a request is changed under these.
_UNTOUCHED = frozenset({Status.SHADOW, Status.BYPASSED})

_PARTS, _TOKENS = attrgetter("parts"), attrgetter("tokens")

_log = structlog.get_logger()


class Settled(NamedTuple):
    """What will be forwarded, before it is written.

    Attributes:
        messages: The list.
        changed: Whether it differs from the client's.
        fits: Whether it fits, as far as we can tell.
        whole: Whether it is the effective list, and nothing had to be cut from it.
    """

    messages: tuple[Message, ...]
    changed: bool
    fits: bool
    whole: bool = True


class Compactor:
    """Makes requests fit.

    Args:
        viewer: Reads requests and finds what is stored of them.
        replacing: Has rounds made and put in force.
        reading: Counts what was cut.
        learning: Learns from the upstream.
        remind: Places what was removed and matters now in a request that fits.
    """

    def __init__(
        self,
        viewer: Viewer,
        replacing: Replacing,
        reading: Reading,
        learning: Learning,
        remind: Callable[[Fit, Ask], Awaitable[Fit]] | None = None,
    ) -> None:
        self._viewer = viewer
        self._replacing = replacing
        self._reading = reading
        self._learning = learning
        self._remind = remind

    async def fit(self, ask: Ask) -> Fit:
        """The request, made to fit; as it came where that was not possible or not needed.

        What it pins is kept by then: the next request may come before this one has been observed.
        """
        if ask.mode is Mode.BYPASS:
            fit = await self._fit_unchanged(ask)
        else:
            fit = await self._failing_open(ask, self._fitted(ask))
            if self._remind is not None and ask.settings.recall.auto != "none":
                fit = await self._remind(fit, ask)
        await self._viewer.pin(ask, fit.report.conversation or ask.known_as)
        return fit

    async def find_conversation(self, ask: Ask, *, has_tools: bool) -> Ask | None:
        """Returns the request with the conversation that its messages continue, if its client names none.

        None if it only stands beside a conversation.
        """
        named = ask.conversation is not None or not ask.remembered or ask.mode is Mode.BYPASS
        if not named:
            with contained(_not_found):
                return await self._viewer.find_conversation(ask, has_tools=has_tools)
        return ask

    async def refit(self, ask: Ask, refused: Fit, overflow: Overflow, refusals: int = 1) -> Fit | None:
        """The request made to fit what the upstream has just refused it for; None if it cannot be.

        Learns the limit and the true count that the error names. `refusals` counts this one and those before.
        """
        rows = policy_for(ask.settings, ask.strategy).trigger
        wanted = ask.mode in {Mode.ACTIVE, Mode.FORCE} and automatic(rows)
        if not wanted or overflow.kind == "bytes" or refused.report.status is Status.BYPASSED:
            return None
        for tightness in range(refusals, REPLAYS + 1):
            fit = await self._failing_open(ask, self._refitted(ask, refused, overflow, tightness))
            if len(fit.raw) <= len(refused.raw) and fit.raw != refused.raw:
                return fit
        return None

    async def prepare(self, ask: Ask) -> None:
        """Begin the work that will soon be needed; to be called once the client has its answer."""

        def failed(error: BaseException) -> None:
            _log.warning(COMPACTION_FAILED, conversation=ask.known_as, error=type(error).__name__)

        with contained(failed):
            await self._replacing.prepare(await self._viewer.view(ask, fresh=True))

    async def _failing_open(self, ask: Ask, fitting: Awaitable[Fit]) -> Fit:
        """The outcome, or the request as it came if anything at all went wrong."""
        reason = "internal"

        def failed(error: BaseException) -> None:
            nonlocal reason
            if isinstance(error, CompactionError):
                reason = error.reason
            else:
                _log.error(COMPACTION_FAILED, conversation=ask.known_as, exc_info=error)

        with contained(failed):
            return await fitting
        return Fit(ask.body.raw, 0, Report(Status.FAILED_OPEN, ask.known_as, reason=reason))

    async def _fitted(self, ask: Ask) -> Fit:
        view = await self._viewer.view(ask)
        if view.wishes.bypass:
            return self._bypassed(view)
        due, uncapped = _due(view), None
        if due is not None or self._replacing.caps(view):  # another replica may have done it already
            view = await self._viewer.renewed(view)
            if ask.mode is not Mode.SHADOW:
                before, view = view, await self._replacing.capped(view)
                uncapped = None if view is before else before.size(before.effective)
            due = _due(view)
        if ask.mode is Mode.SHADOW:
            settled = Settled(view.messages, changed=False, fits=True)
            return self._written(view, settled, Status.SHADOW, due)
        return await self._finished(view, due, uncapped=uncapped)

    async def _fit_unchanged(self, ask: Ask) -> Fit:
        """The request as it came. It is counted only where its answer may raise a learned limit."""
        estimate = 0

        def failed(error: BaseException) -> None:
            _log.warning(COMPACTION_FAILED, conversation=ask.known_as, error=type(error).__name__)

        with contained(failed):
            if await self._learning.is_limited(ask.tenant, ask.origin, ask.model):
                view = await self._viewer.view(ask)
                estimate = view.counted(view.messages)
        return Fit(ask.body.raw, estimate, Report(Status.BYPASSED, ask.known_as))

    def _bypassed(self, view: View) -> Fit:
        """The request as it came, because people want it so."""
        bare = view.with_checkpoint(None)
        settled = Settled(bare.messages, changed=False, fits=True)
        return self._written(bare, settled, Status.BYPASSED, ASKED)

    async def _refitted(self, ask: Ask, refused: Fit, overflow: Overflow, refusals: int) -> Fit:
        limit, adds_output = await self._lesson(ask, refused, overflow, refusals)
        window = min(filter(None, (limit, ask.settings.window)))
        narrower = replace(ask, settings=replace(ask.settings, window=window))
        view = await self._viewer.view(narrower, refusals=0 if adds_output else refusals, fresh=True)
        if view.wishes.bypass:
            return self._bypassed(view)
        view = _told(view, refused.estimate, overflow, None if adds_output else refusals)
        fits_alone = adds_output and view.size(view.effective) <= view.budget.prompt_limit
        if fits_alone:  # nothing may be cut from it
            taken = max(view.budget.input_limit, view.bound(view.effective))
            view = replace(view, budget=replace(view.budget, input_limit=taken))
        due = view.due() if view.budget.sum_limit is not None and ask.lower_output else "overflow"
        return await self._finished(view, due)

    async def _lesson(self, ask: Ask, refused: Fit, overflow: Overflow, refusals: int) -> tuple[int, bool]:
        """Learn from a refusal.

        Returns the window that the request must fit, and whether only its sum with the output asked for did
        not fit. An error that does not say so may mean it, which is supposed once, and never remembered.
        Errors may echo the request. So a number that stands in it is not remembered, unless it only limits
        the output there: clients ask for as much output as the window has. The refused size is, instead.
        """
        estimate = refused.estimate
        if not estimate:  # it had passed the gate uncounted
            view = await self._viewer.view(ask)
            estimate = view.counted(view.messages)
        echoed = Mentioned(without_output(ask.body.raw, ask.body.dialect))
        if overflow.used and overflow.kind != "tpm" and overflow.used not in echoed:
            await self._learning.observed(ask.tenant, ask.origin, ask.model, estimate, overflow.used)
        learned = await self._learning.of(ask.tenant, ask.origin, ask.model)
        is_told = overflow.limit is not None and overflow.limit not in echoed
        if not is_told and overflow.kind == "context" and overflow.is_sized:
            size_bytes = len(refused.raw)
            await self._learning.learn_refused(ask.tenant, ask.origin, ask.model, estimate, size_bytes)
        if overflow.limit is None:
            return int(learned.calibration.size(estimate) * BLIND_SHARE), False
        if is_told and overflow.kind != "tpm":
            await self._learning.overflowed(ask.tenant, ask.origin, ask.model, overflow.limit)
        if overflow.kind == "context_output":
            await self._learning.learn_adds_output(ask.tenant, ask.origin, ask.model)
            return overflow.limit, True
        asked = ask.body.max_output or 0
        return overflow.limit, refusals == 1 and _may_be_sum(overflow, learned.calibration, estimate, asked)

    async def _finished(self, view: View, due: str | None, *, uncapped: int | None = None) -> Fit:
        """The request with a round made if one is due, and brought under the limit.

        `uncapped` is its size before results were shortened for this very request; None: none were.
        """
        status = Status.APPLIED if uncapped is not None else Status.REUSED if view.earlier else Status.NONE
        reason = None
        tokens_due = view.size(view.effective) if uncapped is None else uncapped
        if due is not None:
            try:
                view, reason = await self._replacing.compacted(view, due)
                status = Status.APPLIED
            except SummaryFailed as failed:
                reason = failed.reason
                status = status if reason in QUIET else Status.FAILED_OPEN
        settled = await self._settled(view)
        if settled.changed and not settled.whole and status in {Status.NONE, Status.FAILED_OPEN}:
            status = Status.APPLIED
        if not settled.changed and status in {Status.APPLIED, Status.REUSED}:
            status, reason = Status.NONE, reason if status is Status.REUSED else reason or LONGER
        if not settled.fits and view.automatic:
            status = Status.OVER_LIMIT
        ahead = due is None and view.root is not None and view.soft() and bool(view.ask.routes)
        if ahead and status is Status.NONE:
            status = Status.SCHEDULED
        return self._written(view, settled, status, reason, tokens_due=tokens_due, ahead=ahead)

    async def _settled(self, view: View) -> Settled:
        """The list to forward: as it is if it may be, else repaired, and cut until it fits."""
        over = view.automatic and view.exceeds_window(view.effective)
        replaced = view.earlier is not None and bool(view.earlier.spans)
        if not replaced and not over:
            return Settled(view.messages, changed=False, fits=True)
        messages = view.effective if view.earlier else with_shorter(view.messages, view.shorter)
        messages = messages if sound(messages) else repair(messages)
        if view.ask.settings.alternation == "strict":
            messages = alternate(messages)
        if not all(map(_TOKENS, messages)):
            messages = await sized(messages, view, self._reading)
        whole = True
        if over:
            shorter = await cut(messages, view, self._reading)
            if not view.hopeless(shorter):  # else nothing is won by what was cut
                messages, whole = shorter, False
        useless = whole and not replaced  # repair alone does not make it fit
        if (
            useless
            or _are_same(messages, view.messages)
            or view.counted(messages) > view.counted(view.messages)
        ):
            messages = view.messages
        changed = messages is not view.messages
        return Settled(messages, changed, fits=not view.hopeless(messages), whole=whole and changed)

    def _written(
        self,
        view: View,
        settled: Settled,
        status: Status,
        reason: str | None,
        *,
        tokens_due: int | None = None,
        ahead: bool = False,
    ) -> Fit:
        raw = write(view.ask.body, settled.messages) if settled.changed else view.ask.body.raw
        max_output = None
        if status not in _UNTOUCHED:
            raw, max_output = _lower_output(view, raw, settled.messages)
        report = Report(
            status=status,
            conversation=view.conversation,
            strategy=view.policy.name if settled.changed or status is not Status.NONE else None,
            round=(view.earlier.round or None) if view.earlier and settled.changed else None,
            messages_before=len(view.messages),
            messages_after=len(settled.messages),
            tokens_before=view.size(view.messages),
            tokens_after=view.size(settled.messages),
            window=view.budget.window,
            trigger=view.marks.trigger if view.automatic else None,
            reason=reason,
            tokens_due=tokens_due,
            place=view.place.hex(),
            max_output=max_output,
        )
        footing = view.footing() if settled.whole else None
        guessed = any(map(_PARTS, settled.messages)) if settled.changed else view.guessed
        listed = view.counted(view.messages)
        put = None
        if view.earlier is not None and settled.changed and settled.whole:
            put = Forwarded(settled.messages, view.body, view.earlier)
        return Fit(raw, view.counted(settled.messages), report, footing, guessed, ahead, listed, put)


def _are_same(messages: Sequence[Message], sent: Sequence[Message]) -> bool:
    """Whether a list holds the very messages that the client sent."""
    return len(messages) == len(sent) and all(map(is_, messages, sent))


def _not_found(error: BaseException) -> None:
    """Leave what is wrong with a request to `fit`, which reports it."""
    if not isinstance(error, CompactionError):
        _log.error(COMPACTION_FAILED, exc_info=error)


def _due(view: View) -> str | None:
    """What makes a round due now, asked for or not; None if nothing does."""
    forced = view.ask.mode is Mode.FORCE or view.wishes.compact
    return "force" if forced else view.due()


def _told(view: View, estimate: int, overflow: Overflow, refusals: int | None) -> View:
    """The view with what the upstream has counted of the request that it refused, if it said so.

    Where it named a limit only, the prompt was larger than that: so many `refusals` show by how much less it
    may be. None says that the prompt alone fits.
    """
    if overflow.kind not in {"context", "context_output"}:
        return view
    used, told = overflow.used, int(TOLD_SHARE * view.budget.prompt_limit)
    most, goal = max(view.most, told), view.budget.prompt_limit if refusals == 1 else told
    estimate = estimate or view.counted(view.messages)
    if used is None and overflow.limit is not None and refusals is not None:
        used, most = overflow.limit + 1, int(overflow.limit * TIGHT_SHARE**refusals)
        goal = most
    elif used is None:
        return view
    anchor = anchored(view.prefixes, view.standing, estimate, used)
    return view if anchor is None else replace(view, anchor=anchor, most=most, goal=goal)


def _may_be_sum(overflow: Overflow, calibration: Calibration, estimate: int, asked: int) -> bool:
    """Whether the upstream may have refused only the sum of the prompt and the `asked` tokens of output."""
    if overflow.kind != "context" or overflow.limit is None or overflow.used is not None:
        return False
    return calibration.bound(estimate) < overflow.limit < calibration.size(estimate) + asked


def _lower_output(view: View, raw: bytes, messages: Sequence[Message]) -> tuple[bytes, int | None]:
    """Returns the body asking for as much output as the upstream will take beside the prompt.

    With it the tokens of output that it asks for now; None where it is unchanged.
    """
    most, asked = view.budget.sum_limit, view.ask.body.max_output
    if most is None or asked is None or not (view.automatic and view.ask.lower_output):
        return raw, None
    window = view.budget.window
    left = window - max(view.bound(messages), view.size(messages))
    choices = [left - max(int(share * window), OUTPUT_MARGIN_TOKENS) for share in OUTPUT_MARGIN_SHARES]
    if not view.hopeless(messages):  # with all that is asked for it is refused for sure
        choices += [
            LEAST_OUTPUT_TOKENS,
            LEAST_OUTPUT_TOKENS + OUTPUT_MARGIN_TOKENS,
        ]  # thinking needs the latter
    for tokens in choices:
        if LEAST_OUTPUT_TOKENS <= tokens < asked:
            lowered = with_output(raw, view.ask.body.dialect, tokens)
            if lowered is not raw:
                return lowered, tokens
    return raw, None
