"""Everything that is built once: what the proxy keeps, learns and counts with, opened and closed together."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pkgutil import resolve_name

import structlog

from proxy import __version__
from proxy.accounts import Accounts
from proxy.adapters.character_counter import CharacterCounter
from proxy.adapters.engine_transport import EngineTransport
from proxy.adapters.memory_store import MemoryStore
from proxy.adapters.outgoing_proxy import environment_proxies
from proxy.adapters.price_process import PriceProcess
from proxy.adapters.prometheus import Metrics
from proxy.adapters.summary_model import HttpSummaryModel
from proxy.adapters.tiktoken_counter import TiktokenCounter
from proxy.adapters.toktok_counter import ToktokCounter
from proxy.admin.app import Readiness
from proxy.anchors import Anchors
from proxy.announcing import Announcing
from proxy.compacted_conversations import CompactedConversations
from proxy.compaction.aiming import Aiming
from proxy.compaction.aside import Aside
from proxy.compaction.checkpoint_index import CheckpointIndex
from proxy.compaction.compactor import Compactor
from proxy.compaction.effects import Effects
from proxy.compaction.growth import Growth
from proxy.compaction.instructions import check_instructions, instructions
from proxy.compaction.making import Making
from proxy.compaction.observing import Observing
from proxy.compaction.ordering import Ordering
from proxy.compaction.replacing import Replacing
from proxy.compaction.rounds import Rounds
from proxy.compaction.summarising import Summarising
from proxy.compaction.viewer import Viewer
from proxy.config.model import Config
from proxy.conversation_index import ConversationIndex
from proxy.core.alike import Alike
from proxy.core.entry import Entry
from proxy.counting import Counting
from proxy.errors import StoreUnavailable
from proxy.feed import Feed
from proxy.guard import contained
from proxy.history import History
from proxy.holdings import Bounds, Holdings
from proxy.installation import Secret, opened_full_text, opened_store, opened_tracer, store_failed
from proxy.journal import Journal
from proxy.learning import Learning
from proxy.log_events import JOURNAL_NOT_WRITTEN, TOKENIZER_FAILED, TOKENIZER_READY
from proxy.memory import Memory
from proxy.owners import Owners
from proxy.ports import HttpEngine, Store, SummaryModel
from proxy.pricing import Pricing
from proxy.reading import Reading
from proxy.recall import Recall
from proxy.relay.identity import minted
from proxy.relay.upstream_monitor import UpstreamMonitor
from proxy.reminding import Reminder
from proxy.statistics import Statistics
from proxy.storage.records import Records
from proxy.storage.throttle import Throttled
from proxy.storage.timed import Timed
from proxy.wishes import Wishing

# By name: the library of the one that is not chosen would take 8 MB.
ENGINES = {
    "native": "proxy.adapters.native_engine:NativeEngine",
    "aiohttp": "proxy.adapters.aiohttp_engine:AiohttpEngine",
}

# How long whoever asks for metrics waits for what was noted to be worked through, in seconds.
FLUSH_LIMIT_S = 1.0

_log = structlog.get_logger()


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
