"""Queues exchanges and processes them later in the background, so that no request waits for that.

To process an exchange is to price it, count it, add it to the usage of its conversation and pass it to the
listeners. Queued exchanges are processed once a second, or as soon as `QUEUE_LENGTH` of them are queued. The
results are written to the store once a second.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import structlog

from compaction_proxy.core.cost.price import ModelPrice
from compaction_proxy.core.cost.savings import (
    EMPTY_CACHE_STATE,
    MAX_GROWTH_MESSAGES,
    CacheState,
    Saving,
    compute_saving,
    compute_unchanged_saving,
)
from compaction_proxy.core.exchange import Exchange, UnreadExchange, build_unread_exchange
from compaction_proxy.providers.types import PriceSource
from compaction_proxy.storage.deletions import DeletionFence
from compaction_proxy.storage.keys import conversation_key
from compaction_proxy.support.fail_open import suppress_and_report
from compaction_proxy.support.log_events import JOURNAL_NOT_WRITTEN
from compaction_proxy.telemetry.exchange_batch import (
    ExchangeBatch,
    ExchangeEntry,
    build_exchange_batch,
    get_entry_time,
    select_newest_entries,
)
from compaction_proxy.telemetry.live_feed import EXCHANGE, EXCHANGES_PER_S, LiveFeed
from compaction_proxy.telemetry.statistics import Statistics
from compaction_proxy.telemetry.usage import StoredExchange, UsageStore, to_fields

# Number of conversations for which `SavingsTracker` keeps what the provider has cached.
MAX_TRACKED_CONVERSATIONS = 1_000
# Number of unchanged exchanges per conversation that are kept until a changed exchange needs the cache state.
# If there are more, only the newest are kept.
MAX_DEFERRED = 4

# An exchange, the newest prefix digests of its messages, and our token counts (`track_exchange`).
_DeferredExchange = tuple[Exchange, Sequence[bytes], tuple[int, int]]


class _TrackedConversation(NamedTuple):
    """A conversation's cache state, and the later exchanges that are not yet included in this state."""

    cache_state: CacheState
    deferred: deque[_DeferredExchange]


