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
_TELLING_CHARACTERS = 4
_TELLING = re.compile(r"[\d/_\\@:=]|\w\.\w")
_WORD = re.compile(r"[^\s\"'`()\[\]{}<>,;|*]+")
_ENDS = ".:!?-#="


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of text, and whether the other text has it too."""

    text: str
    kept: bool


@dataclass(frozen=True, slots=True)
class Words:
    """What a text is compared by.

    Attributes:
        runs: Runs of words.
        telling: Words that mean something alone.
    """

    runs: AbstractSet[tuple[str, ...]]
    telling: AbstractSet[str]


def words_of(texts: Iterable[str]) -> Words:
    """What these texts have, up to `MAX_COMPARED_CHARACTERS` of them."""
    runs: set[tuple[str, ...]] = set()
    telling: set[str] = set()
    left = MAX_COMPARED_CHARACTERS
    for text in texts:
        found = [_bare(match[0]) for match in _WORD.finditer(text[:left])]
        runs.update(_runs(found))
        telling.update(filter(_tells, found))
        left -= min(len(text), left)
    return Words(runs, telling)


def pieces(text: str, other: Words) -> list[Piece]:
    """The text in stretches that the other one has, word for word, and such that it has not."""
    matches = list(_WORD.finditer(text[:MAX_COMPARED_CHARACTERS]))
    kept = _kept([_bare(match[0]) for match in matches], other)
    found: list[Piece] = []
    at = 0
    for is_kept, group in groupby(zip(matches, kept, strict=True), key=lambda pair: pair[1]):
        if is_kept:
            run = [match for match, _ in group]
            start, stop = run[0].start(), run[-1].end()
            found += [Piece(text[at:start], kept=False), Piece(text[start:stop], kept=True)]
            at = stop
    return [piece for piece in (*found, Piece(text[at:], kept=False)) if piece.text]


def _kept(words: list[str], other: Words) -> list[bool]:
    kept = [word in other.telling for word in words]
    for index, run in enumerate(_runs(words)):
        if run in other.runs:
            kept[index : index + RUN_WORDS] = [True] * RUN_WORDS
    return kept


def _runs(words: list[str]) -> Iterator[tuple[str, ...]]:
    return zip(words, words[1:], words[2:], strict=False)


def _bare(word: str) -> str:
    """A word as it is compared: in lower case, without the signs that end a sentence."""
    return word.rstrip(_ENDS).lower()


def _tells(word: str) -> bool:
    return len(word) >= _TELLING_CHARACTERS and _TELLING.search(word) is not None
