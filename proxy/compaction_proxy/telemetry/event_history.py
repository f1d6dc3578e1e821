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
    checkpoints_key,
    events_key,
    roots_key,
    rounds_key,
    scope_prefix,
)
from compaction_proxy.storage.records import Fields, Line, Records

# Events that are kept of one conversation beside its rounds, and rounds that are kept of one root.
KEPT_EVENTS = 200
# Every round adds a line that names its root; so many of them are looked at, and so many roots.
KEPT_ROOT_LINES = 500
MAX_ROOTS = 50
# Checkpoints of one root and strategy that are looked at.
KEPT_PLACES = 200


@dataclass(frozen=True, slots=True)
class Installed:
    """A round that requests may be given.

    Attributes:
        place: Where its checkpoint is kept, 64 bytes.
        event: What is known of it.
    """

    place: bytes
    event: Event


def round_line(tenant: str, root: bytes, event: Event, ttl_s: float) -> Line:
    """The line to commit with the checkpoint that an event tells of; `event.place` says where that is."""
    return Line(rounds_key(tenant, root), to_fields(event), ttl_s, KEPT_EVENTS)


def _read(lines: Iterable[Fields]) -> list[Event]:
    return [event for line in lines if (event := from_fields(line)) is not None]


def _joined(events: Iterable[Event]) -> list[Event]:
    """The events, oldest first; rounds with what became of them: put in force, counted by the upstream."""
    ordered = sorted(events, key=lambda event: event.at)
    rounds = {index: event for index, event in enumerate(ordered) if event.kind == COMPACTED}
    installed: set[str] = set()
    told: list[Event | None] = list(ordered)
    for position, event in enumerate(ordered):
        if event.kind == MEASURED or (event.kind == INSTALLED and event.place in installed):
            told[position] = None  # another replica may have put the same round in force
        if event.kind in {MEASURED, INSTALLED} and (index := _about(event, rounds)) is not None:
            told[index] = rounds[index] = _followed(rounds[index], event)
        if event.kind == INSTALLED:
            installed.add(event.place)
    return [event for event in told if event is not None]


def _followed(made: Event, event: Event) -> Event:
    """A round with what happened to it afterwards; the first count stands."""
    if event.kind == INSTALLED:
        return replace(made, outcome=event.outcome)
    return replace(made, tokens_real=event.tokens_real) if made.tokens_real is None else made


def _about(later: Event, rounds: Mapping[int, Event]) -> int | None:
    """Which round it is about: the one at that place, else the newest before it that has its number."""
    placed = [index for index, event in rounds.items() if event.place and event.place == later.place]
    named = [
        index
        for index, event in rounds.items()
        if (event.strategy, event.round) == (later.strategy, later.round) and event.at <= later.at
    ]
    return next(iter(placed or reversed(named)), None)


class History:
    """Keeps and reads events, on one event loop. No method raises because of the store.

    Args:
        records: Where they are kept.
        ttl_s: Seconds that they are kept after the newest.
    """

    def __init__(self, records: Records, ttl_s: float) -> None:
        self._records = records
        self._ttl_s = ttl_s

    async def note(self, tenant: str, event: Event) -> bool:
        """Add an event that is no round to those of its conversation. Whether it was saved."""
        key = events_key(tenant, event.conversation)
        return await self._records.append(key, to_fields(event), ttl_s=self._ttl_s, keep=KEPT_EVENTS)

    async def rooted(self, tenant: str, conversation: str, root: bytes) -> None:
        """A conversation has rounds under this root. To be said before each of them is saved.

        Where the conversation was forgotten since the round was begun, so is the root: nobody would find it.
        """
        key, fields = roots_key(tenant, conversation), {"root": root.hex()}
        if self._records.outdated.covers(key):
            self._records.outdated.add(scope_prefix(tenant, root))
            return
        await self._records.append(key, fields, ttl_s=self._ttl_s, keep=KEPT_ROOT_LINES)

    async def roots(self, tenant: str, conversation: str, most: int = MAX_ROOTS) -> tuple[bytes, ...]:
        """The roots of a conversation, the one that was used last first; so many at most."""
        lines = await self._records.tail(roots_key(tenant, conversation), KEPT_ROOT_LINES)
        found = (_bytes(line.get("root")) for line in reversed(lines))
        return tuple(dict.fromkeys(root for root in found if root))[:most]

    async def of(self, tenant: str, conversation: str) -> list[Event]:
        """The events of a conversation, oldest first; a round says what the upstream counted after it."""
        lines = await self._records.tail(events_key(tenant, conversation), KEPT_EVENTS)
        events = _read(lines)
        for root in await self.roots(tenant, conversation):
            rounds = _read(await self._records.tail(rounds_key(tenant, root), KEPT_EVENTS))
            events += [event for event in rounds if event.conversation == conversation]
        return _joined(events)

    async def places(self, tenant: str, conversation: str) -> list[Installed]:
        """The installed rounds that were made in a conversation, of every strategy, newest first.

        A round made ahead of need is none until it is installed; one that was shortened further since it was
        made has no event of its own, and its checkpoint tells what is known.
        """
        events = await self.of(tenant, conversation)
        told = {event.place: event for event in events if event.kind == COMPACTED and event.place}
        found: list[Installed] = []
        for root in await self.roots(tenant, conversation):
            for strategy in STRATEGIES:
                found += await self._installed(tenant, root, strategy, told)
        ours = [each for each in found if each.event.conversation == conversation]
        ours.sort(key=lambda each: each.event.at)
        return ours[::-1]

    async def _installed(
        self, tenant: str, root: bytes, strategy: str, told: Mapping[str, Event]
    ) -> list[Installed]:
        """Those of one list, in its order. Without an event a round is as old as the one before it."""
        lines = await self._records.tail(checkpoints_key(tenant, root, strategy), KEPT_PLACES)
        places = list(dict.fromkeys(filter(None, (_bytes(line.get("place")) for line in lines))))
        silent = [place for place in places if place.hex() not in told]
        stored = await self._records.find(checkpoint_keys(tenant, root, strategy, silent)) if silent else []
        read = dict(zip(silent, stored, strict=True))
        found: list[Installed] = []
        at = 0.0
        for place in places:
            event = told.get(place.hex()) or _kept(place, read.get(place), at)
            if event is not None:
                at = max(at, event.at)
                found.append(Installed(place, event))
        return found


def _kept(place: bytes, fields: Fields | None, at: float) -> Event | None:
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


def _bytes(digits: object) -> bytes:
    """The bytes that hex digits stand for; none if they are none."""
    try:
        return bytes.fromhex(digits) if isinstance(digits, str) else b""
    except ValueError:
        return b""
