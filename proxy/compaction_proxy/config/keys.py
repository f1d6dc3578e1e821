"""The configuration as a flat list of keys: for finding one, suggesting one, and showing all."""

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import get_args, get_origin

from pydantic import BaseModel, SecretStr

from compaction_proxy.config.config import Config
from compaction_proxy.config.types import OnlyValue, mask_passwords, unwrap_type
from compaction_proxy.config.yaml_file import KeyPath


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """One key.

    Attributes:
        path: Section and names down to it.
        kind: Its type, without `| None`.
        default: Its default.
        description: What it means, with its unit.
        is_supported: False while only the default is accepted.
        is_nullable: Whether it may be null.
    """

    path: KeyPath
    kind: object
    default: object
    description: str
    is_supported: bool
    is_nullable: bool


def format_key_path(place: KeyPath) -> str:
    """A place as users read it."""
    return ".".join(map(str, place))


def get_section_type(kind: object) -> type[BaseModel] | None:
    """The kind as a section, if it is one."""
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def get_type_at(place: KeyPath) -> object | None:
    """The type of what stands at a place; None if there is no such place."""
    kind: object | None = Config
    for step in place:
        section = get_section_type(kind)
        if section is not None:
            found = section.model_fields.get(str(step))
            kind = unwrap_type(found.annotation) if found else None
        else:
            inner = get_args(kind)
            kind = unwrap_type(inner[-1 if get_origin(kind) is dict else 0]) if inner else None
    return kind


def iter_keys(section: type[BaseModel] = Config, above: KeyPath = ()) -> Iterator[ConfigKey]:
    """Every key in order, sections themselves left out."""
    for name, found in section.model_fields.items():
        place, kind = (*above, name), unwrap_type(found.annotation)
        nested = get_section_type(kind)
        if nested is not None and isinstance(found.default, nested):
            yield from iter_keys(nested, place)
        else:
            works = not any(isinstance(mark, OnlyValue) for mark in found.metadata)
            nullable = type(None) in get_args(found.annotation)
            yield ConfigKey(place, kind, found.default, found.description or "", works, nullable)


def suggest_key(place: KeyPath) -> str:
    """`, did you mean 'x'?` for a place that does not exist, or nothing.

    It is about the outermost step that is wrong. What begins like a key is more likely that key with its unit
    (`trigger_tokens`) than another that looks alike.
    """
    wrong = next((k for k in range(len(place)) if get_type_at(place[: k + 1]) is None), len(place) - 1)
    section, word = get_section_type(get_type_at(place[:wrong])), str(place[wrong])
    names = tuple(section.model_fields) if section else ()
    begun = [name for name in names if word.startswith(f"{name}_")]
    close = begun or get_close_matches(word, names, n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def to_plain_value(value: object) -> object:
    """A value as YAML and JSON have it; secrets are masked, empty ones stay empty."""
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
