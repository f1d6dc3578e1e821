"""Publishes events, and stores and reads the events of a conversation, such as its compactions.

`EventBus` passes each event to the log and to all listeners, such as metrics and the live feed. It stores
nothing. `EventHistory` stores events. The proxy publishes a compaction's event only after it has stored the
event.

A conversation's root is the prefix digest of its first four messages that are not fixed (`storage.keys`). The
proxy stores the event of a compaction under the root, in one write with the checkpoint. It stores other
events under the conversation's id. A conversation whose beginning was edited has several roots. Conversations
that begin with the same messages share a root, so each event contains the id of its conversation.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from secrets import token_hex

import structlog

from compaction_proxy.core import checkpoint
from compaction_proxy.core.event import (
    APPLIED,
    COMPACTED,
    FAILURE_KINDS,
    INSTALLED,
    MEASURED,
    SCHEDULED,
    Event,
    from_fields,
    to_fields,
    to_log_fields,
)
from compaction_proxy.core.strategies import STRATEGIES
from compaction_proxy.storage.keys import (
    checkpoint_keys,
    checkpoint_list_key,
    events_key,
    roots_key,
    round_events_key,
    scope_prefix,
)
from compaction_proxy.storage.records import Fields, ListItem, RecordStore
from compaction_proxy.support.log_events import COMPACTION_FAILED, COMPACTION_FINISHED, EVENT_NOT_ANNOUNCED
from compaction_proxy.telemetry.logs import suppress_and_log

# Maximum number of events in a stored list. If there are more, the oldest are dropped. There is one list for
# the compactions of all conversations with the same beginning, and one list for the other events of each
# conversation.
KEPT_EVENTS = 200
# The proxy stores a compaction under the root of its conversation, and adds a line with this root to the
# conversation's list of roots. `KEPT_ROOT_LINES` is the maximum number of lines in this list. If there are
# more, the store drops the oldest. `MAX_ROOTS` is the maximum number of different roots that `list_roots`
# returns by default.
KEPT_ROOT_LINES = 500
MAX_ROOTS = 50
# Maximum number of checkpoints that `list_installed_rounds` reads for each root and strategy. It ignores
# older ones.
MAX_CHECKPOINT_LINES = 200
# A function that is called with the tenant of an event and the event. It runs on the event loop, so it must
# not block.
EventListener = Callable[[str, Event], None]

_ID_BYTES = 8

_log = structlog.get_logger()


def ignore_event(_tenant: str, _event: Event) -> None:
    """Does nothing. Pass this function as the listener if events must not be logged, stored or shown."""


def generate_event_id() -> str:
    """Generates the id of a new event."""
    return f"e_{token_hex(_ID_BYTES)}"


class EventBus:
    """Passes events to listeners and to the log.

    Attributes:
        listeners: Functions that are called with each event. If one fails, the others are still called.
    """

    def __init__(self, *listeners: EventListener) -> None:
        self.listeners = list(listeners)

    def __call__(self, tenant: str, event: Event) -> None:
        """Logs an event and passes it to all listeners."""
        _log_event(event)
        for listener in self.listeners:
            with suppress_and_log(EVENT_NOT_ANNOUNCED):
                listener(tenant, event)


def _log_event(event: Event) -> None:
    """Logs an event in one line.

    Does not log `MEASURED` events, which report the upstream's token count after each compaction.
    """
    if event.kind == MEASURED:
        return
    details = {name: value for name, value in to_log_fields(event).items() if name != "kind"}
    if event.kind == COMPACTED:
        _log.info(COMPACTION_FINISHED, **details)
    elif event.kind in FAILURE_KINDS:
        _log.warning(COMPACTION_FAILED, kind=event.kind, **details)
    else:
        _log.log(logging.INFO, f"compaction.{event.kind}", **details)


def build_round_event_line(tenant: str, root: bytes, event: Event, ttl_s: float) -> ListItem:
    """Builds the line to store for a compaction's event. The caller writes it with the checkpoint."""
    return ListItem(round_events_key(tenant, root), to_fields(event), ttl_s, KEPT_EVENTS)


