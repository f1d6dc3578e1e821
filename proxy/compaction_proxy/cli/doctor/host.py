"""Checks this machine: address, admin key, open files, memory, HTTP proxies, packages and tokenizer."""

import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec

from compaction_proxy.cli.admin_client import build_local_url, create_local_client, fetch_version
from compaction_proxy.cli.doctor.command import ERROR, NOTE, OK, WARNING, Finding
from compaction_proxy.cli.serve import MAX_DESCRIPTORS, open_listener
from compaction_proxy.config.config import Config
from compaction_proxy.config.sections import ServerSection
from compaction_proxy.config.types import mask_passwords, parse_origin
from compaction_proxy.config.validation import is_loopback
from compaction_proxy.core.errors import ConfigError
from compaction_proxy.gateway import server as serving
from compaction_proxy.gateway.client.proxies import read_environment_proxies
from compaction_proxy.providers.tokenizers import TiktokenCounter
from compaction_proxy.providers.tokenizers_fast import read_golden_texts
from compaction_proxy.recall.fulltext import FTS5_MISSING, is_fts5_available
from compaction_proxy.runtime import choose_body_budget

# If fewer open files are allowed, there is a warning. A request needs two, and by default 1,000 requests may
# be in progress.
MIN_DESCRIPTORS = 4_096
# A key counts as weak if it has fewer characters than this, or fewer different characters.
WEAK_KEY_CHARACTERS = 16
WEAK_KEY_KINDS = 6
STRONG_KEY = "openssl rand -hex 32"
# Maps each optional extra of the package to a module that it installs.
_EXTRAS = {"crypto": "cryptography", "fast": "toktok", "mcp": "mcp", "otel": "opentelemetry.sdk"}


def check_host(config: Config, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Runs all checks of this machine except those of the store."""
    yield check_address(config.server)
    yield from check_admin_key(config.server)
    yield check_open_files()
    yield check_body_memory(config.server)
    yield from check_environment_proxies(config, environ)
    yield from check_extras(config)
    yield check_tokenizer()
    yield check_search()


def check_address(server: ServerSection) -> Finding:
    """Checks whether the proxy can listen on the configured address, or already answers there."""
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
    """Checks whether the admin API is protected from other machines, and whether its key is strong."""
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
    """Checks how many files and connections a process may have open."""
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
    """Checks how many bytes of request bodies a process may hold, and whether the largest body fits in."""
    budget_bytes = choose_body_budget(server)
    what = f"{budget_bytes:,} bytes of request bodies at once in each process"
    if budget_bytes < server.max_body_bytes:
        what += f", less than server.max_body_bytes ({server.max_body_bytes:,}): larger bodies get 413"
        fix = "give it more memory, or lower server.max_body_bytes"
        return Finding(WARNING, "memory", what, fix)
    return Finding(OK, "memory", what)


def check_environment_proxies(config: Config, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Checks whether upstream requests go through an HTTP proxy, and whether `OPENAI_BASE_URL` is set.

    That variable is meant for clients. The finding says that the proxy never takes its upstream from it.
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
    """Checks whether the shipped tokenizer counts sample texts as it did when the package was built."""
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
    """Checks whether the archive can be searched, which needs SQLite's extension FTS5."""
    if is_fts5_available():
        return Finding(OK, "search", "SQLite's FTS5 is there")
    return Finding(
        WARNING, "search", FTS5_MISSING.rstrip("."), "take a Python whose SQLite has it, such as uv's"
    )
