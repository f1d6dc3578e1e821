"""Builds the ASGI application from a configuration, and rebuilds its parts when the configuration changes."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from secrets import token_hex

from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from compaction_proxy.admin.api.overview import create_conversation_loader
from compaction_proxy.admin.api.routing import AdminApi, AdminSettings
from compaction_proxy.admin.app import create_admin_app, mount_pages
from compaction_proxy.admin.auth import AccessPolicy, BodyBudgetMiddleware
from compaction_proxy.admin.queries import ConversationQueries
from compaction_proxy.compaction.commands import ConversationCommands
from compaction_proxy.compaction.round_job import check_prompt_files
from compaction_proxy.config.config import Config
from compaction_proxy.config.loader import LoadedConfig
from compaction_proxy.config.sections import MESSAGES_WIRE, RESPONSES_WIRE
from compaction_proxy.config.validation import is_loopback
from compaction_proxy.gateway import compact_api
from compaction_proxy.gateway.after_response import AfterResponseHandler, IncidentReporter
from compaction_proxy.gateway.body_budget import BodyBudget
from compaction_proxy.gateway.client_auth import ClientAuthenticator
from compaction_proxy.gateway.compact_api import (
    CompactEndpoint,
    CompactionItemResponder,
    InputCompactor,
    ResponsesCompactEndpoint,
)
from compaction_proxy.gateway.compaction_items import CompactionItemCodec
from compaction_proxy.gateway.concurrency_limit import ConcurrencyLimiter
from compaction_proxy.gateway.dispatcher import Dispatcher, RelayHandler
from compaction_proxy.gateway.endpoint import RelayEndpoint
from compaction_proxy.gateway.identity import format_origin
from compaction_proxy.gateway.mcp.endpoint import McpEndpoint
from compaction_proxy.gateway.mcp.tools import McpToolRunner
from compaction_proxy.gateway.passthrough import (
    COUNT_TOKENS_ENDING,
    CountTokensEndpoint,
    PassthroughEndpoint,
)
from compaction_proxy.gateway.paths import COMPACT_PATH, MCP_PATH
from compaction_proxy.gateway.routes import create_relay_routes
from compaction_proxy.gateway.size_gate import SizeGate, build_gates
from compaction_proxy.gateway.unread_conversations import UnreadConversationFinder
from compaction_proxy.gateway.upstream import Upstream, build_upstreams
from compaction_proxy.providers.discovery import HttpWindowDiscovery
from compaction_proxy.recall.round_detail import RoundDetailReader
from compaction_proxy.replay.jobs import ReplayJobRunner
from compaction_proxy.runtime import Components, choose_body_budget
from compaction_proxy.storage.store import Store
from compaction_proxy.wires.chat.wire import CHAT
from compaction_proxy.wires.registry import WIRES
from compaction_proxy.wires.wire import Wire


@dataclass(frozen=True, slots=True)
class EndpointTable:
    """The endpoints, grouped by the kind of request that they answer.

    Attributes:
        wire_endpoints: The endpoints for requests that carry a conversation. The key is the name of the wire.
        post_endpoints: The endpoints for other POST requests whose bodies the proxy reads. The key is the
            ending of the path.
        passthrough: The endpoint for all other requests. It relays them without reading their bodies.
        compact: The endpoint for `/v1/compact`.
    """

    wire_endpoints: Mapping[str, ASGIApp]
    post_endpoints: Mapping[bytes, ASGIApp]
    passthrough: ASGIApp
    compact: ASGIApp


def build_endpoints(
    config: Config,
    components: Components,
    hop_mark: str,
    gates: Mapping[str, SizeGate],
    admission: ConcurrencyLimiter,
) -> EndpointTable:
    """Builds the endpoints for a configuration.

    Args:
        config: The configuration.
        components: The components that live as long as the process.
        hop_mark: Text that is sent with each forwarded request. A request that arrives with it has come back
            in a loop.
        gates: The size gate of each wire, by the wire's name.
        admission: Limits the number of concurrent requests.
    """
    targets = build_upstreams(config, components.engine, hop_mark, components.upstream_monitor)
    blind = PassthroughEndpoint(targets, admission)
    items = CompactionItemCodec(config, lambda: components.secret.accepted_keys)
    compactors = {
        name: InputCompactor(
            config,
            targets[name],
            components.create_stateless_compaction(config),
            lambda: components.secret.current_key,
        )
        for name in (CHAT.name, RESPONSES_WIRE)
    }
    compactor = compactors[RESPONSES_WIRE]
    triggers = CompactionItemResponder(
        config,
        targets[RESPONSES_WIRE],
        compactor=compactor,
        items=items,
        model_limits=components.model_limits,
    )
    wires = {
        name: _build_wire_endpoint(config, components, targets[name], wire, gates[name], admission, triggers)
        for name, wire in WIRES.items()
    }
    posts: dict[bytes, ASGIApp] = {
        COUNT_TOKENS_ENDING: _build_count_tokens_endpoint(
            config, components, targets[MESSAGES_WIRE], blind, admission
        ),
    }
    if config.upstream.responses_compact != "relay":
        posts[compact_api.PATH_ENDING] = ResponsesCompactEndpoint(
            config, targets[RESPONSES_WIRE], compactor=compactor, items=items, admission=admission
        )
    return EndpointTable(wires, posts, blind, CompactEndpoint(config, compactors[CHAT.name], admission))


def _build_wire_endpoint(
    config: Config,
    components: Components,
    upstream: Upstream,
    wire: Wire,
    gate: SizeGate,
    admission: ConcurrencyLimiter,
    triggers: CompactionItemResponder,
) -> RelayEndpoint:
    """Builds the endpoint for requests of one wire that carry a conversation.

    Only the endpoint of the Responses wire gets `triggers`, because only this wire has an item by which a
    client asks for a compaction (`compaction_trigger`).
    """
    searching = any(row.settings.recall.tool != "none" for row in config.settings_by_glob)
    compactor = components.create_compactor(config)
    aftermath = AfterResponseHandler(
        upstream,
        compactor=compactor,
        feedback=components.create_usage_feedback(),
        exchange_log=components.exchange_log,
        incidents=IncidentReporter(components.event_bus, components.history),
        registry=components.conversation_registry,
        model_limits=components.model_limits,
        discovery=HttpWindowDiscovery(components.transport),
    )
    unread = UnreadConversationFinder(wire, components.conversation_index)
    return RelayEndpoint(
        config,
        upstream,
        wire,
        compactor=compactor,
        after_response=aftermath,
        gate=gate,
        get_secret=lambda: components.secret.current_key,
        admission=admission,
        tracer=components.tracer,
        recall_tool=components.recall_tool if searching else None,
        trigger_responder=triggers if wire.name == RESPONSES_WIRE else None,
        conversation_finder=unread if config.session.fallback == "content" else None,
    )


def _build_count_tokens_endpoint(
    config: Config,
    components: Components,
    upstream: Upstream,
    passthrough: PassthroughEndpoint,
    admission: ConcurrencyLimiter,
) -> CountTokensEndpoint:
    """Builds the endpoint for requests to count tokens."""
    return CountTokensEndpoint(
        config,
        upstream,
        passthrough=passthrough,
        message_reader=components.message_reader,
        model_limits=components.model_limits,
        get_secret=lambda: components.secret.current_key,
        admission=admission,
    )


HOP_BYTES = 8


class _LifespanTracker:
    """Passes ASGI lifespan events to the application, and knows whether the server is stopping.

    Args:
        app: The application that handles the lifespan events.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._state: Mapping[str, object] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles the server's lifespan events (ASGI)."""
        self._state = scope.get("state", {})  # the server later sets `stopping` in this dict
        await self._app(scope, receive, send)

    def is_stopping(self) -> bool:
        """Returns whether the server has begun to stop. `gateway.server.shutdown` sets this state."""
        return bool(self._state.get("stopping"))


