"""The journal: every exchange is noted at once and worked through behind, in no request's way.

Once a second what was noted is priced, counted, put to the account of its conversation, and told to whoever
listens; then all that is written.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import structlog

from proxy.accounts import Accounts, Kept, to_fields
from proxy.core.economics import Saving, Standing, saving
from proxy.core.exchange import Exchange
from proxy.core.keys import conversation_key
from proxy.core.price import Price
from proxy.core.statistics import FAILED_FROM
from proxy.feed import EXCHANGE, EXCHANGES_PER_S, Feed
from proxy.guard import contained
from proxy.logs import JOURNAL_NOT_WRITTEN
from proxy.statistics import Statistics
from proxy.storage.outdated import Outdated

FLUSH_S = 1.0
# Exchanges that may wait to be worked through; beyond it the newest are not noted.
MAX_NOTED = 50_000
# Exchanges that are worked through before others have their turn.
AT_ONCE = 250
# Conversations of which it is remembered what the provider has read.
MAX_STANDING = 10_000

_log = structlog.get_logger()


class Pricing(Protocol):
    """Knows what models cost."""

    def of(self, model: str, origin: str) -> Price | None:
        """The price of a model at an upstream; None where it is not known, or not yet."""
        ...

    async def ready(self, names: Iterable[tuple[str, str]]) -> None:
        """Come back when the prices of models at upstreams are known, or cannot be."""
        ...


class Noted(NamedTuple):
    """An exchange, and whose it was.

    Attributes:
        tenant: Whose.
        conversation: Of which conversation, if that is known.
        origin: Of the upstream.
        exchange: Its figures.
        prefixes: Prefix digests of the client's non-privileged messages; empty where it was not read.
        counted: Tokens that the client sent and that were forwarded, uncalibrated; zeros where it was not read.
        begun: When its request began (`storage.outdated`).
    """

    tenant: str
    conversation: str | None
    origin: str
    exchange: Exchange
    prefixes: tuple[bytes, ...] = ()
    counted: tuple[int, int] = (0, 0)
    begun: int | None = None


class Bare(NamedTuple):
    """Exchanges of which nothing is known but that they were: not read, of no conversation known.

    Attributes:
        tenant: Whose.
        model: The model that was asked; empty if that is not known.
        code: The upstream's status code.
        exchanges: Their figures.
    """

    tenant: str
    model: str
    code: int
    exchanges: list[Exchange]


class Entry(NamedTuple):
    """What was noted, and what it saved; None where that is not known."""

    noted: Noted
    saving: Saving | None


# Given exchanges, some at a time, behind their requests, on the event loop; must not wait.
Listener = Callable[[Sequence[Entry], Sequence[Bare]], None]


class Note(Protocol):
    """Notes an exchange (`Journal.note`)."""

    def __call__(
        self,
        tenant: str,
        conversation: str | None,
        origin: str,
        exchange: Exchange,
        prefixes: tuple[bytes, ...] = (),
        counted: tuple[int, int] = (0, 0),
    ) -> None:
        """Note one exchange, whose fields `Noted` tells."""
        ...


# What is noted, as `Noted` has it; a plain tuple, because most of it never becomes one.
_Raw = tuple[str, str | None, str, Exchange, tuple[bytes, ...], tuple[int, int], int | None]


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
        pricing: Pricing | None = None,
    ) -> None:
        self._accounts = accounts
        self._statistics = statistics
        self._feed = feed
        self._outdated = outdated
        self._pricing = pricing
        self._noted: list[_Raw] = []
        self._shown: deque[Entry] = deque(maxlen=EXCHANGES_PER_S)
        self._prices: dict[tuple[str, str], Price | None] = {}
        self._standing: OrderedDict[str, Standing] = OrderedDict()
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
        """Note one exchange (`Note`). In the way of every request."""
        if len(self._noted) < MAX_NOTED:
            begun = self._outdated.begun()
            self._noted.append((tenant, conversation, origin, exchange, prefixes, counted, begun))
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
        noted, self._noted = self._noted, []
        if noted:
            await self._await_prices(noted)
        self._prices.clear()
        for start in range(0, len(noted), AT_ONCE):
            with contained(_not_written):
                self._batch(noted[start : start + AT_ONCE])
            await asyncio.sleep(0)
        for entry in self._shown:
            conversation = entry.noted.conversation
            shown = to_fields(Kept(entry.noted.exchange, entry.saving))
            self._feed.tell(EXCHANGE, {**shown, "conversation": conversation} if conversation else shown)
        self._shown.clear()

    def _batch(self, noted: Sequence[_Raw]) -> None:
        bare, rest = _parted(noted)
        entries = [self._entered(Noted._make(each)) for each in rest]
        for each in bare:
            self._statistics.add_bare(each.tenant, each.model, each.code, each.exchanges)
            newest = each.exchanges[-EXCHANGES_PER_S:]
            self._shown.extend(Entry(Noted(each.tenant, None, "", exchange), None) for exchange in newest)
        for listener in self.listeners:
            with contained(_not_written):
                listener(entries, bare)

    async def _await_prices(self, noted: Sequence[_Raw]) -> None:
        """Have the prices looked up that the exchanges ask for."""
        if self._pricing is not None:
            asked = {(each[3].model, each[2]) for each in noted if each[3].prompt_tokens is not None}
            await self._pricing.ready(asked)

    def _entered(self, noted: Noted) -> Entry:
        """An exchange with its price, in its conversation's account."""
        entry = Entry(noted, self._saved(noted))
        self._statistics.add(noted.tenant, noted.exchange, entry.saving)
        if noted.conversation is None or self._accounts.add(
            noted.tenant, noted.conversation, Kept(noted.exchange, entry.saving), noted.begun
        ):
            self._shown.append(entry)
        return entry

    def _price(self, noted: Noted) -> Price | None:
        """Held while a batch is worked through: most of it asks the same model."""
        asked = (noted.exchange.model, noted.origin)
        if asked not in self._prices:
            self._prices[asked] = self._pricing.of(*asked) if self._pricing else None
        return self._prices[asked]

    def _saved(self, noted: Noted) -> Saving | None:
        price, exchange = self._price(noted), noted.exchange
        if noted.conversation is None:
            if exchange.tokens_before == exchange.tokens_after:
                return _unchanged(exchange, price)
            return saving(exchange, noted.prefixes, None, price, noted.counted)[0]
        key = conversation_key(noted.tenant, noted.conversation)
        known = self._standing.get(key)
        made, self._standing[key] = saving(exchange, noted.prefixes, known, price, noted.counted)
        self._standing.move_to_end(key)
        if len(self._standing) > MAX_STANDING:
            self._standing.popitem(last=False)
        return made

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            with contained(_not_written):
                await self.flush()


def _parted(noted: Sequence[_Raw]) -> tuple[list[Bare], list[_Raw]]:
    """Those of which nothing is known, together where they are alike, and the rest."""
    alike: dict[tuple[str, str, int], list[Exchange]] = {}
    rest: list[_Raw] = []
    for each in noted:
        exchange = each[3]
        if each[1] is None and exchange.prompt_tokens is None and exchange.tokens_before is None:
            alike.setdefault((each[0], exchange.model, exchange.code), []).append(exchange)
        else:
            rest.append(each)
    return [Bare(*names, exchanges) for names, exchanges in alike.items()], rest


def _unchanged(exchange: Exchange, price: Price | None) -> Saving | None:
    """What `saving` says of an exchange that stands alone and went on as it came; in a tenth of the time."""
    if price is None:
        return None
    if exchange.code >= FAILED_FROM:
        return Saving(0.0)
    if exchange.prompt_tokens is None:
        return None
    cached, written = exchange.cached_tokens or 0, exchange.completion_tokens or 0
    return Saving(price.of(exchange.prompt_tokens, cached, written))


def _not_written(error: BaseException) -> None:
    _log.warning(JOURNAL_NOT_WRITTEN, error=type(error).__name__)
