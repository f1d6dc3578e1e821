"""Telling people of requests that did not go as they should, without a line for each of thousands."""

import time
from collections import OrderedDict
from collections.abc import Callable

from compaction_proxy.compaction.types import Report, Status
from compaction_proxy.core.event import FAILED_OPEN, OVER_LIMIT, RECOVERED, Event
from compaction_proxy.telemetry.event_bus import Announcing, event_id
from compaction_proxy.telemetry.event_history import History

# The same trouble of the same conversation is told again after so long, in seconds.
QUIET_S = 60.0
MAX_KNOWN = 2_000

_KINDS = {Status.FAILED_OPEN: FAILED_OPEN, Status.OVER_LIMIT: OVER_LIMIT}


class Trouble:
    """Announces what requests ran into, and keeps it with their conversations.

    Args:
        announce: Tells of events.
        history: Keeps them.
        clock: Monotonic seconds.
        now: Seconds since the epoch.
    """

    def __init__(
        self,
        announce: Announcing,
        history: History,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._announce = announce
        self._history = history
        self._clock = clock
        self._now = now
        self._told: OrderedDict[tuple[str, str | None, str, str | None], float] = OrderedDict()

    async def __call__(
        self, tenant: str, report: Report, request: str, model: str, *, recovered: bool = False
    ) -> None:
        """Tell of one request, if there is anything to tell. To be called once the client has its answer."""
        kind = RECOVERED if recovered else _KINDS.get(report.status, "")
        if not kind or self._lately((tenant, report.conversation, kind, report.reason)):
            return
        event = Event(
            kind,
            self._now(),
            report.conversation or "",
            id=event_id(),
            request=request,
            strategy=report.strategy or "",
            round=report.round,
            place=report.place,
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
            await self._history.note(tenant, event)

    def _lately(self, what: tuple[str, str | None, str, str | None]) -> bool:
        now = self._clock()
        known = self._told.pop(what, None)
        again = known is None or known <= now
        self._told[what] = now + QUIET_S if again or known is None else known
        if len(self._told) > MAX_KNOWN:
            self._told.popitem(last=False)
        return not again