def _build_queries(config: Config, components: Components) -> ConversationQueries:
    """Builds the queries that the admin API and the dashboard pages use."""
    return ConversationQueries(
        records=components.records,
        conversation_registry=components.conversation_registry,
        usage=components.usage,
        history=components.history,
        details=RoundDetailReader(components.records, components.history),
        directives=components.directives,
        statistics=components.statistics,
        feed=components.feed,
        pricing=components.pricing,
        config=config,
        origin=format_origin(config.upstream.base_url),
    )


def _build_admin_access_policy(config: Config) -> AccessPolicy:
    """Builds the rules that decide who may use the proxy's own paths."""
    return AccessPolicy(config.server.host, config.server.admin_key.get_secret_value())


def _build_commands(components: Components) -> ConversationCommands:
    """Builds the commands that act on a conversation, given its id."""
    return ConversationCommands(
        components.records,
        components.conversation_registry,
        components.history,
        components.directives,
        components.recall,
        compacted=components.compacted_conversations,
        announce=components.event_bus,
        on_search=components.metrics.count_archive_search,
    )


def _build_admin_api(
    config: Config,
    components: Components,
    loaded_config: LoadedConfig | None,
    is_stopping: Callable[[], bool],
) -> AdminApi:
    """Builds what the admin API and the dashboard pages use."""
    commands = _build_commands(components)
    settings = AdminSettings(config)
    if loaded_config is not None:
        settings = AdminSettings(
            config, loaded_config.origins, str(loaded_config.path or ""), loaded_config.warnings
        )
    queries = _build_queries(config, components)
    replay_jobs = ReplayJobRunner(config, create_conversation_loader(commands, queries))
    return AdminApi(commands, queries, replay_jobs, _build_admin_access_policy(config), settings, is_stopping)


