"""Splits the content of a message into blocks of the client's bytes, and classifies blocks cheaply."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.wires.json import large
from compaction_proxy.wires.json.slices import Slice, find_members, split_elements

TEXT: Final = "text"
RESULT: Final = "tool_result"
CALL: Final = "tool_use"
THINKING: Final = frozenset({"thinking", "redacted_thinking"})
# The member of a block that makes a provider cache the prompt up to this block: a cache mark. Models do not
# see it.
CACHE_MARK: Final = "cache_control"
# The tag around text that Claude Code adds to a user's message.
_REMINDER: Final = b"system-reminder"
_OPENING: Final = "<system-reminder>"
_CLOSING: Final = "</system-reminder>"
# Blocks with more bytes than this are not tested for being blank.
_BLANK_BYTES: Final = 256


class _TypedBlock(msgspec.Struct, gc=False):
    """A block of any kind. The decoder reads only the kind."""

    type: str = ""


_TYPED_BLOCK: Final = msgspec.json.Decoder(_TypedBlock)


def read_kind(block: bytes) -> str:
    """Returns the kind of a block; empty if it has none."""
    try:
        return _TYPED_BLOCK.decode(block).type
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass
    value = large.decode_value(block)
    kind = value.get("type") if isinstance(value, dict) else None
    return kind if isinstance(kind, str) else ""


def find_message_members(raw: bytes) -> Mapping[str, Slice]:
    """Returns the positions of the members of a message.

    Raises:
        UnreadableBodyError: The bytes are not a message.
    """
    try:
        return find_members(raw)
    except RecursionError:
        raise UnreadableBodyError("too-deep") from None


def split_blocks(content: bytes) -> tuple[bytes, ...]:
    """Returns the blocks of a message's content. A string becomes one block of text.

    Raises:
        UnreadableBodyError: The content is nested too deeply.
    """
    if content.startswith(b'"'):
        return (b'{"type":"text","text":%b}' % content,)
    if not content.startswith(b"["):
        return ()
    try:
        return split_elements(content)
    except RecursionError:
        raise UnreadableBodyError("too-deep") from None


def is_reminder(block: bytes) -> bool:
    """Returns whether a block is a reminder: text that a client program, not its user, adds for the model."""
    if _REMINDER not in block:
        return False
    value: Any = large.decode_value(block)
    return isinstance(value, dict) and is_decoded_reminder(value)


def is_decoded_reminder(fields: Mapping[str, Any]) -> bool:
    """Returns whether a decoded block is a reminder (see `is_reminder`)."""
    text = fields.get("text") if fields.get("type") == TEXT else None
    return isinstance(text, str) and text.strip().startswith(_OPENING) and text.strip().endswith(_CLOSING)


def is_blank(block: bytes) -> bool:
    """Returns whether a block is text of white space alone, which providers refuse."""
    if len(block) > _BLANK_BYTES or b'"text"' not in block:
        return False
    value: Any = large.decode_value(block)
    text = value.get("text") if isinstance(value, dict) and value.get("type") == TEXT else None
    return isinstance(text, str) and not text.strip()


_MEMBERS: Final = ("content", "role")
_USER: Final = b'"user"'
# A message that contains neither of these is one piece, so it need not be parsed.
_SPLIT_MARKERS: Final = b'"tool_result"', b'"compaction"'
# The kind of a block with a provider's own compaction. The model reads nothing that precedes this block.
_COMPACTION: Final = "compaction"
PROVIDER_COMPACTS: Final = "provider-compacts"


def group_into_pieces(elements: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Divides the elements of `messages` into pieces (see `Wire`). Blocks keep the client's bytes.

    A user message with tool results becomes one piece for each result, and one for all other blocks. If all
    other blocks are reminders, they stay with the last result.

    Raises:
        UnreadableBodyError: An element is not a message, or holds a provider's own compaction.
    """
    found: list[bytes] = []
    for each in elements:
        if any(sign in each for sign in _SPLIT_MARKERS):
            found += _split_by_tool_result(each)
        else:
            found.append(each)
    return tuple(found)


def _split_by_tool_result(raw: bytes) -> Iterator[bytes]:
    places = find_message_members(raw)
    content, role = (
        raw[place.start : place.stop] if (place := places.get(name)) else b"" for name in _MEMBERS
    )
    blocks = split_blocks(content) if content.startswith(b"[") else ()
    kinds = [read_kind(each) for each in blocks]
    if _COMPACTION in kinds:
        raise UnreadableBodyError(PROVIDER_COMPACTS)
    if role != _USER or RESULT not in kinds or len(blocks) == 1:
        yield raw
        return
    others = [each for each, kind in zip(blocks, kinds, strict=True) if kind != RESULT]
    results = [each for each, kind in zip(blocks, kinds, strict=True) if kind == RESULT]
    if others and all(map(is_reminder, others)):
        results[-1] = b",".join((results[-1], *others))
        others = []
    yield from map(_encode_user_message, results)
    if others:
        yield _encode_user_message(b",".join(others))


def _encode_user_message(blocks: bytes) -> bytes:
    return b'{"role":"user","content":[%b]}' % blocks
