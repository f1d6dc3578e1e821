"""Checks the configuration, this machine, the store and the upstream, and suggests fixes for problems."""

import asyncio
import json
import os
import secrets
import shutil
import stat
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx

from compaction_proxy.cli.admin_client import build_local_url, create_local_client, fetch_version
from compaction_proxy.cli.console import (
    BAD_CONFIG,
    FAILED,
    Column,
    format_table,
    print_json,
    print_lines,
    show_progress,
)
from compaction_proxy.cli.serve import MAX_DESCRIPTORS, open_listener
from compaction_proxy.compaction.request_view import resolve_policy
from compaction_proxy.config.config import Config, ModelSettings, get_model_settings
from compaction_proxy.config.loader import ConfigOverride, LoadedConfig, load_config
from compaction_proxy.config.sections import ServerSection
from compaction_proxy.config.types import mask_passwords, parse_origin
from compaction_proxy.config.validation import is_loopback
from compaction_proxy.core.errors import ConfigError, ProxyError, StoreUnavailableError, SummaryError
from compaction_proxy.core.summary.call import SummaryCall
from compaction_proxy.gateway import server as serving
from compaction_proxy.gateway.client.connection_pool import NativeEngine
from compaction_proxy.gateway.client.httpx_transport import EngineTransport
from compaction_proxy.gateway.client.proxies import read_environment_proxies
from compaction_proxy.gateway.summary_routes import CHEAP_MODELS
from compaction_proxy.providers.summary_transport import HttpSummaryModel
from compaction_proxy.providers.tokenizers import TiktokenCounter
from compaction_proxy.providers.tokenizers_fast import read_golden_texts
from compaction_proxy.providers.windows import FALLBACK_WINDOW, find_shipped_window
from compaction_proxy.recall.fulltext import FTS5_MISSING, is_fts5_available
from compaction_proxy.runtime import TenantSecret, choose_body_budget, open_configured_store
from compaction_proxy.storage.factory import get_secret_path, get_store_path, is_shared_store
from compaction_proxy.storage.store import Record, Store

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
_EXTRAS = {"crypto": "cryptography", "fast": "toktok", "mcp": "mcp", "otel": "opentelemetry.sdk"}
STORE_DEADLINE_S = 5.0
# `doctor` warns if a write and a read of the store together take more seconds than this. A request waits at
# most 0.25 s for the store and then continues without the store.
SLOW_S = 0.1
# `doctor` warns if fewer bytes than `LOW_SPACE_BYTES` are free on the disk, and reports an error below
# `NO_SPACE_BYTES`. A store file takes up to 1 GiB, and its write-ahead log takes as much again.
LOW_SPACE_BYTES = 2 * 1024**3
NO_SPACE_BYTES = 64 * 1024**2
PROBE_TTL_S = 10.0
# Maps the reason of a store failure to a fix. For other reasons, `_check_round_trip` suggests a general fix.
_FIXES = {"store-corrupt": "move the file away, or restore it; another is made, and conversations go on"}
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
UPSTREAM_DEADLINE_S = 10.0
# `doctor` warns if the clocks of this machine and of the upstream differ by more seconds than this. With a
# wrong clock, the proxy may misjudge whether certificates are valid and whether stored data has expired.
MAX_CLOCK_SKEW_S = 60.0
SMALL_WINDOW_TOKENS = 16_384
PROBE_TOKENS = 16
# `doctor` stops reading a response body after this many bytes. The number is high because a list of models
# may be long.
MAX_BODY_BYTES = 4 * 1_048_576
_UNAUTHORIZED = (401, 403)


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


