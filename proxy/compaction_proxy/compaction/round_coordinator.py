"""Replacing what a conversation has grown by: having a round made, or a ready one put in force.

A summary is waited for no longer than a client can bear. Where none comes, `anchored` takes a text without a
model; a seed's strategy leaves the request as it came, unless it would not fit.
"""

from dataclasses import replace
from functools import partial

from compaction_proxy.compaction.directives import NONE as NO_WISHES
from compaction_proxy.compaction.directives import Wishing
from compaction_proxy.compaction.effectiveness import Effects
from compaction_proxy.compaction.inflight import Rounds
from compaction_proxy.compaction.job_builder import Ordering
from compaction_proxy.compaction.message_reader import Reading
from compaction_proxy.compaction.request_loader import Viewer
from compaction_proxy.compaction.request_view import View
from compaction_proxy.compaction.round_builder import Making
from compaction_proxy.compaction.round_events import installed_event
from compaction_proxy.compaction.round_job import AHEAD, Job
from compaction_proxy.compaction.round_planning import Draft, Drafting, capped, carried_over
from compaction_proxy.core.checkpoint import EXTRACT, Checkpoint, exact_digest
from compaction_proxy.core.checkpoint_ids import place_of, place_to_be
from compaction_proxy.core.errors import SummaryFailed
from compaction_proxy.core.message import latest_user
from compaction_proxy.storage.keys import checkpoint_keys

# A waiting client gives at most this share of its patience to a summary.
PATIENCE_SHARE = 0.25
# A round that is ready is put in force if it brings what rounds can remove down to this share of it.
READY_SHARE = 0.75
# Longest wait for a round that asks no model, in seconds: it may wait for the lease of a dead replica.
PLAIN_S = 30.0
NOTHING_TO_TAKE = "nothing-to-take"
# Nearly all of the request is what no round removes.
IRREDUCIBLE = "irreducible"
# Rounds have done no good lately.
PAUSED = "paused"
# Why a round fails that would fail again, since its messages are the cause.
HOPELESS = frozenset({"longer", "rules-lost"})
# Reasons for leaving a request as it is that are no failures.
QUIET = frozenset({NOTHING_TO_TAKE, IRREDUCIBLE, PAUSED})
# What must be done whatever it wins. Only `force` asks a summary model where that is little.
FORCED = frozenset({"force", "overflow", "limit"})
# What is tried even where it has just failed.
INSISTENT = frozenset({"force", "overflow"})


