"""Counts the tokens of a request without delaying other requests.

The module counts short texts on the event loop, and longer texts in a small pool of threads. Each request
gets a thread only for a short time (a time slot) and then waits for its next time slot, so that several
requests share the threads. While a thread counts, the event loop can run, because a tokenizer releases the
interpreter lock.

The module cuts a text longer than `SLICE_CHARACTERS` into slices, and counts them separately. If a request is
longer than `BUDGET_CHARACTERS`, it counts only a sample of the slices, and estimates the other slices from
the sample.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import NamedTuple

from compaction_proxy.core.message import Span
from compaction_proxy.providers.types import TokenCounter
from compaction_proxy.support.offload import FairQueue

SLICE_CHARACTERS = 64 * 1024
# If a request has more characters than this, the proxy counts only a sample of at most this many, and
# extrapolates to the other characters. Counting the sample takes five seconds at worst.
BUDGET_CHARACTERS = 8 * 1024 * 1024
_SEEK_CHARACTERS = 1024  # a slice ends at a space if there is one in this many characters before its limit
# The length of every slice of a text, except the last one, is a multiple of this number of characters. For
# this reason, `CharacterCounter`, which counts ⌈characters / 4⌉ tokens, gives the same total for the slices
# as for the whole text.
_GRID = 4


def _find_cut(text: str, start: int, limit: int) -> int:
    """Returns the end of the slice of `text` that begins at `start` and has at most `limit` characters.

    If possible, the slice ends before a space that follows no white space. A word and the space before it
    form one token, so such a cut does not change the count. Any other cut adds a token or two.
    """
    stop = start + limit
    for index in range(stop, max(start, stop - _SEEK_CHARACTERS), -_GRID):
        if text[index] == " " and not text[index - 1].isspace():
            return index
    return stop


def iter_slices(text: str, limit: int = SLICE_CHARACTERS) -> Iterator[Span]:
    """Yields the ranges of consecutive slices of `text`. Together, the slices contain the whole text.

    Each slice has at most `limit` characters. `limit` must be a multiple of four.
    """
    start = 0
    while len(text) - start > limit:
        stop = _find_cut(text, start, limit)
        yield Span(start, stop)
        start = stop
    if start < len(text):
        yield Span(start, len(text))


def sample_slices(sizes: Sequence[int], budget: int = BUDGET_CHARACTERS) -> Iterator[int]:
    """Yields the indices of the slices to count, in order.

    If all slices together have at most `budget` characters, yields all indices. Otherwise, chooses a sample
    of slices with at most `budget` characters in total. This is systematic sampling: the function numbers the
    characters of all slices from 1 on, and chooses the slices that contain a character whose number is a
    multiple of `step`. The chance of a slice is therefore proportional to its size, so neither short nor long
    slices bias the result.

    Args:
        sizes: Number of characters of each slice. None may be larger than `budget`.
        budget: Maximum number of characters to count.
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


