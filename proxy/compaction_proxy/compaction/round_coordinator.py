"""Provides the compaction that a request needs: makes a new one, or installs one that was made in advance.

The time that a request waits for a summary is limited, so that its client does not give up. If the summary is
not ready in time, the strategy `anchored` uses an extract instead. With the other strategies, an extract is
used only if the request would not fit without a compaction. Otherwise the request gets no new compaction.
"""

from dataclasses import replace
from functools import partial

from compaction_proxy.compaction.directives import NO_DIRECTIVES, DirectiveStore
from compaction_proxy.compaction.feedback import RoundEffectiveness
from compaction_proxy.compaction.message_reader import MessageReader
from compaction_proxy.compaction.request_loader import RequestLoader
from compaction_proxy.compaction.request_view import RequestView
from compaction_proxy.compaction.round_builder import RoundBuilder
from compaction_proxy.compaction.round_job import (
    AHEAD_REASON,
    JobBuilder,
    RoundJob,
    predict_job_checkpoint_id,
)
from compaction_proxy.compaction.round_planning import (
    RoundDraft,
    RoundPlanner,
    plan_result_caps,
)
from compaction_proxy.core.checkpoint import Checkpoint
from compaction_proxy.core.errors import SummaryError
from compaction_proxy.core.message import find_latest_user_message
from compaction_proxy.core.planner import compute_checkpoint_id
from compaction_proxy.support.offload import run_in_worker_if_large

# A request waits for a summary for at most this share of the time after which its client gives up.
PATIENCE_SHARE = 0.25
# No compaction removes the fixed part of a request, such as the system prompt. The trigger size minus this
# part is the free size. A staged checkpoint is sufficient if it shrinks the rest of the request to at most
# this share of the free size. If no staged checkpoint is sufficient, a new compaction is made.
READY_SHARE = 0.75
# A request waits at most this many seconds for a compaction that needs no model. The wait is that long only
# if another process has died while it held the lease that locks this compaction. The lease must then expire
# first.
PLAIN_ROUND_WAIT_S = 30.0
# The reported reason why a compaction was not made: there is nothing to remove.
NOTHING_TO_TAKE = "nothing-to-take"
# The reported reason why a compaction or a summary was not made: so little of the request can be removed that
# the cost would exceed the saving.
IRREDUCIBLE = "irreducible"
# The reported reason why a compaction or a summary was not made: recent compactions of the conversation saved
# too little or failed.
PAUSED = "paused"
# If a compaction fails for one of these reasons, its messages are the cause. With the same messages, it would
# fail again.
LASTING_FAILURES = frozenset({"longer", "rules-lost"})
# If a compaction is not made for one of these reasons, this does not count as a failure.
QUIET_REASONS = frozenset({NOTHING_TO_TAKE, IRREDUCIBLE, PAUSED})
# If a compaction is due for one of these reasons, it is made even if it saves little. In that case, a summary
# is requested only for the reason `force`. For the other reasons, an extract is used.
FORCED_REASONS = frozenset({"force", "overflow", "limit"})
# If a compaction is due for one of these reasons, it is tried even if the previous one has just failed.
INSISTENT_REASONS = frozenset({"force", "overflow"})


