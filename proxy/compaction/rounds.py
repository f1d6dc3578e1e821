"""Making rounds: one summary call per prefix, whoever asks, and a checkpoint that is kept for ever after.

Requests that need the same round share it. A summary whose client has left is finished and saved all the
same, so that its price is not lost (`on_disconnect: finish`). After a failure the conversation is left alone
for a while: a summary model that hangs must not cost every request its patience.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import structlog

from proxy.compaction.checkpoint_index import CheckpointIndex
from proxy.compaction.summarising import Job, summarise, task_text
from proxy.compaction.turns import turn
from proxy.core.checkpoint import Checkpoint, covered_results, exact_digest, from_fields, to_fields
from proxy.core.digest import message_id
from proxy.core.keys import checkpoints_key, hash_tag, roots_key, rounds_key
from proxy.core.message import Message
from proxy.core.render import stand_in_text
from proxy.core.summary import task_of
from proxy.dialects.chat_message import compose, message
from proxy.errors import SummaryFailed
from proxy.logs import COMPACTION_FAILED, COMPACTION_FINISHED, COMPACTION_STARTED
from proxy.ports import Lease, SummaryModel
from proxy.reading import Reading
from proxy.storage.records import Line, Records

# After a failed summary the conversation is not tried again for this long, in seconds.
REST_S = 30.0
MAX_RESTING = 10_000
# Events that are kept of one conversation.
KEPT_EVENTS = 200
# Branches of one conversation whose records are deleted with it.
KEPT_ROOTS = 50

_log = structlog.get_logger()


class Rounds:
    """Makes rounds, each once.

    Args:
        model: Who writes summaries.
        records: Where checkpoints are kept.
        index: Where they are found again.
        reading: What counts.
        clock: Monotonic seconds.
        now: Seconds since the epoch, for events.
    """

    def __init__(
        self,
        model: SummaryModel,
        records: Records,
        index: CheckpointIndex,
        reading: Reading,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._model = model
        self._records = records
        self._index = index
        self._reading = reading
        self._clock = clock
        self._now = now
        self._running: dict[str, asyncio.Task[Checkpoint]] = {}
        self._waiting: dict[str, int] = {}
        self._resting: dict[str, tuple[float, str]] = {}

    async def make(self, job: Job, wait_s: float, *, finish: bool) -> Checkpoint:
        """The round, made now or by whoever is at it already.

        Args:
            job: What to make.
            wait_s: Seconds that the caller waits; the round goes on without it.
            finish: Whether the round goes on when every caller has been cancelled.

        Raises:
            SummaryFailed: No round; the reason says why.
        """
        self._refuse_resting(job)
        task = self._running.get(job.key) or self._start(job)
        self._waiting[job.key] = self._waiting.get(job.key, 0) + 1
        try:
            done, _ = await asyncio.wait({task}, timeout=wait_s)
        except asyncio.CancelledError:
            if not finish and self._waiting[job.key] == 1:
                task.cancel()
            raise
        finally:
            self._waiting[job.key] -= 1
            if not self._waiting[job.key]:
                del self._waiting[job.key]
        if not done:
            raise SummaryFailed("deadline")
        return _result(task)

    async def close(self) -> None:
        """End what is under way."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, job: Job) -> asyncio.Task[Checkpoint]:
        task = asyncio.create_task(self._make(job))
        self._running[job.key] = task

        def ended(task: asyncio.Task[Checkpoint]) -> None:
            del self._running[job.key]
            failed = None if task.cancelled() else task.exception()
            if failed is not None:
                self._rest(job, failed)

        task.add_done_callback(ended)
        return task

    def _refuse_resting(self, job: Job) -> None:
        until, reason = self._resting.get(hash_tag(job.key), (0.0, ""))
        if until > self._clock():
            raise SummaryFailed(reason)
        self._resting.pop(hash_tag(job.key), None)

    def _rest(self, job: Job, failed: BaseException) -> None:
        reason = failed.reason if isinstance(failed, SummaryFailed) else "internal"
        while len(self._resting) >= MAX_RESTING:
            self._resting.pop(next(iter(self._resting)))
        self._resting[hash_tag(job.key)] = (self._clock() + REST_S, reason)
        _log.warning(
            COMPACTION_FAILED,
            conversation=job.conversation,
            strategy=job.policy.name,
            round=job.plan.round,
            reason=reason,
            error=type(failed).__name__,
            exc_info=None if isinstance(failed, SummaryFailed) else failed,
        )

    async def _make(self, job: Job) -> Checkpoint:
        """The round: another replica's if one is there or being made, else ours."""
        started = self._clock()
        made: Checkpoint | None = None
        model = ""
        while True:
            async with turn(self._records, job.key) as current:
                known = from_fields(current.made) if current.made else None
                if known is not None:
                    return known
                if made is None:
                    made, model = await self._summarised(job)
                kept = await self._save(job, made, model, self._clock() - started, current.lease)
            if kept is not None:  # else the lease was lost, and a successor is at it
                _log.info(
                    COMPACTION_FINISHED,
                    conversation=job.conversation,
                    strategy=job.policy.name,
                    round=kept.round,
                    tokens_before=kept.tokens_before,
                    tokens_after=kept.tokens_after,
                    messages=len(job.plan.fresh),
                    model=model,
                    seconds=round(self._clock() - started, 3),
                )
                return kept

    async def _summarised(self, job: Job) -> tuple[Checkpoint, str]:
        """A new round and the model that wrote its summary."""
        _log.info(
            COMPACTION_STARTED,
            conversation=job.conversation,
            strategy=job.policy.name,
            round=job.plan.round,
            reason=job.reason,
            messages=len(job.plan.fresh),
            tokens_before=job.tokens_before,
        )
        try:
            async with asyncio.timeout(job.timeout_s):
                text, model = await summarise(job, self._model, self._reading)
        except TimeoutError:
            raise SummaryFailed("timeout") from None
        return await self._checkpoint(job, text), model

    async def _checkpoint(self, job: Job, summary: str) -> Checkpoint:
        plan = job.plan
        task = task_of(job.messages)
        covered = any(
            task is job.messages[index] for span in plan.spans for index in range(span.start, span.stop)
        )
        text = stand_in_text(
            job.policy, plan.round, task_text(job) if covered or task is None else "", summary
        )
        written = message(compose(Message(role=job.policy.stand_in_role, text=text)))
        [stand_in] = await self._reading.counted([written], job.gauge)
        saved = int((job.replaced_tokens - stand_in.tokens) * job.ratio)
        if saved <= 0:
            raise SummaryFailed("longer")
        return Checkpoint(
            strategy=job.policy.name,
            conversation=job.conversation,
            round=plan.round,
            length=plan.length,
            exact=exact_digest(job.messages[: plan.length]),
            results=covered_results(job.messages, plan.spans),
            spans=plan.spans,
            stand_ins=(stand_in, *(None for _ in plan.spans[1:])),
            summary=summary,
            tokens_before=job.tokens_before,
            tokens_after=job.tokens_before - saved,
            listed=len(job.messages),
        )

    async def _save(
        self, job: Job, made: Checkpoint, model: str, seconds: float, lease: Lease | None
    ) -> Checkpoint | None:
        """The checkpoint that all use from now on; None if the lease was lost and nothing was written."""
        event: dict[str, Any] = {
            "kind": "compacted",
            "at": self._now(),
            "conversation": job.conversation,
            "strategy": made.strategy,
            "round": made.round,
            "reason": job.reason,
            "tokens_before": made.tokens_before,
            "tokens_after": made.tokens_after,
            "summary": made.summary,
            "message_ids": [message_id(job.prefixes[index]) for index in job.plan.fresh],
            "model": model,
            "seconds": round(seconds, 3),
        }
        root = job.root
        also = [
            Line(rounds_key(job.tenant, root), event, job.ttl_s, KEPT_EVENTS),
            self._index.line(checkpoints_key(job.tenant, root, made.strategy), job.place, job.ttl_s),
        ]
        await self._records.append(
            roots_key(job.tenant, job.conversation),
            {"root": job.root.hex()},
            ttl_s=job.ttl_s,
            keep=KEPT_ROOTS,
        )
        fields = await self._records.save(job.key, to_fields(made), ttl_s=job.ttl_s, also=also, lease=lease)
        return None if fields is None else from_fields(fields) or made


def _result(task: asyncio.Task[Checkpoint]) -> Checkpoint:
    """What a round that has ended gave; a fault of ours counts as no summary, so that the ladder goes on.

    Raises:
        SummaryFailed: There is none.
    """
    if task.cancelled():
        raise SummaryFailed("cancelled")
    failed = task.exception()
    if failed is None:
        return task.result()
    if isinstance(failed, SummaryFailed):
        raise failed
    raise SummaryFailed("internal") from failed
