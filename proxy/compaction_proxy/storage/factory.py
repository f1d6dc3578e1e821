"""Creates the store that `store.url` names, and loads the installation's secret.

The secret is the key of the digests that identify tenants, so replicas that share a store must share the
secret. If the store is a server (Redis), the secret is a record in it. If the store is an SQLite file, the
secret is in another file next to it. With a store in memory, each process uses a random secret.

In a shared store, the secret does not expire, for three reasons. It contains no user data. With a new secret,
no stored data could be found again. And the `volatile-…` eviction policies of Redis evict only keys that
expire.
"""

import math
import os
import secrets
import stat
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
_MAX_SECRET_CHARACTERS = 1_024
_REDIS = "compaction_proxy.storage.redis.store:RedisStore"  # imported if used, as it takes 6 MB of memory
SECRET_KEY = "v1:secret"  # noqa: S105 - the name of the record, not the secret
"""The key of the secret in a shared store. It is the only key that belongs to no scope (`storage.keys`)."""
NO_SECRET = "secret-unavailable"  # noqa: S105 - a reason
"""The error reason if the secret can be neither read nor created."""


def is_shared_store(url: str) -> bool:
    """Returns whether the processes of several machines can share the store with this URL."""
    return is_redis_url(url)


def get_store_path(url: str) -> Path | None:
    """Returns the file of an SQLite store, or None for a shared store or a store in memory.

    A path that begins with `~` (`sqlite:///~/…`) is relative to the home directory.

    Raises:
        ConfigError: If the URL names no supported kind of store, or an SQLite store without a usable file
            name.
    """
    scheme, separator, rest = url.partition("://")
    if is_shared_store(url) or (separator and scheme == "memory" and rest in {"", "/"}):
        return None
    if not separator or scheme != "sqlite":
        # The message shows only the scheme of the URL: the rest may contain a password.
        name = f"'{scheme}://'" if separator else "a URL without '://'"
        raise ConfigError(f"store.url: {name} is not supported; use sqlite:///, redis:// or memory://")
    if not rest.startswith("/") or rest in {"/", "/:memory:"} or rest.endswith("/"):
        raise ConfigError(
            "store.url: add a file: sqlite:///relative.db, sqlite:////absolute.db or sqlite:///~/state.db"
        )
    try:
        return Path(rest[1:]).expanduser()
    except RuntimeError as error:
        raise ConfigError("store.url: '~' has no home directory; use an absolute path") from error


def open_store(url: str) -> Store:
    """Creates the store that `store.url` names. Opens no file or connection yet.

    Raises:
        ConfigError: If the URL is not valid or names no supported kind of store.
    """
    if is_shared_store(url):
        store: Store = resolve_name(_REDIS)(parse_redis_url(url))
        return store
    path = get_store_path(url)
    return MemoryStore() if path is None else SqliteStore(path)


def get_secret_path(url: str) -> Path | None:
    """Returns the file of the installation's secret, or None if the secret is not kept in a file."""
    path = get_store_path(url)
    return None if path is None else path.with_name(path.name + ".secret")


def load_installation_secret(url: str, report: Callable[[StoreUnavailableError], None]) -> bytes:
    """Returns the installation's secret of 32 bytes from its file. Creates the file if it does not exist.

    If the secret can be neither read nor created, passes the error to `report` and returns a random secret.
    Also returns a random secret for a store in memory and for a shared store. For a shared store, the caller
    then uses the secret that `load_shared_secret` returns.

    This function does blocking I/O. Call it at start-up.
    """
    path = get_secret_path(url)
    if path is None:
        return secrets.token_bytes(SECRET_BYTES)
    try:
        if not path.exists():
            create_secret_file(path)
        return read_secret_file(path)
    except OSError as error:
        report(StoreUnavailableError(NO_SECRET, error.strerror or "the file with the secret cannot be used"))
    except ValueError as error:
        report(StoreUnavailableError(NO_SECRET, f"the file with the secret cannot be used: {error}"))
    return secrets.token_bytes(SECRET_BYTES)


async def load_shared_secret(store: Store, offered_secret: bytes) -> bytes:
    """Returns the secret of all processes that share `store`.

    If the store has a secret, returns this secret. Otherwise stores and returns `offered_secret`. The store
    may lose the secret later. Call this function regularly with the returned secret, to store it again.

    Raises:
        StoreUnavailableError: If the store does not answer, or the value under `SECRET_KEY` is not a secret.
    """
    stored = await store.commit(Record(SECRET_KEY, offered_secret, math.inf))
    if stored is None or len(stored) != SECRET_BYTES:
        raise StoreUnavailableError(NO_SECRET, "the store has an invalid value in its place")
    return stored


def read_secret_file(path: Path, *, must_be_private: bool = False) -> bytes:
    """Returns the secret of 32 bytes in a file.

    Opens only a regular file, because opening a pipe would wait for a writer.

    Args:
        path: The file.
        must_be_private: Whether to refuse a file that belongs to another user or that every user may read.

    Raises:
        ValueError: If the file does not contain a secret, or is refused.
        OSError: If the file cannot be read.
    """
    if not path.is_file():
        raise ValueError("it is not a regular file")
    with path.open(encoding="ascii") as file:
        status = os.fstat(file.fileno())
        is_foreign = hasattr(os, "geteuid") and status.st_uid != os.geteuid()
        if must_be_private and (is_foreign or status.st_mode & stat.S_IRWXO):
            raise ValueError("it belongs to another user, or other users can read it")
        try:
            secret = bytes.fromhex(file.read(_MAX_SECRET_CHARACTERS))
        except ValueError:  # of the decoder, too, whose text would show a byte of the file
            secret = b""
    if len(secret) != SECRET_BYTES:
        raise ValueError("it is damaged")
    return secret


def create_secret_file(path: Path) -> None:
    """Writes a new secret to `path`, unless the file exists.

    The secret is written to a temporary file, to which `path` is then linked. Therefore no process can read
    an incomplete secret.
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
