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

from compaction_proxy.core.event import parse_number
from compaction_proxy.storage.keys import (
    conversation_key,
    conversation_tenant_key,
    derive_tenant_key,
    recent_conversations_key,
)
from compaction_proxy.storage.records import Fields, RecordStore

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


class RegisteredConversation(NamedTuple):
    """A conversation that there is.

    Attributes:
        id: Its id, `c_…`.
        tenant: Whose it is.
        at: Seconds since the epoch of its last request.
    """

    id: str
    tenant: str
    at: float


def _format_day(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d")


def _parse_line(line: Fields) -> RegisteredConversation | None:
    known, tenant, at = line.get("id"), line.get("tenant"), parse_number(line.get("at"))
    if isinstance(known, str) and isinstance(tenant, str) and at is not None:
        return RegisteredConversation(known, tenant, at)
    return None


class ConversationRegistry:
    """Remembers tenants by conversation, on one event loop. No method raises because of the store.

    Args:
        records: Where they are kept.
        ttl_s: Seconds that they are kept after the last request.
        clock: Monotonic seconds.
        now: Seconds since the epoch.
    """

    def __init__(
        self,
        records: RecordStore,
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
        self._list_due_at: OrderedDict[str, float] = OrderedDict()
        self._was_unavailable = False
        # By conversation, with its tenant: until when it need not be written. All that is held of it is here.
        self._write_due_at: OrderedDict[str, float] = OrderedDict()
        records.on_delete_callbacks.append(self._forget_prefix)

    async def record_activity(self, tenant: str, conversation: str) -> None:
        """A conversation of this tenant is in use. Writes once a minute at most, behind an answer.

        Once a second while the store fails; not at all for a request that began before it was forgotten.
        """
        self._reset_after_outage()
        key, outdated = conversation_key(tenant, conversation), self._records.deletion_fence
        if self._write_due_at.get(key, 0.0) > self._clock() or outdated.is_deleted(key):
            return
        self._skip_writes_for(key, NOTED_FOR_S)
        saved = await self._records.overwrite(
            conversation_tenant_key(conversation), {"tenant": tenant}, ttl_s=self._ttl_s
        )
        if outdated.is_deleted(key):
            await self.forget_conversation(conversation)
        elif not saved:
            self._skip_writes_for(key, RETRY_S)
        elif self._list_due_at.get(key, 0.0) <= self._now():
            await self._append_to_day_list(key, RegisteredConversation(conversation, tenant, self._now()))

    def _reset_after_outage(self) -> None:
        """Once a store is back that was away, believe nothing to be written: it may be empty."""
        if not self._records.is_in_use:
            self._was_unavailable = True
        elif self._was_unavailable:
            self._was_unavailable = False
            self._list_due_at.clear()
            self._write_due_at = OrderedDict.fromkeys(self._write_due_at, 0.0)

    async def find_tenant(self, conversation: str) -> str | None:
        """The tenant of a conversation; None if it is not known."""
        [fields] = await self._records.get_many([conversation_tenant_key(conversation)], bypass_cache=True)
        tenant = (fields or {}).get("tenant")
        if not isinstance(tenant, str):
            return None
        key = conversation_key(tenant, conversation)
        if key not in self._write_due_at:
            self._skip_writes_for(key, 0.0)
        return tenant

    async def list_recent(self, limit: int) -> list[RegisteredConversation]:
        """Conversations that there are, those last in use first; so many at most."""
        found: dict[str, RegisteredConversation] = {}
        today = int(self._now() // DAY_S)
        for day in range(today, today - MAX_DAYS, -1):
            if len(found) >= limit:
                break
            await self._collect_day(day, limit, found)
        seen = await self._filter_undeleted(list(found.values()))
        return sorted(seen, key=lambda each: each.at, reverse=True)[:limit]

    async def forget_conversation(self, conversation: str) -> None:
        """Remember nothing of a conversation, until it is in use again."""
        await self._records.delete_prefix(conversation_tenant_key(conversation))

    async def _append_to_day_list(self, key: str, registered: RegisteredConversation) -> None:
        line = {"id": registered.id, "tenant": registered.tenant, "at": registered.at}
        listed = recent_conversations_key(_format_day(registered.at))
        if await self._records.append_line(listed, line, ttl_s=self._ttl_s, max_lines=KEPT_LINES):
            # The next day has a list of its own.
            self._list_due_at[key] = min(registered.at + LISTED_FOR_S, (registered.at // DAY_S + 1) * DAY_S)
            self._list_due_at.move_to_end(key)
            if len(self._list_due_at) > MAX_CONVERSATIONS:
                self._list_due_at.popitem(last=False)

    async def _collect_day(self, day: int, limit: int, found: dict[str, RegisteredConversation]) -> None:
        """Add those of a day until there are enough: whoever was used last may have been listed earlier."""
        wanted = 2 * limit
        while True:
            lines = await self._records.read_tail(recent_conversations_key(_format_day(day * DAY_S)), wanted)
            least = -math.inf
            for seen in filter(None, map(_parse_line, reversed(lines))):
                if len(found) >= limit and seen.at < least:
                    return
                found.setdefault(seen.id, seen)
                if len(found) == limit:
                    least = seen.at - LISTED_FOR_S
            if len(lines) < wanted or wanted >= KEPT_LINES:
                return
            wanted = min(4 * wanted, KEPT_LINES)

    async def _filter_undeleted(self, seen: list[RegisteredConversation]) -> list[RegisteredConversation]:
        """Those that were not deleted, with the time of their last request."""
        keys = [conversation_key(each.tenant, each.id) for each in seen]
        stored = await self._records.get_many(keys, bypass_cache=True) if keys else []
        pairs = [(each, fields) for each, fields in zip(seen, stored, strict=True) if fields]
        return [each._replace(at=parse_number(fields.get("last_at")) or each.at) for each, fields in pairs]

    def _skip_writes_for(self, key: str, quiet_s: float) -> None:
        self._write_due_at[key] = self._clock() + quiet_s
        self._write_due_at.move_to_end(key)
        if len(self._write_due_at) > MAX_CONVERSATIONS:
            self._release_key(next(iter(self._write_due_at)))

    def _release_key(self, key: str) -> None:
        del self._write_due_at[key]
        self._records.evict_cached_prefix(derive_tenant_key(key) or key)

    def _forget_prefix(self, prefix: str) -> None:
        for key in [
            key for key in self._write_due_at if key.startswith(prefix) or derive_tenant_key(key) == prefix
        ]:
            self._release_key(key)
