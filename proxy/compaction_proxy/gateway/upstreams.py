"""Which upstream a request goes to: wires may have providers of their own."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from starlette.types import Scope

from compaction_proxy.config.config import Config
from compaction_proxy.config.sections import WIRES
from compaction_proxy.core.errors import Shown, openai_error
from compaction_proxy.gateway.client.types import HttpEngine
from compaction_proxy.gateway.headers import first_values
from compaction_proxy.gateway.upstream import Upstream
from compaction_proxy.gateway.upstream_monitor import UpstreamMonitor
from compaction_proxy.wires.registry import WIRES as DIALECTS

CONNECT_TIMEOUT_S = 10.0
# What every request of an Anthropic client carries, to whatever path.
ANTHROPIC = b"anthropic-version"


def upstreams(
    config: Config, engine: HttpEngine, hop: str, monitor: UpstreamMonitor
) -> Mapping[str, Upstream]:
    """Where requests go, by the name of their wire.

    Args:
        config: The configuration.
        engine: What sends.
        hop: The mark of this installation.
        monitor: Reports their failures.
    """
    made: dict[str, Upstream] = {}
    for wire in WIRES:
        base_url, key = config.upstream.provider(wire)
        made[wire] = Upstream(
            base_url=base_url,
            api_key=key,
            hop=hop,
            engine=engine,
            connect_timeout_s=CONNECT_TIMEOUT_S,
            read_timeout_s=config.upstream.timeout_s,
            key_field=DIALECTS[wire].key_field,
            monitor=monitor,
        )
    monitor.keep_targets({each.target for each in made.values()})
    return MappingProxyType(made)


def wire_of(raw_path: bytes, first: Mapping[bytes, bytes]) -> str:
    """The wire whose provider answers a request that no dialect reads.

    Args:
        raw_path: The path as the client wrote it.
        first: The first value of each header field (`headers.first_values`).
    """
    if ANTHROPIC in first or b"/v1/messages/" in raw_path or raw_path.endswith(b"/v1/messages"):
        return "messages"
    return "responses" if b"/responses/" in raw_path or raw_path.endswith(b"/responses") else "chat"


def error_shape(scope: Scope) -> Callable[[Shown], bytes]:
    """How clients of this path expect errors."""
    wire = DIALECTS.get(wire_of(scope["raw_path"], first_values(scope["headers"])))
    return wire.error if wire else openai_error
