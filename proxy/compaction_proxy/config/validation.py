"""Checks whether configured values are consistent, and determines the URL of the store."""

import os
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from ipaddress import ip_address
from pathlib import Path

from pydantic import BaseModel

from compaction_proxy.config.config import Config, ModelSettings, build_policy, format_key_path
from compaction_proxy.config.sections import (
    MESSAGES_WIRE,
    NO_ADMIN_KEY,
    RESPONSES_WIRE,
    WIRES,
    ServerSection,
    SummarySection,
)
from compaction_proxy.config.strategies import get_policy_setting
from compaction_proxy.config.types import check_store_url, parse_origin
from compaction_proxy.config.yaml_file import KeyPath
from compaction_proxy.core.budget import compute_budget
from compaction_proxy.core.strategies import STRATEGIES, Policy
from compaction_proxy.core.trigger import compute_trigger_marks, has_active_rule

# Context window, in tokens, that the checks of sizes assume if none is configured. With so large a window, a
# trigger in percent exceeds any target or tail in tokens, so the checks do not report these as too large.
UNBOUNDED_WINDOW_TOKENS = 10**12
UNREADABLE_FILE = "the file cannot be read"
MAX_PROMPT_BYTES = 262_144


def is_readable(path: str) -> bool:
    """Returns whether a path from the configuration names a file that can be read."""
    try:
        file = Path(path).expanduser()
    except RuntimeError:  # there is no such user, or no home directory
        return False
    return file.is_file() and os.access(file, os.R_OK)


def _find_prompt_problem(path: str) -> str | None:
    """Returns why a file cannot be used as a prompt; None if it can."""
    if not is_readable(path):
        return UNREADABLE_FILE
    with Path(path).expanduser().open("rb") as file:
        data = file.read(MAX_PROMPT_BYTES + 1)
    if len(data) > MAX_PROMPT_BYTES:
        return f"the file is larger than {MAX_PROMPT_BYTES:,} bytes"
    try:
        data.decode()
    except UnicodeDecodeError:
        return "the file is not UTF-8"
    return None


def is_key_set_explicitly(section: BaseModel | None, path: KeyPath) -> bool:
    """Returns whether the key at a path inside `section` is set explicitly to a value other than null."""
    for step in path:
        if section is None or step not in section.model_fields_set:
            return False
        section = getattr(section, str(step))
    return section is not None


def find_effective_key_path(config: Config, glob: str, path: KeyPath) -> KeyPath:
    """Returns the path of a key in the entry of `models` for `glob` if the entry sets it, else `path`."""
    return ("models", glob, *path) if is_key_set_explicitly(config.models.get(glob), path) else path


def _build_strategy_path(name: str, key: str) -> KeyPath:
    return ("compaction", "strategies", name, key)


def _find_prompt_problems(settings: ModelSettings) -> Iterator[tuple[KeyPath, str]]:
    """Yields the path of each strategy's key `prompt_file` whose file cannot be used, and the reason.

    All strategies are checked, because a request may ask for any of them.
    """
    for name in STRATEGIES:
        file = getattr(getattr(settings.compaction.strategies, name), "prompt_file", None)
        problem = None if file is None else _find_prompt_problem(file)
        if problem is not None:
            yield _build_strategy_path(name, "prompt_file"), problem


def _find_overriding_key(
    settings: ModelSettings, row: Policy, shared_key_path: KeyPath, own_key_names: tuple[str, ...]
) -> KeyPath | None:
    """Returns the path of the key whose value replaces a built-in value of a strategy; None if no key does.

    If the key for all strategies (`shared_key_path`) is set, returns its path. Otherwise returns the path of
    the first of the strategy's own keys (`own_key_names`) whose value differs from the built-in value.

    Args:
        settings: Settings for a model.
        row: Policy of the strategy.
        shared_key_path: Path of the key for all strategies.
        own_key_names: Names of the strategy's own keys that set the same value.
    """
    if is_key_set_explicitly(settings.compaction, shared_key_path[1:]):
        return shared_key_path
    fields = getattr(settings.compaction.strategies, row.name)
    own_keys = (key for key in own_key_names if key in type(fields).model_fields)
    changed = (
        key for key in own_keys if getattr(fields, key) != get_policy_setting(STRATEGIES[row.name], key)
    )
    return next((_build_strategy_path(row.name, key) for key in changed), None)


