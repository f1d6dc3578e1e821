"""A list of records as the value of `messages`: user and assistant take turns, whatever was taken out.

A message that stands alone in its turn keeps its bytes, and blocks always do. Where several share a turn,
tool results come first, because they must stand right behind their calls, and thoughts open an answer.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from compaction_proxy.core.message import Message
from compaction_proxy.core.repair import GO_ON
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
from compaction_proxy.wires.project_instructions import join_sources

_ASSISTANT: Final = "assistant"
_USER: Final = "user"
_TURNS: Final = frozenset({_ASSISTANT, _USER})


def join_messages(messages: Sequence[Message]) -> bytes:
    """What stands between the brackets of the array."""
    return b",".join([_write_turn(role, run) for role, run in _group_turns(join_sources(messages))])


def _choose_role(record: Message) -> str:
    """The role that a record is written with. Instructions are the client's, as the provider takes them."""
    if record.is_privileged and record.raw:
        return record.role
    return _ASSISTANT if record.role == _ASSISTANT else _USER


def _group_turns(messages: Sequence[Message]) -> Iterator[tuple[str, list[Message]]]:
    """Turns, in their order, each with the role that it has.

    The first one is the user's. Instructions in the list may only stand behind what the user says: where a
    round has taken that away, they wait for the next time.
    """
    waiting: list[Message] = []
    role, run = "", list[Message]()
    for each in messages:
        own = _choose_role(each)
        if own not in _TURNS:
            waiting.append(each)
            if role == _USER:
                yield from _end_turn(role, run, waiting)
                role, run = own, []
        elif own == role:
            run.append(each)
        else:
            if own == _ASSISTANT and not role:
                yield from _end_turn(_USER, [Message(role=_USER, text=GO_ON)], waiting)
            yield from _end_turn(role, run, waiting)
            role, run = own, [each]
    yield from _end_turn(role, run, waiting)
    yield from ((each.role, [each]) for each in waiting)


def _end_turn(role: str, run: list[Message], waiting: list[Message]) -> Iterator[tuple[str, list[Message]]]:
    """A turn that is over, and the instructions that waited for its end."""
    if run:
        yield role, run
    if run and role == _USER:
        yield from ((each.role, [each]) for each in waiting)
        waiting.clear()


def _write_turn(role: str, run: Sequence[Message]) -> bytes:
    if len(run) == 1:
        return run[0].raw or encode_message(run[0])
    ordered = sorted(run, key=lambda each: not each.answers)
    parts = [_get_blocks(each) for each in ordered]
    if role == _ASSISTANT:
        parts = _put_thoughts_first(ordered, parts)
    blocks = [block for part in parts for block in part]
    said = [block for block in blocks if not is_blank(block)] or blocks[:1]
    if role == _USER:
        said.sort(key=lambda block: read_kind(block) != RESULT)
    return b'{"role":"%b","content":[%b]}' % (role.encode(), b",".join(said))


def _get_blocks(record: Message) -> tuple[bytes, ...]:
    raw = record.raw or encode_message(record)
    at = find_message_members(raw).get("content")
    return split_blocks(raw[at.start : at.stop]) if at else ()


def _put_thoughts_first(
    run: Sequence[Message], parts: Sequence[tuple[bytes, ...]]
) -> list[tuple[bytes, ...]]:
    """The blocks of one answer, those in front with which its first thoughtful message begins."""
    first = next((k for k, each in enumerate(run) if has_thoughts(each)), 0)
    if not first:
        return list(parts)
    signed = parts[first]
    stop = next((k for k, block in enumerate(signed) if read_kind(block) not in THINKING), len(signed))
    return [signed[:stop], *parts[:first], signed[stop:], *parts[first + 1 :]]
