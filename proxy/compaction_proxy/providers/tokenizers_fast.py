"""Counts tokens with toktok (the extra `fast`), about fifteen times as fast as tiktoken.

toktok is a young package. The proxy therefore uses toktok only after toktok has given the same count as
tiktoken for each text in `data/golden_counts.json` (written by `.ci/golden_counts.py`). The proxy uses toktok
only for the vocabulary o200k_base: of 30,000 adversarial strings, toktok miscounted one with cl100k_base and
none with o200k_base.
"""

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

from compaction_proxy.providers.token_counting import SLICE_CHARACTERS
from compaction_proxy.providers.tokenizers import (
    DATA_FOLDER,
    O200K,
    TiktokenCounter,
    count_sliced,
    estimate_tokens,
    find_vocabulary,
    replace_surrogates,
)
from compaction_proxy.support.fail_open import suppress_and_report

GOLDEN_COUNTS_PATH = DATA_FOLDER / "golden_counts.json"
PACKAGE = "toktok-rs"
# Number of threads that toktok uses for one call. One is enough, because several threads of the proxy call
# toktok at the same time.
_THREADS = 1


class Tokenizer(Protocol):
    """The methods of toktok that the proxy uses. Both release the interpreter lock.

    Both raise `UnicodeEncodeError` for a text with a lone surrogate. A call of `count` takes at least 0.2 µs,
    and a call of `count_batch` at least 12 µs.
    """

    def count(self, text: str) -> int:
        """Counts the tokens of a text. Special tokens count as plain text."""
        ...

    def count_batch(self, texts: list[str], threads: int) -> list[int]:
        """Counts the tokens of each text."""
        ...


@dataclass(frozen=True, slots=True)
class GoldenText:
    """A text, and the number of tokens that tiktoken counts in it with o200k_base."""

    text: str
    tokens: int


class _OtherCountError(ValueError):
    def __init__(self, number: int) -> None:
        super().__init__(f"counts sample {number} differently")


def read_golden_texts(path: Path = GOLDEN_COUNTS_PATH) -> list[GoldenText]:
    """Reads the golden texts, with which `check_counts` checks toktok.

    Each row of the file has a text, how often to repeat it, and the number of tokens of the repeated text.
    """
    rows = json.loads(path.read_text(encoding="utf-8"))
    return [GoldenText(text * times, tokens) for text, times, tokens in rows]


def load_tokenizer() -> Tokenizer:
    """Loads toktok's tokenizer for o200k_base. Takes about 0.4 s and 50 MB, once per process.

    Raises:
        Exception: Of any kind, if the package is missing or broken, or is a version that does not work here.
    """
    tokenizer: Tokenizer = import_module("toktok")._encoding(O200K.name)  # noqa: SLF001 - meant for this use
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


def check_counts(tokenizer: Tokenizer, golden_texts: Sequence[GoldenText]) -> None:
    """Checks that toktok counts the golden texts correctly, each text alone and all texts in one call.

    Raises:
        ValueError: If a count differs, or `golden_texts` is empty.
    """
    together = _count_batch(tokenizer, [each.text for each in golden_texts])
    for number, (each, counted) in enumerate(zip(golden_texts, together, strict=True)):
        if not each.tokens == counted == _count_text(tokenizer, each.text):
            raise _OtherCountError(number)
    if not golden_texts:
        raise _OtherCountError(0)


def _explain_failure(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError):
        return "is not installed"
    return str(error) if isinstance(error, _OtherCountError) else f"fails: {type(error).__name__}"


class ToktokCounter:
    """Counts with toktok for models whose vocabulary is o200k_base, and otherwise with tiktoken.

    Thread-safe. Uses only tiktoken until `warm_up` is called, and also afterwards if toktok fails the check
    in `warm_up`.

    Args:
        fallback: Counter that uses tiktoken. It also reports why a count is estimated.
        golden_path: File with the golden texts, for the check.

    Attributes:
        chosen: Text that names the package with which the counter counts, `tiktoken` or toktok with its
            version. If toktok has failed the check, the text also says why.
    """

    def __init__(self, fallback: TiktokenCounter, golden_path: Path = GOLDEN_COUNTS_PATH) -> None:
        self._otherwise = fallback
        self._known = golden_path
        self._tokenizer: Tokenizer | None = None
        self._lock = threading.Lock()
        self.chosen = "tiktoken"

    def warm_up(self, model: str = "") -> None:
        """Checks toktok (`check_counts`), unless it has passed the check before.

        If tiktoken counts for `model`, also loads the vocabulary that its first count would load.
        """
        with self._lock:
            if self._tokenizer is None:
                self._adopt_toktok()
        if self._get_tokenizer(model) is None:
            self._otherwise.warm_up(model)

    def count(self, text: str, model: str) -> int:
        """Counts the tokens of `text` for `model`. Extrapolates if it is longer than `BUDGET_CHARACTERS`."""
        tokenizer = self._get_tokenizer(model)
        if tokenizer is None:
            return self._otherwise.count(text, model)
        if len(text) > SLICE_CHARACTERS:
            return count_sliced(text, lambda part: self._count_or_estimate(tokenizer, part))
        return self._count_or_estimate(tokenizer, text)

    def count_each(self, texts: Sequence[str], model: str) -> list[int]:
        """Counts the tokens of every text, with one call of toktok if no text exceeds `SLICE_CHARACTERS`."""
        tokenizer = self._get_tokenizer(model)
        if tokenizer is None:
            return self._otherwise.count_each(texts, model)
        if max(map(len, texts), default=0) <= SLICE_CHARACTERS:
            # An error is not reported here. If it occurs again below, `count` reports it.
            with suppress_and_report(lambda _: None):
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
        """Counts the tokens of `text` with toktok. If toktok fails, estimates them by the length of the text.

        tiktoken is not used then, because loading its vocabulary could block the event loop.
        """

        def report_failure(error: BaseException) -> None:
            self._otherwise.report_once(f"text was estimated, not counted: {type(error).__name__}")

        with suppress_and_report(report_failure):
            return _count_text(tokenizer, text)
        return estimate_tokens(text)
