"""What an installation has beyond one process: its store, and the secret that its digests are made with."""

import asyncio
import os
from collections.abc import Callable
from importlib import import_module

import structlog

from compaction_proxy import __version__
from compaction_proxy.config.config import Config
from compaction_proxy.config.sections import ServerSection
from compaction_proxy.core.errors import ConfigError, StoreUnavailable
from compaction_proxy.gateway.body_budget import default_budget
from compaction_proxy.recall.fulltext import MISSING, FullText, SqliteFullText, is_there
from compaction_proxy.storage.factory import (
    NO_SECRET,
    installation_secret,
    is_shared,
    open_store,
    shared_secret,
)
from compaction_proxy.storage.resilient import within
from compaction_proxy.storage.store import Store
from compaction_proxy.support.log_events import SEARCH_UNAVAILABLE, STORE_FAILED, TRACING_NOT_INSTALLED
from compaction_proxy.support.memory_limit import read_memory_limits
from compaction_proxy.telemetry.tracing import Tracer

SECRET_DEADLINE_S = 1.0
SECRET_RETRY_S = 1.0
# A store that was emptied has its secret back, or all have its new one, after this long, in seconds.
SECRET_CHECK_S = 5.0
# Earlier secrets that are remembered.
MAX_PREVIOUS = 16
# By any of these the environment says where traces go.
COLLECTORS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")

Report = Callable[[StoreUnavailable], None]

_log = structlog.get_logger()


def store_failed(error: StoreUnavailable, suppressed: int = 0) -> None:
    """Log that the store failed; `suppressed` times since the last line of its kind."""
    left_out = {"suppressed": suppressed} if suppressed else {}
    _log.warning(STORE_FAILED, reason=error.reason, error=type(error.__cause__ or error).__name__, **left_out)


def opened_store(config: Config, store_url: str) -> Store:
    """The configured store, sealed if there are keys."""
    keys = [key.get_secret_value() for key in config.store.encryption_keys]
    if not keys:
        return open_store(store_url)
    try:
        sealing = import_module("compaction_proxy.storage.encrypted")
    except ModuleNotFoundError:
        raise ConfigError("store.encryption_keys: needs `pip install compaction-proxy[crypto]`") from None
    store: Store = sealing.SealedStore(open_store(store_url), [sealing.parsed_key(key) for key in keys])
    return store


def choose_budget(server: ServerSection) -> int:
    """Returns the bytes of request bodies that this process may hold: as configured, or as memory allows."""
    if server.max_inflight_bytes is not None:
        return server.max_inflight_bytes
    limits = read_memory_limits()
    return default_budget(limits.memory_bytes, limits.address_bytes, server.workers)


def opened_full_text() -> FullText:
    """What ranks what was removed. A SQLite that lacks what that takes is told of, and all else works."""
    if not is_there():
        _log.warning(SEARCH_UNAVAILABLE, reason=MISSING)
    return SqliteFullText()


def opened_tracer(config: Config) -> Tracer | None:
    """What follows requests, if the configuration or the environment (`OTEL_…`) names a collector.

    Raises:
        ConfigError: The configuration names one, and what it takes is not installed.
    """
    endpoint = config.observability.otlp_endpoint
    off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if off or not (endpoint or any(map(os.environ.get, COLLECTORS))):
        return None
    try:
        tracing = import_module("compaction_proxy.telemetry.otel")
    except ModuleNotFoundError:
        if endpoint:
            text = "observability.otlp_endpoint: needs `pip install compaction-proxy[otel]`"
            raise ConfigError(text) from None
        _log.warning(TRACING_NOT_INSTALLED)
        return None
    tracer: Tracer = tracing.OtelTracer(config.upstream.base_url, __version__, tracing.exporting(endpoint))
    return tracer


class Secret:
    """The key of the digests that tell tenants apart: configured, this installation's, or the shared store's.

    Replicas on one store must have the same. Until the store answers each has its own, and what it keeps
    meanwhile is found by nobody later: a miss, as with any store that is away. `report` is told of a secret
    that cannot be used.

    Attributes:
        value: The key that is in force.
    """

    def __init__(self, config: Config, store_url: str, store: Store, report: Report = store_failed) -> None:
        configured = config.server.secret.get_secret_value()
        self.value = configured.encode() or installation_secret(store_url, report)
        self._previous = [each.get_secret_value().encode() for each in config.server.previous_secrets]
        self._report = report
        self._store = None if configured or not is_shared(store_url) else store

    async def agree(self) -> bool:
        """Take the shared store's secret, or offer ours. False if the store has to be asked again."""
        if self._store is None:
            return True
        try:
            shared = await within(SECRET_DEADLINE_S, shared_secret(self._store, self.value))
        except (StoreUnavailable, TimeoutError, OSError) as error:
            if isinstance(error, StoreUnavailable) and error.reason == NO_SECRET:
                self._report(error)  # of a store that is away the records tell
            return False
        if shared != self.value:
            self._previous = [self.value, *self._previous][:MAX_PREVIOUS]
            self.value = shared
        return True

    @property
    def values(self) -> tuple[bytes, ...]:
        """The key that is in force, and behind it those that were: configured ones, or of this process."""
        return self.value, *self._previous

    async def keep_asking(self) -> None:
        """Ask until the store has answered, and now and then after that: it may have lost what it had."""
        while self._store is not None:  # noqa: ASYNC110 - the store is no event of ours
            await asyncio.sleep(SECRET_CHECK_S if await self.agree() else SECRET_RETRY_S)
