"""Settings from environment variables: `COMPACTION_PROXY__SECTION__KEY`, and `…__KEY_FILE` for secrets."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from pydantic import SecretStr

from compaction_proxy.config.keys import Key, keys, suggestion
from compaction_proxy.config.types import unwrapped
from compaction_proxy.config.yaml_file import Place

PREFIX = "COMPACTION_PROXY__"
FILE_SUFFIX = "_file"
MAX_SECRET_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Setting:
    """One value from outside the file.

    Attributes:
        name: The variable or option that sets it.
        place: What it sets.
        value: The value, if `problem` is empty.
        problem: What is wrong with it; never quotes the value.
    """

    name: str
    place: Place
    value: object = None
    problem: str = ""


def _decoded(raw: str, key: Key | None) -> object:
    """The text of a variable as the value it stands for; sections, lists and maps are JSON.

    Raises:
        ValueError: It is no JSON where that is needed.
    """
    if key is not None and key.nullable and raw in {"", "null"}:
        return None
    if key is not None and not isinstance(key.default, dict | tuple) and not hasattr(key.kind, "__args__"):
        return raw
    if key is not None and isinstance(key.default, str):
        return raw
    try:
        return json.loads(raw)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON at character {error.pos + 1}: {error.msg}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _is_secret(kind: object) -> bool:
    """Whether a key holds a secret, or a list of them."""
    return kind is SecretStr or any(unwrapped(inner) is SecretStr for inner in get_args(kind))


def _secret(path: str) -> str:
    """The content of a secret's file without its one trailing newline."""
    try:
        with Path(path).open("rb") as file:
            text = file.read(MAX_SECRET_BYTES).decode().removesuffix("\n")
    except OSError as error:
        raise ValueError(f"the file cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError("the file is not UTF-8") from None
    if not text:  # half written, or a pipe that was read before: without a key everybody would be let in
        raise ValueError("the file is empty")
    return text


def _setting(name: str, environ: Mapping[str, str], known: Mapping[Place, Key]) -> Setting:
    place: Place = tuple(name.removeprefix(PREFIX).lower().split("__"))
    secret = (*place[:-1], str(place[-1]).removesuffix(FILE_SUFFIX))
    try:
        if place in known or any(place == key[: len(place)] for key in known):
            return Setting(name, place, _decoded(environ[name], known.get(place)))
        if secret != place and secret in known and _is_secret(known[secret].kind):
            direct = name[: -len(FILE_SUFFIX)]
            if direct in environ:
                return Setting(name, secret, problem=f"{direct} is set too; one of both is enough")
            return Setting(name, secret, _decoded(_secret(environ[name]), known[secret]))
    except ValueError as error:
        return Setting(name, place, problem=str(error))
    if place[0] == "models":
        return Setting(name, place, problem=f"{PREFIX}MODELS takes all models as one JSON object")
    return Setting(name, place, problem=f"unknown key{suggestion(place)}")


def settings(environ: Mapping[str, str]) -> Iterator[Setting]:
    """Every variable of ours; whole sections come before single keys, so that the narrower one wins."""
    known = {key.place: key for key in keys()}
    for name in sorted(environ, key=lambda name: (name.count("__"), name)):
        if name.startswith(PREFIX):
            yield _setting(name, environ, known)
