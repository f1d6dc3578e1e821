"""The shared store: Redis or Valkey, as one server, behind sentinels, or as a cluster.

The server's clock alone decides when a key expires. Every key expires, unless its `ttl_s` is infinite. If the
server has an eviction policy, it may delete any key at any time. The key then counts as absent.

The store also has internal keys, which contain a `#`: leases and their counters, the set of the keys of each
scope (`storage.keys`), and the set of each tenant's scopes, sorted by their last write. If a tenant has too
many scopes, those whose last write is oldest are deleted. With the scope of a conversation, the record that
contains the conversation's tenant is also deleted, although it is in no tenant's scope.
"""

import asyncio
import math
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

from redis.asyncio import RedisCluster
from redis.exceptions import NoScriptError

from compaction_proxy.core.errors import StoreUnavailableError
from compaction_proxy.storage.keys import derive_conversation_tenant_key, parse_hash_tag
from compaction_proxy.storage.redis.client import (
    REDIS_ERRORS,
    build_connections,
    to_store_unavailable,
)
from compaction_proxy.storage.redis.scripts import ACQUIRE, REGISTER_SCOPE, RELEASE, RENEW, WRITE, LuaScript
from compaction_proxy.storage.redis.url import RedisUrl
from compaction_proxy.storage.store import Lease, ListEntry, Record

MAX_VALUE_BYTES = 1024 * 1024
DEFAULT_MAX_SCOPES = 10_000
# Maximum time to subscribe to a channel, and to wait for one message, in seconds. After each wait, redis-py
# can check the connection.
LISTEN_TIMEOUT_S = 5.0
FENCE_EXTRA_TTL_MS = 24 * 3_600_000
_MAX_EVICTED_SCOPES = 8
_KEYS_PER_COMMAND = 500
_SCANNED_PER_COMMAND = 1000
_TOKEN_BYTES = 12
# Maximum time that `close` waits for commands in progress, in seconds.
_CLOSE_LIMIT_S = 1.0

_LEASE, _FENCE, _KEY_LIST = "#lease", "#fence", "#keys"
_COMMITTED, _WRITTEN = "#committed", "#written"
_INTERNAL_KEY = re.compile(rf"(?:{_LEASE}|{_FENCE}|{_KEY_LIST}|{_COMMITTED}|{_WRITTEN})$".encode())

_Argument = str | bytes | int
_Items = Sequence[Record | ListEntry]


def _to_milliseconds(ttl_s: float) -> int:
    """Returns a time to live in milliseconds, at least 1; 0 (no expiry) if it is infinite."""
    return 0 if math.isinf(ttl_s) else max(1, math.ceil(ttl_s * 1000))


def _check_sizes(items: _Items) -> None:
    if any(len(item.value) > MAX_VALUE_BYTES for item in items):
        raise StoreUnavailableError("store-too-large", f"a value is larger than {MAX_VALUE_BYTES} bytes")


def _is_in_tenant_scope(key: str) -> bool:
    """Returns whether a key is in a scope of a tenant. Only such scopes are counted and limited."""
    return derive_conversation_tenant_key(key) is not None


def _get_scope(key: str) -> str:
    """Returns the scope of a key: the start of the key, up to and including its closing brace."""
    return key[: key.index("}") + 1]


def _to_scan_pattern(prefix: str) -> str:
    return re.sub(r"([\\*?\[\]^-])", r"\\\1", prefix) + "*"


