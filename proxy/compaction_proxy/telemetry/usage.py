"""Usage of conversations: their totals and exchanges, collected in memory and written periodically.

To write, a process leases the conversation's record, reads the stored totals, adds its own and writes the
sum. The lease ensures that replicas that share a conversation do not overwrite each other's sums. The
exchanges are written right after the totals that include them.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from compaction_proxy.core import exchange as exchanges_of
from compaction_proxy.core.cost.savings import Saving
from compaction_proxy.core.errors import StoreUnavailableError
from compaction_proxy.core.event import COMPACTED, MEASURED, Event, parse_number
from compaction_proxy.core.exchange import Exchange
from compaction_proxy.storage.keys import conversation_key, exchanges_key, lease_key
from compaction_proxy.storage.records import Fields, ListItem, RecordStore
from compaction_proxy.telemetry import totals as totals_of
from compaction_proxy.telemetry.exchange_batch import (
    ExchangeBatch,
    ExchangeEntry,
    get_entry_time,
    select_newest_entries,
)
from compaction_proxy.telemetry.totals import Totals

# Number of conversations that may wait to be written. Exchanges of further conversations are dropped.
MAX_WAITING = 10_000
# Number of lines (one per exchange) of a conversation that may wait to be written, and number of its lines
# that the store keeps. The totals include all exchanges.
MAX_LINES = 32
KEPT_LINES = 1_000
# Lifetime of a lease, in seconds.
LEASE_S = 5.0
# When this process ends, another process may hold the lease of a conversation. Number of attempts to write
# the usage before it is lost, and pause between two attempts, in seconds.
LAST_TRIES = 20
LAST_TRY_INTERVAL_S = 0.05
# Age of a lease, in seconds, after which no write is started under it. It is well below `LEASE_S`, so that
# even a slow write ends before another process can get the lease.
LEASE_SAFE_S = 2.5


class StoredExchange(NamedTuple):
    """An exchange that was read from the store, and its saving (None if it is unknown)."""

    exchange: Exchange
    saving: Saving | None


@dataclass(slots=True)
class _PendingUsage:
    """Usage of one conversation that is not written yet.

    Attributes:
        lines_key: Store key of the conversation's list of exchanges.
        totals: Sums of all exchanges that are not written yet.
        read: Newest exchanges whose requests were read.
        unread: Newest batches of exchanges whose requests were not read.
    """

    lines_key: str
    totals: Totals = field(default_factory=Totals)
    read: deque[ExchangeEntry] = field(default_factory=lambda: deque(maxlen=MAX_LINES))
    unread: deque[ExchangeBatch] = field(default_factory=lambda: deque(maxlen=MAX_LINES))

    def build_lines(self) -> list[Fields]:
        """Builds the stored lines of the newest exchanges, oldest first."""
        newest = sorted([*self.read, *select_newest_entries(self.unread, MAX_LINES)], key=get_entry_time)
        return [to_fields(each.exchange, each.saving) for each in newest[-MAX_LINES:]]


def to_fields(exchange: Exchange, saving: Saving | None) -> dict[str, Any]:
    """Returns an exchange and its saving as JSON values. Leaves out unknown values."""
    values = exchanges_of.to_fields(exchange)
    return values if saving is None else {**values, "saving": saving._asdict()}


def _parse_exchange(line: Fields) -> StoredExchange | None:
    exchange = exchanges_of.from_fields(line)
    return None if exchange is None else StoredExchange(exchange, _parse_saving(line.get("saving")))


def _parse_saving(stored: object) -> Saving | None:
    if not isinstance(stored, dict):
        return None
    values = [parse_number(stored.get(name)) for name in Saving._fields]
    known = [value for value in values if value is not None]
    return Saving(*known) if len(known) == len(values) else None


class UsageStore:
    """Collects and writes the usage of conversations. Use it on one event loop.

    No method raises if the store fails.

    Args:
        records: Store for totals and exchanges.
        ttl_s: Lifetime of a conversation's records after their last write, in seconds.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self, records: RecordStore, ttl_s: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._records = records
        self._ttl_s = ttl_s
        self._clock = clock
        self._pending: dict[str, _PendingUsage] = {}
        records.on_delete_callbacks.append(self._forget_prefix)

    def add_exchange(self, conversation: str, entry: ExchangeEntry, start_mark: int | None) -> bool:
        """Adds an exchange to its conversation. Returns False if it is dropped.

        An exchange is dropped if the usage of too many conversations waits to be written, or if the
        conversation was deleted since the start of the request.

        Args:
            conversation: Id of the conversation.
            entry: The exchange and its saving.
            start_mark: Start mark of the request (`storage.deletions`).
        """
        waiting = self._get_or_create_pending(entry.tenant, conversation, start_mark)
        if waiting is None:
            return False
        waiting.totals.add_exchange(entry.exchange)
        if entry.saving is not None:
            waiting.totals.add_price(entry.saving.cost, entry.saving.gross, entry.saving.cache_loss)
        waiting.read.append(entry)
        return True

    def add_batch(self, batch: ExchangeBatch, start_mark: int | None) -> bool:
        """Adds a batch of exchanges to its conversation. Returns False if the batch is dropped.

        A batch is dropped if its conversation is unknown, or for the same reasons as in `add_exchange`.
        """
        if batch.conversation is None:
            return False
        waiting = self._get_or_create_pending(batch.tenant, batch.conversation, start_mark)
        if waiting is None:
            return False
        waiting.totals.add_batch(batch)
        waiting.unread.append(batch)
        return True

    def on_event(self, tenant: str, event: Event) -> None:
        """Adds a compaction or a summary's cost to the totals of its conversation.

        This is an `event_bus.EventListener`.
        """
        paid, made = event.cost_usd or 0.0, event.kind == COMPACTED
        if event.kind == MEASURED or not event.conversation or not (paid or made):
            return
        waiting = self._get_or_create_pending(
            tenant, event.conversation, self._records.deletion_fence.get_start_mark()
        )
        if waiting is not None:
            waiting.totals.summary_usd += paid
            waiting.totals.rounds += made

    async def flush(self) -> None:
        """Writes the pending usage. Usage of a conversation that another process has leased stays pending."""
        for key in list(self._pending):
            if not self._records.is_in_use:
                return  # the rest waits until the store is back
            with self._records.deletion_fence.scoped_start_mark():
                await self._write_under_lease(key)

    async def close(self) -> None:
        """Writes the pending usage. Usage that cannot be written within about a second is lost."""
        for _ in range(LAST_TRIES):
            await self.flush()
            if not self._pending or not self._records.is_in_use:
                return
            await asyncio.sleep(LAST_TRY_INTERVAL_S)

    async def list_exchanges(self, tenant: str, conversation: str, limit: int) -> list[StoredExchange]:
        """Returns the newest stored exchanges of a conversation, oldest first."""
        lines = await self._records.read_tail(exchanges_key(tenant, conversation), limit)
        return [stored for line in lines if (stored := _parse_exchange(line)) is not None]

    async def read_totals(self, conversations: Sequence[tuple[str, str]]) -> list[Totals]:
        """Returns the stored totals of conversations, each given as tenant and id, in the same order.

        The totals of a conversation without stored totals are zero.
        """
        keys = [conversation_key(tenant, conversation) for tenant, conversation in conversations]
        stored = await self._records.get_many(keys, bypass_cache=True) if keys else []
        return [totals_of.from_fields(fields) for fields in stored]

    def _get_or_create_pending(
        self, tenant: str, conversation: str, start_mark: int | None
    ) -> _PendingUsage | None:
        """Returns the pending usage of a conversation, which the caller may add to.

        Returns None if the conversation was deleted since `start_mark`, or if too many conversations wait.
        """
        key = conversation_key(tenant, conversation)
        if self._records.deletion_fence.is_deleted_since(key, start_mark):
            return None
        waiting = self._pending.get(key)
        if waiting is None and len(self._pending) < MAX_WAITING:
            waiting = self._pending[key] = _PendingUsage(exchanges_key(tenant, conversation))
        return waiting

    async def _write_under_lease(self, key: str) -> None:
        begun = self._clock()
        try:
            lease = await self._records.acquire_lease(lease_key(key), LEASE_S)
            if lease is not None:
                try:
                    await self._write_pending(key, begun + LEASE_SAFE_S)
                finally:
                    await self._records.release_lease(lease)
        except StoreUnavailableError:
            return  # the store has reported the error, and the usage stays pending

    async def _write_pending(self, key: str, until: float) -> None:
        [held] = await self._records.get_many([key], bypass_cache=True)
        if self._records.deletion_fence.is_deleted(
            key
        ):  # `held` may be outdated; usage added since the deletion waits for the next flush
            return
        waiting = self._pending.get(key)
        if waiting is None or self._clock() > until:
            return
        del self._pending[key]  # even if the write fails: missing usage is better than usage counted twice
        totals = totals_of.sum_totals(totals_of.from_fields(held), waiting.totals)
        lines = [ListItem(waiting.lines_key, line, self._ttl_s, KEPT_LINES) for line in waiting.build_lines()]
        if await self._records.overwrite(key, totals_of.to_fields(totals), ttl_s=self._ttl_s) and lines:
            # The totals are not saved if, for example, a newer version of the proxy has written the record.
            await self._records.write(lines)

    def _forget_prefix(self, prefix: str) -> None:
        for key in [key for key in self._pending if key.startswith(prefix)]:
            del self._pending[key]
