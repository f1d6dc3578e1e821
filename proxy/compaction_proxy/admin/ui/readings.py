"""What the admin API answers, read into records: of another version's answer, what fits.

A field that is missing or of another type has its default, which is "not known". So a template never meets a
name that is not there.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from compaction_proxy.admin.ui.shown import (
    Bill,
    Conversation,
    Money,
    Outcome,
    Pin,
    ProjectInstruction,
    Round,
    Setting,
)
from compaction_proxy.core import event as events
from compaction_proxy.core import exchange as exchanges
from compaction_proxy.core.event import Event, number, whole
from compaction_proxy.core.exchange import Exchange

Told = Mapping[str, Any]
_T = TypeVar("_T")


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


_READERS: Mapping[object, Callable[[object], object]] = {
    str: _text,
    bool: lambda value: value is True,
    int: lambda value: whole(value) or 0,
    int | None: whole,
    float | None: number,
}


def read(kind: Callable[..., _T], told: object) -> _T:
    """The record that these fields tell of; only its fields of simple types are read."""
    given = told if isinstance(told, Mapping) else {}
    known = {each.name: each.type for each in fields(kind)}  # type: ignore[arg-type]  # a dataclass
    return kind(**{name: _READERS[known[name]](given[name]) for name in known.keys() & given.keys()
                   if known[name] in _READERS})  # fmt: skip


def rows(kind: Callable[..., _T], told: object) -> tuple[_T, ...]:
    """The records in a list."""
    return tuple(read(kind, each) for each in _list(told))


def conversation(name: str, told: Told) -> Conversation:
    """A conversation, from what the API says of it."""
    totals = told.get("totals")
    flat = {**(totals if isinstance(totals, Mapping) else {}), **told, "id": name}
    return replace(
        read(Conversation, flat),
        pins=rows(Pin, told.get("pins")),
        instructions=rows(ProjectInstruction, told.get("instructions")),
        money=read(Money, told.get("money")),
    )


def outcomes(told: object) -> tuple[Outcome, ...]:
    """What strategies would do, in a list."""
    return tuple(_outcome(each) for each in _list(told) if isinstance(each, Mapping))


def _outcome(told: Told) -> Outcome:
    points = [each for each in _list(told.get("points")) if isinstance(each, Mapping)]
    return replace(
        read(Outcome, told),
        tokens=_bill(told.get("tokens")),
        dollars=_bill(told.get("dollars")),
        points=tuple((whole(each.get("before")), whole(each.get("after"))) for each in points),
    )


def _bill(told: object) -> Bill:
    given = told if isinstance(told, Mapping) else {}
    return replace(read(Bill, given), compacted=number(given.get("with")))


def rounds(told: object) -> tuple[Round, ...]:
    """The compactions in a list, without those that cannot be read."""
    return tuple(each for each in map(compaction, _list(told)) if each is not None)


def compaction(told: object) -> Round | None:
    """A compaction; None if it cannot be read."""
    given = told if isinstance(told, Mapping) else {}
    event = events.from_fields(given)
    if event is None:
        return None
    return Round(event, given.get("undone") is True, number(given.get("pays_back_after")))


def happened(told: object) -> tuple[Event, ...]:
    """The events in a list."""
    given = (events.from_fields(each) for each in _list(told) if isinstance(each, Mapping))
    return tuple(filter(None, given))


def exchanged(told: object) -> tuple[Exchange, ...]:
    """The exchanges in a list."""
    given = (exchanges.from_fields(each) for each in _list(told) if isinstance(each, Mapping))
    return tuple(filter(None, given))


def settings(told: object) -> tuple[Setting, ...]:
    """Values of the configuration; such as are no text as JSON has them."""
    given = (each for each in _list(told) if isinstance(each, Mapping))
    return tuple(
        Setting(_text(each.get("key")), _value(each.get("value")), _text(each.get("origin")))
        for each in given
    )


def _value(value: object) -> str:
    match value:
        case None:
            return "unset"
        case bool():
            return "yes" if value else "no"
        case "":
            return "empty"
        case list() | tuple():
            return ", ".join(map(_value, value)) or "none"
        case Mapping():
            return ", ".join(f"{name}: {_value(each)}" for name, each in value.items()) or "none"
    return str(value)


def _list(told: object) -> Iterable[object]:
    return told if isinstance(told, list) else ()
