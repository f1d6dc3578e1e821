"""Writes and reads the live feed: the newest events, exchanges and upstream failures of all processes.

The feed contains figures and ids, but no text of a conversation. A reader of the feed is called a follower.
A process writes all its events. It writes exchanges and upstream failures only while any process has a
follower, and then at most `EXCHANGES_PER_S` a second. The store has separate lists for events and for
exchanges, so that the many exchanges of a busy server do not displace events.
"""

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Mapping
from itertools import chain, count
from secrets import token_hex
from typing import Any, NamedTuple

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
from compaction_proxy.support.log_events import FEED_NOT_READ
from compaction_proxy.telemetry.logs import suppress_and_log

# Fields of an event that the feed leaves out: texts of the conversation, and the ids of messages.
HIDDEN_FIELDS = CONTENT_FIELDS | {"message_ids"}

COMPACTION = "compaction"
EXCHANGE = "exchange"
UPSTREAM = "upstream"
LOST = "lost"

POLL_S = 1.0
MAX_LINES = {COMPACTION: 2_000, EXCHANGE: 1_000}
_LISTS = {COMPACTION: "events", EXCHANGE: "exchanges"}
# A poll (a read of the lists in the store) first reads this many lines of a list. If all of them are new
# since the last poll, it reads the whole list.
POLL_LINES = 64
EXCHANGES_PER_S = 50
# Maximum number of events that may wait to be written. If there are more, the oldest event is dropped.
MAX_WAITING = 1_000
# Maximum number of items that may wait for a follower to read them. If there are more, the oldest item is
# dropped.
MAX_FOLLOWER_ITEMS = 500
LISTENER_TTL_S = 60.0
LISTENER_CHECK_S = 5.0
_WRITER_BYTES = 4


class FeedItem(NamedTuple):
    """One item of the live feed.

    Attributes:
        id: Unique id. It begins with the time, so later items have higher ids. A `lost` item has the id of
            the item after it.
        kind: `compaction` (an event), `exchange`, `upstream` (failures of an upstream), or `lost` (the
            follower read too slowly, so items were dropped).
        fields: For an event, its fields without texts and message ids. For an exchange, its fields and its
            `conversation` if that is known. For `upstream`, the `target` and the `cause` of the failures,
            what the upstream calls the error if that is known (`error`), their `count` in one process since
            the item before, and the time of the item (`at`). For `lost`, the number of dropped items in the
            field `lost`.
    """

    id: str
    kind: str
    fields: Fields


class _Follower:
    """Queue of the items that one reader of the feed has not read yet."""

    def __init__(self) -> None:
        self.waiting: deque[FeedItem] = deque(maxlen=MAX_FOLLOWER_ITEMS)
        self.lost = 0
        self.has_items = asyncio.Event()
        self._prepended_ids: frozenset[str] = frozenset()

    def prepend_items(self, items: list[FeedItem]) -> None:
        """Puts older items, `items`, before the items that already wait.

        An item may occur both in `items` and among the waiting items, or `push_item` may get it again later.
        The follower still gets it only once.
        """
        newer = [item for item in self.waiting if item not in items]
        self.waiting.clear()
        for item in (*items, *newer):
            self.push_item(item)
        self._prepended_ids = frozenset(item.id for item in items)

    def push_item(self, item: FeedItem) -> None:
        if item.id in self._prepended_ids:
            return
        self.lost += len(self.waiting) == MAX_FOLLOWER_ITEMS
        self.waiting.append(item)
        self.has_items.set()

    def take_items(self) -> list[FeedItem]:
        """Removes and returns the waiting items. If items were dropped, a `lost` item comes first."""
        lost = [FeedItem(self.waiting[0].id, LOST, {"lost": self.lost})] if self.lost else []
        items = [*lost, *self.waiting]
        self.waiting.clear()
        self.lost = 0
        self.has_items.clear()
        return items