class RedisStore:
    """Implements `store.Store`. Keys that are written together must share a hash tag.

    Args:
        url: The servers, and the credentials for them.
        max_scopes: Maximum number of scopes of each tenant. Keys with the same hash tag form a scope. Scopes
            that commits write (checkpoints) and scopes that plain writes write (conversations) are counted
            separately. The scopes whose last write is oldest are deleted first.
    """

    def __init__(self, url: RedisUrl, *, max_scopes: int = DEFAULT_MAX_SCOPES) -> None:
        self._redis = build_connections(url)
        self._prefix = url.prefix
        self._max_scopes = max_scopes
        self._max_commands = url.max_connections
        self._slots = asyncio.Semaphore(self._max_commands)
        self._closed = False

    async def read(self, keys: Sequence[str]) -> list[bytes | None]:
        """Returns values as `Store.read` does. Without keys, only checks that a server answers."""
        if not keys:
            await self._send_command("EXISTS", self._add_prefix("answers"))
        starts = range(0, len(keys), _KEYS_PER_COMMAND)
        batches = [await self._read_batch(keys[start : start + _KEYS_PER_COMMAND]) for start in starts]
        return [value for values in batches for value in values]

    async def commit(
        self, claim: Record, other_items: _Items = (), *, lease: Lease | None = None
    ) -> bytes | None:
        """Commits all items or none, as `Store.commit` specifies."""
        items = [claim, *other_items]
        answer: bytes | int | None = await self._write_items(items, has_claim=True, lease=lease)
        if answer != 1:
            return answer if isinstance(answer, bytes) else None
        await self._register_scope(items, _COMMITTED)
        return claim.value

    async def write(self, items: _Items) -> None:
        """Writes all items, or raises and writes nothing."""
        if items:
            await self._write_items(items, has_claim=False, lease=None)
            await self._register_scope(items, _WRITTEN)

    async def read_tail(self, key: str, limit: int) -> list[bytes]:
        """Returns the newest `limit` lines of a list, oldest first; none if `key` has no list."""
        if limit <= 0:
            return []
        try:
            lines: list[bytes] = await self._send_command("LRANGE", self._add_prefix(key), -limit, -1)
        except StoreUnavailableError as error:
            if str(error.__cause__).startswith("WRONGTYPE"):
                return []
            raise
        return lines

    async def acquire_lease(self, key: str, ttl_s: float) -> Lease | None:
        """Returns a lease on `key`, or None if there is a lease on it already."""
        keys = [self._add_prefix(key + _LEASE), self._add_prefix(key + _FENCE)]
        ttl = _to_milliseconds(ttl_s)
        token = secrets.token_hex(_TOKEN_BYTES)
        fence = await self._run_script(ACQUIRE, keys, [ttl, token, ttl + FENCE_EXTRA_TTL_MS])
        return None if fence is None else Lease(key, int(fence))

    async def renew_lease(self, lease: Lease, ttl_s: float) -> bool:
        """Extends a lease to `ttl_s` seconds from now. Returns False if it has expired or was released."""
        keys = [self._add_prefix(lease.key + _LEASE)]
        return bool(await self._run_script(RENEW, keys, [lease.fence, _to_milliseconds(ttl_s)]))

    async def release_lease(self, lease: Lease) -> None:
        """Releases a lease. Does nothing if it has expired or was released."""
        await self._run_script(RELEASE, [self._add_prefix(lease.key + _LEASE)], [lease.fence])

    async def delete_prefix(self, prefix: str) -> int:
        """Deletes keys as `Store.delete_prefix` does. Returns the number of records and lists.

        Scans all keys of every server, so the more keys there are, the longer it takes.
        """
        deleted = 0
        tenant_keys: set[bytes] = set()
        async for keys in self._scan_keys(_to_scan_pattern(self._add_prefix(prefix))):
            deleted += await self._unlink_keys(keys)
            tenant_keys.update(map(self._derive_tenant_key, keys))
        await self._unlink_keys(list(tenant_keys - {b""}))
        return deleted

    async def publish(self, channel: str, message: bytes) -> None:
        """Sends a message to every process that listens on a channel."""
        await self._send_command("PUBLISH", self._add_prefix(channel), message)

    async def listen(self, channel: str) -> AsyncGenerator[bytes | None, None]:
        """Yields messages as `Store.listen` does, over a separate connection.

        Raises:
            StoreUnavailableError: If the server is unreachable, or does not permit the subscription.
        """
        if self._closed:
            raise StoreUnavailableError("store-closed")
        pubsub = None
        try:
            async with asyncio.timeout(LISTEN_TIMEOUT_S):
                await self._redis.find_servers()
                pubsub = self._redis.client.pubsub()
                await pubsub.subscribe(self._add_prefix(channel))
            while True:
                async with asyncio.timeout(2 * LISTEN_TIMEOUT_S):  # `get_message` may connect again
                    message = await pubsub.get_message(timeout=LISTEN_TIMEOUT_S)
                if message is not None:
                    yield message["data"] if message["type"] == "message" else None
        except REDIS_ERRORS as error:
            raise await self._handle_error(error) from error
        finally:
            if pubsub is not None:
                await pubsub.aclose()

    async def close(self) -> None:
        """Waits until the commands in progress have ended, at most a second, and closes the connections.

        If it did not wait, redis-py would open the connections of these commands again.
        """
        if self._closed:
            return
        self._closed = True
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_LIMIT_S):
                for _ in range(self._max_commands):
                    await self._slots.acquire()
        try:
            await self._redis.close()
        except REDIS_ERRORS as error:
            raise to_store_unavailable(error, self._prefix) from error

    def _add_prefix(self, key: str) -> str:
        return self._prefix + key

    def _derive_tenant_key(self, key: bytes) -> bytes:
        """Returns the result of `derive_conversation_tenant_key`, or empty bytes if that is None.

        `key` and the result are keys as the server has them, with the prefix of the URL.
        """
        tenant_key = derive_conversation_tenant_key(key.decode("utf-8", "replace").removeprefix(self._prefix))
        return self._add_prefix(tenant_key).encode() if tenant_key else b""

    async def _send_command(self, *command: _Argument, **options: Any) -> Any:  # noqa: ANN401 - any value of the server
        """Sends one command and returns its response.

        Raises:
            NoScriptError: If the command runs a script by its digest, and the server has not cached it.
            StoreUnavailableError: If the command failed for any other reason.
        """
        if self._closed:
            raise StoreUnavailableError("store-closed")
        try:
            async with self._slots:
                await self._redis.find_servers()
                return await self._execute_command(*command, **options)
        except NoScriptError:
            raise
        except REDIS_ERRORS as error:
            raise await self._handle_error(error) from error

    async def _handle_error(self, error: Exception) -> StoreUnavailableError:
        """Returns the error to raise for an error of redis-py.

        If the server refuses writes, it may be a former master. The method then closes the idle connections,
        because new connections may lead to its successor.
        """
        store_error = to_store_unavailable(error, self._prefix)
        if store_error.reason == "store-readonly":
            await self._redis.drop_idle()
        return store_error

    async def _execute_command(self, *command: _Argument, **options: Any) -> Any:  # noqa: ANN401 - any value of the server
        execute = self._redis.client.execute_command
        try:
            return await execute(*command, **options)
        except AttributeError:  # redis-py closed the cluster's connection before it sent the command
            return await execute(*command, **options)

    async def _run_script(
        self, script: LuaScript, keys: Sequence[str], arguments: Sequence[_Argument]
    ) -> Any:  # noqa: ANN401 - any value of the script
        try:
            return await self._send_command("EVALSHA", script.digest, len(keys), *keys, *arguments)
        except NoScriptError:
            return await self._send_command("EVAL", script.text, len(keys), *keys, *arguments)

    async def _write_items(
        self, items: _Items, *, has_claim: bool, lease: Lease | None
    ) -> bytes | int | None:
        _check_sizes(items)
        first = items[0].key
        list_ttl = max(_to_milliseconds(item.ttl_s) for item in items) if _is_in_tenant_scope(first) else 0
        keys = [
            self._add_prefix(lease.key + _LEASE if lease else first),
            self._add_prefix(_get_scope(first) + _KEY_LIST if list_ttl else first),
            *(self._add_prefix(item.key) for item in items),
        ]
        arguments: list[_Argument] = [int(has_claim), lease.fence if lease else "", list_ttl]
        for item in items:
            keep = item.max_lines if isinstance(item, ListEntry) else 0
            arguments += [keep, _to_milliseconds(item.ttl_s), item.value]
        answer: bytes | int | None = await self._run_script(WRITE, keys, arguments)
        return answer

    async def _register_scope(self, items: _Items, registry_suffix: str) -> None:
        """Registers a write to the scope of `items`. Deletes old scopes if the tenant has too many.

        Deletes the tenant's scopes whose last write is oldest, at most `_MAX_EVICTED_SCOPES` in a call.
        Call this method after the items are written. If the registration fails, the next write to the scope
        registers the scope. `registry_suffix` (`_COMMITTED` or `_WRITTEN`) selects the set of scopes.
        """
        key = items[0].key
        if not _is_in_tenant_scope(key):
            return
        scope, ttl = _get_scope(key), max(_to_milliseconds(item.ttl_s) for item in items)
        tenant = scope.partition(".")[0] + ".}"
        try:
            leaving = await self._run_script(
                REGISTER_SCOPE,
                [self._add_prefix(tenant + registry_suffix)],
                [scope, ttl, self._max_scopes, _MAX_EVICTED_SCOPES],
            )
            for old_scope in leaving:
                await self._delete_scope(old_scope.decode())
        except StoreUnavailableError:
            return

    async def _delete_scope(self, scope: str) -> None:
        list_key = self._add_prefix(scope + _KEY_LIST)
        keys: list[bytes] = await self._send_command("SMEMBERS", list_key)
        await self._send_command("UNLINK", list_key, *keys)
        tenant_key = derive_conversation_tenant_key(scope)
        if tenant_key is not None:  # a separate command, because its key may be on another node
            await self._send_command("UNLINK", self._add_prefix(tenant_key))

    async def _scan_keys(self, pattern: str) -> AsyncIterator[list[bytes]]:
        """Yields batches of keys that match `pattern`, from all servers. A batch may be empty."""
        for target in await self._list_masters():
            cursor: int | None = None
            while cursor != 0:
                cursors, keys = await self._send_command(
                    "SCAN", cursor or 0, "MATCH", pattern, "COUNT", _SCANNED_PER_COMMAND, **target
                )
                # A cluster returns a dict of cursors by node.
                cursor = next(iter(cursors.values())) if isinstance(cursors, dict) else cursors
                yield keys

    async def _list_masters(self) -> list[dict[str, Any]]:
        """Returns, for each master, the options with which `_send_command` sends a command to it.

        Without a cluster, there is only one server, and it needs no options.
        """
        client = self._redis.client
        if not isinstance(client, RedisCluster):
            return [{}]
        await self.read([])  # discovers the nodes if no earlier command has done so
        return [{"target_nodes": node} for node in client.get_primaries()]

    async def _unlink_keys(self, keys: Sequence[bytes]) -> int:
        """Deletes keys. Returns the number of deleted keys that are not internal.

        The keys may be on several nodes of a cluster.
        """
        starts = range(0, len(keys), _KEYS_PER_COMMAND)
        counts = [
            each
            for start in starts
            for each in await self._run_pipeline("UNLINK", keys[start : start + _KEYS_PER_COMMAND])
        ]
        return sum(count for key, count in zip(keys, counts, strict=True) if not _INTERNAL_KEY.search(key))

    async def _read_batch(self, keys: Sequence[str]) -> list[bytes | None]:
        """Returns the values under `keys`, in order; None for a key that is absent.

        Sends one command for all keys, or one for each key if the keys may be on several cluster nodes.
        """
        names = [self._add_prefix(key) for key in keys]
        if isinstance(self._redis.client, RedisCluster) and len(set(map(parse_hash_tag, keys))) > 1:
            return [value for (value,) in await self._run_pipeline("MGET", names)]
        return list(await self._send_command("MGET", *names))

    async def _run_pipeline(self, command: str, keys: Sequence[str | bytes]) -> list[Any]:
        """Sends `command` once for each key, in one batch. Returns the results in the order of `keys`."""
        if self._closed:
            raise StoreUnavailableError("store-closed")
        pipeline = self._redis.client.pipeline(transaction=False)
        for key in keys:
            pipeline.execute_command(command, key)
        try:
            async with self._slots:
                return list(await pipeline.execute())
        except REDIS_ERRORS as error:
            raise await self._handle_error(error) from error
