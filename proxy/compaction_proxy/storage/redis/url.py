"""Parses the URL of a Redis store, which names servers, credentials and options.

| URL | servers |
| --- | --- |
| `redis://[user:password@]host[:6379][/database]` | one server; `rediss://` with TLS |
| `redis+unix://[user:password@]/path/of.sock[?db=1]` | one server on this machine |
| `redis+sentinel://[user:password@]host[:26379],…/service[/database]` | the master of a service |
| `redis+cluster://[user:password@]host[:6379],…` | a cluster, found from any of its nodes |

A service is a group of servers that sentinels watch. `valkey` may replace `redis`, and `valkeys` may replace
`rediss`; `rediss+sentinel` and `rediss+cluster` use TLS. Special characters of a name or password are
percent-encoded. Options follow a `?`: see `_OPTIONS`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from compaction_proxy.core.errors import ConfigError

RedisKind = Literal["standalone", "unix", "sentinel", "cluster"]

DEFAULT_CONNECTIONS = 32
DEFAULT_PREFIX = "compaction:"
"""The prefix of all keys, which separates them from the keys of other programs on the same server."""

_PORT = 6379
_SENTINEL_PORT = 26379
_KINDS: Mapping[str, RedisKind] = {
    "": "standalone",
    "unix": "unix",
    "sentinel": "sentinel",
    "cluster": "cluster",
}
_TLS = {"redis": False, "valkey": False, "rediss": True, "valkeys": True}
_ANY: frozenset[RedisKind] = frozenset({"standalone", "unix", "sentinel", "cluster"})
_OPTIONS: Mapping[str, frozenset[RedisKind]] = {
    "prefix": _ANY,  # prefix of all keys, to separate several installations on one server
    "max_connections": _ANY,  # maximum number of commands that run at once
    "db": frozenset({"unix"}),  # number of the database, which the path of a socket cannot contain
    "sentinel_username": frozenset(
        {"sentinel"}
    ),  # ACL user for the sentinels, which may differ from the user for the servers
    "sentinel_password": frozenset({"sentinel"}),
    "ssl_ca_certs": _ANY,  # file of the trusted certificates
    "ssl_certfile": _ANY,  # file of the client certificate, if the server requires one
    "ssl_keyfile": _ANY,
    "ssl_cert_reqs": _ANY,  # required (default), optional, none
    "ssl_check_hostname": _ANY,  # true (default), false
}


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """The location of a Redis store.

    Attributes:
        kind: How the servers are run: alone, on a Unix socket, behind sentinels, or as a cluster.
        nodes: Host and port of the server, of the sentinels, or of nodes of the cluster.
        socket: Path of a Unix socket; empty for the other kinds.
        service: Name of the group of servers that the sentinels watch; empty without sentinels.
        database: Number of the database. A cluster has only database 0.
        username: ACL user for the servers. None uses the default user.
        password: Password of `username`. None sends no password.
        sentinel_username: ACL user for the sentinels.
        sentinel_password: Password of `sentinel_username`.
        tls: Whether connections use TLS.
        tls_options: redis-py's TLS arguments, by name.
        prefix: The prefix of all keys.
        max_connections: Maximum number of commands that run at once, on as many connections.
    """

    kind: RedisKind
    nodes: tuple[tuple[str, int], ...] = ()
    socket: str = ""
    service: str = ""
    database: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    sentinel_username: str | None = None
    sentinel_password: str | None = field(default=None, repr=False)
    tls: bool = False
    tls_options: Mapping[str, str | bool] = field(default_factory=lambda: MappingProxyType({}))
    prefix: str = DEFAULT_PREFIX
    max_connections: int = DEFAULT_CONNECTIONS


def is_redis_url(url: str) -> bool:
    """Returns whether a store's URL names a Redis store of any kind."""
    base, _, kind = url.partition("://")[0].partition("+")
    return "://" in url and base in _TLS and kind in _KINDS


def parse_redis_url(url: str) -> RedisUrl:
    """Parses the URL of a Redis store.

    Raises:
        ConfigError: If the URL is not valid. The message contains nothing from the URL except names of
            options.
    """
    base, _, name = url.partition("://")[0].partition("+")
    if not is_redis_url(url):
        raise _build_error("not a Redis URL")
    parts, kind, tls = _split_url(url), _KINDS[name], _TLS[base]
    options = _parse_options(parts.query, kind, tls=tls)
    user_info, _, hosts = parts.netloc.rpartition("@")
    username, _, password = user_info.partition(":")
    path, database = _parse_path(kind, parts.path, options.get("db", ""))
    return RedisUrl(
        kind=kind,
        nodes=_parse_nodes(kind, hosts),
        socket=path if kind == "unix" else "",
        service=path if kind == "sentinel" else "",
        database=database,
        username=unquote(username) or None,
        password=unquote(password) or None,
        sentinel_username=options.get("sentinel_username"),
        sentinel_password=options.get("sentinel_password"),
        tls=tls,
        tls_options=_parse_tls_options(options),
        prefix=_check_prefix(options.get("prefix", DEFAULT_PREFIX)),
        max_connections=_parse_number(
            options.get("max_connections", str(DEFAULT_CONNECTIONS)), "max_connections", 1
        ),
    )


