"""Removes the thinking blocks that a provider would refuse in a rewritten list.

Newer models refuse a request in which signed thinking does not follow exactly the messages for which it was
made. They accept requests without the earlier thinking. So all thinking is removed from every rewritten
request. Because it is removed each time, the forwarded messages stay the same, and prompt caches stay valid.

Older models, whose requests set a thinking budget (`"type":"enabled"`), do not check the messages before the
thinking. But they require that a turn with tool calls begins with thinking, so for them thinking stays. If a
compaction has removed the first thinking block of a turn, all thinking is removed, and the request disables
thinking.

Sources: Anthropic's documentation of preserved thinking and of extended thinking with tools, 2026-11.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from compaction_proxy.core.message import Message, find_latest_user_message
from compaction_proxy.wires.json.slices import find_members
from compaction_proxy.wires.messages.blocks import THINKING, find_message_members, read_kind, split_blocks
from compaction_proxy.wires.usage import as_mapping, parse_json
from compaction_proxy.wires.wire import AdaptedMessages

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
    if as_mapping(thinking.get("block_binding")).get("prefix_mismatch_behavior") == "drop_block":
        return AdaptedMessages(messages)  # the client has asked the provider to drop such thinking itself
    if thinking.get("type") == "enabled" and _has_required_thinking(messages):
        return AdaptedMessages(messages)
    return drop_thoughts(raw, messages)


def drop_thoughts(raw: bytes, messages: Sequence[Message]) -> AdaptedMessages:
    """Returns the list without any thinking. If the request sets a thinking budget, thinking is disabled.

    If the list holds nothing but thinking, the same list is returned, because no provider accepts an empty
    list.
    """
    remaining = _drop_all_thoughts(messages)
    if not remaining:
        return AdaptedMessages(messages)
    is_enabled = _read_thinking(raw).get("type") == "enabled"
    return AdaptedMessages(remaining, {"thinking": _THINKING_DISABLED} if is_enabled else {})


def _read_thinking(raw: bytes) -> Mapping[str, Any]:
    place = find_members(raw).get("thinking")
    return as_mapping(parse_json(raw[place.start : place.stop])) if place else {}


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
    return record.role == "assistant" and any(read_kind(each) in THINKING for each in _get_blocks(record.raw))


def _get_blocks(raw: bytes) -> tuple[bytes, ...]:
    if _THINKING_MARKER not in raw:
        return ()
    place = find_message_members(raw).get("content")
    return split_blocks(raw[place.start : place.stop]) if place else ()


def _drop_all_thoughts(messages: Sequence[Message]) -> tuple[Message, ...]:
    return tuple([each for each in map(_drop_message_thoughts, messages) if each is not None])


def _drop_message_thoughts(record: Message) -> Message | None:
    """Returns a message without its thinking; None if nothing else is left."""
    if record.role != "assistant":
        return record
    blocks = _get_blocks(record.raw)
    remaining = [each for each in blocks if read_kind(each) not in THINKING]
    if len(remaining) == len(blocks):
        return record
    place = find_message_members(record.raw)["content"]
    content = b"[" + b",".join(remaining) + b"]"
    changed = record.raw[: place.start] + content + record.raw[place.stop :]
    return replace(record, raw=changed) if remaining else None
