"""Reports requests that went wrong. The same incident is reported only once a minute."""

import time
from collections import OrderedDict
from collections.abc import Callable

from compaction_proxy.compaction.types import CompactionReport, CompactionStatus
from compaction_proxy.core.event import FAILED_OPEN, OVER_LIMIT, RECOVERED, Event
from compaction_proxy.telemetry.event_history import EventBus, EventHistory, generate_event_id

# An incident of the same kind, with the same reason and in the same conversation, is reported again only
# after this many seconds. To know this, the reporter remembers at most `MAX_KNOWN` incidents.
QUIET_S = 60.0
MAX_KNOWN = 2_000

_KINDS = {CompactionStatus.FAILED_OPEN: FAILED_OPEN, CompactionStatus.OVER_LIMIT: OVER_LIMIT}


class IncidentReporter:
    """Publishes incidents of requests as events, and adds the events to the history of the conversation.

    Args:
        event_bus: Publishes events.
        history: Stores events.
        clock: Returns monotonic seconds.
        now: Returns seconds since the epoch.
    """

    def __init__(
        self,
        event_bus: EventBus,
        history: EventHistory,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._announce = event_bus
        self._history = history
        self._clock = clock
        self._now = now
        self._quiet_until: OrderedDict[tuple[str, str | None, str, str | None], float] = OrderedDict()

    async def __call__(
        self,
        tenant: str,
        report: CompactionReport,
        request_id: str,
        model: str,
        *,
        was_recovered: bool = False,
    ) -> None:
        """Reports a request if something went wrong. Call this after the client has its answer.

        Something went wrong if the proxy failed on the request, if the forwarded request was probably too
        long, or if the upstream accepted it only in a shorter form (`was_recovered`).
        """
        kind = RECOVERED if was_recovered else _KINDS.get(report.status, "")
        if not kind or self._should_suppress((tenant, report.conversation, kind, report.reason)):
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

    def _should_suppress(self, incident_key: tuple[str, str | None, str, str | None]) -> bool:
        now = self._clock()
        quiet_until = self._quiet_until.pop(incident_key, None)
        is_due = quiet_until is None or quiet_until <= now
        self._quiet_until[incident_key] = now + QUIET_S if is_due or quiet_until is None else quiet_until
        if len(self._quiet_until) > MAX_KNOWN:
            self._quiet_until.popitem(last=False)
        return not is_due
