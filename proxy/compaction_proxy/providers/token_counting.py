"""Counting for a request without stopping the others.

A little text is counted at once, as long as that takes no time worth mentioning. Much of it goes to a small
pool of threads, in turns of bounded length, so that requests take turns and the event loop goes on (a
tokenizer releases the interpreter lock).
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import NamedTuple

from compaction_proxy.core.message import Span
from compaction_proxy.providers.types import TokenCounter

SLICE_CHARACTERS = 64 * 1024
BUDGET_CHARACTERS = 8 * 1024 * 1024  # five seconds of counting at the worst; the rest is extrapolated
_SEEK_CHARACTERS = 1024  # how far back from the limit a blank is looked for
_GRID = 4  # characters; cuts stand on it, so that ⌈characters/4⌉ summed over slices is that of the whole


def _find_cut(text: str, start: int, limit: int) -> int:
    """Where to end a slice that begins at `start`: before a lone blank, or at the limit if there is none.

    A word and the blank before it are one token, so a cut there costs nothing; any other, a token or two.
    """
    stop = start + limit
    for index in range(stop, max(start, stop - _SEEK_CHARACTERS), -_GRID):
        if text[index] == " " and not text[index - 1].isspace():
            return index
    return stop


def iter_slices(text: str, limit: int = SLICE_CHARACTERS) -> Iterator[Span]:
    """Cover `text` with spans of at most `limit` characters, a multiple of four; none for an empty text."""
    start = 0
    while len(text) - start > limit:
        stop = _find_cut(text, start, limit)
        yield Span(start, stop)
        start = stop
    if start < len(text):
        yield Span(start, len(text))


def sample_slices(sizes: Sequence[int], budget: int = BUDGET_CHARACTERS) -> Iterator[int]:
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


def spread_counts(sizes: Sequence[int], counted: Mapping[int, int]) -> list[int]:
    """Tokens of every slice: as counted, or by the tokens a character of those that were.

    Args:
        sizes: Characters of each slice.
        counted: Tokens by index, for the slices that `sample_slices` named.
    """
    characters = sum(sizes[index] for index in counted) or 1
    tokens = sum(counted.values())
    return [
        counted[index] if index in counted else -(-size * tokens // characters)
        for index, size in enumerate(sizes)
    ]


# The worst texts known take a tokenizer 0.6 µs a character (a run of hyphens with toktok, Chinese function
# words in random order or □□□… with tiktoken; prose and code: 0.004 and 0.05). So what is counted on the loop
# takes it at most AT_ONCE_S and then 3.7 ms for one last text, 5 ms together.
AT_ONCE_CHARACTERS = 6 * 1024  # of one text
AT_ONCE_S = 0.001  # nothing more is begun after this long
# With more than this in all nothing is begun there: the rest would need a thread anyway.
LITTLE_CHARACTERS = 64 * 1024
# How long a request keeps a thread, up to one more step of at most SLICE_CHARACTERS (40 ms at the worst). A
# shorter turn is cut up more by waiting for the loop than it is worth.
TURN_S = 0.01
_KNOWN_MODELS = 256


class _TextSlice(NamedTuple):
    """Where a slice stands: in which piece, and which characters of it."""

    piece: int
    start: int
    stop: int


def _slice_pieces(pieces: Sequence[str]) -> Iterator[_TextSlice]:
    for index, text in enumerate(pieces):
        for start, stop in iter_slices(text):
            yield _TextSlice(index, start, stop)


def _group_steps(sizes: Sequence[int]) -> Iterator[list[int]]:
    """The slices to be counted, by index, in steps of at most one full slice's characters."""
    step: list[int] = []
    characters = 0
    for index in sample_slices(sizes):
        if step and characters + sizes[index] > SLICE_CHARACTERS:
            yield step
            step, characters = [], 0
        step.append(index)
        characters += sizes[index]
    if step:
        yield step


