"""What two texts have in common, word for word: what a summary has kept of the messages it replaced.

A summary takes things out of their order, so an alignment from top to bottom (`difflib`) would find one chain
of what was kept and miss the rest, in time that grows with the square. Here runs of words are looked up: a
word is kept if it stands in a run of three that the other text has too, or if it is one that means something
alone, such as a path or a number. Time grows with the length.
"""

import re
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import groupby

RUN_WORDS = 3
# At most so many characters are compared, on either side, so that a round takes 100 ms of one core.
MAX_COMPARED_CHARACTERS = 100_000
# A word that means something alone has so many characters, and a digit or one of these signs in it.
_DISTINCTIVE_CHARACTERS = 4
_DISTINCTIVE = re.compile(r"[\d/_\\@:=]|\w\.\w")
_WORD = re.compile(r"[^\s\"'`()\[\]{}<>,;|*]+")
_ENDS = ".:!?-#="


@dataclass(frozen=True, slots=True)
class DiffPiece:
    """A stretch of text, and whether the other text has it too."""

    text: str
    is_shared: bool


@dataclass(frozen=True, slots=True)
class DiffWords:
    """What a text is compared by.

    Attributes:
        runs: Runs of words.
        distinctive: Words that mean something alone.
    """

    runs: AbstractSet[tuple[str, ...]]
    distinctive: AbstractSet[str]


def index_words(texts: Iterable[str]) -> DiffWords:
    """What these texts have, up to `MAX_COMPARED_CHARACTERS` of them."""
    runs: set[tuple[str, ...]] = set()
    distinctive: set[str] = set()
    remaining = MAX_COMPARED_CHARACTERS
    for text in texts:
        found = [_normalize_word(match[0]) for match in _WORD.finditer(text[:remaining])]
        runs.update(_iter_runs(found))
        distinctive.update(filter(_is_distinctive, found))
        remaining -= min(len(text), remaining)
    return DiffWords(runs, distinctive)


def split_pieces(text: str, other: DiffWords) -> list[DiffPiece]:
    """The text in stretches that the other one has, word for word, and such that it has not."""
    matches = list(_WORD.finditer(text[:MAX_COMPARED_CHARACTERS]))
    kept = _find_kept([_normalize_word(match[0]) for match in matches], other)
    found: list[DiffPiece] = []
    at = 0
    for is_kept, group in groupby(zip(matches, kept, strict=True), key=lambda pair: pair[1]):
        if is_kept:
            run = [match for match, _ in group]
            start, stop = run[0].start(), run[-1].end()
            found += [DiffPiece(text[at:start], is_shared=False), DiffPiece(text[start:stop], is_shared=True)]
            at = stop
    return [piece for piece in (*found, DiffPiece(text[at:], is_shared=False)) if piece.text]


def _find_kept(words: list[str], other: DiffWords) -> list[bool]:
    kept = [word in other.distinctive for word in words]
    for index, run in enumerate(_iter_runs(words)):
        if run in other.runs:
            kept[index : index + RUN_WORDS] = [True] * RUN_WORDS
    return kept


def _iter_runs(words: list[str]) -> Iterator[tuple[str, ...]]:
    return zip(words, words[1:], words[2:], strict=False)


def _normalize_word(word: str) -> str:
    """A word as it is compared: in lower case, without the signs that end a sentence."""
    return word.rstrip(_ENDS).lower()


def _is_distinctive(word: str) -> bool:
    return len(word) >= _DISTINCTIVE_CHARACTERS and _DISTINCTIVE.search(word) is not None
