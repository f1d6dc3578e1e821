"""Converts responses of the admin API to records for the templates.

The data may have been written by another version of the proxy. A field that is missing or has another type
therefore gets its default, which means "unknown". Templates then never use an undefined name.
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


def read_record(record_class: Callable[..., _T], data: object) -> _T:
    """Reads a record from JSON fields. Fields of other than simple types keep their default."""
    given = data if isinstance(data, Mapping) else {}
    known = {each.name: each.type for each in fields(record_class)}  # type: ignore[arg-type]  # a dataclass
    return record_class(**{name: _READERS[known[name]](given[name]) for name in known.keys() & given.keys()
                   if known[name] in _READERS})  # fmt: skip


def read_records(record_class: Callable[..., _T], data: object) -> tuple[_T, ...]:
    """Reads the records in a list."""
    return tuple(read_record(record_class, each) for each in _read_list(data))


def read_conversation(name: str, data: JsonFields) -> ConversationView:
    """Reads a conversation from the API's response."""
    totals = data.get("totals")
    flat = {**(totals if isinstance(totals, Mapping) else {}), **data, "id": name}
    return replace(
        read_record(ConversationView, flat),
        pins=read_records(PinView, data.get("pins")),
        instructions=read_records(InstructionView, data.get("instructions")),
        money=read_record(MoneyView, data.get("money")),
    )


def read_outcomes(data: object) -> tuple[StrategyOutcomeView, ...]:
    """Reads the results of a replay, one for each strategy."""
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
    values = value if isinstance(value, Mapping) else {}
    return replace(read_record(BillView, values), compacted=parse_number(values.get("with")))


def read_rounds(data: object) -> tuple[RoundView, ...]:
    """Reads the compactions in a list. Skips those that cannot be read."""
    return tuple(each for each in map(read_round, _read_list(data)) if each is not None)


def read_round(data: object) -> RoundView | None:
    """Reads a compaction; returns None if that fails."""
    values = data if isinstance(data, Mapping) else {}
    event = events.from_fields(values)
    if event is None:
        return None
    return RoundView(event, values.get("undone") is True, parse_number(values.get("pays_back_after")))


def read_events(data: object) -> tuple[Event, ...]:
    """Reads the events in a list. Skips those that cannot be read."""
    parsed = (events.from_fields(each) for each in _read_list(data) if isinstance(each, Mapping))
    return tuple(filter(None, parsed))


def read_exchanges(data: object) -> tuple[Exchange, ...]:
    """Reads the exchanges in a list. Skips those that cannot be read."""
    parsed = (exchanges.from_fields(each) for each in _read_list(data) if isinstance(each, Mapping))
    return tuple(filter(None, parsed))


def read_settings(data: object) -> tuple[SettingView, ...]:
    """Reads configuration values as text. Items of lists are joined; booleans become `yes` or `no`."""
    rows = (each for each in _read_list(data) if isinstance(each, Mapping))
    return tuple(
        SettingView(
            _read_text(each.get("key")), _format_value(each.get("value")), _read_text(each.get("origin"))
        )
        for each in rows
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
