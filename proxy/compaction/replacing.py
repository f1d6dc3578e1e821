"""Replacing what a conversation has grown by: having a round made, or a ready one put in force.

A summary is waited for no longer than a client can bear. Where none comes, `anchored` takes a text without a
model; a seed's strategy leaves the request as it came, unless it would not fit.
"""

from dataclasses import replace

from proxy.compaction.effects import Effects
from proxy.compaction.jobs import Job
from proxy.compaction.making import Making
from proxy.compaction.ordering import Ordering
from proxy.compaction.planning import Draft, capped, drafted, ledger_text
from proxy.compaction.rounds import Rounds
from proxy.compaction.view import View, Viewer
from proxy.core.checkpoint import EXTRACT, Checkpoint, exact_digest
from proxy.core.keys import checkpoint_keys
from proxy.core.places import place_of, place_to_be
from proxy.errors import SummaryFailed
from proxy.reading import Reading
from proxy.wishes import NONE as NO_WISHES
from proxy.wishes import Wishing

# A waiting client gives at most this share of its patience to a summary.
PATIENCE_SHARE = 0.25
# A round that was made ahead of need is put in force if it brings the request down to this share of T.
READY_SHARE = 0.75
NOTHING_TO_TAKE = "nothing-to-take"
FORCED = frozenset({"force", "overflow", "limit"})


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
        self._reading = reading
        self._wishes = wishes
        self._effects = effects
        self._ordering = ordering

    async def capped(self, view: View) -> View:
        """The view with huge new results shortened, for good."""
        plan = capped(view)
        if plan is None or view.root is None:
            return view
        job = self._ordering.job(view, Draft(plan, 0), "huge")
        return view.with_checkpoint(await self._rounds.make(job, job.timeout_s, finish=True))

    async def compacted(self, view: View, due: str) -> View:
        """The view with a new round in force.

        Raises:
            SummaryFailed: There is nothing to take, or no summary.
        """
        root, ask = view.root, view.ask
        if root is None:
            raise SummaryFailed(NOTHING_TO_TAKE)
        if due not in FORCED and self._effects.paused(ask.tenant, root, view.size(view.effective)):
            raise SummaryFailed("paused")
        checkpoint = None if due == "force" else await self._ready(view)
        try:
            checkpoint = checkpoint or await self._made(await self._improved(view), due)
        except SummaryFailed as failed:
            if failed.reason == NOTHING_TO_TAKE and view.wishes.compact and view.conversation:
                await self._wishes.compacted(ask.tenant, view.conversation)
            raise
        if view.wishes != NO_WISHES:
            named = view.conversation or checkpoint.conversation
            await self._wishes.compacted(ask.tenant, named, place_of(checkpoint, view.prefixes))
        return view.with_checkpoint(checkpoint)

    async def prepare(self, view: View) -> None:
        """Begin a round that will soon be due, unless there is one or nothing would be won."""
        if view.root is None or not view.ask.routes or await self._viewer.staged(view) is not None:
            return
        if self._effects.paused(view.ask.tenant, view.root, view.size(view.effective)):
            return
        draft = await drafted(view, self._reading)
        if draft is None:
            return
        job = self._ordering.job(view, draft, "soft")
        if self._rounds.pending(job.key) is None:
            self._rounds.begin(job)

    async def _ready(self, view: View) -> Checkpoint | None:
        """A round that was made ahead of need and does what is needed now, put in force."""
        ready = await self._viewer.staged(view)
        if ready is None:
            return None
        checkpoint = _with_edits(ready, view.earlier)
        if view.size(view.with_checkpoint(checkpoint).effective) > READY_SHARE * view.marks.trigger:
            return None
        return await self._installed(view, checkpoint)

    async def _installed(self, view: View, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint, put in force for every replica."""
        await self._making.install(
            checkpoint,
            tenant=view.ask.tenant,
            root=view.root or b"",
            place=place_of(checkpoint, view.prefixes),
            ttl_s=self._ordering.ttl_s,
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

    async def _made(self, view: View, due: str) -> Checkpoint:
        """A round made now: with the summary if it comes in time, else without."""
        draft = await drafted(view, self._reading, small=due in FORCED)
        if draft is None:
            raise SummaryFailed(NOTHING_TO_TAKE)
        job = self._ordering.job(view, draft, due)
        job = job if due == "force" else self._joined(view, job)
        finish = view.ask.settings.compaction.on_disconnect == "finish"
        if not job.plan.groups:
            return await self._rounds.make(job, job.timeout_s, finish=finish)
        try:
            made = await self._rounds.make(job, self._wait_s(view), finish=finish)
        except SummaryFailed as failed:
            if view.policy.layout is None and not view.over(view.effective):
                raise
            return await self._without_model(view, job, failed)
        return await self._installed(view, _with_edits(made, view.earlier)) if job.staged else made

    def _joined(self, view: View, job: Job) -> Job:
        """The job that is under way for this conversation already, if it leads further; else this one."""
        pending = self._rounds.pending(job.key)
        if pending is None or not pending.staged:
            return job
        done = view.earlier.length if view.earlier else 0
        same = view.prefixes[: pending.plan.length] == pending.prefixes[: pending.plan.length]
        return pending if same and done < pending.plan.length <= len(view.body) else job

    async def _without_model(self, view: View, job: Job, failed: SummaryFailed) -> Checkpoint:
        """The round with a text that no model wrote, and with what the user said."""
        if not job.ledger:
            gone = frozenset(job.plan.gone)
            job = replace(job, ledger=await ledger_text(view, gone))
        exact = exact_digest(job.messages[: job.plan.length])
        edited = frozenset(fill.at for fill in job.plan.fills if fill.kind in {"mask", "cap"})
        known = view.earlier.edited if view.earlier else frozenset()
        place = place_to_be(job.plan, job.prefixes, exact, extract=True, edited=edited | known)
        [key] = checkpoint_keys(job.tenant, job.root, job.policy.name, [place])
        reason = f"{job.reason},{failed.reason}"
        plain = replace(job.deterministic(key, place), reason=reason)
        return await self._rounds.make(plain, plain.timeout_s, finish=True)

    def _wait_s(self, view: View) -> float:
        """Seconds that a request waits for a summary."""
        settings, patience_s = view.ask.settings, view.ask.patience_s
        wait_s = view.policy.max_block_s or settings.summary.timeout_s
        return wait_s if patience_s is None else min(wait_s, patience_s * PATIENCE_SHARE)


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
    )
