"""Separates calls of the proxy's own tool from the client's as the pieces of an answer arrive.

This module does not know streams. Its pieces are the elements of `delta.tool_calls`.
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
# Finish reasons after which a call is not answered, because its arguments are cut.
CUT_OFF: Final = frozenset({"length", "content_filter"})

_PIECEWISE: Final = frozenset({"arguments", "input", "text", "summary", "data", "thinking", "signature"})


@dataclass(slots=True)
class PartialToolCall:
    """One call, as far as it has arrived.

    Attributes:
        fields: The fields of the call so far, without the index.
        index: The provider's index, if it gave one.
        is_ours: Whether it calls the proxy's tool. None means that its name has not arrived.
        client_index: Its index among the calls that the client sees.
    """

    fields: JsonObject = field(default_factory=dict)
    index: int | None = None
    is_ours: bool | None = None
    client_index: int = 0

    @property
    def id(self) -> str:
        """The id of the call; empty if it has none."""
        value = self.fields.get("id")
        return value if isinstance(value, str) else ""

    @property
    def name(self) -> str:
        """The name of the function, as far as it has arrived."""
        return _as_text(get_function(self.fields).get("name"))

    @property
    def arguments(self) -> str:
        """The arguments as the model wrote them, or as JSON if the provider has parsed them already."""
        value = get_function(self.fields).get("arguments")
        return json.dumps(value) if isinstance(value, dict) else _as_text(value)


def get_function(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the `function` of a call or of a piece of it; empty if there is none."""
    function = fields.get("function")
    return function if isinstance(function, dict) else {}


def is_json_object(arguments: str) -> bool:
    """Returns whether arguments are a complete JSON object."""
    if has_too_many_brackets(arguments):
        return False
    try:
        return isinstance(DECODER.decode(arguments), dict)
    except (ValueError, RecursionError):
        return False


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else ""


class ToolCallFilter:
    """Hides calls of the proxy's tool from the client, for one answer.

    Args:
        name: The name of the proxy's tool.
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
        """The calls of the proxy's tool, in order."""
        return [call for call in self._all if call.is_ours]

    def filter_pieces(self, pieces: list[Any]) -> list[Any]:
        """Returns the pieces for the client; equal to the given ones until a call of our tool begins.

        A piece of a call is held back until the name of the call has arrived.
        """
        return [shown for piece in pieces for shown in self._filter_piece(piece)]

    def release_unnamed(self) -> list[Any]:
        """Returns the calls that never got a name, for the client. Called when the answer ends."""
        return [self._show_call(call) for call in self._all if call.is_ours is None]

    def _filter_piece(self, piece: Any) -> Iterable[Any]:
        if not isinstance(piece, dict):
            return (piece,)
        call = self._find_call(piece)
        was_ours, is_first = call.is_ours, not call.fields
        merge_piece(call.fields, piece)
        if was_ours is None:
            call.is_ours = self._is_ours(call)
            self._any_mine = self._any_mine or bool(call.is_ours)
        if call.is_ours is not False:
            return ()
        if was_ours is None:
            shown = self._show_call(call)
            return (self._renumber_piece(call, piece) if is_first else shown,)
        return (self._renumber_piece(call, piece),)

    def _find_call(self, piece: JsonObject) -> PartialToolCall:
        """Returns the call that a piece belongs to. Some providers give no index, or the same one to all."""
        raw_index = piece.get("index")
        index = raw_index if type(raw_index) is int else None
        latest = self._latest.get(index)
        if latest is not None and not self._is_new_call(piece, latest):
            return latest
        call = self._latest[index] = PartialToolCall(index=index)
        self._all.append(call)
        return call

    @staticmethod
    def _is_new_call(piece: JsonObject, last: PartialToolCall) -> bool:
        """Returns whether a piece begins another call: it has a name, and an id of its own.

        Some servers give all calls the same id, or none. Then a new call begins after one that is complete
        or, if there is neither id nor index, with each name.
        """
        function = get_function(piece)
        if not function.get("name") or not last.name:
            return False
        call_id = _as_text(piece.get("id"))
        if call_id and call_id != last.id:
            return True
        if not call_id and last.index is None:
            return True
        begins_object = _as_text(function.get("arguments")).lstrip().startswith("{")
        return begins_object and last.arguments.rstrip().endswith("}") and is_json_object(last.arguments)

    def _is_ours(self, call: PartialToolCall) -> bool | None:
        name = call.name
        if name == self._name:
            return True
        is_incomplete = not name or (self._name.startswith(name) and not call.arguments)
        is_undecided = is_incomplete and "custom" not in call.fields
        return None if is_undecided else False

    def _show_call(self, call: PartialToolCall) -> JsonObject:
        call.is_ours = False
        call.client_index = self.others
        self.others += 1
        index = {} if call.index is None else {"index": call.index}
        return self._renumber_piece(call, {**index, **call.fields})

    def _renumber_piece(self, call: PartialToolCall, piece: JsonObject) -> JsonObject:
        """Returns the piece with an index that leaves no gap where calls of the proxy's tool were removed."""
        is_moved = call.index is not None and self._any_mine
        return {**piece, "index": call.client_index} if is_moved else piece


def merge_piece(fields: JsonObject, piece: Mapping[str, Any]) -> None:
    """Merges a piece into the earlier pieces of the same object."""
    for key, value in piece.items():
        previous = fields.get(key)
        if key == "index":
            continue
        if isinstance(previous, dict) and isinstance(value, dict):
            merge_piece(previous, value)
        elif isinstance(previous, str) and isinstance(value, str) and key in _PIECEWISE:
            fields[key] = previous + value
        elif key == "name" and isinstance(previous, str) and isinstance(value, str):
            fields[key] = previous if value == previous else previous + value  # some repeat the whole name
        elif key not in fields or value not in (None, ""):
            fields[key] = dict(value) if isinstance(value, dict) else value
