"""The configuration as a flat list of keys: for finding one, suggesting one, and showing all."""

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import get_args, get_origin

from pydantic import BaseModel, SecretStr

from compaction_proxy.config.config import Config
from compaction_proxy.config.types import Only, unwrapped, without_passwords
from compaction_proxy.config.yaml_file import Place


@dataclass(frozen=True, slots=True)
class Key:
    """One key.

    Attributes:
        place: Section and names down to it.
        kind: Its type, without `| None`.
        default: Its default.
        description: What it means, with its unit.
        works: False while only the default is accepted.
        nullable: Whether it may be null.
    """

    place: Place
    kind: object
    default: object
    description: str
    works: bool
    nullable: bool


def dotted(place: Place) -> str:
    """A place as users read it."""
    return ".".join(map(str, place))


def section_of(kind: object) -> type[BaseModel] | None:
    """The kind as a section, if it is one."""
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def kind_at(place: Place) -> object | None:
    """The type of what stands at a place; None if there is no such place."""
    kind: object | None = Config
    for step in place:
        section = section_of(kind)
        if section is not None:
            found = section.model_fields.get(str(step))
            kind = unwrapped(found.annotation) if found else None
        else:
            inner = get_args(kind)
            kind = unwrapped(inner[-1 if get_origin(kind) is dict else 0]) if inner else None
    return kind


def keys(section: type[BaseModel] = Config, above: Place = ()) -> Iterator[Key]:
    """Every key in order, sections themselves left out."""
    for name, found in section.model_fields.items():
        place, kind = (*above, name), unwrapped(found.annotation)
        nested = section_of(kind)
        if nested is not None and isinstance(found.default, nested):
            yield from keys(nested, place)
        else:
            works = not any(isinstance(mark, Only) for mark in found.metadata)
            nullable = type(None) in get_args(found.annotation)
            yield Key(place, kind, found.default, found.description or "", works, nullable)


def suggestion(place: Place) -> str:
    """`, did you mean 'x'?` for a place that does not exist, or nothing.

    It is about the outermost step that is wrong. What begins like a key is more likely that key with its unit
    (`trigger_tokens`) than another that looks alike.
    """
    wrong = next((k for k in range(len(place)) if kind_at(place[: k + 1]) is None), len(place) - 1)
    section, word = section_of(kind_at(place[:wrong])), str(place[wrong])
    names = tuple(section.model_fields) if section else ()
    begun = [name for name in names if word.startswith(f"{name}_")]
    close = begun or get_close_matches(word, names, n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def plain(value: object) -> object:
    """A value as YAML and JSON have it; secrets are masked, empty ones stay empty."""
    if isinstance(value, SecretStr):
        return "********" if value.get_secret_value() else ""
    if isinstance(value, str):
        return without_passwords(value)
    if isinstance(value, BaseModel):
        return {name: plain(inner) for name, inner in value if name in value.model_fields_set}
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, tuple):
        return [plain(inner) for inner in value]
    return value
