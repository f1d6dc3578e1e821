"""Classifies the items of a Responses input, and groups them into pieces (see `Wire`).

All items of one answer form one piece, so that reasoning is never removed without the calls that follow from
it. To group items, this module decodes only their type and role.
"""

from collections.abc import Mapping
from enum import Enum
from itertools import groupby
from typing import Any, Final

import msgspec

from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.wires.body import are_objects, split_objects
from compaction_proxy.wires.json.slices import find_members, split_elements
from compaction_proxy.wires.json.values import LONG_BYTES, decode_plain, decode_value

# For each type of item with which a client answers a call: the type of the call.
CALL_TYPES_BY_OUTPUT: Final[Mapping[str, str]] = {
    "function_call_output": "function_call",
    "custom_tool_call_output": "custom_tool_call",
    "local_shell_call_output": "local_shell_call",
    "shell_call_output": "shell_call",
    "apply_patch_call_output": "apply_patch_call",
}
OUTPUT_TYPES_BY_CALL: Final[Mapping[str, str]] = {
    call: answer for answer, call in CALL_TYPES_BY_OUTPUT.items()
}
# Types of items with the provider's own compaction. Such an item replaces everything before it.
COMPACTION_TYPES: Final = frozenset({"compaction", "compaction_summary", "context_compaction"})
# The type of the last item of a request that asks for a compaction item instead of an answer.
TRIGGER_TYPE: Final = "compaction_trigger"
# Types of items with settings that apply to all items after them.
SETTING_TYPES: Final = frozenset({"additional_tools", "configuration_update"})

# An item with more bytes is decoded in pieces (see `json.large`).
_LONG_BYTES: Final = LONG_BYTES
_EMPTY_VALUES: Final = frozenset({b"", b"null", b'""', b"[]"})


class ItemGrouping(Enum):
    """How an item is grouped into pieces.

    An `ALONE` item is a piece of its own. Neighbouring `RUN` items form one piece. A `COMPACTED` item forms
    one piece with all items before it.
    """

    ALONE = "alone"
    RUN = "run"
    COMPACTED = "compacted"


class _ItemHead(msgspec.Struct, gc=False):
    type: str | None = None
    role: str | None = None


_ITEM_HEAD = msgspec.json.Decoder(_ItemHead)


def classify_item(kind: str, role: str) -> ItemGrouping:
    """Returns how an item of this type and role is grouped into pieces.

    Raises:
        UnreadableBodyError: `stateful`: the item refers to an item that only the provider has, or has neither
            type nor role. `provider-compacts`: the item asks the provider to compact.
    """
    if kind in COMPACTION_TYPES:
        return ItemGrouping.COMPACTED
    if kind in CALL_TYPES_BY_OUTPUT or kind in SETTING_TYPES:
        return ItemGrouping.ALONE
    if kind == "item_reference" or not (kind or role):
        raise UnreadableBodyError("stateful")
    if kind == TRIGGER_TYPE:
        raise UnreadableBodyError("provider-compacts")
    return ItemGrouping.ALONE if kind in {"", "message"} and role != "assistant" else ItemGrouping.RUN


def _classify_raw_item(raw: bytes) -> ItemGrouping:
    return classify_item(*read_type_and_role(raw))


def read_type_and_role(raw: bytes) -> tuple[str, str]:
    """Returns the type and the role of an item. Each is empty if the item has none.

    Raises:
        UnreadableBodyError: `too-deep`.
    """
    if len(raw) > _LONG_BYTES:
        return _read_long_type_and_role(raw)
    try:
        seen = _ITEM_HEAD.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _read_long_type_and_role(raw)
    return seen.type or "", seen.role or ""


def _read_long_type_and_role(raw: bytes) -> tuple[str, str]:
    members = find_members(raw)
    values = {key: raw[members[key].start : members[key].stop] for key in ("type", "role") if key in members}
    strings = {key: decode_plain(value) for key, value in values.items() if value.startswith(b'"')}
    return strings.get("type", ""), strings.get("role", "")


def split_message_list(value: memoryview) -> tuple[bytes, ...]:
    """Splits the value of `input` into items. A string becomes one user message.

    Raises:
        UnreadableBodyError: `no-array` or `no-messages`: the value is not a list of objects.
    """
    if bytes(value[:1]) == b'"':
        return (b'{"role":"user","content":%b}' % bytes(value),)
    return split_objects(value)


def group_into_pieces(items: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Groups the items into pieces by `classify_item`.

    Raises:
        UnreadableBodyError: `classify_item` refuses an item, so the proxy must not rewrite the list.
    """
    groupings = [_classify_raw_item(each) for each in items]
    start = (
        len(groupings) - groupings[::-1].index(ItemGrouping.COMPACTED)
        if ItemGrouping.COMPACTED in groupings
        else 0
    )
    pieces = [b",".join(items[:start])] if start else []
    for grouping, group in groupby(range(start, len(items)), groupings.__getitem__):
        indices = list(group)
        run = items[indices[0] : indices[-1] + 1]
        pieces += [b",".join(run)] if grouping is ItemGrouping.RUN else run
    return tuple(pieces)


def may_continue_piece(item: bytes) -> bool:
    """Returns whether the item after this one may belong to the same piece as this one."""
    return _classify_raw_item(item) is ItemGrouping.RUN


def regroups_previous(items: tuple[bytes, ...]) -> bool:
    """Returns whether these items turn everything before them into one piece."""
    return any(_classify_raw_item(each) is ItemGrouping.COMPACTED for each in items)


def find_skip_reason(indicators: Mapping[str, bytes]) -> str:
    """Returns why a body must stay unchanged; empty if it may change.

    It must stay unchanged if the provider stores a part of the conversation, or compacts the input itself.
    """
    names = {name for name, value in indicators.items() if value not in _EMPTY_VALUES}
    if names & {"previous_response_id", "conversation"}:
        return "stateful"
    return "provider-compacts" if names else ""


def split_items(piece: bytes) -> tuple[bytes, ...]:
    """Splits a piece into the bytes of its items.

    Raises:
        UnreadableBodyError: The bytes are not a piece.
    """
    items = split_elements(b"[%b]" % piece)
    if not items or not are_objects(items):
        raise UnreadableBodyError("no-messages")
    return items


def decode_items(piece: bytes) -> list[dict[str, Any]]:
    """Decodes the items of a piece.

    Raises:
        UnreadableBodyError: The bytes are not a piece: `not-json`, `no-messages`, `too-many` or `too-deep`.
    """
    value = decode_value(b"[%b]" % piece)
    if not isinstance(value, list) or not value or not all(isinstance(each, dict) for each in value):
        raise UnreadableBodyError("no-messages")
    return value