def _build_error(problem: str) -> ConfigError:
    return ConfigError(f"store.url: {problem}")


def _split_url(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
    except ValueError:
        raise _build_error("the host is invalid; percent-encode special characters in a password") from None
    if parts.fragment or "#" in url:
        raise _build_error("percent-encode the character # (%23)")
    return parts


def _parse_options(query: str, kind: RedisKind, *, tls: bool) -> dict[str, str]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError:
        raise _build_error("write options as name=value, joined by &") from None
    for name, _ in pairs:
        if kind not in _OPTIONS.get(name, ()):
            known = ", ".join(sorted(option for option, kinds in _OPTIONS.items() if kind in kinds))
            raise _build_error(f"{name!r} is not an option of this URL; the options are {known}")
        if name.startswith("ssl_") and not tls:
            raise _build_error(f"{name!r} needs TLS; use rediss instead of redis")
    if len(dict(pairs)) != len(pairs):
        raise _build_error("an option appears twice")
    return dict(pairs)


def _parse_number(text: str, option: str, minimum: int) -> int:
    if not text.isdecimal() or not minimum <= int(text) <= 65_535:
        raise _build_error(f"{option} must be a whole number of at least {minimum}")
    return int(text)


def _check_prefix(text: str) -> str:
    if "{" in text or "}" in text:
        raise _build_error("prefix must not contain braces, because a cluster uses them to place keys")
    return text


def _parse_path(kind: RedisKind, path: str, database: str) -> tuple[str, int]:
    """Returns the path of the socket or the name of the service, and the number of the database.

    The first value is empty if `kind` is neither `unix` nor `sentinel`. `database` is the option `db` of the
    URL, which only a URL of the kind `unix` can have. The other kinds name the database in `path`.
    """
    if kind == "unix":
        if path in {"", "/"}:
            raise _build_error("add the path of the socket, as in redis+unix:///run/redis.sock")
        return unquote(path), _parse_number(database or "0", "db", 0)
    first, _, rest = path.removeprefix("/").partition("/")
    if kind == "sentinel":
        if not first:
            raise _build_error("add the service name, as in redis+sentinel://host/mymaster")
        return unquote(first), _parse_number(rest or "0", "the database", 0)
    number = _parse_number(first or "0", "the database", 0)
    if rest or (kind == "cluster" and number):
        raise _build_error(
            "a cluster supports only database 0"
            if kind == "cluster"
            else "the path must be the number of a database"
        )
    return "", number


def _parse_nodes(kind: RedisKind, hosts: str) -> tuple[tuple[str, int], ...]:
    if kind == "unix":
        if hosts:
            raise _build_error("a socket URL has no host; write three slashes before its path")
        return ()
    names = hosts.split(",")
    if kind == "standalone" and len(names) > 1:
        raise _build_error("several hosts need redis+cluster:// or redis+sentinel://")
    return tuple(_parse_node(name, _SENTINEL_PORT if kind == "sentinel" else _PORT) for name in names)


def _parse_node(text: str, port: int) -> tuple[str, int]:
    host, colon, number = text.rpartition(":")
    if not colon or text.endswith("]"):  # no port: the colons of an IPv6 address are in brackets
        host, number = text, str(port)
    host = host.removeprefix("[").removesuffix("]")
    if not host:
        raise _build_error("the host is missing")
    return host, _parse_number(number, "a port", 1)


def _parse_tls_options(options: Mapping[str, str]) -> Mapping[str, str | bool]:
    kwargs: dict[str, str | bool] = {name: text for name, text in options.items() if name.startswith("ssl_")}
    if kwargs.get("ssl_cert_reqs", "none") not in {"required", "optional", "none"}:
        raise _build_error("ssl_cert_reqs must be required, optional or none")
    if "ssl_check_hostname" in kwargs:
        if kwargs["ssl_check_hostname"] not in {"true", "false"}:
            raise _build_error("ssl_check_hostname must be true or false")
        kwargs["ssl_check_hostname"] = kwargs["ssl_check_hostname"] == "true"
    if kwargs.get("ssl_cert_reqs") == "none":  # an unverified certificate proves no host name
        kwargs["ssl_check_hostname"] = False
    return MappingProxyType(kwargs)
