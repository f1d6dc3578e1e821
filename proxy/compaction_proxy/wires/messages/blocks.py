"""The content of a message as blocks, each the client's own bytes, and what is told of one at a glance."""

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
# What makes a provider keep what it has read up to there; of no meaning to the conversation.
MARK: Final = "cache_control"
# As Claude Code marks what it adds to what a user says.
_REMINDER: Final = b"system-reminder"
_OPENING: Final = "<system-reminder>"
_CLOSING: Final = "</system-reminder>"
# Blocks that say nothing are short.
_BLANK_BYTES: Final = 256


class _TypedBlock(msgspec.Struct, gc=False):
    """Any block; only its kind is looked at."""

    type: str = ""


_TYPED_BLOCK: Final = msgspec.json.Decoder(_TypedBlock)


def read_kind(block: bytes) -> str:
    """The kind of a block; empty where it has none."""
    try:
        return _TYPED_BLOCK.decode(block).type
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass
    value = large.decode_value(block)
    told = value.get("type") if isinstance(value, dict) else None
    return told if isinstance(told, str) else ""


def find_message_members(raw: bytes) -> Mapping[str, Slice]:
    """Where the members of a message stand.

    Raises:
        Unreadable: It is no message.
    """
    try:
        return find_members(raw)
    except RecursionError:
        raise UnreadableBodyError("too-deep") from None


def split_blocks(content: bytes) -> tuple[bytes, ...]:
    """The blocks of a content; a string is one of text.

    Raises:
        Unreadable: It is nested too deeply.
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
    """Whether a block is text by which a client's program, and no user, reminds the model of something."""
    if _REMINDER not in block:
        return False
    value: Any = large.decode_value(block)
    return isinstance(value, dict) and is_decoded_reminder(value)


def is_decoded_reminder(block: Mapping[str, Any]) -> bool:
    """The same of a decoded block."""
    text = block.get("text") if block.get("type") == TEXT else None
    return isinstance(text, str) and text.strip().startswith(_OPENING) and text.strip().endswith(_CLOSING)


def is_blank(block: bytes) -> bool:
    """Whether a block is text that says nothing, which providers refuse."""
    if len(block) > _BLANK_BYTES or b'"text"' not in block:
        return False
    value: Any = large.decode_value(block)
    text = value.get("text") if isinstance(value, dict) and value.get("type") == TEXT else None
    return isinstance(text, str) and not text.strip()


_MEMBERS: Final = ("content", "role")
_USER: Final = b'"user"'
_WORTH_A_LOOK: Final = b'"tool_result"', b'"compaction"'
# What a provider has put in the place of a conversation. What stands before it, no model reads.
_COMPACTION: Final = "compaction"
PROVIDER_COMPACTS: Final = "provider-compacts"


def to_pieces(elements: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """The elements of `messages` as pieces; bytes of blocks are the client's own.

    Raises:
        Unreadable: One of them is no message, or holds what the provider has compacted.
    """
    found: list[bytes] = []
    for each in elements:
        if any(sign in each for sign in _WORTH_A_LOOK):
            found += _split_message(each)
        else:
            found.append(each)
    return tuple(found)


def _split_message(raw: bytes) -> Iterator[bytes]:
    places = find_message_members(raw)
    content, role = (raw[at.start : at.stop] if (at := places.get(name)) else b"" for name in _MEMBERS)
    blocks = split_blocks(content) if content.startswith(b"[") else ()
    kinds = [read_kind(each) for each in blocks]
    if _COMPACTION in kinds:
        raise UnreadableBodyError(PROVIDER_COMPACTS)
    if role != _USER or RESULT not in kinds or len(blocks) == 1:
        yield raw
        return
    rest = [each for each, kind in zip(blocks, kinds, strict=True) if kind != RESULT]
    results = [each for each, kind in zip(blocks, kinds, strict=True) if kind == RESULT]
    if rest and all(map(is_reminder, rest)):
        results[-1] = b",".join((results[-1], *rest))
        rest = []
    yield from map(_encode_user_message, results)
    if rest:
        yield _encode_user_message(b",".join(rest))


def _encode_user_message(blocks: bytes) -> bytes:
    return b'{"role":"user","content":[%b]}' % blocks
