"""Builds, opens and closes the long-lived components, the store and the secret among them."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from importlib import import_module
from pkgutil import resolve_name

import structlog

from compaction_proxy import __version__
from compaction_proxy.admin.app import Readiness
from compaction_proxy.compaction.auto_recall import Reminder
from compaction_proxy.compaction.checkpoint_index import CheckpointIndex
from compaction_proxy.compaction.compacted_conversations import CompactedConversations
from compaction_proxy.compaction.compactor import Compactor
from compaction_proxy.compaction.conversation_index import ConversationIndex
from compaction_proxy.compaction.directives import Wishing
from compaction_proxy.compaction.effectiveness import Effects
from compaction_proxy.compaction.feedback import Observing
from compaction_proxy.compaction.inflight import Rounds
from compaction_proxy.compaction.job_builder import Ordering
from compaction_proxy.compaction.message_reader import Reading
from compaction_proxy.compaction.price_triggers import Aiming, Growth
from compaction_proxy.compaction.prompts import check_instructions, instructions
from compaction_proxy.compaction.request_loader import Viewer
from compaction_proxy.compaction.round_builder import Making
from compaction_proxy.compaction.round_coordinator import Replacing
from compaction_proxy.compaction.stateless import Aside
from compaction_proxy.compaction.summarizer import Summarising
from compaction_proxy.config.config import Config
from compaction_proxy.config.sections import ServerSection
from compaction_proxy.core.errors import ConfigError, StoreUnavailable
from compaction_proxy.gateway.body_budget import default_budget
from compaction_proxy.gateway.client.httpx_transport import EngineTransport
from compaction_proxy.gateway.client.proxies import environment_proxies
from compaction_proxy.gateway.client.types import HttpEngine
from compaction_proxy.gateway.identity import minted
from compaction_proxy.gateway.upstream_monitor import UpstreamMonitor
from compaction_proxy.providers.model_limits import Learning
from compaction_proxy.providers.price_process import PriceProcess
from compaction_proxy.providers.pricing import Pricing
from compaction_proxy.providers.summary_transport import HttpSummaryModel
from compaction_proxy.providers.token_counting import Counting
from compaction_proxy.providers.tokenizers import CharacterCounter, TiktokenCounter
from compaction_proxy.providers.tokenizers_fast import ToktokCounter
from compaction_proxy.providers.types import SummaryModel
from compaction_proxy.providers.usage_baseline import Anchors
from compaction_proxy.recall.fulltext import MISSING, FullText, SqliteFullText, is_there
from compaction_proxy.recall.retention import Bounds, Holdings
from compaction_proxy.recall.search import Recall
from compaction_proxy.recall.tool import Memory
from compaction_proxy.storage.factory import (
    NO_SECRET,
    installation_secret,
    is_shared,
    open_store,
    shared_secret,
)
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.records import Records
from compaction_proxy.storage.resilient import Throttled, within
from compaction_proxy.storage.store import Store
from compaction_proxy.storage.timed import Timed
from compaction_proxy.support.fail_open import contained
from compaction_proxy.support.log_events import (
    JOURNAL_NOT_WRITTEN,
    SEARCH_UNAVAILABLE,
    STORE_FAILED,
    TOKENIZER_FAILED,
    TOKENIZER_READY,
    TRACING_NOT_INSTALLED,
)
from compaction_proxy.support.memory_limit import read_memory_limits
from compaction_proxy.telemetry.conversation_registry import Owners
from compaction_proxy.telemetry.event_bus import Announcing
from compaction_proxy.telemetry.event_history import History
from compaction_proxy.telemetry.exchange_batch import Alike, Entry
from compaction_proxy.telemetry.exchange_log import Journal
from compaction_proxy.telemetry.live_feed import Feed
from compaction_proxy.telemetry.metrics import Metrics
from compaction_proxy.telemetry.statistics import Statistics
from compaction_proxy.telemetry.tracing import Tracer
from compaction_proxy.telemetry.usage import Accounts

SECRET_DEADLINE_S = 1.0
SECRET_RETRY_S = 1.0
# A store that was emptied has its secret back, or all have its new one, after this long, in seconds.
SECRET_CHECK_S = 5.0
# Earlier secrets that are remembered.
MAX_PREVIOUS = 16
# By any of these the environment says where traces go.
COLLECTORS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")

Report = Callable[[StoreUnavailable], None]

_log = structlog.get_logger()


def store_failed(error: StoreUnavailable, suppressed: int = 0) -> None:
    """Log that the store failed; `suppressed` times since the last line of its kind."""
    left_out = {"suppressed": suppressed} if suppressed else {}
    _log.warning(STORE_FAILED, reason=error.reason, error=type(error.__cause__ or error).__name__, **left_out)


def opened_store(config: Config, store_url: str) -> Store:
    """The configured store, sealed if there are keys."""
    keys = [key.get_secret_value() for key in config.store.encryption_keys]
    if not keys:
        return open_store(store_url)
    try:
        sealing = import_module("compaction_proxy.storage.encrypted")
    except ModuleNotFoundError:
        raise ConfigError("store.encryption_keys: needs `pip install compaction-proxy[crypto]`") from None
    store: Store = sealing.SealedStore(open_store(store_url), [sealing.parsed_key(key) for key in keys])
    return store


def choose_budget(server: ServerSection) -> int:
    """Returns the bytes of request bodies that this process may hold: as configured, or as memory allows."""
    if server.max_inflight_bytes is not None:
        return server.max_inflight_bytes
    limits = read_memory_limits()
    return default_budget(limits.memory_bytes, limits.address_bytes, server.workers)


def opened_full_text() -> FullText:
    """What ranks what was removed. A SQLite that lacks what that takes is told of, and all else works."""
    if not is_there():
        _log.warning(SEARCH_UNAVAILABLE, reason=MISSING)
    return SqliteFullText()


def opened_tracer(config: Config) -> Tracer | None:
    """What follows requests, if the configuration or the environment (`OTEL_…`) names a collector.

    Raises:
        ConfigError: The configuration names one, and what it takes is not installed.
    """
    endpoint = config.observability.otlp_endpoint
    off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if off or not (endpoint or any(map(os.environ.get, COLLECTORS))):
        return None
    try:
        tracing = import_module("compaction_proxy.telemetry.otel")
    except ModuleNotFoundError:
        if endpoint:
            text = "observability.otlp_endpoint: needs `pip install compaction-proxy[otel]`"
            raise ConfigError(text) from None
        _log.warning(TRACING_NOT_INSTALLED)
        return None
    tracer: Tracer = tracing.OtelTracer(config.upstream.base_url, __version__, tracing.exporting(endpoint))
    return tracer


class Secret:
    """The key of the digests that tell tenants apart: configured, this installation's, or the shared store's.

    Replicas on one store must have the same. Until the store answers each has its own, and what it keeps
    meanwhile is found by nobody later: a miss, as with any store that is away. `report` is told of a secret
    that cannot be used.

    Attributes:
        value: The key that is in force.
    """

    def __init__(self, config: Config, store_url: str, store: Store, report: Report = store_failed) -> None:
        configured = config.server.secret.get_secret_value()
        self.value = configured.encode() or installation_secret(store_url, report)
        self._previous = [each.get_secret_value().encode() for each in config.server.previous_secrets]
        self._report = report
        self._store = None if configured or not is_shared(store_url) else store

    async def agree(self) -> bool:
        """Take the shared store's secret, or offer ours. False if the store has to be asked again."""
        if self._store is None:
            return True
        try:
            shared = await within(SECRET_DEADLINE_S, shared_secret(self._store, self.value))
        except (StoreUnavailable, TimeoutError, OSError) as error:
            if isinstance(error, StoreUnavailable) and error.reason == NO_SECRET:
                self._report(error)  # of a store that is away the records tell
            return False
        if shared != self.value:
            self._previous = [self.value, *self._previous][:MAX_PREVIOUS]
            self.value = shared
        return True

    @property
    def values(self) -> tuple[bytes, ...]:
        """The key that is in force, and behind it those that were: configured ones, or of this process."""
        return self.value, *self._previous

    async def keep_asking(self) -> None:
        """Ask until the store has answered, and now and then after that: it may have lost what it had."""
        while self._store is not None:  # noqa: ASYNC110 - the store is no event of ours
            await asyncio.sleep(SECRET_CHECK_S if await self.agree() else SECRET_RETRY_S)


