"""Everything that the admin API looks at and steers, over one store, without a proxy around it."""

from collections.abc import Callable, Iterable
from typing import Any

from proxy.accounts import Accounts
from proxy.adapters.full_text import SqliteFullText
from proxy.compacted_conversations import CompactedConversations
from proxy.config.model import Config
from proxy.core.price import Price, Tier
from proxy.detail import Details
from proxy.feed import Feed
from proxy.history import History
from proxy.holdings import Bounds, Holdings
from proxy.journal import Journal
from proxy.owners import Owners
from proxy.ports import Store
from proxy.recall import Recall
from proxy.statistics import Statistics
from proxy.steering import Steering
from proxy.storage.records import Records
from proxy.watching import Watching
from proxy.wishes import Wishing

ORIGIN = "https://api.example:443"
PRICE = Price((Tier(0, 2.0, 0.5, 2.0, 8.0), Tier(200_000, 4.0, 1.0, 4.0, 16.0)), "a table 1", "2026-11-01")


class Prices:
    """Knows the price of every model whose name begins with `gpt`."""

    def of(self, model: str, origin: str) -> Price | None:
        return PRICE if model.startswith("gpt") and origin == ORIGIN else None

    def settled(self, model: str, origin: str) -> bool:
        return True

    async def ready(self, names: Iterable[tuple[str, str]]) -> None:
        """They are known."""


class Watched:
    """The parts, and the use cases over them."""

    def __init__(
        self, store: Store, ttl_s: float, now: Callable[[], float] = lambda: 50.0, **config: Any
    ) -> None:
        self.records = Records(store, lambda _: None)
        self.owners = Owners(self.records, ttl_s, now=now)
        self.history = History(self.records, ttl_s)
        self.wishing = Wishing(self.records, ttl_s)
        self.accounts = Accounts(self.records, ttl_s)
        self.statistics = Statistics(self.records, ttl_s, now)
        self.feed = Feed(self.records, ttl_s, now)
        self.journal = Journal(
            self.accounts, self.statistics, self.feed, self.records.outdated, pricing=Prices()
        )
        holdings = Holdings(self.records, ttl_s, Bounds())
        recall = Recall(self.records, self.history, holdings, SqliteFullText())
        compacted = CompactedConversations(self.records, ttl_s)
        self.steering = Steering(
            self.records, self.owners, self.history, self.wishing, recall, compacted=compacted, now=now
        )
        self.watching = Watching(
            self.records,
            self.owners,
            self.accounts,
            self.history,
            Details(self.records, self.history),
            self.wishing,
            self.statistics,
            self.feed,
            Prices(),
            Config.model_validate(config),
            ORIGIN,
            now,
        )