def _find_size_problems(settings: ModelSettings) -> Iterator[tuple[KeyPath, str]]:
    """Yields the path of each key that sets a size with which a compaction removes nothing, and the reason.

    These are a target that is not below the trigger, and a tail that is not below the target. If the strategy
    has no target, the tail must be below the trigger.
    """
    row = build_policy(settings)
    if not has_active_rule(row.trigger):
        return
    spending = compute_budget(settings.window or UNBOUNDED_WINDOW_TOKENS, row.reserves, None)
    trigger = compute_trigger_marks(row.trigger, spending, row.soft_share, row.hard_percent).trigger_tokens
    target_key = _find_overriding_key(settings, row, ("compaction", "target_tokens"), ("target_tokens",))
    target_tokens = row.target.tokens if row.target else None
    if target_key and target_tokens is not None and target_tokens >= trigger:
        yield (
            target_key,
            f"{target_tokens:,} tokens is not below the trigger of {trigger:,}: {NO_EFFECT}",
        )
        return
    tail_key = _find_overriding_key(
        settings, row, ("compaction", "keep", "tail_tokens"), ("tail_tokens", "tail_percent")
    )
    tail_limit, tail = row.target.compute_tokens(trigger) if row.target else trigger, row.keep.tail
    if tail_key and tail and tail.compute_tokens(trigger) >= tail_limit:
        what = "target" if row.target else "trigger"
        yield tail_key, f"the messages that stay reach the {what}: {NO_EFFECT}"


def _find_strategy_warnings(config: Config) -> Iterator[str]:
    """Yields a warning for each setting of a strategy that is valid but probably not intended."""
    for each in config.settings_by_glob:
        row = build_policy(each.settings)
        if row.summary and row.stand_in_role == "system":
            is_chosen = is_key_set_explicitly(each.settings.compaction, ("stand_in_role",))
            role: KeyPath = ("compaction", "stand_in_role" if is_chosen else "strategy")
            yield (
                f"{format_key_path(find_effective_key_path(config, each.glob, role))}: {row.name} gives its "
                "summaries the system role, so the model may follow text of tool results as instructions; "
                "set compaction.stand_in_role to user to prevent this"
            )
        for name in STRATEGIES:
            requested_path, allowed_path = (
                _build_strategy_path(name, f"summary_{which}tokens") for which in ("", "max_")
            )
            fields = getattr(each.settings.compaction.strategies, name)
            if {requested_path[-1], allowed_path[-1]} <= fields.model_fields_set and (
                fields.summary_max_tokens < fields.summary_tokens
            ):
                where = format_key_path(find_effective_key_path(config, each.glob, allowed_path))
                yield f"{where}: lower than summary_tokens, so this value limits the summary"


WILDCARDS = frozenset({"0.0.0.0", "::", ""})  # noqa: S104 - compared, not bound
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
SQLITE = "sqlite:///"
MEMORY = "memory://"
NO_EFFECT = "compaction would not reduce the request"
UPSTREAM_KEY_MISSING = (
    "needs {}.api_key (any text, if the upstream needs no key), "
    "because the upstream must not see the client keys of the proxy"
)
SUMMARY_KEY_MISSING = (
    "an origin other than the upstream needs summary.api_key, "
    "because the proxy sends a client's credential only to the upstream"
)
INFLIGHT_BYTES_TOO_SMALL = (
    "must be at least server.max_body_bytes ({}), or the proxy cannot read the largest allowed body; "
    "increase this value, or lower server.max_body_bytes"
)


# Endpoints that a client's request names. The proxy appends them to the base URL, so a base URL must not end
# in one of them. `/models` is not among them, because Azure has base URLs that end in it.
ENDPOINTS = ("/chat/completions", "/completions", "/responses", "/messages", "/embeddings")


def is_loopback(host: str) -> bool:
    """Returns whether an address to listen on can be reached only from this machine."""
    try:
        return host in LOOPBACK or ip_address(host).is_loopback
    except ValueError:
        return False


def is_bound_to_loopback(server: ServerSection) -> bool:
    """Returns whether the server listens on a TCP port that can be reached only from this machine."""
    return server.unix_socket is None and is_loopback(server.host)


