"""The live feed: what happens now, told by all workers and replicas, for whoever watches.

It holds figures and ids, no text of a conversation. Events always are told. Exchanges are told while somebody
listens, on any replica, and only some of them where there are many. Events and exchanges are two lists, so
that a busy server's exchanges drive out no event.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from itertools import chain, count
from secrets import token_hex
from typing import Any, NamedTuple

import structlog

from compaction_proxy.core.event import CONTENT, FAILURES, MEASURED, Event, number, to_fields
from compaction_proxy.storage.keys import feed_key
from compaction_proxy.storage.records import Fields, Line, Records
from compaction_proxy.support.fail_open import contained
from compaction_proxy.support.log_events import FEED_NOT_READ

# What is left out of an event: its text, and the messages' ids.
HIDDEN = CONTENT | {"message_ids"}

COMPACTION = "compaction"
EXCHANGE = "exchange"
LOST = "lost"

POLL_S = 1.0
KEPT = {COMPACTION: 2_000, EXCHANGE: 1_000}
_LISTS = {COMPACTION: "events", EXCHANGE: "exchanges"}
# Lines that a poll looks at first; all of them where more have come since the last one.
LATEST = 64
EXCHANGES_PER_S = 50
# Events that may wait to be written.
MAX_WAITING = 1_000
# Items that a follower may be behind; beyond it, it loses the oldest.
MAX_BEHIND = 500
LISTENING_S = 60.0
LOOK_EVERY_S = 5.0
_WRITER_BYTES = 4

_log = structlog.get_logger()


class Item(NamedTuple):
    """One thing that happened.

    Attributes:
        id: Rises with time; different everywhere.
        kind: `compaction` (an event), `exchange`, or `lost`: the follower was too slow for as many items as
            its field `lost` says.
        fields: Of an event without its text and its messages' ids, of an exchange with its `conversation`.
    """

    id: str
    kind: str
    fields: Fields


class _Follower:
    """What waits for one who watches."""

    def __init__(self) -> None:
        self.waiting: deque[Item] = deque(maxlen=MAX_BEHIND)
        self.lost = 0
        self.come = asyncio.Event()
        self._early: frozenset[str] = frozenset()

    def begin(self, items: list[Item]) -> None:
        """With these, in front of what has come meanwhile; nothing is told twice."""
        come = [item for item in self.waiting if item not in items]
        self.waiting.clear()
        for item in (*items, *come):
            self.tell(item)
        self._early = frozenset(item.id for item in items)

    def tell(self, item: Item) -> None:
        if item.id in self._early:
            return
        self.lost += len(self.waiting) == MAX_BEHIND
        self.waiting.append(item)
        self.come.set()

    def taken(self) -> list[Item]:
        """What waits, behind a word on what is lost."""
        lost = [Item(self.waiting[0].id, LOST, {"lost": self.lost})] if self.lost else []
        found = [*lost, *self.waiting]
        self.waiting.clear()
        self.lost = 0
        self.come.clear()
        return found


def _item(line: Fields) -> Item | None:
    name, kind, fields = line.get("id"), line.get("kind"), line.get("fields")
    if isinstance(name, str) and isinstance(kind, str) and isinstance(fields, Mapping):
        return Item(name, kind, fields)
    return None


def _told(event: Event) -> dict[str, Any]:
    return {name: value for name, value in to_fields(event).items() if name not in HIDDEN}


class Feed:
    """Tells and follows, on one event loop. No method raises because of the store.

    Args:
        records: Where the lists are kept.
        ttl_s: Seconds that they are kept after the newest line.
        now: Seconds since the epoch.
    """

    def __init__(self, records: Records, ttl_s: float, now: Callable[[], float] = time.time) -> None:
        self._records = records
        self._ttl_s = ttl_s
        self._now = now
        self._writer = token_hex(_WRITER_BYTES)
        self._numbers = count()
        self._events: deque[Item] = deque(maxlen=MAX_WAITING)
        self._exchanges: deque[Item] = deque(maxlen=EXCHANGES_PER_S)
        self._followers: set[_Follower] = set()
        self._poll: asyncio.Task[None] | None = None
        self._listened = False
        self._look_at = 0.0
        self._closed = False

    @property
    def listened(self) -> bool:
        """Whether anybody follows, here or elsewhere, as far as is known."""
        return bool(self._followers) or self._listened

    def tell(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Tell of something; written with the next flush. Of exchanges only the newest wait."""
        waiting = self._exchanges if kind == EXCHANGE else self._events
        waiting.append(Item(self._id(), kind, fields))

    def heard(self, _tenant: str, event: Event) -> None:
        """Tell of an event (an `announcing.Listener`), unless the upstream has only counted something."""
        if event.kind != MEASURED:
            self.tell(COMPACTION, _told(event))

    async def flush(self) -> None:
        """Write what waits. To be called once a second: that bounds the exchanges."""
        await self._look()
        if not self.listened:
            self._exchanges.clear()
        for kind, waiting in ((COMPACTION, self._events), (EXCHANGE, self._exchanges)):
            items = list(waiting)
            if not items or not self._records.in_use:
                continue
            waiting.clear()
            if not await self._records.write([self._line(kind, item) for item in items]):
                waiting.extendleft(reversed(items[: (waiting.maxlen or 0) - len(waiting)]))

    async def recent(self, limit: int, *, failures: bool = False) -> list[Item]:
        """The newest events, newest first; with `failures` only those that say that something went wrong."""
        items = await self._tail(COMPACTION, KEPT[COMPACTION] if failures else limit)
        wanted = [item for item in items if not failures or item.fields.get("kind") in FAILURES]
        return wanted[::-1][:limit]

    async def follow(self, after: str | None = None) -> AsyncGenerator[Item, None]:
        """Items as they come, with those since the one named `after`, until the feed is closed.

        Ends when it is closed by its reader (`aclose`), too.
        """
        follower = _Follower()
        self._join(follower)
        try:
            if after:
                follower.begin(await self._since(after))
            while not self._closed:
                for item in follower.taken():
                    yield item
                await follower.come.wait()
        finally:
            self._leave(follower)

    async def close(self) -> None:
        """End all that follow, and write what waits."""
        self._closed = True
        for follower in self._followers:
            follower.come.set()
        if self._poll is not None:
            self._poll.cancel()
            await asyncio.wait((self._poll,))
        await self.flush()

    def _id(self) -> str:
        return f"{int(self._now() * 1000):012x}{self._writer}{next(self._numbers):06x}"

    def _line(self, kind: str, item: Item) -> Line:
        fields = {"id": item.id, "kind": item.kind, "fields": item.fields}
        return Line(feed_key(_LISTS[kind]), fields, self._ttl_s, KEPT[kind])

    async def _look(self) -> None:
        """Find out whether anybody listens elsewhere, if that is worth a question."""
        if self._followers or not self._exchanges or self._look_at > self._now():
            return
        self._look_at = self._now() + LOOK_EVERY_S
        [found] = await self._records.find([feed_key("listening")], fresh=True)
        until = number((found or {}).get("until"))
        self._listened = until is not None and until > self._now()

    async def _tail(self, kind: str, limit: int) -> list[Item]:
        lines = await self._records.tail(feed_key(_LISTS[kind]), limit)
        return [item for line in lines if (item := _item(line)) is not None]

    async def _newer(self, kind: str, after: str) -> list[Item]:
        """The items behind the one with this id; if it is gone, those that are newer by the clock."""
        items = await self._tail(kind, LATEST)
        if len(items) == LATEST and items[0].id > after and all(item.id != after for item in items):
            items = await self._tail(kind, KEPT[kind])
        places = (place for place, item in enumerate(items) if item.id == after)
        place = next(places, None)
        return items[place + 1 :] if place is not None else [item for item in items if item.id > after]

    async def _since(self, after: str) -> list[Item]:
        found = [await self._newer(kind, after) for kind in _LISTS]
        return sorted(chain.from_iterable(found), key=lambda item: item.id)

    def _join(self, follower: _Follower) -> None:
        self._followers.add(follower)
        if self._poll is None:
            self._poll = asyncio.create_task(self._polling(f"{int(self._now() * 1000):012x}"))

    def _leave(self, follower: _Follower) -> None:
        self._followers.discard(follower)
        if not self._followers and self._poll is not None:
            self._poll.cancel()
            self._poll = None

    async def _polling(self, begun: str) -> None:
        """Look for all followers, once a second, and let the other processes know that somebody listens."""
        newest = dict.fromkeys(_LISTS, begun)
        said_at = -math.inf
        while True:
            with contained(_not_followed):
                if self._now() - said_at > LISTENING_S / 2:
                    said_at = self._now()
                    fields = {"until": said_at + LISTENING_S}
                    await self._records.keep(feed_key("listening"), fields, ttl_s=LISTENING_S)
                for kind in _LISTS:
                    for item in await self._newer(kind, newest[kind]):
                        newest[kind] = item.id
                        for follower in self._followers:
                            follower.tell(item)
            await asyncio.sleep(POLL_S)


def _not_followed(error: BaseException) -> None:
    _log.warning(FEED_NOT_READ, error=type(error).__name__)
