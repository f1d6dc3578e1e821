"""Builds the application from a configuration: its handlers and routes, and what a reload replaces."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from secrets import token_hex

from fastapi import FastAPI
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from compaction_proxy.admin.api.replay import replay_routes
from compaction_proxy.admin.api.routing import Api, Settings
from compaction_proxy.admin.app import create_admin
from compaction_proxy.admin.auth import Access, HeldBodies
from compaction_proxy.admin.queries import Watching
from compaction_proxy.admin.replay_source import stored
from compaction_proxy.admin.ui.app import with_pages
from compaction_proxy.compaction.commands import Steering
from compaction_proxy.compaction.prompts import check_instructions
from compaction_proxy.config.config import Config
from compaction_proxy.config.loader import Loaded
from compaction_proxy.config.sections import MESSAGES, RESPONSES
from compaction_proxy.config.validation import is_loopback
from compaction_proxy.gateway import compact_api, count_tokens
from compaction_proxy.gateway.after_response import Aftermath
from compaction_proxy.gateway.body_budget import BodyBudget
from compaction_proxy.gateway.client_auth import KnownClients
from compaction_proxy.gateway.compact_api import Compact, InputCompactor, ResponsesCompact
from compaction_proxy.gateway.compaction_items import CompactionItems
from compaction_proxy.gateway.compaction_trigger import TriggerResponder
from compaction_proxy.gateway.concurrency_limit import Admission
from compaction_proxy.gateway.count_tokens import CountTokens
from compaction_proxy.gateway.dispatcher import Dispatcher, RelayHandler
from compaction_proxy.gateway.endpoint import Endpoint
from compaction_proxy.gateway.identity import origin
from compaction_proxy.gateway.incidents import Trouble
from compaction_proxy.gateway.mcp.endpoint import Mcp
from compaction_proxy.gateway.mcp.tools import OwnConversations, Tools
from compaction_proxy.gateway.passthrough import Blind
from compaction_proxy.gateway.routes import create_relay_routes
from compaction_proxy.gateway.size_gate import Gate, gates
from compaction_proxy.gateway.unread_conversations import UnreadConversations
from compaction_proxy.gateway.upstream import Upstream, upstreams
from compaction_proxy.providers.discovery import HttpDiscovery
from compaction_proxy.recall.round_detail import Details
from compaction_proxy.replay.jobs import Rehearsing
from compaction_proxy.runtime import Parts, choose_budget
from compaction_proxy.storage.records import Records
from compaction_proxy.storage.store import Store
from compaction_proxy.wires.chat.wire import CHAT
from compaction_proxy.wires.registry import WIRES
from compaction_proxy.wires.wire import Dialect

_CIPHER = "compaction_proxy.gateway.compaction_cipher"  # by name: its library takes 8 MB


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Who answers what.

    Attributes:
        wires: Requests that carry a conversation, by the dialect's name.
        posts: Other posts that are read, by how their paths end.
        blind: Everything else.
        compact: `/v1/compact`.
    """

    wires: Mapping[str, ASGIApp]
    posts: Mapping[bytes, ASGIApp]
    blind: ASGIApp
    compact: ASGIApp


def beginning(app: ASGIApp, records: Records) -> ASGIApp:
    """The application; a request of it writes nothing of what is forgotten while it is under way."""

    async def begun(scope: Scope, receive: Receive, send: Send) -> None:
        records.outdated.begin()
        await app(scope, receive, send)

    return begun


def endpoints(
    config: Config, parts: Parts, hop: str, gates: Mapping[str, Gate], admission: Admission
) -> Endpoints:
    """Who answers.

    Args:
        config: The configuration.
        parts: What lives as long as the process.
        hop: The mark of this installation.
        gates: Let small requests through, by the wire's name.
        admission: Places for requests under way.
    """
    targets = upstreams(config, parts.engine, hop, parts.upstream_monitor)
    blind = Blind(targets, admission)
    items = CompactionItems(config, lambda: parts.secret.values, partial(resolve_name, _CIPHER))
    compactor = InputCompactor(config, targets[RESPONSES], parts.aside(config), lambda: parts.secret.value)
    triggers = TriggerResponder(
        config, targets[RESPONSES], compactor=compactor, items=items, learning=parts.learning
    )
    wires = {
        name: beginning(
            _endpoint(config, parts, targets[name], wire, gates[name], admission, triggers),
            parts.records,
        )
        for name, wire in WIRES.items()
    }
    posts: dict[bytes, ASGIApp] = {
        count_tokens.ENDING: _counting(config, parts, targets[MESSAGES], blind, admission),
    }
    if config.upstream.responses_compact != "relay":
        posts[compact_api.ENDING] = ResponsesCompact(
            config, targets[RESPONSES], compactor=compactor, items=items, admission=admission
        )
    return Endpoints(wires, posts, blind, _compact(config, parts, targets[CHAT.name], admission))


