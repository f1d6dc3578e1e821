"""Loads the configuration from a file, the environment and options. Reports all problems, one per line.

The environment variable `COMPACTION_PROXY__SECTION__KEY` sets the key `section.key`. For a secret,
`COMPACTION_PROXY__SECTION__KEY_FILE` gives the name of a file that contains the value.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, SecretStr, ValidationError

from compaction_proxy.config import validation, yaml_file
from compaction_proxy.config.config import (
    Config,
    ConfigKey,
    format_key_path,
    get_section_type,
    iter_keys,
    suggest_key,
)
from compaction_proxy.config.types import unwrap_type
from compaction_proxy.config.yaml_file import KeyPath
from compaction_proxy.core.errors import ConfigError

CONFIG_VARIABLE = "COMPACTION_PROXY_CONFIG"
DEFAULT_FILE = "config.yaml"
PREFIX = "COMPACTION_PROXY__"
FILE_SUFFIX = "_file"
REDIS_VARIABLE = "REDIS_URL"
MAX_SECRET_BYTES = 65_536
MODELS_PATH: KeyPath = ("models",)
ERROR_TEXTS = {
    "tuple_type": "expected a list",
    "dict_type": "expected a mapping",
    "model_type": "expected a mapping of keys",
    "model_attributes_type": "expected a mapping of keys",
}


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration and where its values come from.

    Attributes:
        config: The configuration. `store.url` is set, and the path in a SQLite URL is absolute.
        origins: Origin of each dotted key: `default`, `FILE:LINE`, `environment NAME`, or an option's name.
        path: The file that was read; None if there was none.
        warnings: Warnings about settings that are valid but probably not intended, one line each.
        is_empty: Whether the file is empty or holds only comments. False if there was no file.
        admin_key_path: File of the admin key that the proxy has made. None if it has made none.
        admin_key_problem: Why the proxy could not make an admin key; empty if it made one or needs none.
    """

    config: Config
    origins: Mapping[str, str]
    path: Path | None
    warnings: tuple[str, ...]
    is_empty: bool = False
    admin_key_path: Path | None = None
    admin_key_problem: str = ""

    def set_admin_key(self, key: str, path: Path) -> "LoadedConfig":
        """Returns this configuration with the admin key that the proxy has made and keeps in a file."""
        server = self.config.server.model_copy(update={"admin_key": SecretStr(key)})
        return replace(
            self,
            config=self.config.model_copy(update={"server": server}),
            origins={**self.origins, "server.admin_key": str(path)},
            admin_key_path=path,
        )


@dataclass(frozen=True, slots=True)
class ConfigOverride:
    """One value that is set outside the configuration file.

    Attributes:
        name: Name of the environment variable or command-line option that sets the value.
        path: The key that is set.
        value: The value.
    """

    name: str
    path: KeyPath
    value: object


def get_store_url_setting(origin: str) -> str:
    """Returns what a user changes to name another store: the key `store.url`, or `$REDIS_URL`.

    `origin` is the origin of `store.url` (`LoadedConfig.origins`).
    """
    return f"${REDIS_VARIABLE}" if origin == f"environment {REDIS_VARIABLE}" else "store.url"


# Maps the path of each value that is set to its source: `FILE:LINE:COLUMN`, or the name of an environment
# variable or an option.
Sources = dict[KeyPath, str]


def _decode_variable_text(text: str, key: ConfigKey | None) -> object:
    """Decodes the text of an environment variable.

    For a section (`key` is None), a list or a mapping, the text must be JSON. For a key that may be null, an
    empty text and `null` give None. Other texts are returned unchanged, because pydantic converts them later.

    Raises:
        ValueError: If the key needs JSON, and the text is not JSON.
    """
    if key is not None and key.is_nullable and text in {"", "null"}:
        return None
    if key is not None and (
        isinstance(key.default, str)
        or get_origin(key.value_type) is Literal
        or not (isinstance(key.default, dict | tuple) or hasattr(key.value_type, "__args__"))
    ):
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON at character {error.pos + 1}: {error.msg}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _is_secret(value_type: object) -> bool:
    """Returns whether the type of a key is a secret or a list of secrets."""
    return value_type is SecretStr or any(unwrap_type(inner) is SecretStr for inner in get_args(value_type))


