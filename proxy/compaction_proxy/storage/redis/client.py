"""Connects to Redis (standalone, Sentinel or Cluster). Maps errors to `StoreUnavailableError`.

redis-py's defaults (ten retries, five seconds each) would delay every request while a server is dead. Here a
command is retried once, on a new connection, and the caller decides how long to wait. No command waits inside
redis-py's pools, because `RedisStore` never runs more commands at once than a pool has connections.
"""

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis, RedisCluster, Sentinel
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ClusterError,
    MaxConnectionsError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from compaction_proxy.core.errors import StoreUnavailableError
from compaction_proxy.storage.redis.url import RedisUrl

CONNECT_TIMEOUT_S = 0.25
"""Used for sentinels and the nodes of a cluster: if one does not answer, another can be tried."""
HEALTH_CHECK_EVERY_S = 15
MAX_RETRIES = 1
# Size of a redis-py pool, as a multiple of the number of commands that may run at once. The factor 1 would be
# too small, because a pool still counts a connection that is being closed.
_POOL_SIZE_FACTOR = 2

# AttributeError occurs if redis-py closes a cluster's connection that a command is about to use.
REDIS_ERRORS = (RedisError, RedisClusterException, OSError, AttributeError)
"""The errors that redis-py raises. `RedisClusterException` is not derived from `RedisError`."""

# The reason (`StoreUnavailableError.reason`) for each class of error. The first matching class decides,
# because some of these classes are derived from others.
_REASONS: tuple[tuple[type[Exception], str], ...] = (
    (BusyLoadingError, "store-loading"),
    (AuthenticationError, "store-denied"),
    (AuthorizationError, "store-denied"),
    (NoPermissionError, "store-forbidden"),
    (ReadOnlyError, "store-readonly"),
    (OutOfMemoryError, "store-full"),
    (MaxConnectionsError, "store-busy"),
    (RedisTimeoutError, "store-timeout"),
    (RedisConnectionError, "store-down"),
    (ClusterError, "store-down"),
    (RedisClusterException, "store-down"),
    (TimeoutError, "store-timeout"),
    (OSError, "store-down"),
)

# The reason for a word in the server's message. It is used if no class in `_REASONS` matches: redis-py has no
# class for some errors, nor for errors that occur within a script.
_REASONS_BY_WORD = {
    "OOM": "store-full",
    "READONLY": "store-readonly",
    "MISCONF": "store-readonly",  # the server cannot save to its disk, and refuses writes until it can
    "NOREPLICAS": "store-readonly",
    "NOPERM": "store-forbidden",
    "ACL failure": "store-forbidden",
    "The user executing the script": "store-forbidden",
    "NOAUTH": "store-denied",
    "WRONGPASS": "store-denied",
    "BUSY": "store-busy",
    "LOADING": "store-loading",
    "CLUSTERDOWN": "store-down",
    "MASTERDOWN": "store-down",
    "TRYAGAIN": "store-busy",
}
_WORD = re.compile(rf"(?:^|-)({'|'.join(_REASONS_BY_WORD)})\b")
_FORBIDDEN_COMMAND = re.compile(r"permissions to run the '([a-z|]+)' command")


@dataclass(frozen=True, slots=True)
class RedisConnections:
    """Connections to one Redis server, or to several servers that act as one store.

    Attributes:
        client: redis-py's client, which runs commands.
        find_servers: Discovers the servers if the client needs this before its first command. Later calls
            do nothing.
        drop_idle: Closes idle connections, so that the next command connects again. It then reaches the
            server that accepts writes at that time.
        close: Closes all connections.
    """

    client: Any
    find_servers: Callable[[], Awaitable[object]]
    drop_idle: Callable[[], Awaitable[None]]
    close: Callable[[], Awaitable[None]]


def to_store_unavailable(error: Exception, prefix: str) -> StoreUnavailableError:
    """Converts a redis-py error. Leaves out the server's message, which may contain stored data.

    If the user has no permission, the message says for which command, or for keys with `prefix`.
    """
    reason = next((reason for kind, reason in _REASONS if isinstance(error, kind)), "")
    word = _WORD.search(str(error))
    if not reason and word:
        reason = _REASONS_BY_WORD[word[1]]
    if reason == "store-forbidden":
        command = _FORBIDDEN_COMMAND.search(str(error))
        other = f"the keys ~{prefix}*" if "access" in str(error) else "a command of a script"
        return StoreUnavailableError(reason, f"the command {command[1]}" if command else other)
    return StoreUnavailableError(reason or "store-failed", type(error).__name__)


