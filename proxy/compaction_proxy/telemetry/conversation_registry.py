"""Finds the tenant of a conversation by the conversation's id, and lists recent conversations.

A conversation's id is a keyed digest that includes its tenant, so no two tenants share an id. The store has
a list of conversations for each day. While a conversation is in use, each process that serves the
conversation adds at most one line an hour for it to the list of the current day.
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
    derive_conversation_tenant_key,
    recent_conversations_key,
)
from compaction_proxy.storage.records import Fields, RecordStore

# Shortest time, in seconds, between two writes of a conversation's tenant by one process.
WRITE_INTERVAL_S = 60.0
# Shortest time, in seconds, between a failed write of a conversation's tenant and the next attempt.
RETRY_INTERVAL_S = 1.0
# Maximum number of conversations for which a process remembers when it may write the tenant again. If there
# are more, it forgets the conversation whose tenant it has looked up or written longest ago. The next request
# of the forgotten conversation then causes a write.
MAX_CONVERSATIONS = 10_000
# Shortest time, in seconds, between two lines that a process adds for one conversation to the list of
# conversations of a day.
LIST_INTERVAL_S = 3_600.0
# `KEPT_LINES` is the maximum number of lines in the list of conversations of a day. If there are more, the
# store drops the oldest. `MAX_DAYS` is the maximum number of days whose lists `list_recent` reads.
KEPT_LINES = 10_000
MAX_DAYS = 31
DAY_S = 86_400


class RegisteredConversation(NamedTuple):
    """A conversation in the list of conversations of a day.

    Attributes:
        id: Id of the conversation, `c_…`.
        tenant: Owner of the conversation.
        last_at: Time of its last request, or of its line in the list if no later time is known, in seconds
            since the epoch.
    """

    id: str
    tenant: str
    last_at: float


def _format_day(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d")


def _parse_line(line: Fields) -> RegisteredConversation | None:
    conversation, tenant, at = line.get("id"), line.get("tenant"), parse_number(line.get("at"))
    if isinstance(conversation, str) and isinstance(tenant, str) and at is not None:
        return RegisteredConversation(conversation, tenant, at)
    return None


class ConversationRegistry:
    """Stores which tenant owns a conversation, and when the conversation was last used.

    Not thread-safe: use it on one event loop. No method raises an error if the store fails.

    Args:
        records: Store for the tenants and for the lists of days.
        ttl_s: Seconds for which a stored tenant or a day's list is kept after it was last written.
        clock: Returns monotonic seconds.
        now: Returns the seconds since the epoch.
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
        # Maps each conversation's store key to two times: when its tenant may be written again (by `clock`),
        # and when a line for it may be added to the list of a day again (by `now`).
        self._due_at: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._was_unavailable = False
        records.on_delete_callbacks.append(self._forget_prefix)

    async def record_activity(self, tenant: str, conversation: str) -> None:
        """Records that a conversation of this tenant is in use. Call it after each response.

        Writes at most once in `WRITE_INTERVAL_S` seconds for each conversation, or once in `RETRY_INTERVAL_S`
        seconds while the store fails. Writes nothing if the conversation was deleted after its request began.
        """
        key, fence = conversation_key(tenant, conversation), self._records.deletion_fence
        if not self._records.is_in_use:
            self._was_unavailable = True
        elif self._was_unavailable:  # the store may be empty after an outage, so all writes are due again
            self._was_unavailable = False
            self._due_at = OrderedDict.fromkeys(self._due_at, (0.0, 0.0))
        write_due_at, list_due_at = self._due_at.get(key, (0.0, 0.0))
        if write_due_at > self._clock() or fence.is_deleted(key):
            return
        self._set_due(key, self._clock() + WRITE_INTERVAL_S, list_due_at)
        saved = await self._records.overwrite(
            conversation_tenant_key(conversation), {"tenant": tenant}, ttl_s=self._ttl_s
        )
        now = self._now()
        if fence.is_deleted(key):
            await self.forget_conversation(conversation)
        elif not saved:
            self._set_due(key, self._clock() + RETRY_INTERVAL_S, list_due_at)
        elif list_due_at <= now:
            line = {"id": conversation, "tenant": tenant, "at": now}
            list_key = recent_conversations_key(_format_day(now))
            added = await self._records.append_line(list_key, line, ttl_s=self._ttl_s, max_lines=KEPT_LINES)
            if added and key in self._due_at:  # the key is gone if the conversation was deleted meanwhile
                # The store has a separate list for each day. The next line for this conversation is therefore
                # due when the next day begins, if not earlier.
                next_line_at = min(now + LIST_INTERVAL_S, (now // DAY_S + 1) * DAY_S)
                self._due_at[key] = self._due_at[key][0], next_line_at

    async def find_tenant(self, conversation: str) -> str | None:
        """Returns the stored tenant of a conversation, or None if no tenant is stored or the store fails."""
        [fields] = await self._records.get_many([conversation_tenant_key(conversation)], bypass_cache=True)
        tenant = (fields or {}).get("tenant")
        if not isinstance(tenant, str):
            return None
        key = conversation_key(tenant, conversation)
        if key not in self._due_at:  # a deletion evicts cached tenants only for keys in `_due_at`
            self._set_due(key, 0.0, 0.0)
        return tenant

    async def list_recent(self, limit: int) -> list[RegisteredConversation]:
        """Returns at most `limit` conversations of the last `MAX_DAYS` days, the most recently used first.

        Leaves out deleted conversations.
        """
        today, wanted = int(self._now() // DAY_S), limit
        while True:
            recent: dict[str, RegisteredConversation] = {}
            for day in range(today, today - MAX_DAYS, -1):
                if len(recent) >= wanted:
                    break
                await self._collect_conversations_of_day(day, wanted, recent)
            seen = await self._select_existing_conversations(list(recent.values()))
            if len(seen) >= limit or len(recent) < wanted:
                return sorted(seen, key=lambda each: each.last_at, reverse=True)[:limit]
            wanted *= 2  # deleted conversations were among them

    async def forget_conversation(self, conversation: str) -> None:
        """Deletes the stored tenant of a conversation. A later request for it stores the tenant again."""
        await self._records.delete_prefix(conversation_tenant_key(conversation))

    async def _collect_conversations_of_day(
        self, day: int, limit: int, found: dict[str, RegisteredConversation]
    ) -> None:
        """Reads the list of conversations of a day, the newest line first. Adds them to `found`.

        After a process has added a line for a conversation, it adds no other line for this conversation for
        `LIST_INTERVAL_S` seconds. So the `limit` conversations with the newest lines may not be those with
        the latest requests. The method therefore continues after it has found `limit` conversations. It stops
        at the first line that is more than `LIST_INTERVAL_S` seconds older than the line at which `found`
        reached `limit` conversations.
        """
        wanted, least = 2 * limit, -math.inf
        while True:
            lines = await self._records.read_tail(recent_conversations_key(_format_day(day * DAY_S)), wanted)
            for seen in filter(None, map(_parse_line, reversed(lines))):
                if seen.last_at < least:
                    return
                found.setdefault(seen.id, seen)
                if len(found) >= limit and least == -math.inf:
                    least = seen.last_at - LIST_INTERVAL_S
            if len(lines) < wanted or wanted >= KEPT_LINES:
                return
            wanted = min(4 * wanted, KEPT_LINES)

    async def _select_existing_conversations(
        self, seen: list[RegisteredConversation]
    ) -> list[RegisteredConversation]:
        """Returns the conversations that still have stored totals, with the time of their last request.

        A deleted conversation has no stored totals.
        """
        keys = [conversation_key(each.tenant, each.id) for each in seen]
        stored = await self._records.get_many(keys, bypass_cache=True) if keys else []
        pairs = [(each, fields) for each, fields in zip(seen, stored, strict=True) if fields]
        return [
            each._replace(last_at=parse_number(fields.get("last_at")) or each.last_at)
            for each, fields in pairs
        ]

    def _set_due(self, key: str, write_due_at: float, list_due_at: float) -> None:
        self._due_at[key] = write_due_at, list_due_at
        self._due_at.move_to_end(key)
        if len(self._due_at) > MAX_CONVERSATIONS:
            self._forget_key(next(iter(self._due_at)))

    def _forget_key(self, key: str) -> None:
        del self._due_at[key]
        self._records.evict_cached_prefix(derive_conversation_tenant_key(key) or key)

    def _forget_prefix(self, prefix: str) -> None:
        for key in list(self._due_at):
            if key.startswith(prefix) or derive_conversation_tenant_key(key) == prefix:
                self._forget_key(key)
