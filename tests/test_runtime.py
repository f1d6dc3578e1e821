"""What a process is built of: its store, its secret, its tracer; how the parts are opened and closed."""

import asyncio
import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send
from structlog.testing import capture_logs

from compaction_proxy import __version__, runtime
from compaction_proxy.config.config import Config
from compaction_proxy.core.errors import ConfigError, StoreUnavailableError
from compaction_proxy.core.exchange import Exchange
from compaction_proxy.gateway.body_budget import compute_default_budget
from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.runtime import (
    COLLECTOR_VARIABLES,
    MAX_PREVIOUS_SECRETS,
    SECRET_CHECK_S,
    SECRET_RETRY_S,
    Components,
    TenantSecret,
    choose_body_budget,
    create_tracer,
    log_store_failure,
    open_configured_store,
)
from compaction_proxy.storage.encrypted import EncryptedStore
from compaction_proxy.storage.factory import NO_SECRET, SECRET_BYTES, SECRET_KEY
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.store import Record
from compaction_proxy.support.memory_limit import MemoryLimits
from tests.helpers.journals import ORIGIN, exchange

SHARED = "redis://shared.example"
NAMED = {"observability": {"otlp_endpoint": "http://127.0.0.1:9/"}}


@pytest.fixture(autouse=True)
def no_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*COLLECTOR_VARIABLES, "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)


