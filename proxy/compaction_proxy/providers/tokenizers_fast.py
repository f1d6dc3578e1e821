"""Counting with toktok, the extra `fast`: about fifteen times as fast as tiktoken, where it counts the same.

It is young, and the only thing asked of a tokenizer is the right number. So it is adopted once it has given
tiktoken's count for each of the texts in `data/golden_counts.json` (written by `.ci/golden_counts.py`), and
only for o200k_base: of 30,000 strings made to trip it one was counted otherwise with cl100k_base, none here.
"""

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

from compaction_proxy.providers.token_counting import SLICE_CHARACTERS
from compaction_proxy.providers.tokenizers import (
    DATA,
    O200K,
    TiktokenCounter,
    count_sliced,
    estimate_tokens,
    find_vocabulary,
    replace_surrogates,
)
from compaction_proxy.support.fail_open import suppress_and_report

GOLDEN = DATA / "golden_counts.json"
PACKAGE = "toktok-rs"
_THREADS = 1  # a call's own; how many calls there are at a time is for others to say


class Tokenizer(Protocol):
    """What is used of toktok. Both calls release the interpreter lock, and fail on a lone surrogate.

    The package's `batch_count` is the second one; the first takes 0.2 µs beside its work, the second 12.
    """

    def count(self, text: str) -> int:
        """Tokens of a text; special tokens are text."""
        ...

    def count_batch(self, texts: list[str], threads: int) -> list[int]:
        """Tokens of each text."""
        ...


@dataclass(frozen=True, slots=True)
class GoldenText:
    """A text, and how many tokens of o200k_base tiktoken makes of it."""

    text: str
    tokens: int


class _OtherCountError(ValueError):
    def __init__(self, number: int) -> None:
        super().__init__(f"counts golden text {number} otherwise")


def read_golden_texts(path: Path = GOLDEN) -> list[GoldenText]:
    """The stored counts, from rows of text, how often it is repeated, and tokens."""
    rows = json.loads(path.read_text(encoding="utf-8"))
    return [GoldenText(text * times, tokens) for text, times, tokens in rows]


def load_tokenizer() -> Tokenizer:
    """Its tokenizer for o200k_base: about 0.4 s and 50 MB, once a process.

    Raises:
        Exception: Whatever a package that is missing, broken or of another version leads to.
    """
    tokenizer: Tokenizer = import_module("toktok")._encoding(O200K.name)  # noqa: SLF001 - meant for this
    return tokenizer


def _count_text(tokenizer: Tokenizer, text: str) -> int:
    try:
        return tokenizer.count(text)
    except UnicodeEncodeError:
        return tokenizer.count(replace_surrogates(text))


def _count_batch(tokenizer: Tokenizer, texts: Sequence[str]) -> list[int]:
    try:
        return tokenizer.count_batch([*texts], _THREADS)
    except UnicodeEncodeError:
        return tokenizer.count_batch([replace_surrogates(text) for text in texts], _THREADS)


def check_counts(tokenizer: Tokenizer, known: Sequence[GoldenText]) -> None:
    """Compare counts, made one by one and together, with those known.

    Raises:
        ValueError: One differs, or none are known.
    """
    together = _count_batch(tokenizer, [each.text for each in known])
    for number, (each, counted) in enumerate(zip(known, together, strict=True)):
        if not each.tokens == counted == _count_text(tokenizer, each.text):
            raise _OtherCountError(number)
    if not known:
        raise _OtherCountError(0)


def _explain_failure(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError):
        return "is not installed"
    return str(error) if isinstance(error, _OtherCountError) else f"fails: {type(error).__name__}"


class ToktokCounter:
    """Counts with toktok what it has shown to count right, and everything else with tiktoken.

    Thread-safe. Until `warm_up` has been called, or if toktok was not adopted then, all of it is tiktoken's.

    Args:
        fallback: Counts what toktok does not.
        report: Told in one line, once a cause, that a text was estimated. Never holds any of the text.
        known: The file of stored counts.
    """

    def __init__(
        self, fallback: TiktokenCounter, report: Callable[[str], None], known: Path = GOLDEN
    ) -> None:
        self._otherwise = fallback
        self._report = report
        self._known = known
        self._tokenizer: Tokenizer | None = None
        self._lock = threading.Lock()
        self._reported: set[str] = set()
        self.chosen = "tiktoken"

    def warm_up(self, model: str = "") -> None:
        """Try toktok, and load now what the first count for `model` would load.

        Afterwards `chosen` says in a line what counts and, where toktok does not, why.
        """
        with self._lock:
            if self._tokenizer is None:
                self._adopt_toktok()
        if self._get_tokenizer(model) is None:
            self._otherwise.warm_up(model)

    def count(self, text: str, model: str) -> int:
        """Tokens of `text` for `model`; beyond `BUDGET_CHARACTERS` extrapolated from samples."""
        tokenizer = self._get_tokenizer(model)
        if tokenizer is None:
            return self._otherwise.count(text, model)
        if len(text) > SLICE_CHARACTERS:
            return count_sliced(text, lambda part: self._count_or_estimate(tokenizer, part))
        return self._count_or_estimate(tokenizer, text)

    def count_each(self, texts: Sequence[str], model: str) -> list[int]:
        """Tokens of every text; of texts that are no longer than a slice in one call."""
        tokenizer = self._get_tokenizer(model)
        if tokenizer is None:
            return self._otherwise.count_each(texts, model)
        if max(map(len, texts), default=0) <= SLICE_CHARACTERS:
            with suppress_and_report(
                lambda _: None
            ):  # whatever it is, it is said of the text that it comes from
                return _count_batch(tokenizer, texts)
        return [self.count(text, model) for text in texts]

    def _get_tokenizer(self, model: str) -> Tokenizer | None:
        return self._tokenizer if find_vocabulary(model) is O200K else None

    def _adopt_toktok(self) -> None:
        def record_refusal(error: BaseException) -> None:
            self.chosen = f"tiktoken; {PACKAGE} {_explain_failure(error)}"

        with suppress_and_report(record_refusal):
            tokenizer, name = load_tokenizer(), f"{PACKAGE} {version(PACKAGE)}"
            check_counts(tokenizer, read_golden_texts(self._known))
            self._tokenizer, self.chosen = tokenizer, name

    def _count_or_estimate(self, tokenizer: Tokenizer, text: str) -> int:
        """By toktok or, where it fails, estimated: to load tiktoken's vocabulary would hold up the loop."""

        def report_failure(error: BaseException) -> None:
            line = f"text was estimated, not counted: {type(error).__name__}"
            if line not in self._reported:
                self._reported.add(line)
                self._report(line)

        with suppress_and_report(report_failure):
            return _count_text(tokenizer, text)
        return estimate_tokens(text)