def _endpoint(
    config: Config,
    parts: Parts,
    upstream: Upstream,
    wire: Dialect,
    gate: Gate,
    admission: Admission,
    triggers: TriggerResponder,
) -> Endpoint:
    """What answers the compacted paths of a wire; Responses alone have compaction items."""
    searching = any(row.settings.recall.tool != "none" for row in config.by_glob)
    compactor = parts.compactor(config)
    aftermath = Aftermath(
        upstream,
        compactor=compactor,
        observing=parts.observing(),
        notes=parts.journal,
        trouble=Trouble(parts.announcing, parts.history),
        owners=parts.owners,
        learning=parts.learning,
        discovery=HttpDiscovery(parts.transport),
    )
    unread = UnreadConversations(wire, parts.conversations)
    return Endpoint(
        config,
        upstream,
        wire,
        compactor=compactor,
        aftermath=aftermath,
        gate=gate,
        secret=lambda: parts.secret.value,
        admission=admission,
        tracer=parts.tracer,
        memory=parts.memory if searching else None,
        triggers=triggers if wire.name == RESPONSES else None,
        unread=unread if config.session.fallback == "content" else None,
    )


def _counting(
    config: Config, parts: Parts, upstream: Upstream, blind: Blind, admission: Admission
) -> CountTokens:
    """What answers requests to count tokens."""
    return CountTokens(
        config,
        upstream,
        blind=blind,
        reading=parts.reading,
        learning=parts.learning,
        secret=lambda: parts.secret.value,
        admission=admission,
    )


def _compact(config: Config, parts: Parts, upstream: Upstream, admission: Admission) -> Compact:
    """What answers `/v1/compact`."""
    return Compact(
        config,
        upstream,
        origin(config.upstream.base_url),
        aside=parts.aside(config),
        secret=lambda: parts.secret.value,
        admission=admission,
    )


HOP_BYTES = 8


class _Life:
    """The application's life cycle, and whether its server was told to end (`gateway.server.shutdown`).

    Args:
        app: Is given the server's lifespan events.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._state: Mapping[str, object] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Go through it."""
        self._state = scope.get("state", {})  # the server's own, of which requests get copies
        await self._app(scope, receive, send)

    def stopping(self) -> bool:
        """Whether the server takes no more requests soon."""
        return bool(self._state.get("stopping"))


def _watching(config: Config, parts: Parts) -> Watching:
    """What people see who look on."""
    return Watching(
        records=parts.records,
        owners=parts.owners,
        accounts=parts.accounts,
        history=parts.history,
        details=Details(parts.records, parts.history),
        wishing=parts.wishing,
        statistics=parts.statistics,
        feed=parts.feed,
        pricing=parts.pricing,
        config=config,
        origin=origin(config.upstream.base_url),
    )


def _access(config: Config) -> Access:
    """Who may use what is ours."""
    return Access(config.server.host, config.server.admin_key.get_secret_value())


def _steering(parts: Parts) -> Steering:
    """What is done with a conversation by those who know its id."""
    return Steering(
        parts.records,
        parts.owners,
        parts.history,
        parts.wishing,
        parts.recall,
        compacted=parts.compacted,
        announce=parts.announcing,
        searched=parts.metrics.searched,
    )


def _create_api(config: Config, parts: Parts, loaded: Loaded | None, stopping: Callable[[], bool]) -> FastAPI:
    """Returns the FastAPI application: the admin API, health and metrics."""
    steering = _steering(parts)
    access = _access(config)
    settings = Settings(config)
    if loaded is not None:
        settings = Settings(config, loaded.origins, str(loaded.path or ""), loaded.warnings)
    watching = _watching(config, parts)
    rehearsing = Rehearsing(config, stored(steering, watching))
    api = Api(steering, watching, access, settings, stopping, (replay_routes(rehearsing),))
    return create_admin(parts.readiness, config.server.base_path, api, parts.measured, parts.running)


def _pays(config: Config) -> bool:
    """Whether the proxy has a key of its own for a provider, were it for summaries only."""
    upstream = any(config.upstream.provider(wire)[1] for wire in WIRES)
    return upstream or any(row.settings.summary.api_key.get_secret_value() for row in config.by_glob)


