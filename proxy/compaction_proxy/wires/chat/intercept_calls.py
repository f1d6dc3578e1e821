"""Separates calls of the proxy's own tool from calls of the client's tools, as an answer arrives in pieces.

A piece is an element of `delta.tool_calls`. `intercept_stream` and `intercept_response` read the answers that
contain the pieces.
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
# If an answer has one of these finish reasons, the proxy does not answer its calls: arguments may be cut off.
CUT_OFF_REASONS: Final = frozenset({"length", "content_filter"})

# Text fields whose value arrives in several pieces, which must be joined.
_STREAMED_FIELDS: Final = frozenset(
    {"arguments", "input", "text", "summary", "data", "thinking", "signature"}
)


@dataclass(slots=True)
class PartialToolCall:
    """The part of one tool call that has arrived.

    Attributes:
        fields: The fields of the call that have arrived, without the index.
        index: The index that the provider gave the call, if any.
        is_ours: Whether the call is for the proxy's tool. None as long as its name may be incomplete.
        client_index: The call's index among the calls that the client sees.
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
        """The part of the function's name that has arrived."""
        return _as_text(get_function(self.fields).get("name"))

    @property
    def arguments(self) -> str:
        """The arguments as the model wrote them, or as JSON if the provider has parsed them already."""
        value = get_function(self.fields).get("arguments")
        return json.dumps(value) if isinstance(value, dict) else _as_text(value)


def get_function(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the `function` of a call, or of a piece of a call; empty if there is none."""
    function = fields.get("function")
    return function if isinstance(function, dict) else {}


def is_json_object(arguments: str) -> bool:
    """Returns whether the arguments of a call are a complete JSON object."""
    if has_too_many_brackets(arguments):
        return False
    try:
        return isinstance(DECODER.decode(arguments), dict)
    except (ValueError, RecursionError):
        return False


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else ""


class ToolCallFilter:
    """Hides the calls of the proxy's tool in one answer from the client.

    Args:
        name: The name of the proxy's tool.

    Attributes:
        client_call_count: How many calls the client has been shown.
    """

    __slots__ = ("_calls", "_has_own_calls", "_latest_by_index", "_name", "client_call_count")

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: list[PartialToolCall] = []
        self._latest_by_index: dict[int | None, PartialToolCall] = {}
        self._has_own_calls = False
        self.client_call_count = 0

    @property
    def own_calls(self) -> list[PartialToolCall]:
        """The calls of the proxy's tool, in order."""
        return [call for call in self._calls if call.is_ours]

    def filter_pieces(self, pieces: list[Any]) -> list[Any]:
        """Returns the pieces to send to the client. Until the proxy's tool is called, none are changed.

        The pieces of a call are held back until the name of the call has arrived.
        """
        return [shown for piece in pieces for shown in self._filter_piece(piece)]

    def release_unnamed(self) -> list[Any]:
        """Returns the held-back calls whose name never became complete, to be sent to the client.

        To be called when the answer ends.
        """
        return [self._release_call_to_client(call) for call in self._calls if call.is_ours is None]

    def _filter_piece(self, piece: Any) -> Iterable[Any]:
        if not isinstance(piece, dict):
            return (piece,)
        call = self._find_call(piece)
        was_ours, is_first = call.is_ours, not call.fields
        merge_piece(call.fields, piece)
        if was_ours is None:
            call.is_ours = self._is_ours(call)
            self._has_own_calls = self._has_own_calls or bool(call.is_ours)
        if call.is_ours is not False:
            return ()
        if was_ours is None:
            shown = self._release_call_to_client(call)
            return (self._renumber_piece(call, piece) if is_first else shown,)
        return (self._renumber_piece(call, piece),)

    def _find_call(self, piece: JsonObject) -> PartialToolCall:
        """Returns the call to which a piece belongs.

        The index does not suffice to find the call: some providers give calls no index, or all the same.
        """
        raw_index = piece.get("index")
        index = raw_index if type(raw_index) is int else None
        latest = self._latest_by_index.get(index)
        if latest is not None and not self._is_new_call(piece, latest):
            return latest
        call = self._latest_by_index[index] = PartialToolCall(index=index)
        self._calls.append(call)
        return call

    @staticmethod
    def _is_new_call(piece: JsonObject, last: PartialToolCall) -> bool:
        """Returns whether a piece begins a new call. Otherwise, it belongs to the call `last`.

        Only a piece with a function name can begin a call, and usually it has a new id. Some servers give all
        calls the same id, or none. Then a piece with a name begins a new call if its arguments begin an
        object and those of `last` are complete. If there is neither id nor index, every piece with a name
        begins a call.
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

    def _release_call_to_client(self, call: PartialToolCall) -> JsonObject:
        call.is_ours = False
        call.client_index = self.client_call_count
        self.client_call_count += 1
        index = {} if call.index is None else {"index": call.index}
        return self._renumber_piece(call, {**index, **call.fields})

    def _renumber_piece(self, call: PartialToolCall, piece: JsonObject) -> JsonObject:
        """Returns the piece with an index that leaves no gap where calls of the proxy's tool were removed."""
        is_moved = call.index is not None and self._has_own_calls
        return {**piece, "index": call.client_index} if is_moved else piece


def merge_piece(fields: JsonObject, piece: Mapping[str, Any]) -> None:
    """Merges a piece into `fields`, which hold the earlier pieces of the same object."""
    for key, value in piece.items():
        previous = fields.get(key)
        if key == "index":
            continue
        if isinstance(previous, dict) and isinstance(value, dict):
            merge_piece(previous, value)
        elif isinstance(previous, str) and isinstance(value, str) and key in _STREAMED_FIELDS:
            fields[key] = previous + value
        elif key == "name" and isinstance(previous, str) and isinstance(value, str):
            # Some providers repeat the whole name in each piece.
            fields[key] = previous if value == previous else previous + value
        elif key not in fields or value not in (None, ""):
            fields[key] = dict(value) if isinstance(value, dict) else value