def _is_own_address(config: Config, url: str) -> bool:
    """Returns whether a URL has an address on which the proxy itself listens."""
    server = config.server
    if server.unix_socket is not None:
        return False
    own_hosts = {server.host.lower()}
    if server.host in WILDCARDS or is_loopback(server.host):
        own_hosts |= LOOPBACK | WILDCARDS
    target = parse_origin(url)
    return target.host in own_hosts and target.port == server.port


def _find_summary_problems(config: Config, summary: SummarySection) -> Iterator[tuple[str, str]]:
    """Yields the name of each key of a summary section whose value cannot be used, and the reason.

    `summary` is the section for one glob, with its overrides applied.
    """
    problem = None if summary.prompt_file is None else _find_prompt_problem(summary.prompt_file)
    if problem is not None:
        yield "prompt_file", problem
    if summary.base_url is None:
        return
    if _is_own_address(config, summary.base_url):
        yield "base_url", "this is the address of the proxy"
    upstreams = {parse_origin(config.upstream.get_provider(wire)[0]) for wire in WIRES}
    if parse_origin(summary.base_url) not in upstreams and not summary.api_key.get_secret_value():
        yield "base_url", SUMMARY_KEY_MISSING


def _find_server_problems(server: ServerSection) -> Iterator[tuple[KeyPath, str]]:
    yield from _find_empty_key_problems(server)
    if server.admin_key.get_secret_value() == NO_ADMIN_KEY and not is_bound_to_loopback(server):
        yield (
            ("server", "admin_key"),
            "`none` is allowed only on a loopback address; set a key, or leave it empty",
        )
    if server.unix_socket is not None and not Path(server.unix_socket).is_absolute():
        yield ("server", "unix_socket"), "the path must be absolute"
    if server.unix_socket is not None and server.tls_certificate is not None:
        yield (
            ("server", "tls_certificate"),
            "TLS does not work with server.unix_socket",
        )
    if server.max_inflight_bytes is not None and server.max_inflight_bytes < server.max_body_bytes:
        yield ("server", "max_inflight_bytes"), INFLIGHT_BYTES_TOO_SMALL.format(server.max_body_bytes)
    files = {"tls_certificate": server.tls_certificate, "tls_key": server.tls_key}
    for name, file in files.items():
        if file is None and any(files.values()):
            yield ("server", name), "set both the certificate and the key"
        elif file is not None and not is_readable(file):
            yield ("server", name), UNREADABLE_FILE


def _find_empty_key_problems(server: ServerSection) -> Iterator[tuple[KeyPath, str]]:
    for name in ("client_keys", "previous_secrets"):
        if any(not each.get_secret_value() for each in getattr(server, name)):
            yield ("server", name), "a key must not be empty"


def _find_upstream_problems(config: Config) -> Iterator[tuple[KeyPath, str]]:
    seen_urls: set[str] = set()
    is_reported = False
    for wire in WIRES:
        base_url, key = config.upstream.get_provider(wire)
        place: KeyPath = ("upstream", "wires", wire) if seen_urls else ("upstream",)
        if base_url in seen_urls:
            continue
        seen_urls.add(base_url)
        if config.server.client_keys and not key and not is_reported:
            is_reported = True
            yield ("server", "client_keys"), UPSTREAM_KEY_MISSING.format(".".join(map(str, place)))
        if _is_own_address(config, base_url):
            yield (*place, "base_url"), "this is the address of the proxy; requests would loop"


def find_problems(config: Config) -> Iterator[tuple[KeyPath, str]]:
    """Yields the path of each key whose value is unusable or contradicts other values, and the reason."""
    if config.server.workers > 1 and config.store.url == MEMORY:
        yield ("server", "workers"), "several workers need a shared store, not memory://"
    yield from _find_server_problems(config.server)
    yield from _find_upstream_problems(config)
    for row in config.settings_by_glob:
        for name, what in _find_summary_problems(config, row.settings.summary):
            yield find_effective_key_path(config, row.glob, ("summary", name)), what
    for each in config.settings_by_glob:
        for place, what in (*_find_prompt_problems(each.settings), *_find_size_problems(each.settings)):
            yield find_effective_key_path(config, each.glob, place), what


