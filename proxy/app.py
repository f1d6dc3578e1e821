"""The composition root: builds everything from a configuration, and owns its life cycle."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from importlib import import_module
from pkgutil import resolve_name
from secrets import token_hex

import structlog
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from proxy import __version__
from proxy.adapters.character_counter import CharacterCounter
from proxy.adapters.discovery import HttpDiscovery
from proxy.adapters.engine_transport import EngineTransport
from proxy.adapters.outgoing_proxy import environment_proxies
from proxy.adapters.store_url import NO_SECRET, installation_secret, is_shared, open_store, shared_secret
from proxy.adapters.summary_model import HttpSummaryModel
from proxy.adapters.tiktoken_counter import TiktokenCounter
from proxy.adapters.toktok_counter import ToktokCounter
from proxy.admin.access import Access
from proxy.admin.app import Readiness, create_admin
from proxy.admin.conversations import Api
from proxy.anchors import Anchors
from proxy.compaction.checkpoint_index import CheckpointIndex
from proxy.compaction.compactor import Compactor
from proxy.compaction.effects import Effects
from proxy.compaction.instructions import check_instructions, instructions
from proxy.compaction.making import Making
from proxy.compaction.observing import Observing
from proxy.compaction.ordering import Ordering
from proxy.compaction.replacing import Replacing
from proxy.compaction.rounds import Rounds
from proxy.compaction.summarising import Summarising
from proxy.compaction.viewer import Viewer
from proxy.config.checks import is_loopback
from proxy.config.model import Config
from proxy.conversations import Conversations
from proxy.counting import Counting
from proxy.errors import ConfigError, StoreUnavailable
from proxy.history import History
from proxy.learning import Learning
from proxy.logs import STORE_FAILED, TOKENIZER_FAILED, TOKENIZER_READY
from proxy.owners import Owners
from proxy.ports import HttpEngine, Store
from proxy.reading import Reading
from proxy.recall import Recall
from proxy.relay.admission import Admission
from proxy.relay.aftermath import Aftermath
from proxy.relay.asgi import Dispatcher
from proxy.relay.blind import Blind
from proxy.relay.chat import Chat
from proxy.relay.exchange import Upstream
from proxy.relay.gate import Gate
from proxy.relay.identity import minted, origin
from proxy.relay.known_clients import KnownClients
from proxy.steering import Steering
from proxy.storage.deadline import within
from proxy.storage.records import Records
from proxy.storage.throttle import Throttled
from proxy.wishes import Wishing

# By name: the library of the one that is not chosen would take 8 MB.
ENGINES = {
    "native": "proxy.adapters.native_engine:NativeEngine",
    "aiohttp": "proxy.adapters.aiohttp_engine:AiohttpEngine",
}
CONNECT_TIMEOUT_S = 10.0
HOP_BYTES = 8
SECRET_DEADLINE_S = 1.0
SECRET_RETRY_S = 1.0
# A store that was emptied has its secret back, or all have its new one, after this long, in seconds.
SECRET_CHECK_S = 5.0

Report = Callable[[StoreUnavailable], None]

_log = structlog.get_logger()


def _store_failed(error: StoreUnavailable, suppressed: int = 0) -> None:
    left_out = {"suppressed": suppressed} if suppressed else {}
    _log.warning(STORE_FAILED, reason=error.reason, error=type(error.__cause__ or error).__name__, **left_out)


def _tokenizer_failed(line: str) -> None:
    _log.warning(TOKENIZER_FAILED, reason=line)


def _beginning(app: ASGIApp, records: Records) -> ASGIApp:
    """The application; a request of it writes nothing of what is forgotten while it is under way."""

    async def begun(scope: Scope, receive: Receive, send: Send) -> None:
        records.outdated.begin()
        await app(scope, receive, send)

    return begun


def opened_engine(config: Config) -> HttpEngine:
    """The configured engine."""
    engine: HttpEngine = resolve_name(ENGINES[config.upstream.engine])(proxies=environment_proxies())
    return engine


def opened_store(config: Config, store_url: str) -> Store:
    """The configured store, sealed if there are keys."""
    keys = [key.get_secret_value() for key in config.store.encryption_keys]
    if not keys:
        return open_store(store_url)
    try:
        sealing = import_module("proxy.adapters.sealed_store")
    except ModuleNotFoundError:
        raise ConfigError("store.encryption_keys: needs `pip install compaction-proxy[crypto]`") from None
    store: Store = sealing.SealedStore(open_store(store_url), [sealing.parsed_key(key) for key in keys])
    return store


class Secret:
    """The key of the digests that tell tenants apart: configured, this installation's, or the shared store's.

    Replicas on one store must have the same. Until the store answers each has its own, and what it keeps
    meanwhile is found by nobody later: a miss, as with any store that is away. `report` is told of a secret
    that cannot be used.
    """

    def __init__(self, config: Config, store_url: str, store: Store, report: Report = _store_failed) -> None:
        configured = config.server.secret.get_secret_value()
        self.value = configured.encode() or installation_secret(store_url, report)
        self._report = report
        self._store = None if configured or not is_shared(store_url) else store

    async def agree(self) -> bool:
        """Take the shared store's secret, or offer ours. False if the store has to be asked again."""
        if self._store is None:
            return True
        try:
            self.value = await within(SECRET_DEADLINE_S, shared_secret(self._store, self.value))
        except (StoreUnavailable, TimeoutError, OSError) as error:
            if isinstance(error, StoreUnavailable) and error.reason == NO_SECRET:
                self._report(error)  # of a store that is away the records tell
            return False
        return True

    async def keep_asking(self) -> None:
        """Ask until the store has answered, and now and then after that: it may have lost what it had."""
        while self._store is not None:  # noqa: ASYNC110 - the store is no event of ours
            await asyncio.sleep(SECRET_CHECK_S if await self.agree() else SECRET_RETRY_S)