def _has_provider_key(config: Config) -> bool:
    """Returns whether the proxy has a key of its own for a provider, even if only for summaries."""
    upstream = any(config.upstream.get_provider(wire)[1] for wire in WIRES)
    return upstream or any(row.settings.summary.api_key.get_secret_value() for row in config.settings_by_glob)


def _build_client_authenticator(config: Config, *, refuses_foreign_pages: bool) -> ClientAuthenticator:
    """Builds the component that checks client keys.

    If no client keys are configured, every client is admitted. With `refuses_foreign_pages`, requests that a
    browser sends for a web page from another machine are refused even then.
    """
    server = config.server
    return ClientAuthenticator(
        [key.get_secret_value() for key in server.client_keys],
        has_provider_key=refuses_foreign_pages,
        loopback_only=server.unix_socket is None and is_loopback(server.host),
        keys_identify_tenants=config.session.tenant == "credential",
    )


def _build_mcp_endpoint(config: Config, components: Components, admission: ConcurrencyLimiter) -> ASGIApp:
    """Builds the MCP endpoint for agents.

    The endpoint always refuses requests that a browser sends for a web page from another machine. Otherwise,
    such a page could read the conversations of clients that send no key.
    """
    tools = McpToolRunner(
        components.recall_tool,
        _build_commands(components),
        components.conversation_registry,
        is_store_reachable=lambda: components.records.is_reachable,
    )
    return McpEndpoint(
        config,
        format_origin(config.upstream.base_url),
        tools=tools,
        secret=lambda: components.secret.current_key,
        admission=admission,
        clients=_build_client_authenticator(config, refuses_foreign_pages=True),
    )


