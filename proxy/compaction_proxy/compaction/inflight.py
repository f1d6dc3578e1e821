"""Rounds under way: one summary call per prefix, whoever asks.

Requests that need the same round share it. A summary whose client has left is finished and saved all the
same, so that its price is not lost (`on_disconnect: finish`). After a failure the conversation is left alone
for a while: a summary model that hangs must not cost every request its patience.
"""

import asyncio
import time
from collections.abc import Callable

import structlog

from compaction_proxy.compaction.round_builder import Making
from compaction_proxy.compaction.round_events import failed_event
from compaction_proxy.compaction.round_job import Job
from compaction_proxy.core.checkpoint import Checkpoint
from compaction_proxy.core.errors import SummaryFailed
from compaction_proxy.support.log_events import ROUND_CRASHED
from compaction_proxy.telemetry.event_bus import Listener, unheard
from compaction_proxy.telemetry.event_history import History

# After a failed summary the conversation is not tried again for this long, in seconds.
REST_S = 30.0
MAX_RESTING = 10_000

_log = structlog.get_logger()


class Rounds:
    """Has rounds made, each once.

    Args:
        making: Makes one.
        history: Is told of failures.
        announce: Told of them, too.
        clock: Monotonic seconds.
        now: Seconds since the epoch, for events.
    """

    def __init__(
        self,
        making: Making,
        history: History,
        *,
        announce: Listener = unheard,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._making = making
        self._history = history
        self._announce = announce
        self._clock = clock
        self._now = now
        self._running: dict[str, tuple[Job, asyncio.Task[Checkpoint]]] = {}
        self._waiting: dict[str, int] = {}
        self._resting: dict[str, tuple[float, str]] = {}
        self._telling: set[asyncio.Task[bool]] = set()

    @property
    def busy(self) -> bool:
        """Whether a round is under way."""
        return bool(self._running)

    @property
    def awaited(self) -> int:
        """How many requests wait for one."""
        return sum(self._waiting.values())

    async def make(self, job: Job, wait_s: float, *, finish: bool) -> Checkpoint:
        """The round, made now or by whoever is at it already.

        Args:
            job: What to make.
            wait_s: Seconds that the caller waits; the round goes on without it.
            finish: Whether the round goes on when every caller has been cancelled.

        Raises:
            SummaryFailed: No round; the reason says why.
        """
        task = self._task(job)
        self._waiting[job.key] = self._waiting.get(job.key, 0) + 1
        try:
            done, _ = await asyncio.wait({task}, timeout=self._patience(job, wait_s))
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

    def begin(self, job: Job) -> None:
        """Have the round made while nobody waits."""
        if not self.resting(job):
            self._task(job)

    def pending(self, tenant: str, root: bytes, strategy: str) -> list[Job]:
        """The jobs with a summary that are under way under a root and a strategy."""
        running = (each for each, _ in self._running.values() if each.brief is not None)
        scope = (tenant, root, strategy)
        return [each for each in running if (each.tenant, each.root, each.policy.name) == scope]

    def resting(self, job: Job) -> str | None:
        """Why no summary is asked for in this conversation just now; None if one may be."""
        until, reason = self._resting.get(job.thread, (0.0, ""))
        if until > self._clock():
            return reason
        self._resting.pop(job.thread, None)
        return None

    async def close(self) -> None:
        """End what is under way; what a round that fails then still has to tell is told."""
        tasks = [task for _, task in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # a round that failed just now has begun to tell of it by then
        await asyncio.gather(*self._telling, return_exceptions=True)

    def _task(self, job: Job) -> asyncio.Task[Checkpoint]:
        if job.key in self._running:
            return self._running[job.key][1]
        if job.brief is not None and (reason := self.resting(job)):
            raise SummaryFailed(reason)
        return self._start(job)

    def _patience(self, job: Job, wait_s: float) -> float:
        """How long to wait: not at all for a model that has lately taken longer than that anyway."""
        expected = self._making.summarising.expected_s(job.brief) if job.brief else None
        waits = job.policy.max_block_s is None or expected is None or expected <= wait_s
        return wait_s if waits else 0.0

    def _start(self, job: Job) -> asyncio.Task[Checkpoint]:
        task = asyncio.create_task(self._making.make(job, lambda: job.key in self._waiting))
        self._running[job.key] = (job, task)

        def ended(task: asyncio.Task[Checkpoint]) -> None:
            del self._running[job.key]
            failed = None if task.cancelled() else task.exception()
            if failed is not None and not (job.brief is None and isinstance(failed, SummaryFailed)):
                self._rest(job, failed)

        task.add_done_callback(ended)
        return task

    def _rest(self, job: Job, failed: BaseException) -> None:
        reason = failed.reason if isinstance(failed, SummaryFailed) else "internal"
        while len(self._resting) >= MAX_RESTING:
            self._resting.pop(next(iter(self._resting)))
        self._resting[job.thread] = (self._clock() + REST_S, reason)
        if not isinstance(failed, SummaryFailed):
            _log.error(ROUND_CRASHED, conversation=job.conversation, exc_info=failed)
        event = failed_event(job, reason, self._making.summarising.price, at=self._now())
        self._announce(job.tenant, event)
        telling = asyncio.create_task(self._history.note(job.tenant, event))
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)


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
