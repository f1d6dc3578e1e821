"""The shared store: Redis or Valkey, as one server, behind sentinels, or as a cluster.

Times are the server's. Every key has a time to live but those that are meant to stay (`ttl_s` infinite), so
what is not used goes by itself; under an eviction policy anything may go at any time, and is then absent.
Beside the items there are a few keys of the store's own, told apart by a `#`: leases and their counters, for
each scope the list of its keys, and for each tenant its scopes by age, of which the oldest leave when there
are too many. With a scope goes the note of whose it is, which is in nobody's.
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
    FAILURES,
    build_connections,
    to_store_unavailable,
)
from compaction_proxy.storage.redis.scripts import ACQUIRE, REGISTER_SCOPE, RELEASE, RENEW, WRITE, LuaScript
from compaction_proxy.storage.redis.url import RedisUrl
from compaction_proxy.storage.store import Lease, ListEntry, Record

MAX_VALUE_BYTES = 1024 * 1024
DEFAULT_MAX_SCOPES = 10_000
# How long one look for messages lasts, in seconds; between two of them the connection is tested.
LISTEN_S = 5.0
FENCE_KEPT_MS = 24 * 3_600_000
_MAX_EVICTED_SCOPES = 8
_KEYS_PER_COMMAND = 500
_SCANNED_PER_COMMAND = 1000
_TOKEN_BYTES = 12
# A command that took so long to time out was not looked at: this process stood still.
_STOPPED_S = ANSWER_TIMEOUT_S + 0.25

_LEASE, _FENCE, _KEY_LIST = "#lease", "#fence", "#keys"
_COMMITTED, _WRITTEN = "#committed", "#written"
_INTERNAL_KEY = re.compile(rf"(?:{_LEASE}|{_FENCE}|{_KEY_LIST}|{_COMMITTED}|{_WRITTEN})$".encode())

_Argument = str | bytes | int
_Items = Sequence[Record | ListEntry]


def _to_milliseconds(ttl_s: float) -> int:
    """At least one; 0 stands for ever."""
    return 0 if math.isinf(ttl_s) else max(1, math.ceil(ttl_s * 1000))


def _check_sizes(items: _Items) -> None:
    if any(len(item.value) > MAX_VALUE_BYTES for item in items):
        raise StoreUnavailableError("store-too-large", f"a value takes more than {MAX_VALUE_BYTES} bytes")


def _is_tenant_key(key: str) -> bool:
    """Whether a key belongs to a scope of a tenant, who has a limited number."""
    return derive_tenant_key(key) is not None


def _get_scope(key: str) -> str:
    """A key's beginning, up to its closing brace."""
    return key[: key.index("}") + 1]


def _to_scan_pattern(prefix: str) -> str:
    """What SCAN takes for: begins with this."""
    return re.sub(r"([\\*?\[\]^-])", r"\\\1", prefix) + "*"