def extrapolate_counts(sizes: Sequence[int], counted: Mapping[int, int]) -> list[int]:
    """Returns the number of tokens of every slice, in order.

    For a slice that was not counted, estimates the number from the tokens per character of the counted
    slices.

    Args:
        sizes: Number of characters of each slice.
        counted: Number of tokens of each counted slice, by the index of the slice.
    """
    characters = sum(sizes[index] for index in counted) or 1
    tokens = sum(counted.values())
    return [
        counted[index] if index in counted else -(-size * tokens // characters)
        for index, size in enumerate(sizes)
    ]


# Limits for counting on the event loop, which delays all other requests. A tokenizer takes 0.6 µs per
# character for the slowest known texts. These are a long line of hyphens for toktok, and Chinese function
# words in random order, or □□□…, for tiktoken. For prose and code, toktok takes 0.004 µs and tiktoken 0.05 µs
# per character. The delay is therefore at most `INLINE_BUDGET_S` plus 3.7 ms for the last text: about 5 ms in
# total.
MAX_INLINE_TEXT_CHARACTERS = 6 * 1024  # longest text that is counted on the loop
INLINE_BUDGET_S = 0.001  # time after which no further text is begun on the loop
# If the texts of a request have more characters than this in total, the proxy counts none of them on the
# event loop, because the request would need a thread anyway.
MAX_INLINE_CHARACTERS = 64 * 1024
# Length of a time slot, in seconds. A thread counts the texts of a request in steps of at most
# `SLICE_CHARACTERS` characters, each of which takes 40 ms at worst. When the time slot is over, the thread
# finishes the current step and becomes free for other requests. The event loop then queues the request for
# another time slot. With shorter time slots, requests would wait for the event loop too often.
TIME_SLOT_S = 0.01
_KNOWN_MODELS = 256


class _TextSlice(NamedTuple):
    """Position of a slice: the index of its text among the texts of a request, and its range in this text."""

    piece: int
    start: int
    stop: int


def _slice_pieces(pieces: Sequence[str]) -> Iterator[_TextSlice]:
    for index, text in enumerate(pieces):
        for start, stop in iter_slices(text):
            yield _TextSlice(index, start, stop)


def _group_steps(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yields the steps in which the texts of a request are counted.

    A step is a list of the indices of slices that have at most `SLICE_CHARACTERS` characters in total.
    """
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
    """Counts the tokens of one request's texts in a worker thread, in one or more time slots.

    Attributes:
        dropped: Whether nobody needs the result any more. If True, a running time slot ends after its current
            step.
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

    def run_time_slot(self, budget_s: float) -> list[int] | None:
        """Counts the slices of the next step, and of further steps until `budget_s` seconds have passed.

        Returns the number of tokens of each text if no step is left. Otherwise returns None; the caller then
        calls the method again, unless it no longer needs the result (`dropped`).
        """
        end = perf_counter() + budget_s
        for step in self._get_steps():
            parts = [self._slices[index] for index in step]
            texts = [self._pieces[each.piece][each.start : each.stop] for each in parts]
            counts = self._counter.count_each(texts, self._model)
            self._counted.update(zip(step, counts, strict=True))
            if self.dropped or perf_counter() >= end:
                return None
        return self._sum_pieces()

    def _get_steps(self) -> Iterator[list[int]]:
        """Returns an iterator over the remaining steps (`_group_steps`).

        The first call cuts the texts into slices.
        """
        if self._left is None:
            self._slices = list(_slice_pieces(self._pieces))
            self._sizes = [stop - start for _, start, stop in self._slices]
            self._left = _group_steps(self._sizes)
        return self._left

    def _sum_pieces(self) -> list[int]:
        totals = [0] * len(self._pieces)
        for part, tokens in zip(self._slices, extrapolate_counts(self._sizes, self._counted), strict=True):
            totals[part.piece] += tokens
        return totals


class TokenScheduler:
    """Counts the tokens of requests' texts, on the event loop or in threads.

    Args:
        counter: Counts the tokens of a text. It must be thread-safe.
        workers: Number of threads.
        time_slot_s: Length of a time slot, in seconds. After this time, a thread becomes free for other
            requests.
    """

    def __init__(self, counter: TokenCounter, workers: int = 2, time_slot_s: float = TIME_SLOT_S) -> None:
        self._counter = counter
        self._time_slot_s = time_slot_s
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="counting")
        self._turns = FairQueue(workers)
        self._known: dict[str, None] = {}

    async def run_in_worker(self, work: Callable[[], None]) -> None:
        """Runs `work` in one of the threads that count tokens.

        Use the method for all other work with a tokenizer, such as `warm_up`. A tokenizer keeps memory for
        each thread that uses it (toktok 16 MB), so no other threads should use it.
        """
        await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def count(self, pieces: Sequence[str], model: str) -> list[int]:
        """Counts the tokens of each text in `pieces` for `model`, uncalibrated, in the same order.

        If the texts have more than `BUDGET_CHARACTERS` in total, counts only a sample of them and
        extrapolates. If the caller is cancelled, the thread that counts for it stops soon, at the latest when
        it has counted another `SLICE_CHARACTERS` characters.

        Raises:
            RuntimeError: If the scheduler is closed and a text needs a thread.
        """
        counts = self._count_inline(pieces, model)
        if len(counts) < len(pieces):
            counts += await self._count_in_worker(pieces[len(counts) :], model)
        return counts

    def close(self) -> None:
        """Drops all work that has not begun, and ends each thread after its current time slot.

        Does not wait for the threads.
        """
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _count_inline(self, pieces: Sequence[str], model: str) -> list[int]:
        """Counts texts on the event loop, in order, and returns the counts.

        Stops before the first text that is too long (`MAX_INLINE_TEXT_CHARACTERS`), and when the time is over
        (`INLINE_BUDGET_S`). Counts no text if all texts have more than `MAX_INLINE_CHARACTERS` in total, or
        if the model's vocabulary may not be loaded yet.
        """
        counts: list[int] = []
        if model not in self._known or sum(map(len, pieces)) > MAX_INLINE_CHARACTERS:
            return counts
        end = perf_counter() + INLINE_BUDGET_S
        for text in pieces:
            if len(text) > MAX_INLINE_TEXT_CHARACTERS or perf_counter() > end:
                break
            counts.append(self._counter.count(text, model))
        return counts

    async def _count_in_worker(self, pieces: Sequence[str], model: str) -> list[int]:
        loop = asyncio.get_running_loop()
        work = _CountingTask(self._counter, pieces, model)
        counts = None
        try:
            while counts is None:
                async with self._turns.wait_for_turn():
                    counts = await loop.run_in_executor(self._pool, work.run_time_slot, self._time_slot_s)
        finally:
            work.dropped = True
        self._remember_model(model)
        return counts

    def _remember_model(self, model: str) -> None:
        """Remembers that a model's vocabulary is loaded, so that its texts may be counted on the loop.

        The first count for a model happens in a thread, because loading its vocabulary would block the loop.
        """
        if len(self._known) >= _KNOWN_MODELS:
            self._known.clear()
        self._known[model] = None
