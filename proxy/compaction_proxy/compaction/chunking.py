"""Cutting what is to be summarised so that a summary model with a small window can read it.

Sizes are in characters as a transcript shows them: the caller knows what a character costs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from compaction_proxy.core.message import Message, iter_units
from compaction_proxy.core.strategies import SummaryShape

# No message is shown shorter than this, in characters.
SMALLEST_CUT = 40
# What stands around a message in a transcript, in characters; roughly.
ENTRY_CHARACTERS = 24

Group = tuple[Message, ...]


def _count_characters(message: Message) -> int:
    calls = sum(len(call.name) + len(call.arguments) + 10 for call in message.calls)
    parts = sum(len(part.kind) + 3 for part in message.parts)
    return len(message.text) + len(message.refusal) + calls + parts


def count_shown_characters(messages: Sequence[Message], shape: SummaryShape) -> int:
    """Characters that the messages take in a transcript."""
    return sum(
        min(_count_characters(each), shape.tool_characters if each.answers else shape.message_characters)
        + ENTRY_CHARACTERS
        for each in messages
    )


def narrow_shape(messages: Sequence[Message], shape: SummaryShape, characters: float) -> SummaryShape:
    """A shape that shows these messages in at most so many characters, or as few as can be.

    What is worth least goes first: the middles of tool results, then those of all other messages.
    """
    for field in ("tool_characters", "message_characters"):
        results = field == "tool_characters"
        concerned = [each for each in messages if bool(each.answers) is results]
        others = [each for each in messages if bool(each.answers) is not results]
        room = characters - count_shown_characters(others, shape) - ENTRY_CHARACTERS * len(concerned)
        size = min(
            _find_cut_length([_count_characters(each) for each in concerned], room), getattr(shape, field)
        )
        shape = replace(shape, **{field: max(SMALLEST_CUT, size)})
    return shape


def _find_cut_length(lengths: Sequence[int], room: float) -> int:
    """The largest size to which all may be cut so that together they take at most `room`."""
    ordered = sorted(lengths)
    for index, length in enumerate(ordered):
        share = room / (len(ordered) - index)
        if length > share:
            return max(0, int(share))
        room -= length
    return ordered[-1] if ordered else SMALLEST_CUT


def split_into_portions(
    messages: Sequence[Message], shape: SummaryShape, characters: float
) -> tuple[Group, ...]:
    """The messages in consecutive stretches of whole units, each shown in at most so many characters.

    A unit that is larger by itself is a stretch of its own.
    """
    return tuple(_iterate_portions(messages, shape, characters))


def _iterate_portions(messages: Sequence[Message], shape: SummaryShape, characters: float) -> Iterator[Group]:
    stretch: list[Message] = []
    taken = 0
    for start, stop in iter_units(messages):
        unit = messages[start:stop]
        size = count_shown_characters(unit, shape)
        if stretch and taken + size > characters:
            yield tuple(stretch)
            stretch, taken = [], 0
        stretch += unit
        taken += size
    if stretch:
        yield tuple(stretch)


def split_into_halves(
    groups: Sequence[Group], shape: SummaryShape
) -> tuple[tuple[Group, ...], tuple[Group, ...]]:
    """At least two groups as two rows of about the same size, each of at least one group."""
    half = sum(count_shown_characters(group, shape) for group in groups) / 2
    stop, taken = 0, 0
    while stop < len(groups) - 1 and (
        stop == 0 or taken + count_shown_characters(groups[stop], shape) <= half
    ):
        taken += count_shown_characters(groups[stop], shape)
        stop += 1
    return tuple(groups[:stop]), tuple(groups[stop:])