class RoundCoordinator:
    """Decides which compaction a request gets, and applies it.

    Args:
        loader: Finds staged checkpoints.
        builder: Makes compactions and installs staged checkpoints.
        reader: Counts tokens.
        directives: Stores what users have asked for, such as a compaction.
        effectiveness: Remembers in which conversations compactions have failed or saved too little.
        job_builder: Builds the jobs of compactions from drafts.
    """

    def __init__(
        self,
        loader: RequestLoader,
        builder: RoundBuilder,
        reader: MessageReader,
        directives: DirectiveStore,
        effectiveness: RoundEffectiveness,
        job_builder: JobBuilder,
    ) -> None:
        self._loader = loader
        self._builder = builder
        self._planner = RoundPlanner(reader, builder.ledger_cache)
        self._directives = directives
        self._effectiveness = effectiveness
        self._job_builder = job_builder
        self._preparing: set[str] = set()

    @staticmethod
    def has_huge_results(view: RequestView) -> bool:
        """Returns whether the request contains huge new tool results that the proxy must cap."""
        return plan_result_caps(view) is not None

    async def cap_huge_results(self, view: RequestView) -> RequestView:
        """Caps huge new tool results, for this request and later ones. Returns the new view.

        Returns the view unchanged if there is nothing to cap, or if no compaction could be made, for example
        because the capped list would not be shorter.
        """
        count = len(view.messages)
        plan = await run_in_worker_if_large(0, partial(plan_result_caps, view), message_count=count)
        if plan is None or view.root is None:
            return view
        job = await self._job_builder.build_job(view, RoundDraft(plan, 0), "huge")
        try:
            return view.with_checkpoint(
                await self._builder.wait_for_round(job, PLAIN_ROUND_WAIT_S, finish_when_cancelled=True)
            )
        except SummaryError:  # the capped list would be no shorter
            return view

    async def apply_round(self, view: RequestView, due_reason: str) -> tuple[RequestView, str | None]:
        """Makes the compaction that is due, or installs a staged one. Returns the view with its checkpoint.

        `due_reason` says why a compaction is due. The second result says why an extract was used instead of a
        model's summary. It is None if no extract was used.

        Raises:
            SummaryError: If there is nothing to remove, if compactions are paused, or if no summary could be
                written.
        """
        ask = view.request
        try:
            checkpoint, reason = await self._find_or_make_round(view, due_reason)
        except SummaryError as failed:
            if failed.reason in QUIET_REASONS and view.directives.compact and view.conversation_id:
                await self._directives.clear_compaction_request(ask.tenant, view.conversation_id)
            raise
        if view.directives != NO_DIRECTIVES:
            conversation = view.conversation_id or checkpoint.conversation
            await self._directives.clear_compaction_request(
                ask.tenant, conversation, compute_checkpoint_id(checkpoint, view.prefixes)
            )
        return view.with_checkpoint(checkpoint), reason

    async def prepare_round(self, view: RequestView) -> None:
        """Starts a compaction that will soon be due. The compaction runs in the background.

        Does nothing if no summary can be requested, if a suitable compaction is already running or staged, if
        compactions of the conversation are paused, or if there is nothing to summarise.

        Also does nothing while another call of this method works on the same conversation. Otherwise the
        tenant would pay for a second summary of nearly the same messages.
        """
        thread = view.strategy_thread
        if view.root is None or not view.request.summary_routes or thread in self._preparing:
            return
        self._preparing.add(thread)
        try:
            await self._begin_round(view)
        finally:
            self._preparing.discard(thread)

    async def _begin_round(self, view: RequestView) -> None:
        # Running compactions are checked before staged ones. So a compaction that ends between the two checks
        # is found among the staged ones.
        if any(
            each.view.strategy_thread == view.strategy_thread or _can_serve(each, view)
            for each in self._list_pending_jobs(view)
        ):
            return
        if (
            await self._loader.find_staged_checkpoint(view) is not None
            or self._is_paused(view)
            or self._is_failing(view)
        ):
            return
        late = await self._find_staged(view, same_length=True)
        view = view.with_checkpoint(late) if late else view
        growth_tokens = max(0, view.marks.trigger_tokens - view.effective_estimate)
        view = replace(view, expected_growth_tokens=growth_tokens)
        draft = await self._planner.draft_round(view)
        if draft is None or not draft.plan.groups:  # masks need no preparation
            return
        job = await self._job_builder.build_job(view, draft, AHEAD_REASON)
        # While this method was waiting above, another request may have started a suitable compaction.
        if not any(_can_serve(each, view) for each in self._list_pending_jobs(view)):
            self._builder.begin_round(job)

    def _list_pending_jobs(self, view: RequestView) -> list[RoundJob]:
        return self._builder.list_pending_jobs(view.request.tenant, view.root or b"", view.policy.name)

    def _is_paused(self, view: RequestView) -> bool:
        return self._effectiveness.is_paused(view.strategy_thread, view.effective_estimate)

    def _is_failing(self, view: RequestView, *, is_urgent: bool = False) -> bool:
        tokens, window = view.effective_tokens, view.budget.window
        return self._effectiveness.is_failing(
            view.strategy_thread, view.prefixes, window=window, tokens=tokens, is_urgent=is_urgent
        )

    async def _make_round_without_model(self, view: RequestView, job: RoundJob) -> Checkpoint:
        """Makes a compaction without a model.

        If the compaction fails because of its messages (`LASTING_FAILURES`), records the failure, so that the
        compaction is not tried again soon.

        Raises:
            SummaryError: If the compaction cannot be made.
        """
        try:
            return await self._builder.wait_for_round(job, PLAIN_ROUND_WAIT_S, finish_when_cancelled=True)
        except SummaryError as failed:
            if failed.reason in LASTING_FAILURES:
                tokens, window = view.effective_tokens, view.budget.window
                self._effectiveness.record_failure(
                    view.strategy_thread, view.prefixes, window=window, tokens=tokens
                )
            raise

    async def _find_or_make_round(self, view: RequestView, due_reason: str) -> tuple[Checkpoint, str | None]:
        """Installs a staged checkpoint if it is sufficient; else makes a compaction. Returns the checkpoint.

        If the new compaction fails, installs the staged checkpoint anyway, if there is one. The second result
        says why an extract was used instead of a model's summary. It is None if no extract was used.

        Raises:
            SummaryError: If there is nothing to remove, if compactions are paused, or if no summary could be
                written.
        """
        if view.root is None:
            raise SummaryError(NOTHING_TO_TAKE)
        if due_reason not in FORCED_REASONS and self._is_paused(view):
            raise SummaryError(PAUSED)
        staged = None if due_reason == "force" else await self._find_staged(view)
        if staged is not None and _is_sufficient(staged, view):
            return await self._install(view, staged, due_reason), None
        base = staged or await self._find_staged(view, same_length=True)
        try:
            checkpoint, reason = await self._make_round(
                view.with_checkpoint(base) if base else view, due_reason
            )
        except SummaryError:
            if staged is None:
                raise
            return await self._install(view, staged, due_reason), None
        if checkpoint == view.checkpoint:  # no run was replaced, because no summary was shorter than its run
            raise SummaryError(NOTHING_TO_TAKE)
        return checkpoint, reason

    async def _find_staged(self, view: RequestView, *, same_length: bool = False) -> Checkpoint | None:
        """Returns the staged checkpoint that this request can use; None if there is none.

        The result includes the masks and caps that the view's checkpoint has for later messages.

        Args:
            view: The request.
            same_length: Whether to look instead for a late summary that can replace an extract
                (`RequestLoader.find_staged_checkpoint`). Use this only before a new compaction, which breaks
                the provider's prompt cache anyway. The replacement of the extract then costs nothing.
        """
        staged = await self._loader.find_staged_checkpoint(view, same_length=same_length)
        return _merge_edits(staged, view.checkpoint) if staged else None

    async def _install(
        self, view: RequestView, checkpoint: Checkpoint, due_reason: str | None = None
    ) -> Checkpoint:
        ttl_s = self._job_builder.ttl_s
        return await self._builder.install_checkpoint(view, checkpoint, ttl_s, due_reason)

    async def _make_round(self, view: RequestView, due_reason: str) -> tuple[Checkpoint, str | None]:
        """Makes a compaction, or waits for a suitable one that is already running. Returns the checkpoint.

        The second result says why an extract was used instead of a model's summary. It is None if no extract
        was used.

        Raises:
            SummaryError: If there is nothing to remove, if compactions are paused, or if no summary could be
                written.
        """
        is_forced = due_reason in FORCED_REASONS
        if due_reason not in INSISTENT_REASONS and self._is_failing(view, is_urgent=is_forced):
            raise SummaryError(PAUSED)
        draft = await self._planner.draft_round(view, allow_small=is_forced)
        if draft is None:
            raise SummaryError(IRREDUCIBLE if view.is_irreducible else NOTHING_TO_TAKE)
        job = await self._job_builder.build_job(view, draft, due_reason)
        if not job.draft.plan.groups:
            return await self._make_round_without_model(view, job), None
        # After an undo, a running compaction may build on the one that was undone.
        if due_reason != "force" and not view.directives.suppressed:
            pending = self._list_pending_jobs(view)
            shared = next((each for each in pending if each.is_staged and _can_serve(each, view)), None)
            # The caller has already searched for staged checkpoints. After that, a running compaction may
            # have saved one. So the search is repeated.
            staged = await self._find_staged(view) if shared is None else None
            if staged is not None and _is_sufficient(staged, view):
                return await self._install(view, staged, due_reason), None
            job = shared or job
        skip_reason = self._find_skip_reason(view, job, draft, due_reason)
        try:
            return await self._make_summarized_round(view, job, skip_reason), None
        except SummaryError as failed:
            if view.policy.layout is None and not view.exceeds_compaction_limit:
                raise
            return await self._make_extractive_round(view, job, failed), failed.reason

    def _find_skip_reason(
        self, view: RequestView, job: RoundJob, draft: RoundDraft, due_reason: str
    ) -> str | None:
        """Returns why no summary is requested for the compaction; None if a summary is requested."""
        if due_reason != "force" and self._is_paused(view):
            return PAUSED
        if due_reason in FORCED_REASONS - {"force"} and not draft.is_worth_it:
            return IRREDUCIBLE
        return "no-summary-model" if job.summary_request is None else None

    async def _make_summarized_round(
        self, view: RequestView, job: RoundJob, skip_reason: str | None
    ) -> Checkpoint:
        """Makes the compaction with a summary from the summary model.

        The request waits for the summary for at most `PATIENCE_SHARE` of the time after which its client
        gives up, and no longer than the strategy allows.

        Raises:
            SummaryError: If there is a reason to request no summary (`skip_reason` is not None), if no
                summary could be written, or if the summary is not ready in time.
        """
        if skip_reason is not None:
            raise SummaryError(skip_reason)
        settings, patience_s = view.request.settings, view.request.patience_s
        max_block_s = view.policy.max_block_s
        wait_s = settings.summary.timeout_s if max_block_s is None else max_block_s
        if patience_s is not None:
            wait_s = min(wait_s, patience_s * PATIENCE_SHARE)
        finish = settings.compaction.on_disconnect == "finish"
        checkpoint = await self._builder.wait_for_round(job, wait_s, finish_when_cancelled=finish)
        if not job.is_staged:
            return checkpoint
        return await self._install(view, _merge_edits(checkpoint, view.checkpoint))

    async def _make_extractive_round(
        self, view: RequestView, job: RoundJob, failure: SummaryError
    ) -> Checkpoint:
        """Makes the compaction with an extract and the ledger in place of the summary.

        `failure` is the error that says why there is no summary.

        Raises:
            SummaryError: If the compaction cannot be made, or would not shorten the request.
        """
        if not job.draft.ledger:
            removed = frozenset(job.draft.plan.removed_indices)
            text, rules = await self._planner.build_ledger_text(view, removed)
            job = replace(job, draft=replace(job.draft, ledger=text, rules=rules))
        extractive_job = replace(
            job,
            checkpoint_id=predict_job_checkpoint_id(job.view, job.draft.plan, extract=True),
            reason=f"{job.reason},{failure.reason}",
            summary_request=None,
            is_extractive=True,
        )
        try:
            checkpoint = await self._make_round_without_model(view, extractive_job)
        except SummaryError as longer:
            raise SummaryError(NOTHING_TO_TAKE if longer.reason == "longer" else longer.reason) from longer
        edited = _merge_edits(checkpoint, view.checkpoint)
        return checkpoint if edited is checkpoint else await self._install(view, edited)


