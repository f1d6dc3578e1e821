"""Cutting text for counting, so that no single step takes long and the sum stays what the whole would be.

A tokenizer's cost a character is bounded only on short text: a run of a million blanks overflows its stack,
and one long call keeps a worker from everybody else.
"""

from collections.abc import Iterator, Mapping, Sequence

from compaction_proxy.core.message import Span

SLICE_CHARACTERS = 64 * 1024
BUDGET_CHARACTERS = 8 * 1024 * 1024  # five seconds of counting at the worst; the rest is extrapolated
_SEEK_CHARACTERS = 1024  # how far back from the limit a blank is looked for
_GRID = 4  # characters; cuts stand on it, so that ⌈characters/4⌉ summed over slices is that of the whole


def _cut(text: str, start: int, limit: int) -> int:
    """Where to end a slice that begins at `start`: before a lone blank, or at the limit if there is none.

    A word and the blank before it are one token, so a cut there costs nothing; any other, a token or two.
    """
    stop = start + limit
    for index in range(stop, max(start, stop - _SEEK_CHARACTERS), -_GRID):
        if text[index] == " " and not text[index - 1].isspace():
            return index
    return stop


def slices(text: str, limit: int = SLICE_CHARACTERS) -> Iterator[Span]:
    """Cover `text` with spans of at most `limit` characters, a multiple of four; none for an empty text."""
    start = 0
    while len(text) - start > limit:
        stop = _cut(text, start, limit)
        yield Span(start, stop)
        start = stop
    if start < len(text):
        yield Span(start, len(text))


def sample(sizes: Sequence[int], budget: int = BUDGET_CHARACTERS) -> Iterator[int]:
    """Indices of the slices to be counted, so that they hold at most `budget` characters; all if all fit.

    Beyond the budget each slice is drawn with a probability in proportion to its size (systematic sampling:
    one mark every `step` characters), which keeps short and long ones from biasing the result. No slice may
    be larger than the budget.
    """
    total, largest = sum(sizes), max(sizes, default=0)
    if total <= budget:
        yield from range(len(sizes))
        return
    step = -(-total * largest // budget)
    end, mark = 0, step - 1
    for index, size in enumerate(sizes):
        end += size
        if end > mark:
            yield index
            mark += step


def spread(sizes: Sequence[int], counted: Mapping[int, int]) -> list[int]:
    """Tokens of every slice: as counted, or by the tokens a character of those that were.

    Args:
        sizes: Characters of each slice.
        counted: Tokens by index, for the slices that `sample` named.
    """
    characters = sum(sizes[index] for index in counted) or 1
    tokens = sum(counted.values())
    return [
        counted[index] if index in counted else -(-size * tokens // characters)
        for index, size in enumerate(sizes)
    ]
