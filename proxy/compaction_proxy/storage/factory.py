"""Opens the store that `store.url` names, and loads the installation's secret.

The secret is kept in a shared store or beside the file of an embedded one. It is the key of the digests that
identify tenants, so replicas that share a store must share it. In a shared store it has no time to live, for
three reasons. It says nothing about any user. With a new secret, nothing that is stored could be found again.
And the `volatile-…` eviction policies of Redis do not evict keys without a time to live.
"""

import math
import os
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name

from compaction_proxy.core.errors import ConfigError, StoreUnavailableError
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.redis.url import is_redis_url, parse_redis_url
from compaction_proxy.storage.sqlite.store import SqliteStore
from compaction_proxy.storage.store import Record, Store

SECRET_BYTES = 32
_REDIS = "compaction_proxy.storage.redis.store:RedisStore"  # imported if used: it takes 6 MB of memory
SECRET_KEY = "v1:secret"  # noqa: S105 - the name of the record, not the secret
"""The key of the secret in a shared store. It is the only key that belongs to no scope (`storage.keys`)."""
NO_SECRET = "secret-unavailable"  # noqa: S105 - a reason
"""The error reason if the secret can be neither read nor created."""


def is_shared_store(url: str) -> bool:
    """Whether the processes of several machines can share this store."""
    return is_redis_url(url)


def get_store_path(url: str) -> Path | None:
    """Returns the file of an embedded store, or None for another store.

    `sqlite:///~/…` starts at the home directory.

    Raises:
        ConfigError: This version does not support the store.
    """
    scheme, separator, rest = url.partition("://")
    if is_shared_store(url) or (separator and scheme == "memory" and rest in {"", "/"}):
        return None
    if not separator or scheme != "sqlite":
        # The message shows only the scheme of the URL: the rest may contain a password.
        name = f"'{scheme}://'" if separator else "a URL without '://'"
        raise ConfigError(f"store.url: no store for {name}; there are sqlite:///, redis:// and memory://")
    if not rest.startswith("/") or rest in {"/", "/:memory:"} or rest.endswith("/"):
        raise ConfigError(
            "store.url: name a file, as in sqlite:///relative.db, sqlite:////absolute.db or sqlite:///~/state.db"
        )
    try:
        return Path(rest[1:]).expanduser()
    except RuntimeError as error:
        raise ConfigError("store.url: there is no home directory for '~'; give an absolute path") from error


def open_store(url: str) -> Store:
    """Creates the store that `store.url` names. Opens no file or connection yet.

    Raises:
        ConfigError: This version does not support the store.
    """
    if is_shared_store(url):
        store: Store = resolve_name(_REDIS)(parse_redis_url(url))
        return store
    path = get_store_path(url)
    return MemoryStore() if path is None else SqliteStore(path)


def get_secret_path(url: str) -> Path | None:
    """Returns the file of the installation's secret, or None if the secret is kept in no file."""
    path = get_store_path(url)
    return None if path is None else path.with_name(path.name + ".secret")


def load_installation_secret(url: str, report: Callable[[StoreUnavailableError], None]) -> bytes:
    """Loads the installation's secret of 32 bytes. The first process that asks creates it.

    If the secret can be neither read nor created, `report` receives the error, and this process uses a random
    secret until it ends. For a store in memory the secret is always random. For a shared store it is random
    until `load_shared_secret` returns. This function does blocking I/O; call it at start-up.
    """
    path = get_secret_path(url)
    if path is None:
        return secrets.token_bytes(SECRET_BYTES)
    try:
        if not path.exists():
            _create_secret(path)
        return _read_secret(path)
    except OSError as error:
        report(StoreUnavailableError(NO_SECRET, error.strerror or "the secret's file cannot be used"))
    except ValueError:
        report(StoreUnavailableError(NO_SECRET, "the secret's file is damaged"))
    return secrets.token_bytes(SECRET_BYTES)


async def load_shared_secret(store: Store, offered_secret: bytes) -> bytes:
    """Returns the secret of all processes that share `store`: the first one that any of them offered.

    `offered_secret` is this process's offer. The offer may be repeated: the store keeps the secret that it
    has, and stores the offered secret if it has lost its own.

    Raises:
        StoreUnavailableError: The store does not answer, or the record of the secret contains something else.
    """
    stored = await store.commit(Record(SECRET_KEY, offered_secret, math.inf))
    if stored is None or len(stored) != SECRET_BYTES:
        raise StoreUnavailableError(NO_SECRET, "the store holds something else in its place")
    return stored


def _read_secret(path: Path) -> bytes:
    """Reads the secret from a file; raises ValueError if the file does not contain one.

    Only a regular file is opened, because opening a pipe would wait for a writer.
    """
    secret = bytes.fromhex(path.read_text(encoding="ascii")) if path.is_file() else b""
    if len(secret) != SECRET_BYTES:
        raise ValueError
    return secret


def _create_secret(path: Path) -> None:
    """Writes a secret unless there is one.

    The secret is written to a temporary file, which is then linked to `path`. So no process can read an
    incomplete secret.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)  # created with mode 0600
    finished = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(SECRET_BYTES) + "\n")
        path.hardlink_to(finished)
    except FileExistsError:
        return
    finally:
        finished.unlink()