def _known_clients(config: Config, *, guarded: bool) -> KnownClients:
    """Who is let in; where everybody is, no web page of another machine if there is something to guard."""
    server = config.server
    return KnownClients(
        [key.get_secret_value() for key in server.client_keys],
        pays=guarded,
        loopback=server.unix_socket is None and is_loopback(server.host),
        telling=config.session.tenant == "credential",
    )


def _mcp(config: Config, parts: Parts, admission: Admission) -> ASGIApp:
    """What answers agents. What a tenant without a key has said is guarded from pages, too."""
    conversations = OwnConversations(
        _steering(parts), parts.owners, reachable=lambda: parts.records.reachable
    )
    endpoint = Mcp(
        config,
        origin(config.upstream.base_url),
        tools=Tools(parts.memory, conversations),
        secret=lambda: parts.secret.value,
        admission=admission,
        clients=_known_clients(config, guarded=True),
    )
    return beginning(endpoint, parts.records)


class Proxy:
    """The proxy as an ASGI application, whose configuration may take another's place while it runs.

    Args:
        config: The configuration.
        parts: What lives as long as the process.
        loaded: Where the configuration is from, for those who ask; None: nobody knows.

    Attributes:
        api: The FastAPI application: our own paths, and the compacted endpoints by their usual paths.
    """

    def __init__(self, config: Config, parts: Parts, loaded: Loaded | None) -> None:
        self._parts = parts
        self._life = _Life(Router(lifespan=parts.running))
        bodies = BodyBudget(choose_budget(config.server))
        self._admission = Admission(config.server.max_in_flight, bodies=bodies)
        parts.metrics.figures["inflight_body_bytes"] = lambda: bodies.used_bytes
        parts.metrics.figures["inflight_body_limit_bytes"] = lambda: bodies.most_bytes
        self._hop = token_hex(HOP_BYTES)
        self._gates = self._open_gates(config)
        self._admitted = _access(config)
        self._dispatcher = self._built(config, loaded)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answer one request with the configuration that is in force now, or run the life cycle."""
        return self._dispatcher(scope, receive, send)

    def reload(self, loaded: Loaded) -> None:
        """Answer requests that come from now on with another configuration; see `config.reload.AT_START`.

        Raises:
            ConfigError: It names something that is not there. Everything stays as it was.
        """
        config = loaded.config
        check_instructions(config)
        self._gates = self._open_gates(config)
        self._parts.pricing.reload(config)
        if self._parts.tracer is not None:
            self._parts.tracer.towards(config.upstream.base_url)
        self._admitted = _access(config)
        self._dispatcher = self._built(config, loaded)

    def reloaded(self, *, taken: bool) -> None:
        """A configuration was read, and taken or refused: let the metrics say so."""
        self._parts.metrics.reloaded(taken=taken)

    def _open_gates(self, config: Config) -> Mapping[str, Gate]:
        parts = self._parts
        return gates(config, parts.learning, parts.wishing, parts.compacted, parts.pricing)

    def _built(self, config: Config, loaded: Loaded | None) -> Dispatcher:
        parts, admission = self._parts, self._admission
        admitted = self._admitted

        def ending() -> bool:  # of streams: those who were admitted may not be any more
            return self._life.stopping() or self._admitted != admitted

        base_path = config.server.base_path
        relay = partial(
            RelayHandler,
            hop=self._hop,
            clients=_known_clients(config, guarded=_pays(config)),
            keep_alive_s=config.server.keep_alive_s,
        )
        answering = endpoints(config, parts, self._hop, self._gates, admission)
        wires = {name: relay(endpoint) for name, endpoint in answering.wires.items()}
        compact = relay(answering.compact)
        self.api = _create_api(config, parts, loaded, ending)
        self.api.router.routes.extend(create_relay_routes(wires, compact, base_path))
        admin = beginning(with_pages(self.api, self._admitted, base_path), parts.records)
        return Dispatcher(
            admin=HeldBodies(admin, admission.bodies),
            wires=wires,
            posts={path: relay(endpoint) for path, endpoint in answering.posts.items()},
            blind=relay(answering.blind),
            compact=compact,
            mcp=relay(_mcp(config, parts, admission)),
            base_path=base_path,
            lifespan=self._life,
        )


def create_app(config: Config, *, store: Store | None = None, loaded: Loaded | None = None) -> Proxy:
    """The proxy as an ASGI application; its lifespan opens and closes everything.

    Args:
        config: The configuration.
        store: A store to use in place of the configured one.
        loaded: Where the configuration is from, for those who ask; None: nobody knows.

    Raises:
        ConfigError: The configuration names something that is not there.
    """
    return Proxy(config, Parts(config, store), loaded)
