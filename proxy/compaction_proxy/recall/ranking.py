"""How well rows of text answer a query: BM25 over what stands in a row and what stands around it.

A conversation says what it is about once and goes on from there, so that the answer to a question seldom
holds its words: they stand in the messages before it. So a row counts what its neighbours say, half as much
for each step away, and only then saturates. Sources: S. Robertson, H. Zaragoza, M. Taylor, "Simple BM25
extension to multiple weighted fields", CIKM 2004; for weights of words that are never negative, Lucene.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import log

from compaction_proxy.recall.stems import find_word_root
from compaction_proxy.recall.tokenize import STOP_WORDS

# What is around a match and makes it a better one, in characters: about a snippet.
PASSAGE_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class RankingParameters:
    """What counts, and how much.

    Attributes:
        saturation: How slowly more of the same word stops to matter (k1).
        length: How much a long row needs more of a word than a short one, 0 to 1 (b).
        near: Weights of what stands in the rows next to a row, the one after those, and so on.
        root: What two forms of one word have in common.
        stop_words: Words that do not rank as long as others do.
    """

    saturation: float = 1.2
    length: float = 0.5
    near: tuple[float, ...] = (0.5, 0.25, 0.125, 0.0625)
    root: Callable[[str], str] = find_word_root
    stop_words: AbstractSet[str] = STOP_WORDS


class RowScorer:
    """Scores of rows, added up word by word.

    Args:
        ranking: What counts.
        lengths: Number of terms of each row.
    """

    def __init__(self, ranking: RankingParameters, lengths: Sequence[int]) -> None:
        self._ranking = ranking
        self._lengths = lengths
        self._mean = max(1.0, sum(lengths) / max(1, len(lengths)))
        self._sums: defaultdict[int, float] = defaultdict(float)
        self._max_score = 0.0

    def compute_weight(self, rows: int) -> float:
        """How much a word tells that stands in so many rows."""
        return log(1 + (len(self._lengths) - rows + 0.5) / (rows + 0.5))

    def add_word(self, counts: Mapping[int, int]) -> None:
        """A word that stands so many times in each of these rows, in any of its forms."""
        most = self.compute_weight(len(counts)) * (self._ranking.saturation + 1)
        self._max_score += most
        for row, count in self._spread_to_neighbours(counts).items():
            self._sums[row] += most * count / (count + self._ranking.saturation)

    def add_name(self, rows: Sequence[int], terms: int) -> None:
        """A name, of so many terms: a row that holds it outweighs those that hold its terms alone."""
        most = self.compute_weight(len(rows)) * (self._ranking.saturation + 1) * terms
        self._max_score += most
        for row in rows:
            self._sums[row] += most

    def compute_shares(self) -> dict[int, float]:
        """The score of each row that has one: its share of what could be reached, above 0 and at most 1."""
        return {row: score / self._max_score for row, score in self._sums.items() if score > 0}

    def _spread_to_neighbours(self, counts: Mapping[int, int]) -> dict[int, float]:
        """Occurrences of a word in each row and around it, as in rows of mean length."""
        around: defaultdict[int, float] = defaultdict(float)
        last, length = len(self._lengths) - 1, self._ranking.length
        for row, count in counts.items():
            evened = count / (1 - length + length * self._lengths[row] / self._mean)
            around[row] += evened
            for distance, share in enumerate(self._ranking.near, 1):
                if row >= distance:
                    around[row - distance] += share * evened
                if row + distance <= last:
                    around[row + distance] += share * evened
        return around


def find_densest_match(matches: Sequence[tuple[int, str, float]]) -> int:
    """Where the passage begins that says most, as the index of its first match; 0 without matches.

    Args:
        matches: Place in characters, word and weight of each match, in the order of places.
    """
    best, first, weight = 0, 0, 0.0
    inside: defaultdict[str, int] = defaultdict(int)
    heaviest = 0.0
    for at, word, worth in matches:
        weight += worth if not inside[word] else 0.0
        inside[word] += 1
        while at - matches[first][0] > PASSAGE_CHARACTERS:
            _, gone, lost = matches[first]
            inside[gone] -= 1
            weight -= lost if not inside[gone] else 0.0
            first += 1
        if weight > heaviest + 1e-9:
            best, heaviest = first, weight
    return best