def _is_sufficient(staged: Checkpoint, view: RequestView) -> bool:
    """Returns whether a staged checkpoint shrinks the request so much that no new compaction is needed.

    The comment on `READY_SHARE` describes the limit.
    """
    trigger_tokens = view.marks.trigger_tokens
    fixed = min(trigger_tokens, int(view.fixed_tokens * view.calibration_ratio))
    size = view.with_checkpoint(staged).effective_estimate
    return size <= fixed + READY_SHARE * (trigger_tokens - fixed)


def _can_serve(pending: RoundJob, view: RequestView) -> bool:
    """Returns whether this request can use the result of the running compaction `pending`.

    The request must begin with the messages that the compaction covers. The compaction must cover more
    messages than the view's checkpoint, and must not remove the latest user message of the request.
    """
    length = pending.draft.plan.length
    covered_count = view.checkpoint.length if view.checkpoint else 0
    is_same_prefix = [each.digest for each in view.unfixed_messages[:length]] == [
        each.digest for each in pending.view.unfixed_messages[:length]
    ]
    return (
        covered_count < length
        and is_same_prefix
        and find_latest_user_message(view.unfixed_messages) not in pending.draft.plan.removed_indices
    )


def _merge_edits(checkpoint: Checkpoint, current: Checkpoint | None) -> Checkpoint:
    """Adds masks and caps of the checkpoint `current` to `checkpoint`, which will replace `current`.

    Only masks and caps of messages that `checkpoint` does not cover are added. They were made while
    `checkpoint` was being prepared. Returns `checkpoint` unchanged if there are none.
    """
    if current is None:
        return checkpoint
    later = [
        (span, put)
        for span, put in current.span_replacements
        if span.start in current.edited and span.start >= checkpoint.length
    ]
    if not later:
        return checkpoint
    return replace(
        checkpoint,
        length=current.length,
        exact=current.exact,
        results=(*checkpoint.results, *(each for each in current.results if each.index >= checkpoint.length)),
        spans=(*checkpoint.spans, *(span for span, _ in later)),
        stand_ins=(*checkpoint.stand_ins, *(put for _, put in later)),
        edited=checkpoint.edited | {span.start for span, _ in later},
        names=current.names,
    )
