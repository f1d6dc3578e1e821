"""Who answers relayed requests, built from a configuration and from what lives as long as the process."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name

from starlette.types import ASGIApp, Receive, Scope, Send

from compaction_proxy.config.config import Config
from compaction_proxy.config.sections import MESSAGES, RESPONSES
from compaction_proxy.gateway import compact_api, count_tokens
from compaction_proxy.gateway.after_response import Aftermath
from compaction_proxy.gateway.compact_api import Compact, InputCompactor, ResponsesCompact
from compaction_proxy.gateway.compaction_items import CompactionItems
from compaction_proxy.gateway.compaction_trigger import TriggerResponder
from compaction_proxy.gateway.concurrency_limit import Admission
from compaction_proxy.gateway.count_tokens import CountTokens
from compaction_proxy.gateway.endpoint import Endpoint
from compaction_proxy.gateway.identity import origin
from compaction_proxy.gateway.incidents import Trouble
from compaction_proxy.gateway.passthrough import Blind
from compaction_proxy.gateway.size_gate import Gate
from compaction_proxy.gateway.unread_conversations import UnreadConversations
from compaction_proxy.gateway.upstream import Upstream, upstreams
from compaction_proxy.providers.discovery import HttpDiscovery
from compaction_proxy.runtime import Parts
from compaction_proxy.storage.records import Records
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
