"""Stores and reads the events of a conversation: its compactions and everything else that happened.

The event of a compaction is committed with its checkpoint, in the scope of the conversation's root. Other
events stand in the conversation's own list. A conversation whose beginning was edited has several roots.
Conversations that begin alike share a root; an event belongs to the conversation that it names.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from compaction_proxy.core import checkpoint
from compaction_proxy.core.event import COMPACTED, INSTALLED, MEASURED, Event, from_fields, to_fields
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

# Number of events without compactions that are kept per conversation, and of compactions per root.
KEPT_EVENTS = 200
# Every compaction adds a line that names its root. Number of these lines that are read, and of roots.
KEPT_ROOT_LINES = 500
MAX_ROOTS = 50
# Number of checkpoints per root and strategy that are read.
KEPT_PLACES = 200


@dataclass(frozen=True, slots=True)
class InstalledRound:
    """A compaction whose checkpoint requests may use.

    Attributes:
        place: Place of its checkpoint in the store, 64 bytes.
        event: Event of the compaction, or one built from the checkpoint.
    """

    place: bytes
    event: Event


def build_round_line(tenant: str, root: bytes, event: Event, ttl_s: float) -> ListItem:
    """Builds the line to commit with the checkpoint of an event; `event.place` is the checkpoint's place."""
    return ListItem(round_events_key(tenant, root), to_fields(event), ttl_s, KEPT_EVENTS)


def _parse_events(lines: Iterable[Fields]) -> list[Event]:
    return [event for line in lines if (event := from_fields(line)) is not None]


def _merge_outcomes(events: Iterable[Event]) -> list[Event]:
    """Sorts events, oldest first. Merges installations and the upstream's counts into their compactions."""
    ordered = sorted(events, key=lambda event: event.at)
    rounds = {index: event for index, event in enumerate(ordered) if event.kind == COMPACTED}
    installed: set[str] = set()
    merged: list[Event | None] = list(ordered)
    for position, event in enumerate(ordered):
        if event.kind == MEASURED or (event.kind == INSTALLED and event.place in installed):
            merged[position] = None  # another replica may have installed the same compaction
        if event.kind in {MEASURED, INSTALLED} and (index := _find_round_index(event, rounds)) is not None:
            merged[index] = rounds[index] = _apply_outcome(rounds[index], event)
        if event.kind == INSTALLED:
            installed.add(event.place)
    return [event for event in merged if event is not None]


def _apply_outcome(round_event: Event, event: Event) -> Event:
    """Adds a later event to the event of a compaction. The first count is kept."""
    if event.kind == INSTALLED:
        return replace(round_event, outcome=event.outcome)
    return (
        replace(round_event, tokens_real=event.tokens_real)
        if round_event.tokens_real is None
        else round_event
    )


def _find_round_index(later: Event, rounds: Mapping[int, Event]) -> int | None:
    """Finds the compaction of a later event: by place, or else the newest earlier one with its number."""
    placed = [index for index, event in rounds.items() if event.place and event.place == later.place]
    named = [
        index
        for index, event in rounds.items()
        if (event.strategy, event.round) == (later.strategy, later.round) and event.at <= later.at
    ]
    return next(iter(placed or reversed(named)), None)


class EventHistory:
    """Stores and reads events, on one event loop. No method raises because of the store.

    Args:
        records: Store for the events.
        ttl_s: Lifetime of events after the newest one, in seconds.
    """

    def __init__(self, records: RecordStore, ttl_s: float) -> None:
        self._records = records
        self._ttl_s = ttl_s

    async def record_event(self, tenant: str, event: Event) -> bool:
        """Stores an event that is not a compaction. Returns whether it was saved."""
        key = events_key(tenant, event.conversation)
        return await self._records.append_line(
            key, to_fields(event), ttl_s=self._ttl_s, max_lines=KEPT_EVENTS
        )

    async def record_root(self, tenant: str, conversation: str, root: bytes) -> None:
        """Records that a conversation has compactions under this root. Call it before each of them is saved.

        If the conversation was deleted since the compaction began, the root is deleted as well, because
        nothing would lead to it.
        """
        key, fields = roots_key(tenant, conversation), {"root": root.hex()}
        if self._records.deletion_fence.is_deleted(key):
            self._records.deletion_fence.add_deletion(scope_prefix(tenant, root))
            return
        await self._records.append_line(key, fields, ttl_s=self._ttl_s, max_lines=KEPT_ROOT_LINES)

    async def list_roots(self, tenant: str, conversation: str, most: int = MAX_ROOTS) -> tuple[bytes, ...]:
        """Returns at most `most` roots of a conversation, the last used first."""
        lines = await self._records.read_tail(roots_key(tenant, conversation), KEPT_ROOT_LINES)
        roots = (_parse_hex(line.get("root")) for line in reversed(lines))
        return tuple(dict.fromkeys(root for root in roots if root))[:most]

    async def list_events(self, tenant: str, conversation: str) -> list[Event]:
        """Returns the events of a conversation, oldest first. Compactions include the upstream's count."""
        lines = await self._records.read_tail(events_key(tenant, conversation), KEPT_EVENTS)
        events = _parse_events(lines)
        for root in await self.list_roots(tenant, conversation):
            rounds = _parse_events(await self._records.read_tail(round_events_key(tenant, root), KEPT_EVENTS))
            events += [event for event in rounds if event.conversation == conversation]
        return _merge_outcomes(events)

    async def list_installed_rounds(self, tenant: str, conversation: str) -> list[InstalledRound]:
        """Returns the installed compactions of a conversation, of every strategy, newest first.

        A staged compaction is not included until it is installed. A compaction that was shortened further
        since has no event of its own; its event is built from its checkpoint.
        """
        events = await self.list_events(tenant, conversation)
        round_events = {event.place: event for event in events if event.kind == COMPACTED and event.place}
        rounds: list[InstalledRound] = []
        for root in await self.list_roots(tenant, conversation):
            for strategy in STRATEGIES:
                rounds += await self._read_installed_rounds(tenant, root, strategy, round_events)
        ours = [each for each in rounds if each.event.conversation == conversation]
        ours.sort(key=lambda each: each.event.at)
        return ours[::-1]

    async def _read_installed_rounds(
        self, tenant: str, root: bytes, strategy: str, round_events: Mapping[str, Event]
    ) -> list[InstalledRound]:
        """Reads one list of checkpoints, in its order.

        A compaction without an event of its own gets the time of the previous one.
        """
        lines = await self._records.read_tail(checkpoint_list_key(tenant, root, strategy), KEPT_PLACES)
        places = list(dict.fromkeys(filter(None, (_parse_hex(line.get("place")) for line in lines))))
        silent = [place for place in places if place.hex() not in round_events]
        stored = (
            await self._records.get_many(checkpoint_keys(tenant, root, strategy, silent)) if silent else []
        )
        checkpoints = dict(zip(silent, stored, strict=True))
        rounds: list[InstalledRound] = []
        at = 0.0
        for place in places:
            event = round_events.get(place.hex()) or _build_event(place, checkpoints.get(place), at)
            if event is not None:
                at = max(at, event.at)
                rounds.append(InstalledRound(place, event))
        return rounds


def _build_event(place: bytes, fields: Fields | None, at: float) -> Event | None:
    """Builds the event of a compaction from its checkpoint; None if there is no checkpoint."""
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
    """Decodes hex digits; returns empty bytes for anything else."""
    try:
        return bytes.fromhex(digits) if isinstance(digits, str) else b""
    except ValueError:
        return b""
