"""What becomes of a model's thoughts where the list before them was rewritten.

Newer models take a signed thought back only behind the very list that it was made for, and refuse a request
with any other; they miss none that is left out. So all thoughts are left out of every request that is not the
client's own: what is forwarded says the same today and tomorrow, and prompt caches keep hitting.
Older models, which are told how much to think (`enabled`), check no list but demand that a turn with tools
begins with a thought: there thoughts stay, and where a round has taken the first one, the turn goes on
without thinking.
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

_MARK: Final = b"thinking"  # in the kinds of both blocks
_OFF: Final = b'{"type":"disabled"}'


def adapt_for_provider(raw: bytes, messages: Sequence[Message]) -> AdaptedMessages:
    """The list without the thoughts that the provider would refuse in it, and what else must change for that.

    Args:
        raw: The client's body.
        messages: The list that goes on in place of its own.
    """
    thinking = _read_thinking(raw)
    if as_mapping(thinking.get("block_binding")).get("prefix_mismatch_behavior") == "drop_block":
        return AdaptedMessages(messages)  # the client has asked the provider to do the same
    if thinking.get("type") == "enabled" and _begins_with_a_thought(messages):
        return AdaptedMessages(messages)
    return drop_thoughts(raw, messages)


def drop_thoughts(raw: bytes, messages: Sequence[Message]) -> AdaptedMessages:
    """The list without any thoughts; a model that is told how much to think does not think then.

    A list of nothing but thoughts stays as it is: no provider takes an empty one.
    """
    kept = _drop_all_thoughts(messages)
    if not kept:
        return AdaptedMessages(messages)
    told = _read_thinking(raw).get("type") == "enabled"
    return AdaptedMessages(kept, {"thinking": _OFF} if told else {})


def _read_thinking(raw: bytes) -> Mapping[str, Any]:
    place = find_members(raw).get("thinking")
    return as_mapping(parse_json(raw[place.start : place.stop])) if place else {}


def _begins_with_a_thought(messages: Sequence[Message]) -> bool:
    """Whether the turn under way does, if the model has called tools in it."""
    user = find_latest_user_message(messages)
    turn = messages[0 if user is None else user + 1 :]
    first = next((each for each in turn if each.role == "assistant"), None)
    return first is None or not first.calls or has_thoughts(first)


def has_thoughts(record: Message) -> bool:
    """Whether thoughts stand among a message's blocks."""
    return record.role == "assistant" and any(read_kind(each) in THINKING for each in _get_blocks(record.raw))


def _get_blocks(raw: bytes) -> tuple[bytes, ...]:
    if _MARK not in raw:
        return ()
    place = find_message_members(raw).get("content")
    return split_blocks(raw[place.start : place.stop]) if place else ()


def _drop_all_thoughts(messages: Sequence[Message]) -> tuple[Message, ...]:
    return tuple([each for each in map(_drop_message_thoughts, messages) if each is not None])


def _drop_message_thoughts(record: Message) -> Message | None:
    """A message without its thoughts; None where it has nothing else."""
    if record.role != "assistant":
        return record
    blocks = _get_blocks(record.raw)
    kept = [each for each in blocks if read_kind(each) not in THINKING]
    if len(kept) == len(blocks):
        return record
    place = find_message_members(record.raw)["content"]
    content = b"[" + b",".join(kept) + b"]"
    whole = record.raw[: place.start] + content + record.raw[place.stop :]
    return replace(record, raw=whole) if kept else None
