"""Checks the configuration, this machine, the store and the upstream, and suggests fixes for problems."""

import asyncio
import json
import os
import secrets
import shutil
import stat
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx

from compaction_proxy.cli.admin_client import (
    AdminRefusedError,
    AdminUnreachableError,
    build_local_url,
    create_local_client,
    fetch_state,
)
from compaction_proxy.cli.admin_key import AdminKeyError, find_key_path, load_or_create_key, read_admin_key
from compaction_proxy.cli.console import (
    BAD_CONFIG,
    FAILED,
    Column,
    format_quantity,
    format_table,
    get_terminal_width,
    print_json,
    print_lines,
    read_rows,
    show_progress,
)
from compaction_proxy.cli.serve import MAX_DESCRIPTORS, open_listener
from compaction_proxy.config.config import Config, get_model_settings
from compaction_proxy.config.loader import ConfigOverride, LoadedConfig, get_store_url_setting, load_config
from compaction_proxy.config.sections import MESSAGES_WIRE, NO_ADMIN_KEY, RESPONSES_WIRE, ServerSection
from compaction_proxy.config.types import mask_passwords, parse_origin
from compaction_proxy.config.validation import MEMORY, is_bound_to_loopback
from compaction_proxy.core.errors import ConfigError, ProxyError, StoreUnavailableError, SummaryError
from compaction_proxy.core.summary.call import SummaryCall
from compaction_proxy.gateway import server as serving
from compaction_proxy.gateway.client.connection_pool import NativeEngine
from compaction_proxy.gateway.client.httpx_transport import EngineTransport
from compaction_proxy.gateway.client.proxies import read_environment_proxies
from compaction_proxy.gateway.provider_models import ModelList, fetch_model_list, fetch_page
from compaction_proxy.gateway.summary_routes import (
    ConfiguredSummaryModel,
    build_key_header,
    list_summary_models,
)
from compaction_proxy.providers.discovery import HttpWindowDiscovery, build_local_urls
from compaction_proxy.providers.summary_transport import HttpSummaryModel
from compaction_proxy.providers.tokenizers import TiktokenCounter
from compaction_proxy.providers.tokenizers_fast import read_golden_texts
from compaction_proxy.providers.windows import FALLBACK_WINDOW, find_shipped_window
from compaction_proxy.recall.fulltext import FTS5_MISSING, is_fts5_available
from compaction_proxy.runtime import (
    NO_DATA_FOLDER,
    TenantSecret,
    choose_body_budget,
    open_configured_store,
)
from compaction_proxy.storage.factory import get_secret_path, get_store_path, is_shared_store
from compaction_proxy.storage.store import Record, Store
from compaction_proxy.storage.store_failure import StoreFailure
from compaction_proxy.support.formatting import describe_reason, escape_unprintable
from compaction_proxy.wires.registry import WIRES

OK, NOTE, WARNING, ERROR = "ok", "note", "warning", "error"
# `doctor` warns if a process may open fewer files than this. A request needs two open files, and by default
# up to 1,000 requests are in progress.
MIN_DESCRIPTORS = 4_096
# An admin key counts as weak if it has fewer than `WEAK_KEY_CHARACTERS` characters, or fewer than
# `WEAK_KEY_KINDS` different characters.
WEAK_KEY_CHARACTERS = 16
WEAK_KEY_KINDS = 6
STRONG_KEY = "openssl rand -hex 32"
# Maps each optional extra of the package to a module that the extra installs.
_EXTRAS = {"fast": "toktok", "mcp": "mcp", "otel": "opentelemetry.sdk", "redis": "hiredis"}
STORE_DEADLINE_S = 5.0
# `doctor` warns if a write and a read of the store together take more seconds than this. A request waits at
# most 0.25 s for the store and then continues without the store.
SLOW_S = 0.1
# `doctor` warns if fewer bytes than `LOW_SPACE_BYTES` are free on the disk, and reports an error below
# `NO_SPACE_BYTES`. A store file takes up to 1 GiB, and its write-ahead log takes as much again.
LOW_SPACE_BYTES = 2 * 1024**3
NO_SPACE_BYTES = 64 * 1024**2
PROBE_TTL_S = 10.0
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
# `doctor` warns if the clocks of this machine and of the upstream differ by more seconds than this. With a
# wrong clock, the proxy may misjudge whether certificates are valid and whether stored data has expired.
MAX_CLOCK_SKEW_S = 60.0
SMALL_WINDOW_TOKENS = 16_384
PROBE_TOKENS = 16
_UNAUTHORIZED = (401, 403)
MAX_LOCAL_MODELS = 20