def _read_secret(path: str) -> str:
    """Reads a secret from a file. Removes one newline at the end.

    Raises:
        ValueError: If the file cannot be read, is not UTF-8, is empty, or has more than `MAX_SECRET_BYTES`.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_SECRET_BYTES + 1)
        if len(data) > MAX_SECRET_BYTES:
            raise ValueError(f"the file is larger than {MAX_SECRET_BYTES:,} bytes")
        text = data.decode().removesuffix("\n")
    except OSError as error:
        raise ValueError(f"cannot read the file: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError("the file is not UTF-8") from None
    # A file that is not fully written yet looks empty, and so does a pipe that was already read. An empty
    # file is an error, because an empty key would give everybody access.
    if not text:
        raise ValueError("the file is empty")
    return text


def _parse_variable(
    name: str, environ: Mapping[str, str], keys: Mapping[KeyPath, ConfigKey]
) -> ConfigOverride:
    """Parses an environment variable whose name begins with `PREFIX`.

    Raises:
        ConfigError: If the variable cannot be used. The message never quotes its value.
    """
    place: KeyPath = tuple(name.removeprefix(PREFIX).lower().split("__"))
    secret = (*place[:-1], str(place[-1]).removesuffix(FILE_SUFFIX))
    is_file = secret != place and secret in keys and _is_secret(keys[secret].value_type)
    value_variable = name[: -len(FILE_SUFFIX)]
    try:
        if any(place == key[: len(place)] for key in keys):
            return ConfigOverride(name, place, _decode_variable_text(environ[name], keys.get(place)))
        if is_file and value_variable not in environ:
            text = _read_secret(environ[name])
            return ConfigOverride(name, secret, _decode_variable_text(text, keys[secret]))
    except ValueError as error:
        raise ConfigError(f"{name}: {format_key_path(place)}: {error}") from None
    if is_file:
        raise ConfigError(
            f"{name}: {format_key_path(secret)}: {value_variable} is also set; set only one of them"
        )
    right_name = _map_variable_names(keys).get(_merge_underscores(name))
    if place[0] == "models":
        problem = f"set all models as one JSON object in {PREFIX}MODELS"
    else:
        problem = f"unknown key{f', did you mean {right_name}?' if right_name else suggest_key(place)}"
    raise ConfigError(f"{name}: {format_key_path(place)}: {problem}")


def _merge_underscores(name: str) -> str:
    return re.sub("_+", "_", name)


def _map_variable_names(keys: Mapping[KeyPath, ConfigKey]) -> dict[str, str]:
    """Returns the names of the variables for all keys. Maps each name with single underscores to the name."""
    names = [PREFIX + "__".join(map(str, path)).upper() for path in keys]
    secrets = zip(names, keys.values(), strict=True)
    names += [name + FILE_SUFFIX.upper() for name, key in secrets if _is_secret(key.value_type)]
    return {_merge_underscores(name): name for name in names}


def _find_variable_warnings(environ: Mapping[str, str], keys: Mapping[KeyPath, ConfigKey]) -> Iterator[str]:
    """Yields a warning for each variable that is ignored because a single underscore follows the prefix.

    Other unknown names with this beginning are left alone. For example, Kubernetes sets the variable
    `COMPACTION_PROXY_SERVICE_HOST` if there is a service `compaction-proxy`.
    """
    beginning = PREFIX.removesuffix("_")
    unread = [name for name in sorted(environ) if name.startswith(beginning) and not name.startswith(PREFIX)]
    right_names = _map_variable_names(keys) if unread else {}
    for name in unread:
        right_name = right_names.get(_merge_underscores(name))
        if right_name is not None:
            yield f"{name}: ignored; the correct name of this variable is {right_name}"


def _iter_leaf_values(path: KeyPath, value: object) -> Iterator[tuple[KeyPath, object]]:
    """Yields each value inside nested mappings, with its path.

    An entry of `models` counts as a single value, because an override replaces it as a whole.
    """
    if isinstance(value, dict) and value and (path[:1] != MODELS_PATH or path == MODELS_PATH):
        for name, inner in value.items():
            yield from _iter_leaf_values((*path, name), inner)
    else:
        yield path, value


def _put_value(values: dict[str, Any], path: KeyPath, value: object) -> None:
    """Sets the value at a path in nested mappings, and adds mappings that are missing on the path.

    A new entry of `models` comes before the existing entries, because the first glob that matches wins.
    """
    *parents, last = map(str, path)
    for name in parents:
        inner = values.get(name)
        values[name] = inner if isinstance(inner, dict) else {}
        values = values[name]
    if tuple(parents) == MODELS_PATH:
        rest = {name: inner for name, inner in values.items() if name != last}
        values.clear()
        values.update({last: value, **rest})
    else:
        values[last] = value


def _apply_override(override: ConfigOverride, values: dict[str, Any], sources: Sources) -> None:
    """Sets the values of one override in `values`, and records the override's name as their source."""
    for place, value in reversed(list(_iter_leaf_values(override.path, override.value))):
        _put_value(values, place, value)
        for nested in [path for path in sources if path[: len(place)] == place]:
            del sources[nested]
        sources[place] = override.name


def _describe_origin(source: str) -> str:
    """Returns the origin of a value from its source, in the form that `LoadedConfig.origins` has."""
    if source.startswith(PREFIX):
        return f"environment {source}"
    return source.rpartition(":")[0] or source  # without the column


