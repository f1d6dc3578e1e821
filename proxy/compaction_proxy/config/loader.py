"""Loads the configuration from file, environment and options, and reports every problem, one per line.

The environment has variables `COMPACTION_PROXY__SECTION__KEY`, and `…__KEY_FILE`, which name files.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, SecretStr, ValidationError

from compaction_proxy.config import validation, yaml_file
from compaction_proxy.config.config import Config
from compaction_proxy.config.keys import ConfigKey, format_key_path, get_section_type, iter_keys, suggest_key
from compaction_proxy.config.types import unwrap_type
from compaction_proxy.config.yaml_file import KeyPath
from compaction_proxy.core.errors import ConfigError

CONFIG_VARIABLE = "COMPACTION_PROXY_CONFIG"
DEFAULT_FILE = "config.yaml"
PREFIX = "COMPACTION_PROXY__"
FILE_SUFFIX = "_file"
MAX_SECRET_BYTES = 65_536
MODELS_PATH: KeyPath = ("models",)
ERROR_TEXTS = {
    "tuple_type": "a list is needed",
    "dict_type": "a mapping is needed",
    "model_type": "a mapping of keys is needed",
    "model_attributes_type": "a mapping of keys is needed",
}


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration and where its values come from.

    Attributes:
        config: The configuration. `store.url` is filled in and absolute.
        origins: Origin of each dotted key: `default`, `FILE:LINE`, `environment NAME`, or an option's name.
        path: The file that was read; None if there was none.
        warnings: Settings that work but are probably not intended, one line each.
        is_empty: Whether the file is empty or holds only comments. False if there was no file.
    """

    config: Config
    origins: Mapping[str, str]
    path: Path | None
    warnings: tuple[str, ...]
    is_empty: bool = False


@dataclass(frozen=True, slots=True)
class ConfigOverride:
    """One value that is set outside the configuration file.

    Attributes:
        name: Name of the environment variable or command-line option that sets the value.
        path: The key that is set.
        value: The value, if `problem` is empty.
        problem: What is wrong with the value; it never quotes the value.
    """

    name: str
    path: KeyPath
    value: object = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class _ValueSource:
    """The place where a value was set.

    Attributes:
        location: The place as errors name it, with line and column if it is in a file.
        short_name: The place as `LoadedConfig.origins` names it.
    """

    location: str
    short_name: str


def _decode_variable_text(text: str, key: ConfigKey | None) -> object:
    """Returns the value that the text of a variable stands for.

    The text of a section (`key` is None), a list or a mapping is JSON. Other texts are returned unchanged,
    because pydantic converts them later.

    Raises:
        ValueError: The key needs JSON, and the text is not JSON.
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
    """Returns whether a key holds a secret or a list of secrets."""
    return value_type is SecretStr or any(unwrap_type(inner) is SecretStr for inner in get_args(value_type))


def _read_secret(path: str) -> str:
    """Reads a secret from its file, and removes one newline at the end.

    Raises:
        ValueError: The file cannot be read, is not UTF-8, or is empty.
    """
    try:
        with Path(path).open("rb") as file:
            text = file.read(MAX_SECRET_BYTES).decode().removesuffix("\n")
    except OSError as error:
        raise ValueError(f"the file cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError("the file is not UTF-8") from None
    # A file that is not fully written yet looks empty, and so does a pipe that was already read. This is an
    # error, because an empty key would give everybody access.
    if not text:
        raise ValueError("the file is empty")
    return text


def _parse_variable(
    name: str, environ: Mapping[str, str], keys: Mapping[KeyPath, ConfigKey]
) -> ConfigOverride:
    place: KeyPath = tuple(name.removeprefix(PREFIX).lower().split("__"))
    secret = (*place[:-1], str(place[-1]).removesuffix(FILE_SUFFIX))
    try:
        if place in keys or any(place == key[: len(place)] for key in keys):
            return ConfigOverride(name, place, _decode_variable_text(environ[name], keys.get(place)))
        if secret != place and secret in keys and _is_secret(keys[secret].value_type):
            direct = name[: -len(FILE_SUFFIX)]
            if direct in environ:
                return ConfigOverride(name, secret, problem=f"{direct} is set too; one of both is enough")
            return ConfigOverride(
                name, secret, _decode_variable_text(_read_secret(environ[name]), keys[secret])
            )
    except ValueError as error:
        return ConfigOverride(name, place, problem=str(error))
    if place[0] == "models":
        return ConfigOverride(name, place, problem=f"{PREFIX}MODELS takes all models as one JSON object")
    return ConfigOverride(name, place, problem=f"unknown key{suggest_key(place)}")


def _iter_overrides(environ: Mapping[str, str]) -> Iterator[ConfigOverride]:
    """Yields an override for each environment variable whose name begins with `PREFIX`.

    If a variable cannot be used, its override has a `problem`. Variables for whole sections come first, so
    that a variable for a single key overrides them.
    """
    keys = {key.path: key for key in iter_keys()}
    for name in sorted(environ, key=lambda name: (name.count("__"), name)):
        if name.startswith(PREFIX):
            yield _parse_variable(name, environ, keys)


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
    """Sets one value in nested mappings, and adds the mappings that are missing on the way.

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