class Finding(NamedTuple):
    """One result of a check.

    Attributes:
        level: `ok`, `note`, `warning` or `error`. An error keeps the proxy from working.
        topic: What was checked, such as `store`.
        what: The result in words.
        fix: What the user can do about the result. Empty if the result needs no action.
    """

    level: str
    topic: str
    what: str
    fix: str = ""


def run_doctor(
    config: Path | None, upstream: str | None, port: int | None, *, probe: bool, as_json: bool
) -> int:
    """Runs all checks, prints their findings and returns the exit code of the command `doctor`."""
    overrides = (
        ConfigOverride("--upstream", ("upstream", "base_url"), upstream),
        ConfigOverride("--port", ("server", "port"), port),
    )
    try:
        loaded = load_config(config, os.environ, [each for each in overrides if each.value is not None])
    except ConfigError as error:
        fix = "correct the key; docs/configuration.md and `compaction-proxy config schema` describe all keys"
        findings = [Finding(ERROR, "configuration", line, fix) for line in str(error).splitlines()]
        code = BAD_CONFIG
    else:
        with show_progress("checking the configuration, this machine, the store and the upstream"):
            findings = asyncio.run(_collect_findings(loaded, probe=probe))
        code = FAILED if any(each.level == ERROR for each in findings) else 0
    if as_json:
        print_json({"findings": [each._asdict() for each in findings]})
    else:
        print_lines(format_findings(findings, get_terminal_width()))
    return code


async def _collect_findings(loaded: LoadedConfig, *, probe: bool) -> list[Finding]:
    """Returns the findings of all checks: of the configuration, this machine, the store and the upstream."""
    file = loaded.path.resolve() if loaded.path else "built-in defaults and the environment"
    return [
        Finding(OK, "configuration", f"{file}; a running proxy may have read another file (--config)"),
        *(
            Finding(
                WARNING, "configuration", line, "change the setting, or ignore this warning if it is intended"
            )
            for line in loaded.warnings
        ),
        *check_host(loaded.config, os.environ),
        *[each async for each in check_store(loaded.config, loaded.origins.get("store.url", ""))],
        *[each async for each in check_upstream(loaded.config, probe=probe)],
    ]


def format_findings(findings: Iterable[Finding], max_cells: int | None) -> list[str]:
    """Formats a table with a row for each finding.

    `max_cells` is the largest width of the table, in terminal cells; see `format_table`.
    """
    columns = (Column("result"), Column("topic"), Column("finding"))
    rows = [
        (each.level, each.topic, f"{each.what}; fix: {each.fix}" if each.fix else each.what)
        for each in findings
    ]
    return format_table(columns, rows, max_cells)


