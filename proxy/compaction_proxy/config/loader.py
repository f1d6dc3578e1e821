"""Reads the configuration: file, environment, options; every problem at once, one line each."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from compaction_proxy.config import environment, validation, yaml_file
from compaction_proxy.config.config import Config
from compaction_proxy.config.environment import Setting
from compaction_proxy.config.keys import dotted, keys, section_of, suggestion
from compaction_proxy.config.types import unwrapped
from compaction_proxy.config.yaml_file import Place
from compaction_proxy.core.errors import ConfigError

CONFIG_VARIABLE = "COMPACTION_PROXY_CONFIG"
DEFAULT_FILE = "config.yaml"
MODELS: Place = ("models",)
WORDING = {
    "tuple_type": "a list is needed",
    "dict_type": "a mapping is needed",
    "model_type": "a mapping of keys is needed",
    "model_attributes_type": "a mapping of keys is needed",
}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration and where it comes from.

    Attributes:
        config: The configuration; `store.url` is filled in and absolute.
        origins: For each key, dotted: `default`, `FILE:LINE`, `environment NAME`, or an option's name.
        path: The file that was read, if any.
        warnings: What works but is probably not meant, one line each.
        empty: Whether that file says nothing at all: it is empty, or holds comments only.
    """

    config: Config
    origins: Mapping[str, str]
    path: Path | None
    warnings: tuple[str, ...]
    empty: bool = False


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a value was set: exactly, for an error, and in short."""

    where: str
    origin: str


def _chosen(path: Path | None, environ: Mapping[str, str]) -> Path | None:
    """The file to read: the one given, the variable's, or the one in the working directory."""
    named = environ.get(CONFIG_VARIABLE, "")
    here = Path(DEFAULT_FILE)
    return path or (Path(named) if named else here if here.exists() else None)


def _leaves(place: Place, value: object) -> Iterator[tuple[Place, object]]:
    """The single values in a value; an entry of `models` is one, because it is replaced as a whole."""
    if isinstance(value, dict) and value and (place[:1] != MODELS or place == MODELS):
        for name, inner in value.items():
            yield from _leaves((*place, name), inner)
    else:
        yield place, value


def _put(values: dict[str, Any], place: Place, value: object) -> None:
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


def _apply(setting: Setting, values: dict[str, Any], sources: dict[Place, _Source]) -> None:
    """Lay one setting over what is there."""
    named = setting.name.startswith(environment.PREFIX)
    source = _Source(setting.name, f"environment {setting.name}" if named else setting.name)
    leaves = list(_leaves(setting.place, setting.value))
    for place, value in reversed(leaves):
        _put(values, place, value)
        for below in [known for known in sources if known[: len(place)] == place]:
            del sources[below]
        sources[place] = source


def _origin(place: Place, values: Mapping[str, Any], sources: Mapping[Place, _Source]) -> str:
    """Where the value of a key comes from."""
    found: Any = values
    for name in place:
        if not isinstance(found, dict) or name not in found:
            return "default"
        found = found[name]
    below = (sources[known] for known in sources if known[: len(place)] == place)
    source = _source(place, sources) or next(below, None)
    return source.origin if source else "default"


def _filled(values: Mapping[str, Any], section: type[BaseModel] = Config) -> dict[str, Any]:
    """The values without sections that stand empty, because `server:` with no key left is null."""
    made: dict[str, Any] = {}
    for name, value in values.items():
        found = section.model_fields.get(name)
        kind = section_of(unwrapped(found.annotation)) if found else None
        if value is None and found is not None and found.default is not None and (kind or name == "models"):
            continue
        made[name] = _filled(value, kind) if kind and isinstance(value, dict) else value
    return made


def _wording(error: Any) -> str:  # noqa: ANN401 - pydantic's ErrorDetails
    """One error of pydantic in our words; never the value, which may be a secret."""
    if error["type"] == "extra_forbidden":
        return f"unknown key{suggestion(error['loc'])}"
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    text: str = WORDING.get(error["type"], error["msg"])
    if isinstance(error["input"], bool) and error["type"] in {"literal_error", "string_type"}:
        text += " (YAML takes a bare on, off, yes or no for true or false)"
    return text


def _source(place: Place, sources: Mapping[Place, _Source]) -> _Source | None:
    """Where a place, or what it lies in, was set."""
    ends = range(len(place), 0, -1)
    return next((sources[place[:end]] for end in ends if place[:end] in sources), None)


def _line(place: Place, what: str, sources: Mapping[Place, _Source]) -> str:
    source = _source(place, sources)
    return f"{source.where}: {dotted(place)}: {what}" if source else f"{dotted(place)}: {what}"


def _setting_problem(setting: Setting) -> str:
    return f"{setting.name}: {dotted(setting.place)}: {setting.problem}"


def _validated(
    values: Mapping[str, Any], sources: Mapping[Place, _Source], environ: Mapping[str, str], found: list[str]
) -> Config:
    """The configuration, `store.url` filled in.

    Raises:
        ConfigError: Something is wrong; `found` comes first.
    """
    lines: Iterator[str] = iter(())
    try:
        config = Config.model_validate(_filled(values))
        lines = (_line(place, what, sources) for place, what in validation.problems(config))
        store = config.store.model_copy(update={"url": validation.store_url(config, environ)})
    except ValidationError as invalid:
        lines = (_line(error["loc"], _wording(error), sources) for error in invalid.errors())
    except ValueError as error:
        lines = chain(lines, [_line(("store", "url"), str(error), sources)])
    if problems := [*found, *lines]:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    return config.model_copy(update={"store": store})


def load(path: Path | None, environ: Mapping[str, str], options: Iterable[Setting] = ()) -> Loaded:
    """The configuration from a file, then the environment, then options; each overrides what came before.

    Without a `path` the file is the one that `COMPACTION_PROXY_CONFIG` names, else `./config.yaml` if there
    is one, else none.

    Raises:
        ConfigError: One line for each problem.
    """
    file = _chosen(path, environ)
    values: dict[str, Any] = {}
    sources: dict[Place, _Source] = {}
    problems: list[str] = []
    empty = False
    if file is not None:
        read = yaml_file.read(file, environ)
        values, empty = read.values, read.empty
        for place, (line, column) in read.marks.items():
            sources[place] = _Source(f"{file}:{line}:{column}", f"{file}:{line}")
        problems += [f"{file}:{line}:{column}: {what}" for line, column, what in read.problems]
    given = list(environment.settings(environ))
    problems += [_setting_problem(setting) for setting in given if setting.problem]
    for setting in chain((setting for setting in given if not setting.problem), options):
        _apply(setting, values, sources)
    config = _validated(values, sources, environ, problems)
    origins = {dotted(key.place): _origin(key.place, values, sources) for key in keys()}
    return Loaded(config, origins, file, tuple(validation.warnings(config)), empty)
