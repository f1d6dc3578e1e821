"""Whose a conversation is, for those who know nothing but its id, and which there are.

A conversation's id is a keyed digest of its tenant too, so no two tenants share one. Which there are stands
in a list for each day, with a line for each hour in which a process has seen one.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime
from typing import NamedTuple

from compaction_proxy.core.event import number
from compaction_proxy.storage.keys import conversation_key, owner_key, recent_key, tenant_key
from compaction_proxy.storage.records import Fields, Records

# What was written is not written again for so long, in seconds.
NOTED_FOR_S = 60.0
# What could not be written is tried again after so long.
RETRY_S = 1.0
MAX_CONVERSATIONS = 10_000
# What stands in the list of a day is not added to it again for so long, in seconds.
LISTED_FOR_S = 3_600.0
# Lines that are kept of a day, and days that are looked at.
KEPT_LINES = 10_000
MAX_DAYS = 31
DAY_S = 86_400


class Seen(NamedTuple):
    """A conversation that there is.

    Attributes:
        id: Its id, `c_…`.
        tenant: Whose it is.
        at: Seconds since the epoch of its last request.
    """

    id: str
    tenant: str
    at: float


def _day(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d")


def _seen(line: Fields) -> Seen | None:
    known, tenant, at = line.get("id"), line.get("tenant"), number(line.get("at"))
    if isinstance(known, str) and isinstance(tenant, str) and at is not None:
        return Seen(known, tenant, at)
    return None


class Owners:
    """Remembers tenants by conversation, on one event loop. No method raises because of the store.

    Args:
        records: Where they are kept.
        ttl_s: Seconds that they are kept after the last request.
        clock: Monotonic seconds.
        now: Seconds since the epoch.
    """

    def __init__(
        self,
        records: Records,
        ttl_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._records = records
        self._ttl_s = ttl_s
        self._clock = clock
        self._now = now
        # By conversation, with its tenant: until when its line of the day need not be added again.
        self._listed: OrderedDict[str, float] = OrderedDict()
        self._away = False
        # By conversation, with its tenant: until when it need not be written. All that is held of it is here.
        self._noted: OrderedDict[str, float] = OrderedDict()
        records.forgetters.append(self._forget)

    async def note(self, tenant: str, conversation: str) -> None:
        """A conversation of this tenant is in use. Writes once a minute at most, behind an answer.

        Once a second while the store fails; not at all for a request that began before it was forgotten.
        """
        self._look_back()
        key, outdated = conversation_key(tenant, conversation), self._records.outdated
        if self._noted.get(key, 0.0) > self._clock() or outdated.covers(key):
            return
        self._hold(key, NOTED_FOR_S)
        saved = await self._records.keep(tenant_key(conversation), {"tenant": tenant}, ttl_s=self._ttl_s)
        if outdated.covers(key):
            await self.forget(conversation)
        elif not saved:
            self._hold(key, RETRY_S)
        elif self._listed.get(key, 0.0) <= self._now():
            await self._list(key, Seen(conversation, tenant, self._now()))

    def _look_back(self) -> None:
        """Once a store is back that was away, believe nothing to be written: it may be empty."""
        if not self._records.in_use:
            self._away = True
        elif self._away:
            self._away = False
            self._listed.clear()
            self._noted = OrderedDict.fromkeys(self._noted, 0.0)

    async def of(self, conversation: str) -> str | None:
        """The tenant of a conversation; None if it is not known."""
        [fields] = await self._records.find([tenant_key(conversation)], fresh=True)
        tenant = (fields or {}).get("tenant")
        if not isinstance(tenant, str):
            return None
        key = conversation_key(tenant, conversation)
        if key not in self._noted:
            self._hold(key, 0.0)
        return tenant

    async def recent(self, limit: int) -> list[Seen]:
        """Conversations that there are, those last in use first; so many at most."""
        found: dict[str, Seen] = {}
        today = int(self._now() // DAY_S)
        for day in range(today, today - MAX_DAYS, -1):
            if len(found) >= limit:
                break
            await self._of_day(day, limit, found)
        seen = await self._living(list(found.values()))
        return sorted(seen, key=lambda each: each.at, reverse=True)[:limit]

    async def forget(self, conversation: str) -> None:
        """Remember nothing of a conversation, until it is in use again."""
        await self._records.forget(tenant_key(conversation))

    async def _list(self, key: str, seen: Seen) -> None:
        line = {"id": seen.id, "tenant": seen.tenant, "at": seen.at}
        listed = recent_key(_day(seen.at))
        if await self._records.append(listed, line, ttl_s=self._ttl_s, keep=KEPT_LINES):
            # The next day has a list of its own.
            self._listed[key] = min(seen.at + LISTED_FOR_S, (seen.at // DAY_S + 1) * DAY_S)
            self._listed.move_to_end(key)
            if len(self._listed) > MAX_CONVERSATIONS:
                self._listed.popitem(last=False)

    async def _of_day(self, day: int, limit: int, found: dict[str, Seen]) -> None:
        """Add those of a day until there are enough: whoever was used last may have been listed earlier."""
        wanted = 2 * limit
        while True:
            lines = await self._records.tail(recent_key(_day(day * DAY_S)), wanted)
            least = -math.inf
            for seen in filter(None, map(_seen, reversed(lines))):
                if len(found) >= limit and seen.at < least:
                    return
                found.setdefault(seen.id, seen)
                if len(found) == limit:
                    least = seen.at - LISTED_FOR_S
            if len(lines) < wanted or wanted >= KEPT_LINES:
                return
            wanted = min(4 * wanted, KEPT_LINES)

    async def _living(self, seen: list[Seen]) -> list[Seen]:
        """Those that were not deleted, with the time of their last request."""
        keys = [conversation_key(each.tenant, each.id) for each in seen]
        stored = await self._records.find(keys, fresh=True) if keys else []
        pairs = [(each, fields) for each, fields in zip(seen, stored, strict=True) if fields]
        return [each._replace(at=number(fields.get("last_at")) or each.at) for each, fields in pairs]

    def _hold(self, key: str, quiet_s: float) -> None:
        self._noted[key] = self._clock() + quiet_s
        self._noted.move_to_end(key)
        if len(self._noted) > MAX_CONVERSATIONS:
            self._let_go(next(iter(self._noted)))

    def _let_go(self, key: str) -> None:
        del self._noted[key]
        self._records.let_go(owner_key(key) or key)

    def _forget(self, prefix: str) -> None:
        for key in [key for key in self._noted if key.startswith(prefix) or owner_key(key) == prefix]:
            self._let_go(key)