class Collector:
    """Takes whatever is posted, and remembers path and kind."""

    def __init__(self) -> None:
        self.got: list[tuple[str, str, str]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        while (await receive()).get("more_body"):
            pass
        kind = dict(scope["headers"])[b"content-type"].decode()
        self.got.append((scope["method"], scope["path"], kind))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


@pytest.mark.parametrize("named_by", ["configuration", "environment"])
async def test_spans_that_wait_are_sent_to_the_collector_in_the_end(
    named_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector = Collector()
    async with serve_embedded(collector) as url:
        if named_by == "environment":
            monkeypatch.setenv(COLLECTOR_VARIABLES[0], url)
        given = {} if named_by == "environment" else {"observability": {"otlp_endpoint": url}}
        tracer = await asyncio.to_thread(create_tracer, Config.model_validate(given))
        assert tracer is not None
        trace = tracer.start_request([], "r1")
        trace.start_upstream_call([])
        trace.end_request(Exchange(at=1.0, model="m", status="none", code=200), None)
        await tracer.close()
    assert collector.got == [("POST", "/v1/traces", "application/x-protobuf")]


def test_without_a_collector_nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert create_tracer(Config()) is None
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert create_tracer(Config.model_validate(NAMED)) is None


def test_a_collector_that_nothing_can_be_sent_to_for_lack_of_a_library_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(runtime, "import_module", missing)
    with pytest.raises(ConfigError) as refused:
        create_tracer(Config.model_validate(NAMED))
    assert str(refused.value) == "observability.otlp_endpoint: needs `pip install 'compaction-proxy[otel]'`"
    monkeypatch.setenv(
        COLLECTOR_VARIABLES[0], "http://127.0.0.1:9"
    )  # set for all that runs there, not for us
    assert create_tracer(Config()) is None


def configure(**sections: Any) -> Config:
    return Config.model_validate(sections)


async def test_a_store_is_encrypted_where_keys_are_configured() -> None:
    key = base64.b64encode(bytes(32)).decode()
    assert isinstance(open_configured_store(Config(), "memory://"), MemoryStore)
    store = open_configured_store(configure(store={"encryption_keys": [key]}), "memory://")
    assert isinstance(store, EncryptedStore)
    await store.write([Record("k", b"plain", 10)])
    [kept] = await store._store.read(["k"])
    assert kept is not None
    assert b"plain" not in kept
    assert await store.read(["k"]) == [b"plain"]


def test_a_store_that_shall_be_encrypted_needs_a_valid_key() -> None:
    with pytest.raises(ConfigError, match=r"store\.encryption_keys"):
        open_configured_store(configure(store={"encryption_keys": ["short"]}), "memory://")


def test_the_body_budget_is_the_configured_one_or_follows_from_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = MemoryLimits(4_000_000_000, None)
    monkeypatch.setattr(runtime, "read_memory_limits", lambda: limits)
    assert choose_body_budget(configure(server={"max_inflight_bytes": 7_000_000}).server) == 7_000_000
    two = compute_default_budget(limits.memory_bytes, limits.address_bytes, 2)
    assert choose_body_budget(configure(server={"workers": 2}).server) == two
    assert choose_body_budget(Config().server) > two


def test_a_failure_of_the_store_is_logged_with_its_cause_and_the_number_that_was_left_out() -> None:
    error = StoreUnavailableError("store-full", "sk-secret")
    error.__cause__ = OSError("disk")
    with capture_logs() as lines:
        log_store_failure(error)
        log_store_failure(StoreUnavailableError("store-busy"), suppressed=3)
    level = {"event": "store.failed", "log_level": "warning"}
    assert lines == [
        {**level, "reason": "store-full", "error": "OSError"},
        {**level, "reason": "store-busy", "error": "StoreUnavailableError", "suppressed": 3},
    ]


# The secret.


async def test_a_configured_secret_is_used_and_no_store_is_asked() -> None:
    server = {"secret": "s" * 32, "previous_secrets": ["t" * 32]}
    store = MemoryStore()
    secret = TenantSecret(configure(server=server), SHARED, store)
    assert await secret.sync_with_store()
    await secret.sync_periodically()
    assert secret.accepted_keys == (b"s" * 32, b"t" * 32)
    assert await store.read([SECRET_KEY]) == [None]


async def test_a_secret_of_this_installation_stays_the_same_and_is_not_shared(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/state.db"
    store = MemoryStore()
    first, second = (TenantSecret(Config(), url, store) for _ in range(2))
    assert first.current_key == second.current_key
    assert await first.sync_with_store()
    assert await store.read([SECRET_KEY]) == [None]


async def test_replicas_on_a_shared_store_agree_on_one_secret_and_still_accept_their_own() -> None:
    store = MemoryStore()
    one, other = (TenantSecret(Config(), SHARED, store) for _ in range(2))
    own = other.current_key
    assert one.current_key != own
    assert [await each.sync_with_store() for each in (one, other)] == [True, True]
    assert one.current_key == other.current_key
    assert (one.accepted_keys, other.accepted_keys) == ((one.current_key,), (one.current_key, own))


async def test_a_replica_remembers_a_limited_number_of_earlier_secrets() -> None:
    store = MemoryStore()
    secret = TenantSecret(Config(), SHARED, store)
    made = [bytes([number]) * SECRET_BYTES for number in range(MAX_PREVIOUS_SECRETS + 5)]
    for each in made:
        await store.write([Record(SECRET_KEY, each, 1e9)])
        assert await secret.sync_with_store()
    assert secret.accepted_keys == tuple(reversed(made))[: MAX_PREVIOUS_SECRETS + 1]


class FaultyStore(MemoryStore):
    """A store whose commits raise `fault` as long as there is one."""

    fault: Exception | None = None

    async def commit(self, claim: Record, other_items: Sequence[Any] = (), **options: Any) -> bytes | None:
        if self.fault is not None:
            raise self.fault
        return await super().commit(claim, other_items, **options)


async def test_a_store_that_is_away_leaves_the_secret_and_only_a_damaged_secret_is_reported() -> None:
    store, reported = FaultyStore(), list[str]()
    secret = TenantSecret(Config(), SHARED, store, lambda error: reported.append(error.reason))
    own = secret.current_key
    for store.fault in (OSError("gone"), TimeoutError(), StoreUnavailableError("store-down")):
        assert not await secret.sync_with_store()
    assert reported == []
    store.fault = None
    await store.write([Record(SECRET_KEY, b"damaged", 1e9)])
    assert not await secret.sync_with_store()
    assert (reported, secret.current_key) == ([NO_SECRET], own)


@pytest.mark.virtual_time
async def test_a_secret_that_the_store_lost_is_put_back_in_time() -> None:
    store = FaultyStore()
    store.fault = OSError("gone")
    secret = TenantSecret(Config(), SHARED, store)
    syncing = asyncio.create_task(secret.sync_periodically())
    await asyncio.sleep(SECRET_RETRY_S / 2)
    store.fault = None
    await asyncio.sleep(SECRET_RETRY_S)
    assert await store.read([SECRET_KEY]) == [secret.current_key]
    await store.delete_prefix("")
    await asyncio.sleep(SECRET_CHECK_S)
    assert await store.read([SECRET_KEY]) == [secret.current_key]
    syncing.cancel()


# The components.


async def test_the_components_are_ready_while_they_are_open_and_close_their_store() -> None:
    class Closing(MemoryStore):
        closed = 0

        async def close(self) -> None:
            self.closed += 1
            await super().close()

    store = Closing()
    parts = Components(Config(), store)
    seen = [parts.get_readiness()]
    async with parts.run_lifespan(None):
        seen.append(parts.get_readiness())
        assert store.closed == 0
    seen.append(parts.get_readiness())
    assert [each.ready for each in seen] == [False, True, False]
    assert (seen[1].store, seen[1].version, store.closed) == ("ok", __version__, 1)


async def test_metrics_count_what_was_recorded_before_they_were_asked_for() -> None:
    parts = Components(Config(), MemoryStore())
    async with parts.run_lifespan(None):
        parts.exchange_log.record_exchange("t", "c_1", ORIGIN, exchange(1.0))
        text, kind = await parts.render_metrics("")
    [line] = [each for each in text.decode().splitlines() if each.startswith("compaction_requests_total{")]
    assert (line.endswith(" 1.0"), kind.startswith("text/plain")) == (True, True)


def test_a_prompt_file_that_is_not_there_is_a_configuration_error(tmp_path: Path) -> None:
    given = configure(summary={"model": "m", "prompt_file": str(tmp_path / "none.md")})
    with pytest.raises(ConfigError, match="prompt_file"):
        Components(given, MemoryStore())