class Replacing:
    """Has rounds made for requests, and puts them in force.

    Args:
        viewer: Finds rounds that were made ahead of need.
        rounds: Has rounds made.
        making: Puts ready rounds in force.
        reading: What counts.
        wishes: Is told that a round was made.
        effects: Knows where rounds do no good.
        ordering: Turns drafts into jobs.
    """

    def __init__(
        self,
        viewer: Viewer,
        rounds: Rounds,
        making: Making,
        reading: Reading,
        wishes: Wishing,
        effects: Effects,
        ordering: Ordering,
    ) -> None:
        self._viewer = viewer
        self._rounds = rounds
        self._making = making
        self._gleanings = making.gleanings
        self._drafting = Drafting(reading, self._gleanings)
        self._wishes = wishes
        self._effects = effects
        self._ordering = ordering
        self._preparing: set[str] = set()

    @staticmethod
    def caps(view: View) -> bool:
        """Whether there are huge new results to be shortened."""
        return capped(view) is not None

    async def capped(self, view: View) -> View:
        """The view with huge new results shortened, for good."""
        plan = capped(view)
        if plan is None or view.root is None:
            return view
        job = await self._ordering.job(view, Draft(plan, 0), "huge")
        try:
            return view.with_checkpoint(await self._rounds.make(job, PLAIN_S, finish=True))
        except SummaryFailed:  # it would be no shorter
            return view

    async def compacted(self, view: View, due: str) -> tuple[View, str | None]:
        """The view with a new round in force; if no model wrote its summary, why.

        Raises:
            SummaryFailed: There is nothing to take, or no summary.
        """
        ask = view.ask
        try:
            checkpoint, reason = await self._round(view, due)
        except SummaryFailed as failed:
            if failed.reason in QUIET and view.wishes.compact and view.conversation:
                await self._wishes.compacted(ask.tenant, view.conversation)
            raise
        if view.wishes != NO_WISHES:
            named = view.conversation or checkpoint.conversation
            await self._wishes.compacted(ask.tenant, named, place_of(checkpoint, view.prefixes))
        return view.with_checkpoint(checkpoint), reason

    async def prepare(self, view: View) -> None:
        """Begin a round that will soon be due, unless there is one or nothing would be won.

        Requests that come meanwhile begin no second one. It would replace nearly the same for the same price.
        """
        if view.root is None or not view.ask.routes or view.thread in self._preparing:
            return
        self._preparing.add(view.thread)
        try:
            await self._begin(view)
        finally:
            self._preparing.discard(view.thread)

    async def _begin(self, view: View) -> None:
        # First what is under way, then what is ready: a round that ends in between is seen as ready.
        if any(each.thread == view.thread or _serves(each, view) for each in self._pending(view)):
            return
        if await self._viewer.staged(view) is not None or self._paused(view) or self._is_failing(view):
            return
        view = (await self._improved(view)).expect_growth()
        draft = await self._drafting.drafted(view)
        if draft is None or not draft.plan.groups:  # masks need no preparation
            return
        job = await self._ordering.job(view, draft, AHEAD)
        if not any(_serves(each, view) for each in self._pending(view)):  # begun by a request meanwhile
            self._rounds.begin(job)

    def _pending(self, view: View) -> list[Job]:
        return self._rounds.pending(view.ask.tenant, view.root or b"", view.policy.name)

    def _paused(self, view: View) -> bool:
        return self._effects.paused(view.thread, view.size(view.effective))

    def _is_failing(self, view: View, *, urgent: bool = False) -> bool:
        tokens, window = view.counted(view.effective), view.budget.window
        return self._effects.is_failing(
            view.thread, view.prefixes, window=window, tokens=tokens, urgent=urgent
        )

    async def _make(self, view: View, job: Job) -> Checkpoint:
        """Returns the round of a job that asks no model; takes note where it cannot be made.

        Raises:
            SummaryFailed: It cannot be made.
        """
        try:
            return await self._rounds.make(job, PLAIN_S, finish=True)
        except SummaryFailed as failed:
            if failed.reason in HOPELESS:
                tokens, window = view.counted(view.effective), view.budget.window
                self._effects.note_failure(view.thread, view.prefixes, window=window, tokens=tokens)
            raise

    async def _round(self, view: View, due: str) -> tuple[Checkpoint, str | None]:
        """A round that is ready, or one made now."""
        if view.root is None:
            raise SummaryFailed(NOTHING_TO_TAKE)
        if due not in FORCED and self._paused(view):
            raise SummaryFailed(PAUSED)
        ready = None if due == "force" else await self._prepared(view)
        if ready is not None and _suffices(ready, view):
            return await self._installed(view, ready.earlier, due), None
        try:
            made, reason = await self._made(ready or await self._improved(view), due)
        except SummaryFailed:
            if ready is None:
                raise
            return await self._installed(view, ready.earlier, due), None
        if made == view.earlier:  # what is left are runs whose summaries would be no shorter
            raise SummaryFailed(NOTHING_TO_TAKE)
        return made, reason

    async def _prepared(self, view: View) -> View | None:
        """The view with a round that was made ahead of need; a further one may have to build on it."""
        staged = await self._viewer.staged(view)
        return view.with_checkpoint(_with_edits(staged, view.earlier)) if staged else None

    async def _installed(
        self, view: View, checkpoint: Checkpoint | None, due: str | None = None
    ) -> Checkpoint:
        """The checkpoint, put in force for every replica; `due` is what made one that was ready due."""
        if checkpoint is None:
            raise SummaryFailed(NOTHING_TO_TAKE)
        place = place_of(checkpoint, view.prefixes)
        await self._making.install(
            checkpoint,
            tenant=view.ask.tenant,
            root=view.root or b"",
            place=place,
            ttl_s=self._ordering.ttl_s,
            told=None if due is None else partial(installed_event, view, checkpoint, place, due),
        )
        return checkpoint

    async def _improved(self, view: View) -> View:
        """The view with the summary that came too late, where a text without a model took its place.

        A round breaks the provider's prompt cache anyway, so now it costs nothing.
        """
        if view.earlier is None or view.earlier.writer != EXTRACT:
            return view
        late = await self._viewer.staged(view, late=True)
        return view.with_checkpoint(_with_edits(late, view.earlier)) if late else view

    async def _made(self, view: View, due: str) -> tuple[Checkpoint, str | None]:
        """A round made now: with the summary if it comes in time, else without, and why."""
        if due not in INSISTENT and self._is_failing(view, urgent=due in FORCED):
            raise SummaryFailed(PAUSED)
        draft = await self._drafting.drafted(view, small=due in FORCED)
        if draft is None:
            raise SummaryFailed(IRREDUCIBLE if view.irreducible else NOTHING_TO_TAKE)
        job = await self._ordering.job(view, draft, due)
        if not job.plan.groups:
            return await self._make(view, job), None
        if due != "force":
            joined = self._joined(view, job)
            late = await self._prepared(view) if joined is job else None  # it may have ended meanwhile
            if late is not None and _suffices(late, view):
                return await self._installed(view, late.earlier, due), None
            job = joined
        try:
            made = await self._summarised(view, job, self._unasked(view, draft, due))
        except SummaryFailed as failed:
            if view.policy.layout is None and not view.over(view.effective):
                raise
            return await self._without_model(view, job, failed), failed.reason
        return (await self._installed(view, _with_edits(made, view.earlier)) if job.staged else made), None

    def _unasked(self, view: View, draft: Draft, due: str) -> str | None:
        """Why no summary model is asked; None if one is."""
        if due == "force":
            return None
        if self._paused(view):
            return PAUSED
        return None if draft.pays or due not in FORCED else IRREDUCIBLE

    async def _summarised(self, view: View, job: Job, unasked: str | None) -> Checkpoint:
        """The round with a summary.

        Raises:
            SummaryFailed: There is none, or it does not come in time.
        """
        if unasked is not None or job.brief is None:
            raise SummaryFailed(unasked or "no-summary-model")
        finish = view.ask.settings.compaction.on_disconnect == "finish"
        return await self._rounds.make(job, self._wait_s(view), finish=finish)

    def _joined(self, view: View, job: Job) -> Job:
        """The job that is under way for this conversation already, if it serves this one; else the job."""
        return next((each for each in self._pending(view) if each.staged and _serves(each, view)), job)

    async def _without_model(self, view: View, job: Job, failed: SummaryFailed) -> Checkpoint:
        """The round with a text that no model wrote, and with what the user said."""
        if not job.ledger:
            gone = frozenset(job.plan.gone)
            text, rules = await carried_over(view, gone, self._gleanings)
            job = replace(job, ledger=text, rules=rules)
        exact = exact_digest(job.messages[: job.plan.length])
        place = place_to_be(job.plan, job.earlier, job.prefixes, exact, extract=True)
        [key] = checkpoint_keys(job.tenant, job.root, job.policy.name, [place])
        plain = replace(job.deterministic(key, place), reason=f"{job.reason},{failed.reason}")
        try:
            made = await self._make(view, plain)
        except SummaryFailed as longer:
            raise SummaryFailed(NOTHING_TO_TAKE if longer.reason == "longer" else longer.reason) from longer
        edited = _with_edits(made, view.earlier)
        return made if edited is made else await self._installed(view, edited)

    def _wait_s(self, view: View) -> float:
        """Seconds that a request waits for a summary."""
        settings, patience_s = view.ask.settings, view.ask.patience_s
        most_s = view.policy.max_block_s
        wait_s = settings.summary.timeout_s if most_s is None else most_s
        return wait_s if patience_s is None else min(wait_s, patience_s * PATIENCE_SHARE)


