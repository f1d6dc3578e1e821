"""Lists the keys of the configuration, and finds their types and what a new configuration changes.

Suggests keys for wrong names.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from operator import attrgetter
from typing import Any, get_args, get_origin

from pydantic import BaseModel, SecretStr

from compaction_proxy.config.config import Config
from compaction_proxy.config.types import OnlyValue, mask_passwords, unwrap_type
from compaction_proxy.config.yaml_file import KeyPath


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """One key of the configuration.

    Attributes:
        path: Names from the outermost section down to the key.
        value_type: Type of its value, without `| None`.
        default: Its default.
        description: Its meaning, with its unit.
        is_supported: False if this version accepts only the default.
        is_nullable: Whether it may be null.
    """

    path: KeyPath
    value_type: object
    default: object
    description: str
    is_supported: bool
    is_nullable: bool


def format_key_path(path: KeyPath) -> str:
    """Formats the path of a key as users read it, with dots."""
    return ".".join(map(str, path))


def get_section_type(value_type: object) -> type[BaseModel] | None:
    """Returns the type if it is a section, else None."""
    return value_type if isinstance(value_type, type) and issubclass(value_type, BaseModel) else None


def get_key_type(path: KeyPath) -> object | None:
    """Returns the type of the value at a path; None if there is no such path."""
    kind: object | None = Config
    for step in path:
        section = get_section_type(kind)
        if section is not None:
            field = section.model_fields.get(str(step))
            kind = unwrap_type(field.annotation) if field else None
        else:
            inner = get_args(kind)
            kind = unwrap_type(inner[-1 if get_origin(kind) is dict else 0]) if inner else None
    return kind


def iter_keys(section: type[BaseModel] = Config, parent_path: KeyPath = ()) -> Iterator[ConfigKey]:
    """Yields every key in `section` and its nested sections, in order. Sections themselves are no keys.

    `parent_path` is the path of `section`. The path of each key begins with it.
    """
    for name, field in section.model_fields.items():
        place, kind = (*parent_path, name), unwrap_type(field.annotation)
        nested = get_section_type(kind)
        if nested is not None and isinstance(field.default, nested):
            yield from iter_keys(nested, place)
        else:
            is_supported = not any(isinstance(mark, OnlyValue) for mark in field.metadata)
            nullable = type(None) in get_args(field.annotation)
            yield ConfigKey(place, kind, field.default, field.description or "", is_supported, nullable)


def suggest_key(path: KeyPath) -> str:
    """Returns `, did you mean 'x'?` for a path that does not exist, or an empty text.

    The suggestion replaces the first wrong name in the path. If the wrong name is a key with an ending, such
    as a unit (`trigger_tokens`), that key (`trigger`) is suggested rather than another one of similar name.
    """
    wrong = next((k for k in range(len(path)) if get_key_type(path[: k + 1]) is None), len(path) - 1)
    section, word = get_section_type(get_key_type(path[:wrong])), str(path[wrong])
    names = tuple(section.model_fields) if section else ()
    longer = [name for name in names if word.startswith(f"{name}_")]
    close = longer or get_close_matches(word, names, n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def to_plain_value(value: object) -> object:
    """Converts a value to types that YAML and JSON can represent.

    Secrets are masked, but empty ones stay empty. A section keeps only the keys that are set in it.
    """
    if isinstance(value, SecretStr):
        return "********" if value.get_secret_value() else ""
    if isinstance(value, str):
        return mask_passwords(value)
    if isinstance(value, BaseModel):
        return {name: to_plain_value(inner) for name, inner in value if name in value.model_fields_set}
    if isinstance(value, dict):
        return {name: to_plain_value(inner) for name, inner in value.items()}
    if isinstance(value, tuple):
        return [to_plain_value(inner) for inner in value]
    return value


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
    names = [format_key_path(key.path) for key in iter_keys()]
    names = [name for name in names if attrgetter(name)(old) != attrgetter(name)(new)]
    waiting = [
        name
        for name in names
        if name.startswith(tuple(f"{each}." for each in RESTART_KEYS)) or name in RESTART_KEYS
    ]
    sections: dict[str, Any] = {}
    for name in waiting:
        section, key = name.split(".", 1)
        current = sections.get(section, getattr(new, section))
        sections[section] = current.model_copy(update={key: getattr(getattr(old, section), key)})
    config = new.model_copy(update=sections) if sections else new
    return ConfigChange(config, tuple(name for name in names if name not in waiting), tuple(waiting))
