"""The journal: every exchange is noted at once and worked through behind, in no request's way.

Once a second what was noted is priced, counted, put to the account of its conversation, and told to whoever
listens; then all that is written.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Sequence

import structlog

from proxy.accounts import MAX_LINES, Accounts, Kept, to_fields
from proxy.core.alike import Alike, added_up
from proxy.core.economics import Saving, Standing, saving
from proxy.core.exchange import Exchange
from proxy.core.keys import conversation_key
from proxy.core.price import Price
from proxy.core.recall_cost import saving_of
from proxy.feed import EXCHANGE, EXCHANGES_PER_S, Feed
from proxy.guard import contained
from proxy.logs import JOURNAL_NOT_WRITTEN
from proxy.noting import Entry, Groups, Key, Listener, Noted, Raw, parted, slices
from proxy.ports import Prices
from proxy.statistics import Statistics
from proxy.storage.outdated import Outdated

FLUSH_S = 1.0
# Exchanges that may wait to be worked through; beyond it the newest are not noted.
MAX_NOTED = 50_000
# Exchanges that are worked through before others have their turn, and as soon as there are so many: what a
# busy server notes in a second would be megabytes, and memory that is used again at once is quicker.
AT_ONCE = 64
# Conversations of which it is remembered what the provider has read.
MAX_STANDING = 1_000

_log = structlog.get_logger()


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
        self._noted: list[Raw] = []
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
            if len(self._noted) == AT_ONCE:
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
        noted, self._noted = self._noted, []
        await self._await_prices(noted)
        self._prices.clear()
        for some in slices(noted, AT_ONCE):
            self._through(some)
            await asyncio.sleep(0)
        for entry in self._shown:
            conversation = entry.noted.conversation
            shown = to_fields(Kept(entry.noted.exchange, entry.saving))
            self._feed.tell(EXCHANGE, {**shown, "conversation": conversation} if conversation else shown)
        self._shown.clear()

    def _work_at_once(self) -> None:
        """Work through what was noted, but for what has no price yet: that waits for the flush."""
        noted, self._noted = self._noted, []
        waiting = [each for each in noted if not self._is_settled(each)]
        self._noted = waiting
        self._through([each for each in noted if self._is_settled(each)] if waiting else noted)

    def _is_settled(self, each: Raw) -> bool:
        exchange = each[3]
        if exchange.prompt_tokens is None or (exchange.model, each[2]) in self._prices:
            return True
        return self._pricing is None or self._pricing.settled(exchange.model, each[2])

    def _through(self, noted: Sequence[Raw]) -> None:
        """Have exchanges counted, put to accounts and told."""
        groups: Groups = {}
        with contained(_not_written):
            rest = parted(noted, groups, set())
            if groups:
                self._tell([], [self._grouped(key, group) for key, group in groups.items()])
            if rest:
                self._tell([self._entered(Noted._make(each)) for each in rest], [])

    def _tell(self, entries: Sequence[Entry], alike: Sequence[Alike]) -> None:
        for listener in self.listeners:
            with contained(_not_written):
                listener(entries, alike)

    def _grouped(self, key: Key, exchanges: list[Exchange]) -> Alike:
        """Exchanges that are alike, in the account of their conversation."""
        tenant, conversation, origin, begun, model, _ = key
        price = self._price(model, origin)
        alike = added_up(tenant, conversation, exchanges, price)
        self._statistics.add_alike(alike)
        newest = [Kept(each, _unchanged(each, price)) for each in exchanges[-MAX_LINES:]]
        if conversation is None or self._accounts.add_alike(alike, newest, begun):
            noted = Noted(tenant, conversation, origin, exchanges[-1])
            self._shown.extend(Entry(noted._replace(exchange=each), made) for each, made in newest)
        if conversation is not None:
            self._heard(Noted(tenant, conversation, origin, exchanges[-1]), price)
        return alike

    async def _await_prices(self, noted: Sequence[Raw]) -> None:
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

    def _price(self, model: str, origin: str) -> Price | None:
        """Held while all that was noted is worked through: most of it asks the same model."""
        asked = (model, origin)
        if asked not in self._prices:
            self._prices[asked] = self._pricing.of(*asked) if self._pricing else None
        return self._prices[asked]

    def _saved(self, noted: Noted) -> Saving | None:
        exchange = noted.exchange
        price = self._price(exchange.model, noted.origin)
        if noted.conversation is not None:
            return self._heard(noted, price)
        if exchange.tokens_before == exchange.tokens_after:
            return _unchanged(exchange, price)
        return saving(exchange, noted.prefixes, None, price, noted.counted)[0]

    def _heard(self, noted: Noted, price: Price | None) -> Saving | None:
        """What an exchange saved, by what is known of its conversation; that is known of it then, too."""
        key = conversation_key(noted.tenant, noted.conversation or "")
        known = self._standing.get(key)
        made, self._standing[key] = saving_of(noted.exchange, noted.prefixes, known, price, noted.counted)
        self._standing.move_to_end(key)
        if len(self._standing) > MAX_STANDING:
            self._standing.popitem(last=False)
        return made

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            with contained(_not_written):
                await self.flush()


def _unchanged(exchange: Exchange, price: Price | None) -> Saving | None:
    """What `saving` says of an exchange that stands alone and went on as it came; in a tenth of the time."""
    if price is None:
        return None
    if exchange.failed:
        return Saving(0.0)
    if exchange.prompt_tokens is None:
        return None
    cached, written = exchange.cached_tokens or 0, exchange.completion_tokens or 0
    return Saving(price.of(exchange.prompt_tokens, cached, written))


def _not_written(error: BaseException) -> None:
    _log.warning(JOURNAL_NOT_WRITTEN, error=type(error).__name__)