def _find_origins(keys: Iterable[KeyPath], sources: Sources) -> dict[str, str]:
    """Returns the origin of the value of each key.

    If several sources set parts of a value, its origin is the first of them.
    """
    first_sources: dict[KeyPath, str] = {}
    for path, source in sources.items():
        for length in range(len(path) + 1):
            first_sources.setdefault(path[:length], source)
    return {format_key_path(key): _describe_origin(first_sources.get(key, "default")) for key in keys}


def _drop_empty_sections(values: Mapping[str, Any], section: type[BaseModel] = Config) -> dict[str, Any]:
    """Returns the values without null sections, because YAML reads `server:` without keys as null."""
    filled: dict[str, Any] = {}
    for name, value in values.items():
        field = section.model_fields.get(name)
        kind = get_section_type(unwrap_type(field.annotation)) if field else None
        if value is None and field is not None and field.default is not None and (kind or name == "models"):
            continue
        filled[name] = _drop_empty_sections(value, kind) if kind and isinstance(value, dict) else value
    return filled


def _describe_error(error: Any) -> str:  # noqa: ANN401 - pydantic's ErrorDetails
    """Describes an error that pydantic found. The text leaves out the value, because it may be a secret."""
    if error["type"] == "extra_forbidden":
        return f"unknown key{suggest_key(error['loc'])}"
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    text: str = ERROR_TEXTS.get(error["type"], error["msg"])
    if isinstance(error["input"], bool) and error["type"] in {"literal_error", "string_type"}:
        text += " (YAML reads a bare on, off, yes or no as true or false)"
    return text


def _format_problem(place: KeyPath, problem: str, sources: Sources) -> str:
    """Formats a problem with a key as one line.

    If the key is set, the line begins with the source that sets it. Otherwise it begins with the source of
    the nearest section around the key, if that section is set.
    """
    parents = (place[:end] for end in range(len(place), 0, -1))
    source = next((f"{sources[each]}: " for each in parents if each in sources), "")
    return f"{source}{format_key_path(place)}: {problem}"


def _validate_values(
    values: Mapping[str, Any],
    sources: Sources,
    environ: Mapping[str, str],
    earlier_problems: list[str],
) -> Config:
    """Validates the values, and returns the configuration with the resolved `store.url`.

    Raises:
        ConfigError: If the configuration has problems. The message lists the `earlier_problems`, which were
            found while the sources were read, before those found here.
    """
    found: list[tuple[KeyPath, str]] = []
    try:
        config = Config.model_validate(_drop_empty_sections(values))
        try:
            store = config.store.model_copy(update={"url": validation.resolve_store_url(config, environ)})
            config = config.model_copy(update={"store": store})
        except ValueError as error:
            found.append((("store", "url"), str(error)))
        found = [*validation.find_problems(config), *found]
    except ValidationError as invalid:
        found = [(error["loc"], _describe_error(error)) for error in invalid.errors()]
    lines = [_format_problem(place, what, sources) for place, what in found]
    if problems := [*earlier_problems, *lines]:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    return config


def load_config(
    path: Path | None, environ: Mapping[str, str], options: Iterable[ConfigOverride] = ()
) -> LoadedConfig:
    """Loads the configuration from a file, the environment and options.

    The environment overrides the file, and options override both. If `path` is None, the environment variable
    `COMPACTION_PROXY_CONFIG` names the file. If it is not set, the file is `./config.yaml` if it exists.
    Without a file, the values come only from the environment, the options and the defaults.

    Raises:
        ConfigError: If the configuration cannot be used. The message has one line for each problem.
    """
    variable, default = environ.get(CONFIG_VARIABLE), Path(DEFAULT_FILE)
    file = path or (Path(variable) if variable else default if default.exists() else None)
    values: dict[str, Any] = {}
    sources: Sources = {}
    problems: list[str] = []
    empty = False
    if file is not None:
        document = yaml_file.read_yaml(file, environ)
        values, empty = document.values, document.is_empty
        sources = {place: f"{file}:{line}:{column}" for place, (line, column) in document.positions.items()}
        problems += [f"{file}:{line}:{column}: {what}" for line, column, what in document.problems]
    keys = {key.path: key for key in iter_keys()}
    # Variables for whole sections come first, so that a variable for a single key overrides them.
    for name in sorted(environ, key=lambda name: (name.count("__"), name)):
        if name.startswith(PREFIX):
            try:
                _apply_override(_parse_variable(name, environ, keys), values, sources)
            except ConfigError as error:
                problems.append(str(error))
    for option in options:
        _apply_override(option, values, sources)
    config = _validate_values(values, sources, environ, problems)
    origins = _find_origins(keys, sources)
    if (values.get("store") or {}).get("url") is None and environ.get(REDIS_VARIABLE):
        origins["store.url"] = f"environment {REDIS_VARIABLE}"
    warnings = (*_find_variable_warnings(environ, keys), *validation.find_warnings(config))
    return LoadedConfig(config, origins, file, warnings, empty)
