"""The shared store: Redis or Valkey, as one server, behind sentinels, or as a cluster.

Only the server's clock is used. Every key has a time to live, unless its `ttl_s` is infinite, so unused keys
expire by themselves. If the server has an eviction policy, it may delete any key at any time. The key then
counts as absent.

The store also keeps internal keys, marked by a `#`: leases and their counters, a list of the keys of each
scope (`storage.keys`), and a list of each tenant's scopes, sorted by their last write. If a tenant has too
many scopes, the oldest are deleted. With a conversation's scope, the record that names the conversation's
tenant is deleted, too, although it is in no tenant's scope.
"""

import asyncio
import math
import re
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from redis.asyncio import RedisCluster
from redis.exceptions import NoScriptError
from redis.exceptions import TimeoutError as RedisTimeoutError

from compaction_proxy.core.errors import StoreUnavailableError
from compaction_proxy.storage.keys import derive_tenant_key, parse_hash_tag
from compaction_proxy.storage.redis.client import (
    ANSWER_TIMEOUT_S,
    REDIS_ERRORS,
    build_connections,
    to_store_unavailable,
)
from compaction_proxy.storage.redis.scripts import ACQUIRE, REGISTER_SCOPE, RELEASE, RENEW, WRITE, LuaScript
from compaction_proxy.storage.redis.url import RedisUrl
from compaction_proxy.storage.store import Lease, ListEntry, Record

MAX_VALUE_BYTES = 1024 * 1024
DEFAULT_MAX_SCOPES = 10_000
# Maximum seconds of one wait for messages. Between two waits redis-py can test the connection.
LISTEN_TIMEOUT_S = 5.0
FENCE_EXTRA_TTL_MS = 24 * 3_600_000
_MAX_EVICTED_SCOPES = 8
_KEYS_PER_COMMAND = 500
_SCANNED_PER_COMMAND = 1000
_TOKEN_BYTES = 12
# If a command's timeout comes only after this many seconds, this process was stopped meanwhile and could not
# read the answer.
_PROCESS_STOPPED_S = ANSWER_TIMEOUT_S + 0.25

_LEASE, _FENCE, _KEY_LIST = "#lease", "#fence", "#keys"
_COMMITTED, _WRITTEN = "#committed", "#written"
_INTERNAL_KEY = re.compile(rf"(?:{_LEASE}|{_FENCE}|{_KEY_LIST}|{_COMMITTED}|{_WRITTEN})$".encode())

_Argument = str | bytes | int
_Items = Sequence[Record | ListEntry]


def _to_milliseconds(ttl_s: float) -> int:
    """Converts seconds to milliseconds, at least one. 0 means no expiry."""
    return 0 if math.isinf(ttl_s) else max(1, math.ceil(ttl_s * 1000))


def _check_sizes(items: _Items) -> None:
    if any(len(item.value) > MAX_VALUE_BYTES for item in items):
        raise StoreUnavailableError("store-too-large", f"a value takes more than {MAX_VALUE_BYTES} bytes")


def _is_tenant_key(key: str) -> bool:
    """Whether a key belongs to a tenant's scope. The number of scopes of a tenant is limited."""
    return derive_tenant_key(key) is not None


def _get_scope(key: str) -> str:
    """Returns the start of a key, up to its closing brace."""
    return key[: key.index("}") + 1]


def _to_scan_pattern(prefix: str) -> str:
    """Returns the SCAN pattern that matches all keys with this prefix."""
    return re.sub(r"([\\*?\[\]^-])", r"\\\1", prefix) + "*"


