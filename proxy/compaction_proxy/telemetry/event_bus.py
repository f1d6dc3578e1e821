"""Announcing events: each is told once, and everybody who shows or counts events hears of it here.

What is kept of an event is the history's business: the event of a round is committed with its checkpoint, and
announced once that is done.
"""

import logging
from collections.abc import Callable
from secrets import token_hex

import structlog

from compaction_proxy.core.event import COMPACTED, FAILURES, MEASURED, Event, to_log_fields
from compaction_proxy.support.fail_open import suppress_and_report
from compaction_proxy.support.log_events import COMPACTION_FAILED, COMPACTION_FINISHED, NOT_ANNOUNCED

# Given the tenant that an event belongs to, and the event. Called on the event loop; must not wait.
EventListener = Callable[[str, Event], None]

_ID_BYTES = 8

_log = structlog.get_logger()


def ignore_event(_tenant: str, _event: Event) -> None:
    """Tell nobody: for work that is done aside."""


def generate_event_id() -> str:
    """A new event's id."""
    return f"e_{token_hex(_ID_BYTES)}"


class EventBus:
    """Tells listeners of events, and the log.

    Attributes:
        listeners: Whom to tell. One that fails keeps nobody from hearing.
    """

    def __init__(self, *listeners: EventListener) -> None:
        self.listeners = list(listeners)

    def __call__(self, tenant: str, event: Event) -> None:
        """Tell of an event."""
        _log_event(event)
        for listener in self.listeners:
            with suppress_and_report(_log_listener_failure):
                listener(tenant, event)


def _log_event(event: Event) -> None:
    """One line; none for what the upstream counted, which every round is followed by."""
    if event.kind == MEASURED:
        return
    details = {name: value for name, value in to_log_fields(event).items() if name != "kind"}
    if event.kind == COMPACTED:
        _log.info(COMPACTION_FINISHED, **details)
    elif event.kind in FAILURES:
        _log.warning(COMPACTION_FAILED, kind=event.kind, **details)
    else:
        _log.log(logging.INFO, f"compaction.{event.kind}", **details)


def _log_listener_failure(error: BaseException) -> None:
    _log.warning(NOT_ANNOUNCED, error=type(error).__name__)
