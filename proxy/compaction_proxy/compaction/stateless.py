"""Compaction aside from everything that is kept: the same use case, over a store that ends with the block."""

from bisect import bisect_right
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

from compaction_proxy.compaction.checkpoint_index import CheckpointIndex
from compaction_proxy.compaction.compactor import Compactor
from compaction_proxy.compaction.directives import DirectiveStore
from compaction_proxy.compaction.effectiveness import RoundEffectiveness
from compaction_proxy.compaction.inflight import InflightRounds
from compaction_proxy.compaction.job_builder import JobBuilder
from compaction_proxy.compaction.message_reader import MessageReader
from compaction_proxy.compaction.request_limits import resolve_policy
from compaction_proxy.compaction.request_loader import RequestLoader
from compaction_proxy.compaction.round_builder import RoundBuilder
from compaction_proxy.compaction.round_coordinator import RoundCoordinator
from compaction_proxy.compaction.summarizer import Summarizer
from compaction_proxy.compaction.summary_request import SummaryRoute
from compaction_proxy.compaction.types import CompactionMode, CompactionStatus, FitRequest, FitResult
from compaction_proxy.core.budget import compute_budget
from compaction_proxy.core.checkpoint import EXTRACT
from compaction_proxy.core.errors import InternalError, UnreadableBodyError
from compaction_proxy.core.event import COMPACTED
from compaction_proxy.providers.model_limits import ModelLimits
from compaction_proxy.providers.usage_baseline import UsageBaselineStore
from compaction_proxy.storage.records import RecordStore
from compaction_proxy.storage.store import Store
from compaction_proxy.telemetry.event_bus import EventBus
from compaction_proxy.telemetry.event_history import EventHistory

# What is kept aside ends with its block; nothing of it expires before, in seconds.
SCRATCH_TTL_S = 86_400.0


@dataclass(frozen=True, slots=True)
class ScratchCompactor:
    """A compactor and what it has made, for as long as the block runs.

    Attributes:
        compactor: The use case.
        history: What has happened; nobody else hears of it.
    """

    compactor: Compactor
    history: EventHistory


@dataclass(frozen=True, slots=True)
class StatelessCompaction:
    """Compacts without keeping anything: no checkpoint, event, archive or total outlives the block.

    Attributes:
        create_store: Makes an empty store, in memory.
        reader: Reads and counts, as for requests.
        model_limits: Knows windows and ratios; is asked only.
        summarizer: Who writes summaries; knows which models fail, and what a tenant may still spend.
        job_builder: Turns drafts into jobs.
        event_bus: Tells those who count what summaries cost; they are told of no conversation's round.
    """

    create_store: Callable[[], Store]
    reader: MessageReader
    model_limits: ModelLimits
    summarizer: Summarizer
    job_builder: JobBuilder
    event_bus: EventBus

    @asynccontextmanager
    async def open_compactor(self) -> AsyncIterator[ScratchCompactor]:
        """A compactor over an empty store. What it has begun ends with the block."""
        async with AsyncExitStack() as stack:
            records = RecordStore(self.create_store(), _ignore_error)
            stack.push_async_callback(records.close)
            index, history = CheckpointIndex(records), EventHistory(records, SCRATCH_TTL_S)
            wishing = DirectiveStore(records, SCRATCH_TTL_S)
            making = RoundBuilder(
                self.summarizer, records, index, history, self.reader, announce=self.event_bus
            )
            rounds = InflightRounds(making, history, announce=self.event_bus)
            stack.push_async_callback(rounds.close)
            viewer = RequestLoader(
                self.reader, records, index, self.model_limits, UsageBaselineStore(records), wishing
            )
            replacing = RoundCoordinator(
                viewer, rounds, making, self.reader, wishing, RoundEffectiveness(), self.job_builder
            )
            yield ScratchCompactor(Compactor(viewer, replacing, self.reader, self.model_limits), history)


def _ignore_error(_: object) -> None:
    """A store in memory fails only where a record is too large for it; the round is used all the same."""


class ShortenResult(NamedTuple):
    """What came of a list that was to be shortened.

    Attributes:
        fit: The request with the shorter list.
        first: What the strategy made of it; the same where it was not cut any further.
        model: Who wrote the summary; None if no model did.
    """

    fit: FitResult
    first: FitResult
    model: str | None


async def shorten_messages(
    compaction: StatelessCompaction, ask: FitRequest, target: int | None
) -> ShortenResult:
    """What the strategy makes of the list; without a model where none wrote, or it is too long still.

    Args:
        compaction: Compacts.
        ask: The request, to be compacted by force.
        target: What it must come under, in tokens; None: it need not.

    Raises:
        Unreadable: A message is none.
        Crashed: A fault of ours, which the log tells of.
    """
    async with compaction.open_compactor() as apart:
        if target is not None and (whole := await _fit_under_target(apart.compactor, ask, target)):
            return ShortenResult(whole, whole, None)
        first = await apart.compactor.fit_request(ask)
        report = first.report
        if report.tokens_before is None or report.tokens_after is None:
            raise (
                InternalError
                if report.reason == "internal"
                else UnreadableBodyError(report.reason or "unreadable")
            )
        failed = report.status is CompactionStatus.FAILED_OPEN
        most = report.tokens_before - 1 if failed else report.tokens_after
        limit, fit = min(most, target or most), first
        if limit < report.tokens_after:
            window = min(find_window_for_limit(limit, ask), report.window or limit)
            settings = replace(ask.settings, window=window)
            fit = await apart.compactor.fit_request(
                replace(ask, settings=settings, resolve_summary_routes=_get_no_routes)
            )
        return ShortenResult(
            fit, first, await _find_summary_model(apart.history, ask.tenant, report.conversation)
        )


async def _fit_under_target(compactor: Compactor, ask: FitRequest, target: int) -> FitResult | None:
    """The list as it came, if it is under its target as it is."""
    seen = await compactor.fit_request(replace(ask, mode=CompactionMode.SHADOW))
    size = seen.report.tokens_before
    if size is None or size > target:
        return None
    return replace(seen, report=seen.report._replace(status=CompactionStatus.NONE, reason=None))


def find_window_for_limit(limit: int, ask: FitRequest) -> int:
    """The largest window, in tokens, in which a request must fit `limit` tokens."""
    reserves = resolve_policy(ask.settings, ask.strategy).reserves
    windows = range(2 * limit + 4)  # an input limit is at least three quarters of its window
    return bisect_right(windows, limit, lo=1, key=lambda w: compute_budget(w, reserves, None).input_limit) - 1


def _get_no_routes() -> tuple[SummaryRoute, ...]:
    return ()


async def _find_summary_model(history: EventHistory, tenant: str, conversation: str | None) -> str | None:
    events = await history.list_events(tenant, conversation) if conversation else []
    writers = [event.model for event in events if event.kind == COMPACTED and event.model]
    return next((writer for writer in reversed(writers) if writer != EXTRACT), None)
