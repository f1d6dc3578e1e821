"""Counts the tokens of a request without delaying other requests.

A short text is counted at once on the event loop. Longer texts go to a small pool of threads in turns of
bounded length, so that requests alternate and the event loop keeps running (a tokenizer releases the
interpreter lock).
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import NamedTuple

from compaction_proxy.core.message import Span
from compaction_proxy.providers.types import TokenCounter

SLICE_CHARACTERS = 64 * 1024
BUDGET_CHARACTERS = 8 * 1024 * 1024  # at worst five seconds of counting; the rest is extrapolated
_SEEK_CHARACTERS = 1024  # how far before the limit a space is looked for
_GRID = 4  # cuts are multiples of 4 characters, so that ⌈characters/4⌉ of the slices adds up to the whole


def _find_cut(text: str, start: int, limit: int) -> int:
    """Returns the end of the slice that begins at `start`: before a single space, or else at the limit.

    A word and the space before it are one token, so such a cut costs nothing. Any other costs a token or two.
    """
    stop = start + limit
    for index in range(stop, max(start, stop - _SEEK_CHARACTERS), -_GRID):
        if text[index] == " " and not text[index - 1].isspace():
            return index
    return stop


def iter_slices(text: str, limit: int = SLICE_CHARACTERS) -> Iterator[Span]:
    """Yields spans of at most `limit` characters (a multiple of four) that cover `text`."""
    start = 0
    while len(text) - start > limit:
        stop = _find_cut(text, start, limit)
        yield Span(start, stop)
        start = stop
    if start < len(text):
        yield Span(start, len(text))


def sample_slices(sizes: Sequence[int], budget: int = BUDGET_CHARACTERS) -> Iterator[int]:
    """Yields the indices of slices to count, with at most `budget` characters together; all if all fit.

    Beyond the budget, each slice is drawn with a probability in proportion to its size (systematic sampling:
    one mark every `step` characters), so that short and long slices do not bias the result. No slice may be
    larger than the budget.
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
    """Returns the tokens of every slice: its count, or an estimate from the counted slices.

    Args:
        sizes: Characters of each slice.
        counted: Tokens by index, for the slices that `sample_slices` chose.
    """
    characters = sum(sizes[index] for index in counted) or 1
    tokens = sum(counted.values())
    return [
        counted[index] if index in counted else -(-size * tokens // characters)
        for index, size in enumerate(sizes)
    ]


# The worst known texts take a tokenizer 0.6 µs a character (a run of hyphens with toktok; Chinese function
# words in random order or □□□… with tiktoken). Prose and code take 0.004 µs with toktok and 0.05 µs with
# tiktoken. Counting on the loop therefore takes at most AT_ONCE_S plus 3.7 ms for one last text, 5 ms
# together.
AT_ONCE_CHARACTERS = 6 * 1024  # largest single text
AT_ONCE_S = 0.001  # no further text is begun after this time
# Largest total that is counted on the loop. More text would need a thread anyway.
LITTLE_CHARACTERS = 64 * 1024
# How long a request keeps a thread, plus one more step of at most SLICE_CHARACTERS (at worst 40 ms). Shorter
# turns would lose more time by waiting for the loop than they gain.
TURN_S = 0.01
_KNOWN_MODELS = 256


class _TextSlice(NamedTuple):
    """Position of a slice: the index of its piece, and its range of characters."""

    piece: int
    start: int
    stop: int


def _slice_pieces(pieces: Sequence[str]) -> Iterator[_TextSlice]:
    for index, text in enumerate(pieces):
        for start, stop in iter_slices(text):
            yield _TextSlice(index, start, stop)


def _group_steps(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yields the indices of the slices to count, in steps of at most one full slice's characters."""
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
    """Counts one request in a worker thread, one turn at a time.

    Attributes:
        dropped: Set when the result is no longer needed. The current step is then the last.
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
        """Counts for `seconds`, at least one step. Returns the tokens of each piece once all are counted."""
        end = perf_counter() + seconds
        for step in self._get_steps():
            texts = [self._get_text(self._slices[index]) for index in step]
            counts = self._counter.count_each(texts, self._model)
            self._counted.update(zip(step, counts, strict=True))
            if self.dropped or perf_counter() >= end:
                return None
        return self._sum_pieces()

    def _get_steps(self) -> Iterator[list[int]]:
        """Returns the steps that remain."""
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
    """Counts the texts of requests, on the event loop or in threads.

    Args:
        counter: Token counter; must be thread-safe.
        workers: Number of threads.
        turn_s: How long a request may keep a thread while others wait, in seconds.
    """

    def __init__(self, counter: TokenCounter, workers: int = 2, turn_s: float = TURN_S) -> None:
        self._counter = counter
        self._turn_s = turn_s
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="counting")
        self._known: dict[str, None] = {}

    async def run_in_worker(self, work: Callable[[], None]) -> None:
        """Runs work on the counter in one of the counting threads.

        Tokenizers keep memory for each thread that uses them (toktok 16 MB), so another thread would cost
        more.
        """
        await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def count(self, pieces: Sequence[str], model: str) -> list[int]:
        """Counts the tokens of each piece for `model`, in order, before calibration.

        Beyond `BUDGET_CHARACTERS` in all, the rest is extrapolated. If the caller is cancelled, the current
        step (some 64 thousand characters) finishes, its result is dropped, and no other step begins.

        Raises:
            RuntimeError: The scheduler is closed.
        """
        counts = self._count_inline(pieces, model)
        if len(counts) < len(pieces):
            counts += await self._count_in_worker(pieces[len(counts) :], model)
        return counts

    def close(self) -> None:
        """Drops the work that has not begun and lets the threads end; does not wait for them."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _count_inline(self, pieces: Sequence[str], model: str) -> list[int]:
        """Counts the first pieces: as many as can be counted without delaying other requests."""
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
        """Remembers that a model's vocabulary is loaded. Only such models are counted on the loop.

        The first count for a model may load its vocabulary, which would block the loop.
        """
        if len(self._known) >= _KNOWN_MODELS:
            self._known.clear()
        self._known[model] = None
