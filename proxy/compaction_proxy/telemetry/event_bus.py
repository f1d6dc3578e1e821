"""Announcing events: each is told once, and everybody who shows or counts events hears of it here.

What is kept of an event is the history's business: the event of a round is committed with its checkpoint, and
announced once that is done.
"""

import logging
from collections.abc import Callable
from secrets import token_hex

import structlog

from compaction_proxy.core.event import COMPACTED, FAILURES, MEASURED, Event, to_log
from compaction_proxy.support.fail_open import contained
from compaction_proxy.support.log_events import COMPACTION_FAILED, COMPACTION_FINISHED, NOT_ANNOUNCED

# Given the tenant that an event belongs to, and the event. Called on the event loop; must not wait.
Listener = Callable[[str, Event], None]

_ID_BYTES = 8

_log = structlog.get_logger()


def unheard(_tenant: str, _event: Event) -> None:
    """Tell nobody: for work that is done aside."""


def event_id() -> str:
    """A new event's id."""
    return f"e_{token_hex(_ID_BYTES)}"


class Announcing:
    """Tells listeners of events, and the log.

    Attributes:
        listeners: Whom to tell. One that fails keeps nobody from hearing.
    """

    def __init__(self, *listeners: Listener) -> None:
        self.listeners = list(listeners)

    def __call__(self, tenant: str, event: Event) -> None:
        """Tell of an event."""
        _logged(event)
        for listener in self.listeners:
            with contained(_not_announced):
                listener(tenant, event)


def _logged(event: Event) -> None:
    """One line; none for what the upstream counted, which every round is followed by."""
    if event.kind == MEASURED:
        return
    told = {name: value for name, value in to_log(event).items() if name != "kind"}
    if event.kind == COMPACTED:
        _log.info(COMPACTION_FINISHED, **told)
    elif event.kind in FAILURES:
        _log.warning(COMPACTION_FAILED, kind=event.kind, **told)
    else:
        _log.log(logging.INFO, f"compaction.{event.kind}", **told)


def _not_announced(error: BaseException) -> None:
    _log.warning(NOT_ANNOUNCED, error=type(error).__name__)
