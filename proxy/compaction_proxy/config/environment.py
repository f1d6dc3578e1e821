"""Reads settings from variables `COMPACTION_PROXY__SECTION__KEY`, and from files that `…__KEY_FILE` names."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args, get_origin

from pydantic import SecretStr

from compaction_proxy.config.keys import ConfigKey, iter_keys, suggest_key
from compaction_proxy.config.types import unwrap_type
from compaction_proxy.config.yaml_file import KeyPath

PREFIX = "COMPACTION_PROXY__"
FILE_SUFFIX = "_file"
MAX_SECRET_BYTES = 65_536


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


def iter_overrides(environ: Mapping[str, str]) -> Iterator[ConfigOverride]:
    """Yields an override for each environment variable whose name begins with `PREFIX`.

    If a variable cannot be used, its override has a `problem`. Variables for whole sections come first, so
    that a variable for a single key overrides them.
    """
    keys = {key.path: key for key in iter_keys()}
    for name in sorted(environ, key=lambda name: (name.count("__"), name)):
        if name.startswith(PREFIX):
            yield _parse_variable(name, environ, keys)
