"""What has happened to a conversation: its rounds, and everything that is no round.

The event of a round is committed with its checkpoint, in the scope of the conversation's root; other events
stand in the conversation's own list. A conversation has several roots where its beginning was edited.
Conversations that begin alike share a root: an event belongs to the one it names.
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

# Events that are kept of one conversation beside its rounds, and rounds that are kept of one root.
KEPT_EVENTS = 200
# Every round adds a line that names its root; so many of them are looked at, and so many roots.
KEPT_ROOT_LINES = 500
MAX_ROOTS = 50
# Checkpoints of one root and strategy that are looked at.
KEPT_PLACES = 200


@dataclass(frozen=True, slots=True)
class InstalledRound:
    """A round that requests may be given.

    Attributes:
        place: Where its checkpoint is kept, 64 bytes.
        event: What is known of it.
    """

    place: bytes
    event: Event


def build_round_line(tenant: str, root: bytes, event: Event, ttl_s: float) -> ListItem:
    """The line to commit with the checkpoint that an event tells of; `event.place` says where that is."""
    return ListItem(round_events_key(tenant, root), to_fields(event), ttl_s, KEPT_EVENTS)


def _parse_events(lines: Iterable[Fields]) -> list[Event]:
    return [event for line in lines if (event := from_fields(line)) is not None]


def _merge_outcomes(events: Iterable[Event]) -> list[Event]:
    """The events, oldest first; rounds with what became of them: put in force, counted by the upstream."""
    ordered = sorted(events, key=lambda event: event.at)
    rounds = {index: event for index, event in enumerate(ordered) if event.kind == COMPACTED}
    installed: set[str] = set()
    merged: list[Event | None] = list(ordered)
    for position, event in enumerate(ordered):
        if event.kind == MEASURED or (event.kind == INSTALLED and event.place in installed):
            merged[position] = None  # another replica may have put the same round in force
        if event.kind in {MEASURED, INSTALLED} and (index := _find_round_index(event, rounds)) is not None:
            merged[index] = rounds[index] = _apply_outcome(rounds[index], event)
        if event.kind == INSTALLED:
            installed.add(event.place)
    return [event for event in merged if event is not None]


def _apply_outcome(round_event: Event, event: Event) -> Event:
    """A round with what happened to it afterwards; the first count stands."""
    if event.kind == INSTALLED:
        return replace(round_event, outcome=event.outcome)
    return (
        replace(round_event, tokens_real=event.tokens_real)
        if round_event.tokens_real is None
        else round_event
    )


def _find_round_index(later: Event, rounds: Mapping[int, Event]) -> int | None:
    """Which round it is about: the one at that place, else the newest before it that has its number."""
    placed = [index for index, event in rounds.items() if event.place and event.place == later.place]
    named = [
        index
        for index, event in rounds.items()
        if (event.strategy, event.round) == (later.strategy, later.round) and event.at <= later.at
    ]
    return next(iter(placed or reversed(named)), None)


class EventHistory:
    """Keeps and reads events, on one event loop. No method raises because of the store.

    Args:
        records: Where they are kept.
        ttl_s: Seconds that they are kept after the newest.
    """

    def __init__(self, records: RecordStore, ttl_s: float) -> None:
        self._records = records
        self._ttl_s = ttl_s

    async def record_event(self, tenant: str, event: Event) -> bool:
        """Add an event that is no round to those of its conversation. Whether it was saved."""
        key = events_key(tenant, event.conversation)
        return await self._records.append_line(
            key, to_fields(event), ttl_s=self._ttl_s, max_lines=KEPT_EVENTS
        )

    async def record_root(self, tenant: str, conversation: str, root: bytes) -> None:
        """A conversation has rounds under this root. To be said before each of them is saved.

        Where the conversation was forgotten since the round was begun, so is the root: nobody would find it.
        """
        key, fields = roots_key(tenant, conversation), {"root": root.hex()}
        if self._records.deletion_fence.is_deleted(key):
            self._records.deletion_fence.add_deletion(scope_prefix(tenant, root))
            return
        await self._records.append_line(key, fields, ttl_s=self._ttl_s, max_lines=KEPT_ROOT_LINES)

    async def list_roots(self, tenant: str, conversation: str, most: int = MAX_ROOTS) -> tuple[bytes, ...]:
        """The roots of a conversation, the one that was used last first; so many at most."""
        lines = await self._records.read_tail(roots_key(tenant, conversation), KEPT_ROOT_LINES)
        found = (_parse_hex(line.get("root")) for line in reversed(lines))
        return tuple(dict.fromkeys(root for root in found if root))[:most]

    async def list_events(self, tenant: str, conversation: str) -> list[Event]:
        """The events of a conversation, oldest first; a round says what the upstream counted after it."""
        lines = await self._records.read_tail(events_key(tenant, conversation), KEPT_EVENTS)
        events = _parse_events(lines)
        for root in await self.list_roots(tenant, conversation):
            rounds = _parse_events(await self._records.read_tail(round_events_key(tenant, root), KEPT_EVENTS))
            events += [event for event in rounds if event.conversation == conversation]
        return _merge_outcomes(events)

    async def list_installed_rounds(self, tenant: str, conversation: str) -> list[InstalledRound]:
        """The installed rounds that were made in a conversation, of every strategy, newest first.

        A round made ahead of need is none until it is installed; one that was shortened further since it was
        made has no event of its own, and its checkpoint tells what is known.
        """
        events = await self.list_events(tenant, conversation)
        round_events = {event.place: event for event in events if event.kind == COMPACTED and event.place}
        found: list[InstalledRound] = []
        for root in await self.list_roots(tenant, conversation):
            for strategy in STRATEGIES:
                found += await self._read_installed_rounds(tenant, root, strategy, round_events)
        ours = [each for each in found if each.event.conversation == conversation]
        ours.sort(key=lambda each: each.event.at)
        return ours[::-1]

    async def _read_installed_rounds(
        self, tenant: str, root: bytes, strategy: str, round_events: Mapping[str, Event]
    ) -> list[InstalledRound]:
        """Those of one list, in its order. Without an event a round is as old as the one before it."""
        lines = await self._records.read_tail(checkpoint_list_key(tenant, root, strategy), KEPT_PLACES)
        places = list(dict.fromkeys(filter(None, (_parse_hex(line.get("place")) for line in lines))))
        silent = [place for place in places if place.hex() not in round_events]
        stored = (
            await self._records.get_many(checkpoint_keys(tenant, root, strategy, silent)) if silent else []
        )
        read = dict(zip(silent, stored, strict=True))
        found: list[InstalledRound] = []
        at = 0.0
        for place in places:
            event = round_events.get(place.hex()) or _build_event(place, read.get(place), at)
            if event is not None:
                at = max(at, event.at)
                found.append(InstalledRound(place, event))
        return found


def _build_event(place: bytes, fields: Fields | None, at: float) -> Event | None:
    """What a checkpoint says of its round; None if there is none."""
    made = checkpoint.from_fields(fields) if fields else None
    if made is None:
        return None
    return Event(
        COMPACTED,
        at,
        made.conversation,
        strategy=made.strategy,
        round=made.round,
        place=place.hex(),
        tokens_before=made.tokens_before,
        tokens_after=made.tokens_after,
        summary=made.summary,
    )


def _parse_hex(digits: object) -> bytes:
    """The bytes that hex digits stand for; none if they are none."""
    try:
        return bytes.fromhex(digits) if isinstance(digits, str) else b""
    except ValueError:
        return b""
