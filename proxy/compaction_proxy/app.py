"""Builds the proxy's ASGI application from a configuration.

`Proxy.reload` applies a changed configuration while the application runs.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from secrets import token_hex
from typing import TYPE_CHECKING

from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from compaction_proxy.admin.auth import AccessPolicy, BodyBudgetMiddleware
from compaction_proxy.admin.health import create_health_routes, serve_route
from compaction_proxy.compaction.commands import ConversationCommands
from compaction_proxy.compaction.round_job import check_prompt_files
from compaction_proxy.config.config import Config
from compaction_proxy.config.loader import LoadedConfig
from compaction_proxy.config.sections import MESSAGES_WIRE, RESPONSES_WIRE
from compaction_proxy.config.validation import is_loopback
from compaction_proxy.gateway import compact_api
from compaction_proxy.gateway.access_log import AccessLog
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
from compaction_proxy.gateway.identity import IdentityResolver, format_origin
from compaction_proxy.gateway.mcp.endpoint import McpEndpoint
from compaction_proxy.gateway.mcp.tools import McpToolRunner
from compaction_proxy.gateway.passthrough import (
    COUNT_TOKENS_ENDING,
    CountTokensEndpoint,
    PassthroughEndpoint,
)
from compaction_proxy.gateway.paths import COMPACT_PATH, MCP_PATH
from compaction_proxy.gateway.size_gate import SizeGate, build_gates
from compaction_proxy.gateway.unread_conversations import UnreadConversationFinder
from compaction_proxy.gateway.upstream import Upstream, build_upstreams
from compaction_proxy.gateway.window_finder import WindowFinder
from compaction_proxy.providers.discovery import HttpWindowDiscovery
from compaction_proxy.runtime import Components, choose_body_budget
from compaction_proxy.storage.store import Store
from compaction_proxy.wires.chat.wire import CHAT
from compaction_proxy.wires.registry import WIRES

if TYPE_CHECKING:
    from fastapi import FastAPI

    from compaction_proxy.admin.api.routing import AdminApi

HOP_BYTES = 8
# The banner shows at most this many context windows that the upstream has told.
MAX_SHOWN_WINDOWS = 10


class AdminSite:
    """An ASGI application that creates the admin API and the admin pages at the first request for them.

    Most processes never get such a request. They start faster and use less memory, because the libraries of
    the API and the pages take a quarter of a second to load and occupy many megabytes.

    Args:
        create: Creates and returns two applications: the FastAPI application of the admin API, and an
            application that serves the admin pages and passes all other requests to the admin API.
            `__call__` runs `create` in a thread, because it takes long.
    """

    def __init__(self, create: Callable[[], "tuple[FastAPI, ASGIApp]"]) -> None:
        self._create = create
        self._apps: tuple[FastAPI, ASGIApp] | None = None
        self._lock = asyncio.Lock()

    def load(self) -> "tuple[FastAPI, ASGIApp]":
        """Returns the applications of the admin API and of the admin pages.

        The first call creates them. Later calls return the same applications.
        """
        self._apps = self._apps or self._create()
        return self._apps

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request for the admin API or an admin page. The first request creates both."""
        if self._apps is None:
            async with self._lock:
                await asyncio.to_thread(self.load)
        await self.load()[1](scope, receive, send)


def _has_provider_key(config: Config) -> bool:
    """Returns whether the configuration has a provider key for an upstream or for a summary model."""
    upstream = any(config.upstream.get_provider(wire)[1] for wire in WIRES)
    return upstream or any(row.settings.summary.api_key.get_secret_value() for row in config.settings_by_glob)


def _build_client_authenticator(config: Config, *, refuses_foreign_pages: bool) -> ClientAuthenticator:
    """Builds the component that checks client keys.

    If no client keys are configured, the component admits every client. But if `refuses_foreign_pages` is
    true, it refuses requests that a browser sends on behalf of a web page from another machine.
    """
    server = config.server
    return ClientAuthenticator(
        [key.get_secret_value() for key in server.client_keys],
        has_provider_key=refuses_foreign_pages,
        loopback_only=server.unix_socket is None and is_loopback(server.host),
        keys_identify_tenants=config.session.tenant == "credential",
    )


