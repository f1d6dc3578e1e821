"""Compaction aside from everything that is kept: the same use case, over a store that ends with the block."""

from bisect import bisect_right
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

from proxy.anchors import Anchors
from proxy.announcing import Announcing
from proxy.compaction.brief import SummaryRoute
from proxy.compaction.checkpoint_index import CheckpointIndex
from proxy.compaction.compactor import Compactor
from proxy.compaction.effects import Effects
from proxy.compaction.fitting import Ask, Fit, Mode, Status
from proxy.compaction.making import Making
from proxy.compaction.ordering import Ordering
from proxy.compaction.policies import policy_for
from proxy.compaction.replacing import Replacing
from proxy.compaction.rounds import Rounds
from proxy.compaction.summarising import Summarising
from proxy.compaction.viewer import Viewer
from proxy.core.budget import budget
from proxy.core.checkpoint import EXTRACT
from proxy.core.event import COMPACTED
from proxy.errors import Crashed, Unreadable
from proxy.history import History
from proxy.learning import Learning
from proxy.ports import Store
from proxy.reading import Reading
from proxy.storage.records import Records
from proxy.wishes import Wishing

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