def check_host(config: Config, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Runs all checks that need neither the store nor the upstream."""
    yield check_address(config.server)
    yield from check_running_upstream(config, environ)
    yield check_admin_key(config, environ)
    yield check_open_files()
    yield check_body_memory(config.server)
    yield from check_environment_proxies(config, environ)
    yield from check_extras(config)
    yield check_tokenizer()
    yield check_search()


def check_address(server: ServerSection) -> Finding:
    """Checks whether a proxy already runs at the configured address, or else whether the address is free."""
    where = f"unix:{server.unix_socket}" if server.unix_socket else f"{server.host}:{server.port}"
    state = fetch_state(create_local_client(server))
    if state is not None:
        what = f"{where}: compaction-proxy {state.version} is running there"
        if not state.problems:
            return Finding(OK, "address", what)
        what += f", but is degraded: {' '.join(state.problems)}"
        return Finding(WARNING, "address", what, "see the fixes in its start-up banner or on its dashboard")
    try:
        bound = open_listener(server)
    except ConfigError as error:
        return Finding(
            ERROR, "address", str(error), "stop the server that uses the port, or change server.port"
        )
    with serving.remove_socket_on_exit(bound):
        bound.close()
    return Finding(OK, "address", f"{where}: the address is free")


def check_running_upstream(config: Config, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Checks whether a proxy that runs at the configured address forwards to the configured upstream.

    If it does not, the other checks ask an upstream that the running proxy never asks. Yields nothing if no
    proxy runs there.
    """
    client = create_local_client(config.server, read_admin_key(config, environ))
    if fetch_state(client) is None:  # so that the admin key is sent to no other program
        return
    configured = mask_passwords(config.upstream.base_url)
    try:
        values = read_rows(client.get("/config"), "values")
    except (AdminRefusedError, AdminUnreachableError) as error:
        what = f"cannot read the upstream of the running proxy: {error}; the checks below use {configured}"
        yield Finding(
            NOTE, "upstream", what, "run doctor with the options, variables and --config of `serve`"
        )
        return
    running = next((each.get("value") for each in values if each.get("key") == "upstream.base_url"), None)
    if isinstance(running, str) and running.rstrip("/") != configured.rstrip("/"):
        shown = escape_unprintable(running)
        what = f"the running proxy forwards to {shown}, but the checks below use {configured}"
        fix = f"run doctor with the options, variables and --config of `serve`, such as --upstream {shown}"
        yield Finding(WARNING, "upstream", what, fix)


def check_admin_key(config: Config, environ: Mapping[str, str]) -> Finding:
    """Checks whether the admin API has a key, and whether the key is strong.

    Warns about a missing key if the proxy can make none, because it then closes the admin API. Also warns if
    the admin API needs no key.
    """
    key, name = config.server.admin_key.get_secret_value(), "admin key"
    fix = f"set server.admin_key, for example to the output of `{STRONG_KEY}`"
    if key == NO_ADMIN_KEY:
        what = "disabled: other users of this machine, and tunnels to it, can use the admin API"
        return Finding(WARNING, name, what, "remove `server.admin_key: none`; the proxy then generates a key")
    if key and (len(key) < WEAK_KEY_CHARACTERS or len(set(key)) < WEAK_KEY_KINDS):
        return Finding(
            WARNING, name, "too weak", f"set a longer key, for example the output of `{STRONG_KEY}`"
        )
    if key:
        return Finding(OK, name, "set")
    if not is_bound_to_loopback(config.server):
        return Finding(WARNING, name, "not set, so the admin API is disabled at this address", fix)
    try:
        path = find_key_path(config, environ)
        is_made = os.path.lexists(path)
        if is_made:
            load_or_create_key(path)
    except AdminKeyError as error:
        return Finding(WARNING, name, f"not set, so the admin API is disabled: {error}", fix)
    return Finding(OK, name, f"{'saved in' if is_made else 'will be generated at the first start in'} {path}")


def check_open_files() -> Finding:
    """Checks how many files and connections the proxy may have open at the same time.

    Warns if the number is below `MIN_DESCRIPTORS`.
    """
    if sys.platform == "win32":
        return Finding(NOTE, "open files", "the limit is unknown on this platform")
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if allowed < MIN_DESCRIPTORS:
        fix = "raise the limit: `ulimit -Hn`, LimitNOFILE of systemd, or ulimits of the container"
        return Finding(WARNING, "open files", f"limit {allowed:,}; each request needs two", fix)
    return Finding(OK, "open files", f"limit {allowed:,}")


def check_body_memory(server: ServerSection) -> Finding:
    """Checks how many bytes of request bodies a process of the proxy may hold in memory at the same time.

    Warns if the largest allowed request body has more bytes.
    """
    budget_bytes = choose_body_budget(server)
    what = f"up to {budget_bytes:,} bytes of request bodies per process"
    if budget_bytes < server.max_body_bytes:
        what += (
            f", less than server.max_body_bytes ({server.max_body_bytes:,}): larger requests fail with 413"
        )
        fix = "increase the memory limit, or lower server.max_body_bytes"
        return Finding(WARNING, "memory", what, fix)
    return Finding(OK, "memory", what)


def check_environment_proxies(config: Config, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Checks whether upstream requests go through an HTTP proxy, and whether `OPENAI_BASE_URL` is set.

    `OPENAI_BASE_URL` is meant for clients. If the variable has a URL other than the proxy's own, a finding
    says that the proxy never takes the address of its upstream from this variable.
    """
    target = parse_origin(config.upstream.base_url)
    proxy_url = read_environment_proxies().get_proxy_url(target.scheme, target.host, target.port)
    if proxy_url is not None:
        what = f"requests to {target.host} go through {mask_passwords(proxy_url)}"
        yield Finding(NOTE, "outgoing proxy", what, f"set NO_PROXY={target.host} if this is not intended")
    else:
        yield Finding(OK, "outgoing proxy", f"none for {target.host}")
    client_url = environ.get("OPENAI_BASE_URL", "")
    if client_url and client_url.rstrip("/") != f"{build_local_url(config.server).rstrip('/')}/v1":
        what = "OPENAI_BASE_URL is set. Only clients use it; the proxy ignores it"
        yield Finding(NOTE, "environment", what)


def check_extras(config: Config) -> Iterator[Finding]:
    """Checks which optional packages are installed, and whether the configuration needs a missing one."""
    for name, module in _EXTRAS.items():
        fix = f"pip install 'compaction-proxy[{name}]'"
        if _is_installed(module):
            yield Finding(OK, "extras", f"{name}: installed")
        elif name == "otel" and config.observability.otlp_endpoint:
            yield Finding(ERROR, "extras", f"{name}: configured, but not installed", fix)
        else:
            yield Finding(NOTE, "extras", f"{name}: optional, not installed", f"if you need it, {fix}")


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def check_tokenizer() -> Finding:
    """Checks whether the tokenizer counts sample texts as it did when the package was built."""
    problems: list[str] = []
    counter = TiktokenCounter(problems.append)
    texts = read_golden_texts()
    wrong = sum(counter.count(each.text, "gpt-5") != each.tokens for each in texts)
    if wrong or problems:
        what = problems[0] if problems else f"{wrong} of {len(texts)} samples have a wrong token count"
        return Finding(ERROR, "tokenizer", what, "reinstall the package")
    return Finding(OK, "tokenizer", f"verified against {len(texts)} samples")


def check_search() -> Finding:
    """Checks whether SQLite has the extension FTS5, which the search in the archive needs."""
    if is_fts5_available():
        return Finding(OK, "search", "SQLite has the extension FTS5")
    return Finding(
        WARNING, "search", FTS5_MISSING.rstrip("."), "use a Python whose SQLite has FTS5, such as uv's"
    )


async def check_store(config: Config, origin: str = "") -> AsyncIterator[Finding]:
    """Runs all checks of the store.

    If the store is a file that does not exist yet, checks only the disk and the folder for the file. Does not
    create the file.

    Args:
        config: The configuration.
        origin: What sets `store.url` (`LoadedConfig.origins`).
    """
    url = config.store.url or MEMORY
    if url == MEMORY and origin == "default":
        yield Finding(WARNING, "store", "the proxy has no writable data folder", NO_DATA_FOLDER.fix)
    path = get_store_path(url)
    if path is not None:
        for each in check_disk(path):
            yield each
    if path is not None and not path.exists():
        return
    try:
        store = open_configured_store(config, url)
    except ConfigError as error:
        yield Finding(ERROR, "store", str(error), f"correct {str(error).partition(':')[0]}")
        return
    try:
        round_trip = await _check_round_trip(store, mask_passwords(url), get_store_url_setting(origin))
        yield round_trip
        if round_trip.level != ERROR:  # else the secret has the same problem
            yield await _check_secret(config, url, store)
    finally:
        await store.close()


def check_disk(path: Path) -> Iterator[Finding]:
    """Checks the free space for a store file, and whether other users may read the store file.

    Also checks whether other users may read the file with the proxy's secret. If the store file does not
    exist, checks instead whether the proxy can create it.
    """
    folder = next(each for each in path.absolute().parents if each.exists())
    free = shutil.disk_usage(folder).free
    room = f"{free / 1024**3:.1f} GiB free in {folder}"
    if free < NO_SPACE_BYTES:
        yield Finding(ERROR, "disk", room, "free disk space, or set another location in store.url")
    elif free < LOW_SPACE_BYTES:
        yield Finding(WARNING, "disk", room, "free disk space: the store and its log take up to 2 GiB")
    else:
        yield Finding(OK, "disk", room)
    if not path.exists():
        yield _check_new_store(path, folder)
        return
    for each in (path, get_secret_path(f"sqlite:///{path.absolute()}")):
        if each is None or not each.exists():
            continue
        status = each.stat()
        if status.st_mode & _OTHERS:
            yield Finding(WARNING, "store", f"{each}: other users can read the file", f"chmod 600 '{each}'")
        else:
            yield Finding(
                OK, "store", f"{each}: {status.st_size / 1024**2:.1f} MiB, readable only by its owner"
            )


def _check_new_store(path: Path, folder: Path) -> Finding:
    """Checks whether the proxy can create a store file. `folder` is the nearest path above it that exists."""
    if not folder.is_dir():
        what, fix = f"{path}: {folder} is a file, not a folder", "set another path in store.url"
        return Finding(ERROR, "store", what, fix)
    if not os.access(folder, os.W_OK | os.X_OK):
        return Finding(ERROR, "store", f"{folder} is not writable", "give this user write permission")
    return Finding(OK, "store", f"{path}: does not exist yet; the first start creates it")


async def _check_round_trip(store: Store, display_url: str, key_name: str) -> Finding:
    """Checks whether a value can be written to the store and read back, and how long that takes.

    `key_name` is what sets the URL of the store, such as `store.url`.
    """
    key, value = f"v1:doctor:{{{secrets.token_hex(8)}}}", secrets.token_bytes(16)
    started_at = time.monotonic()
    try:
        async with asyncio.timeout(STORE_DEADLINE_S):
            await store.read([])  # connects; its errors say more than those of a script
            await store.write([Record(key, value, PROBE_TTL_S)])
            is_same = await store.read([key]) == [value]
    except (StoreUnavailableError, OSError) as error:  # `TimeoutError` is an `OSError`
        failure = StoreFailure.from_error(error)
        fix = failure.suggest_fix(display_url, key_name)
        return Finding(ERROR, "store", f"{display_url} {failure.describe()}", fix)
    took_s = time.monotonic() - started_at
    if not is_same:
        return Finding(
            ERROR,
            "store",
            f"{display_url}: a value that was written cannot be read back",
            "check the settings of the store",
        )
    if took_s > SLOW_S:
        return Finding(
            WARNING, "store", f"{display_url}: slow, {took_s:.2f} s", "run the store closer to the proxy"
        )
    return Finding(OK, "store", f"{display_url}: written and read back in {took_s * 1000:.0f} ms")


async def _check_secret(config: Config, url: str, store: Store) -> Finding:
    """Checks whether the proxy gets its secret: from the configuration, from a shared store or from a file.

    Ids of tenants are derived from the secret. Proxies that share a store must have the same secret, because
    otherwise they do not find each other's stored data.
    """
    if config.server.secret.get_secret_value():
        what = "configured" + ("; must be the same for all replicas" if is_shared_store(url) else "")
        return Finding(OK, "secret", what)
    failures: list[StoreUnavailableError] = []
    has_agreed = await TenantSecret(config, url, store, failures.append).sync_with_store()
    if failures or not has_agreed:
        what = str(failures[0]) if failures else "the proxy cannot read its secret from the store"
        return Finding(ERROR, "secret", what, "set server.secret, or repair the store")
    if is_shared_store(url):
        return Finding(OK, "secret", "in the store, shared by all replicas")
    return Finding(OK if get_store_path(url) else NOTE, "secret", "valid for this installation")


async def check_upstream(config: Config, *, probe: bool) -> AsyncIterator[Finding]:
    """Checks the providers: the upstream, those of single wires, and those of the summary models.

    Args:
        config: The configuration.
        probe: Whether to ask each summary model for one word. The provider may charge a little for this call.
    """
    transport = EngineTransport(NativeEngine(proxies=read_environment_proxies()))

    @cache  # a failure is not repeated either: it may take `DEADLINE_S` seconds
    def fetch_list(base_url: str, api_key: str, wire: str) -> asyncio.Task[ModelList]:
        return asyncio.create_task(fetch_model_list(transport, base_url, api_key, wire))

    try:
        for provider in _list_providers(config):
            async for each in _check_provider(provider, transport, fetch_list):
                yield each
        async for each in _check_local_windows(config, transport, fetch_list):
            yield each
        for model in list_summary_models(config):
            yield await _check_summary_model(config, model, fetch_list)
            if probe and model.model not in {"none", "same"}:
                yield await _probe_summary_model(transport, model)
    finally:
        await transport.aclose()


# A function that takes a base URL, a key and the name of a wire, and fetches the provider's list of models.
_FetchList = Callable[[str, str, str], Awaitable[ModelList]]


class _Provider(NamedTuple):
    """A provider to which requests are forwarded.

    Attributes:
        base_url: Its base URL.
        api_key: The proxy's own key for it; empty if clients bring theirs.
        wire: Name of a wire that it speaks.
        url_key: Key of the configuration that sets the base URL.
        api_key_key: Key of the configuration that sets `api_key`.
    """

    base_url: str
    api_key: str
    wire: str = "chat"
    url_key: str = "upstream.base_url"
    api_key_key: str = "upstream.api_key"


def _list_providers(config: Config) -> Iterator[_Provider]:
    """Yields the upstream, and the providers of single wires that have a base URL of their own."""
    yield _Provider(config.upstream.base_url, config.upstream.api_key.get_secret_value())
    for wire in (RESPONSES_WIRE, MESSAGES_WIRE):
        section, place = getattr(config.upstream.wires, wire), f"upstream.wires.{wire}"
        if section.base_url is not None:
            base_url, api_key = config.upstream.get_provider(wire)
            owner = place if section.api_key.get_secret_value() else "upstream"
            yield _Provider(base_url, api_key, wire, f"{place}.base_url", f"{owner}.api_key")


async def _check_provider(
    provider: _Provider, transport: EngineTransport, fetch_list: _FetchList
) -> AsyncIterator[Finding]:
    """Checks whether a provider can be reached, its key, its clock and its list of models."""
    base_url = provider.base_url
    try:
        listed = await fetch_list(base_url, provider.api_key, provider.wire)
    except ProxyError as error:
        what = f"{base_url} cannot be reached: {error}"
        yield Finding(ERROR, "upstream", what, f"correct {provider.url_key}, or start the server")
        return
    yield _check_model_list(provider, listed)
    skew_s = 0.0
    with suppress(ValueError, TypeError, OverflowError):  # there may be no valid date
        date = listed.response.headers.get("date", "")
        skew_s = abs(parsedate_to_datetime(date).timestamp() - time.time())
    if skew_s > MAX_CLOCK_SKEW_S:
        what = f"this machine's clock differs from the upstream's by {skew_s:.0f} s"
        yield Finding(WARNING, "clock", what, "synchronise the clock with NTP")
    if await _is_compaction_proxy(transport, base_url):
        what = "the upstream is a compaction-proxy, perhaps this one"
        yield Finding(WARNING, "upstream", what, f"set {provider.url_key} to the base URL of the provider")


def _check_model_list(provider: _Provider, listed: ModelList) -> Finding:
    """Checks the response of a provider to the request for its models."""
    base_url, status = provider.base_url, listed.response.status_code
    if status in _UNAUTHORIZED and provider.api_key:
        what = f"{base_url}: rejects {provider.api_key_key} ({status})"
        return Finding(ERROR, "upstream", what, f"set a valid key in {provider.api_key_key}")
    if status in _UNAUTHORIZED:
        return Finding(OK, "upstream", f"{base_url}: reachable; clients must send their own keys")
    if listed.names:
        took_ms = listed.response.elapsed.total_seconds() * 1000
        return Finding(
            OK, "upstream", f"{base_url}: {format_quantity(len(listed.names), 'model')} in {took_ms:.0f} ms"
        )
    if status >= 500:
        return Finding(
            ERROR, "upstream", f"{base_url}: responds with {status}", "check the status page of the provider"
        )
    what = f"{base_url}: responds with {status}, without a list of models"
    fix = f"check that {provider.url_key} is the base URL that clients use, usually ending in /v1"
    return Finding(WARNING, "upstream", what, fix)


async def _is_compaction_proxy(transport: EngineTransport, base_url: str) -> bool:
    parts = urlsplit(base_url)
    with suppress(ProxyError, ValueError, LookupError, TypeError):
        _, body = await fetch_page(transport, f"{parts.scheme}://{parts.netloc}/readyz", {})
        fields = json.loads(body)
        return isinstance(fields, dict) and {"ready", "store", "version"} <= set(fields)
    return False


async def _check_local_windows(
    config: Config, transport: EngineTransport, fetch_list: _FetchList
) -> AsyncIterator[Finding]:
    """Asks a local upstream for the context windows of its models, at most `MAX_LOCAL_MODELS` of them.

    Yields nothing for a model whose context window is configured, and nothing if the upstream is not on a
    local network.
    """
    base_url, key = config.upstream.base_url, config.upstream.api_key.get_secret_value()
    listed = None
    if build_local_urls(base_url):
        with suppress(ProxyError):  # `_check_provider` has reported it
            listed = await fetch_list(base_url, key, "chat")
    discovery, headers = HttpWindowDiscovery(transport), {"authorization": f"Bearer {key}"} if key else {}
    names = [
        name
        for name in sorted(listed.names if listed else ())[:MAX_LOCAL_MODELS]
        if get_model_settings(config, name).window is None
    ]
    windows = await asyncio.gather(*(discovery.discover_window(base_url, headers, name) for name in names))
    for name, window in zip(names, windows, strict=True):
        if window is not None:
            yield Finding(OK, "window", f"{name}: {window:,} tokens, reported by the upstream")
        else:
            supposed = find_shipped_window(name) or FALLBACK_WINDOW
            what = f"{name}: the upstream reports no window, so {supposed:,} tokens are assumed"
            fix = f"set models.{name}.window if this is wrong; some servers report it only for loaded models"
            yield Finding(NOTE, "window", what, fix)


async def _check_summary_model(
    config: Config, model: ConfiguredSummaryModel, fetch_list: _FetchList
) -> Finding:
    """Checks whether the provider has a summary model and accepts its key."""
    if model.model in {"none", "same"}:
        what = "the model of each request"
        if model.model == "none":
            what = "none: the proxy writes extracts without a model"
        return Finding(OK, "summary model", what)
    try:
        listed = await fetch_list(model.base_url, model.api_key, model.wire)
    except ProxyError as error:
        what = f"{model.model}: {model.base_url} cannot be reached: {error}"
        return Finding(ERROR, "summary model", what, f"correct {model.url_key}, or start the server")
    if listed.response.status_code == httpx.codes.UNAUTHORIZED and model.api_key:
        what = f"{model.model}: {model.base_url} rejects {model.api_key_key} (401)"
        return Finding(ERROR, "summary model", what, f"set a valid key in {model.api_key_key}")
    return _check_window(config, model, listed)


def _check_window(config: Config, model: ConfiguredSummaryModel, listed: ModelList) -> Finding:
    """Checks whether the provider lists a summary model, and whether its context window is large enough.

    A context window is large enough if it has at least `SMALL_WINDOW_TOKENS` tokens.
    """
    name = model.model
    if listed.lacks_model(name):
        what = f"{name}: {model.base_url} lists {len(listed.names):,} models, but not this one"
        return Finding(WARNING, "summary model", what, f"set {model.model_key} to one of these models")
    known_window = get_model_settings(config, name).window or find_shipped_window(name)
    window, note = (known_window, "") if known_window else (FALLBACK_WINDOW, ", assumed")
    if window < SMALL_WINDOW_TOKENS:
        what = f"{name}: a window of {window:,} tokens, so long conversations need many summary calls"
        return Finding(
            WARNING, "summary model", what, f"set {model.model_key} to a model with a larger window"
        )
    return Finding(OK, "summary model", f"{name}: {window:,} tokens{note}")


async def _probe_summary_model(transport: EngineTransport, model: ConfiguredSummaryModel) -> Finding:
    """Asks the summary model for one word, and checks whether the model replies.

    Does not ask if no key is configured. In this case, summary calls use the keys of clients.
    """
    if not model.api_key:
        return Finding(NOTE, "summary probe", f"{model.model}: not called, because clients send the key")
    wire = WIRES[model.wire]
    call = SummaryCall(
        url=model.base_url.rstrip("/") + wire.summary_call_format.path,
        headers={**wire.summary_call_format.headers, **build_key_header(wire, model.api_key)},
        model=model.model,
        system="Answer with one word.",
        prompt="Say ok.",
        max_tokens=PROBE_TOKENS,
        temperature=None,
        wire=model.wire,
    )
    try:
        answer = await HttpSummaryModel(transport).request_summary(call)
    except SummaryError as error:
        is_of_key = error.reason in {"http-401", "http-402", "http-403"}
        wrong = model.api_key_key if is_of_key else model.model_key
        fix = f"correct {model.url_key if error.reason == 'unreachable' else wrong}"
        return Finding(ERROR, "summary probe", f"{model.model}: {describe_reason(error.reason)}", fix)
    spent = answer.prompt_tokens + answer.completion_tokens
    return Finding(OK, "summary probe", f"{model.model}: works ({spent:,} tokens used)")
