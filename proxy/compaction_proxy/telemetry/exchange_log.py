"""The journal: every exchange is noted at once and worked through behind, in no request's way.

Once a second what was noted is priced, counted, put to the account of its conversation, and told to whoever
listens; then all that is written.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

import structlog

from compaction_proxy.core.cost.price import ModelPrice
from compaction_proxy.core.cost.savings import (
    EMPTY_CACHE_STATE,
    FEW_MESSAGES,
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
    build_batch,
    get_entry_time,
    select_newest,
)
from compaction_proxy.telemetry.live_feed import EXCHANGE, EXCHANGES_PER_S, LiveFeed
from compaction_proxy.telemetry.statistics import Statistics
from compaction_proxy.telemetry.usage import StoredExchange, UsageStore, to_fields

# Conversations of which it is remembered what the provider has read.
MAX_TRACKED_CONVERSATIONS = 1_000
# Exchanges of a conversation that are put aside.
MAX_DEFERRED = 4

# An exchange, the newest prefix digests of its list, and our own counts.
_DeferredExchange = tuple[Exchange, Sequence[bytes], tuple[int, int]]


class _TrackedConversation(NamedTuple):
    """What is known of a conversation: of what was worked through, and what was put aside since."""

    cache_state: CacheState
    deferred: deque[_DeferredExchange]


class SavingsTracker:
    """Remembers what providers have read. For use on one event loop."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, _TrackedConversation] = OrderedDict()

    def track_exchange(
        self,
        tenant: str,
        conversation: str | None,
        exchange: Exchange,
        price: ModelPrice | None,
        prefixes: Sequence[bytes] = (),
        counted: tuple[int, int] = (0, 0),
    ) -> Saving | None:
        """What an exchange has saved; None where that is not known. To be told of exchanges in their order.

        Args:
            tenant: Whose it is.
            conversation: Of which conversation; None: nothing is known of it.
            exchange: The exchange.
            price: Of the model that was asked; None if that is not known.
            prefixes: Prefix digests of the client's non-privileged messages; empty if it was not read.
            counted: Tokens that the client sent and that were forwarded, uncalibrated; zeros if not read.
        """
        sent, forwarded = counted
        whole = sent == forwarded and exchange.tokens_before == exchange.tokens_after and not exchange.recalls
        if conversation is None:
            return (
                compute_unchanged_saving(exchange, price)
                if whole
                else compute_saving(exchange, prefixes, None, price, counted)[0]
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
            known.deferred.append((exchange, prefixes[-FEW_MESSAGES:], counted))
            return compute_unchanged_saving(exchange, price)
        standing = known.cache_state
        for earlier, its_prefixes, its_counts in known.deferred:
            standing = compute_saving(earlier, its_prefixes, standing, None, its_counts)[1]
        made, standing = compute_saving(exchange, prefixes, standing, price, counted)
        self._known[key] = _TrackedConversation(standing, deque(maxlen=MAX_DEFERRED))
        return made


_T = TypeVar("_T")


# Given exchanges, some at a time, behind their requests, on the event loop; must not wait.
# Those that were not read come added up.
ExchangeListener = Callable[[Sequence[ExchangeEntry], Sequence[ExchangeBatch]], None]


class ExchangeRecorder(Protocol):
    """Notes exchanges (`ExchangeLog`)."""

    def record_exchange(
        self,
        tenant: str,
        conversation: str | None,
        origin: str,
        exchange: Exchange,
        prefixes: tuple[bytes, ...] = (),
        counted: tuple[int, int] = (0, 0),
    ) -> None:
        """Note one exchange.

        Args:
            tenant: Whose it was.
            conversation: Of which conversation, if that is known.
            origin: Of the upstream.
            exchange: Its figures.
            prefixes: Prefix digests of the client's non-privileged messages; empty where it was not read.
            counted: Tokens that the client sent and that were forwarded, uncalibrated; zeros if not read.
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
        """Note one whose request was not read."""
        ...


# What exchanges that are added up have in common: tenant, conversation, origin, when their requests began
# (`storage.deletions`), model, status code.
BatchKey = tuple[str, str | None, str, int | None, str, int]


def group_by_key(recorded: Sequence[tuple[BatchKey, UnreadExchange]]) -> dict[BatchKey, list[UnreadExchange]]:
    """Those that are alike, in their order."""
    groups: dict[BatchKey, list[UnreadExchange]] = {}
    for key, unread in recorded:
        group = groups.get(key)
        if group is None:
            group = groups[key] = []
        group.append(unread)
    return groups


def split_into_chunks(items: Sequence[_T], length: int) -> Iterator[Sequence[_T]]:
    """So many items at a time."""
    return (items[start : start + length] for start in range(0, len(items), length))


FLUSH_S = 1.0
# Exchanges that may wait to be worked through; beyond it the newest are not noted.
MAX_NOTED = 50_000
# Exchanges that are worked through before others have their turn, and as soon as there are so many: what a
# busy server notes in a second would be megabytes, and memory that is used again at once is quicker.
AT_ONCE = 64

_log = structlog.get_logger()
# What is noted of exchanges, as `ExchangeRecorder` are given it and with when its request
# began (`storage.deletions`), in plain tuples: this is in everybody's way.
_RecordedExchange = tuple[str, str | None, str, Exchange, tuple[bytes, ...], tuple[int, int], int | None]
_RecordedUnread = tuple[BatchKey, UnreadExchange]
# A model, and the origin of the upstream that serves it.
_PricedModel = tuple[str, str]


class ExchangeLog:
    """Notes exchanges, and has them priced, counted and written, on one event loop.

    Args:
        usage_store: Keep what belongs to a conversation.
        statistics: Count.
        feed: Tells those who watch.
        deletion_fence: Knows when what runs here began.
        pricing: Knows prices; None: nobody does.

    Attributes:
        listeners: Whom to give them to. One that fails keeps nobody from hearing.
        lost: Exchanges that were not noted because too many waited.
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
        # The newest, of which the feed will be told.
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
        counted: tuple[int, int] = (0, 0),
    ) -> None:
        """Note one exchange (`ExchangeRecorder`). In the way of every request that was read."""
        if len(self._read) < MAX_NOTED:
            start_mark = self._deletion_fence.get_start_mark()
            self._read.append((tenant, conversation, origin, exchange, prefixes, counted, start_mark))
            if len(self._read) == AT_ONCE:
                asyncio.get_running_loop().call_soon(self._drain_priced)
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
        """Note one whose request was not read (`ExchangeRecorder`). In the way of every other request."""
        if len(self._unread) < MAX_NOTED:
            start_mark = self._deletion_fence.get_start_mark()
            self._unread.append(((tenant, conversation, origin, start_mark, model, code), unread))
            if len(self._unread) == AT_ONCE:
                asyncio.get_running_loop().call_soon(self._drain_priced)
        else:
            self.lost += 1

    def start(self) -> None:
        """Begin to work in the background."""
        self._task = asyncio.create_task(self._flush_periodically())

    async def close(self) -> None:
        """Write what waits, and end."""
        if self._task is not None:
            async with self._flushing:  # what is being written is written to its end
                self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.flush()
        await self._statistics.flush(at_last=True)
        await self._usage_store.close()

    async def flush(self) -> None:
        """Work through what was noted, and write what waits."""
        async with self._flushing:
            await self._drain_queues()
            for flush in (self._feed.flush, self._statistics.flush, self._usage_store.flush):
                with suppress_and_report(_log_write_failure):
                    await flush()

    async def list_exchanges(self, tenant: str, conversation: str, limit: int = 500) -> list[StoredExchange]:
        """The newest exchanges of a conversation that are written, oldest first."""
        return await self._usage_store.list_exchanges(tenant, conversation, limit)

    async def _drain_queues(self) -> None:
        unread, self._unread = self._unread, []
        read, self._read = self._read, []
        await self._await_prices({*map(_get_unread_model, unread), *map(_get_read_model, read)})
        self._prices.clear()
        for some in split_into_chunks(unread, AT_ONCE):
            self._deliver_unread(some)
            await asyncio.sleep(0)
        for these in split_into_chunks(read, AT_ONCE):
            self._deliver_read(these)
            await asyncio.sleep(0)
        self._publish_newest()

    def _publish_newest(self) -> None:
        """Tell the feed of the newest exchanges."""
        newest = sorted(
            [*self._newest_entries, *select_newest(self._newest_batches, EXCHANGES_PER_S)], key=get_entry_time
        )
        for entry in newest[-EXCHANGES_PER_S:]:
            shown = to_fields(entry.exchange, entry.saving)
            if entry.conversation is not None:
                shown["conversation"] = entry.conversation
            self._feed.publish(EXCHANGE, shown)
        self._newest_entries.clear()
        self._newest_batches.clear()

    async def _await_prices(self, models: set[_PricedModel | None]) -> None:
        """Have the prices looked up of models at upstreams."""
        if self._pricing is not None:
            await self._pricing.wait_for_prices([each for each in models if each is not None])

    def _drain_priced(self) -> None:
        """Work through what was noted, but for what has no price yet: that waits for the flush."""
        unread, self._unread = self._split_by_price(self._unread, _get_unread_model)
        self._deliver_unread(unread)
        read, self._read = self._split_by_price(self._read, _get_read_model)
        self._deliver_read(read)

    def _split_by_price(
        self, recorded: list[_T], get_model: Callable[[_T], _PricedModel | None]
    ) -> tuple[list[_T], list[_T]]:
        """What can be worked through now, and what waits for a price."""
        waiting = {each for each in set(map(get_model, recorded)) if not self._is_price_known(each)}
        if not waiting:
            return recorded, []
        ready = [each for each in recorded if get_model(each) not in waiting]
        return ready, [each for each in recorded if get_model(each) in waiting]

    def _is_price_known(self, model: _PricedModel | None) -> bool:
        if model is None or model in self._prices or self._pricing is None:
            return True
        return self._pricing.is_resolved(*model)

    def _deliver_unread(self, recorded: Sequence[_RecordedUnread]) -> None:
        """Have exchanges counted, put to accounts and told."""
        if recorded:
            with suppress_and_report(_log_write_failure):
                self._notify_listeners(
                    [], [self._add_batch(key, group) for key, group in group_by_key(recorded).items()]
                )

    def _deliver_read(self, recorded: Sequence[_RecordedExchange]) -> None:
        """Likewise, one by one."""
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
        """Exchanges that are alike, in the account of their conversation."""
        tenant, conversation, origin, begun, model, code = key
        price = self._get_price(model, origin)
        alike = build_batch(tenant, conversation, model, code, exchanges, price)
        self._statistics.add_batch(alike)
        if conversation is None or self._usage_store.add_batch(alike, begun):
            self._newest_batches.append(alike)
        if conversation is not None:
            self._savings.track_exchange(
                tenant, conversation, build_unread_exchange(model, code, exchanges[-1]), price
            )
        return alike

    def _add_exchange(self, recorded: _RecordedExchange) -> ExchangeEntry:
        """An exchange with its price, in its conversation's account."""
        tenant, conversation, origin, exchange, prefixes, counted, begun = recorded
        price = self._get_price(exchange.model, origin)
        saving = self._savings.track_exchange(tenant, conversation, exchange, price, prefixes, counted)
        entry = ExchangeEntry(tenant, conversation, exchange, saving)
        if conversation is None or self._usage_store.add_exchange(conversation, entry, begun):
            self._newest_entries.append(entry)
        return entry

    def _get_price(self, model: str, origin: str) -> ModelPrice | None:
        """Held while all that was noted is worked through: most of it asks the same model."""
        asked = (model, origin)
        if asked not in self._prices:
            self._prices[asked] = self._pricing.get_price(*asked) if self._pricing else None
        return self._prices[asked]

    async def _flush_periodically(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            with suppress_and_report(_log_write_failure):
                await self.flush()


def _get_unread_model(recorded: _RecordedUnread) -> _PricedModel | None:
    """Whose price an exchange asks for; None where nothing is known that would have one."""
    (_, _, origin, _, model, _), unread = recorded
    return None if unread.prompt_tokens is None else (model, origin)


def _get_read_model(recorded: _RecordedExchange) -> _PricedModel | None:
    exchange = recorded[3]
    return None if exchange.prompt_tokens is None else (exchange.model, recorded[2])


def _log_write_failure(error: BaseException) -> None:
    _log.warning(JOURNAL_NOT_WRITTEN, error=type(error).__name__)
