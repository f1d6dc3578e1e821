"""What single values cannot tell: whether they fit together, and where the store is on this machine."""

import os
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from ipaddress import ip_address
from pathlib import Path

from compaction_proxy.config import strategy_checks
from compaction_proxy.config.config import Config
from compaction_proxy.config.sections import ServerSection, SummarySection
from compaction_proxy.config.types import origin, store_place
from compaction_proxy.config.upstream import WIRES
from compaction_proxy.config.yaml_file import Place

WILDCARDS = frozenset({"0.0.0.0", "::", ""})  # noqa: S104 - recognised, not bound
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
SQLITE = "sqlite:///"
MEMORY = "memory://"
KEYS_OF_OURS = (
    "needs {}.api_key (any word, if the upstream wants none), "
    "because the upstream must not be shown the keys by which clients are known here"
)
SECOND_ORIGIN = (
    "another origin than the upstream needs its own summary.api_key, "
    "because a client's credential never goes to a second origin"
)
SMALLER_THAN_A_BODY = (
    "must be at least server.max_body_bytes, which is {}: "
    "a body of that size could never be read; raise this, or lower server.max_body_bytes"
)


def is_loopback(host: str) -> bool:
    """Whether an address to listen on is reachable from this machine only."""
    try:
        return host in LOOPBACK or ip_address(host).is_loopback
    except ValueError:
        return False


def _is_open(server: ServerSection) -> bool:
    """Whether other machines may reach us."""
    return server.unix_socket is None and not is_loopback(server.host)


def _is_ours(config: Config, url: str) -> bool:
    """Whether a URL leads back to the address that we listen on."""
    server = config.server
    if server.unix_socket is not None:
        return False
    ours = {server.host.lower()}
    if server.host in WILDCARDS or is_loopback(server.host):
        ours |= LOOPBACK | WILDCARDS
    target = origin(url)
    return target.host in ours and target.port == server.port


def _summary_problems(config: Config, summary: SummarySection) -> Iterator[tuple[str, str]]:
    """Each key of one effective summary section that does not fit, and why."""
    if summary.prompt_file is not None and not strategy_checks.readable(summary.prompt_file):
        yield "prompt_file", strategy_checks.UNREADABLE
    if summary.base_url is None:
        return
    if _is_ours(config, summary.base_url):
        yield "base_url", "this is our own address"
    upstreams = {origin(config.upstream.provider(wire)[0]) for wire in WIRES}
    if origin(summary.base_url) not in upstreams and not summary.api_key.get_secret_value():
        yield "base_url", SECOND_ORIGIN


def _server_problems(server: ServerSection) -> Iterator[tuple[Place, str]]:
    yield from _empty_key_problems(server)
    if server.unix_socket is not None and not Path(server.unix_socket).is_absolute():
        yield ("server", "unix_socket"), "the path must be absolute"
    if server.unix_socket is not None and server.tls_certificate is not None:
        yield (
            ("server", "tls_certificate"),
            "TLS is for host and port, and server.unix_socket takes their place",
        )
    if server.max_inflight_bytes is not None and server.max_inflight_bytes < server.max_body_bytes:
        yield ("server", "max_inflight_bytes"), SMALLER_THAN_A_BODY.format(server.max_body_bytes)
    files = {"tls_certificate": server.tls_certificate, "tls_key": server.tls_key}
    for name, file in files.items():
        if file is None and any(files.values()):
            yield ("server", name), "certificate and key are needed together"
        elif file is not None and not strategy_checks.readable(file):
            yield ("server", name), strategy_checks.UNREADABLE


def _empty_key_problems(server: ServerSection) -> Iterator[tuple[Place, str]]:
    for name in ("client_keys", "previous_secrets"):
        if any(not each.get_secret_value() for each in getattr(server, name)):
            yield ("server", name), "a key is empty"


def _upstream_problems(config: Config) -> Iterator[tuple[Place, str]]:
    seen: set[str] = set()
    told = False
    for wire in WIRES:
        base_url, key = config.upstream.provider(wire)
        place: Place = ("upstream", "wires", wire) if seen else ("upstream",)
        if base_url in seen:
            continue
        seen.add(base_url)
        if config.server.client_keys and not key and not told:
            told = True
            yield ("server", "client_keys"), KEYS_OF_OURS.format(".".join(map(str, place)))
        if _is_ours(config, base_url):
            yield (*place, "base_url"), "this is our own address: requests would go round in circles"


def problems(config: Config) -> Iterator[tuple[Place, str]]:
    """Each place whose value does not fit the others, and why."""
    if config.server.workers > 1 and config.store.url == MEMORY:
        yield ("server", "workers"), "several workers need a store that they can share, not memory://"
    server = config.server
    yield from _server_problems(server)
    yield from _upstream_problems(config)
    for row in config.by_glob:
        for name, what in _summary_problems(config, row.settings.summary):
            yield strategy_checks.place_in(config, row.glob, ("summary", name)), what
    yield from strategy_checks.problems(config)


def warnings(config: Config) -> Iterator[str]:
    """What works but is probably not meant; one line each."""
    server, held = config.server, config.upstream.api_key.get_secret_value()
    if _is_open(server) and not server.admin_key.get_secret_value():
        yield f"server.host: {server.host} is open to other machines, and server.admin_key is empty"
    if _is_open(server) and held and not server.client_keys:
        yield f"server.host: whoever reaches {server.host} spends upstream.api_key; name server.client_keys"
    if config.session.tenant == "none":
        yield "session.tenant: none lets all clients share their conversations' summaries"
    if config.store.url == MEMORY:
        yield "store.url: memory:// keeps nothing beyond the process; name a file or a server to keep more"
    yield from dict.fromkeys(strategy_checks.warnings(config))
    globs = list(config.models)
    for index, glob in enumerate(globs):
        earlier = next((other for other in globs[:index] if fnmatchcase(glob, other)), None)
        if earlier is not None:
            yield f"models.{glob}: never used, because {earlier} stands before it and matches too"


def _data_home(environ: Mapping[str, str]) -> Path | None:
    """The user's data folder; None if there is none that we may write to."""
    named, home = environ.get("XDG_DATA_HOME", ""), environ.get("HOME", "")
    if not named.startswith("/") and not home:
        return None
    folder = Path(named) if named.startswith("/") else Path(home, ".local", "share")
    exists = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return folder if os.access(exists, os.W_OK | os.X_OK) else None


def _redis_url(url: str) -> str:
    try:
        return store_place(url)
    except ValueError as error:
        raise ValueError(f"$REDIS_URL: {error}") from None


def store_url(config: Config, environ: Mapping[str, str]) -> str:
    """Where the store is: as configured, else `$REDIS_URL`, else a file; paths are absolute (four slashes).

    Raises:
        ValueError: The place depends on a home folder that is not there, or `$REDIS_URL` is none.
    """
    url = config.store.url
    if url is None and environ.get("REDIS_URL"):
        return _redis_url(environ["REDIS_URL"])
    if url is None:
        folder = _data_home(environ)
        return f"{SQLITE}{folder / 'compaction-proxy' / 'state.db'}" if folder else MEMORY
    if not url.startswith(SQLITE):
        return url
    path = url.removeprefix(SQLITE)
    if path.startswith("~/"):
        if not environ.get("HOME"):
            raise ValueError("~ needs HOME, which is not set")
        path = environ["HOME"] + path[1:]
    return f"{SQLITE}{Path(path).absolute()}"
