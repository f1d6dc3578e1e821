"""Reads the configuration: file, environment, options; every problem at once, one line each."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from compaction_proxy.config import environment, validation, yaml_file
from compaction_proxy.config.config import Config
from compaction_proxy.config.environment import ConfigOverride
from compaction_proxy.config.keys import format_key_path, get_section_type, iter_keys, suggest_key
from compaction_proxy.config.types import unwrap_type
from compaction_proxy.config.yaml_file import KeyPath
from compaction_proxy.core.errors import ConfigError

CONFIG_VARIABLE = "COMPACTION_PROXY_CONFIG"
DEFAULT_FILE = "config.yaml"
MODELS: KeyPath = ("models",)
WORDING = {
    "tuple_type": "a list is needed",
    "dict_type": "a mapping is needed",
    "model_type": "a mapping of keys is needed",
    "model_attributes_type": "a mapping of keys is needed",
}


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration and where it comes from.

    Attributes:
        config: The configuration; `store.url` is filled in and absolute.
        origins: For each key, dotted: `default`, `FILE:LINE`, `environment NAME`, or an option's name.
        path: The file that was read, if any.
        warnings: What works but is probably not meant, one line each.
        is_empty: Whether that file says nothing at all: it is empty, or holds comments only.
    """

    config: Config
    origins: Mapping[str, str]
    path: Path | None
    warnings: tuple[str, ...]
    is_empty: bool = False


@dataclass(frozen=True, slots=True)
class _ValueSource:
    """Where a value was set: exactly, for an error, and in short."""

    where: str
    origin: str


def _choose_file(path: Path | None, environ: Mapping[str, str]) -> Path | None:
    """The file to read: the one given, the variable's, or the one in the working directory."""
    named = environ.get(CONFIG_VARIABLE, "")
    here = Path(DEFAULT_FILE)
    return path or (Path(named) if named else here if here.exists() else None)


def _iter_leaves(place: KeyPath, value: object) -> Iterator[tuple[KeyPath, object]]:
    """The single values in a value; an entry of `models` is one, because it is replaced as a whole."""
    if isinstance(value, dict) and value and (place[:1] != MODELS or place == MODELS):
        for name, inner in value.items():
            yield from _iter_leaves((*place, name), inner)
    else:
        yield place, value


def _put_value(values: dict[str, Any], place: KeyPath, value: object) -> None:
    """Set one value. An entry of `models` comes before those of the file, because the first match wins."""
    *above, last = map(str, place)
    for name in above:
        inner = values.get(name)
        values[name] = inner if isinstance(inner, dict) else {}
        values = values[name]
    if tuple(above) == MODELS:
        rest = {name: inner for name, inner in values.items() if name != last}
        values.clear()
        values.update({last: value, **rest})
    else:
        values[last] = value


def _apply_override(
    setting: ConfigOverride, values: dict[str, Any], sources: dict[KeyPath, _ValueSource]
) -> None:
    """Lay one setting over what is there."""
    named = setting.name.startswith(environment.PREFIX)
    source = _ValueSource(setting.name, f"environment {setting.name}" if named else setting.name)
    leaves = list(_iter_leaves(setting.path, setting.value))
    for place, value in reversed(leaves):
        _put_value(values, place, value)
        for below in [known for known in sources if known[: len(place)] == place]:
            del sources[below]
        sources[place] = source


def _find_origin(place: KeyPath, values: Mapping[str, Any], sources: Mapping[KeyPath, _ValueSource]) -> str:
    """Where the value of a key comes from."""
    found: Any = values
    for name in place:
        if not isinstance(found, dict) or name not in found:
            return "default"
        found = found[name]
    below = (sources[known] for known in sources if known[: len(place)] == place)
    source = _find_source(place, sources) or next(below, None)
    return source.origin if source else "default"


def _drop_empty_sections(values: Mapping[str, Any], section: type[BaseModel] = Config) -> dict[str, Any]:
    """The values without sections that stand empty, because `server:` with no key left is null."""
    made: dict[str, Any] = {}
    for name, value in values.items():
        found = section.model_fields.get(name)
        kind = get_section_type(unwrap_type(found.annotation)) if found else None
        if value is None and found is not None and found.default is not None and (kind or name == "models"):
            continue
        made[name] = _drop_empty_sections(value, kind) if kind and isinstance(value, dict) else value
    return made


def _describe_error(error: Any) -> str:  # noqa: ANN401 - pydantic's ErrorDetails
    """One error of pydantic in our words; never the value, which may be a secret."""
    if error["type"] == "extra_forbidden":
        return f"unknown key{suggest_key(error['loc'])}"
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    text: str = WORDING.get(error["type"], error["msg"])
    if isinstance(error["input"], bool) and error["type"] in {"literal_error", "string_type"}:
        text += " (YAML takes a bare on, off, yes or no for true or false)"
    return text


def _find_source(place: KeyPath, sources: Mapping[KeyPath, _ValueSource]) -> _ValueSource | None:
    """Where a place, or what it lies in, was set."""
    ends = range(len(place), 0, -1)
    return next((sources[place[:end]] for end in ends if place[:end] in sources), None)


def _format_problem(place: KeyPath, what: str, sources: Mapping[KeyPath, _ValueSource]) -> str:
    source = _find_source(place, sources)
    return (
        f"{source.where}: {format_key_path(place)}: {what}" if source else f"{format_key_path(place)}: {what}"
    )


def _format_override_problem(setting: ConfigOverride) -> str:
    return f"{setting.name}: {format_key_path(setting.path)}: {setting.problem}"


def _validate_values(
    values: Mapping[str, Any],
    sources: Mapping[KeyPath, _ValueSource],
    environ: Mapping[str, str],
    found: list[str],
) -> Config:
    """The configuration, `store.url` filled in.

    Raises:
        ConfigError: Something is wrong; `found` comes first.
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
    if problems := [*found, *lines]:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    return config.model_copy(update={"store": store})


def load_config(
    path: Path | None, environ: Mapping[str, str], options: Iterable[ConfigOverride] = ()
) -> LoadedConfig:
    """The configuration from a file, then the environment, then options; each overrides what came before.

    Without a `path` the file is the one that `COMPACTION_PROXY_CONFIG` names, else `./config.yaml` if there
    is one, else none.

    Raises:
        ConfigError: One line for each problem.
    """
    file = _choose_file(path, environ)
    values: dict[str, Any] = {}
    sources: dict[KeyPath, _ValueSource] = {}
    problems: list[str] = []
    empty = False
    if file is not None:
        read = yaml_file.read_yaml(file, environ)
        values, empty = read.values, read.is_empty
        for place, (line, column) in read.marks.items():
            sources[place] = _ValueSource(f"{file}:{line}:{column}", f"{file}:{line}")
        problems += [f"{file}:{line}:{column}: {what}" for line, column, what in read.problems]
    given = list(environment.iter_overrides(environ))
    problems += [_format_override_problem(setting) for setting in given if setting.problem]
    for setting in chain((setting for setting in given if not setting.problem), options):
        _apply_override(setting, values, sources)
    config = _validate_values(values, sources, environ, problems)
    origins = {format_key_path(key.path): _find_origin(key.path, values, sources) for key in iter_keys()}
    return LoadedConfig(config, origins, file, tuple(validation.find_warnings(config)), empty)
