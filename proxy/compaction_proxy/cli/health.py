"""Checks whether a running proxy is ready, at little cost, because container engines check every few seconds.

The module imports neither the other commands nor the model of the configuration. Both take several times as
long to load as the check itself takes.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from compaction_proxy.cli.admin_client import AdminClient, check_ready, create_local_client
from compaction_proxy.core.errors import ConfigError

_CONFIG_VARIABLE, _DEFAULT_FILE = "COMPACTION_PROXY_CONFIG", "config.yaml"
_SECTION_VARIABLE = "COMPACTION_PROXY__SERVER"
_MAX_PORT = 65_535


class ServerAddress(NamedTuple):
    """The keys of the section `server` that say where a proxy listens, with their defaults."""

    host: str = "127.0.0.1"
    port: int = 4141
    unix_socket: str | None = None
    tls_certificate: str | None = None
    base_path: str = ""


def check_health(client: AdminClient) -> int:
    """Prints whether a proxy is ready. Returns the exit code: 0 if it is, else 1."""
    is_ready, report = check_ready(client)
    print(report)
    return 0 if is_ready else 1


def find_local_client(environ: Mapping[str, str]) -> AdminClient | None:
    """Finds the proxy that runs on this machine, by the configuration file and the environment.

    Reads only the keys of `ServerAddress`. Returns None if they do not say where the proxy listens, or if the
    file cannot be used. The whole configuration then has to be loaded, which reports all problems.
    """
    try:
        values = ServerAddress()._asdict() | _read_keys(environ)
    except (ConfigError, ValueError):
        return None
    match values:
        case {
            "host": str(),
            "port": int(port),
            "unix_socket": str() | None,
            "tls_certificate": str() | None,
            "base_path": str(),
        } if 0 < port <= _MAX_PORT:
            return create_local_client(ServerAddress(**values))
    return None


def _read_keys(environ: Mapping[str, str]) -> dict[str, object]:
    """Reads the keys of `ServerAddress` that the file and the environment set. Checks no values.

    Raises:
        ConfigError: If the file cannot be read.
        ValueError: If the file has problems, if the port is not a number, or if one variable holds the whole
            section.
    """
    values: dict[str, object] = {}
    file = environ.get(_CONFIG_VARIABLE) or (_DEFAULT_FILE if Path(_DEFAULT_FILE).exists() else None)
    if file is not None:
        from compaction_proxy.config.yaml_file import read_yaml

        document = read_yaml(Path(file), environ)
        section = document.values.get("server") or {}
        if document.problems or not isinstance(section, dict):
            raise ValueError(file)
        values = {name: section[name] for name in ServerAddress._fields if name in section}
    for name, text in environ.items():
        key = name.removeprefix(_SECTION_VARIABLE).removeprefix("__").lower()
        if name.startswith(_SECTION_VARIABLE) and not key:
            raise ValueError(name)
        if name.startswith(f"{_SECTION_VARIABLE}__") and key in ServerAddress._fields:
            is_null = ServerAddress._field_defaults[key] is None and text in {"", "null"}
            values[key] = None if is_null else text
    if isinstance(values.get("port"), str):  # from a variable
        values["port"] = int(str(values["port"]))
    return values
