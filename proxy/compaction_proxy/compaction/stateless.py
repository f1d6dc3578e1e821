"""Compacts messages with a temporary store in memory, so that nothing is stored permanently."""

from bisect import bisect_right
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

from compaction_proxy.compaction.checkpoint_index import CheckpointIndex
from compaction_proxy.compaction.compactor import Compactor
from compaction_proxy.compaction.directives import DirectiveStore
from compaction_proxy.compaction.feedback import RoundEffectiveness
from compaction_proxy.compaction.message_reader import MessageReader
from compaction_proxy.compaction.request_loader import RequestLoader
from compaction_proxy.compaction.request_view import resolve_policy
from compaction_proxy.compaction.round_builder import RoundBuilder
from compaction_proxy.compaction.round_coordinator import RoundCoordinator
from compaction_proxy.compaction.round_job import JobBuilder
from compaction_proxy.compaction.summarizer import Summarizer
from compaction_proxy.compaction.types import CompactionMode, CompactionStatus, FitRequest, FitResult
from compaction_proxy.core.budget import compute_budget
from compaction_proxy.core.checkpoint import EXTRACT_WRITER
from compaction_proxy.core.errors import (
    OUT_OF_RESOURCES,
    InternalError,
    UnreadableBodyError,
    build_shortage_error,
)
from compaction_proxy.core.event import COMPACTED
from compaction_proxy.providers.model_limits import ModelLimits
from compaction_proxy.providers.usage_baseline import UsageBaselineStore
from compaction_proxy.storage.records import RecordStore
from compaction_proxy.storage.store import Store
from compaction_proxy.telemetry.event_history import EventBus, EventHistory

# Lifetime of records in the temporary store, in seconds. It is long enough that no record expires before the
# store is deleted at the end of the `open_compactor` block.
SCRATCH_TTL_S = 86_400.0


@dataclass(frozen=True, slots=True)
class StatelessCompaction:
    """Compacts messages without storing checkpoints, events or archives permanently.

    All of these are deleted when the `async with` block of `open_compactor` ends.

    Attributes:
        create_store: Creates an empty store in memory.
        reader: Reads and counts messages, as for forwarded requests.
        model_limits: Provides the context windows and calibrations of models. This class does not change
            them.
        summarizer: Writes summaries. It also writes the summaries for forwarded requests, so it knows which
            models fail and how many calls a tenant has left.
        job_builder: Builds the jobs of compactions from drafts.
        event_bus: Announces events, but only to listeners that add up the cost of summaries.
    """

    create_store: Callable[[], Store]
    reader: MessageReader
    model_limits: ModelLimits
    summarizer: Summarizer
    job_builder: JobBuilder
    event_bus: EventBus

    @asynccontextmanager
    async def open_compactor(self) -> AsyncIterator[tuple[Compactor, EventHistory]]:
        """Creates a compactor with an empty store, and the history of its events.

        Use the compactor and the history only inside the `async with` block. All work is stopped when the
        block ends.
        """
        async with AsyncExitStack() as stack:
            records = RecordStore(self.create_store(), _ignore_error)
            stack.push_async_callback(records.close)
            index, history = CheckpointIndex(records), EventHistory(records, SCRATCH_TTL_S)
            directives = DirectiveStore(records, SCRATCH_TTL_S)
            builder = RoundBuilder(
                self.summarizer, records, index, history, self.reader, announce=self.event_bus
            )
            stack.push_async_callback(builder.close)
            loader = RequestLoader(
                self.reader, records, index, self.model_limits, UsageBaselineStore(records), directives
            )
            coordinator = RoundCoordinator(
                loader, builder, self.reader, directives, RoundEffectiveness(), self.job_builder
            )
            yield Compactor(loader, coordinator, self.reader, self.model_limits), history


def _ignore_error(_: object) -> None:
    """Ignores an error of the store.

    A store in memory fails only if a record is too large for it. The compaction is used nevertheless.
    """


class ShortenResult(NamedTuple):
    """The result of shortening a list of messages.

    Attributes:
        fit: The final result, with the shortened list.
        strategy_result: The result of the strategy alone, before messages were cut to reach the target. It is
            the same as `fit` if no messages were cut.
        model: The model that wrote the summary; None if no model wrote one.
    """

    fit: FitResult
    strategy_result: FitResult
    model: str | None


async def shorten_messages(
    compaction: StatelessCompaction, ask: FitRequest, target_tokens: int | None
) -> ShortenResult:
    """Compacts a list of messages. If this fails, or if the result exceeds the target, also cuts messages.

    The cut needs no model. If the list does not exceed the target at the start, it is returned unchanged.

    Args:
        compaction: Provides the temporary compactor.
        ask: The request. Its mode forces a compaction.
        target_tokens: Size that the list must not exceed, in tokens; None for no target.

    Raises:
        UnreadableBodyError: If a message cannot be read.
        OverloadedError: If no memory, thread or descriptor was left for the compaction.
        InternalError: If an unexpected error has occurred in the proxy. The log contains the cause.
    """
    async with compaction.open_compactor() as (compactor, history):
        if target_tokens is not None and (
            unchanged := await _fit_under_target(compactor, ask, target_tokens)
        ):
            return ShortenResult(unchanged, unchanged, None)
        first = await compactor.fit_request(ask)
        report = first.report
        if report.tokens_before is None or report.tokens_after is None:
            if report.reason == OUT_OF_RESOURCES:
                raise build_shortage_error()
            raise (
                InternalError
                if report.reason == "internal"
                else UnreadableBodyError(report.reason or "unreadable")
            )
        has_failed = report.status is CompactionStatus.FAILED_OPEN
        max_tokens = report.tokens_before - 1 if has_failed else report.tokens_after
        limit, fit = min(max_tokens, target_tokens or max_tokens), first
        if limit < report.tokens_after:
            window = min(find_window_for_limit(limit, ask), report.window or limit)
            settings = replace(ask.settings, window=window)
            fit = await compactor.fit_request(
                replace(ask, settings=settings, resolve_summary_routes=lambda: ())
            )
        return ShortenResult(fit, first, await _find_summary_model(history, ask.tenant, report.conversation))


async def _fit_under_target(compactor: Compactor, ask: FitRequest, target_tokens: int) -> FitResult | None:
    """Returns a result with the unchanged list; None if the list exceeds the target or cannot be counted."""
    shadow = await compactor.fit_request(replace(ask, mode=CompactionMode.SHADOW))
    size = shadow.report.tokens_before
    if size is None or size > target_tokens:
        return None
    return replace(shadow, report=shadow.report._replace(status=CompactionStatus.NONE, reason=None))


def find_window_for_limit(limit_tokens: int, ask: FitRequest) -> int:
    """Returns the largest context window, in tokens, that limits the input to at most `limit_tokens`."""
    reserves = resolve_policy(ask.settings, ask.strategy).reserves
    windows = range(2 * limit_tokens + 4)  # an input limit is at least three quarters of its window
    return (
        bisect_right(windows, limit_tokens, lo=1, key=lambda w: compute_budget(w, reserves, None).input_limit)
        - 1
    )


async def _find_summary_model(history: EventHistory, tenant: str, conversation: str | None) -> str | None:
    events = await history.list_events(tenant, conversation) if conversation else []
    writers = [event.model for event in events if event.kind == COMPACTED and event.model]
    return next((writer for writer in reversed(writers) if writer != EXTRACT_WRITER), None)
