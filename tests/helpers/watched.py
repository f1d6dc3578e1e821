"""Everything that the admin API looks at and steers, over one store, without a proxy around it."""

from collections.abc import Callable
from typing import Any

from compaction_proxy.admin.api.overview import create_conversation_loader
from compaction_proxy.admin.queries import ConversationQueries
from compaction_proxy.compaction.commands import ConversationCommands
from compaction_proxy.compaction.compacted_conversations import CompactedConversations
from compaction_proxy.compaction.directives import DirectiveStore
from compaction_proxy.config.config import Config
from compaction_proxy.core.cost.price import ModelPrice, PriceTier
from compaction_proxy.providers.model_limits import ModelLimits
from compaction_proxy.recall.fulltext import SqliteTextIndexBuilder
from compaction_proxy.recall.retention import ArchiveBounds, ArchiveRetention
from compaction_proxy.recall.round_detail import RoundDetailReader
from compaction_proxy.recall.search import ArchiveSearch
from compaction_proxy.replay.jobs import ReplayJobRunner
from compaction_proxy.storage.records import RecordStore
from compaction_proxy.storage.store import Store
from compaction_proxy.telemetry.conversation_registry import ConversationRegistry
from compaction_proxy.telemetry.event_history import EventHistory
from compaction_proxy.telemetry.exchange_log import ExchangeLog
from compaction_proxy.telemetry.live_feed import LiveFeed
from compaction_proxy.telemetry.statistics import Statistics
from compaction_proxy.telemetry.usage import UsageStore

ORIGIN = "https://api.example:443"
PRICE = ModelPrice(
    (PriceTier(0, 2.0, 0.5, 2.0, 8.0), PriceTier(200_000, 4.0, 1.0, 4.0, 16.0)), "a table 1", "2026-11-01"
)


SECRET = b"secret"


class Prices:
    """Knows the price of every model whose name begins with `gpt`."""

    def get_price(self, model: str, origin: str) -> ModelPrice | None:
        return PRICE if model.startswith("gpt") and origin == ORIGIN else None


class Watched:
    """The parts, and the use cases over them."""

    def __init__(
        self, store: Store, ttl_s: float, now: Callable[[], float] = lambda: 50.0, **config: Any
    ) -> None:
        self.records = RecordStore(store, lambda _: None)
        self.owners = ConversationRegistry(self.records, ttl_s, now=now)
        self.history = EventHistory(self.records, ttl_s)
        self.wishing = DirectiveStore(self.records, ttl_s)
        self.accounts = UsageStore(self.records, ttl_s)
        self.statistics = Statistics(self.records, ttl_s, now)
        self.feed = LiveFeed(self.records, ttl_s, now)
        self.journal = ExchangeLog(
            self.accounts, self.statistics, self.feed, self.records.deletion_fence, pricing=Prices()
        )
        holdings = ArchiveRetention(self.records, ttl_s, ArchiveBounds())
        recall = ArchiveSearch(self.records, self.history, holdings, SqliteTextIndexBuilder())
        compacted = CompactedConversations(self.records, ttl_s)
        self.steering = ConversationCommands(
            self.records, self.owners, self.history, self.wishing, recall, compacted=compacted, now=now
        )
        self.watching = ConversationQueries(
            self.records,
            self.owners,
            self.accounts,
            self.history,
            RoundDetailReader(self.records, self.history),
            self.wishing,
            self.statistics,
            self.feed,
            Prices(),
            ModelLimits(self.records),
            Config.model_validate(config),
            ORIGIN,
            lambda: SECRET,
            now,
        )
        self.replaying = ReplayJobRunner(Config(), create_conversation_loader(self.steering, self.watching))
