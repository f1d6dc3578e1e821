"""Tracks which conversations have compactions, so that every process parses even their small requests.

The proxy forwards small requests without parsing them or asking the store about them; this check by size is
called the gate. But stored checkpoints must be applied to small requests, too. So each process keeps in
memory the set of conversations that have compactions. It loads the set at start, and the store notifies it of
changes. If the store cannot notify, the process reads the newest changes from the store once a second.

The store holds one list of conversations for each tenant, one list of the tenants, and one list of the newest
changes. The number and the age of the lines in each list are limited. Because each tenant has its own list, a
tenant with many conversations can displace only its own conversations.
"""

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from secrets import token_hex

import structlog

from compaction_proxy.core.errors import StoreUnavailableError
from compaction_proxy.core.event import parse_number
from compaction_proxy.storage.keys import (
    compacted_changes_key,
    compacted_conversations_key,
    compacted_tenants_key,
)
from compaction_proxy.storage.records import Fields, ListItem, RecordStore
from compaction_proxy.storage.resilient import run_with_deadline
from compaction_proxy.support.fail_open import suppress_and_report
from compaction_proxy.support.log_events import COMPACTED_NOT_HEARD
from compaction_proxy.support.lru import BoundedDict

# Largest numbers of conversations of one tenant, of conversations of all tenants together, and of tenants. If
# a tenant has too many conversations, the ones that were added or used longest ago are forgotten. If all
# tenants together have too many, the tenant with the most conversations loses its oldest one. If there are
# too many tenants, the ones that were written to the list of tenants longest ago are forgotten.
MAX_OF_TENANT = 10_000
MAX_CONVERSATIONS = 50_000
MAX_TENANTS = 10_000
# The store keeps a line for each conversation with compactions, but only for a limited time. So a
# conversation that is still in use gets a new line after `RELIST_AFTER_S` seconds, or after this share
# (`LISTED_SHARE`) of the lifetime of checkpoints, whichever is sooner.
RELIST_AFTER_S = 86_400.0
LISTED_SHARE = 0.25
# Seconds between two polls for changes of the set of conversations, if the store sends no notifications.
POLL_S = 1.0
# Seconds between two polls for changes if the store sends notifications. Polls are still needed, because a
# notification may get lost.
CHECK_S = 15.0
# Number of changes that the store keeps (`KEPT_CHANGES`), and number of changes that one poll reads
# (`LATEST_CHANGES`). If there were more changes since the last poll than one poll reads, the process loads
# the whole set of conversations again.
KEPT_CHANGES = 100
LATEST_CHANGES = 16
# At its start, the proxy waits at most `START_LIMIT_S` seconds until the set of conversations is loaded.
# Between two attempts to listen for changes of the set, it waits `RETRY_S` seconds.
START_LIMIT_S = 5.0
RETRY_S = 1.0
# Largest number of lists of conversations that are read from the store at the same time.
READ_AT_ONCE = 8
CHANNEL = "compacted"
# All conversations of a tenant that have no id share one line in the tenant's list, with this name.
UNNAMED = ""
_CHANGE_BYTES = 8

_log = structlog.get_logger()


