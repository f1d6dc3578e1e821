"""The journal: every exchange is noted at once and worked through behind, in no request's way.

Once a second what was noted is priced, counted, put to the account of its conversation, and told to whoever
listens; then all that is written.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

import structlog

from compaction_proxy.core.cost.price import Price
from compaction_proxy.core.cost.savings import FEW_MESSAGES, UNHEARD, Saving, Standing, saving_of, unchanged
from compaction_proxy.core.exchange import Exchange, Unread, exchange_of
from compaction_proxy.providers.types import Prices
from compaction_proxy.storage.deletions import Outdated
from compaction_proxy.storage.keys import conversation_key
from compaction_proxy.support.fail_open import contained
from compaction_proxy.support.log_events import JOURNAL_NOT_WRITTEN
from compaction_proxy.telemetry.exchange_batch import Alike, Entry, added_up, newest_of, when
from compaction_proxy.telemetry.live_feed import EXCHANGE, EXCHANGES_PER_S, Feed
from compaction_proxy.telemetry.statistics import Statistics
from compaction_proxy.telemetry.usage import Accounts, Kept, to_fields

# Conversations of which it is remembered what the provider has read.
MAX_STANDING = 1_000
# Exchanges of a conversation that are put aside.
MAX_ASIDE = 4

# An exchange, the newest prefix digests of its list, and our own counts.
_Aside = tuple[Exchange, Sequence[bytes], tuple[int, int]]


class _Known(NamedTuple):
    """What is known of a conversation: of what was worked through, and what was put aside since."""

    standing: Standing
    aside: deque[_Aside]


class Savings:
    """Remembers what providers have read. For use on one event loop."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, _Known] = OrderedDict()

    def of(
        self,
        tenant: str,
        conversation: str | None,
        exchange: Exchange,
        price: Price | None,
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
        sent, left = counted
        whole = sent == left and exchange.tokens_before == exchange.tokens_after and not exchange.recalls
        if conversation is None:
            return (
                unchanged(exchange, price)
                if whole
                else saving_of(exchange, prefixes, None, price, counted)[0]
            )
        key = conversation_key(tenant, conversation)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _Known(UNHEARD, deque(maxlen=MAX_ASIDE))
            if len(self._known) > MAX_STANDING:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(key)
        if whole:
            known.aside.append((exchange, prefixes[-FEW_MESSAGES:], counted))
            return unchanged(exchange, price)
        standing = known.standing
        for earlier, its_prefixes, its_counts in known.aside:
            standing = saving_of(earlier, its_prefixes, standing, None, its_counts)[1]
        made, standing = saving_of(exchange, prefixes, standing, price, counted)
        self._known[key] = _Known(standing, deque(maxlen=MAX_ASIDE))
        return made


_T = TypeVar("_T")


# Given exchanges, some at a time, behind their requests, on the event loop; must not wait.
# Those that were not read come added up.
Listener = Callable[[Sequence[Entry], Sequence[Alike]], None]


class Notes(Protocol):
    """Notes exchanges (`Journal`)."""

    def note(
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

    def note_unread(
        self, tenant: str, conversation: str | None, origin: str, model: str, code: int, unread: Unread
    ) -> None:
        """Note one whose request was not read."""
        ...


# What exchanges that are added up have in common: tenant, conversation, origin, when their requests began
# (`storage.deletions`), model, status code.
Key = tuple[str, str | None, str, int | None, str, int]


def grouped(noted: Sequence[tuple[Key, Unread]]) -> dict[Key, list[Unread]]:
    """Those that are alike, in their order."""
    groups: dict[Key, list[Unread]] = {}
    for key, unread in noted:
        group = groups.get(key)
        if group is None:
            group = groups[key] = []
        group.append(unread)
    return groups


def slices(items: Sequence[_T], length: int) -> Iterator[Sequence[_T]]:
    """So many items at a time."""
    return (items[start : start + length] for start in range(0, len(items), length))


FLUSH_S = 1.0
# Exchanges that may wait to be worked through; beyond it the newest are not noted.
MAX_NOTED = 50_000
# Exchanges that are worked through before others have their turn, and as soon as there are so many: what a
# busy server notes in a second would be megabytes, and memory that is used again at once is quicker.
AT_ONCE = 64

_log = structlog.get_logger()
# What is noted of exchanges, as `Notes` are given it and with when its request
# began (`storage.deletions`), in plain tuples: this is in everybody's way.
_Read = tuple[str, str | None, str, Exchange, tuple[bytes, ...], tuple[int, int], int | None]
_Unread = tuple[Key, Unread]
# A model, and the origin of the upstream that serves it.
_Asked = tuple[str, str]


class Journal:
    """Notes exchanges, and has them priced, counted and written, on one event loop.

    Args:
        accounts: Keep what belongs to a conversation.
        statistics: Count.
        feed: Tells those who watch.
        outdated: Knows when what runs here began.
        pricing: Knows prices; None: nobody does.

    Attributes:
        listeners: Whom to give them to. One that fails keeps nobody from hearing.
        lost: Exchanges that were not noted because too many waited.
    """

    def __init__(
        self,
        accounts: Accounts,
        statistics: Statistics,
        feed: Feed,
        outdated: Outdated,
        pricing: Prices | None = None,
    ) -> None:
        self._accounts = accounts
        self._statistics = statistics
        self._feed = feed
        self._outdated = outdated
        self._pricing = pricing
        self._read: list[_Read] = []
        self._unread: list[_Unread] = []
        # The newest, of which the feed will be told.
        self._shown: deque[Entry] = deque(maxlen=EXCHANGES_PER_S)
        self._shown_unread: deque[Alike] = deque(maxlen=EXCHANGES_PER_S)
        self._prices: dict[_Asked, Price | None] = {}
        self._savings = Savings()
        self._task: asyncio.Task[None] | None = None
        self._flushing = asyncio.Lock()
        self.listeners: list[Listener] = []
        self.lost = 0

    def note(
        self,
        tenant: str,
        conversation: str | None,
        origin: str,
        exchange: Exchange,
        prefixes: tuple[bytes, ...] = (),
        counted: tuple[int, int] = (0, 0),
    ) -> None:
        """Note one exchange (`Notes`). In the way of every request that was read."""
        if len(self._read) < MAX_NOTED:
            begun = self._outdated.begun()
            self._read.append((tenant, conversation, origin, exchange, prefixes, counted, begun))
            if len(self._read) == AT_ONCE:
                asyncio.get_running_loop().call_soon(self._work_at_once)
        else:
            self.lost += 1

    def note_unread(
        self, tenant: str, conversation: str | None, origin: str, model: str, code: int, unread: Unread
    ) -> None:
        """Note one whose request was not read (`Notes`). In the way of every other request."""
        if len(self._unread) < MAX_NOTED:
            begun = self._outdated.begun()
            self._unread.append(((tenant, conversation, origin, begun, model, code), unread))
            if len(self._unread) == AT_ONCE:
                asyncio.get_running_loop().call_soon(self._work_at_once)
        else:
            self.lost += 1

    def start(self) -> None:
        """Begin to work in the background."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Write what waits, and end."""
        if self._task is not None:
            async with self._flushing:  # what is being written is written to its end
                self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.flush()
        await self._statistics.flush(at_last=True)
        await self._accounts.close()

    async def flush(self) -> None:
        """Work through what was noted, and write what waits."""
        async with self._flushing:
            await self._work()
            for flush in (self._feed.flush, self._statistics.flush, self._accounts.flush):
                with contained(_not_written):
                    await flush()

    async def exchanges(self, tenant: str, conversation: str, limit: int = 500) -> list[Kept]:
        """The newest exchanges of a conversation that are written, oldest first."""
        return await self._accounts.exchanges(tenant, conversation, limit)

    async def _work(self) -> None:
        unread, self._unread = self._unread, []
        read, self._read = self._read, []
        await self._await_prices({*map(_priced, unread), *map(_priced_read, read)})
        self._prices.clear()
        for some in slices(unread, AT_ONCE):
            self._through_unread(some)
            await asyncio.sleep(0)
        for these in slices(read, AT_ONCE):
            self._through_read(these)
            await asyncio.sleep(0)
        self._show()

    def _show(self) -> None:
        """Tell the feed of the newest exchanges."""
        newest = sorted([*self._shown, *newest_of(self._shown_unread, EXCHANGES_PER_S)], key=when)
        for entry in newest[-EXCHANGES_PER_S:]:
            shown = to_fields(entry.exchange, entry.saving)
            if entry.conversation is not None:
                shown["conversation"] = entry.conversation
            self._feed.tell(EXCHANGE, shown)
        self._shown.clear()
        self._shown_unread.clear()

    async def _await_prices(self, asked: set[_Asked | None]) -> None:
        """Have the prices looked up of models at upstreams."""
        if self._pricing is not None:
            await self._pricing.ready([each for each in asked if each is not None])

    def _work_at_once(self) -> None:
        """Work through what was noted, but for what has no price yet: that waits for the flush."""
        unread, self._unread = self._parted(self._unread, _priced)
        self._through_unread(unread)
        read, self._read = self._parted(self._read, _priced_read)
        self._through_read(read)

    def _parted(self, noted: list[_T], priced: Callable[[_T], _Asked | None]) -> tuple[list[_T], list[_T]]:
        """What can be worked through now, and what waits for a price."""
        waiting = {each for each in set(map(priced, noted)) if not self._is_settled(each)}
        if not waiting:
            return noted, []
        ready = [each for each in noted if priced(each) not in waiting]
        return ready, [each for each in noted if priced(each) in waiting]

    def _is_settled(self, asked: _Asked | None) -> bool:
        if asked is None or asked in self._prices or self._pricing is None:
            return True
        return self._pricing.settled(*asked)

    def _through_unread(self, noted: Sequence[_Unread]) -> None:
        """Have exchanges counted, put to accounts and told."""
        if noted:
            with contained(_not_written):
                self._tell([], [self._together(key, group) for key, group in grouped(noted).items()])

    def _through_read(self, noted: Sequence[_Read]) -> None:
        """Likewise, one by one."""
        if noted:
            with contained(_not_written):
                entries = list(map(self._entered, noted))
                self._statistics.add(entries)
                self._tell(entries, [])

    def _tell(self, entries: Sequence[Entry], alike: Sequence[Alike]) -> None:
        for listener in self.listeners:
            with contained(_not_written):
                listener(entries, alike)

    def _together(self, key: Key, exchanges: list[Unread]) -> Alike:
        """Exchanges that are alike, in the account of their conversation."""
        tenant, conversation, origin, begun, model, code = key
        price = self._price(model, origin)
        alike = added_up(tenant, conversation, model, code, exchanges, price)
        self._statistics.add_alike(alike)
        if conversation is None or self._accounts.add_alike(alike, begun):
            self._shown_unread.append(alike)
        if conversation is not None:
            self._savings.of(tenant, conversation, exchange_of(model, code, exchanges[-1]), price)
        return alike

    def _entered(self, noted: _Read) -> Entry:
        """An exchange with its price, in its conversation's account."""
        tenant, conversation, origin, exchange, prefixes, counted, begun = noted
        price = self._price(exchange.model, origin)
        saving = self._savings.of(tenant, conversation, exchange, price, prefixes, counted)
        entry = Entry(tenant, conversation, exchange, saving)
        if conversation is None or self._accounts.add(conversation, entry, begun):
            self._shown.append(entry)
        return entry

    def _price(self, model: str, origin: str) -> Price | None:
        """Held while all that was noted is worked through: most of it asks the same model."""
        asked = (model, origin)
        if asked not in self._prices:
            self._prices[asked] = self._pricing.of(*asked) if self._pricing else None
        return self._prices[asked]

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            with contained(_not_written):
                await self.flush()


def _priced(noted: _Unread) -> _Asked | None:
    """Whose price an exchange asks for; None where nothing is known that would have one."""
    (_, _, origin, _, model, _), unread = noted
    return None if unread.prompt_tokens is None else (model, origin)


def _priced_read(noted: _Read) -> _Asked | None:
    exchange = noted[3]
    return None if exchange.prompt_tokens is None else (exchange.model, noted[2])


def _not_written(error: BaseException) -> None:
    _log.warning(JOURNAL_NOT_WRITTEN, error=type(error).__name__)
