"""Everything that the admin API looks at and steers, over one store, without a proxy around it."""

from collections.abc import Callable, Iterable
from typing import Any

from compaction_proxy.admin.queries import Watching
from compaction_proxy.compaction.commands import Steering
from compaction_proxy.compaction.compacted_conversations import CompactedConversations
from compaction_proxy.compaction.directives import Wishing
from compaction_proxy.config.config import Config
from compaction_proxy.core.cost.price import Price, Tier
from compaction_proxy.recall.fulltext import SqliteFullText
from compaction_proxy.recall.retention import Bounds, Holdings
from compaction_proxy.recall.round_detail import Details
from compaction_proxy.recall.search import Recall
from compaction_proxy.storage.records import Records
from compaction_proxy.storage.store import Store
from compaction_proxy.telemetry.conversation_registry import Owners
from compaction_proxy.telemetry.event_history import History
from compaction_proxy.telemetry.exchange_log import Journal
from compaction_proxy.telemetry.live_feed import Feed
from compaction_proxy.telemetry.statistics import Statistics
from compaction_proxy.telemetry.usage import Accounts

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
