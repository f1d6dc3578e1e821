"""Makes and finds the admin key of a proxy on a loopback address for which none is configured.

A request from this machine is not always one of its user: a reverse proxy, a tunnel and `kubectl
port-forward` send requests of others from this machine, and other users of the machine can send requests,
too. Therefore the proxy makes a key when it starts for the first time, and keeps it in a file beside the
store, which only its user can read. Commands of the same user read the key from this file.

Beside a shared store, there is no place that all replicas can read, so the proxy makes no key.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from compaction_proxy.config.config import Config
from compaction_proxy.config.loader import LoadedConfig
from compaction_proxy.config.sections import ServerSection
from compaction_proxy.config.validation import MEMORY, find_default_store_path, is_bound_to_loopback
from compaction_proxy.core.errors import ProxyError
from compaction_proxy.storage.factory import (
    create_secret_file,
    get_store_path,
    is_shared_store,
    read_secret_file,
)


class AdminKeyError(ProxyError):
    """Reports that the proxy can make no admin key."""


def find_key_path(config: Config, environ: Mapping[str, str]) -> Path:
    """Returns the file in which the proxy keeps the admin key that it makes.

    The file is beside that of the store. For a store in memory, it is where the store would be by default.

    Raises:
        AdminKeyError: If there is no such place.
    """
    url = config.store.url or MEMORY
    if is_shared_store(url):
        raise AdminKeyError("the proxy generates no key if replicas share the store")
    path = get_store_path(url) or find_default_store_path(environ)
    if path is None:
        raise AdminKeyError("this user has no data folder for a key")
    return path.with_name(f"{path.name}.admin_key")


def add_admin_key(
    loaded: LoadedConfig, environ: Mapping[str, str] = os.environ, *, running: ServerSection | None = None
) -> LoadedConfig:
    """Returns the configuration with the admin key of this installation. Makes the key if there is none.

    Returns the configuration unchanged if a key is configured, or if the proxy does not listen on a loopback
    address. If no key can be made, the result says why (`admin_key_problem`).

    Args:
        loaded: The configuration.
        environ: The environment variables.
        running: The settings with which the proxy runs, if it reads its configuration again. It goes on to
            listen on their address, whatever `loaded` names.
    """
    server = loaded.config.server
    if server.admin_key.get_secret_value() or not is_bound_to_loopback(running or server):
        return loaded
    try:
        path = find_key_path(loaded.config, environ)
        key = load_or_create_key(path)
    except AdminKeyError as error:
        return replace(loaded, admin_key_problem=str(error))
    return loaded.set_admin_key(key, path)


def load_or_create_key(path: Path) -> str:
    """Returns the admin key in a file. Makes the key if the file does not exist.

    Raises:
        AdminKeyError: If no key can be made, or if the file holds none that the proxy may take.
    """
    try:
        if not path.exists():
            create_secret_file(path)
        return read_secret_file(path, must_be_private=True).hex()
    except OSError as error:
        raise AdminKeyError(
            f"the proxy cannot save a key next to the store: {error.strerror or error}"
        ) from error
    except ValueError as error:
        raise AdminKeyError(f"the proxy cannot use the key file next to the store: {error}") from error


def read_admin_key(config: Config, environ: Mapping[str, str] = os.environ) -> str:
    """Returns the admin key of a proxy with this configuration: the configured one, else the one it has made.

    Returns an empty text if no key is configured, and none was made or this user cannot read it.
    """
    server = config.server
    if server.admin_key.get_secret_value() or not is_bound_to_loopback(server):
        return server.admin_key.get_secret_value()
    try:
        return read_secret_file(find_key_path(config, environ)).hex()
    except (AdminKeyError, OSError, ValueError):
        return ""
