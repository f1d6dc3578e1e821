"""Counts tokens with tiktoken (`TiktokenCounter`) or by the number of characters (`CharacterCounter`).

The vocabularies for tiktoken come with this package. The proxy does not use tiktoken's own loader
(`tiktoken.get_encoding`), which uses the network at run time and deletes a cached file whose hash it does not
know. This module reads, checks and parses the vocabularies itself.
"""

import base64
import hashlib
import io
import lzma
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import tiktoken

from compaction_proxy.core.model_names import find_by_prefix, normalize_model_name
from compaction_proxy.providers.token_counting import (
    SLICE_CHARACTERS,
    extrapolate_counts,
    iter_slices,
    sample_slices,
)
from compaction_proxy.support.fail_open import suppress_and_report


class CharacterCounter:
    """Counts ⌈characters / 4⌉ tokens for any model.

    This is fast but inaccurate: Chinese text, digits and JSON have up to 2.5 times as many tokens. Use
    `core.token_rules.CHARACTER_RULE` together with this counter. This rule says how many tokens a message has
    in addition to those of its text.
    """

    def count(self, text: str, model: str) -> int:  # noqa: ARG002 - the port's signature
        """Returns ⌈characters / 4⌉ and ignores the model."""
        return -(-len(text) // 4)

    def count_each(self, texts: Sequence[str], model: str) -> list[int]:
        """Returns ⌈characters / 4⌉ for every text."""
        return [self.count(text, model) for text in texts]


DATA_FOLDER = Path(__file__).parent.parent / "data"
_BYTES_PER_TOKEN = 3  # for estimates; the measured kinds of prose and code have 2.1 to 4.6
# The separator that the proxy puts between texts to count them in one call. It is a special token that the
# proxy adds to the vocabulary. It consists of private-use characters, which texts hardly ever contain. Its
# first character occurs only once in it, so the end of a text and the separator after it cannot form another
# separator.
_BETWEEN = "\uf8f0\uf8f1\uf8f2"
_KNOWN_MODELS = 256
_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The definition of a vocabulary, from which tiktoken builds an encoding.

    Attributes:
        name: Name of the encoding in tiktoken.
        sha256: SHA-256 digest of the decompressed vocabulary file, in hex digits, as in tiktoken's source.
        pattern: Regular expression that splits a text into parts, which are encoded separately. The syntax is
            that of Rust's fancy-regex.
    """

    name: str
    sha256: str
    pattern: str


O200K = Vocabulary(
    "o200k_base",
    "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
CL100K = Vocabulary(
    "cl100k_base",
    "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$"
    r"|\s*[\r\n]|\s+(?!\S)|\s",
)
# Maps prefixes of model names to vocabularies. The longest prefix that matches a name decides. A model whose
# name matches none gets `O200K`, whose counts are nearest to those of current models of all makers.
_PREFIXES = {
    "gpt-4": CL100K,
    "gpt-4o": O200K,
    "gpt-4.": O200K,
    "gpt-3.5": CL100K,
    "gpt-35": CL100K,  # as Azure deployments are commonly named
}


class _WrongVocabularyError(ValueError):
    pass


@lru_cache(maxsize=_KNOWN_MODELS)
def find_vocabulary(model: str) -> Vocabulary:
    """Returns the vocabulary for a model, by the model's name."""
    return find_by_prefix(normalize_model_name(model), _PREFIXES) or O200K


def _join_surrogates(pair: re.Match[str]) -> str:
    return pair[0].encode("utf-16", "surrogatepass").decode("utf-16")


def replace_surrogates(text: str) -> str:
    """Replaces each lone surrogate by the replacement character U+FFFD, and joins pairs of surrogates.

    `TiktokenCounter` calls this function so that tiktoken need not do the same. tiktoken would convert the
    text to UTF-16 and back, which takes five times as long and holds the interpreter lock for 35 ms per
    slice.
    """
    if text.isascii() or not _SURROGATE.search(text):
        return text
    return _SURROGATE.sub("\ufffd", _PAIR.sub(_join_surrogates, text))


def estimate_tokens(text: str) -> int:
    """Returns ⌈UTF-8 bytes / 3⌉, as an estimate of the tokens of a text that cannot be counted."""
    return -(-len(text.encode("utf-8", "surrogatepass")) // _BYTES_PER_TOKEN)


@lru_cache(maxsize=4)
def load_encoding(vocabulary: Vocabulary, data: Path) -> tiktoken.Encoding:
    """Reads and checks a vocabulary, and builds its encoding. Takes about 0.4 s and 50 MB, once per process.

    The only special token of the encoding is the proxy's separator `_BETWEEN`. OpenAI's special tokens count
    as plain text.

    Raises:
        Exception: Of any kind, if the file is missing or damaged, or its digest is wrong.
    """
    packed = (data / f"{vocabulary.name}.tiktoken.xz").read_bytes()
    content = lzma.decompress(packed)
    if hashlib.sha256(content).hexdigest() != vocabulary.sha256:
        raise _WrongVocabularyError
    pairs = (line.split() for line in io.BytesIO(content))
    ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
    special = {_BETWEEN: max(ranks.values()) + 1}
    encoding = tiktoken.Encoding(
        vocabulary.name, pat_str=vocabulary.pattern, mergeable_ranks=ranks, special_tokens=special
    )
    ranks.clear()  # tiktoken counts with its own copy; it keeps this dict of 30 MB only for pickling
    return encoding


def count_sliced(text: str, count: Callable[[str], int]) -> int:
    """Counts the tokens of a long text slice by slice. The function `count` counts the tokens of one slice.

    If the text is longer than `BUDGET_CHARACTERS`, counts only a sample of its slices and extrapolates.
    """
    spans = list(iter_slices(text))
    sizes = [stop - start for start, stop in spans]
    counted = {index: count(text[slice(*spans[index])]) for index in sample_slices(sizes)}
    return sum(extrapolate_counts(sizes, counted))


def _split_lengths(ids: Sequence[int], mark: int, runs: int) -> list[int]:
    """Returns the number of token ids in each of the `runs` parts of `ids`.

    The token id `mark` separates the parts and does not count.
    """
    lengths, start = [], 0
    for _ in range(runs - 1):
        stop = ids.index(mark, start)
        lengths.append(stop - start)
        start = stop + 1
    return [*lengths, len(ids) - start]


def _count_together(texts: Sequence[str], encoding: tiktoken.Encoding) -> list[int] | None:
    """Counts the tokens of each text, in one call of tiktoken.

    Returns None if a text contains the separator `_BETWEEN`.
    """
    joined = replace_surrogates(_BETWEEN.join(texts))
    if joined.count(_BETWEEN) != len(texts) - 1:
        return None
    ids = encoding.encode(joined, allowed_special={_BETWEEN}, disallowed_special=())
    return _split_lengths(ids, encoding.max_token_value, len(texts))


class TiktokenCounter:
    """Counts tokens with tiktoken. Estimates them if the vocabulary of the model cannot be loaded.

    Thread-safe. An encoding is loaded once, at its first use or by `warm_up`.

    Args:
        report: Called with a line for the log that explains why counts are estimated, once for each different
            line. The line contains no part of a counted text.
        data: Folder of the vocabularies.
    """

    def __init__(self, report: Callable[[str], None], data: Path = DATA_FOLDER) -> None:
        self._report = report
        self._data = data
        self._lock = threading.Lock()
        self._encodings: dict[str, tiktoken.Encoding | None] = {}
        self._reported: set[str] = set()

    def count(self, text: str, model: str) -> int:
        """Counts the tokens of `text` for `model`. Extrapolates if it is longer than `BUDGET_CHARACTERS`."""
        encoding = self._get_encoding(find_vocabulary(model))
        if encoding is None:
            return estimate_tokens(text)
        if len(text) <= SLICE_CHARACTERS:
            return self._count_or_estimate(text, encoding)
        return count_sliced(text, lambda part: self._count_or_estimate(part, encoding))

    def count_each(self, texts: Sequence[str], model: str) -> list[int]:
        """Counts the tokens of every text.

        If the texts have at most `SLICE_CHARACTERS` in total, counts all of them in one call of tiktoken. One
        call takes as long as one call per text, but releases and acquires the interpreter lock only once.
        """
        encoding = self._get_encoding(find_vocabulary(model))
        counts = None
        if encoding is not None and len(texts) > 1 and sum(map(len, texts)) <= SLICE_CHARACTERS:
            # An error is not reported here. If it occurs again below, `count` reports it.
            with suppress_and_report(lambda _: None):
                counts = _count_together(texts, encoding)
        return counts or [self.count(text, model) for text in texts]

    def warm_up(self, model: str = "") -> None:
        """Loads the vocabulary that the first count for `model` would load."""
        self._get_encoding(find_vocabulary(model))

    def _count_or_estimate(self, text: str, encoding: tiktoken.Encoding) -> int:
        with suppress_and_report(
            lambda error: self.report_once(f"text was estimated, not counted: {type(error).__name__}")
        ):
            return len(encoding.encode_ordinary(replace_surrogates(text)))
        return estimate_tokens(text)

    def _get_encoding(self, vocabulary: Vocabulary) -> tiktoken.Encoding | None:
        name = vocabulary.name
        if name not in self._encodings:
            with self._lock:
                if name not in self._encodings:
                    self._encodings[name] = self._load_encoding(vocabulary)
        return self._encodings[name]

    def _load_encoding(self, vocabulary: Vocabulary) -> tiktoken.Encoding | None:
        def report_failure(error: BaseException) -> None:
            self.report_once(
                f"vocabulary {vocabulary.name} is unusable, so tokens are estimated: {type(error).__name__}"
            )

        with suppress_and_report(report_failure):
            return load_encoding(vocabulary, self._data)
        return None

    def report_once(self, line: str) -> None:
        """Reports a line, unless it was reported before."""
        if line not in self._reported:
            self._reported.add(line)
            self._report(line)
