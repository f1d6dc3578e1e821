"""Asks the upstream for the context windows of models, after the responses to their requests."""

import time
from collections.abc import Callable

from starlette.types import Scope

from compaction_proxy.config.config import Config, get_model_settings
from compaction_proxy.gateway.summary_routes import build_credential_headers
from compaction_proxy.gateway.upstream import Upstream
from compaction_proxy.providers.discovery import build_local_urls
from compaction_proxy.providers.model_limits import ModelLimits
from compaction_proxy.providers.types import WindowDiscovery
from compaction_proxy.support.lru import BoundedDict

# For each tenant and model, the finder looks at most this often, in seconds, whether the context window has
# to be asked for. It remembers at most `MAX_REMEMBERED_MODELS` pairs of a tenant and a model.
DISCOVERY_INTERVAL_S = 600.0
MAX_REMEMBERED_MODELS = 1_000


class WindowFinder:
    """Starts background tasks that ask an upstream for the context windows of models.

    The finder does not ask for a context window that is configured. No request waits for a task.

    Args:
        config: The configuration.
        upstream: The upstream.
        model_limits: Keeps the context windows, and knows which of them were asked for lately.
        discovery: Asks the upstream for the context window of a model.
        clock: Returns monotonic seconds.

    Attributes:
        is_upstream_local: Whether the upstream is on a local network. A local model often has a small context
            window that no table knows. So it is asked for even if the requests are not parsed.
    """

    def __init__(
        self,
        config: Config,
        upstream: Upstream,
        model_limits: ModelLimits,
        discovery: WindowDiscovery,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_upstream_local = bool(build_local_urls(upstream.base_url))
        self._config = config
        self._upstream = upstream
        self._model_limits = model_limits
        self._discovery = discovery
        self._clock = clock
        self._quiet_until: BoundedDict[tuple[str, str], float] = BoundedDict(MAX_REMEMBERED_MODELS)

    def start_discovery(self, scope: Scope, tenant: str, model: str) -> None:
        """Starts to ask for the context window of a model, if it is unknown and was not asked for lately.

        Args:
            scope: The ASGI scope of a request for the model. Its credential may be sent to the upstream.
            tenant: The tenant of the request.
            model: The model of the request.
        """
        if self._quiet_until.get((tenant, model), 0.0) > self._clock():
            return
        if get_model_settings(self._config, model).window is not None:
            return

        async def fetch_window() -> int | None:
            headers = build_credential_headers(self._upstream, scope["headers"])
            return await self._discovery.discover_window(self._upstream.base_url, headers, model)

        if self._model_limits.start_discovery(tenant, self._upstream.origin, model, fetch_window):
            self._quiet_until[tenant, model] = self._clock() + DISCOVERY_INTERVAL_S