def run_doctor(config: Path | None, upstream: str | None, *, probe: bool, as_json: bool) -> int:
    """Runs all checks, prints their findings and returns the exit code of the command `doctor`."""
    overrides = [] if upstream is None else [ConfigOverride("--upstream", ("upstream", "base_url"), upstream)]
    try:
        loaded = load_config(config, os.environ, overrides)
    except ConfigError as error:
        fix = "correct it; `compaction-proxy config schema` and docs/configuration.md describe every key"
        findings = [Finding(ERROR, "configuration", line, fix) for line in str(error).splitlines()]
        code = BAD_CONFIG
    else:
        with show_progress("checking the configuration, this machine, the store and the upstream"):
            findings = asyncio.run(_collect_findings(loaded, probe=probe))
        code = FAILED if any(each.level == ERROR for each in findings) else 0
    if as_json:
        print_json({"findings": [each._asdict() for each in findings]})
    else:
        print_lines(format_findings(findings))
    return code


async def _collect_findings(loaded: LoadedConfig, *, probe: bool) -> list[Finding]:
    """Returns the findings of all checks: of the configuration, this machine, the store and the upstream."""
    return [
        Finding(OK, "configuration", str(loaded.path or "built-in defaults and the environment")),
        *(
            Finding(WARNING, "configuration", line, "change it, or leave it where it is meant")
            for line in loaded.warnings
        ),
        *check_host(loaded.config, os.environ),
        *[each async for each in check_store(loaded.config)],
        *[each async for each in check_upstream(loaded.config, probe=probe)],
    ]


def format_findings(findings: Iterable[Finding]) -> list[str]:
    """Formats a table with a line for each finding.

    Does not cut lines to the width of the terminal, because the fix is at the end of the line.
    """
    columns = (Column("result"), Column("topic"), Column("finding"))
    rows = [
        (each.level, each.topic, f"{each.what}; fix: {each.fix}" if each.fix else each.what)
        for each in findings
    ]
    return format_table(columns, rows, None)


