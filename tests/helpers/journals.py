"""A process's worth of journal, for tests: everything that one worker has, over a store of the test's."""

import time
from collections.abc import Callable
from typing import NamedTuple

from compaction_proxy.core.cost.price import ModelPrice, PriceTier
from compaction_proxy.core.errors import StoreUnavailableError
from compaction_proxy.core.exchange import Exchange
from compaction_proxy.storage.records import RecordStore
from compaction_proxy.storage.store import Store
from compaction_proxy.telemetry.conversation_registry import ConversationRegistry
from compaction_proxy.telemetry.exchange_log import ExchangeLog
from compaction_proxy.telemetry.live_feed import LiveFeed
from compaction_proxy.telemetry.statistics import Statistics
from compaction_proxy.telemetry.usage import UsageStore

DAY_S = 86_400.0
MONTH_S = 30 * DAY_S
TENANT = "t"
ORIGIN = "https://upstream.example:443"
# A dollar for a million input tokens, half of it where they were cached, four for a million of output.
PRICE = ModelPrice((PriceTier(0, 1.0, 0.5, 1.0, 4.0),), "configuration")


def ignored(_: StoreUnavailableError) -> None:
    """Failures of a store that the test makes fail on purpose."""


class Priced:
    """Knows one price; of the model `unknown` none."""

    def get_price(self, model: str, origin: str) -> ModelPrice | None:
        return None if model == "unknown" else PRICE


class Noted(NamedTuple):
    """What `Journal.note` is told of an exchange."""

    tenant: str
    conversation: str | None
    origin: str
    exchange: Exchange
    prefixes: tuple[bytes, ...] = ()


class Process:
    """One worker over a store, that may be shared."""

    def __init__(self, store: Store, now: Callable[[], float] = time.time) -> None:
        self.records = RecordStore(store, ignored, probe_every_s=0.005, deadline_s=5.0)
        self.accounts = UsageStore(self.records, DAY_S)
        self.statistics = Statistics(self.records, MONTH_S, now)
        self.feed = LiveFeed(self.records, DAY_S, now)
        self.owners = ConversationRegistry(self.records, MONTH_S, now=now)
        self.journal = ExchangeLog(
            self.accounts, self.statistics, self.feed, self.records.deletion_fence, Priced()
        )


def exchange(at: float, **told: object) -> Exchange:
    """An exchange of 100 input tokens, of which 60 were cached, and 10 output tokens; 80 millionths."""
    usual = {"model": "m", "status": "none", "code": 200, "request_bytes": 500, "overhead_s": 0.0007}
    counted = {"prompt_tokens": 100, "completion_tokens": 10, "cached_tokens": 60}
    return Exchange(at=at, **{**usual, **counted, **told})  # type: ignore[arg-type]


def noted(at: float, conversation: str | None = "c_1", tenant: str = TENANT, **told: object) -> Noted:
    return Noted(tenant, conversation, ORIGIN, exchange(at, **told))
