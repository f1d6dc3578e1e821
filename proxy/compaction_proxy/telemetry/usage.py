"""Accounts of conversations: what each has used, and its exchanges; gathered here, and written now and then.

Totals are read, added to and written under a lease, so that replicas that share a conversation lose nothing
of one another's. The exchanges are written in the same step as the totals that hold them.
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
    select_newest,
)
from compaction_proxy.telemetry.totals import Totals

# Conversations that may wait to be written; beyond it the newest are not gathered.
MAX_WAITING = 10_000
# Lines of one conversation that may wait, and that are kept.
MAX_LINES = 32
KEPT_LINES = 1_000
LEASE_S = 5.0
# At the end, what another process is writing is tried again so often, so many seconds apart.
LAST_TRIES = 20
TRY_EVERY_S = 0.05
# Nothing is written under a lease that is older, because it may have gone to another.
SAFE_S = 2.5


class StoredExchange(NamedTuple):
    """An exchange of a conversation, and what it saved; None where that is not known."""

    exchange: Exchange
    saving: Saving | None


@dataclass(slots=True)
class _PendingUsage:
    """What is to be written of a conversation."""

    lines_key: str
    totals: Totals = field(default_factory=Totals)
    read: deque[ExchangeEntry] = field(default_factory=lambda: deque(maxlen=MAX_LINES))
    unread: deque[ExchangeBatch] = field(default_factory=lambda: deque(maxlen=MAX_LINES))

    def build_lines(self) -> list[Fields]:
        """The newest exchanges, oldest first, as they are written."""
        found = sorted([*self.read, *select_newest(self.unread, MAX_LINES)], key=get_entry_time)
        return [to_fields(each.exchange, each.saving) for each in found[-MAX_LINES:]]


def to_fields(exchange: Exchange, saving: Saving | None) -> dict[str, Any]:
    """An exchange and what it saved as JSON values, without what is unknown."""
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
    """Gathers and writes, on one event loop. No method raises because of the store.

    Args:
        records: Where they are kept.
        ttl_s: Seconds that they are kept after a conversation's last request.
        clock: Monotonic seconds.
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
        """Add an exchange to those of a conversation; whether there was room, and it was not forgotten since.

        Args:
            conversation: The conversation's id.
            entry: The exchange, and what it saved.
            start_mark: When its request began (`storage.deletions`).
        """
        waiting = self._get_pending(entry.tenant, conversation, start_mark)
        if waiting is None:
            return False
        waiting.totals.add_exchange(entry.exchange)
        if entry.saving is not None:
            waiting.totals.add_price(entry.saving.cost, entry.saving.gross, entry.saving.cache_loss)
        waiting.read.append(entry)
        return True

    def add_batch(self, batch: ExchangeBatch, start_mark: int | None) -> bool:
        """Add exchanges that were not read to their conversation, as `add_exchange` does each."""
        if batch.conversation is None:
            return False
        waiting = self._get_pending(batch.tenant, batch.conversation, start_mark)
        if waiting is None:
            return False
        waiting.totals.add_batch(batch)
        waiting.unread.append(batch)
        return True

    def on_event(self, tenant: str, event: Event) -> None:
        """Add an event to the totals of its conversation (an `announcing.Listener`)."""
        paid, made = event.cost_usd or 0.0, event.kind == COMPACTED
        if event.kind == MEASURED or not event.conversation or not (paid or made):
            return
        waiting = self._get_pending(tenant, event.conversation, self._records.deletion_fence.get_start_mark())
        if waiting is not None:
            waiting.totals.summary_usd += paid
            waiting.totals.rounds += made

    async def flush(self) -> None:
        """Write what waits; what another process is writing waits for the next time."""
        for key in list(self._pending):
            if not self._records.is_in_use:
                return  # the rest waits until the store is back
            with self._records.deletion_fence.use_start_mark():
                await self._write_under_lease(key)

    async def close(self) -> None:
        """Write what waits, within a second; what cannot be written is lost."""
        for _ in range(LAST_TRIES):
            await self.flush()
            if not self._pending or not self._records.is_in_use:
                return
            await asyncio.sleep(TRY_EVERY_S)

    async def list_exchanges(self, tenant: str, conversation: str, limit: int) -> list[StoredExchange]:
        """The newest exchanges of a conversation that are written, oldest first."""
        lines = await self._records.read_tail(exchanges_key(tenant, conversation), limit)
        return [kept for line in lines if (kept := _parse_exchange(line)) is not None]

    async def read_totals(self, conversations: Sequence[tuple[str, str]]) -> list[Totals]:
        """The totals of conversations, each named by its tenant and its id, in their order."""
        keys = [conversation_key(tenant, conversation) for tenant, conversation in conversations]
        found = await self._records.get_many(keys, bypass_cache=True) if keys else []
        return [totals_of.from_fields(fields) for fields in found]

    def _get_pending(self, tenant: str, conversation: str, start_mark: int | None) -> _PendingUsage | None:
        """Where to add to; None for a conversation that was forgotten since, and where too many wait."""
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
                    await self._write_pending(key, begun + SAFE_S)
                finally:
                    await self._records.release_lease(lease)
        except StoreUnavailableError:
            return  # reported, and what waits still does

    async def _write_pending(self, key: str, until: float) -> None:
        [held] = await self._records.get_many([key], bypass_cache=True)
        if self._records.deletion_fence.is_deleted(
            key
        ):  # what was held of it is gone; what has come since waits
            return
        waiting = self._pending.get(key)
        if waiting is None or self._clock() > until:
            return
        del self._pending[key]  # whatever comes of it: counting less is better than counting twice
        totals = totals_of.sum_totals(totals_of.from_fields(held), waiting.totals)
        lines = [ListItem(waiting.lines_key, told, self._ttl_s, KEPT_LINES) for told in waiting.build_lines()]
        if await self._records.overwrite(key, totals_of.to_fields(totals), ttl_s=self._ttl_s) and lines:
            await self._records.write(lines)  # not beside a record that only a newer version may touch

    def _forget_prefix(self, prefix: str) -> None:
        for key in [key for key in self._pending if key.startswith(prefix)]:
            del self._pending[key]
