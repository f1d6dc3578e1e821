"""Shortens or splits the messages to summarise, so that they fit a summary model's context window.

Sizes are in characters of the transcript. The caller converts them from tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from compaction_proxy.core.message import Message, iter_units
from compaction_proxy.core.strategies import SummaryShape

# A transcript shows at least this many characters of every message that is longer than that.
SMALLEST_CUT = 40
# Approximate number of characters that a transcript adds around each message.
ENTRY_CHARACTERS = 24

Group = tuple[Message, ...]


def _count_characters(message: Message) -> int:
    calls = sum(len(call.name) + len(call.arguments) + 10 for call in message.calls)
    parts = sum(len(part.kind) + 3 for part in message.parts)
    return len(message.text) + len(message.refusal) + calls + parts


def count_shown_characters(messages: Sequence[Message], shape: SummaryShape) -> int:
    """Counts the characters that the messages take in a transcript of this shape."""
    return sum(
        min(
            _count_characters(each),
            shape.tool_characters if each.answered_call_ids else shape.message_characters,
        )
        + ENTRY_CHARACTERS
        for each in messages
    )


def shrink_shape_to_fit(messages: Sequence[Message], shape: SummaryShape, characters: float) -> SummaryShape:
    """Returns the shape with smaller sizes of messages, so that the transcript takes at most `characters`.

    The least valuable text is cut first: the middles of tool results, then the middles of all other messages.
    No size falls below `SMALLEST_CUT`, even if the transcript then takes more than `characters`.
    """
    for field in ("tool_characters", "message_characters"):
        is_for_results = field == "tool_characters"
        affected = [each for each in messages if bool(each.answered_call_ids) is is_for_results]
        others = [each for each in messages if bool(each.answered_call_ids) is not is_for_results]
        room = characters - count_shown_characters(others, shape) - ENTRY_CHARACTERS * len(affected)
        size = min(
            _find_cut_length([_count_characters(each) for each in affected], room), getattr(shape, field)
        )
        shape = replace(shape, **{field: max(SMALLEST_CUT, size)})
    return shape


def _find_cut_length(lengths: Sequence[int], room: float) -> int:
    """Returns the largest length to which all texts may be cut so that their sum is at most `room`."""
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
    """Splits the messages into consecutive portions of whole units.

    Each portion takes at most `characters` in a transcript of this shape. A single unit that takes more
    becomes a portion of its own.
    """
    return tuple(_iterate_portions(messages, shape, characters))


def _iterate_portions(messages: Sequence[Message], shape: SummaryShape, characters: float) -> Iterator[Group]:
    portion: list[Message] = []
    portion_size = 0
    for start, stop in iter_units(messages):
        unit = messages[start:stop]
        size = count_shown_characters(unit, shape)
        if portion and portion_size + size > characters:
            yield tuple(portion)
            portion, portion_size = [], 0
        portion += unit
        portion_size += size
    if portion:
        yield tuple(portion)


def split_into_halves(
    groups: Sequence[Group], shape: SummaryShape
) -> tuple[tuple[Group, ...], tuple[Group, ...]]:
    """Splits at least two groups into two sequences of similar size, each with at least one group."""
    half = sum(count_shown_characters(group, shape) for group in groups) / 2
    stop, first_half_size = 0, 0
    while stop < len(groups) - 1 and (
        stop == 0 or first_half_size + count_shown_characters(groups[stop], shape) <= half
    ):
        first_half_size += count_shown_characters(groups[stop], shape)
        stop += 1
    return tuple(groups[:stop]), tuple(groups[stop:])
