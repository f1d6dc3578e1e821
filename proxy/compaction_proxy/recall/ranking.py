"""Scores the rows of a search index for a query. The score is BM25, extended to neighbouring rows.

A conversation often names its subject only once. The message that a query looks for may therefore lack the
words of the query, which are in the messages before it. For this reason, the count of a word in a row
includes a part of its counts in the neighbouring rows: half of the count at distance 1, a quarter at distance
2, and so on. The saturation of BM25, which makes further repetitions of a word count less, is applied to this
sum.

Sources: S. Robertson, H. Zaragoza, M. Taylor, "Simple BM25 extension to multiple weighted fields", CIKM 2004;
Lucene, for word weights that are never negative.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import log

from compaction_proxy.recall.stems import find_word_root
from compaction_proxy.recall.tokenize import STOP_WORDS

# Maximum distance, in characters, between the starts of the first and the last matching word of a passage. It
# is the default length of a snippet. The best passage of a row is the one whose matching words have the
# largest sum of weights.
PASSAGE_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class RankingParameters:
    """The parameters of the ranking.

    Attributes:
        saturation: BM25's k1. The higher it is, the more each repetition of a word adds to the score.
        length_weight: BM25's b: how much the length of a row reduces its word counts, from 0 (not at all) to
            1 (in proportion to the length).
        neighbour_weights: Factors for the word counts of the neighbouring rows at distance 1, 2 and so on.
        find_root: Returns the root of a word, which is the same for all forms of the word.
        stop_words: Words of a query that are ignored if the query has other words or prefixes.
    """

    saturation: float = 1.2
    length_weight: float = 0.5
    neighbour_weights: tuple[float, ...] = (0.5, 0.25, 0.125, 0.0625)
    find_root: Callable[[str], str] = find_word_root
    stop_words: AbstractSet[str] = STOP_WORDS


class RowScorer:
    """Adds up the scores of rows for one query.

    The caller adds the words and the codes of the query (`ParsedQuery`) one by one.

    Args:
        ranking: The parameters of the ranking.
        lengths: Number of terms of each row.
    """

    def __init__(self, ranking: RankingParameters, lengths: Sequence[int]) -> None:
        self._ranking = ranking
        self._lengths = lengths
        self._mean = max(1.0, sum(lengths) / max(1, len(lengths)))
        self._sums: defaultdict[int, float] = defaultdict(float)
        self._max_score = 0.0

    def compute_word_weight(self, row_count: int) -> float:
        """Returns the weight of a word that occurs in `row_count` rows.

        The fewer rows contain a word, the higher its weight.
        """
        return log(1 + (len(self._lengths) - row_count + 0.5) / (row_count + 0.5))

    def add_word(self, counts: Mapping[int, int]) -> None:
        """Adds the scores of all rows for one word of the query.

        `counts` maps each row that contains the word to the number of occurrences of the word's forms.
        """
        max_score = self.compute_word_weight(len(counts)) * (self._ranking.saturation + 1)
        self._max_score += max_score
        for row, count in self._spread_to_neighbours(counts).items():
            self._sums[row] += max_score * count / (count + self._ranking.saturation)

    def add_code(self, rows: Sequence[int], term_count: int) -> None:
        """Adds the score of a code, which is a sequence of terms that identifies one thing, such as a path.

        Because of this score, a row with the whole code usually ranks before a row with only some of its
        terms.

        Args:
            rows: The rows that contain the whole code.
            term_count: Number of terms of the code.
        """
        max_score = self.compute_word_weight(len(rows)) * (self._ranking.saturation + 1) * term_count
        self._max_score += max_score
        for row in rows:
            self._sums[row] += max_score

    def compute_relative_scores(self) -> dict[int, float]:
        """Returns the score of each matching row, as a share (at most 1) of the highest possible score."""
        return {row: score / self._max_score for row, score in self._sums.items() if score > 0}

    def _spread_to_neighbours(self, counts: Mapping[int, int]) -> dict[int, float]:
        """Returns, for each row, the number of occurrences of a word in it and, in part, in its neighbours.

        `counts` has the number of occurrences by row. The method first reduces the numbers of long rows
        (`RankingParameters.length_weight`).
        """
        around: defaultdict[int, float] = defaultdict(float)
        last, length = len(self._lengths) - 1, self._ranking.length_weight
        for row, count in counts.items():
            normalized = count / (1 - length + length * self._lengths[row] / self._mean)
            around[row] += normalized
            for distance, share in enumerate(self._ranking.neighbour_weights, 1):
                if row >= distance:
                    around[row - distance] += share * normalized
                if row + distance <= last:
                    around[row + distance] += share * normalized
        return around


def find_densest_match(matches: Sequence[tuple[int, str, float]]) -> int:
    """Returns the index, in `matches`, of the first match of the best passage. Returns 0 without matches.

    The best passage is the one whose matches have the largest sum of weights. In this sum, a word that occurs
    several times in the passage counts once.

    Args:
        matches: Offset in characters, word and weight of each match, in the order of offsets.
    """
    best, first, weight = 0, 0, 0.0
    inside: defaultdict[str, int] = defaultdict(int)
    heaviest = 0.0
    for at, word, worth in matches:
        weight += worth if not inside[word] else 0.0
        inside[word] += 1
        while at - matches[first][0] > PASSAGE_CHARACTERS:
            _, word_left, weight_left = matches[first]
            inside[word_left] -= 1
            weight -= weight_left if not inside[word_left] else 0.0
            first += 1
        if weight > heaviest + 1e-9:
            best, heaviest = first, weight
    return best
