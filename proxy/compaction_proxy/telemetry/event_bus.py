"""Passes each event to the log and to all listeners, such as metrics and the live feed.

The bus stores nothing: `event_history` stores the events. A compaction's event is stored together with its
checkpoint, in one write, and published after that.
"""

import logging
from collections.abc import Callable
from secrets import token_hex

import structlog

from compaction_proxy.core.event import COMPACTED, FAILURE_KINDS, MEASURED, Event, to_log_fields
from compaction_proxy.support.fail_open import suppress_and_report
from compaction_proxy.support.log_events import COMPACTION_FAILED, COMPACTION_FINISHED, EVENT_NOT_ANNOUNCED

# Receives the tenant of an event, and the event. Runs on the event loop, so it must not block.
EventListener = Callable[[str, Event], None]

_ID_BYTES = 8

_log = structlog.get_logger()


def ignore_event(_tenant: str, _event: Event) -> None:
    """Discards an event. Use it as the listener where events must not be logged, stored or shown."""


def generate_event_id() -> str:
    """Generates the id of a new event."""
    return f"e_{token_hex(_ID_BYTES)}"


class EventBus:
    """Passes events to listeners and to the log.

    Attributes:
        listeners: Receivers of events. A listener that fails does not stop the others.
    """

    def __init__(self, *listeners: EventListener) -> None:
        self.listeners = list(listeners)

    def __call__(self, tenant: str, event: Event) -> None:
        """Logs an event and passes it to all listeners."""
        _log_event(event)
        for listener in self.listeners:
            with suppress_and_report(_log_listener_failure):
                listener(tenant, event)


def _log_event(event: Event) -> None:
    """Logs an event in one line. Skips `MEASURED` events, because one follows every compaction."""
    if event.kind == MEASURED:
        return
    details = {name: value for name, value in to_log_fields(event).items() if name != "kind"}
    if event.kind == COMPACTED:
        _log.info(COMPACTION_FINISHED, **details)
    elif event.kind in FAILURE_KINDS:
        _log.warning(COMPACTION_FAILED, kind=event.kind, **details)
    else:
        _log.log(logging.INFO, f"compaction.{event.kind}", **details)


def _log_listener_failure(error: BaseException) -> None:
    _log.warning(EVENT_NOT_ANNOUNCED, error=type(error).__name__)
