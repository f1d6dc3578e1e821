"""From `store.url` to a store, and to the installation's secret, which lives in it or beside its file.

The secret keys the digests that tell tenants apart, so replicas that share a store must share it. In a shared
store it has no time to live: it says nothing of any user, a new one would orphan everything stored, and the
`volatile` eviction policies leave alone what does not expire.
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
_REDIS = "compaction_proxy.storage.redis.store:RedisStore"  # by name: its library takes 6 MB
SECRET_KEY = "v1:secret"  # noqa: S105 - where it is, not what it is
"""In a shared store; the only key outside any scope."""
NO_SECRET = "secret-unavailable"  # noqa: S105 - a reason
"""The reason where there is a secret, or a place for one, that cannot be used."""


def is_shared_store(url: str) -> bool:
    """Whether the processes of several machines can share this store."""
    return is_redis_url(url)


def get_store_path(url: str) -> Path | None:
    """The file of an embedded store, None where there is none. `sqlite:///~/…` starts at the home directory.

    Raises:
        ConfigError: This version has no such store.
    """
    scheme, separator, rest = url.partition("://")
    if is_shared_store(url) or (separator and scheme == "memory" and rest in {"", "/"}):
        return None
    if not separator or scheme != "sqlite":
        # Of the URL only the scheme is shown: what follows may hold a password.
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
    """The store that `store.url` names. Nothing is opened yet.

    Raises:
        ConfigError: This version has no such store.
    """
    if is_shared_store(url):
        store: Store = resolve_name(_REDIS)(parse_redis_url(url))
        return store
    path = get_store_path(url)
    return MemoryStore() if path is None else SqliteStore(path)


def get_secret_path(url: str) -> Path | None:
    """Where the installation's secret is kept, None if it lives no longer than the process."""
    path = get_store_path(url)
    return None if path is None else path.with_name(path.name + ".secret")


def load_installation_secret(url: str, report: Callable[[StoreUnavailableError], None]) -> bytes:
    """The installation's secret, 32 bytes, made by whichever process asks first.

    Where it can be neither read nor made it is random and lives as long as the process, like one for a store
    in memory, and `report` is told; so it is for a shared store until `load_shared_secret` answers. Does
    blocking I/O; meant for start-up.
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
    """The secret of all who share `store`: the first that one of them offered, such as `offered_secret`.

    Offering it again does no harm, and puts it back where the store has lost it.

    Raises:
        StoreUnavailable: The store cannot be asked, or something else stands in the secret's place.
    """
    standing = await store.commit(Record(SECRET_KEY, offered_secret, math.inf))
    if standing is None or len(standing) != SECRET_BYTES:
        raise StoreUnavailableError(NO_SECRET, "the store holds something else in its place")
    return standing


def _read_secret(path: Path) -> bytes:
    """The secret in a file; ValueError if it holds none. A pipe is not opened: that waits for a writer."""
    secret = bytes.fromhex(path.read_text(encoding="ascii")) if path.is_file() else b""
    if len(secret) != SECRET_BYTES:
        raise ValueError
    return secret


def _create_secret(path: Path) -> None:
    """Write a secret unless there is one. A link to a finished file makes it appear whole or not at all."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)  # of mode 0600
    finished = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(SECRET_BYTES) + "\n")
        path.hardlink_to(finished)
    except FileExistsError:
        return
    finally:
        finished.unlink()