def _parse_events(lines: Iterable[Fields]) -> list[Event]:
    return [event for line in lines if (event := from_fields(line)) is not None]


def _sort_and_merge_outcomes(events: Iterable[Event]) -> list[Event]:
    """Sorts events by time, oldest first, and merges later events about a compaction into its own event.

    The event of a compaction gets the outcome from a later `INSTALLED` event, and the upstream's token count
    from a later `MEASURED` event, which also says that the compaction is in use. The result contains no
    `MEASURED` events, and at most one `INSTALLED` event for each checkpoint.
    """
    ordered = sorted(events, key=lambda event: event.at)
    rounds = {index: event for index, event in enumerate(ordered) if event.kind == COMPACTED}
    installed: set[str] = set()
    merged: list[Event | None] = list(ordered)
    for position, event in enumerate(ordered):
        if event.kind == MEASURED or (event.kind == INSTALLED and event.place in installed):
            merged[position] = None  # another process may have installed the same compaction
        if event.kind in {MEASURED, INSTALLED} and (index := _find_round_index(event, rounds)) is not None:
            merged[index] = rounds[index] = _apply_outcome(rounds[index], event)
        if event.kind == INSTALLED:
            installed.add(event.place)
    return [event for event in merged if event is not None]


def _apply_outcome(round_event: Event, event: Event) -> Event:
    """Returns a compaction's event with the outcome or the upstream's token count from a later event.

    If `round_event` already has a token count, the result keeps that count.
    """
    if event.kind == INSTALLED:
        return replace(round_event, outcome=event.outcome)
    real = event.tokens_real if round_event.tokens_real is None else round_event.tokens_real
    outcome = APPLIED if round_event.outcome == SCHEDULED else round_event.outcome
    return replace(round_event, outcome=outcome, tokens_real=real)


def _find_round_index(later: Event, rounds: Mapping[int, Event]) -> int | None:
    """Finds the compaction to which a later event belongs, by the id of its checkpoint (`place`).

    If no id matches, finds the newest earlier compaction with the same strategy and number. For a token
    count, it must be in use: a late summary can have the number of the extract that was used in its place.
    Returns the key of the compaction in `rounds`, or None if there is no such compaction.
    """
    placed = [index for index, event in rounds.items() if event.place and event.place == later.place]
    named = [
        index
        for index, event in rounds.items()
        if (event.strategy, event.round) == (later.strategy, later.round)
        and event.at <= later.at
        and not (later.kind == MEASURED and event.outcome == SCHEDULED)
    ]
    return next(iter(placed or reversed(named)), None)


