"""Queues exchanges and processes them in the background, so that no request waits for the processing.

Processing an exchange has four steps: compute its cost and saving, add it to the usage of its conversation,
add it to the statistics, and pass it to the listeners. The module processes the queued exchanges once a
second, or as soon as `QUEUE_LENGTH` of them are queued. It writes the results to the store once a second.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

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
from compaction_proxy.core.exchange import Exchange
from compaction_proxy.providers.types import PriceSource
from compaction_proxy.storage.deletions import DeletionFence
from compaction_proxy.support.log_events import JOURNAL_NOT_WRITTEN
from compaction_proxy.support.lru import BoundedDict
from compaction_proxy.telemetry.live_feed import EXCHANGE, EXCHANGES_PER_S, LiveFeed
from compaction_proxy.telemetry.logs import suppress_and_log
from compaction_proxy.telemetry.statistics import Statistics
from compaction_proxy.telemetry.usage import (
    NO_CAPTION,
    Caption,
    ExchangeEntry,
    UsageStore,
    get_entry_time,
    to_line,
)

# Maximum number of conversations whose cache state `SavingsTracker` keeps in memory. If there are more, it
# drops the one whose last exchange is the oldest.
MAX_TRACKED_CONVERSATIONS = 1_000
# `SavingsTracker` keeps exchanges whose requests were forwarded unchanged until it needs them for the saving
# of a changed request. This is the maximum number that it keeps for one conversation. It drops older ones.
MAX_DEFERRED = 4


class RecordedExchange(NamedTuple):
    """A queued exchange.

    Attributes:
        tenant: Tenant of the exchange.
        conversation: Conversation of the exchange; None if it is unknown.
        origin: Origin (scheme, host and port) of the upstream, on which the price depends.
        exchange: Figures of the exchange.
        prefixes: Prefix digests of the client's messages that are not fixed; empty if the request was not
            read.
        counted_tokens: Token counts of the client's request and of the forwarded request, as the proxy counts
            them without calibration; zeros if the request was not read.
        start_mark: Number of deletions that this process had made when the request began
            (`storage.deletions`); None if unknown.
        caption: By what people recognise the conversation.
    """

    tenant: str
    conversation: str | None
    origin: str
    exchange: Exchange
    prefixes: Sequence[bytes]
    counted_tokens: tuple[int, int]
    start_mark: int | None
    caption: Caption = NO_CAPTION


class SavingsTracker:
    """Computes the savings of exchanges from the cache states of conversations.

    Not thread-safe: use it on one event loop.

    The cache state of a conversation says which of its messages the provider has probably cached. If a
    request was forwarded unchanged, the saving of its exchange does not depend on the cache state. The
    tracker therefore keeps such an exchange without updating the cache state, which saves time. Before it
    computes the saving of a changed request, it updates the cache state with the exchanges that it has kept.
    """

    def __init__(self) -> None:
        # Maps a tenant and a conversation to the cache state, and to the later exchanges that the cache state
        # does not include yet.
        self._known: BoundedDict[tuple[str, str], tuple[CacheState, deque[RecordedExchange]]] = BoundedDict(
            MAX_TRACKED_CONVERSATIONS
        )

    def track_exchange(self, recorded: RecordedExchange, price: ModelPrice | None) -> Saving | None:
        """Returns the saving of an exchange; None if unknown. Call this method in the order of the exchanges.

        `price` is the price of the model that the client asked for; None if unknown.
        """
        exchange, (sent, forwarded) = recorded.exchange, recorded.counted_tokens
        key = recorded.tenant, recorded.conversation or ""
        state, deferred = self._known.pop(key, (EMPTY_CACHE_STATE, deque(maxlen=MAX_DEFERRED)))
        if sent == forwarded and exchange.tokens_before == exchange.tokens_after and not exchange.recalls:
            if len(recorded.prefixes) > MAX_GROWTH_MESSAGES:
                recorded = recorded._replace(prefixes=recorded.prefixes[-MAX_GROWTH_MESSAGES:])
            deferred.append(recorded)
            saving = compute_unchanged_saving(exchange, price)
        else:
            for earlier in deferred:
                _, state = compute_saving(
                    earlier.exchange, earlier.prefixes, state, None, earlier.counted_tokens
                )
            deferred.clear()
            saving, state = compute_saving(exchange, recorded.prefixes, state, price, recorded.counted_tokens)
        if recorded.conversation is not None:
            self._known[key] = state, deferred
        return saving


# A function that is called with exchanges after their requests have ended. It runs on the event loop, so it
# must not block.
ExchangeListener = Callable[[Sequence[ExchangeEntry]], None]

FLUSH_INTERVAL_S = 1.0
# As soon as this many exchanges are queued, `ExchangeLog` processes them without waiting for the next
# periodic flush. Otherwise the queue would grow to megabytes on a busy server. A short queue also takes less
# time per exchange, because its memory is still in the processor's cache.
QUEUE_LENGTH = 64


class ExchangeLog:
    """Queues exchanges, then processes them and writes the results in the background.

    Not thread-safe: use it on one event loop.

    Args:
        usage_store: Stores the usage of each conversation.
        statistics: Counts all exchanges.
        feed: Live feed, on which this class publishes the newest exchanges.
        deletion_fence: Says how many deletions this process had made when a request began. With this number,
            `usage_store` recognises an exchange whose conversation was deleted later, and drops it.
        pricing: Source of prices.

    Attributes:
        listeners: Functions that are called with exchanges. If one fails, the others are still called.
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
        self._queue: list[RecordedExchange] = []
        # The newest exchanges since the last flush. The next flush publishes them on the live feed.
        self._newest: deque[ExchangeEntry] = deque(maxlen=EXCHANGES_PER_S)
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
        caption: Caption = NO_CAPTION,
    ) -> None:
        """Queues one exchange. This method must be fast, because the request waits for it.

        Each argument is the field of `RecordedExchange` with the same name.
        """
        start_mark = self._deletion_fence.get_start_mark()
        self._queue.append(
            RecordedExchange(
                tenant, conversation, origin, exchange, prefixes, counted_tokens, start_mark, caption
            )
        )
        if len(self._queue) == QUEUE_LENGTH:
            asyncio.get_running_loop().call_soon(self._drain_queue)

    def start(self) -> None:
        """Starts the background task, which calls `flush` once a second."""
        self._task = asyncio.create_task(self._flush_periodically())

    async def close(self) -> None:
        """Stops the background task, then processes the queued exchanges and writes the results.

        Logs how many exchanges are not in the totals of their conversations, because the time was too short
        (`UsageStore.close`) or the caller was cancelled. Does not raise `CancelledError`.
        """
        with suppress(asyncio.CancelledError):  # the server cancels a shutdown that takes too long
            if self._task is not None:
                async with self._flushing:  # lets a write in progress finish
                    self._task.cancel()
                await asyncio.gather(self._task, return_exceptions=True)
            await self.flush()
            await self._usage_store.close()  # waits for a store that is suspended
            await self._statistics.flush(force=True)
        missing = len(self._queue) + self._usage_store.pending_requests
        if missing:
            structlog.get_logger().warning(JOURNAL_NOT_WRITTEN, exchanges=missing)

    async def flush(self) -> None:
        """Processes all queued exchanges, and writes the results to the store within about a second.

        Some of the usage waits for the next flush if there is much of it (`UsageStore.flush`).
        """
        async with self._flushing:
            self._drain_queue()
            self._publish_newest()
            for flush in (self._feed.flush, self._statistics.flush, self._usage_store.flush):
                with suppress_and_log(JOURNAL_NOT_WRITTEN):
                    await flush()

    def _drain_queue(self) -> None:
        """Processes all queued exchanges, without writing to the store, and passes them to the listeners."""
        queue, self._queue = self._queue, []
        with suppress_and_log(JOURNAL_NOT_WRITTEN):
            entries = list(map(self._add_exchange, queue))
            self._statistics.add_entries(entries)
            for listener in self.listeners:
                with suppress_and_log(JOURNAL_NOT_WRITTEN):
                    listener(entries)

    def _publish_newest(self) -> None:
        for entry in sorted(self._newest, key=get_entry_time):
            fields = to_line(entry)
            if entry.conversation is not None:
                fields["conversation"] = entry.conversation
            self._feed.publish(EXCHANGE, fields)
        self._newest.clear()

    def _add_exchange(self, recorded: RecordedExchange) -> ExchangeEntry:
        """Computes the saving of an exchange, and adds the exchange to the usage of its conversation.

        Also keeps the exchange for the live feed, unless the usage store drops it.
        """
        tenant, conversation, exchange = recorded.tenant, recorded.conversation, recorded.exchange
        price = self._pricing.get_price(exchange.model, recorded.origin)
        entry = ExchangeEntry(tenant, conversation, exchange, self._savings.track_exchange(recorded, price))
        if exchange.failure:
            self._statistics.add_failure_details(recorded.origin, entry)
        if conversation is None or self._usage_store.add_entry(
            conversation, entry, recorded.start_mark, recorded.caption
        ):
            self._newest.append(entry)
        return entry

    async def _flush_periodically(self) -> None:
        clock = asyncio.get_running_loop().time
        due_at = clock() + FLUSH_INTERVAL_S
        while True:
            await asyncio.sleep(due_at - clock())
            due_at = clock() + FLUSH_INTERVAL_S  # much usage makes a flush long, and must not make it rare
            with suppress_and_log(JOURNAL_NOT_WRITTEN):
                await self.flush()