class RedisStore:
    """Implements `ports.Store`; keys that are written together must share a hash tag.

    Args:
        url: Where the servers are, and as whom to speak to them.
        max_scopes: For each tenant so many conversations, and so many sets of rounds, are kept; those that
            were written to longest ago leave first.
    """

    def __init__(self, url: RedisUrl, *, max_scopes: int = DEFAULT_MAX_SCOPES) -> None:
        self._redis = build_connections(url)
        self._prefix = url.prefix
        self._max_scopes = max_scopes
        self._slots = asyncio.Semaphore(url.max_connections)
        self._closed = False

    async def read(self, keys: Sequence[str]) -> list[bytes | None]:
        """The live values under `keys`. Without keys nothing is read but that the server answers."""
        if not keys:
            await self._send_command("EXISTS", self._add_prefix("answers"))
        starts = range(0, len(keys), _KEYS_PER_COMMAND)
        some = [await self._read_batch(keys[at : at + _KEYS_PER_COMMAND]) for at in starts]
        return [value for values in some for value in values]

    async def commit(self, claim: Record, also: _Items = (), *, lease: Lease | None = None) -> bytes | None:
        """Write everything unless the claim is taken or the lease is lost; return what stands there."""
        items = [claim, *also]
        standing: bytes | int | None = await self._write_items(items, claimed=True, lease=lease)
        if standing != 1:
            return standing if isinstance(standing, bytes) else None
        await self._register_scope(items, _COMMITTED)
        return claim.value

    async def write(self, items: _Items) -> None:
        """Write everything, or raise and write nothing."""
        if items:
            await self._write_items(items, claimed=False, lease=None)
            await self._register_scope(items, _WRITTEN)

    async def read_tail(self, key: str, limit: int) -> list[bytes]:
        """The newest `limit` lines, oldest first."""
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
        """A lease on `key`, unless another holds one."""
        keys = [self._add_prefix(key + _LEASE), self._add_prefix(key + _FENCE)]
        ttl = _to_milliseconds(ttl_s)
        token = secrets.token_hex(_TOKEN_BYTES)
        fence = await self._run_script(ACQUIRE, keys, [ttl, token, ttl + FENCE_KEPT_MS])
        return None if fence is None else Lease(key, int(fence))

    async def renew_lease(self, lease: Lease, ttl_s: float) -> bool:
        """Prolong a lease, if it is still ours."""
        keys = [self._add_prefix(lease.key + _LEASE)]
        return bool(await self._run_script(RENEW, keys, [lease.fence, _to_milliseconds(ttl_s)]))

    async def release_lease(self, lease: Lease) -> None:
        """Give a lease back, if it is still ours."""
        await self._run_script(RELEASE, [self._add_prefix(lease.key + _LEASE)], [lease.fence])

    async def delete_prefix(self, prefix: str) -> int:
        """Forget all keys that begin with `prefix`, leases too; how many records and lists there were.

        Walks through the keys of every server, so it takes as long as there are keys.
        """
        forgotten = 0
        notes: set[bytes] = set()
        async for keys in self._scan_keys(_to_scan_pattern(self._add_prefix(prefix))):
            forgotten += await self._unlink_keys(keys)
            notes.update(map(self._derive_tenant_key, keys))
        await self._unlink_keys(list(notes - {b""}))
        return forgotten

    async def publish(self, channel: str, message: bytes) -> None:
        """Tell every process that listens on a channel."""
        await self._send_command("PUBLISH", self._add_prefix(channel), message)

    async def listen(self, channel: str) -> AsyncGenerator[bytes | None, None]:
        """Messages as they come, over a connection of its own; None at first, and after it was lost.

        Raises:
            StoreUnavailable: The server is away, or does not permit it.
        """
        if self._closed:
            raise StoreUnavailableError("store-closed")
        pubsub = None
        try:
            await self._redis.find_servers()
            pubsub = self._redis.client.pubsub()
            await pubsub.subscribe(self._add_prefix(channel))
            while True:
                message = await pubsub.get_message(timeout=LISTEN_S)
                if message is not None:
                    yield message["data"] if message["type"] == "message" else None
        except FAILURES as error:
            raise to_store_unavailable(error) from error
        finally:
            if pubsub is not None:
                await pubsub.aclose()

    async def close(self) -> None:
        """Let go of the connections."""
        if self._closed:
            return
        self._closed = True
        try:
            await self._redis.close()
        except FAILURES as error:
            raise to_store_unavailable(error) from error

    def _add_prefix(self, key: str) -> str:
        return self._prefix + key

    def _derive_tenant_key(self, key: bytes) -> bytes:
        """Where it stands whose the conversation of a key is; nothing if that is not known of such keys."""
        note = derive_tenant_key(key.decode("utf-8", "replace").removeprefix(self._prefix))
        return self._add_prefix(note).encode() if note else b""

    async def _send_command(self, *command: _Argument, **options: Any) -> Any:  # noqa: ANN401 - whatever the server answers
        """One command.

        Raises:
            NoScriptError: The server has forgotten the script.
            StoreUnavailable: Anything else.
        """
        if self._closed:
            raise StoreUnavailableError("store-closed")
        try:
            async with self._slots:
                await self._redis.find_servers()
                return await self._execute_command(*command, **options)
        except NoScriptError:
            raise
        except FAILURES as error:
            failed = to_store_unavailable(error)
            if failed.reason == "store-readonly":  # this was the master once; the name may lead elsewhere now
                await self._redis.drop_idle()
            raise failed from error

    async def _execute_command(self, *command: _Argument, **options: Any) -> Any:  # noqa: ANN401 - whatever the server answers
        execute = self._redis.client.execute_command
        begun = time.monotonic()
        try:
            return await execute(*command, **options)
        except AttributeError:  # redis-py closed a cluster's connection before anything was written
            return await execute(*command, **options)
        except RedisTimeoutError:
            # While this process is stopped, time passes for redis-py, and it drops an answer that is there.
            if time.monotonic() - begun < _STOPPED_S:
                raise
            return await execute(*command, **options)

    async def _run_script(
        self, script: LuaScript, keys: Sequence[str], arguments: Sequence[_Argument]
    ) -> Any:  # noqa: ANN401 - whatever the script gives
        try:
            return await self._send_command("EVALSHA", script.digest, len(keys), *keys, *arguments)
        except NoScriptError:
            return await self._send_command("EVAL", script.text, len(keys), *keys, *arguments)

    async def _write_items(self, items: _Items, *, claimed: bool, lease: Lease | None) -> bytes | int | None:
        _check_sizes(items)
        first = items[0].key
        listed = max(_to_milliseconds(item.ttl_s) for item in items) if _is_tenant_key(first) else 0
        keys = [
            self._add_prefix(lease.key + _LEASE if lease else first),
            self._add_prefix(_get_scope(first) + _KEY_LIST if listed else first),
            *(self._add_prefix(item.key) for item in items),
        ]
        arguments: list[_Argument] = [int(claimed), lease.fence if lease else "", listed]
        for item in items:
            keep = item.max_lines if isinstance(item, ListEntry) else 0
            arguments += [keep, _to_milliseconds(item.ttl_s), item.value]
        answer: bytes | int | None = await self._run_script(WRITE, keys, arguments)
        return answer

    async def _register_scope(self, items: _Items, registry_suffix: str) -> None:
        """Note that a scope was written to, and let the oldest of its tenant go where there are too many.

        What was to be written is written; if this fails, the next write makes up for it.
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
            for old in leaving:
                await self._delete_scope(old.decode())
        except StoreUnavailableError:
            return

    async def _delete_scope(self, scope: str) -> None:
        listed = self._add_prefix(scope + _KEY_LIST)
        keys: list[bytes] = await self._send_command("SMEMBERS", listed)
        await self._send_command("UNLINK", listed, *keys)
        note = derive_tenant_key(scope)
        if note is not None:  # of another slot
            await self._send_command("UNLINK", self._add_prefix(note))

    async def _scan_keys(self, pattern: str) -> AsyncIterator[list[bytes]]:
        """Keys that match, from every server that keeps some."""
        for where in await self._list_masters():
            cursor: int | None = None
            while cursor != 0:
                found, keys = await self._send_command(
                    "SCAN", cursor or 0, "MATCH", pattern, "COUNT", _SCANNED_PER_COMMAND, **where
                )
                # A cluster's is by node.
                cursor = next(iter(found.values())) if isinstance(found, dict) else found
                yield keys

    async def _list_masters(self) -> list[dict[str, Any]]:
        """For each server that keeps keys, how a command is sent to it."""
        client = self._redis.client
        if not isinstance(client, RedisCluster):
            return [{}]
        await self.read([])  # finds the nodes, if nothing was asked before
        return [{"target_nodes": node} for node in client.get_primaries()]

    async def _unlink_keys(self, keys: Sequence[bytes]) -> int:
        """Forget these keys, wherever they are; how many of them were records and lists."""
        starts = range(0, len(keys), _KEYS_PER_COMMAND)
        gone = [
            each
            for at in starts
            for each in await self._run_pipeline("UNLINK", keys[at : at + _KEYS_PER_COMMAND])
        ]
        return sum(count for key, count in zip(keys, gone, strict=True) if not _INTERNAL_KEY.search(key))

    async def _read_batch(self, keys: Sequence[str]) -> list[bytes | None]:
        """In one round trip; of a cluster, where keys stand on several nodes, in one to each of them."""
        names = [self._add_prefix(key) for key in keys]
        if isinstance(self._redis.client, RedisCluster) and len(set(map(parse_hash_tag, keys))) > 1:
            return [value for (value,) in await self._run_pipeline("MGET", names)]
        return list(await self._send_command("MGET", *names))

    async def _run_pipeline(self, command: str, keys: Sequence[str | bytes]) -> list[Any]:
        """One command for each key, sent together."""
        if self._closed:
            raise StoreUnavailableError("store-closed")
        pipeline = self._redis.client.pipeline(transaction=False)
        for key in keys:
            pipeline.execute_command(command, key)
        try:
            async with self._slots:
                return list(await pipeline.execute())
        except FAILURES as error:
            raise to_store_unavailable(error) from error