class SavingsTracker:
    """Tracks which messages providers have cached, to compute savings. For use on one event loop.

    The cache state of a conversation says which of its messages the provider has cached. The saving of an
    exchange that was forwarded unchanged does not depend on it. The tracker therefore only keeps such
    exchanges, and adds them to the cache state when the next changed exchange needs this state.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[str, _TrackedConversation] = OrderedDict()

    def track_exchange(
        self,
        tenant: str,
        conversation: str | None,
        exchange: Exchange,
        price: ModelPrice | None,
        prefixes: Sequence[bytes] = (),
        counted_tokens: tuple[int, int] = (0, 0),
    ) -> Saving | None:
        """Returns the saving of an exchange; None if it is unknown. Call it in the order of the exchanges.

        Args:
            tenant: Tenant of the exchange.
            conversation: Conversation of the exchange; None if it is unknown.
            exchange: The exchange.
            price: Price of the requested model; None if it is unknown.
            prefixes: Prefix digests of the client's messages that are not fixed; empty if the request
                was not read.
            counted_tokens: Our uncalibrated token counts of the client's request and of the forwarded
                request; zeros if the request was not read.
        """
        sent, forwarded = counted_tokens
        whole = sent == forwarded and exchange.tokens_before == exchange.tokens_after and not exchange.recalls
        if conversation is None:
            return (
                compute_unchanged_saving(exchange, price)
                if whole
                else compute_saving(exchange, prefixes, None, price, counted_tokens)[0]
            )
        key = conversation_key(tenant, conversation)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _TrackedConversation(EMPTY_CACHE_STATE, deque(maxlen=MAX_DEFERRED))
            if len(self._known) > MAX_TRACKED_CONVERSATIONS:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(key)
        if whole:
            known.deferred.append((exchange, prefixes[-MAX_GROWTH_MESSAGES:], counted_tokens))
            return compute_unchanged_saving(exchange, price)
        state = known.cache_state
        for earlier, its_prefixes, its_counts in known.deferred:
            state = compute_saving(earlier, its_prefixes, state, None, its_counts)[1]
        saving, state = compute_saving(exchange, prefixes, state, price, counted_tokens)
        self._known[key] = _TrackedConversation(state, deque(maxlen=MAX_DEFERRED))
        return saving


# Receives groups of exchanges, after their requests have ended. Runs on the event loop, so it must not block.
# The second argument holds the exchanges whose requests were not read.
ExchangeListener = Callable[[Sequence[ExchangeEntry], Sequence[ExchangeBatch]], None]


class ExchangeRecorder(Protocol):
    """Records exchanges (implemented by `ExchangeLog`)."""

    def record_exchange(
        self,
        tenant: str,
        conversation: str | None,
        origin: str,
        exchange: Exchange,
        prefixes: tuple[bytes, ...] = (),
        counted_tokens: tuple[int, int] = (0, 0),
    ) -> None:
        """Records one exchange.

        Args:
            tenant: Tenant of the exchange.
            conversation: Conversation of the exchange, if it is known.
            origin: Origin (scheme, host and port) of the upstream. It selects the price.
            exchange: Figures of the exchange.
            prefixes: Prefix digests of the client's messages that are not fixed; empty if the request
                was not read.
            counted_tokens: Our uncalibrated token counts of the client's request and of the forwarded
                request; zeros if the request was not read.
        """
        ...

    def record_unread(
        self,
        tenant: str,
        conversation: str | None,
        origin: str,
        model: str,
        code: int,
        unread: UnreadExchange,
    ) -> None:
        """Records an exchange whose request was forwarded without reading it.

        `model` and `code` are the requested model and the status code of the upstream.
        """
        ...


# Properties that all exchanges of a batch share: tenant, conversation, origin, start mark of the requests
# (`storage.deletions`), model, status code.
BatchKey = tuple[str, str | None, str, int | None, str, int]


def group_by_key(recorded: Sequence[tuple[BatchKey, UnreadExchange]]) -> dict[BatchKey, list[UnreadExchange]]:
    """Groups exchanges by key. Each group keeps the order of its exchanges."""
    groups: dict[BatchKey, list[UnreadExchange]] = {}
    for key, unread in recorded:
        group = groups.get(key)
        if group is None:
            group = groups[key] = []
        group.append(unread)
    return groups


FLUSH_INTERVAL_S = 1.0
# Length of a queue (read requests, unread requests) at which it is processed, without a wait for the periodic
# flush (`FLUSH_INTERVAL_S`). Otherwise the queue would grow to megabytes on a busy server. A short queue is
# processed faster, because its memory was used a moment ago.
QUEUE_LENGTH = 64

_log = structlog.get_logger()
# Arguments of `ExchangeRecorder.record_exchange`, and the start mark of the request (`storage.deletions`).
# A plain tuple, because every request builds one.
_RecordedExchange = tuple[str, str | None, str, Exchange, tuple[bytes, ...], tuple[int, int], int | None]
_RecordedUnread = tuple[BatchKey, UnreadExchange]


class ExchangeLog:
    """Queues exchanges, then prices, counts and writes them in the background. Use it on one event loop.

    Args:
        usage_store: Stores the usage of each conversation.
        statistics: Counts all exchanges.
        feed: Live feed that shows exchanges.
        deletion_fence: Gives the start mark of each request, so that a deletion after it is noticed.
        pricing: Source of prices.

    Attributes:
        listeners: Receivers of exchanges. A listener that fails does not stop the others.
    """

    def __init__(
        self,
        usage_store: UsageStore,
        statistics: Statistics,
        feed: LiveFeed,
        deletion_fence: DeletionFence,
        pricing: PriceSource,
    ) -> None:
        self._usage_store = usage_store
        self._statistics = statistics
        self._feed = feed
        self._deletion_fence = deletion_fence
        self._pricing = pricing
        self._read: list[_RecordedExchange] = []
        self._unread: list[_RecordedUnread] = []
        # The newest exchanges, for the live feed.
        self._newest_entries: deque[ExchangeEntry] = deque(maxlen=EXCHANGES_PER_S)
        self._newest_batches: deque[ExchangeBatch] = deque(maxlen=EXCHANGES_PER_S)
        self._savings = SavingsTracker()
        self._task: asyncio.Task[None] | None = None
        self._flushing = asyncio.Lock()
        self.listeners: list[ExchangeListener] = []

    def record_exchange(
        self,
        tenant: str,
        conversation: str | None,
        origin: str,
        exchange: Exchange,
        prefixes: tuple[bytes, ...] = (),
        counted_tokens: tuple[int, int] = (0, 0),
    ) -> None:
        """Queues one exchange (`ExchangeRecorder`). Must be fast, because the request waits for this call."""
        start_mark = self._deletion_fence.get_start_mark()
        self._read.append((tenant, conversation, origin, exchange, prefixes, counted_tokens, start_mark))
        if len(self._read) == QUEUE_LENGTH:
            asyncio.get_running_loop().call_soon(self._drain_queues)

    def record_unread(
        self,
        tenant: str,
        conversation: str | None,
        origin: str,
        model: str,
        code: int,
        unread: UnreadExchange,
    ) -> None:
        """Queues an exchange whose request was not read. Must be fast, because the request waits for it."""
        start_mark = self._deletion_fence.get_start_mark()
        self._unread.append(((tenant, conversation, origin, start_mark, model, code), unread))
        if len(self._unread) == QUEUE_LENGTH:
            asyncio.get_running_loop().call_soon(self._drain_queues)

    def start(self) -> None:
        """Starts the background task."""
        self._task = asyncio.create_task(self._flush_periodically())

    async def close(self) -> None:
        """Writes everything that is queued and stops the background task."""
        if self._task is not None:
            async with self._flushing:  # lets a write in progress finish
                self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.flush()
        await self._statistics.flush(force=True)
        await self._usage_store.close()

    async def flush(self) -> None:
        """Processes all queued exchanges and writes the results."""
        async with self._flushing:
            self._drain_queues()
            self._publish_newest()
            for flush in (self._feed.flush, self._statistics.flush, self._usage_store.flush):
                with suppress_and_report(_log_write_failure):
                    await flush()

    async def list_exchanges(self, tenant: str, conversation: str, limit: int = 500) -> list[StoredExchange]:
        """Returns the newest stored exchanges of a conversation, oldest first."""
        return await self._usage_store.list_exchanges(tenant, conversation, limit)

    def _drain_queues(self) -> None:
        """Processes all queued exchanges."""
        unread, self._unread = self._unread, []
        self._deliver_unread(unread)
        read, self._read = self._read, []
        self._deliver_read(read)

    def _publish_newest(self) -> None:
        """Publishes the newest exchanges since the last flush on the live feed."""
        newest = sorted(
            [*self._newest_entries, *select_newest_entries(self._newest_batches, EXCHANGES_PER_S)],
            key=get_entry_time,
        )
        for entry in newest[-EXCHANGES_PER_S:]:
            fields = to_fields(entry.exchange, entry.saving)
            if entry.conversation is not None:
                fields["conversation"] = entry.conversation
            self._feed.publish(EXCHANGE, fields)
        self._newest_entries.clear()
        self._newest_batches.clear()

    def _deliver_unread(self, recorded: Sequence[_RecordedUnread]) -> None:
        """Processes exchanges whose requests were not read, in batches, and notifies the listeners."""
        if recorded:
            with suppress_and_report(_log_write_failure):
                self._notify_listeners(
                    [], [self._add_batch(key, group) for key, group in group_by_key(recorded).items()]
                )

    def _deliver_read(self, recorded: Sequence[_RecordedExchange]) -> None:
        """Processes exchanges whose requests were read, one by one, and notifies the listeners."""
        if recorded:
            with suppress_and_report(_log_write_failure):
                entries = list(map(self._add_exchange, recorded))
                self._statistics.add_entries(entries)
                self._notify_listeners(entries, [])

    def _notify_listeners(self, entries: Sequence[ExchangeEntry], batches: Sequence[ExchangeBatch]) -> None:
        for listener in self.listeners:
            with suppress_and_report(_log_write_failure):
                listener(entries, batches)

    def _add_batch(self, key: BatchKey, exchanges: list[UnreadExchange]) -> ExchangeBatch:
        """Builds a batch and adds it to the statistics, the usage of its conversation and the live feed."""
        tenant, conversation, origin, start_mark, model, code = key
        price = self._pricing.get_price(model, origin)
        batch = build_exchange_batch(tenant, conversation, model, code, exchanges, price)
        self._statistics.add_batch(batch)
        if conversation is None or self._usage_store.add_batch(batch, start_mark):
            self._newest_batches.append(batch)
        if conversation is not None:
            self._savings.track_exchange(
                tenant, conversation, build_unread_exchange(model, code, exchanges[-1]), price
            )
        return batch

    def _add_exchange(self, recorded: _RecordedExchange) -> ExchangeEntry:
        """Prices an exchange and adds it to the usage of its conversation and to the live feed."""
        tenant, conversation, origin, exchange, prefixes, counted, start_mark = recorded
        price = self._pricing.get_price(exchange.model, origin)
        saving = self._savings.track_exchange(tenant, conversation, exchange, price, prefixes, counted)
        entry = ExchangeEntry(tenant, conversation, exchange, saving)
        if conversation is None or self._usage_store.add_exchange(conversation, entry, start_mark):
            self._newest_entries.append(entry)
        return entry

    async def _flush_periodically(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_INTERVAL_S)
            with suppress_and_report(_log_write_failure):
                await self.flush()


def _log_write_failure(error: BaseException) -> None:
    _log.warning(JOURNAL_NOT_WRITTEN, error=type(error).__name__)
