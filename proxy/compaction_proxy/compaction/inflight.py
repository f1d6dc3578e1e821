"""Runs compactions. Each compaction runs only once, even if several requests wait for it.

Requests that need the same compaction share one summary call. If the client disconnects, the summary is still
finished and saved, so that its price is not paid for nothing (`on_disconnect: finish`). After a failed
summary call, the conversation requests no summary for a while. Otherwise each of its requests would wait for
a summary model that hangs.
"""

import asyncio
import time
from collections.abc import Callable

import structlog

from compaction_proxy.compaction.round_builder import RoundBuilder, build_failed_event
from compaction_proxy.compaction.round_job import RoundJob
from compaction_proxy.core.checkpoint import Checkpoint
from compaction_proxy.core.errors import SummaryError
from compaction_proxy.support.log_events import ROUND_CRASHED
from compaction_proxy.telemetry.event_history import EventHistory, EventListener, ignore_event

# How long a conversation rests after a failed summary call, that is, requests no summary, in seconds.
FAILURE_REST_S = 30.0
# Largest number of resting conversations that are remembered.
MAX_RESTING = 10_000

_log = structlog.get_logger()


class InflightRounds:
    """Runs compactions. Each compaction runs only once, even if several requests wait for it.

    Args:
        builder: Makes a compaction.
        history: Stores the events of failed compactions.
        announce: Receives the events of failed compactions.
        clock: Returns monotonic seconds.
        now: Returns seconds since the epoch, for events.
    """

    def __init__(
        self,
        builder: RoundBuilder,
        history: EventHistory,
        *,
        announce: EventListener = ignore_event,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._builder = builder
        self._history = history
        self._announce = announce
        self._clock = clock
        self._now = now
        self._running: dict[str, tuple[RoundJob, asyncio.Task[Checkpoint]]] = {}
        self._waiting_counts: dict[str, int] = {}
        self._resting: dict[str, tuple[float, str]] = {}
        self._event_tasks: set[asyncio.Task[bool]] = set()

    @property
    def is_busy(self) -> bool:
        """Whether a compaction is running."""
        return bool(self._running)

    @property
    def waiting_count(self) -> int:
        """Number of requests that wait for a compaction."""
        return sum(self._waiting_counts.values())

    async def make_round(self, job: RoundJob, wait_s: float, *, finish_when_cancelled: bool) -> Checkpoint:
        """Makes the compaction, or waits for the task that is already making it.

        Args:
            job: The compaction to make.
            wait_s: How long the caller waits, in seconds. If that is too short, the compaction still goes on.
            finish_when_cancelled: Whether the compaction goes on after every caller has been cancelled.

        Raises:
            SummaryError: No checkpoint was made within `wait_s`. The error's reason says why.
        """
        task = self._find_or_start_task(job)
        self._waiting_counts[job.key] = self._waiting_counts.get(job.key, 0) + 1
        try:
            done, _ = await asyncio.wait({task}, timeout=self._compute_wait_s(job, wait_s))
        except asyncio.CancelledError:
            if not finish_when_cancelled and self._waiting_counts[job.key] == 1:
                task.cancel()
            raise
        finally:
            self._waiting_counts[job.key] -= 1
            if not self._waiting_counts[job.key]:
                del self._waiting_counts[job.key]
        if not done:
            raise SummaryError("deadline")
        return _get_checkpoint(task)

    def begin_round(self, job: RoundJob) -> None:
        """Starts the compaction without waiting for it, unless its conversation rests after a failure."""
        if not self.find_rest_reason(job):
            self._find_or_start_task(job)

    def list_pending_jobs(self, tenant: str, root: bytes, strategy: str) -> list[RoundJob]:
        """Lists the running jobs that request a summary, for this root digest and strategy of the tenant."""
        running = (each for each, _ in self._running.values() if each.summary_request is not None)
        scope = (tenant, root, strategy)
        return [each for each in running if (each.tenant, each.root, each.view.policy.name) == scope]

    def find_rest_reason(self, job: RoundJob) -> str | None:
        """Returns the reason of the failure after which this conversation rests; None if it does not rest."""
        until, reason = self._resting.get(job.view.strategy_thread, (0.0, ""))
        if until > self._clock():
            return reason
        self._resting.pop(job.view.strategy_thread, None)
        return None

    async def close(self) -> None:
        """Cancels running compactions, and waits until the events of failed ones are stored."""
        tasks = [task for _, task in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # lets a compaction that failed just now start storing its event
        await asyncio.gather(*self._event_tasks, return_exceptions=True)

    def _find_or_start_task(self, job: RoundJob) -> asyncio.Task[Checkpoint]:
        if job.key in self._running:
            return self._running[job.key][1]
        if job.summary_request is not None and (reason := self.find_rest_reason(job)):
            raise SummaryError(reason)
        return self._start_task(job)

    def _compute_wait_s(self, job: RoundJob, wait_s: float) -> float:
        """Computes how long a request waits for the compaction, in seconds.

        A request does not wait at all if its strategy limits the wait and the summary model is expected to
        take longer than `wait_s`, judging by its recent calls.
        """
        expected = (
            self._builder.summarizer.estimate_call_duration_s(job.summary_request)
            if job.summary_request
            else None
        )
        is_worth_waiting = job.view.policy.max_block_s is None or expected is None or expected <= wait_s
        return wait_s if is_worth_waiting else 0.0

    def _start_task(self, job: RoundJob) -> asyncio.Task[Checkpoint]:
        task = asyncio.create_task(self._builder.make_round(job, lambda: job.key in self._waiting_counts))
        self._running[job.key] = (job, task)

        def finish_task(task: asyncio.Task[Checkpoint]) -> None:
            del self._running[job.key]
            failed = None if task.cancelled() else task.exception()
            if failed is not None and not (job.summary_request is None and isinstance(failed, SummaryError)):
                self._rest_after_failure(job, failed)

        task.add_done_callback(finish_task)
        return task

    def _rest_after_failure(self, job: RoundJob, error: BaseException) -> None:
        reason = error.reason if isinstance(error, SummaryError) else "internal"
        while len(self._resting) >= MAX_RESTING:
            self._resting.pop(next(iter(self._resting)))
        self._resting[job.view.strategy_thread] = (self._clock() + FAILURE_REST_S, reason)
        if not isinstance(error, SummaryError):
            _log.error(ROUND_CRASHED, conversation=job.conversation, exc_info=error)
        event = build_failed_event(job, reason, self._builder.summarizer.price, failed_at_s=self._now())
        self._announce(job.tenant, event)
        event_task = asyncio.create_task(self._history.record_event(job.tenant, event))
        self._event_tasks.add(event_task)
        event_task.add_done_callback(self._event_tasks.discard)


def _get_checkpoint(task: asyncio.Task[Checkpoint]) -> Checkpoint:
    """Returns the checkpoint of a task that has ended.

    A fault of the proxy is reported as a missing summary, so that the caller tries the next rung of the
    ladder.

    Raises:
        SummaryError: The task made no checkpoint.
    """
    if task.cancelled():
        raise SummaryError("cancelled")
    failed = task.exception()
    if failed is None:
        return task.result()
    if isinstance(failed, SummaryError):
        raise failed
    raise SummaryError("internal") from failed
