"""Compares a new configuration with the running one: what takes effect, and what waits for a restart."""

from dataclasses import dataclass
from functools import reduce
from typing import Any

from compaction_proxy.config.config import Config
from compaction_proxy.config.keys import format_key_path, iter_keys

# Keys and sections that are read only when a process starts, because they configure what is set up once, such
# as sockets and the store. A change of them takes effect with the next start.
RESTART_KEYS = (
    "server.host", "server.port", "server.unix_socket", "server.tls_certificate", "server.tls_key",
    "server.secret", "server.previous_secrets", "server.workers", "server.accept_grace_s", "server.drain_s",
    "server.max_inflight_bytes", "server.max_in_flight", "server.head_timeout_s", "server.body_timeout_s",
    "server.send_timeout_s", "store", "archive", "upstream.engine", "observability",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """What a new configuration changes.

    Attributes:
        config: The configuration to run with: the new one, but with the old values of the keys in
            `waiting_for_restart`.
        changed: Dotted keys that take effect now.
        waiting_for_restart: Dotted keys that take effect with the next start.
    """

    config: Config
    changed: tuple[str, ...]
    waiting_for_restart: tuple[str, ...]


def compare_configs(old: Config, new: Config) -> ConfigChange:
    """Compares two configurations and returns the change from the old one to the new one."""
    names = [
        format_key_path(key.path)
        for key in iter_keys()
        if _get_value(old, key.path) != _get_value(new, key.path)
    ]
    waiting = tuple(name for name in names if _needs_restart(name))
    changed = tuple(name for name in names if not _needs_restart(name))
    return ConfigChange(_restore_old_values(old, new, waiting), changed, waiting)


def _get_value(config: Config, path: tuple[str | int, ...]) -> object:
    return reduce(getattr, map(str, path), config)


def _needs_restart(name: str) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in RESTART_KEYS)


def _restore_old_values(old: Config, new: Config, names: tuple[str, ...]) -> Config:
    """Returns the new configuration with the old values of the dotted keys in `names`."""
    sections: dict[str, Any] = {}
    for name in names:
        section, key = name.split(".", 1)
        current = sections.get(section, getattr(new, section))
        sections[section] = current.model_copy(update={key: getattr(getattr(old, section), key)})
    return new.model_copy(update=sections) if sections else new
