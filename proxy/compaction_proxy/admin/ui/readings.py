"""What the admin API answers, read into records: of another version's answer, what fits.

A field that is missing or of another type has its default, which is "not known". So a template never meets a
name that is not there.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from compaction_proxy.admin.ui.shown import (
    BillView,
    ConversationView,
    InstructionView,
    MoneyView,
    PinView,
    RoundView,
    SettingView,
    StrategyOutcomeView,
)
from compaction_proxy.core import event as events
from compaction_proxy.core import exchange as exchanges
from compaction_proxy.core.event import Event, parse_integer, parse_number
from compaction_proxy.core.exchange import Exchange

JsonFields = Mapping[str, Any]
_T = TypeVar("_T")


def _read_text(value: object) -> str:
    return value if isinstance(value, str) else ""


_READERS: Mapping[object, Callable[[object], object]] = {
    str: _read_text,
    bool: lambda value: value is True,
    int: lambda value: parse_integer(value) or 0,
    int | None: parse_integer,
    float | None: parse_number,
}


def read_record(kind: Callable[..., _T], data: object) -> _T:
    """The record that these fields tell of; only its fields of simple types are read."""
    given = data if isinstance(data, Mapping) else {}
    known = {each.name: each.type for each in fields(kind)}  # type: ignore[arg-type]  # a dataclass
    return kind(**{name: _READERS[known[name]](given[name]) for name in known.keys() & given.keys()
                   if known[name] in _READERS})  # fmt: skip


def read_records(kind: Callable[..., _T], data: object) -> tuple[_T, ...]:
    """The records in a list."""
    return tuple(read_record(kind, each) for each in _read_list(data))


def read_conversation(name: str, data: JsonFields) -> ConversationView:
    """A conversation, from what the API says of it."""
    totals = data.get("totals")
    flat = {**(totals if isinstance(totals, Mapping) else {}), **data, "id": name}
    return replace(
        read_record(ConversationView, flat),
        pins=read_records(PinView, data.get("pins")),
        instructions=read_records(InstructionView, data.get("instructions")),
        money=read_record(MoneyView, data.get("money")),
    )


def read_outcomes(data: object) -> tuple[StrategyOutcomeView, ...]:
    """What strategies would do, in a list."""
    return tuple(_read_outcome(each) for each in _read_list(data) if isinstance(each, Mapping))


def _read_outcome(fields: JsonFields) -> StrategyOutcomeView:
    points = [each for each in _read_list(fields.get("points")) if isinstance(each, Mapping)]
    return replace(
        read_record(StrategyOutcomeView, fields),
        tokens=_read_bill(fields.get("tokens")),
        dollars=_read_bill(fields.get("dollars")),
        points=tuple(
            (parse_integer(each.get("before")), parse_integer(each.get("after"))) for each in points
        ),
    )


def _read_bill(value: object) -> BillView:
    given = value if isinstance(value, Mapping) else {}
    return replace(read_record(BillView, given), compacted=parse_number(given.get("with")))


def read_rounds(data: object) -> tuple[RoundView, ...]:
    """The compactions in a list, without those that cannot be read."""
    return tuple(each for each in map(read_round, _read_list(data)) if each is not None)


def read_round(data: object) -> RoundView | None:
    """A compaction; None if it cannot be read."""
    given = data if isinstance(data, Mapping) else {}
    event = events.from_fields(given)
    if event is None:
        return None
    return RoundView(event, given.get("undone") is True, parse_number(given.get("pays_back_after")))


def read_events(data: object) -> tuple[Event, ...]:
    """The events in a list."""
    given = (events.from_fields(each) for each in _read_list(data) if isinstance(each, Mapping))
    return tuple(filter(None, given))


def read_exchanges(data: object) -> tuple[Exchange, ...]:
    """The exchanges in a list."""
    given = (exchanges.from_fields(each) for each in _read_list(data) if isinstance(each, Mapping))
    return tuple(filter(None, given))


def read_settings(data: object) -> tuple[SettingView, ...]:
    """Values of the configuration; such as are no text as JSON has them."""
    given = (each for each in _read_list(data) if isinstance(each, Mapping))
    return tuple(
        SettingView(
            _read_text(each.get("key")), _format_value(each.get("value")), _read_text(each.get("origin"))
        )
        for each in given
    )


def _format_value(value: object) -> str:
    match value:
        case None:
            return "unset"
        case bool():
            return "yes" if value else "no"
        case "":
            return "empty"
        case list() | tuple():
            return ", ".join(map(_format_value, value)) or "none"
        case Mapping():
            return ", ".join(f"{name}: {_format_value(each)}" for name, each in value.items()) or "none"
    return str(value)


def _read_list(value: object) -> Iterable[object]:
    return value if isinstance(value, list) else ()
