"""The items of a Responses input: which of them belong together, and what each kind is for.

Everything that an answer is made of is one piece, so that reasoning never leaves without the calls that came
of it. Of an item no more is decoded here than tells its kind.
"""

from collections.abc import Mapping
from enum import Enum
from itertools import groupby
from typing import Any, Final

import msgspec

from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.wires.body import are_objects
from compaction_proxy.wires.json import large
from compaction_proxy.wires.json.slices import find_members, split_elements

# Calls that the client answers with text, by the kind of the answer.
ANSWERED: Final[Mapping[str, str]] = {
    "function_call_output": "function_call",
    "custom_tool_call_output": "custom_tool_call",
    "local_shell_call_output": "local_shell_call",
    "shell_call_output": "shell_call",
    "apply_patch_call_output": "apply_patch_call",
}
ANSWER_OF: Final[Mapping[str, str]] = {call: answer for answer, call in ANSWERED.items()}
# What the provider, or the client by the provider's means, has made of all that stands before it.
COMPACTED: Final = frozenset({"compaction", "compaction_summary", "context_compaction"})
# The last item of a request that asks for such an item in place of an answer.
TRIGGER: Final = "compaction_trigger"
# Settings that stand among the items and hold for all behind them.
STANDING: Final = frozenset({"additional_tools", "configuration_update"})

# An item that is longer is taken apart in pieces, in bytes (`long_json`).
_LONG_BYTES: Final = large.LONG_BYTES
_NOTHING: Final = frozenset({b"", b"null", b'""', b"[]"})


class ItemGrouping(Enum):
    """What an item is to the pieces."""

    ALONE = "alone"
    RUN = "run"
    COMPACTED = "compacted"


class _ItemHead(msgspec.Struct, gc=False):
    type: str | None = None
    role: str | None = None


_ITEM_HEAD = msgspec.json.Decoder(_ItemHead)


def classify_item(kind: str, role: str) -> ItemGrouping:
    """What an item of this kind is, or a message of this role.

    Raises:
        Unreadable: `stateful`: it refers to what only the provider has, as one without kind or role does;
            `provider-compacts`: it asks the provider to compact.
    """
    if kind in COMPACTED:
        return ItemGrouping.COMPACTED
    if kind in ANSWERED or kind in STANDING:
        return ItemGrouping.ALONE
    if kind == "item_reference" or not (kind or role):
        raise UnreadableBodyError("stateful")
    if kind == TRIGGER:
        raise UnreadableBodyError("provider-compacts")
    return ItemGrouping.ALONE if kind in {"", "message"} and role != "assistant" else ItemGrouping.RUN


def _classify_raw_item(raw: bytes) -> ItemGrouping:
    """The same of an item's bytes."""
    return classify_item(*read_kind(raw))


def read_kind(raw: bytes) -> tuple[str, str]:
    """Returns the type and the role of an item, each empty where the item has none.

    Raises:
        Unreadable: `too-deep`.
    """
    if len(raw) > _LONG_BYTES:
        return _read_long_kind(raw)
    try:
        seen = _ITEM_HEAD.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _read_long_kind(raw)
    return seen.type or "", seen.role or ""


def _read_long_kind(raw: bytes) -> tuple[str, str]:
    try:
        found = find_members(raw)
    except RecursionError:
        raise UnreadableBodyError("too-deep") from None
    held = {key: raw[found[key].start : found[key].stop] for key in ("type", "role") if key in found}
    told = {key: large.decode_plain(value) for key, value in held.items() if value.startswith(b'"')}
    return told.get("type", ""), told.get("role", "")


def parse_items(value: memoryview) -> tuple[bytes, ...]:
    """The elements of `input`; a string is what one user message says.

    Raises:
        Unreadable: `no-array` or `no-messages`; it is no list of objects.
    """
    if bytes(value[:1]) == b'"':
        return (b'{"role":"user","content":%b}' % bytes(value),)
    items = split_elements(value)
    if not are_objects(items):
        raise UnreadableBodyError("no-messages")
    return items


def to_pieces(items: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """The items as pieces: see `classify_item`.

    Raises:
        Unreadable: One of them keeps us from rewriting any.
    """
    sides = [_classify_raw_item(each) for each in items]
    start = len(sides) - sides[::-1].index(ItemGrouping.COMPACTED) if ItemGrouping.COMPACTED in sides else 0
    made = [b",".join(items[:start])] if start else []
    for side, together in groupby(range(start, len(items)), sides.__getitem__):
        indices = list(together)
        run = items[indices[0] : indices[-1] + 1]
        made += [b",".join(run)] if side is ItemGrouping.RUN else run
    return tuple(made)


def may_continue(item: bytes) -> bool:
    """Whether what follows an item may belong to the same piece."""
    return _classify_raw_item(item) is ItemGrouping.RUN


def regroups_previous(items: tuple[bytes, ...]) -> bool:
    """Whether items make one piece of everything that stands before them."""
    return any(_classify_raw_item(each) is ItemGrouping.COMPACTED for each in items)


def find_skip_reason(indicators: Mapping[str, bytes]) -> str:
    """Why a body is left as it is, by its members: the provider has the rest, or compacts by itself."""
    told = {name for name, value in indicators.items() if value not in _NOTHING}
    if told & {"previous_response_id", "conversation"}:
        return "stateful"
    return "provider-compacts" if told else ""


def split_items(piece: bytes) -> tuple[bytes, ...]:
    """The items of a piece, as their bytes.

    Raises:
        Unreadable: It is none.
    """
    try:
        items = split_elements(b"[%b]" % piece)
    except RecursionError:
        raise UnreadableBodyError("too-deep") from None
    if not items or not are_objects(items):
        raise UnreadableBodyError("no-messages")
    return items


def decode_items(piece: bytes) -> list[dict[str, Any]]:
    """The items of a piece.

    Raises:
        Unreadable: It is none: `not-json`, `no-messages` or `too-deep`.
    """
    value = large.decode_value(b"[%b]" % piece)
    if not isinstance(value, list) or not value or not all(isinstance(each, dict) for each in value):
        raise UnreadableBodyError("no-messages")
    return value