class _Parts:
    """Everything that is built once, and opened and closed together.

    Args:
        config: The configuration; a store URL that is not set means memory.
        store: A store to use in place of the configured one.
    """

    def __init__(self, config: Config, store: Store | None) -> None:
        check_instructions(config)
        store_url = config.store.url or "memory://"
        self.store = store or opened_store(config, store_url)
        report = Throttled(_store_failed)
        self.records = Records(self.store, report)
        self.engine = opened_engine(config)
        self.transport = EngineTransport(self.engine)
        self.counter = ToktokCounter(TiktokenCounter(_tokenizer_failed), _tokenizer_failed)
        self.counting = Counting(self.counter)
        self.countings = {"tiktoken": self.counting, "characters": Counting(CharacterCounter())}
        self.reading = Reading(self.countings)
        self.learning = Learning(self.records)
        self.index = CheckpointIndex(self.records)
        self.anchors = Anchors(self.records)
        self.conversations = Conversations(self.records, config.store.ttl_s)
        self.owners = Owners(self.records, config.store.ttl_s)
        self.history = History(self.records, config.store.ttl_s)
        self.wishing = Wishing(self.records, config.store.ttl_s)
        self.effects = Effects()
        summarising = Summarising(HttpSummaryModel(self.transport), self.reading)
        self.making = Making(summarising, self.records, self.index, self.history, self.reading)
        self.rounds = Rounds(self.making, self.history)
        self.secret = Secret(config, store_url, self.store, report)
        self.ready = False

    @asynccontextmanager
    async def running(self, _: object) -> AsyncIterator[None]:
        """The life cycle: ready when the tokenizer is loaded, whatever the store does."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.records.close)
            stack.push_async_callback(self.learning.close)
            stack.callback(self.reading.close)
            stack.push_async_callback(self.transport.aclose)
            stack.push_async_callback(self.conversations.close)
            stack.push_async_callback(self.anchors.close)
            stack.push_async_callback(self.rounds.close)
            await asyncio.gather(
                self.records.open(), self.secret.agree(), self.counting.prepare(self.counter.warm)
            )
            _log.info(TOKENIZER_READY, tokenizer=self.counter.chosen)
            asking = asyncio.create_task(self.secret.keep_asking())
            stack.callback(asking.cancel)
            self.conversations.start()
            self.anchors.start()
            self.ready = True
            yield
            self.ready = False

    def readiness(self) -> Readiness:
        """Whether requests can be served, and how the store is."""
        return Readiness(self.ready, "ok" if self.records.reachable else "down", __version__)

    def compactor(self, config: Config) -> Compactor:
        """The use case over these parts."""
        viewer = Viewer(self.reading, self.records, self.index, self.learning, self.anchors, self.wishing)
        ordering = Ordering(
            instructions, lambda tenant, prefix: minted(self.secret.value, tenant, prefix), config.store.ttl_s
        )
        replacing = Replacing(
            viewer, self.rounds, self.making, self.reading, self.wishing, self.effects, ordering
        )
        return Compactor(viewer, replacing, self.reading, self.learning)

    def observing(self) -> Observing:
        """What learns from answers."""
        return Observing(self.learning, self.anchors, self.effects, self.history)

    def admin(self, config: Config) -> ASGIApp:
        """What answers our own paths."""
        recall = Recall(self.records, self.history)
        steering = Steering(self.records, self.owners, self.history, self.wishing, recall)
        access = Access(config.server.host, config.server.admin_key.get_secret_value())
        app = create_admin(self.readiness, config.server.base_path, Api(steering, access))
        return _beginning(app, self.records)


def _known_clients(config: Config) -> KnownClients:
    """Who may have requests relayed. The proxy pays for summaries too, where it has a key for them."""
    server = config.server
    held = [config.upstream.api_key, *(row.settings.summary.api_key for row in config.by_glob)]
    return KnownClients(
        [key.get_secret_value() for key in server.client_keys],
        pays=any(key.get_secret_value() for key in held),
        loopback=server.unix_socket is None and is_loopback(server.host),
        telling=config.session.tenant == "credential",
    )


def create_app(config: Config, *, store: Store | None = None) -> ASGIApp:
    """The proxy as an ASGI application; its lifespan opens and closes everything.

    Args:
        config: The configuration.
        store: A store to use in place of the configured one.

    Raises:
        ConfigError: The configuration names something that is not there.
    """
    parts = _Parts(config, store)
    target = origin(config.upstream.base_url)
    hop = token_hex(HOP_BYTES)
    upstream = Upstream(
        base_url=config.upstream.base_url,
        api_key=config.upstream.api_key.get_secret_value(),
        hop=hop,
        engine=parts.engine,
        connect_timeout_s=CONNECT_TIMEOUT_S,
        read_timeout_s=config.upstream.timeout_s,
    )
    admission = Admission(config.server.max_in_flight)
    compactor = parts.compactor(config)
    chat = Chat(
        config,
        upstream,
        target,
        compactor=compactor,
        aftermath=Aftermath(
            upstream,
            compactor=compactor,
            observing=parts.observing(),
            conversations=parts.conversations,
            owners=parts.owners,
            learning=parts.learning,
            discovery=HttpDiscovery(parts.transport),
        ),
        gate=Gate(config, parts.learning, parts.wishing, target),
        secret=lambda: parts.secret.value,
        admission=admission,
    )
    return Dispatcher(
        admin=parts.admin(config),
        chat=_beginning(chat, parts.records),
        blind=Blind(upstream, admission),
        hop=hop,
        clients=_known_clients(config),
        base_path=config.server.base_path,
        lifespan=Router(lifespan=parts.running),
    )