def _parse_item(line: Fields) -> FeedItem | None:
    name, kind, fields = line.get("id"), line.get("kind"), line.get("fields")
    if isinstance(name, str) and isinstance(kind, str) and isinstance(fields, Mapping):
        return FeedItem(name, kind, fields)
    return None


class LiveFeed:
    """Publishes items and lets followers read them. Not thread-safe: use it on one event loop.

    No method raises an error if the store fails.

    Args:
        records: Store for the lists of items.
        ttl_s: Seconds for which a list is kept after a line was last added.
        now: Returns the seconds since the epoch.
    """

    def __init__(self, records: RecordStore, ttl_s: float, now: Callable[[], float] = time.time) -> None:
        self._records = records
        self._ttl_s = ttl_s
        self._now = now
        self._writer = token_hex(_WRITER_BYTES)
        self._numbers = count()
        self._events: deque[FeedItem] = deque(maxlen=MAX_WAITING)
        # The list of exchanges also takes failures of upstreams.
        self._exchanges: deque[FeedItem] = deque(maxlen=EXCHANGES_PER_S)
        self._upstream_failures: Counter[tuple[str, str, str]] = Counter()
        self._followers: set[_Follower] = set()
        self._poll: asyncio.Task[None] | None = None
        self._has_remote_followers = False
        self._next_check_at = 0.0
        self._closed = False

    @property
    def has_followers(self) -> bool:
        """Whether this process has a follower, or found one in another process at its last check."""
        return bool(self._followers) or self._has_remote_followers

    def publish(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Queues an item for the next `flush`.

        At most `EXCHANGES_PER_S` exchanges and upstream failures, and at most `MAX_WAITING` events stay
        queued. The oldest are dropped.
        """
        waiting = self._events if kind == COMPACTION else self._exchanges
        item_id = f"{int(self._now() * 1000):012x}{self._writer}{next(self._numbers):06x}"
        waiting.append(FeedItem(item_id, kind, fields))

    def on_event(self, _tenant: str, event: Event) -> None:
        """Publishes an event. Ignores `MEASURED` events. This is an `event_history.EventListener`."""
        if event.kind != MEASURED:
            fields = {name: value for name, value in to_fields(event).items() if name not in HIDDEN_FIELDS}
            self.publish(COMPACTION, fields)

    def record_upstream_failure(self, target: str, cause: str, error: str = "") -> None:
        """Counts a failure of an upstream (`target`), which the next `flush` publishes."""
        self._upstream_failures[target, cause, error] += 1

    async def flush(self) -> None:
        """Writes the queued items. Drops all of them that are no events if no process has a follower.

        Each call writes at most `EXCHANGES_PER_S` exchanges and upstream failures. Call it once a second.
        """
        for (target, cause, error), number in self._upstream_failures.items():
            fields = {"at": self._now(), "target": target, "cause": cause, "count": number}
            self.publish(UPSTREAM, {**fields, "error": error} if error else fields)
        self._upstream_failures.clear()
        await self._check_remote_followers()
        if not self.has_followers:
            self._exchanges.clear()
        for kind, waiting in ((COMPACTION, self._events), (EXCHANGE, self._exchanges)):
            items = list(waiting)
            if not items or not self._records.is_in_use:
                continue
            waiting.clear()
            if not await self._records.write([self._build_line(kind, item) for item in items]):
                waiting.extendleft(reversed(items[: (waiting.maxlen or 0) - len(waiting)]))

    async def list_recent_events(self, limit: int, *, failures: bool = False) -> list[FeedItem]:
        """Returns the latest events, at most `limit`, newest first.

        If `failures` is true, returns only events that report a failure.
        """
        items = await self._read_latest(COMPACTION, MAX_LINES[COMPACTION] if failures else limit)
        wanted = [item for item in items if not failures or item.fields.get("kind") in FAILURE_KINDS]
        return wanted[::-1][:limit]

    async def follow(self, after_id: str | None = None) -> AsyncGenerator[FeedItem, None]:
        """Yields the stored items that are newer than the item with the id `after_id`, then new items.

        Without `after_id`, yields only new items. If the caller reads too slowly, so that more than
        `MAX_FOLLOWER_ITEMS` items wait, drops the oldest of them and yields a `lost` item.

        Ends when `close` is called, or when the caller closes the generator (`aclose`).
        """
        follower = _Follower()
        self._add_follower(follower)
        try:
            if after_id:
                follower.prepend_items(await self._read_missed(after_id))
            while not self._closed:
                for item in follower.take_items():
                    yield item
                await follower.has_items.wait()
        finally:
            self._remove_follower(follower)

    async def close(self) -> None:
        """Ends all generators that `follow` has returned, and writes the queued items."""
        self._closed = True
        for follower in self._followers:
            follower.has_items.set()
        if self._poll is not None:
            self._poll.cancel()
            await asyncio.wait((self._poll,))
        await self.flush()

    def _build_line(self, kind: str, item: FeedItem) -> ListItem:
        fields = {"id": item.id, "kind": item.kind, "fields": item.fields}
        return ListItem(live_feed_key(_LISTS[kind]), fields, self._ttl_s, MAX_LINES[kind])

    async def _check_remote_followers(self) -> None:
        """Checks in the store whether other processes have followers.

        Does so at most once in `LISTENER_CHECK_S` seconds. Does nothing if this process has a follower or no
        exchanges are queued, because the result of the check would then have no effect.
        """
        if self._followers or not self._exchanges or self._next_check_at > self._now():
            return
        self._next_check_at = self._now() + LISTENER_CHECK_S
        [fields] = await self._records.get_many([live_feed_key("listening")], bypass_cache=True)
        until = parse_number((fields or {}).get("until"))
        self._has_remote_followers = until is not None and until > self._now()

    async def _read_latest(self, kind: str, limit: int) -> list[FeedItem]:
        lines = await self._records.read_tail(live_feed_key(_LISTS[kind]), limit)
        return [item for line in lines if (item := _parse_item(line)) is not None]

    async def _read_newer(self, kind: str, after: str) -> list[FeedItem]:
        """Returns the stored items of this kind that follow the item with the id `after`.

        If that item is no longer stored, returns the items with a higher id.
        """
        items = await self._read_latest(kind, POLL_LINES)
        if len(items) == POLL_LINES and items[0].id > after and all(item.id != after for item in items):
            items = await self._read_latest(kind, MAX_LINES[kind])
        places = (place for place, item in enumerate(items) if item.id == after)
        place = next(places, None)
        return items[place + 1 :] if place is not None else [item for item in items if item.id > after]

    async def _read_missed(self, after: str) -> list[FeedItem]:
        missed = [await self._read_newer(kind, after) for kind in _LISTS]
        return sorted(chain.from_iterable(missed), key=lambda item: item.id)

    def _add_follower(self, follower: _Follower) -> None:
        self._followers.add(follower)
        if self._poll is None:
            self._poll = asyncio.create_task(self._poll_store(f"{int(self._now() * 1000):012x}"))

    def _remove_follower(self, follower: _Follower) -> None:
        self._followers.discard(follower)
        if not self._followers and self._poll is not None:
            self._poll.cancel()
            self._poll = None

    async def _poll_store(self, start_id: str) -> None:
        """Reads the new items in the store once a second and passes them to all followers of this process.

        Also records in the store that this process has followers, so that other processes write exchanges.
        """
        newest = dict.fromkeys(_LISTS, start_id)
        marked_at = -math.inf
        while True:
            with suppress_and_log(FEED_NOT_READ):
                if self._now() - marked_at > LISTENER_TTL_S / 2:
                    marked_at = self._now()
                    fields = {"until": marked_at + LISTENER_TTL_S}
                    await self._records.overwrite(live_feed_key("listening"), fields, ttl_s=LISTENER_TTL_S)
                for kind in _LISTS:
                    for item in await self._read_newer(kind, newest[kind]):
                        newest[kind] = item.id
                        for follower in self._followers:
                            follower.push_item(item)
            await asyncio.sleep(POLL_S)
