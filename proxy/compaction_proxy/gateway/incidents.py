"""Telling people of requests that did not go as they should, without a line for each of thousands."""

import time
from collections import OrderedDict
from collections.abc import Callable

from compaction_proxy.compaction.types import CompactionReport, CompactionStatus
from compaction_proxy.core.event import FAILED_OPEN, OVER_LIMIT, RECOVERED, Event
from compaction_proxy.telemetry.event_bus import EventBus, generate_event_id
from compaction_proxy.telemetry.event_history import EventHistory

# The same trouble of the same conversation is told again after so long, in seconds.
QUIET_S = 60.0
MAX_KNOWN = 2_000

_KINDS = {CompactionStatus.FAILED_OPEN: FAILED_OPEN, CompactionStatus.OVER_LIMIT: OVER_LIMIT}


class IncidentReporter:
    """Announces what requests ran into, and keeps it with their conversations.

    Args:
        announce: Tells of events.
        history: Keeps them.
        clock: Monotonic seconds.
        now: Seconds since the epoch.
    """

    def __init__(
        self,
        announce: EventBus,
        history: EventHistory,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._announce = announce
        self._history = history
        self._clock = clock
        self._now = now
        self._quiet_until: OrderedDict[tuple[str, str | None, str, str | None], float] = OrderedDict()

    async def __call__(
        self, tenant: str, report: CompactionReport, request_id: str, model: str, *, recovered: bool = False
    ) -> None:
        """Tell of one request, if there is anything to tell. To be called once the client has its answer."""
        kind = RECOVERED if recovered else _KINDS.get(report.status, "")
        if not kind or self._is_repeated((tenant, report.conversation, kind, report.reason)):
            return
        event = Event(
            kind,
            self._now(),
            report.conversation or "",
            id=generate_event_id(),
            request=request_id,
            strategy=report.strategy or "",
            round=report.round,
            place=report.checkpoint_id,
            reason=report.reason or "",
            outcome=report.status.value,
            asked=model,
            tokens_before=report.tokens_before,
            tokens_after=report.tokens_after,
            trigger=report.trigger,
            window=report.window,
            listed=report.messages_before,
        )
        self._announce(tenant, event)
        if event.conversation:
            await self._history.record_event(tenant, event)

    def _is_repeated(self, incident_key: tuple[str, str | None, str, str | None]) -> bool:
        now = self._clock()
        known = self._quiet_until.pop(incident_key, None)
        again = known is None or known <= now
        self._quiet_until[incident_key] = now + QUIET_S if again or known is None else known
        if len(self._quiet_until) > MAX_KNOWN:
            self._quiet_until.popitem(last=False)
        return not again
