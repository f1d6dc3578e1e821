"""The composition root: builds everything from a configuration, and owns its life cycle."""

from secrets import token_hex

from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from proxy.adapters.discovery import HttpDiscovery
from proxy.admin.access import Access
from proxy.admin.app import create_admin
from proxy.admin.conversations import Api
from proxy.config.checks import is_loopback
from proxy.config.model import Config
from proxy.parts import Parts
from proxy.ports import Store
from proxy.recall import Recall
from proxy.relay.admission import Admission
from proxy.relay.aftermath import Aftermath
from proxy.relay.asgi import Dispatcher
from proxy.relay.blind import Blind
from proxy.relay.chat import Chat
from proxy.relay.compact import Compact
from proxy.relay.exchange import Upstream
from proxy.relay.gate import Gate
from proxy.relay.identity import origin
from proxy.relay.known_clients import KnownClients
from proxy.relay.trouble import Trouble
from proxy.steering import Steering
from proxy.storage.records import Records

CONNECT_TIMEOUT_S = 10.0
HOP_BYTES = 8


def _beginning(app: ASGIApp, records: Records) -> ASGIApp:
    """The application; a request of it writes nothing of what is forgotten while it is under way."""

    async def begun(scope: Scope, receive: Receive, send: Send) -> None:
        records.outdated.begin()
        await app(scope, receive, send)

    return begun


def _admin(config: Config, parts: Parts) -> ASGIApp:
    """What answers our own paths."""
    recall = Recall(parts.records, parts.history, parts.searched)
    steering = Steering(
        parts.records, parts.owners, parts.history, parts.wishing, recall, announce=parts.announcing
    )
    access = Access(config.server.host, config.server.admin_key.get_secret_value())
    app = create_admin(parts.readiness, config.server.base_path, Api(steering, access), parts.measured)
    return _beginning(app, parts.records)


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


def _upstream(config: Config, parts: Parts) -> Upstream:
    """Where requests go, and the mark that they carry."""
    return Upstream(
        base_url=config.upstream.base_url,
        api_key=config.upstream.api_key.get_secret_value(),
        hop=token_hex(HOP_BYTES),
        engine=parts.engine,
        connect_timeout_s=CONNECT_TIMEOUT_S,
        read_timeout_s=config.upstream.timeout_s,
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


def create_app(config: Config, *, store: Store | None = None) -> ASGIApp:
    """The proxy as an ASGI application; its lifespan opens and closes everything.

    Args:
        config: The configuration.
        store: A store to use in place of the configured one.

    Raises:
        ConfigError: The configuration names something that is not there.
    """
    parts = Parts(config, store)
    target = origin(config.upstream.base_url)
    upstream = _upstream(config, parts)
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
            note=parts.journal.note,
            trouble=Trouble(parts.announcing, parts.history),
            owners=parts.owners,
            learning=parts.learning,
            discovery=HttpDiscovery(parts.transport),
        ),
        gate=Gate(config, parts.learning, parts.wishing, target),
        secret=lambda: parts.secret.value,
        admission=admission,
    )
    return Dispatcher(
        admin=_admin(config, parts),
        chat=_beginning(chat, parts.records),
        blind=Blind(upstream, admission),
        hop=upstream.hop,
        compact=_compact(config, parts, upstream, admission),
        clients=_known_clients(config),
        base_path=config.server.base_path,
        lifespan=Router(lifespan=parts.running),
    )
