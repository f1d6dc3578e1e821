"""The live feed: current events and exchanges of all workers and replicas.

The feed holds figures and ids, but no text of a conversation. A reader of the feed is called a follower.
Events are always written. Exchanges are written only while any process has a follower, and then at most
`EXCHANGES_PER_S` per second and process. Events and exchanges have separate lists, so that the many
exchanges of a busy server do not push out events.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import suppress
from heapq import merge
from itertools import count
from operator import attrgetter
from secrets import token_hex
from typing import Any, NamedTuple

import structlog

from compaction_proxy.core.event import (
    CONTENT_FIELDS,
    FAILURE_KINDS,
    MEASURED,
    Event,
    parse_number,
    to_fields,
)
from compaction_proxy.storage.keys import live_feed_key
from compaction_proxy.storage.records import Fields, ListItem, RecordStore
from compaction_proxy.support.fail_open import suppress_and_report
from compaction_proxy.support.log_events import FEED_NOT_READ
from compaction_proxy.telemetry.usage import ExchangeEntry, get_entry_time, to_line

# Fields that are removed from an event: texts of the conversation, and the ids of messages.
HIDDEN_FIELDS = CONTENT_FIELDS | {"message_ids"}

COMPACTION = "compaction"
EXCHANGE = "exchange"
LOST = "lost"

POLL_S = 1.0
MAX_LINES = {COMPACTION: 2_000, EXCHANGE: 1_000}
_LISTS = {COMPACTION: "events", EXCHANGE: "exchanges"}
# Number of lines that a poll reads first. If more lines are new since the last poll, it reads the whole list.
POLL_LINES = 64
EXCHANGES_PER_S = 50
# Number of events that may wait to be written.
MAX_WAITING = 1_000
# Number of new items that a follower gets from one poll. If there are more, the oldest items are dropped.
MAX_FOLLOWER_ITEMS = 500
LISTENER_TTL_S = 60.0
LISTENER_CHECK_S = 5.0
_WRITER_BYTES = 4

_log = structlog.get_logger()


class FeedItem(NamedTuple):
    """One item of the live feed.

    Attributes:
        id: Unique id that rises with time.
        kind: `compaction` (an event), `exchange`, or `lost` (the follower was too slow, and items were
            dropped).
        fields: For an event, its fields without texts and message ids. For an exchange, its fields and its
            `conversation` if that is known. For `lost`, the number of dropped items in the field `lost`.
    """

    id: str
    kind: str
    fields: Fields


def _parse_item(line: Fields) -> FeedItem | None:
    name, kind, fields = line.get("id"), line.get("kind"), line.get("fields")
    if isinstance(name, str) and isinstance(kind, str) and isinstance(fields, Mapping):
        return FeedItem(name, kind, fields)
    return None


def _to_exchange_fields(entry: ExchangeEntry) -> dict[str, Any]:
    known = {} if entry.conversation is None else {"conversation": entry.conversation}
    return {**to_line(entry), **known}


class LiveFeed:
    """Publishes items and lets followers read them. Use it on one event loop.

    No method raises if the store fails.

    Args:
        records: Store for the lists of items.
        ttl_s: Lifetime of a list after its newest line, in seconds.
        now: Returns the seconds since the epoch.
    """

    def __init__(self, records: RecordStore, ttl_s: float, now: Callable[[], float] = time.time) -> None:
        self._records = records
        self._ttl_s = ttl_s
        self._now = now
        self._writer = token_hex(_WRITER_BYTES)
        self._numbers = count()
        self._events: deque[FeedItem] = deque(maxlen=MAX_WAITING)
        # The newest exchanges. They become items in `flush`, because most processes have no follower.
        self._exchanges: deque[ExchangeEntry] = deque(maxlen=EXCHANGES_PER_S)
        self._follower_count = 0
        self._announced_at = -math.inf
        self._has_remote_followers = False
        self._next_check_at = 0.0
        self._closing = asyncio.Event()

    @property
    def has_followers(self) -> bool:
        """Whether this process has a follower, or the last check found one in another process."""
        return self._follower_count > 0 or self._has_remote_followers

    def on_event(self, _tenant: str, event: Event) -> None:
        """Queues an event for the next flush (an `EventListener`). Ignores `MEASURED` events."""
        if event.kind != MEASURED:
            fields = {name: value for name, value in to_fields(event).items() if name not in HIDDEN_FIELDS}
            self._events.append(self._create_item(COMPACTION, fields))

    def add_exchanges(self, entries: Iterable[ExchangeEntry]) -> None:
        """Queues exchanges for the next flush. Only the newest `EXCHANGES_PER_S` stay queued."""
        self._exchanges.extend(entries)

    async def flush(self) -> None:
        """Writes the queued items. Drops the queued exchanges if no process has a follower.

        Call it once a second: each call writes at most `EXCHANGES_PER_S` exchanges.
        """
        await self._check_remote_followers()
        if not self.has_followers:
            self._exchanges.clear()
        if not self._records.is_in_use:
            return
        if events := list(self._events):
            self._events.clear()
            if not await self._write_items(COMPACTION, events):
                self._events.extendleft(reversed(events[: MAX_WAITING - len(self._events)]))
        if self._exchanges:
            entries = sorted(self._exchanges, key=get_entry_time)
            self._exchanges.clear()
            items = [self._create_item(EXCHANGE, _to_exchange_fields(entry)) for entry in entries]
            if not await self._write_items(EXCHANGE, items):
                self._exchanges.extendleft(reversed(entries[: EXCHANGES_PER_S - len(self._exchanges)]))

    async def list_recent_events(self, limit: int, *, failures: bool = False) -> list[FeedItem]:
        """Returns the newest events, newest first. With `failures`, returns only failures."""
        items = await self._read_latest(COMPACTION, MAX_LINES[COMPACTION] if failures else limit)
        wanted = [item for item in items if not failures or item.fields.get("kind") in FAILURE_KINDS]
        return wanted[::-1][:limit]

    async def follow(self, after_id: str | None = None) -> AsyncGenerator[FeedItem, None]:
        """Yields the stored items that are newer than the item with the id `after_id`, then new items.

        Without `after_id`, yields only new items. Reads the store once a second. If more than
        `MAX_FOLLOWER_ITEMS` are new, drops the oldest ones and yields a `lost` item first.

        Ends when the feed is closed, or when the reader closes the generator (`aclose`).
        """
        newest_ids = dict.fromkeys(_LISTS, after_id or f"{int(self._now() * 1000):012x}")
        self._follower_count += 1
        try:
            while not self._closing.is_set():
                items: list[FeedItem] = []
                with suppress_and_report(_log_poll_failure):
                    await self._announce_follower()
                    items = await self._read_new_items(newest_ids)
                lost = len(items) - MAX_FOLLOWER_ITEMS
                if lost > 0:
                    yield FeedItem(items[lost].id, LOST, {"lost": lost})
                for item in items[-MAX_FOLLOWER_ITEMS:]:
                    yield item
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), POLL_S)
        finally:
            self._follower_count -= 1

    async def close(self) -> None:
        """Ends `follow` for all followers and writes the queued items."""
        self._closing.set()
        await self.flush()

    def _create_item(self, kind: str, fields: Fields) -> FeedItem:
        name = f"{int(self._now() * 1000):012x}{self._writer}{next(self._numbers):06x}"
        return FeedItem(name, kind, fields)

    async def _write_items(self, kind: str, items: list[FeedItem]) -> bool:
        key, limit = live_feed_key(_LISTS[kind]), MAX_LINES[kind]
        return await self._records.write(
            [ListItem(key, item._asdict(), self._ttl_s, limit) for item in items]
        )

    async def _check_remote_followers(self) -> None:
        """Checks in the store whether other processes have followers, at most once in `LISTENER_CHECK_S`.

        Skips the check if this process has a follower or no exchanges are queued: the result is not needed.
        """
        if self._follower_count or not self._exchanges or self._next_check_at > self._now():
            return
        self._next_check_at = self._now() + LISTENER_CHECK_S
        [fields] = await self._records.get_many([live_feed_key("listening")], bypass_cache=True)
        until = parse_number((fields or {}).get("until"))
        self._has_remote_followers = until is not None and until > self._now()

    async def _read_latest(self, kind: str, limit: int) -> list[FeedItem]:
        lines = await self._records.read_tail(live_feed_key(_LISTS[kind]), limit)
        return [item for line in lines if (item := _parse_item(line)) is not None]

    async def _read_newer(self, kind: str, after: str) -> list[FeedItem]:
        """Returns the items behind the item with the id `after`.

        If this item is no longer in the list, returns the items with a higher id.
        """
        items = await self._read_latest(kind, POLL_LINES)
        if len(items) == POLL_LINES and items[0].id > after and all(item.id != after for item in items):
            items = await self._read_latest(kind, MAX_LINES[kind])
        places = (place for place, item in enumerate(items) if item.id == after)
        place = next(places, None)
        return items[place + 1 :] if place is not None else [item for item in items if item.id > after]

    async def _read_new_items(self, newest_ids: dict[str, str]) -> list[FeedItem]:
        """Returns the items behind those that `newest_ids` names for each list. Updates the ids."""
        found = {kind: await self._read_newer(kind, newest_id) for kind, newest_id in newest_ids.items()}
        newest_ids.update({kind: items[-1].id for kind, items in found.items() if items})
        return list(merge(*found.values(), key=attrgetter("id")))

    async def _announce_follower(self) -> None:
        """Records in the store that this process has a follower, so that other processes write exchanges."""
        if self._now() - self._announced_at > LISTENER_TTL_S / 2:
            self._announced_at = self._now()
            fields = {"until": self._announced_at + LISTENER_TTL_S}
            await self._records.overwrite(live_feed_key("listening"), fields, ttl_s=LISTENER_TTL_S)


def _log_poll_failure(error: BaseException) -> None:
    _log.warning(FEED_NOT_READ, error=type(error).__name__)