class Proxy:
    """The proxy as an ASGI application. Its configuration can be replaced while it runs.

    Args:
        config: The configuration.
        components: The components that live as long as the process, such as the store.
        loaded_config: The same configuration with the source of each value. The admin API reports the
            sources. None if the sources are unknown.

    """

    def __init__(self, config: Config, components: Components, loaded_config: LoadedConfig | None) -> None:
        self._parts = components
        self._server_state: Mapping[str, object] = {}
        bodies = BodyBudget(choose_body_budget(config.server))
        self._admission = ConcurrencyLimiter(config.server.max_in_flight, body_budget=bodies)
        components.metrics.figures["inflight_requests"] = lambda: self._admission.active_request_count
        components.metrics.figures["inflight_body_bytes"] = lambda: bodies.used_bytes
        components.metrics.figures["inflight_body_limit_bytes"] = lambda: bodies.limit_bytes
        self._hop_mark = token_hex(HOP_BYTES)
        self._apply_config(config, loaded_config)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Handles one request with the current configuration, or handles the start and stop of the server."""
        if scope["type"] == "lifespan":
            # The server owns this dict. When the server begins to stop, the module `gateway.server.shutdown`
            # sets the key `stopping` in it. Open event streams of the admin API then end.
            self._server_state = scope.get("state", {})
        return self._app(scope, receive, send)

    @property
    def api(self) -> "FastAPI":
        """The FastAPI application of the admin API.

        The OpenAPI document of this application also describes the endpoints whose requests the proxy
        compacts.
        """
        return self._admin_site.load()[0]

    def reload(self, loaded_config: LoadedConfig) -> None:
        """Applies another configuration to all later requests.

        A new value of a key in `config.config.RESTART_KEYS` takes effect only after a restart of the process.

        Raises:
            ConfigError: If a prompt file that the configuration names cannot be read. The proxy then keeps
                the old configuration.
        """
        config = loaded_config.config
        check_prompt_files(config)
        self._parts.pricing.reload(config)
        self._parts.summary_monitor.set_config(config)
        self._parts.summary_monitor.start_check()
        if self._parts.tracer is not None:
            self._parts.tracer.set_upstream(config.upstream.base_url)
        self._apply_config(config, loaded_config)

    def list_start_notes(self) -> list[tuple[str, str]]:
        """Returns what a user should know at the start: the label and the text of each line."""
        notes = [("degraded", str(problem)) for problem in self._parts.list_problems()]
        windows = [f"{model} {tokens:,}" for model, tokens in self._parts.discovered_windows.items()]
        if windows:
            more = len(windows) - MAX_SHOWN_WINDOWS
            newest = ", ".join(windows[-MAX_SHOWN_WINDOWS:]) + (f" and {more} more" if more > 0 else "")
            notes.append(("windows", f"{newest} tokens, as the upstream has reported"))
        return notes

    def record_reload(self, *, succeeded: bool) -> None:
        """Records in the metrics whether the last reload of the configuration succeeded."""
        self._parts.metrics.record_reload(succeeded=succeeded)

    def _get_secret(self) -> bytes:
        return self._parts.secret.current_key

    def _apply_config(self, config: Config, loaded_config: LoadedConfig | None) -> None:
        """Builds all endpoints from a configuration. The endpoints handle all requests from now on."""
        parts, admission, base_path = self._parts, self._admission, config.server.base_path
        upstreams = build_upstreams(config, parts.engine, self._hop_mark, parts.upstream_monitor)
        relay = partial(
            RelayHandler,
            hop_mark=self._hop_mark,
            authenticator=_build_client_authenticator(
                config, refuses_foreign_pages=_has_provider_key(config)
            ),
            keep_alive_s=config.server.keep_alive_s,
        )
        items = CompactionItemCodec(config, lambda: parts.secret.accepted_keys)
        input_compactors = {
            name: InputCompactor(
                config, upstreams[name], parts.create_stateless_compaction(config), self._get_secret
            )
            for name in (CHAT.name, RESPONSES_WIRE)
        }
        input_compactor = input_compactors[RESPONSES_WIRE]
        wires = {
            name: relay(endpoint)
            for name, endpoint in self._build_wire_endpoints(
                config, upstreams, input_compactor, items
            ).items()
        }
        origin = format_origin(config.upstream.base_url)
        passthrough = PassthroughEndpoint(
            upstreams, admission, IdentityResolver(config, origin, self._get_secret)
        )
        posts: dict[bytes, ASGIApp] = {
            COUNT_TOKENS_ENDING: relay(
                CountTokensEndpoint(
                    config,
                    upstreams[MESSAGES_WIRE],
                    passthrough=passthrough,
                    message_reader=parts.message_reader,
                    model_limits=parts.model_limits,
                    get_secret=self._get_secret,
                    admission=admission,
                )
            )
        }
        if config.upstream.responses_compact != "relay":
            posts[compact_api.PATH_ENDING] = relay(
                ResponsesCompactEndpoint(
                    config,
                    upstreams[RESPONSES_WIRE],
                    compactor=input_compactor,
                    items=items,
                    admission=admission,
                )
            )
        compact = relay(CompactEndpoint(config, input_compactors[CHAT.name], admission))
        commands = ConversationCommands(
            parts.records,
            parts.conversation_registry,
            parts.history,
            parts.directives,
            parts.recall,
            compacted=parts.compacted_conversations,
            announce=parts.event_bus,
            on_search=parts.metrics.count_archive_search,
        )
        tools = McpToolRunner(
            parts.recall_tool,
            commands,
            parts.conversation_registry,
            is_store_reachable=lambda: parts.records.is_reachable,
        )
        mcp = McpEndpoint(
            config,
            origin,
            tools=tools,
            secret=self._get_secret,
            admission=admission,
            # The MCP endpoint refuses web pages from other machines even if the proxy has no provider key.
            # Otherwise, such a page could read the conversations of clients that send no key.
            clients=_build_client_authenticator(config, refuses_foreign_pages=True),
        )
        self._access_policy = AccessPolicy(
            config.server.host,
            config.server.admin_key.get_secret_value(),
            is_generated=loaded_config is not None and loaded_config.admin_key_path is not None,
            closed_reason="" if loaded_config is None else loaded_config.admin_key_problem,
        )
        self._admin_site = AdminSite(
            partial(
                self._create_admin_site, config, loaded_config, commands, self._access_policy, wires, compact
            )
        )
        admin = BodyBudgetMiddleware(self._admin_site, admission.body_budget)
        health_routes = create_health_routes(parts.get_readiness, base_path, parts.render_metrics)
        self._dispatcher = Dispatcher(
            wire_endpoints=wires,
            post_endpoints=posts,
            passthrough=relay(passthrough),
            own_endpoints={
                base_path + COMPACT_PATH: compact,
                base_path + MCP_PATH: relay(mcp),
                **{route.path: serve_route(route, admin) for route in health_routes},
            },
            admin=admin,
            base_path=base_path,
            lifespan=Router(lifespan=parts.run_lifespan),
            deletion_fence=parts.records.deletion_fence,
        )
        access_log = config.observability.access_log
        self._app: ASGIApp = (
            self._dispatcher if access_log == "off" else AccessLog(self._dispatcher, access_log)
        )

    def _build_wire_endpoints(
        self,
        config: Config,
        upstreams: Mapping[str, Upstream],
        input_compactor: InputCompactor,
        items: CompactionItemCodec,
    ) -> Mapping[str, RelayEndpoint]:
        """Builds an endpoint for each wire, for requests that contain a conversation.

        The keys of the result are the names of the wires. Only the endpoint for the Responses wire gets an
        `item_responder`, because only this wire has an input item with which a client asks for a compaction
        (`compaction_trigger`).
        """
        parts = self._parts
        item_responder = CompactionItemResponder(
            config,
            upstreams[RESPONSES_WIRE],
            compactor=input_compactor,
            items=items,
            model_limits=parts.model_limits,
        )
        gates = self._build_gates(config)
        searches = any(row.settings.recall.tool != "none" for row in config.settings_by_glob)
        finds_unread, discovery = config.session.fallback == "content", HttpWindowDiscovery(parts.transport)
        endpoints = {}
        for name, wire in WIRES.items():
            compactor = parts.create_compactor(config)
            after_response = AfterResponseHandler(
                upstreams[name],
                compactor=compactor,
                feedback=parts.create_usage_feedback(),
                exchange_log=parts.exchange_log,
                incidents=IncidentReporter(parts.event_bus, parts.history),
                registry=parts.conversation_registry,
                window_finder=WindowFinder(config, upstreams[name], parts.model_limits, discovery),
            )
            unread = UnreadConversationFinder(wire, parts.conversation_index) if finds_unread else None
            endpoints[name] = RelayEndpoint(
                config,
                upstreams[name],
                wire,
                compactor=compactor,
                after_response=after_response,
                gate=gates[name],
                get_secret=self._get_secret,
                admission=self._admission,
                tracer=parts.tracer,
                recall_tool=parts.recall_tool if searches else None,
                item_responder=item_responder if name == RESPONSES_WIRE else None,
                conversation_finder=unread,
            )
        return endpoints

    def _build_gates(self, config: Config) -> Mapping[str, SizeGate]:
        parts = self._parts
        return build_gates(
            config, parts.model_limits, parts.directives, parts.compacted_conversations, parts.pricing
        )

    def _create_admin_site(
        self,
        config: Config,
        loaded_config: LoadedConfig | None,
        commands: ConversationCommands,
        policy: AccessPolicy,
        wires: Mapping[str, ASGIApp],
        compact: ASGIApp,
    ) -> "tuple[FastAPI, ASGIApp]":
        """Creates the applications of the admin API and of the admin pages.

        The application of the pages passes all requests for other paths to the application of the admin API.
        """
        from compaction_proxy.admin.app import create_admin_app, mount_pages  # see `AdminSite`
        from compaction_proxy.gateway.routes import create_relay_routes

        parts, base_path = self._parts, config.server.base_path
        admin_api = self._build_admin_api(config, loaded_config, commands, policy)
        api = create_admin_app(
            parts.get_readiness, base_path, admin_api, parts.render_metrics, parts.run_lifespan
        )
        api.router.routes.extend(create_relay_routes(wires, compact, base_path))
        return api, mount_pages(api, admin_api, base_path)

    def _build_admin_api(
        self,
        config: Config,
        loaded_config: LoadedConfig | None,
        commands: ConversationCommands,
        policy: AccessPolicy,
    ) -> "AdminApi":
        """Builds the object through which the admin API and the admin pages reach the rest of the proxy."""
        from compaction_proxy.admin.api.overview import create_conversation_loader  # see `AdminSite`
        from compaction_proxy.admin.api.routing import AdminApi, AdminSettings
        from compaction_proxy.admin.queries import ConversationQueries
        from compaction_proxy.recall.round_detail import RoundDetailReader
        from compaction_proxy.replay.jobs import ReplayJobRunner

        parts = self._parts
        settings = AdminSettings(config)
        if loaded_config is not None:
            settings = AdminSettings(
                config, loaded_config.origins, str(loaded_config.path or ""), loaded_config.warnings
            )
        origin = format_origin(config.upstream.base_url)
        queries = ConversationQueries(
            records=parts.records,
            conversation_registry=parts.conversation_registry,
            usage=parts.usage,
            history=parts.history,
            details=RoundDetailReader(parts.records, parts.history),
            directives=parts.directives,
            statistics=parts.statistics,
            feed=parts.feed,
            pricing=parts.pricing,
            model_limits=parts.model_limits,
            config=config,
            origin=origin,
            get_secret=lambda: parts.secret.current_key,
            gates=tuple(dict.fromkeys(self._build_gates(config).values())),
            flush=parts.flush_exchanges,
        )
        replay_jobs = ReplayJobRunner(config, create_conversation_loader(commands, queries))

        def is_ending() -> bool:
            # A reload may change the rules for access. Open event streams then end, because their readers may
            # no longer have access.
            return bool(self._server_state.get("stopping")) or self._access_policy != policy

        return AdminApi(
            commands, queries, replay_jobs, policy, settings, is_ending, self._parts.list_problems
        )


def create_app(
    config: Config, *, store: Store | None = None, loaded_config: LoadedConfig | None = None
) -> Proxy:
    """Returns the proxy as an ASGI application.

    All components are opened when the server starts the application, and closed when the server stops it.

    Args:
        config: The configuration.
        store: A store to use in place of the configured one. None uses the configured store.
        loaded_config: The same configuration with the source of each value. The admin API reports the
            sources. None if the sources are unknown.

    Raises:
        ConfigError: If a prompt file cannot be read, if the URL of the store or an encryption key is not
            valid, or if a package that the configuration needs is not installed.
    """
    origin = loaded_config.origins.get("store.url", "") if loaded_config else ""
    return Proxy(config, Components(config, store, store_origin=origin), loaded_config)
