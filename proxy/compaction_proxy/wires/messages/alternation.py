"""Encodes a list of records as the array `messages`, in which user and assistant must alternate.

In this module, a turn is a run of consecutive messages of one role, which is written as one element of the
array. A message that is the only one of its turn keeps its bytes. If a turn has several messages, their
blocks keep their bytes but may change places: tool results come first in a user's turn, because they must
directly follow their calls, and thinking comes first in an assistant's turn.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from compaction_proxy.core.message import Message
from compaction_proxy.core.repair import CONTINUE_TEXT
from compaction_proxy.wires.messages.blocks import (
    RESULT,
    THINKING,
    find_message_members,
    is_blank,
    read_kind,
    split_blocks,
)
from compaction_proxy.wires.messages.messages import encode_message
from compaction_proxy.wires.messages.thinking import has_thoughts
from compaction_proxy.wires.project_instructions import rejoin_divided_messages

_ASSISTANT: Final = "assistant"
_USER: Final = "user"
_TURNS: Final = frozenset({_ASSISTANT, _USER})


def join_messages(messages: Sequence[Message]) -> bytes:
    """Encodes messages as the bytes between the brackets of the array `messages`."""
    return b",".join(
        [_write_turn(role, run) for role, run in _group_turns(rejoin_divided_messages(messages))]
    )


def _choose_role(record: Message) -> str:
    """Returns the role with which a record is written: `user`, `assistant`, or a client's privileged role."""
    if record.is_privileged and record.raw:
        return record.role
    return _ASSISTANT if record.role == _ASSISTANT else _USER


def _group_turns(messages: Sequence[Message]) -> Iterator[tuple[str, list[Message]]]:
    """Yields each turn with its role, in order.

    The first turn is a user's turn; if the list begins with another role, one is added. A privileged message
    is allowed only after a user's turn. If a compaction has removed the user's turn before it, the privileged
    message is written after the next user's turn.
    """
    waiting: list[Message] = []
    role, run = "", list[Message]()
    for each in messages:
        own_role = _choose_role(each)
        if own_role not in _TURNS:
            waiting.append(each)
            if role == _USER:
                yield from _end_turn(role, run, waiting)
                role, run = own_role, []
        elif own_role == role:
            run.append(each)
        else:
            if own_role == _ASSISTANT and not role:
                yield from _end_turn(_USER, [Message(role=_USER, text=CONTINUE_TEXT)], waiting)
            yield from _end_turn(role, run, waiting)
            role, run = own_role, [each]
    yield from _end_turn(role, run, waiting)
    yield from ((each.role, [each]) for each in waiting)


def _end_turn(role: str, run: list[Message], waiting: list[Message]) -> Iterator[tuple[str, list[Message]]]:
    """Yields a finished turn, and after a user's turn the privileged messages that have waited for it."""
    if run:
        yield role, run
    if run and role == _USER:
        yield from ((each.role, [each]) for each in waiting)
        waiting.clear()


def _write_turn(role: str, run: Sequence[Message]) -> bytes:
    if len(run) == 1:
        return run[0].raw or encode_message(run[0])
    ordered = sorted(run, key=lambda each: not each.answered_call_ids)
    parts = [_get_blocks(each) for each in ordered]
    if role == _ASSISTANT:
        parts = _put_thoughts_first(ordered, parts)
    blocks = [block for part in parts for block in part]
    content_blocks = [block for block in blocks if not is_blank(block)] or blocks[:1]
    if role == _USER:
        content_blocks.sort(key=lambda block: read_kind(block) != RESULT)
    return b'{"role":"%b","content":[%b]}' % (role.encode(), b",".join(content_blocks))


def _get_blocks(record: Message) -> tuple[bytes, ...]:
    raw = record.raw or encode_message(record)
    place = find_message_members(raw).get("content")
    return split_blocks(raw[place.start : place.stop]) if place else ()


def _put_thoughts_first(
    run: Sequence[Message], parts: Sequence[tuple[bytes, ...]]
) -> list[tuple[bytes, ...]]:
    """Returns the blocks of each message of an assistant's turn, with the turn's first thinking moved ahead.

    The moved blocks are the thinking at the beginning of the first message that has thinking.
    """
    first = next((k for k, each in enumerate(run) if has_thoughts(each)), 0)
    if not first:
        return list(parts)
    opening_blocks = parts[first]
    stop = next(
        (k for k, block in enumerate(opening_blocks) if read_kind(block) not in THINKING), len(opening_blocks)
    )
    return [opening_blocks[:stop], *parts[:first], opening_blocks[stop:], *parts[first + 1 :]]