class EventHistory:
    """Stores and reads the events of conversations. Not thread-safe: use it on one event loop.

    No method raises an error if the store fails.

    Args:
        records: Store for the events.
        ttl_s: Seconds for which a list of events is kept after an event was last added.
    """

    def __init__(self, records: RecordStore, ttl_s: float) -> None:
        self._records = records
        self._ttl_s = ttl_s

    async def record_event(self, tenant: str, event: Event) -> bool:
        """Stores an event that does not report a compaction. Returns whether the store has saved it."""
        key = events_key(tenant, event.conversation)
        return await self._records.append_line(
            key, to_fields(event), ttl_s=self._ttl_s, max_lines=KEPT_EVENTS
        )

    async def record_root(self, tenant: str, conversation: str, root: bytes) -> None:
        """Records that a compaction of a conversation is stored under this root.

        Call this method before a compaction is saved. If the conversation was deleted after the compaction
        began, marks the root as deleted instead, so that the compaction cannot be saved. Otherwise a later
        deletion of the conversation would not find the compaction, because its root is not recorded.
        """
        key, fields = roots_key(tenant, conversation), {"root": root.hex()}
        if self._records.deletion_fence.is_deleted(key):
            self._records.deletion_fence.add_deletion(scope_prefix(tenant, root))
            return
        await self._records.append_line(key, fields, ttl_s=self._ttl_s, max_lines=KEPT_ROOT_LINES)

    async def list_roots(self, tenant: str, conversation: str, limit: int = MAX_ROOTS) -> tuple[bytes, ...]:
        """Returns at most `limit` roots under which a conversation has compactions, the newest first."""
        lines = await self._records.read_tail(roots_key(tenant, conversation), KEPT_ROOT_LINES)
        roots = (_parse_hex(line.get("root")) for line in reversed(lines))
        return tuple(dict.fromkeys(root for root in roots if root))[:limit]

    async def list_events(self, tenant: str, conversation: str) -> list[Event]:
        """Returns a conversation's events, oldest first.

        The event of a compaction includes its outcome and the upstream's token count if later events
        reported them.
        """
        lines = await self._records.read_tail(events_key(tenant, conversation), KEPT_EVENTS)
        events = _parse_events(lines)
        for root in await self.list_roots(tenant, conversation):
            rounds = _parse_events(await self._records.read_tail(round_events_key(tenant, root), KEPT_EVENTS))
            events += [event for event in rounds if event.conversation == conversation]
        return _sort_and_merge_outcomes(events)

    async def list_installed_rounds(self, tenant: str, conversation: str) -> list[Event]:
        """Returns the events of a conversation's installed compactions, of every strategy, newest first.

        Leaves out staged compactions that are not installed yet. If a compaction has no stored event, builds
        its event from its checkpoint.
        """
        events = await self.list_events(tenant, conversation)
        round_events = {event.place: event for event in events if event.kind == COMPACTED and event.place}
        rounds: list[Event] = []
        for root in await self.list_roots(tenant, conversation):
            for strategy in STRATEGIES:
                rounds += await self._read_installed_rounds(tenant, root, strategy, round_events)
        ours = [event for event in rounds if event.conversation == conversation]
        return sorted(ours, key=lambda event: event.at)[::-1]

    async def _read_installed_rounds(
        self, tenant: str, root: bytes, strategy: str, round_events: Mapping[str, Event]
    ) -> list[Event]:
        """Returns the events of the installed compactions of one strategy that are stored under a root.

        The events are in the order of the list of checkpoints. If a compaction has no stored event, its event
        gets the latest time of the compactions before it in the list.
        """
        lines = await self._records.read_tail(
            checkpoint_list_key(tenant, root, strategy), MAX_CHECKPOINT_LINES
        )
        places = list(dict.fromkeys(filter(None, (_parse_hex(line.get("place")) for line in lines))))
        silent = [place for place in places if place.hex() not in round_events]
        stored = (
            await self._records.get_many(checkpoint_keys(tenant, root, strategy, silent)) if silent else []
        )
        checkpoints = dict(zip(silent, stored, strict=True))
        rounds: list[Event] = []
        at = 0.0
        for place in places:
            event = round_events.get(place.hex()) or _build_event_from_checkpoint(
                place, checkpoints.get(place), at
            )
            if event is not None:
                at = max(at, event.at)
                rounds.append(event)
        return rounds


def _build_event_from_checkpoint(place: bytes, fields: Fields | None, at: float) -> Event | None:
    """Builds the event of a compaction, with the time `at`, from the fields of its checkpoint.

    Returns None if there is no valid checkpoint.
    """
    stored = checkpoint.from_fields(fields) if fields else None
    if stored is None:
        return None
    return Event(
        COMPACTED,
        at,
        stored.conversation,
        strategy=stored.strategy,
        round=stored.round,
        place=place.hex(),
        tokens_before=stored.tokens_before,
        tokens_after=stored.tokens_after,
        summary=stored.summary,
    )


def _parse_hex(digits: object) -> bytes:
    try:
        return bytes.fromhex(digits) if isinstance(digits, str) else b""
    except ValueError:
        return b""
