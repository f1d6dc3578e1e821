"""Calls of a tool of ours among an answer's tool calls: told apart from the client's as they come.

Nothing is known here of streams; pieces of calls are those of `delta.tool_calls`.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from compaction_proxy.core.json_bounds import has_too_many_brackets
from compaction_proxy.wires.json.slices import DECODER

JsonObject = dict[str, Any]

TOOL_CALLS: Final = "tool_calls"
STOP: Final = "stop"
# Ends of an answer that a call does not survive: its arguments are cut.
CUT_OFF: Final = frozenset({"length", "content_filter"})

_PIECEWISE: Final = frozenset({"arguments", "input", "text", "summary", "data", "thinking", "signature"})


@dataclass(slots=True)
class PartialToolCall:
    """One call as far as it has come.

    Attributes:
        fields: What was told of it, without the index.
        index: The index that the provider gave it, if it gave one.
        is_ours: Whether it calls the tool of ours; None: its name has not come.
        client_index: Its index among the calls that the client sees.
    """

    fields: JsonObject = field(default_factory=dict)
    index: int | None = None
    is_ours: bool | None = None
    client_index: int = 0

    @property
    def id(self) -> str:
        """Its id; empty if it has none."""
        held = self.fields.get("id")
        return held if isinstance(held, str) else ""

    @property
    def name(self) -> str:
        """The name of the function, as far as it has come."""
        return _as_text(get_function(self.fields).get("name"))

    @property
    def arguments(self) -> str:
        """The arguments as the model wrote them; as JSON where the provider has parsed them already."""
        held = get_function(self.fields).get("arguments")
        return json.dumps(held) if isinstance(held, dict) else _as_text(held)


def get_function(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a call, or a piece of one, says of the function; empty if nothing."""
    held = fields.get("function")
    return held if isinstance(held, dict) else {}


def is_json_object(arguments: str) -> bool:
    """Whether arguments are a JSON object, and whole."""
    if has_too_many_brackets(arguments):
        return False
    try:
        return isinstance(DECODER.decode(arguments), dict)
    except (ValueError, RecursionError):
        return False


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else ""


class ToolCallFilter:
    """The calls of one answer.

    Args:
        name: Of the tool of ours.
    """

    __slots__ = ("_all", "_any_mine", "_latest", "_name", "others")

    def __init__(self, name: str) -> None:
        self._name = name
        self._all: list[PartialToolCall] = []
        self._latest: dict[int | None, PartialToolCall] = {}  # by index
        self._any_mine = False
        self.others = 0

    @property
    def own_calls(self) -> list[PartialToolCall]:
        """Those of ours, in their order."""
        return [call for call in self._all if call.is_ours]

    def filter_pieces(self, pieces: list[Any]) -> list[Any]:
        """What the client gets of these pieces; equal to them where nothing of ours has come.

        A piece of a call whose name has not come is held back until it has.
        """
        return [shown for piece in pieces for shown in self._filter_piece(piece)]

    def release_unnamed(self) -> list[Any]:
        """The calls whose names never came, for the client to judge; to be asked for at the end."""
        return [self._show_call(call) for call in self._all if call.is_ours is None]

    def _filter_piece(self, piece: Any) -> Iterable[Any]:
        if not isinstance(piece, dict):
            return (piece,)
        call = self._find_call(piece)
        known, new = call.is_ours, not call.fields
        merge_piece(call.fields, piece)
        if known is None:
            call.is_ours = self._is_ours(call)
            self._any_mine = self._any_mine or bool(call.is_ours)
        if call.is_ours is not False:
            return ()
        if known is None:
            shown = self._show_call(call)
            return (self._renumber_piece(call, piece) if new else shown,)
        return (self._renumber_piece(call, piece),)

    def _find_call(self, piece: JsonObject) -> PartialToolCall:
        """The call that a piece belongs to; some providers give no index, or all calls the same one."""
        told = piece.get("index")
        index = told if type(told) is int else None
        held = self._latest.get(index)
        if held is not None and not self._is_new_call(piece, held):
            return held
        call = self._latest[index] = PartialToolCall(index=index)
        self._all.append(call)
        return call

    @staticmethod
    def _is_new_call(piece: JsonObject, last: PartialToolCall) -> bool:
        """Whether a piece is the first of another call: it says a name, and has an id of its own.

        Some servers give all calls the same id, or none: another one begins behind one that is whole, or,
        where there is no index either, with each name.
        """
        made = get_function(piece)
        if not made.get("name") or not last.name:
            return False
        call_id = _as_text(piece.get("id"))
        if call_id and call_id != last.id:
            return True
        if not call_id and last.index is None:
            return True
        again = _as_text(made.get("arguments")).lstrip().startswith("{")
        return again and last.arguments.rstrip().endswith("}") and is_json_object(last.arguments)

    def _is_ours(self, call: PartialToolCall) -> bool | None:
        name = call.name
        if name == self._name:
            return True
        waiting = not name or (self._name.startswith(name) and not call.arguments)
        open_ended = waiting and "custom" not in call.fields
        return None if open_ended else False

    def _show_call(self, call: PartialToolCall) -> JsonObject:
        call.is_ours = False
        call.client_index = self.others
        self.others += 1
        index = {} if call.index is None else {"index": call.index}
        return self._renumber_piece(call, {**index, **call.fields})

    def _renumber_piece(self, call: PartialToolCall, piece: JsonObject) -> JsonObject:
        """The piece with an index that leaves no gap, where one of ours would."""
        moved = call.index is not None and self._any_mine
        return {**piece, "index": call.client_index} if moved else piece


def merge_piece(fields: JsonObject, piece: Mapping[str, Any]) -> None:
    """Add a piece to what was told before of the same object."""
    for key, value in piece.items():
        held = fields.get(key)
        if key == "index":
            continue
        if isinstance(held, dict) and isinstance(value, dict):
            merge_piece(held, value)
        elif isinstance(held, str) and isinstance(value, str) and key in _PIECEWISE:
            fields[key] = held + value
        elif key == "name" and isinstance(held, str) and isinstance(value, str):
            fields[key] = held if value == held else held + value  # some say it again with each piece
        elif key not in fields or value not in (None, ""):
            fields[key] = dict(value) if isinstance(value, dict) else value