class Proxy:
    """The proxy as an ASGI application, whose configuration can be replaced while it runs.

    Args:
        config: The configuration.
        components: The components that live as long as the process.
        loaded_config: The configuration with the origin of each value, which the admin API reports. None if
            the origins are unknown.

    Attributes:
        api: The FastAPI application. Its OpenAPI document describes the proxy's own paths and the endpoints
            whose requests the proxy compacts.
    """

    def __init__(self, config: Config, components: Components, loaded_config: LoadedConfig | None) -> None:
        self._parts = components
        self._lifespan = _LifespanTracker(Router(lifespan=components.run_lifespan))
        bodies = BodyBudget(choose_body_budget(config.server))
        self._admission = ConcurrencyLimiter(config.server.max_in_flight, body_budget=bodies)
        components.metrics.figures["inflight_body_bytes"] = lambda: bodies.used_bytes
        components.metrics.figures["inflight_body_limit_bytes"] = lambda: bodies.limit_bytes
        self._hop = token_hex(HOP_BYTES)
        self._gates = self._build_gates(config)
        self._access_policy = _build_admin_access_policy(config)
        self._dispatcher = self._build_dispatcher(config, loaded_config)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answers one request with the current configuration, or handles the server's lifespan events."""
        return self._dispatcher(scope, receive, send)

    def reload(self, loaded_config: LoadedConfig) -> None:
        """Applies another configuration to all later requests.

        The keys in `config.keys.RESTART_KEYS` take effect only when a process starts.

        Raises:
            ConfigError: A prompt file that the configuration names cannot be read. The old configuration
                stays in use.
        """
        config = loaded_config.config
        check_prompt_files(config)
        self._gates = self._build_gates(config)
        self._parts.pricing.reload(config)
        if self._parts.tracer is not None:
            self._parts.tracer.set_upstream(config.upstream.base_url)
        self._access_policy = _build_admin_access_policy(config)
        self._dispatcher = self._build_dispatcher(config, loaded_config)

    def record_reload(self, *, succeeded: bool) -> None:
        """Records in the metrics that a new configuration was applied (`succeeded`) or refused."""
        self._parts.metrics.record_reload(succeeded=succeeded)

    def _build_gates(self, config: Config) -> Mapping[str, SizeGate]:
        parts = self._parts
        return build_gates(
            config, parts.model_limits, parts.directives, parts.compacted_conversations, parts.pricing
        )

    def _build_dispatcher(self, config: Config, loaded_config: LoadedConfig | None) -> Dispatcher:
        parts, admission = self._parts, self._admission
        current_policy = self._access_policy

        def is_ending() -> bool:
            # A change of the access rules also ends open streams: their readers may no longer be allowed.
            return self._lifespan.is_stopping() or self._access_policy != current_policy

        base_path = config.server.base_path
        relay = partial(
            RelayHandler,
            hop_mark=self._hop,
            authenticator=_build_client_authenticator(
                config, refuses_foreign_pages=_has_provider_key(config)
            ),
            keep_alive_s=config.server.keep_alive_s,
        )
        endpoints = build_endpoints(config, parts, self._hop, self._gates, admission)
        wires = {name: relay(endpoint) for name, endpoint in endpoints.wire_endpoints.items()}
        compact = relay(endpoints.compact)
        admin_api = _build_admin_api(config, parts, loaded_config, is_ending)
        self.api = create_admin_app(
            parts.get_readiness, base_path, admin_api, parts.render_metrics, parts.run_lifespan
        )
        self.api.router.routes.extend(create_relay_routes(wires, compact, base_path))
        admin = mount_pages(self.api, admin_api, base_path)
        return Dispatcher(
            wire_endpoints=wires,
            post_endpoints={path: relay(endpoint) for path, endpoint in endpoints.post_endpoints.items()},
            passthrough=relay(endpoints.passthrough),
            own_endpoints={
                base_path + COMPACT_PATH: compact,
                base_path + MCP_PATH: relay(_build_mcp_endpoint(config, parts, admission)),
            },
            admin=BodyBudgetMiddleware(admin, admission.body_budget),
            base_path=base_path,
            lifespan=self._lifespan,
            deletion_fence=parts.records.deletion_fence,
        )


def create_app(
    config: Config, *, store: Store | None = None, loaded_config: LoadedConfig | None = None
) -> Proxy:
    """Returns the proxy as an ASGI application. Its lifespan opens and closes all components.

    Args:
        config: The configuration.
        store: A store to use in place of the configured one. None uses the configured one.
        loaded_config: The configuration with the origin of each value, which the admin API reports. None if
            the origins are unknown.

    Raises:
        ConfigError: A prompt file cannot be read, the store cannot be opened, or a package is missing that
            the configuration needs.
    """
    return Proxy(config, Components(config, store), loaded_config)
