"""Checks the store: access to it, its permissions, the free disk space and the secret for tenant ids."""

import asyncio
import os
import secrets
import shutil
import stat
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from compaction_proxy.cli.doctor.command import ERROR, NOTE, OK, WARNING, Finding
from compaction_proxy.config.config import Config
from compaction_proxy.config.types import mask_passwords
from compaction_proxy.core.errors import ConfigError, StoreUnavailableError
from compaction_proxy.runtime import TenantSecret, open_configured_store
from compaction_proxy.storage.factory import get_secret_path, get_store_path, is_shared_store
from compaction_proxy.storage.store import Record, Store

DEADLINE_S = 5.0
# The store counts as slow if a write and a read take more seconds than this. A request waits at most 0.25 s
# for the store, and then continues without it.
SLOW_S = 0.1
# Free disk space, in bytes, below which there is a warning or an error. A store file takes up to 1 GiB, and
# its write-ahead log as much again.
LOW_SPACE_BYTES = 2 * 1024**3
NO_SPACE_BYTES = 64 * 1024**2
PROBE_TTL_S = 10.0
# Maps the reason of a store failure to its fix. Failures with other reasons get a default fix.
_FIXES = {"store-corrupt": "move the file away, or restore it; another is made, and conversations go on"}
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


async def check_store(config: Config) -> AsyncIterator[Finding]:
    """Runs all checks of the store.

    If the store file does not exist yet, only its disk is checked, and the file is not created.
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
    """Checks a store file and the file of its secret: free space on the disk, permissions and size."""
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
    """Checks whether a record can be written and read back, and how long that takes."""
    key, value = f"v1:doctor:{{{secrets.token_hex(8)}}}", secrets.token_bytes(16)
    started_at = time.monotonic()
    try:
        async with asyncio.timeout(DEADLINE_S):
            await store.write([Record(key, value, PROBE_TTL_S)])
            is_same = await store.read([key]) == [value]
    except TimeoutError:
        return Finding(
            ERROR, "store", f"{display_url}: no answer in {DEADLINE_S:g} s", "look at the store's machine"
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
    """Checks whether all proxies that share the store use the same secret.

    Tenant ids are derived from the secret. With different secrets, proxies do not find each other's records.
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