# By name: the library of the one that is not chosen would take 8 MB.
ENGINES = {
    "native": "compaction_proxy.gateway.client.engine:NativeEngine",
    "aiohttp": "compaction_proxy.gateway.client.aiohttp_engine:AiohttpEngine",
}

# How long whoever asks for metrics waits for what was noted to be worked through, in seconds.
FLUSH_LIMIT_S = 1.0


def _not_flushed(error: BaseException) -> None:
    _log.warning(JOURNAL_NOT_WRITTEN, error=type(error).__name__)


def _tokenizer_failed(line: str) -> None:
    _log.warning(TOKENIZER_FAILED, reason=line)


def opened_engine(config: Config) -> HttpEngine:
    """The configured engine."""
    engine: HttpEngine = resolve_name(ENGINES[config.upstream.engine])(proxies=environment_proxies())
    return engine


def _bounds(config: Config) -> Bounds:
    return Bounds(config.archive.conversation_bytes, config.archive.tenant_bytes)


class Parts:
    """Everything that is built once, and opened and closed together.

    Args:
        config: The configuration; a store URL that is not set means memory.
        store: A store to use in place of the configured one.
        writer: Who writes summaries in place of the models that the configuration names.
        clock: Monotonic seconds, by which conversations are left alone after a failed summary.
    """

    def __init__(
        self,
        config: Config,
        store: Store | None,
        writer: SummaryModel | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_instructions(config)
        store_url = config.store.url or "memory://"
        self.store = store or opened_store(config, store_url)
        self.metrics = Metrics(__version__)
        report = Throttled(store_failed)

        def failed(error: StoreUnavailable) -> None:
            self.metrics.store_failed(error.reason)
            report(error)

        self.records = Records(Timed(self.store, self.metrics.store_took), failed)
        self.metrics.breakers["store"] = lambda: not self.records.in_use
        self.engine = opened_engine(config)
        self.transport = EngineTransport(self.engine)
        self.counter = ToktokCounter(TiktokenCounter(_tokenizer_failed), _tokenizer_failed)
        self.counting = Counting(self.counter)
        self.countings = {"tiktoken": self.counting, "characters": Counting(CharacterCounter())}
        self.reading = Reading(self.countings)
        self.learning = Learning(self.records)
        self.index = CheckpointIndex(self.records)
        self.pricing = Pricing(config, PriceProcess())
        self.growth = Growth()
        self.anchors = Anchors(self.records)
        self._tell(config, quiet=writer is not None)
        self.owners = Owners(self.records, config.store.ttl_s)
        self.conversations = ConversationIndex(self.records, self._mint, config.store.ttl_s)
        self.history = History(self.records, config.store.ttl_s)
        self.wishing = Wishing(self.records, config.store.ttl_s)
        self.compacted = CompactedConversations(self.records, config.store.ttl_s)
        self.effects = Effects()
        self.holdings = Holdings(self.records, config.store.ttl_s, _bounds(config))
        self._make(writer or HttpSummaryModel(self.transport), clock)
        self._remember()
        self.secret = Secret(config, store_url, self.store, report)
        self.ready = False

    def _make(self, writer: SummaryModel, clock: Callable[[], float]) -> None:
        """What makes rounds."""
        summarising = Summarising(writer, self.reading, price=self.pricing.cost)
        self.metrics.breakers["summary"] = lambda: summarising.resting
        self.making = Making(
            summarising,
            self.records,
            self.index,
            self.history,
            self.reading,
            holdings=self.holdings,
            announce=self.announcing,
        )
        self.rounds = Rounds(self.making, self.history, announce=self.announcing, clock=clock)

    def _remember(self) -> None:
        """What finds what was removed, answers models and agents who ask for it, and tells models unasked."""
        self.recall = Recall(self.records, self.history, self.holdings, opened_full_text())
        count, searched = partial(self.counter.count, model=""), self.metrics.searched
        self.memory = Memory(self.recall, count, reachable=lambda: self.records.reachable, searched=searched)
        self.reminder = Reminder(self.recall.search, self.reading, self.records, count, searched=searched)

    def _tell(self, config: Config, *, quiet: bool) -> None:
        """What keeps and tells of what happens. Of a rehearsal, nobody's request, nothing is traced."""
        self.accounts = Accounts(self.records, config.store.ttl_s)
        self.statistics = Statistics(self.records, config.store.ttl_s)
        self.feed = Feed(self.records, config.store.ttl_s)
        self.journal = Journal(self.accounts, self.statistics, self.feed, self.records.outdated, self.pricing)
        self.announcing = Announcing(
            self.statistics.heard, self.accounts.heard, self.feed.heard, self.metrics.event
        )
        self.journal.listeners.append(self._exchanged)
        self.upstream_monitor = UpstreamMonitor(
            self.metrics.count_upstream_error, self.statistics.record_upstream_failure
        )
        self.tracer = None if quiet else opened_tracer(config)
        if self.tracer is not None:
            self.announcing.listeners.append(self.tracer.event)

    @asynccontextmanager
    async def running(self, _: object) -> AsyncIterator[None]:
        """The life cycle: ready when the tokenizer is loaded, whatever the store does."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.records.close)
            if self.tracer is not None:
                stack.push_async_callback(self.tracer.close)
            stack.push_async_callback(self.learning.close)
            stack.callback(self.reading.close)
            stack.push_async_callback(self.transport.aclose)
            stack.push_async_callback(self.journal.close)
            stack.push_async_callback(self.feed.close)
            stack.push_async_callback(self.anchors.close)
            stack.push_async_callback(self.conversations.close)
            stack.push_async_callback(self.rounds.close)
            stack.push_async_callback(self.recall.close)
            stack.push_async_callback(self.reminder.close)
            await asyncio.gather(
                self.records.open(), self.secret.agree(), self.counting.prepare(self.counter.warm)
            )
            _log.info(TOKENIZER_READY, tokenizer=self.counter.chosen)
            asking = asyncio.create_task(self.secret.keep_asking())
            stack.callback(asking.cancel)
            measuring = asyncio.create_task(self.metrics.keep_fresh())
            stack.callback(measuring.cancel)
            stack.push_async_callback(self.compacted.close)
            await self.compacted.start()
            self.journal.start()
            self.anchors.start()
            self.ready = True
            yield
            self.ready = False

    def _exchanged(self, entries: Sequence[Entry], alike: Sequence[Alike]) -> None:
        for each in alike:
            self.metrics.alike(each)
        self.metrics.exchanges(entries)

    async def measured(self, accept: str) -> tuple[bytes, str]:
        """The metrics as `Metrics.written` gives them, with what was noted until now unless it takes long."""
        await asyncio.wait((asyncio.create_task(self._flushed()),), timeout=FLUSH_LIMIT_S)
        return await self.metrics.written(accept)

    async def _flushed(self) -> None:
        with contained(_not_flushed):
            await self.journal.flush()

    def readiness(self) -> Readiness:
        """Whether requests can be served, and how the store is."""
        return Readiness(self.ready, "ok" if self.records.reachable else "down", __version__)

    def _ordering(self, config: Config, *, keeps: bool = True) -> Ordering:
        return Ordering(instructions, self._mint, config.store.ttl_s, keeps=keeps)

    def _mint(self, tenant: str, prefix: bytes) -> str:
        return minted(self.secret.value, tenant, prefix)

    def aside(self, config: Config) -> Aside:
        """What compacts without keeping anything."""
        return Aside(
            MemoryStore,
            self.reading,
            self.learning,
            self.making.summarising,
            self._ordering(config, keeps=False),
            Announcing(self.statistics.heard, self.metrics.event),
        )

    def compactor(self, config: Config) -> Compactor:
        """The use case over these parts."""
        viewer = Viewer(
            self.reading,
            self.records,
            self.index,
            self.learning,
            self.anchors,
            self.wishing,
            Aiming(self.pricing, self.growth),
            self.conversations,
        )
        replacing = Replacing(
            viewer,
            self.rounds,
            self.making,
            self.reading,
            self.wishing,
            self.effects,
            self._ordering(config),
        )
        return Compactor(viewer, replacing, self.reading, self.learning, self.reminder)

    def observing(self) -> Observing:
        """What learns from answers."""
        return Observing(
            self.learning,
            self.anchors,
            self.effects,
            self.history,
            growth=self.growth,
            announce=self.announcing,
        )