def check_host(config: Config, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Runs all checks that need neither the store nor the upstream."""
    yield check_address(config.server)
    yield from check_admin_key(config.server)
    yield check_open_files()
    yield check_body_memory(config.server)
    yield from check_environment_proxies(config, environ)
    yield from check_extras(config)
    yield check_tokenizer()
    yield check_search()


def check_address(server: ServerSection) -> Finding:
    """Checks whether a proxy already runs at the configured address, or else whether the address is free."""
    where = f"unix:{server.unix_socket}" if server.unix_socket else f"{server.host}:{server.port}"
    version = fetch_version(create_local_client(server))
    if version is not None:
        return Finding(OK, "address", f"{where}: version {version} of this proxy answers")
    try:
        bound = open_listener(server)
    except ConfigError as error:
        return Finding(ERROR, "address", str(error), "end what listens there, or choose another server.port")
    with serving.remove_socket_on_exit(bound):
        bound.close()
    return Finding(OK, "address", f"{where}: free, nothing is running there")


def check_admin_key(server: ServerSection) -> Iterator[Finding]:
    """Checks whether the admin API has a key, and whether the key is strong.

    Warns about a missing key if the proxy listens on a Unix socket or on an address that other machines can
    reach, because the proxy then closes the admin API.
    """
    key = server.admin_key.get_secret_value()
    open_to_others = server.unix_socket is not None or not is_loopback(server.host)
    if not key and open_to_others:
        what = "none, so that the admin API is closed at this address"
        yield Finding(WARNING, "admin key", what, f"set server.admin_key, such as from `{STRONG_KEY}`")
    elif not key:
        yield Finding(OK, "admin key", "none; the admin API answers this machine only")
    elif len(key) < WEAK_KEY_CHARACTERS or len(set(key)) < WEAK_KEY_KINDS:
        yield Finding(
            WARNING, "admin key", "easy to guess", f"take a longer one, such as from `{STRONG_KEY}`"
        )
    else:
        yield Finding(OK, "admin key", "set")


def check_open_files() -> Finding:
    """Checks how many files and connections the proxy may have open at the same time.

    Warns if the number is below `MIN_DESCRIPTORS`.
    """
    if sys.platform == "win32":
        return Finding(NOTE, "open files", "no limit that could be read here")
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if allowed < MIN_DESCRIPTORS:
        fix = "raise it: `ulimit -Hn`, LimitNOFILE of systemd, or ulimits of a container"
        return Finding(WARNING, "open files", f"{allowed:,} at most, two for each request", fix)
    return Finding(OK, "open files", f"{allowed:,} at most")


def check_body_memory(server: ServerSection) -> Finding:
    """Checks how many bytes of request bodies a process of the proxy may hold in memory at the same time.

    Warns if the largest allowed request body has more bytes.
    """
    budget_bytes = choose_body_budget(server)
    what = f"{budget_bytes:,} bytes of request bodies at once in each process"
    if budget_bytes < server.max_body_bytes:
        what += f", less than server.max_body_bytes ({server.max_body_bytes:,}): larger bodies get 413"
        fix = "give it more memory, or lower server.max_body_bytes"
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
        yield Finding(NOTE, "proxy", what, f"NO_PROXY={target.host}, if that is not meant")
    else:
        yield Finding(OK, "proxy", f"{target.host} is asked directly")
    client_url = environ.get("OPENAI_BASE_URL", "")
    if client_url and client_url.rstrip("/") != f"{build_local_url(config.server).rstrip('/')}/v1":
        what = "OPENAI_BASE_URL is set, and is for clients: the upstream is never taken from it"
        yield Finding(NOTE, "environment", what)


def check_extras(config: Config) -> Iterator[Finding]:
    """Checks which optional packages are installed, and whether the configuration needs a missing one."""
    needed = {
        "crypto": bool(config.store.encryption_keys),
        "otel": bool(config.observability.otlp_endpoint),
    }
    for name, module in _EXTRAS.items():
        is_present = _is_installed(module)
        if is_present or not needed.get(name):
            yield Finding(
                OK if is_present else NOTE,
                "extras",
                f"{name}: {'installed' if is_present else 'not installed'}",
            )
        else:
            fix = f"pip install 'compaction-proxy[{name}]'"
            yield Finding(ERROR, "extras", f"{name}: configured, and not installed", fix)


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
        what = (
            problems[0]
            if problems
            else f"{wrong} of {len(texts)} texts are counted otherwise than they should be"
        )
        return Finding(ERROR, "tokenizer", what, "install the package again")
    return Finding(OK, "tokenizer", f"{len(texts)} texts are counted as they should be")


def check_search() -> Finding:
    """Checks whether SQLite has the extension FTS5, which the search in the archive needs."""
    if is_fts5_available():
        return Finding(OK, "search", "SQLite's FTS5 is there")
    return Finding(
        WARNING, "search", FTS5_MISSING.rstrip("."), "take a Python whose SQLite has it, such as uv's"
    )


async def check_store(config: Config) -> AsyncIterator[Finding]:
    """Runs all checks of the store.

    If the store is a file that does not exist yet, checks only the disk and the folder for the file. Does not
    create the file.
    """
    url = config.store.url or "memory://"
    path = get_store_path(url)
    if path is not None:
        for each in check_disk(path):
            yield each
    if path is not None and not path.exists():
        return
    try:
        store = open_configured_store(config, url)
    except ConfigError as error:
        yield Finding(ERROR, "store", str(error), "correct store.url and store.encryption_keys")
        return
    try:
        yield await _check_round_trip(store, mask_passwords(url))
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
        yield Finding(ERROR, "disk", room, "make room, or name another place in store.url")
    elif free < LOW_SPACE_BYTES:
        yield Finding(WARNING, "disk", room, "make room: the store takes up to 2 GiB with its log")
    else:
        yield Finding(OK, "disk", room)
    if not path.exists():
        if os.access(folder, os.W_OK | os.X_OK):
            yield Finding(OK, "store", f"{path}: not there yet; made by the first start")
        else:
            yield Finding(ERROR, "store", f"{folder} cannot be written to", "let this user write there")
        return
    for each in (path, get_secret_path(f"sqlite:///{path.absolute()}")):
        if each is None or not each.exists():
            continue
        status = each.stat()
        if status.st_mode & _OTHERS:
            yield Finding(WARNING, "store", f"{each}: others may read it", f"chmod 600 '{each}'")
        else:
            yield Finding(OK, "store", f"{each}: {status.st_size / 1024**2:.1f} MiB, for its owner only")


async def _check_round_trip(store: Store, display_url: str) -> Finding:
    """Checks whether a value can be written to the store and read back, and how long that takes."""
    key, value = f"v1:doctor:{{{secrets.token_hex(8)}}}", secrets.token_bytes(16)
    started_at = time.monotonic()
    try:
        async with asyncio.timeout(STORE_DEADLINE_S):
            await store.write([Record(key, value, PROBE_TTL_S)])
            is_same = await store.read([key]) == [value]
    except TimeoutError:
        return Finding(
            ERROR,
            "store",
            f"{display_url}: no answer in {STORE_DEADLINE_S:g} s",
            "look at the store's machine",
        )
    except (StoreUnavailableError, OSError) as error:
        reason = error.reason if isinstance(error, StoreUnavailableError) else type(error).__name__
        cause = error.__cause__
        what = f"{display_url}: {reason}{f' ({cause})' if cause else ''}"
        return Finding(ERROR, "store", what, _FIXES.get(reason, "correct store.url, or start the store"))
    took_s = time.monotonic() - started_at
    if not is_same:
        return Finding(
            ERROR, "store", f"{display_url}: does not give back what was written", "look at its settings"
        )
    if took_s > SLOW_S:
        return Finding(
            WARNING, "store", f"{display_url}: slow, {took_s:.2f} s", "bring it nearer to the proxy"
        )
    return Finding(OK, "store", f"{display_url}: written and read back in {took_s * 1000:.0f} ms")


async def _check_secret(config: Config, url: str, store: Store) -> Finding:
    """Checks whether the proxy gets its secret: from the configuration, from a shared store or from a file.

    Ids of tenants are derived from the secret. Proxies that share a store must have the same secret, because
    otherwise they do not find each other's stored data.
    """
    if config.server.secret.get_secret_value():
        what = "configured" + ("; all replicas must have the same" if is_shared_store(url) else "")
        return Finding(OK, "secret", what)
    failures: list[StoreUnavailableError] = []
    has_agreed = await TenantSecret(config, url, store, failures.append).sync_with_store()
    if failures or not has_agreed:
        reason = failures[0].reason if failures else "the store does not give it"
        return Finding(ERROR, "secret", reason, "set server.secret, or mend what keeps it")
    if is_shared_store(url):
        return Finding(OK, "secret", "in the store, the same for all replicas")
    return Finding(OK if get_store_path(url) else NOTE, "secret", "of this installation")


async def check_upstream(config: Config, *, probe: bool) -> AsyncIterator[Finding]:
    """Checks the upstream and the providers of the summary models.

    Args:
        config: The configuration.
        probe: Whether to ask each summary model for one word. The provider may charge a little for this call.
    """
    transport = EngineTransport(NativeEngine(proxies=read_environment_proxies()))
    try:
        key = config.upstream.api_key.get_secret_value()
        names: frozenset[str] = frozenset()
        try:
            answer, names = await _fetch_models(transport, config.upstream.base_url, key)
        except ProxyError as error:
            what = f"{config.upstream.base_url}: {error}"
            yield Finding(ERROR, "upstream", what, "correct upstream.base_url, or start what is there")
        else:
            for each in _check_model_list(config, key, answer, names):
                yield each
            if await _is_compaction_proxy(transport, config.upstream.base_url):
                what = "a compaction-proxy answers there, perhaps this very one"
                yield Finding(WARNING, "upstream", what, "name the provider itself in upstream.base_url")
        async for each in _check_summary_models(config, transport, names, probe=probe):
            yield each
    finally:
        await transport.aclose()


async def _send_probe(
    transport: EngineTransport, url: str, headers: Mapping[str, str]
) -> tuple[httpx.Response, bytes]:
    """Sends a GET request. Returns the response and its body. Stops reading beyond `MAX_BODY_BYTES` bytes.

    Does not follow redirects, so that a key in `headers` is never sent to another server.

    Raises:
        ProxyError: If the provider does not respond within `UPSTREAM_DEADLINE_S` seconds, or if the request
            fails. The message names the cause.
    """
    fields = {"accept": "application/json", "accept-encoding": "identity", **headers}
    # The client is not closed here, because closing it would also close the transport, which belongs to the
    # caller.
    client = httpx.AsyncClient(transport=transport, timeout=None)  # noqa: S113 - asyncio.timeout sets the deadline
    body = bytearray()
    try:
        async with (
            asyncio.timeout(UPSTREAM_DEADLINE_S),
            client.stream("GET", url, headers=fields) as response,
        ):
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    break
        return response, bytes(body)
    except TimeoutError:
        raise ProxyError(f"no answer in {UPSTREAM_DEADLINE_S:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeEncodeError) as error:
        name = type(error).__name__
        raise ProxyError(f"{name}: {str(error) or name}") from None


async def _fetch_models(
    transport: EngineTransport, base_url: str, key: str
) -> tuple[httpx.Response, frozenset[str]]:
    """Returns the response to `GET /models`, and the ids of the models in it.

    The set of ids is empty if the response is not a list of models. `key` is the provider's key; empty sends
    no key.

    Raises:
        ProxyError: If the provider does not respond in time, or if the request fails.
    """
    headers = {"authorization": f"Bearer {key}"} if key else {}
    answer, body = await _send_probe(transport, f"{base_url.rstrip('/')}/models", headers)
    try:
        rows = json.loads(body)["data"]
        return answer, frozenset(each["id"] for each in rows if isinstance(each["id"], str))
    except (ValueError, LookupError, TypeError, RecursionError):
        return answer, frozenset()


def _check_model_list(
    config: Config, key: str, answer: httpx.Response, names: frozenset[str]
) -> Iterator[Finding]:
    """Checks the upstream, its key and its clock, given its response to `GET /models`.

    Args:
        config: The configuration.
        key: The configured key for the upstream; empty if none is configured.
        answer: The response.
        names: Ids of the models in the response; empty if the response is not a list of models.
    """
    base_url, status = config.upstream.base_url, answer.status_code
    if status in _UNAUTHORIZED and key:
        yield Finding(
            ERROR, "upstream", f"{base_url}: refuses upstream.api_key ({status})", "set a valid key"
        )
    elif status in _UNAUTHORIZED:
        yield Finding(OK, "upstream", f"{base_url}: answers, and wants the key that each client brings")
    elif names:
        yield Finding(
            OK,
            "upstream",
            f"{base_url}: {len(names):,} models in {answer.elapsed.total_seconds() * 1000:.0f} ms",
        )
    elif status >= 500:
        yield Finding(ERROR, "upstream", f"{base_url}: answers {status}", "look at the provider's state")
    else:
        what = f"{base_url}: answers {status}, with no list of models"
        yield Finding(
            WARNING, "upstream", what, "make sure that upstream.base_url ends as clients know it, in /v1"
        )
    skew_s = 0.0
    with suppress(ValueError, TypeError, OverflowError):  # there may be no valid date
        skew_s = abs(parsedate_to_datetime(answer.headers.get("date", "")).timestamp() - time.time())
    if skew_s > MAX_CLOCK_SKEW_S:
        what = f"differs from the upstream's by {skew_s:.0f} s"
        yield Finding(WARNING, "clock", what, "keep it right with NTP")


async def _is_compaction_proxy(transport: EngineTransport, base_url: str) -> bool:
    parts = urlsplit(base_url)
    with suppress(ProxyError, ValueError, LookupError, TypeError):
        _, body = await _send_probe(transport, f"{parts.scheme}://{parts.netloc}/readyz", {})
        fields = json.loads(body)
        return isinstance(fields, dict) and {"ready", "store", "version"} <= set(fields)
    return False


async def _check_summary_models(
    config: Config, transport: EngineTransport, names: frozenset[str], *, probe: bool
) -> AsyncIterator[Finding]:
    """Checks each summary model once. `names` are the ids of the models that the upstream lists."""
    checked: set[tuple[str, str]] = set()
    for row in config.settings_by_glob:
        base_url = row.settings.summary.base_url or config.upstream.base_url
        model = _resolve_summary_model(row.settings, base_url)
        if (base_url, model) in checked:
            continue
        checked.add((base_url, model))
        if model in {"none", "same"}:
            what = "none: texts are made without a model" if model == "none" else "that of each request"
            yield Finding(OK, "summary model", what)
            continue
        known_names = names
        if row.settings.summary.base_url is not None:
            key = row.settings.summary.api_key.get_secret_value()
            try:
                _, known_names = await _fetch_models(transport, base_url, key)
            except ProxyError as error:
                what = f"{model} at {base_url}: {error}"
                yield Finding(ERROR, "summary model", what, "correct summary.base_url")
                continue
        yield _check_window(config, model, known_names)
        if probe:
            yield await _probe_summary_model(config, row.settings, transport, base_url, model)


def _resolve_summary_model(settings: ModelSettings, base_url: str) -> str:
    """Returns the name of the summary model for these settings, or `none` or `same`.

    `none` means that no model writes summaries. `same` means that the model of a request writes the summaries
    for this request.
    """
    shape = resolve_policy(settings).summary
    if settings.summary.model is not None or shape is None:
        return settings.summary.model or "none"
    if shape.model == "same" or shape.form == "aligned":
        return "same"
    return CHEAP_MODELS.get(urlsplit(base_url).hostname or "", "same")


def _check_window(config: Config, model: str, names: frozenset[str]) -> Finding:
    """Checks whether the provider lists a summary model, and whether its context window is large enough.

    `names` are the ids of the models that the provider lists. If `names` is empty, the list is unknown, and
    the first check is left out. A context window is large enough if it has at least `SMALL_WINDOW_TOKENS`
    tokens.
    """
    if names and model not in names:
        fix = "name one that the provider has in summary.model"
        return Finding(WARNING, "summary model", f"{model}: not in the provider's list", fix)
    known_window = get_model_settings(config, model).window or find_shipped_window(model)
    window, note = (known_window, "") if known_window else (FALLBACK_WINDOW, ", supposed")
    if window < SMALL_WINDOW_TOKENS:
        what = f"{model}: {window:,} tokens at once, so that a long conversation takes many calls"
        return Finding(WARNING, "summary model", what, "name one with a larger window in summary.model")
    return Finding(OK, "summary model", f"{model}: {window:,} tokens{note}")


async def _probe_summary_model(
    config: Config, settings: ModelSettings, transport: EngineTransport, base_url: str, model: str
) -> Finding:
    """Asks the summary model for one word, and checks whether the model replies.

    Does not ask if no key is configured. In this case, summary calls use the keys of clients.
    """
    key = settings.summary.api_key.get_secret_value() or config.upstream.api_key.get_secret_value()
    if not key:
        return Finding(NOTE, "summary probe", f"{model}: not asked, because clients bring the key")
    call = SummaryCall(
        url=f"{base_url.rstrip('/')}/chat/completions",
        headers={"authorization": f"Bearer {key}"},
        model=model,
        system="Answer with one word.",
        prompt="Say ok.",
        max_tokens=PROBE_TOKENS,
        temperature=None,
    )
    try:
        answer = await HttpSummaryModel(transport).request_summary(call)
    except SummaryError as error:
        return Finding(ERROR, "summary probe", f"{model}: {error.reason}", "try another summary.model or key")
    spent = answer.prompt_tokens + answer.completion_tokens
    return Finding(OK, "summary probe", f"{model}: answered, for {spent:,} tokens")
