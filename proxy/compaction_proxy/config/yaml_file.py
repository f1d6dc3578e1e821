"""Reads a YAML file into plain values, with the line and column of each key and list item."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import yaml

from compaction_proxy.core.errors import ConfigError

MAX_FILE_BYTES = 262_144
MAX_VALUES = 20_000
MAX_DEPTH = 24
VARIABLE_PATTERN = re.compile(r"\$(\$)?\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")

KeyPath: TypeAlias = tuple[str | int, ...]
_ABSENT = object()
"""Marks a value whose problem is already reported. Such a value is left out, to be reported only once."""


@dataclass(frozen=True, slots=True)
class YamlDocument:
    """The content of a YAML file.

    Attributes:
        values: The values as mappings, lists and scalars, with `${VAR}` expanded.
        positions: Line and column, counted from 1, of each key and list item.
        problems: Problems with single values: line, column and description.
        is_empty: Whether the file contains no value: it is empty, or contains only comments or `null`.
    """

    values: dict[str, object]
    positions: Mapping[KeyPath, tuple[int, int]]
    problems: tuple[tuple[int, int, str], ...]
    is_empty: bool = False


class _UnsetVariableError(ValueError):
    """Reports that the variable of a `${VAR}` without a default is not set."""


def expand_variables(text: str, environ: Mapping[str, str]) -> str:
    """Replaces `${VAR}` and `${VAR:-default}` in a text. `$${VAR}` becomes `${VAR}`.

    The default is used if the variable is not set or is empty.

    Raises:
        ValueError: If the variable of a `${VAR}` without a default is not set.
    """

    def replace_variable(found: re.Match[str]) -> str:
        escaped, name, default = found.groups()
        if escaped:
            return found[0][1:]
        if default is None and name not in environ:
            raise _UnsetVariableError(f"${{{name}}} is not set; use ${{{name}:-default}} to set a default")
        return environ.get(name) or default or ""

    return VARIABLE_PATTERN.sub(replace_variable, text)


def _get_position(mark: yaml.Mark) -> tuple[int, int]:
    return mark.line + 1, mark.column + 1


@dataclass(slots=True)
class _NodeConverter:
    """Converts YAML nodes to values, and collects the positions of keys and the problems with values.

    Limits the depth and the number of values, because a short file can repeat a node many times with aliases.
    """

    loader: yaml.SafeLoader
    environ: Mapping[str, str] | None
    positions: dict[KeyPath, tuple[int, int]] = field(default_factory=dict)
    problems: list[tuple[int, int, str]] = field(default_factory=list)
    value_count: int = 0

    def convert_node(self, node: yaml.Node, path: KeyPath) -> object:
        self.value_count += 1
        if len(path) > MAX_DEPTH or self.value_count > MAX_VALUES:
            raise yaml.constructor.ConstructorError(
                None, None, "nested too deeply or too large", node.start_mark
            )
        if isinstance(node, yaml.MappingNode):
            return self._convert_mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            items = [self._convert_item(item, (*path, index)) for index, item in enumerate(node.value)]
            return [item for item in items if item is not _ABSENT]
        return self._convert_scalar(node)

    def _convert_item(self, node: yaml.Node, path: KeyPath) -> object:
        self.positions[path] = _get_position(node.start_mark)
        return self.convert_node(node, path)

    def _convert_mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, object]:
        values: dict[str, object] = {}
        for key, value in node.value:
            # The name of a key is its text in the file. YAML would convert keys such as `on` and `4` to a
            # boolean and a number.
            name = key.value if isinstance(key, yaml.ScalarNode) else None
            if name is None or name in values:
                problem = "a key must be plain text" if name is None else f"duplicate key {name!r}"
                self._add_problem(key, problem)
                continue
            self.positions[*path, name] = _get_position(key.start_mark)
            values[name] = self.convert_node(value, (*path, name))
            if values[name] is _ABSENT:
                del values[name]
        return values

    def _convert_scalar(self, node: yaml.Node) -> object:
        try:
            value: object = self.loader.construct_object(node)
            if self.environ is None or not isinstance(value, str):
                return value
            return expand_variables(value, self.environ)
        except _UnsetVariableError as error:
            self._add_problem(node, str(error))
        except ValueError:
            self._add_problem(node, f"not a valid {node.tag.rpartition(':')[2]}")
        return _ABSENT

    def _add_problem(self, node: yaml.Node, problem: str) -> None:
        self.problems.append((*_get_position(node.start_mark), problem))


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the file: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: the file is larger than {MAX_FILE_BYTES:,} bytes; check the path")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8") from None


def _build_syntax_error(path: Path, text: str, error: yaml.YAMLError) -> ConfigError:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return ConfigError(f"{path}: not YAML: the file contains a character that is not allowed")
    line, column = _get_position(mark)
    lines = text.splitlines()
    tab = line <= len(lines) and lines[line - 1][column - 1 : column] == "\t"
    problem = (
        "a tab; use spaces to indent YAML" if tab else getattr(error, "problem", None) or "cannot be read"
    )
    return ConfigError(f"{path}:{line}:{column}: not YAML: {problem}")


def read_yaml(path: Path, environ: Mapping[str, str] | None) -> YamlDocument:
    """Reads a YAML file. The values of an empty file are an empty mapping.

    A problem with a single value, such as an unset `${VAR}`, is added to the problems of the result. If
    `environ` is None, `${VAR}` is plain text.

    Raises:
        ConfigError: If the file cannot be read, is too large or is not YAML, or if it contains something else
            than a mapping.
    """
    return parse_yaml(_read_text(path), path, environ)


def parse_yaml(text: str, path: Path, environ: Mapping[str, str] | None) -> YamlDocument:
    """Parses the text of a YAML file as `read_yaml` does. Errors name the file `path`, which is not read."""
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return YamlDocument({}, {}, (), is_empty=True)
        walk = _NodeConverter(loader, environ)
        values = walk.convert_node(node, ())
    except yaml.YAMLError as error:
        raise _build_syntax_error(path, text, error) from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply") from None
    if not isinstance(values, dict):
        if values is None and not walk.problems:
            return YamlDocument({}, {}, (), is_empty=True)
        raise ConfigError(f"{path}:1:1: expected a mapping of sections, such as `server:`")
    return YamlDocument(values, walk.positions, tuple(walk.problems))