class RedisStore:
    """Implements `store.Store`. Keys that are written together must share a hash tag.

    Args:
        url: The servers, and the credentials for them.
        max_scopes: The most scopes that are kept for each tenant. Scopes with commits (checkpoints) and
            scopes with plain writes (conversations) are counted separately. The scopes that were written to
            longest ago are deleted first.
    """

    def __init__(self, url: RedisUrl, *, max_scopes: int = DEFAULT_MAX_SCOPES) -> None:
        self._redis = build_connections(url)
        self._prefix = url.prefix
        self._max_scopes = max_scopes
        self._slots = asyncio.Semaphore(url.max_connections)
        self._closed = False

    async def read(self, keys: Sequence[str]) -> list[bytes | None]:
        """Returns the unexpired values under `keys`. Without keys, only checks that the server answers."""
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
        """Returns the newest `limit` lines, oldest first."""
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
        """Returns a lease on `key`, or None if another process holds one."""
        keys = [self._add_prefix(key + _LEASE), self._add_prefix(key + _FENCE)]
        ttl = _to_milliseconds(ttl_s)
        token = secrets.token_hex(_TOKEN_BYTES)
        fence = await self._run_script(ACQUIRE, keys, [ttl, token, ttl + FENCE_EXTRA_TTL_MS])
        return None if fence is None else Lease(key, int(fence))

    async def renew_lease(self, lease: Lease, ttl_s: float) -> bool:
        """Prolongs a lease. Returns False if it is lost."""
        keys = [self._add_prefix(lease.key + _LEASE)]
        return bool(await self._run_script(RENEW, keys, [lease.fence, _to_milliseconds(ttl_s)]))

    async def release_lease(self, lease: Lease) -> None:
        """Releases a lease, unless it is lost."""
        await self._run_script(RELEASE, [self._add_prefix(lease.key + _LEASE)], [lease.fence])

    async def delete_prefix(self, prefix: str) -> int:
        """Deletes keys by prefix, leases included. Returns the number of records and lists.

        Scans the keys of every server, so it takes longer the more keys there are.
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
        """Yields messages as they arrive, over a separate connection; None at first, and after a reconnect.

        Raises:
            StoreUnavailableError: The server is unreachable, or does not permit the subscription.
        """
        if self._closed:
            raise StoreUnavailableError("store-closed")
        pubsub = None
        try:
            await self._redis.find_servers()
            pubsub = self._redis.client.pubsub()
            await pubsub.subscribe(self._add_prefix(channel))
            while True:
                message = await pubsub.get_message(timeout=LISTEN_TIMEOUT_S)
                if message is not None:
                    yield message["data"] if message["type"] == "message" else None
        except REDIS_ERRORS as error:
            raise to_store_unavailable(error) from error
        finally:
            if pubsub is not None:
                await pubsub.aclose()

    async def close(self) -> None:
        """Closes the connections."""
        if self._closed:
            return
        self._closed = True
        try:
            await self._redis.close()
        except REDIS_ERRORS as error:
            raise to_store_unavailable(error) from error

    def _add_prefix(self, key: str) -> str:
        return self._prefix + key

    def _derive_tenant_key(self, key: bytes) -> bytes:
        """Returns the key of the record that names the tenant of a key's conversation, or empty bytes."""
        tenant_key = derive_tenant_key(key.decode("utf-8", "replace").removeprefix(self._prefix))
        return self._add_prefix(tenant_key).encode() if tenant_key else b""

    async def _send_command(self, *command: _Argument, **options: Any) -> Any:  # noqa: ANN401 - whatever the server answers
        """Sends one command and returns its answer.

        Raises:
            NoScriptError: The server does not know the script any more.
            StoreUnavailableError: The command failed for any other reason.
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
            store_error = to_store_unavailable(error)
            # The connections lead to a former master. New connections may lead to the new one.
            if store_error.reason == "store-readonly":
                await self._redis.drop_idle()
            raise store_error from error

    async def _execute_command(self, *command: _Argument, **options: Any) -> Any:  # noqa: ANN401 - whatever the server answers
        execute = self._redis.client.execute_command
        started_at = time.monotonic()
        try:
            return await execute(*command, **options)
        except AttributeError:  # redis-py closed a cluster's connection before anything was written
            return await execute(*command, **options)
        except RedisTimeoutError:
            # If this process was stopped, redis-py's timeout went on, and redis-py dropped an answer that had
            # already arrived. So the command is sent again.
            if time.monotonic() - started_at < _PROCESS_STOPPED_S:
                raise
            return await execute(*command, **options)

    async def _run_script(
        self, script: LuaScript, keys: Sequence[str], arguments: Sequence[_Argument]
    ) -> Any:  # noqa: ANN401 - whatever the script returns
        try:
            return await self._send_command("EVALSHA", script.digest, len(keys), *keys, *arguments)
        except NoScriptError:
            return await self._send_command("EVAL", script.text, len(keys), *keys, *arguments)

    async def _write_items(
        self, items: _Items, *, has_claim: bool, lease: Lease | None
    ) -> bytes | int | None:
        _check_sizes(items)
        first = items[0].key
        list_ttl = max(_to_milliseconds(item.ttl_s) for item in items) if _is_tenant_key(first) else 0
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
        """Records that a scope was written to, and deletes a tenant's oldest scopes if there are too many.

        The items are already written. If this call fails, the next write registers the scope.
        """
        key = items[0].key
        if not _is_tenant_key(key):
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
        tenant_key = derive_tenant_key(scope)
        if tenant_key is not None:  # its key has another hash slot
            await self._send_command("UNLINK", self._add_prefix(tenant_key))

    async def _scan_keys(self, pattern: str) -> AsyncIterator[list[bytes]]:
        """Yields batches of matching keys from every server that has some."""
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
        """Returns, for each server with keys, the options that send a command to it."""
        client = self._redis.client
        if not isinstance(client, RedisCluster):
            return [{}]
        await self.read([])  # discovers the nodes, if no command has done so
        return [{"target_nodes": node} for node in client.get_primaries()]

    async def _unlink_keys(self, keys: Sequence[bytes]) -> int:
        """Deletes keys, whichever nodes they are on. Returns how many of them were records and lists."""
        starts = range(0, len(keys), _KEYS_PER_COMMAND)
        counts = [
            each
            for start in starts
            for each in await self._run_pipeline("UNLINK", keys[start : start + _KEYS_PER_COMMAND])
        ]
        return sum(count for key, count in zip(keys, counts, strict=True) if not _INTERNAL_KEY.search(key))

    async def _read_batch(self, keys: Sequence[str]) -> list[bytes | None]:
        """Reads values in one round trip, or in one to each node of a cluster that has any of the keys."""
        names = [self._add_prefix(key) for key in keys]
        if isinstance(self._redis.client, RedisCluster) and len(set(map(parse_hash_tag, keys))) > 1:
            return [value for (value,) in await self._run_pipeline("MGET", names)]
        return list(await self._send_command("MGET", *names))

    async def _run_pipeline(self, command: str, keys: Sequence[str | bytes]) -> list[Any]:
        """Runs one command for each key, all sent together."""
        if self._closed:
            raise StoreUnavailableError("store-closed")
        pipeline = self._redis.client.pipeline(transaction=False)
        for key in keys:
            pipeline.execute_command(command, key)
        try:
            async with self._slots:
                return list(await pipeline.execute())
        except REDIS_ERRORS as error:
            raise to_store_unavailable(error) from error