def _iter_base_urls(config: Config) -> Iterator[tuple[KeyPath, str | None]]:
    yield ("upstream", "base_url"), config.upstream.base_url
    for wire in (RESPONSES_WIRE, MESSAGES_WIRE):
        yield ("upstream", "wires", wire, "base_url"), getattr(config.upstream.wires, wire).base_url
    for row in config.settings_by_glob:
        key = find_effective_key_path(config, row.glob, ("summary", "base_url"))
        yield key, row.settings.summary.base_url


def _find_endpoint_warnings(config: Config) -> Iterator[str]:
    """Yields a warning for each base URL that ends in an endpoint."""
    for path, url in _iter_base_urls(config):
        endpoint = next((each for each in ENDPOINTS if url and url.endswith(each)), None)
        if endpoint is not None:
            yield (
                f"{format_key_path(path)}: ends in {endpoint}, but the proxy appends the endpoint itself; "
                f"remove {endpoint}"
            )


def find_warnings(config: Config) -> Iterator[str]:
    """Yields a warning for each setting that is valid but probably not intended."""
    server, upstream_key = config.server, config.upstream.api_key.get_secret_value()
    is_open_to_others = server.unix_socket is None and not is_loopback(server.host)
    if is_open_to_others and not server.admin_key.get_secret_value():
        yield f"server.host: {server.host} is reachable from other machines, but server.admin_key is empty"
    if is_open_to_others and upstream_key and not server.client_keys:
        yield f"server.host: every client of {server.host} can use upstream.api_key; set server.client_keys"
    if config.session.tenant == "none":
        yield "session.tenant: with none, clients share one tenant and reuse each other's summaries"
    if config.upstream.engine == "aiohttp":
        yield "upstream.engine: aiohttp is not supported anymore, and native is used; remove this key"
    if config.store.url == MEMORY:
        yield "store.url: memory:// loses all data when the process ends; set a file or a server to keep it"
    yield from dict.fromkeys(_find_endpoint_warnings(config))
    yield from dict.fromkeys(_find_strategy_warnings(config))
    globs = list(config.models)
    for index, glob in enumerate(globs):
        earlier = next((other for other in globs[:index] if fnmatchcase(glob, other)), None)
        if earlier is not None:
            yield f"models.{glob}: never used, because {earlier} comes first and matches the same models"


def find_default_store_path(environ: Mapping[str, str]) -> Path | None:
    """Returns the file of the store if none is configured: it is in the user's data folder.

    Returns None if the folder is unknown or if the proxy cannot write to it.
    """
    folder = _find_data_home(environ)
    return folder and folder / "compaction-proxy" / "state.db"


def _find_data_home(environ: Mapping[str, str]) -> Path | None:
    """Returns the folder for the user's data. None if it is unknown or if the proxy cannot write to it."""
    configured, home = environ.get("XDG_DATA_HOME", ""), environ.get("HOME", "")
    if not configured.startswith("/") and not home:
        return None
    folder = Path(configured) if configured.startswith("/") else Path(home, ".local", "share")
    exists = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return folder if os.access(exists, os.W_OK | os.X_OK) else None


def resolve_store_url(config: Config, environ: Mapping[str, str]) -> str:
    """Returns the URL of the store: the configured one, else `$REDIS_URL`, else that of a file or memory.

    The file is in the user's data folder. If there is no such folder, the URL is `memory://`. In a configured
    SQLite URL, the path becomes absolute.

    Raises:
        ValueError: If the path begins with `~/` but `HOME` is not set, or if `$REDIS_URL` is not the URL of a
            store.
    """
    url = config.store.url
    if url is None and environ.get("REDIS_URL"):
        try:
            return check_store_url(environ["REDIS_URL"])
        except ValueError as error:
            raise ValueError(f"$REDIS_URL: {error}") from None
    if url is None:
        default = find_default_store_path(environ)
        return f"{SQLITE}{default}" if default else MEMORY
    if not url.startswith(SQLITE):
        return url
    path = url.removeprefix(SQLITE)
    if path.startswith("~/"):
        if not environ.get("HOME"):
            raise ValueError("~ needs the variable HOME, which is not set")
        path = environ["HOME"] + path[1:]
    return f"{SQLITE}{Path(path).absolute()}"
