"""Counting for a request without stopping the others.

A little text is counted at once. Much of it goes to a small pool of threads, slice by slice and never more
than one step of a request at a time, so that requests take turns and the event loop goes on (the tokenizer
releases the interpreter lock).
"""

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from proxy.core.message import Span
from proxy.core.sampling import SLICE_CHARACTERS, sample, slices, spread
from proxy.ports import TokenCounter

AT_ONCE_BYTES = 32 * 1024  # about 6 ms of counting
_KNOWN_MODELS = 256


@dataclass(frozen=True, slots=True)
class _Slice:
    """Where a slice stands: in which piece, and which characters of it."""

    piece: int
    span: Span

    @property
    def characters(self) -> int:
        return self.span.stop - self.span.start


def _bytes_at_most(text: str) -> int:
    """An upper bound of the text's UTF-8 length that costs nothing to find."""
    return len(text) if text.isascii() else 4 * len(text)


def _steps(cut: Sequence[_Slice]) -> Iterator[list[int]]:
    """The slices to be counted, by index, in steps of at most one full slice's characters."""
    step: list[int] = []
    characters = 0
    for index in sample([part.characters for part in cut]):
        if step and characters + cut[index].characters > SLICE_CHARACTERS:
            yield step
            step, characters = [], 0
        step.append(index)
        characters += cut[index].characters
    if step:
        yield step


def _plan(pieces: Sequence[str]) -> tuple[list[_Slice], list[list[int]]]:
    cut = [_Slice(index, span) for index, text in enumerate(pieces) for span in slices(text)]
    return cut, list(_steps(cut))


def _sums(cut: Sequence[_Slice], counted: dict[int, int], pieces: int) -> list[int]:
    totals = [0] * pieces
    for part, tokens in zip(cut, spread([part.characters for part in cut], counted), strict=True):
        totals[part.piece] += tokens
    return totals


class Counting:
    """Counts the texts of requests, on the loop or beside it.

    Args:
        counter: What counts; must be thread-safe.
        workers: Threads beside the loop.
    """

    def __init__(self, counter: TokenCounter, workers: int = 2) -> None:
        self._counter = counter
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="counting")
        self._known: dict[str, None] = {}

    async def count(self, pieces: Sequence[str], model: str) -> list[int]:
        """Tokens of each piece for `model`, in order, before calibration.

        Beyond `core.sampling.BUDGET_CHARACTERS` in all, the rest is extrapolated. When the caller is
        cancelled, the step under way (some 64 thousand characters) ends unheard, and no other begins.

        Raises:
            RuntimeError: After `close`.
        """
        if model in self._known and sum(map(_bytes_at_most, pieces)) <= AT_ONCE_BYTES:
            return [self._counter.count(text, model) for text in pieces]
        loop = asyncio.get_running_loop()
        cut, steps = await loop.run_in_executor(self._pool, _plan, pieces)
        counted: dict[int, int] = {}
        for step in steps:
            texts = [pieces[cut[index].piece][slice(*cut[index].span)] for index in step]
            counts = await loop.run_in_executor(self._pool, self._count, texts, model)
            counted.update(zip(step, counts, strict=True))
        self._remember(model)
        return await loop.run_in_executor(self._pool, _sums, cut, counted, len(pieces))

    def close(self) -> None:
        """Drop what has not begun and let the threads end; does not wait for them."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _count(self, texts: Sequence[str], model: str) -> list[int]:
        return [self._counter.count(text, model) for text in texts]

    def _remember(self, model: str) -> None:
        """A model's first count may load its vocabulary, so only known ones are counted on the loop."""
        if len(self._known) >= _KNOWN_MODELS:
            self._known.clear()
        self._known[model] = None
