"""What has happened to a conversation: its rounds, and everything that is no round.

The event of a round is committed with its checkpoint, in the scope of the conversation's root; other events
stand in the conversation's own list. A conversation has several roots where its beginning was edited.
Conversations that begin alike share a root: an event belongs to the one it names.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from proxy.core.event import COMPACTED, MEASURED, Event, from_fields, to_fields
from proxy.core.keys import events_key, roots_key, rounds_key
from proxy.storage.records import Fields, Line, Records

# Events that are kept of one conversation beside its rounds, and rounds that are kept of one root.
KEPT_EVENTS = 200
# Every round adds a line that names its root; so many of them are looked at, and so many roots.
KEPT_ROOT_LINES = 500
MAX_ROOTS = 50


@dataclass(frozen=True, slots=True)
class Installed:
    """A round that requests are answered with.

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


def _of_round(event: Event) -> tuple[str, int | None, str]:
    return event.strategy, event.round, event.place


def _measured(events: Iterable[Event]) -> list[Event]:
    """The events, rounds with what the upstream counted after them; oldest first."""
    ordered = sorted(events, key=lambda event: event.at)
    real: dict[tuple[str, int | None, str], int | None] = {}
    for event in ordered:
        if event.kind == MEASURED:
            real.setdefault(_of_round(event), event.tokens_real)
    return [
        replace(event, tokens_real=event.tokens_real or real.get(_of_round(event)))
        if event.kind == COMPACTED
        else event
        for event in ordered
        if event.kind != MEASURED
    ]


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
        """A conversation has rounds under this root. To be said before each of them is saved."""
        key, fields = roots_key(tenant, conversation), {"root": root.hex()}
        await self._records.append(key, fields, ttl_s=self._ttl_s, keep=KEPT_ROOT_LINES)

    async def roots(self, tenant: str, conversation: str) -> tuple[bytes, ...]:
        """The roots of a conversation, the one that was used last first; 50 at most."""
        lines = await self._records.tail(roots_key(tenant, conversation), KEPT_ROOT_LINES)
        found = (_bytes(line.get("root")) for line in reversed(lines))
        return tuple(dict.fromkeys(root for root in found if root))[:MAX_ROOTS]

    async def of(self, tenant: str, conversation: str) -> list[Event]:
        """The events of a conversation, oldest first; a round says what the upstream counted after it."""
        lines = await self._records.tail(events_key(tenant, conversation), KEPT_EVENTS)
        events = _read(lines)
        for root in await self.roots(tenant, conversation):
            rounds = _read(await self._records.tail(rounds_key(tenant, root), KEPT_EVENTS))
            events += [event for event in rounds if event.conversation == conversation]
        return _measured(events)

    async def places(self, tenant: str, conversation: str) -> list[Installed]:
        """The rounds that were made in a conversation, of every strategy, newest first."""
        rounds = [event for event in await self.of(tenant, conversation) if event.kind == COMPACTED]
        found = {place: event for event in rounds if (place := _bytes(event.place))}
        return [Installed(place, event) for place, event in reversed(found.items())]


def _bytes(digits: object) -> bytes:
    """The bytes that hex digits stand for; none if they are none."""
    try:
        return bytes.fromhex(digits) if isinstance(digits, str) else b""
    except ValueError:
        return b""
