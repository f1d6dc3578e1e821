"""Compaction aside from everything that is kept: the same use case, over a store that ends with the block."""

from bisect import bisect_right
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

from compaction_proxy.compaction.checkpoint_index import CheckpointIndex
from compaction_proxy.compaction.compactor import Compactor
from compaction_proxy.compaction.directives import Wishing
from compaction_proxy.compaction.effectiveness import Effects
from compaction_proxy.compaction.inflight import Rounds
from compaction_proxy.compaction.job_builder import Ordering
from compaction_proxy.compaction.message_reader import Reading
from compaction_proxy.compaction.request_limits import policy_for
from compaction_proxy.compaction.request_loader import Viewer
from compaction_proxy.compaction.round_builder import Making
from compaction_proxy.compaction.round_coordinator import Replacing
from compaction_proxy.compaction.summarizer import Summarising
from compaction_proxy.compaction.summary_request import SummaryRoute
from compaction_proxy.compaction.types import Ask, Fit, Mode, Status
from compaction_proxy.core.budget import budget
from compaction_proxy.core.checkpoint import EXTRACT
from compaction_proxy.core.errors import Crashed, Unreadable
from compaction_proxy.core.event import COMPACTED
from compaction_proxy.providers.model_limits import Learning
from compaction_proxy.providers.usage_baseline import Anchors
from compaction_proxy.storage.records import Records
from compaction_proxy.storage.store import Store
from compaction_proxy.telemetry.event_bus import Announcing
from compaction_proxy.telemetry.event_history import History

# What is kept aside ends with its block; nothing of it expires before, in seconds.
KEPT_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Apart:
    """A compactor and what it has made, for as long as the block runs.

    Attributes:
        compactor: The use case.
        history: What has happened; nobody else hears of it.
    """

    compactor: Compactor
    history: History


@dataclass(frozen=True, slots=True)
class Aside:
    """Compacts without keeping anything: no checkpoint, event, archive or total outlives the block.

    Attributes:
        store: Makes an empty store, in memory.
        reading: Reads and counts, as for requests.
        learning: Knows windows and ratios; is asked only.
        summarising: Who writes summaries; knows which models fail, and what a tenant may still spend.
        ordering: Turns drafts into jobs.
        announce: Tells those who count what summaries cost; they are told of no conversation's round.
    """

    store: Callable[[], Store]
    reading: Reading
    learning: Learning
    summarising: Summarising
    ordering: Ordering
    announce: Announcing

    @asynccontextmanager
    async def apart(self) -> AsyncIterator[Apart]:
        """A compactor over an empty store. What it has begun ends with the block."""
        async with AsyncExitStack() as stack:
            records = Records(self.store(), _ignored)
            stack.push_async_callback(records.close)
            index, history = CheckpointIndex(records), History(records, KEPT_S)
            wishing = Wishing(records, KEPT_S)
            making = Making(self.summarising, records, index, history, self.reading, announce=self.announce)
            rounds = Rounds(making, history, announce=self.announce)
            stack.push_async_callback(rounds.close)
            viewer = Viewer(self.reading, records, index, self.learning, Anchors(records), wishing)
            replacing = Replacing(viewer, rounds, making, self.reading, wishing, Effects(), self.ordering)
            yield Apart(Compactor(viewer, replacing, self.reading, self.learning), history)


def _ignored(_: object) -> None:
    """A store in memory fails only where a record is too large for it; the round is used all the same."""


class Shortened(NamedTuple):
    """What came of a list that was to be shortened.

    Attributes:
        fit: The request with the shorter list.
        first: What the strategy made of it; the same where it was not cut any further.
        model: Who wrote the summary; None if no model did.
    """

    fit: Fit
    first: Fit
    model: str | None


async def shortened(aside: Aside, ask: Ask, target: int | None) -> Shortened:
    """What the strategy makes of the list; without a model where none wrote, or it is too long still.

    Args:
        aside: Compacts.
        ask: The request, to be compacted by force.
        target: What it must come under, in tokens; None: it need not.

    Raises:
        Unreadable: A message is none.
        Crashed: A fault of ours, which the log tells of.
    """
    async with aside.apart() as apart:
        if target is not None and (whole := await _whole(apart.compactor, ask, target)):
            return Shortened(whole, whole, None)
        first = await apart.compactor.fit(ask)
        report = first.report
        if report.tokens_before is None or report.tokens_after is None:
            raise Crashed if report.reason == "internal" else Unreadable(report.reason or "unreadable")
        failed = report.status is Status.FAILED_OPEN
        most = report.tokens_before - 1 if failed else report.tokens_after
        limit, fit = min(most, target or most), first
        if limit < report.tokens_after:
            window = min(narrowed(limit, ask), report.window or limit)
            settings = replace(ask.settings, window=window)
            fit = await apart.compactor.fit(replace(ask, settings=settings, whom=_nobody))
        return Shortened(fit, first, await _writer(apart.history, ask.tenant, report.conversation))


async def _whole(compactor: Compactor, ask: Ask, target: int) -> Fit | None:
    """The list as it came, if it is under its target as it is."""
    seen = await compactor.fit(replace(ask, mode=Mode.SHADOW))
    size = seen.report.tokens_before
    if size is None or size > target:
        return None
    return replace(seen, report=seen.report._replace(status=Status.NONE, reason=None))


def narrowed(limit: int, ask: Ask) -> int:
    """The largest window, in tokens, in which a request must fit `limit` tokens."""
    reserves = policy_for(ask.settings, ask.strategy).reserves
    windows = range(2 * limit + 4)  # an input limit is at least three quarters of its window
    return bisect_right(windows, limit, lo=1, key=lambda w: budget(w, reserves, None).input_limit) - 1


def _nobody() -> tuple[SummaryRoute, ...]:
    return ()


async def _writer(history: History, tenant: str, conversation: str | None) -> str | None:
    events = await history.of(tenant, conversation) if conversation else []
    writers = [event.model for event in events if event.kind == COMPACTED and event.model]
    return next((writer for writer in reversed(writers) if writer != EXTRACT), None)