class CompactedConversations:
    """The set of conversations with compactions. Not thread-safe: use it on one event loop.

    No method raises an error if the store fails.

    Args:
        records: Stores the set.
        ttl_s: How long checkpoints are kept, in seconds.
        now: Returns seconds since the epoch.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        records: RecordStore,
        ttl_s: float,
        *,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._records = records
        self._listed_for_s = min(RELIST_AFTER_S, LISTED_SHARE * ttl_s)
        self._ttl_s = ttl_s
        self._now = now
        self._clock = clock
        # Maps each tenant and conversation id to the time at which the conversation last got a line in the
        # store, in seconds since the epoch.
        self._known: OrderedDict[str, OrderedDict[str, float]] = OrderedDict()
        self._count = 0
        self._unlisted: set[tuple[str, str]] = set()  # conversations without a line in the store
        # Maps each tenant to the time at which this process last wrote a line for it to the list of tenants,
        # in seconds since the epoch.
        self._tenants: BoundedDict[str, float] = BoundedDict(MAX_TENANTS)
        self._change = ""  # the id of the last change that was read
        self._is_loaded = False
        self._is_listening = False
        self._tasks: list[asyncio.Task[None]] = []

    def has_rounds(self, tenant: str, conversation: str | None) -> bool:
        """Returns whether this process knows that a conversation has compactions. Does not ask the store.

        If `conversation` is None, returns whether this tenant has any compacted conversation without an id.
        """
        conversations = self._known.get(tenant)
        return (
            conversations is not None and (UNNAMED if conversation is None else conversation) in conversations
        )

    async def add(self, tenant: str, conversation: str | None, *, should_publish: bool = True) -> None:
        """Adds a conversation to the set. Notifies other processes unless they already know about it.

        Args:
            tenant: The tenant of the conversation.
            conversation: The conversation id; None if the conversation has no id.
            should_publish: Whether other processes are notified. This is unnecessary while the requests of
                the conversation are so large that every process parses them anyway.
        """
        name, now = UNNAMED if conversation is None else conversation, self._now()
        listed_at = self._get_listed_at(tenant, name)
        if now - listed_at < self._listed_for_s and (tenant, name) not in self._unlisted:
            self._cache_conversation(tenant, name, listed_at)
            return
        self._cache_conversation(tenant, name, now)
        self._unlisted.add((tenant, name))
        if should_publish and await self._write_line(tenant, name, now):
            self._unlisted.discard((tenant, name))

    async def load(self) -> bool:
        """Loads the set of conversations from the store. Returns whether the store has answered all reads."""
        failed_before = self._records.failed_reads
        changes = await self._records.read_tail(compacted_changes_key(), 1)
        oldest = self._now() - self._ttl_s
        lines = await self._records.read_tail(compacted_tenants_key(), MAX_TENANTS)
        tenants = dict.fromkeys(each for line in lines if isinstance(each := line.get("tenant"), str))
        read_slots = asyncio.Semaphore(READ_AT_ONCE)

        async def load_tenant(tenant: str) -> None:
            async with read_slots:
                for line in await self._records.read_tail(compacted_conversations_key(tenant), MAX_OF_TENANT):
                    self._apply_line(tenant, line, oldest)

        await asyncio.gather(*map(load_tenant, tenants))
        self._is_loaded = self._records.is_in_use and self._records.failed_reads == failed_before
        if self._is_loaded and changes:
            self._change = _get_change_id(changes[-1])
        return self._is_loaded

    async def start(self) -> None:
        """Loads the set of conversations, and starts to follow its changes.

        Waits at most `START_LIMIT_S` seconds until the set is loaded.
        """
        with suppress_and_report(_log_listening_failure):
            await run_with_deadline(START_LIMIT_S, self.load())
        self._tasks = [asyncio.create_task(self._listen_forever()), asyncio.create_task(self._poll_changes())]

    async def close(self) -> None:
        """Stops following changes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _write_line(self, tenant: str, name: str, listed_at_s: float) -> bool:
        """Writes a line for the conversation to the store, and notifies other processes.

        Also adds the tenant to the list of tenants, if this process last did so at least `_listed_for_s`
        seconds ago. If one of these writes fails, returns False and notifies nobody.
        """
        line = {"conversation": name, "at": listed_at_s}
        entry = ListItem(compacted_conversations_key(tenant), line, self._ttl_s, MAX_OF_TENANT)
        if not self._records.is_in_use or not await self._records.write([entry]):
            return False
        if listed_at_s - self._tenants.get(tenant, -math.inf) >= self._listed_for_s:
            listed = {"tenant": tenant}
            if not await self._records.append_line(
                compacted_tenants_key(), listed, ttl_s=self._ttl_s, max_lines=MAX_TENANTS
            ):
                return False
            self._tenants[tenant] = listed_at_s
        change = {**line, "tenant": tenant, "change": token_hex(_CHANGE_BYTES)}
        await asyncio.gather(
            self._records.publish(CHANNEL, change),
            self._records.append_line(
                compacted_changes_key(), change, ttl_s=self._ttl_s, max_lines=KEPT_CHANGES
            ),
        )
        return True

    def _get_listed_at(self, tenant: str, name: str) -> float:
        conversations = self._known.get(tenant)
        return -math.inf if conversations is None else conversations.get(name, -math.inf)

    def _apply_line(self, tenant: str, line: Fields, oldest_s: float) -> None:
        name, at = line.get("conversation"), parse_number(line.get("at"))
        if isinstance(name, str) and at is not None and at > oldest_s:
            self._cache_conversation(tenant, name, max(at, self._get_listed_at(tenant, name)))
            self._unlisted.discard((tenant, name))

    def _cache_conversation(self, tenant: str, name: str, listed_at_s: float) -> None:
        names = self._known.setdefault(tenant, OrderedDict())
        self._known.move_to_end(tenant)
        self._count += name not in names
        names[name] = listed_at_s
        names.move_to_end(name)
        if len(names) > MAX_OF_TENANT:
            self._evict_oldest(tenant)
        elif self._count > MAX_CONVERSATIONS:
            self._evict_oldest(max(self._known, key=lambda each: len(self._known[each])))

    def _evict_oldest(self, tenant: str) -> None:
        names = self._known[tenant]
        name, _ = names.popitem(last=False)
        self._count -= 1
        self._unlisted.discard((tenant, name))
        if not names:
            del self._known[tenant]

    async def _listen_forever(self) -> None:
        while True:
            with suppress_and_report(_log_listening_failure):
                await self._follow_channel()
            self._is_listening = False
            await asyncio.sleep(RETRY_S)

    async def _follow_channel(self) -> None:
        """Applies changes to the set as soon as the store announces them, until the connection ends."""
        try:
            async for fields in self._records.listen(CHANNEL):
                if fields is None:  # notifications begin, or some may have been missed
                    self._is_listening = True
                    await self.load()
                else:
                    self._apply_change(fields)
        except StoreUnavailableError as error:
            if self._is_listening:
                _log_listening_failure(error)

    async def _poll_changes(self) -> None:
        checked = self._clock()
        while True:
            await asyncio.sleep(POLL_S)
            if self._is_listening and self._is_loaded and self._clock() - checked < CHECK_S:
                continue
            checked = self._clock()
            with suppress_and_report(_log_listening_failure):
                if self._records.is_in_use:
                    await (self._apply_latest_changes() if self._is_loaded else self.load())

    async def _apply_latest_changes(self) -> None:
        """Reads the newest changes and applies them. Loads the whole set if changes may have been missed."""
        lines = await self._records.read_tail(compacted_changes_key(), LATEST_CHANGES)
        if len(lines) == LATEST_CHANGES and self._change not in map(_get_change_id, lines):
            await self.load()
        for line in lines:
            self._apply_change(line)

    def _apply_change(self, line: Fields) -> None:
        if isinstance(tenant := line.get("tenant"), str):
            self._apply_line(tenant, line, self._now() - self._ttl_s)
            self._change = _get_change_id(line)


def _get_change_id(line: Fields) -> str:
    return str(line.get("change", ""))


def _log_listening_failure(error: BaseException) -> None:
    _log.warning(COMPACTED_NOT_HEARD, error=type(error).__name__)
