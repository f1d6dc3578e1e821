"""Queues exchanges and processes them later in the background, so that no request waits for that.

To process an exchange is to price it, count it, add it to the usage of its conversation and pass it to the
listeners. Queued exchanges are processed once a second, or as soon as `CHUNK_LENGTH` of them are queued. The
results are written to the store once a second.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

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


_T = TypeVar("_T")


# Receives exchanges after they have ended: first those whose requests were read, then batches of those whose
# requests were not read. Runs on the event loop, so it must not block.
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


def split_into_chunks(items: Sequence[_T], length: int) -> Iterator[Sequence[_T]]:
    """Yields chunks of at most `length` items."""
    return (items[start : start + length] for start in range(0, len(items), length))


FLUSH_INTERVAL_S = 1.0
# Number of exchanges that each of the two queues (read and unread requests) may hold. More are dropped.
MAX_QUEUED = 50_000
# Number of exchanges that are processed before other tasks get a turn. Processing also starts when this many
# exchanges are queued, without waiting for the periodic flush (`FLUSH_INTERVAL_S`). Otherwise the queue would
# grow to megabytes on a busy server. A short queue is processed faster, because it is still in the CPU cache.
CHUNK_LENGTH = 64

_log = structlog.get_logger()
# Arguments of `ExchangeRecorder.record_exchange`, and the start mark of the request (`storage.deletions`).
# A plain tuple, because every request builds one.
_RecordedExchange = tuple[str, str | None, str, Exchange, tuple[bytes, ...], tuple[int, int], int | None]
_RecordedUnread = tuple[BatchKey, UnreadExchange]
# A model, and the origin of its upstream.
_PricedModel = tuple[str, str]


class ExchangeLog:
    """Queues exchanges, then prices, counts and writes them in the background. Use it on one event loop.

    Args:
        usage_store: Stores the usage of each conversation.
        statistics: Counts all exchanges.
        feed: Live feed to which the newest exchanges are published.
        deletion_fence: Gives the start mark of each request. With it, `usage_store` drops an exchange whose
            conversation was deleted after the request began.
        pricing: Source of prices. None leaves all exchanges without a price.

    Attributes:
        listeners: Receivers of exchanges. A listener that fails does not stop the others.
        lost: Number of exchanges that were dropped because a queue was full.
    """

    def __init__(
        self,
        usage_store: UsageStore,
        statistics: Statistics,
        feed: LiveFeed,
        deletion_fence: DeletionFence,
        pricing: PriceSource | None = None,
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
        self._prices: dict[_PricedModel, ModelPrice | None] = {}
        self._savings = SavingsTracker()
        self._task: asyncio.Task[None] | None = None
        self._flushing = asyncio.Lock()
        self.listeners: list[ExchangeListener] = []
        self.lost = 0

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
        if len(self._read) < MAX_QUEUED:
            start_mark = self._deletion_fence.get_start_mark()
            self._read.append((tenant, conversation, origin, exchange, prefixes, counted_tokens, start_mark))
            if len(self._read) == CHUNK_LENGTH:
                asyncio.get_running_loop().call_soon(self._drain_exchanges_with_resolved_price)
        else:
            self.lost += 1

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
        if len(self._unread) < MAX_QUEUED:
            start_mark = self._deletion_fence.get_start_mark()
            self._unread.append(((tenant, conversation, origin, start_mark, model, code), unread))
            if len(self._unread) == CHUNK_LENGTH:
                asyncio.get_running_loop().call_soon(self._drain_exchanges_with_resolved_price)
        else:
            self.lost += 1

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
            await self._drain_queues()
            for flush in (self._feed.flush, self._statistics.flush, self._usage_store.flush):
                with suppress_and_report(_log_write_failure):
                    await flush()

    async def list_exchanges(self, tenant: str, conversation: str, limit: int = 500) -> list[StoredExchange]:
        """Returns the newest stored exchanges of a conversation, oldest first."""
        return await self._usage_store.list_exchanges(tenant, conversation, limit)

    async def _drain_queues(self) -> None:
        unread, self._unread = self._unread, []
        read, self._read = self._read, []
        await self._await_prices({*map(_get_unread_model, unread), *map(_get_read_model, read)})
        self._prices.clear()
        for some in split_into_chunks(unread, CHUNK_LENGTH):
            self._deliver_unread(some)
            await asyncio.sleep(0)
        for these in split_into_chunks(read, CHUNK_LENGTH):
            self._deliver_read(these)
            await asyncio.sleep(0)
        self._publish_newest()

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

    async def _await_prices(self, models: set[_PricedModel | None]) -> None:
        """Waits until the prices of the models have been looked up."""
        if self._pricing is not None:
            await self._pricing.wait_for_prices([each for each in models if each is not None])

    def _drain_exchanges_with_resolved_price(self) -> None:
        """Processes the queued exchanges that need no price lookup. The others wait for the next flush."""
        unread, self._unread = self._split_by_price(self._unread, _get_unread_model)
        self._deliver_unread(unread)
        read, self._read = self._split_by_price(self._read, _get_read_model)
        self._deliver_read(read)

    def _split_by_price(
        self, recorded: list[_T], get_model: Callable[[_T], _PricedModel | None]
    ) -> tuple[list[_T], list[_T]]:
        """Splits exchanges into those that can be processed now and those that wait for a price."""
        waiting = {each for each in set(map(get_model, recorded)) if not self._is_price_resolved(each)}
        if not waiting:
            return recorded, []
        ready = [each for each in recorded if get_model(each) not in waiting]
        return ready, [each for each in recorded if get_model(each) in waiting]

    def _is_price_resolved(self, model: _PricedModel | None) -> bool:
        if model is None or model in self._prices or self._pricing is None:
            return True
        return self._pricing.is_resolved(*model)

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
        price = self._get_price(model, origin)
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
        price = self._get_price(exchange.model, origin)
        saving = self._savings.track_exchange(tenant, conversation, exchange, price, prefixes, counted)
        entry = ExchangeEntry(tenant, conversation, exchange, saving)
        if conversation is None or self._usage_store.add_exchange(conversation, entry, start_mark):
            self._newest_entries.append(entry)
        return entry

    def _get_price(self, model: str, origin: str) -> ModelPrice | None:
        """Returns the price of a model, or None if it is unknown.

        Caches it until the next flush, because most exchanges use the same model.
        """
        name = (model, origin)
        if name not in self._prices:
            self._prices[name] = self._pricing.get_price(*name) if self._pricing else None
        return self._prices[name]

    async def _flush_periodically(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_INTERVAL_S)
            with suppress_and_report(_log_write_failure):
                await self.flush()


def _get_unread_model(recorded: _RecordedUnread) -> _PricedModel | None:
    """Returns the model and origin whose price is needed; None if the exchange has no usage to price."""
    (_, _, origin, _, model, _), unread = recorded
    return None if unread.prompt_tokens is None else (model, origin)


def _get_read_model(recorded: _RecordedExchange) -> _PricedModel | None:
    exchange = recorded[3]
    return None if exchange.prompt_tokens is None else (exchange.model, recorded[2])


def _log_write_failure(error: BaseException) -> None:
    _log.warning(JOURNAL_NOT_WRITTEN, error=type(error).__name__)