def build_connections(url: RedisUrl) -> RedisConnections:
    """Builds the connections for a URL. Opens none yet."""
    if url.kind == "cluster":
        return _build_cluster(url)
    return _build_sentinel(url) if url.kind == "sentinel" else _build_standalone(url)


async def _skip_discovery() -> None:
    """Does nothing, because the URL contains the address of the server."""


def _build_drop_idle(client: Redis) -> Callable[[], Awaitable[None]]:
    return lambda: client.connection_pool.disconnect(inuse_connections=False)


def _build_connection_options() -> dict[str, Any]:
    return {
        # The caller's deadline (`resilient.run_with_deadline`) ends a command that takes too long. Unlike a
        # timeout of redis-py, it allows for a busy event loop. With such a timeout, redis-py also ignores
        # cancellations on Python 3.11, because it sends each command in `asyncio.wait_for`.
        "socket_timeout": None,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "socket_keepalive": True,
        "protocol": 2,  # RESP3 would add push messages, which the proxy does not need
        # A command that timed out is not retried: the server may have executed it, and the caller's deadline
        # has passed anyway.
        "retry": Retry(NoBackoff(), MAX_RETRIES, supported_errors=(RedisConnectionError,)),
    }


def _build_client_options(url: RedisUrl) -> dict[str, Any]:
    return {
        **_build_connection_options(),
        **({"ssl": True, **url.tls_options} if url.tls else {}),
        "username": url.username,
        "password": url.password,
        "health_check_interval": HEALTH_CHECK_EVERY_S,
        "max_connections": url.max_connections * _POOL_SIZE_FACTOR,
    }


def _build_standalone(url: RedisUrl) -> RedisConnections:
    if url.kind == "unix":
        address: dict[str, Any] = {"unix_socket_path": url.socket}
        arguments = {
            name: value for name, value in _build_client_options(url).items() if name != "socket_keepalive"
        }
    else:
        ((host, port),) = url.nodes
        address, arguments = {"host": host, "port": port}, _build_client_options(url)
    # There is no other server to try, so the caller's deadline ends an attempt to connect, too.
    arguments["socket_connect_timeout"] = None
    client = Redis(**address, db=url.database, **arguments)
    return RedisConnections(client, _skip_discovery, _build_drop_idle(client), client.aclose)


def _build_sentinel(url: RedisUrl) -> RedisConnections:
    credentials = {"username": url.sentinel_username, "password": url.sentinel_password}
    tls = {"ssl": True, **url.tls_options} if url.tls else {}
    # redis-py tries one sentinel after the other. The short timeout leaves time for the next sentinel.
    timeouts = {"socket_timeout": CONNECT_TIMEOUT_S}
    sentinel = Sentinel(
        url.nodes, sentinel_kwargs={**_build_connection_options(), **timeouts, **tls, **credentials}
    )  # type: ignore[no-untyped-call]
    client = sentinel.master_for(url.service, db=url.database, **_build_client_options(url))

    async def close_all() -> None:
        for each in (client, *sentinel.sentinels):
            await each.aclose()

    return RedisConnections(client, _skip_discovery, _build_drop_idle(client), close_all)


def _build_cluster(url: RedisUrl) -> RedisConnections:
    nodes = [ClusterNode(host, port) for host, port in url.nodes]
    # With `reinitialize_steps=0`, redis-py does not close all connections after some hash slots have moved to
    # other nodes. Commands may be using these connections.
    client = RedisCluster(startup_nodes=nodes, reinitialize_steps=0, **_build_client_options(url))

    async def close_all() -> None:
        await client.aclose()
        # `aclose` does nothing if redis-py has closed the client itself and not discovered the nodes again.
        await client.nodes_manager.aclose()

    # `client.initialize` discovers the nodes. Without it, redis-py would send the first commands to any node.
    return RedisConnections(client, client.initialize, client.aclose, close_all)