class _CountingTask:
    """The counting of one request beside the loop: everything of it is done in a thread, a turn at a time.

    Attributes:
        dropped: Set when nobody waits for the result any more; the step under way is the last.
    """

    def __init__(self, counter: TokenCounter, pieces: Sequence[str], model: str) -> None:
        self.dropped = False
        self._counter = counter
        self._pieces = pieces
        self._model = model
        self._counted: dict[int, int] = {}
        self._slices: list[_TextSlice] = []
        self._sizes: list[int] = []
        self._left: Iterator[list[int]] | None = None

    def run_turn(self, seconds: float) -> list[int] | None:
        """Count for `seconds`, at least one step. The tokens of each piece once all is counted."""
        end = perf_counter() + seconds
        for step in self._get_steps():
            texts = [self._get_text(self._slices[index]) for index in step]
            counts = self._counter.count_each(texts, self._model)
            self._counted.update(zip(step, counts, strict=True))
            if self.dropped or perf_counter() >= end:
                return None
        return self._sum_pieces()

    def _get_steps(self) -> Iterator[list[int]]:
        """Those that are left."""
        if self._left is None:
            self._slices = list(_slice_pieces(self._pieces))
            self._sizes = [stop - start for _, start, stop in self._slices]
            self._left = _group_steps(self._sizes)
        return self._left

    def _get_text(self, part: _TextSlice) -> str:
        return self._pieces[part.piece][part.start : part.stop]

    def _sum_pieces(self) -> list[int]:
        totals = [0] * len(self._pieces)
        for part, tokens in zip(self._slices, spread_counts(self._sizes, self._counted), strict=True):
            totals[part.piece] += tokens
        return totals


class TokenScheduler:
    """Counts the texts of requests, on the loop or beside it.

    Args:
        counter: What counts; must be thread-safe.
        workers: Threads beside the loop.
        turn_s: How long a request may keep one of them while others wait, in seconds.
    """

    def __init__(self, counter: TokenCounter, workers: int = 2, turn_s: float = TURN_S) -> None:
        self._counter = counter
        self._turn_s = turn_s
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="counting")
        self._known: dict[str, None] = {}

    async def run_in_worker(self, work: Callable[[], None]) -> None:
        """Do something to the counter, on a thread that is to count with it.

        Tokenizers keep memory for each thread that they were used on (toktok 16 MB), so another would cost.
        """
        await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def count(self, pieces: Sequence[str], model: str) -> list[int]:
        """Tokens of each piece for `model`, in order, before calibration.

        Beyond `BUDGET_CHARACTERS` in all, the rest is extrapolated. When the caller is cancelled, the step
        under way (some 64 thousand characters) ends unheard, and no other begins.

        Raises:
            RuntimeError: After `close`.
        """
        counts = self._count_inline(pieces, model)
        if len(counts) < len(pieces):
            counts += await self._count_in_worker(pieces[len(counts) :], model)
        return counts

    def close(self) -> None:
        """Drop what has not begun and let the threads end; does not wait for them."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _count_inline(self, pieces: Sequence[str], model: str) -> list[int]:
        """Tokens of the first pieces: as many as can be counted before others had to wait."""
        counts: list[int] = []
        if model not in self._known or sum(map(len, pieces)) > LITTLE_CHARACTERS:
            return counts
        end = perf_counter() + AT_ONCE_S
        for text in pieces:
            if len(text) > AT_ONCE_CHARACTERS or perf_counter() > end:
                break
            counts.append(self._counter.count(text, model))
        return counts

    async def _count_in_worker(self, pieces: Sequence[str], model: str) -> list[int]:
        loop = asyncio.get_running_loop()
        work = _CountingTask(self._counter, pieces, model)
        counts = None
        try:
            while counts is None:
                counts = await loop.run_in_executor(self._pool, work.run_turn, self._turn_s)
        finally:
            work.dropped = True
        self._remember_model(model)
        return counts

    def _remember_model(self, model: str) -> None:
        """A model's first count may load its vocabulary, so only known ones are counted on the loop."""
        if len(self._known) >= _KNOWN_MODELS:
            self._known.clear()
        self._known[model] = None