def _apply_override(
    override: ConfigOverride, values: dict[str, Any], sources: dict[KeyPath, _ValueSource]
) -> None:
    """Sets the values of one override, and records it as their source."""
    is_variable = override.name.startswith(PREFIX)
    source = _ValueSource(override.name, f"environment {override.name}" if is_variable else override.name)
    leaves = list(_iter_leaf_values(override.path, override.value))
    for place, value in reversed(leaves):
        _put_value(values, place, value)
        for nested in [path for path in sources if path[: len(place)] == place]:
            del sources[nested]
        sources[place] = source


def _find_origin(place: KeyPath, values: Mapping[str, Any], sources: Mapping[KeyPath, _ValueSource]) -> str:
    """Returns the short name of the source that set a key's value; `default` if none did."""
    current: Any = values
    for name in place:
        if not isinstance(current, dict) or name not in current:
            return "default"
        current = current[name]
    nested_sources = (sources[path] for path in sources if path[: len(place)] == place)
    source = _find_nearest_source(place, sources) or next(nested_sources, None)
    return source.short_name if source else "default"


def _drop_empty_sections(values: Mapping[str, Any], section: type[BaseModel] = Config) -> dict[str, Any]:
    """Returns the values without empty sections, because YAML reads `server:` without keys as null."""
    filled: dict[str, Any] = {}
    for name, value in values.items():
        field = section.model_fields.get(name)
        kind = get_section_type(unwrap_type(field.annotation)) if field else None
        if value is None and field is not None and field.default is not None and (kind or name == "models"):
            continue
        filled[name] = _drop_empty_sections(value, kind) if kind and isinstance(value, dict) else value
    return filled


def _describe_error(error: Any) -> str:  # noqa: ANN401 - pydantic's ErrorDetails
    """Describes one error of pydantic in the proxy's words, without the value, which may be a secret."""
    if error["type"] == "extra_forbidden":
        return f"unknown key{suggest_key(error['loc'])}"
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    text: str = ERROR_TEXTS.get(error["type"], error["msg"])
    if isinstance(error["input"], bool) and error["type"] in {"literal_error", "string_type"}:
        text += " (YAML takes a bare on, off, yes or no for true or false)"
    return text


def _find_nearest_source(place: KeyPath, sources: Mapping[KeyPath, _ValueSource]) -> _ValueSource | None:
    """Returns the source that set a key, else the one that set the nearest section around the key.

    Returns None if no source set any of them.
    """
    ends = range(len(place), 0, -1)
    return next((sources[place[:end]] for end in ends if place[:end] in sources), None)


def _format_problem(place: KeyPath, problem: str, sources: Mapping[KeyPath, _ValueSource]) -> str:
    source = _find_nearest_source(place, sources)
    return (
        f"{source.location}: {format_key_path(place)}: {problem}"
        if source
        else f"{format_key_path(place)}: {problem}"
    )


def _validate_values(
    values: Mapping[str, Any],
    sources: Mapping[KeyPath, _ValueSource],
    environ: Mapping[str, str],
    earlier_problems: list[str],
) -> Config:
    """Validates the values and returns the configuration with `store.url` filled in.

    Raises:
        ConfigError: The configuration has problems. The message lists the `earlier_problems`, which were
            found while the sources were read, before those found here.
    """
    lines: Iterator[str] = iter(())
    try:
        config = Config.model_validate(_drop_empty_sections(values))
        lines = (_format_problem(place, what, sources) for place, what in validation.find_problems(config))
        store = config.store.model_copy(update={"url": validation.resolve_store_url(config, environ)})
    except ValidationError as invalid:
        lines = (_format_problem(error["loc"], _describe_error(error), sources) for error in invalid.errors())
    except ValueError as error:
        lines = chain(lines, [_format_problem(("store", "url"), str(error), sources)])
    if problems := [*earlier_problems, *lines]:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    return config.model_copy(update={"store": store})


def load_config(
    path: Path | None, environ: Mapping[str, str], options: Iterable[ConfigOverride] = ()
) -> LoadedConfig:
    """Loads the configuration from a file, then the environment, then options; later values win.

    Without a `path`, the file is the one that `COMPACTION_PROXY_CONFIG` names, else `./config.yaml` if it
    exists, else none.

    Raises:
        ConfigError: The configuration cannot be used. The message has one line for each problem.
    """
    variable, default = environ.get(CONFIG_VARIABLE), Path(DEFAULT_FILE)
    file = path or (Path(variable) if variable else default if default.exists() else None)
    values: dict[str, Any] = {}
    sources: dict[KeyPath, _ValueSource] = {}
    problems: list[str] = []
    empty = False
    if file is not None:
        document = yaml_file.read_yaml(file, environ)
        values, empty = document.values, document.is_empty
        for place, (line, column) in document.positions.items():
            sources[place] = _ValueSource(f"{file}:{line}:{column}", f"{file}:{line}")
        problems += [f"{file}:{line}:{column}: {what}" for line, column, what in document.problems]
    overrides = list(_iter_overrides(environ))
    problems += [
        f"{each.name}: {format_key_path(each.path)}: {each.problem}" for each in overrides if each.problem
    ]
    for setting in chain((setting for setting in overrides if not setting.problem), options):
        _apply_override(setting, values, sources)
    config = _validate_values(values, sources, environ, problems)
    origins = {format_key_path(key.path): _find_origin(key.path, values, sources) for key in iter_keys()}
    return LoadedConfig(config, origins, file, tuple(validation.find_warnings(config)), empty)
