"""Splits the content of a message into blocks of the client's bytes, and classifies blocks cheaply.

It also removes the thinking blocks that a provider would refuse in a rewritten list. Newer models refuse a
request in which signed thinking does not follow exactly the messages for which it was made. They accept
requests without the earlier thinking. So all thinking is removed from every rewritten request. Because it is
removed each time, the forwarded messages stay the same, and prompt caches stay valid.

Older models, whose requests set a thinking budget (`"type":"enabled"`), do not check the messages before the
thinking. But they require that a turn with tool calls begins with thinking, so for them thinking stays. If a
compaction has removed the first thinking block of a turn, all thinking is removed, and the request disables
thinking.

Sources: Anthropic's documentation of preserved thinking and of extended thinking with tools, 2026-11.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec

from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.core.message import Message, find_latest_user_message
from compaction_proxy.wires.json.slices import find_members, split_elements
from compaction_proxy.wires.json.values import as_object, as_string, decode_value, parse_json
from compaction_proxy.wires.wire import AdaptedMessages

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
    return as_string(as_object(decode_value(block)).get("type"))


def split_blocks(content: bytes) -> tuple[bytes, ...]:
    """Returns the blocks of a message's content. A string becomes one block of text.

    Raises:
        UnreadableBodyError: The content is nested too deeply.
    """
    if content.startswith(b'"'):
        return (b'{"type":"text","text":%b}' % content,)
    return split_elements(content) if content.startswith(b"[") else ()


def split_content_blocks(raw: bytes) -> tuple[bytes, ...]:
    """Returns the blocks of a message; none if it has no content."""
    place = find_members(raw).get("content")
    return split_blocks(raw[place.start : place.stop]) if place else ()


def is_reminder(block: bytes) -> bool:
    """Returns whether a block is a reminder: text that a client program, not its user, adds for the model."""
    if _REMINDER not in block:
        return False
    return is_decoded_reminder(as_object(decode_value(block)))


def is_decoded_reminder(fields: Mapping[str, Any]) -> bool:
    """Returns whether a decoded block is a reminder (see `is_reminder`)."""
    text = fields.get("text") if fields.get("type") == TEXT else None
    return isinstance(text, str) and text.strip().startswith(_OPENING) and text.strip().endswith(_CLOSING)


def is_blank(block: bytes) -> bool:
    """Returns whether a block is text of white space alone, which providers refuse."""
    if len(block) > _BLANK_BYTES or b'"text"' not in block:
        return False
    fields = as_object(decode_value(block))
    text = fields.get("text") if fields.get("type") == TEXT else None
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
    places = find_members(raw)
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


_THINKING_MARKER: Final = b"thinking"  # occurs in the names of both kinds of thinking blocks
_THINKING_DISABLED: Final = b'{"type":"disabled"}'


def adapt_for_provider(raw: bytes, messages: Sequence[Message]) -> AdaptedMessages:
    """Returns the list without the thinking that the provider would refuse.

    The result also holds the members of the body that must change together with the list.

    Args:
        raw: The client's body.
        messages: The list of messages that replaces the client's list.
    """
    thinking = _read_thinking(raw)
    if as_object(thinking.get("block_binding")).get("prefix_mismatch_behavior") == "drop_block":
        return AdaptedMessages(messages)  # the client has asked the provider to drop such thinking itself
    if thinking.get("type") == "enabled" and _has_required_thinking(messages):
        return AdaptedMessages(messages)
    return drop_thoughts(raw, messages)


def drop_thoughts(raw: bytes, messages: Sequence[Message]) -> AdaptedMessages:
    """Returns the list without any thinking. If the request sets a thinking budget, thinking is disabled.

    If the list holds nothing but thinking, the same list is returned, because no provider accepts an empty
    list.
    """
    remaining = tuple([each for each in map(_drop_message_thoughts, messages) if each is not None])
    if not remaining:
        return AdaptedMessages(messages)
    is_enabled = _read_thinking(raw).get("type") == "enabled"
    return AdaptedMessages(remaining, {"thinking": _THINKING_DISABLED} if is_enabled else {})


def _read_thinking(raw: bytes) -> Mapping[str, Any]:
    place = find_members(raw).get("thinking")
    return as_object(parse_json(raw[place.start : place.stop])) if place else {}


def _has_required_thinking(messages: Sequence[Message]) -> bool:
    """Returns whether the latest turn's first assistant message has thinking, or needs none.

    It needs none if it calls no tools, or does not exist yet.
    """
    user = find_latest_user_message(messages)
    turn = messages[0 if user is None else user + 1 :]
    first = next((each for each in turn if each.role == "assistant"), None)
    return first is None or not first.calls or has_thoughts(first)


def has_thoughts(record: Message) -> bool:
    """Returns whether a message has thinking blocks."""
    return record.role == "assistant" and any(
        read_kind(each) in THINKING for each in _split_thinking_message(record.raw)
    )


def _split_thinking_message(raw: bytes) -> tuple[bytes, ...]:
    """Returns the blocks of a message that may have thinking; none if it certainly has no thinking."""
    return split_content_blocks(raw) if _THINKING_MARKER in raw else ()


def _drop_message_thoughts(record: Message) -> Message | None:
    """Returns a message without its thinking; None if nothing else is left."""
    if record.role != "assistant":
        return record
    blocks = _split_thinking_message(record.raw)
    remaining = [each for each in blocks if read_kind(each) not in THINKING]
    if len(remaining) == len(blocks):
        return record
    place = find_members(record.raw)["content"]
    content = b"[" + b",".join(remaining) + b"]"
    changed = record.raw[: place.start] + content + record.raw[place.stop :]
    return replace(record, raw=changed) if remaining else None
