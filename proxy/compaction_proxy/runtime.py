"""Builds, opens and closes the components that live as long as the process, such as the store."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

import structlog

from compaction_proxy import __version__
from compaction_proxy.admin.health import Readiness
from compaction_proxy.compaction.auto_recall import AutoRecall
from compaction_proxy.compaction.checkpoint_index import CheckpointIndex
from compaction_proxy.compaction.compacted_conversations import CompactedConversations
from compaction_proxy.compaction.compactor import Compactor
from compaction_proxy.compaction.conversation_index import ConversationIndex
from compaction_proxy.compaction.directives import DirectiveStore
from compaction_proxy.compaction.feedback import RoundEffectiveness, UsageFeedback
from compaction_proxy.compaction.message_reader import MessageReader
from compaction_proxy.compaction.price_triggers import GrowthTracker, PriceTriggers
from compaction_proxy.compaction.request_loader import RequestLoader
from compaction_proxy.compaction.round_builder import RoundBuilder
from compaction_proxy.compaction.round_coordinator import RoundCoordinator
from compaction_proxy.compaction.round_job import JobBuilder, check_prompt_files
from compaction_proxy.compaction.stateless import StatelessCompaction
from compaction_proxy.compaction.summarizer import Summarizer
from compaction_proxy.config.config import Config
from compaction_proxy.config.loader import get_store_url_setting
from compaction_proxy.config.sections import ServerSection
from compaction_proxy.config.types import mask_passwords
from compaction_proxy.config.validation import MEMORY
from compaction_proxy.core.errors import ConfigError, StoreUnavailableError
from compaction_proxy.core.problem import Problem
from compaction_proxy.gateway.body_budget import compute_default_budget
from compaction_proxy.gateway.client.connection_pool import NativeEngine
from compaction_proxy.gateway.client.httpx_transport import EngineTransport
from compaction_proxy.gateway.client.proxies import read_environment_proxies
from compaction_proxy.gateway.identity import map_wires_to_origins, mint_conversation_id
from compaction_proxy.gateway.summary_monitor import SummaryModelMonitor
from compaction_proxy.gateway.upstream_monitor import UpstreamMonitor
from compaction_proxy.providers.model_limits import ModelLimits
from compaction_proxy.providers.pricing import PriceBook
from compaction_proxy.providers.summary_transport import HttpSummaryModel
from compaction_proxy.providers.token_counting import TokenScheduler
from compaction_proxy.providers.tokenizers import CharacterCounter, TiktokenCounter
from compaction_proxy.providers.tokenizers_fast import ToktokCounter
from compaction_proxy.providers.types import SummaryModel
from compaction_proxy.providers.usage_baseline import UsageBaselineStore
from compaction_proxy.recall.fulltext import (
    FTS5_MISSING,
    SqliteTextIndexBuilder,
    is_fts5_available,
)
from compaction_proxy.recall.retention import ArchiveBounds, ArchiveRetention
from compaction_proxy.recall.search import ArchiveSearch
from compaction_proxy.recall.tool import RecallTool
from compaction_proxy.storage.factory import (
    NO_SECRET,
    is_shared_store,
    load_installation_secret,
    load_shared_secret,
    open_store,
)
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.records import RecordStore
from compaction_proxy.storage.resilient import RateLimitedReporter, run_with_deadline
from compaction_proxy.storage.store import Store
from compaction_proxy.storage.timed import measure_store_calls
from compaction_proxy.support.fail_open import suppress_and_report
from compaction_proxy.support.log_events import (
    JOURNAL_NOT_WRITTEN,
    SEARCH_UNAVAILABLE,
    STORE_FAILED,
    TOKENIZER_FAILED,
    TOKENIZER_READY,
    TRACING_NOT_INSTALLED,
)
from compaction_proxy.support.memory_limit import read_memory_limits
from compaction_proxy.telemetry.conversation_registry import ConversationRegistry
from compaction_proxy.telemetry.event_history import EventBus, EventHistory
from compaction_proxy.telemetry.exchange_log import ExchangeLog
from compaction_proxy.telemetry.live_feed import LiveFeed
from compaction_proxy.telemetry.metrics import Metrics
from compaction_proxy.telemetry.statistics import Statistics
from compaction_proxy.telemetry.usage import UsageStore

if TYPE_CHECKING:
    from compaction_proxy.telemetry.otel import OtelTracer

SECRET_DEADLINE_S = 1.0
SECRET_RETRY_S = 1.0
# Seconds between two comparisons of a replica's secret with the secret in the shared store
# (`sync_periodically`). If the store loses its content and another replica then stores a different secret,
# the replicas use different secrets for at most about this time.
SECRET_CHECK_S = 5.0
# Maximum number of earlier secrets that a process keeps in memory. If there are more, the process drops the
# oldest. It can then no longer decrypt compaction items (`gateway.compaction_items`) that were encrypted with
# the dropped secret.
MAX_PREVIOUS_SECRETS = 16
NO_DATA_FOLDER = Problem(
    "Data is lost when this process ends, because the proxy has no writable data folder.",
    "Set store.url to a file or a server.",
)
# Longest time, in seconds, for which the start waits for the providers of summary models. If they take
# longer, the proxy starts, and learns later whether they have these models.
SUMMARY_CHECK_LIMIT_S = 1.0
# Environment variables that may name the server to which the proxy sends traces.
COLLECTOR_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")

ReportStoreFailure = Callable[[StoreUnavailableError], None]

_log = structlog.get_logger()


def log_store_failure(error: StoreUnavailableError, suppressed: int = 0) -> None:
    """Logs a failure of the store as a warning.

    Args:
        error: The failure.
        suppressed: Number of earlier failures with the same reason that the caller did not log.
    """
    left_out = {"suppressed": suppressed} if suppressed else {}
    _log.warning(STORE_FAILED, reason=error.reason, error=type(error.__cause__ or error).__name__, **left_out)


def open_configured_store(config: Config, store_url: str) -> Store:
    """Opens the store at a URL. If encryption keys are configured, the opened store encrypts all values.

    Raises:
        ConfigError: If the URL or an encryption key is not valid.
    """
    keys = [key.get_secret_value() for key in config.store.encryption_keys]
    if not keys:
        return open_store(store_url)
    sealing = import_module("compaction_proxy.storage.encrypted")
    store: Store = sealing.EncryptedStore(open_store(store_url), [sealing.parse_key(key) for key in keys])
    return store


def choose_body_budget(server: ServerSection) -> int:
    """Returns the maximum bytes of request bodies that this process may hold in memory at the same time.

    The result is `server.max_inflight_bytes` if that is configured. Otherwise the function computes the
    result from the memory that the process may use and from the number of workers.
    """
    if server.max_inflight_bytes is not None:
        return server.max_inflight_bytes
    limits = read_memory_limits()
    return compute_default_budget(limits.memory_bytes, limits.address_bytes, server.workers)


def create_tracer(config: Config) -> "OtelTracer | None":
    """Creates a tracer, or returns None if tracing is off.

    Tracing is on if the configuration (`observability.otlp_endpoint`) or one of the environment variables in
    `COLLECTOR_VARIABLES` names a server for traces. The environment variable `OTEL_SDK_DISABLED=true` turns
    tracing off. If only the environment names a server and the packages for tracing are not installed, the
    function logs a warning and returns None.

    Raises:
        ConfigError: If the configuration names a server for traces, but the packages for tracing are not
            installed.
    """
    endpoint = config.observability.otlp_endpoint
    off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if off or not (endpoint or any(map(os.environ.get, COLLECTOR_VARIABLES))):
        return None
    try:
        tracing = import_module("compaction_proxy.telemetry.otel")
    except ModuleNotFoundError:
        if endpoint:
            text = "observability.otlp_endpoint: needs `pip install 'compaction-proxy[otel]'`"
            raise ConfigError(text) from None
        _log.warning(TRACING_NOT_INSTALLED)
        return None
    tracer: OtelTracer = tracing.OtelTracer(
        config.upstream.base_url, __version__, tracing.create_span_processor(endpoint)
    )
    return tracer


class TenantSecret:
    """Holds the secret key with which the proxy computes the digests that identify tenants.

    The key comes from the configuration, from a file of this installation or from the shared store. Replicas
    that share a store must use the same key. Until a replica can reach the shared store, it uses a random key
    of its own. After the replica has adopted the shared key, it no longer finds the data that it stored while
    it used its own key. The proxy also encrypts compaction items (`gateway.compaction_items`) with this key.

    Args:
        config: The configuration, which may contain the current key and earlier keys.
        store_url: URL of the store. It decides whether a key that is not configured comes from a file or from
            the shared store.
        store: The store.
        report: Called with the error if the file or the store has no usable key.

    Attributes:
        current_key: The key that is in use.
        problem: Why the file or the store has no usable key; None if there is no such problem.
    """

    def __init__(
        self, config: Config, store_url: str, store: Store, report: ReportStoreFailure = log_store_failure
    ) -> None:
        configured = config.server.secret.get_secret_value()
        self.problem: Problem | None = None
        self._report = report
        self.current_key = configured.encode() or load_installation_secret(store_url, self._record_failure)
        self._previous = [each.get_secret_value().encode() for each in config.server.previous_secrets]
        self._store = None if configured or not is_shared_store(store_url) else store

    async def sync_with_store(self) -> bool:
        """Adopts the key in the shared store, or stores `current_key` there if the store has no key.

        Returns False if the store is not reachable or has no usable key. The caller should then try again
        later. Returns True on success, and also if the key does not come from a shared store.
        """
        if self._store is None:
            return True
        try:
            shared = await run_with_deadline(
                SECRET_DEADLINE_S, load_shared_secret(self._store, self.current_key)
            )
        except (StoreUnavailableError, TimeoutError, OSError) as error:
            if isinstance(error, StoreUnavailableError) and error.reason == NO_SECRET:
                self._record_failure(error)  # `RecordStore` reports an unavailable store
            return False
        self.problem = None
        if shared != self.current_key:
            self._previous = [self.current_key, *self._previous][:MAX_PREVIOUS_SECRETS]
            self.current_key = shared
        return True

    def _record_failure(self, error: StoreUnavailableError) -> None:
        self.problem = Problem(
            f"The proxy cannot use its secret: {error}.",
            "Set server.secret, or repair the store. Otherwise, the proxy loses conversations at a restart.",
        )
        self._report(error)

    @property
    def accepted_keys(self) -> tuple[bytes, ...]:
        """The current key, followed by earlier keys. The proxy can still decrypt data with an earlier key.

        The earlier keys are those in `server.previous_secrets`, and keys that were `current_key` before.
        """
        return self.current_key, *self._previous

    async def sync_periodically(self) -> None:
        """Calls `sync_with_store` repeatedly, because the store may lose its content.

        Waits `SECRET_CHECK_S` seconds after a success and `SECRET_RETRY_S` seconds after a failure. Runs
        until its task is cancelled. If the key does not come from a shared store, returns immediately.
        """
        while self._store is not None:  # noqa: ASYNC110 - the store offers no event to wait for
            await asyncio.sleep(SECRET_CHECK_S if await self.sync_with_store() else SECRET_RETRY_S)


# Longest time, in seconds, for which a request for metrics waits until the queued exchanges are counted.
# After this time, the response leaves out the exchanges that are not yet counted.
FLUSH_LIMIT_S = 1.0


def _log_flush_failure(error: BaseException) -> None:
    _log.warning(JOURNAL_NOT_WRITTEN, error=type(error).__name__)


def _log_tokenizer_failure(line: str) -> None:
    _log.warning(TOKENIZER_FAILED, reason=line)


class Components:
    """The components that live as long as the process. `run_lifespan` opens and closes them.

    Args:
        config: The configuration. If it names no store URL, the store is in memory.
        store: A store to use in place of the configured one. None uses the configured store.
        summary_model: Writes summaries in place of the configured summary models. Only rehearsals pass an
            object. None uses the configured models.
        store_origin: What sets `store.url` (`LoadedConfig.origins`); empty if that is unknown.
        clock: Returns monotonic seconds. After a failed summary, the proxy pauses before it makes another
            summary for that conversation. The clock measures this pause.

    Attributes:
        discovered_windows: The context windows, in tokens, reported by upstreams before the start, by model.
    """

    discovered_windows: Mapping[str, int] = MappingProxyType({})

    def __init__(
        self,
        config: Config,
        store: Store | None,
        summary_model: SummaryModel | None = None,
        *,
        store_origin: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_prompt_files(config)
        self._store_url, self._store_origin = config.store.url or MEMORY, store_origin
        self.store = store or open_configured_store(config, self._store_url)
        self.metrics = Metrics(__version__, keeps_old_names=config.observability.old_metric_names)
        report = RateLimitedReporter(log_store_failure)

        def record_store_failure(error: StoreUnavailableError) -> None:
            self.metrics.count_store_failure(error.reason)
            report(error)

        self.records = RecordStore(
            measure_store_calls(self.store, self.metrics.observe_store_call), record_store_failure
        )
        self.metrics.breakers["store"] = lambda: not self.records.is_in_use
        self.engine = NativeEngine(proxies=read_environment_proxies())
        self.transport = EngineTransport(self.engine)
        self.counter = ToktokCounter(TiktokenCounter(_log_tokenizer_failure))
        self.token_scheduler = TokenScheduler(self.counter)
        self.token_schedulers = {
            "tiktoken": self.token_scheduler,
            "characters": TokenScheduler(CharacterCounter()),
        }
        self.message_reader = MessageReader(self.token_schedulers)
        self.model_limits = ModelLimits(self.records)
        self.checkpoint_index = CheckpointIndex(self.records)
        self.pricing, self._origins = PriceBook(config), map_wires_to_origins(config.upstream).values()
        self.growth = GrowthTracker()
        self.usage_baselines = UsageBaselineStore(self.records)
        self.usage = UsageStore(self.records, config.store.ttl_s)
        self.statistics = Statistics(self.records, config.store.ttl_s)
        self.feed = LiveFeed(self.records, config.store.ttl_s)
        self.exchange_log = ExchangeLog(
            self.usage, self.statistics, self.feed, self.records.deletion_fence, self.pricing
        )
        self.exchange_log.listeners.append(self.metrics.count_exchanges)
        self.event_bus = EventBus(
            self.statistics.on_event, self.usage.on_event, self.feed.on_event, self.metrics.on_event
        )
        self.upstream_monitor = UpstreamMonitor(
            [self.metrics.count_upstream_error],
            [self.statistics.record_upstream_failure, self.feed.record_upstream_failure],
        )
        self.summary_monitor = SummaryModelMonitor(self.transport, None if summary_model else config)
        # Only a rehearsal passes `summary_model`. A rehearsal serves no requests, so it needs no tracer.
        self.tracer = create_tracer(config) if summary_model is None else None
        if self.tracer is not None:
            self.event_bus.listeners.append(self.tracer.on_event)
        self.conversation_registry = ConversationRegistry(self.records, config.store.ttl_s)
        self.conversation_index = ConversationIndex(
            self.records, self._mint_conversation_id, config.store.ttl_s
        )
        self.history = EventHistory(self.records, config.store.ttl_s)
        self.directives = DirectiveStore(self.records, config.store.ttl_s)
        self.compacted_conversations = CompactedConversations(self.records, config.store.ttl_s)
        self.effectiveness = RoundEffectiveness()
        summarizer = Summarizer(
            summary_model or HttpSummaryModel(self.transport, self.summary_monitor.record_outcome),
            self.message_reader,
            price=self.pricing.compute_cost,
        )
        self.metrics.breakers["summary"] = lambda: summarizer.has_resting_model
        retention = ArchiveRetention(
            self.records,
            config.store.ttl_s,
            ArchiveBounds(config.archive.conversation_bytes, config.archive.tenant_bytes),
        )
        self.round_builder = RoundBuilder(
            summarizer,
            self.records,
            self.checkpoint_index,
            self.history,
            self.message_reader,
            retention=retention,
            announce=self.event_bus,
            clock=clock,
        )
        if not is_fts5_available():
            _log.warning(SEARCH_UNAVAILABLE, reason=FTS5_MISSING)
        self.recall = ArchiveSearch(self.records, self.history, retention, SqliteTextIndexBuilder())
        count, on_search = partial(self.counter.count, model=""), self.metrics.count_archive_search
        self.recall_tool = RecallTool(
            self.recall, count, is_store_reachable=lambda: self.records.is_reachable, on_search=on_search
        )
        self.auto_recall = AutoRecall(
            self.recall.search, self.message_reader, self.records, count, on_search=on_search
        )
        self.secret = TenantSecret(config, self._store_url, self.store, report)
        self.is_ready = False

    @asynccontextmanager
    async def run_lifespan(self, _: object) -> AsyncIterator[None]:
        """Opens the components when the `async with` block begins, and closes them when the block ends.

        `is_ready` becomes True when the tokenizer is loaded, even if the store is not reachable.
        """
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.records.close)
            if self.tracer is not None:
                stack.push_async_callback(self.tracer.close)
            stack.callback(self.message_reader.close)
            for close in (
                self.model_limits.close,
                self.transport.aclose,
                self.summary_monitor.close,
                self.exchange_log.close,
                self.feed.close,
                self.usage_baselines.close,
                self.conversation_index.close,
                self.round_builder.close,
                self.recall.close,
                self.auto_recall.close,
            ):
                stack.push_async_callback(close)
            await asyncio.gather(
                asyncio.wait((self.summary_monitor.start_check(),), timeout=SUMMARY_CHECK_LIMIT_S),
                self.records.open(),
                self.secret.sync_with_store(),
                self.token_scheduler.run_in_worker(self.counter.warm_up),
            )
            self.discovered_windows = await self.model_limits.list_discovered_windows(*self._origins)
            _log.info(TOKENIZER_READY, tokenizer=self.counter.chosen)
            for work in (
                self.secret.sync_periodically(),
                self.metrics.refresh_periodically(),
                self.summary_monitor.recheck_periodically(),
            ):
                stack.callback(asyncio.create_task(work).cancel)
            stack.push_async_callback(self.compacted_conversations.close)
            await self.compacted_conversations.start()
            self.exchange_log.start()
            self.usage_baselines.start()
            self.is_ready = True
            yield
            self.is_ready = False

    async def render_metrics(self, accept: str) -> tuple[bytes, str]:
        """Returns the metrics as text, and the media type of the text (see `Metrics.render`).

        First counts all recorded exchanges (`flush_exchanges`).
        """
        await self.flush_exchanges()
        return await self.metrics.render(accept)

    async def flush_exchanges(self) -> None:
        """Waits until all recorded exchanges are counted and written, for at most `FLUSH_LIMIT_S` seconds."""
        await asyncio.wait((asyncio.create_task(self._flush_exchange_log()),), timeout=FLUSH_LIMIT_S)

    async def _flush_exchange_log(self) -> None:
        with suppress_and_report(_log_flush_failure):
            await self.exchange_log.flush()

    def get_readiness(self) -> Readiness:
        """Returns the state of the proxy for health checks."""
        store: Literal["ok", "down"] = "ok" if self.records.is_reachable else "down"
        problems = tuple(dict.fromkeys(each.what for each in self.list_problems()))
        return Readiness(self.is_ready, store, __version__, problems)

    def list_problems(self) -> list[Problem]:
        """Returns what degrades the proxy now: a store, secret, provider or summary model that fails."""
        failure, problems = self.records.failure, []
        if failure is not None:
            key = get_store_url_setting(self._store_origin)
            problems.append(failure.to_problem(mask_passwords(self._store_url), key))
        elif self.secret.problem is not None:  # if the store fails, too, it has the same cause
            problems.append(self.secret.problem)
        elif self._store_url == MEMORY and self._store_origin == "default":
            problems.append(NO_DATA_FOLDER)
        return [*problems, *self.upstream_monitor.list_problems(), *self.summary_monitor.list_problems()]

    def _mint_conversation_id(self, tenant: str, prefix: bytes) -> str:
        return mint_conversation_id(self.secret.current_key, tenant, prefix)

    def create_stateless_compaction(self, config: Config) -> StatelessCompaction:
        """Creates the component that compacts a list of messages and leaves nothing in the store."""
        return StatelessCompaction(
            MemoryStore,
            self.message_reader,
            self.model_limits,
            self.round_builder.summarizer,
            JobBuilder(self._mint_conversation_id, config.store.ttl_s, has_archive=False),
            EventBus(self.statistics.on_event, self.metrics.on_event),
        )

    def create_compactor(self, config: Config) -> Compactor:
        """Creates a compactor. All compactors of a process use the same store, caches and models."""
        request_loader = RequestLoader(
            self.message_reader,
            self.records,
            self.checkpoint_index,
            self.model_limits,
            self.usage_baselines,
            self.directives,
            PriceTriggers(self.pricing, self.growth),
            self.conversation_index,
        )
        round_coordinator = RoundCoordinator(
            request_loader,
            self.round_builder,
            self.message_reader,
            self.directives,
            self.effectiveness,
            JobBuilder(self._mint_conversation_id, config.store.ttl_s),
        )
        return Compactor(
            request_loader, round_coordinator, self.message_reader, self.model_limits, self.auto_recall
        )

    def create_usage_feedback(self) -> UsageFeedback:
        """Creates the component that reads the token `usage` in responses.

        From this usage, the component learns the true sizes of requests, the limits of models and the effects
        of compactions.
        """
        return UsageFeedback(
            self.model_limits,
            self.usage_baselines,
            self.effectiveness,
            self.history,
            growth=self.growth,
            announce=self.event_bus,
        )