def _suffices(ready: View, view: View) -> bool:
    """Whether a round that was made ahead of need brings the request down far enough."""
    fixed = min(view.marks.trigger, int(view.fixed * view.ratio))
    return ready.size(ready.effective) <= fixed + READY_SHARE * (view.marks.trigger - fixed)


def _serves(pending: Job, view: View) -> bool:
    """Whether a round that is being made leads further for this request, and will stand for it."""
    length = pending.plan.length
    done = view.earlier.length if view.earlier else 0
    same = [each.digest for each in view.body[:length]] == [each.digest for each in pending.messages[:length]]
    return done < length and same and latest_user(view.body) not in pending.plan.gone


def _with_edits(ready: Checkpoint, earlier: Checkpoint | None) -> Checkpoint:
    """A ready round with what has been shortened since it was begun."""
    later = (
        []
        if earlier is None
        else [
            (span, put)
            for span, put in earlier.pieces
            if span.start in earlier.edited and span.start >= ready.length
        ]
    )
    if earlier is None or not later:
        return ready
    return replace(
        ready,
        length=earlier.length,
        exact=earlier.exact,
        results=(*ready.results, *(each for each in earlier.results if each.index >= ready.length)),
        spans=(*ready.spans, *(span for span, _ in later)),
        stand_ins=(*ready.stand_ins, *(put for _, put in later)),
        edited=ready.edited | {span.start for span, _ in later},
        names=earlier.names,
    )
