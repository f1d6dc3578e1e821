"""Full text in memory: the lists of SQLite's FTS5, which are small and quick to make, ranked by our own sums.

FTS5 is given our terms and says where they stand; its own ranking knows single rows, not what is around them.
A long message is cut into rows, so that what stands in it counts as much as what stands in a short one.
"""

import re
import sqlite3
import sys
import weakref
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from threading import Lock
from typing import NamedTuple, Protocol

from compaction_proxy.core.errors import SearchUnavailableError
from compaction_proxy.recall.ranking import RankingParameters, RowScorer, find_densest_match
from compaction_proxy.recall.stems import list_irregular_forms
from compaction_proxy.recall.tokenize import ParsedQuery, parse_query, split_terms


class SearchDocument(NamedTuple):  # made for each message of an archive
    """One message as a search sees it.

    Attributes:
        id: The message's id.
        text: Its whole text, whatever that holds.
        role: Its role.
    """

    id: str
    text: str
    role: str


class TextMatch(NamedTuple):
    """One passage that a query found.

    Attributes:
        document_index: Its index in the sequence that the index was built of.
        score: Above 0 and at most 1, higher is better: how much of what was asked for stands there and around
            it, words that stand nowhere included. Exact within one query, and about the same between several.
        offset: Where in the passage's text the best match begins, in characters; 0 if it is found by its
            neighbours alone.
    """

    document_index: int
    score: float
    offset: int


class TextIndex(Protocol):
    """Passages that can be searched. Any thread may search, one at a time is served."""

    @property
    def size_bytes(self) -> int:
        """About what it takes in memory."""
        ...

    def search(self, query: str, limit: int) -> list[TextMatch]:
        """The best `limit` passages, best first; empty if nothing matches, or after `close`.

        Any text is a query: plain words rank, any of them is enough; a phrase in double quotes must stand in
        what is found; `word*` stands for every word that begins like that. Never raises.
        """
        ...

    def close(self) -> None:
        """Let go of the memory. Calling it twice does no harm."""
        ...


class TextIndexBuilder(Protocol):
    """Makes indexes of the messages of a conversation, or of several."""

    def build(self, passages: Sequence[SearchDocument]) -> TextIndex:
        """An index of these, whatever they hold; neighbours in the sequence are neighbours in conversation.

        Takes seconds for many megabytes: call it in a thread.

        Raises:
            SearchUnavailable: This installation cannot search.
        """
        ...


# Most of a row; the next begins behind white space, behind any separator, or else within a word.
ROW_CHARACTERS = 2_000
# Terms looked at for a word or a beginning; no English ending is longer than so many letters.
MAX_FORMS = 1_024
MAX_ENDING_CHARACTERS = 9
# What SQLite takes for a database in memory beside its pages, as measured over 2,000 of them.
_DATABASE_BYTES = 64 * 1024

_WORD = re.compile(r"\S+")
_BEFORE_SPACE = re.compile(r"\s\S*\Z")
_BEFORE_SEPARATOR = re.compile(r"[\W_][^\W_]*\Z")
_LISTS = """
    PRAGMA journal_mode = OFF;
    CREATE VIRTUAL TABLE rows USING fts5(terms, content='', columnsize=0, tokenize='ascii');
    CREATE VIRTUAL TABLE places USING fts5vocab('rows', 'instance');
    CREATE VIRTUAL TABLE known USING fts5vocab('rows', 'row');
"""
_COUNTS = "SELECT doc, count(*) FROM places WHERE term = ? GROUP BY doc"
_BEGINNING = "SELECT term FROM known WHERE term >= ? AND term < ? LIMIT ?"
_FOLLOWING = "SELECT rowid FROM rows WHERE rows MATCH ?"
# Behind every term that begins alike.
_LAST = "\U0010ffff"
FTS5_MISSING = "The SQLite of this Python has no FTS5: what was removed cannot be searched."


def is_fts5_available() -> bool:
    """Whether this Python's SQLite has what it takes."""
    with closing(sqlite3.connect(":memory:")) as lists:
        try:
            lists.executescript(_LISTS)
        except sqlite3.OperationalError:
            return False
    return True


class SqliteTextIndexBuilder:
    """Makes indexes in memory: about 0.3 s of a processor and 2 MB for each megabyte of text.

    Args:
        ranking: What counts.
    """

    def __init__(self, ranking: RankingParameters | None = None) -> None:
        self._ranking = ranking or RankingParameters()

    def build(self, passages: Sequence[SearchDocument]) -> "SqliteTextIndex":
        """An index of these, whatever they hold. May run in any thread.

        Raises:
            SearchUnavailable: SQLite was made without FTS5.
        """
        if not is_fts5_available():
            raise SearchUnavailableError("no-full-text", FTS5_MISSING)
        return SqliteTextIndex([passage.text for passage in passages], self._ranking)


class SqliteTextIndex:
    """Texts that can be searched. Any thread may search, one at a time is served.

    Args:
        texts: What can be found; neighbours are neighbours in conversation.
        ranking: What counts.
    """

    def __init__(self, texts: Sequence[str], ranking: RankingParameters) -> None:
        self._texts = list(texts)
        self._ranking = ranking
        self._lock = Lock()
        self._closed = False
        # Of each row: which text it is of, where it begins in there, and how many terms it has.
        self._row_documents, self._row_starts, self._row_lengths = array("l"), array("l"), array("l")
        self._database = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        weakref.finalize(self, self._database.close)
        self._database.executescript(_LISTS)
        self._database.execute("BEGIN")
        self._database.executemany("INSERT INTO rows (rowid, terms) VALUES (?, ?)", self._build_rows())
        self._database.execute("INSERT INTO rows (rows) VALUES ('optimize')")
        self._database.execute("COMMIT")
        self._size = self._measure_bytes()

    @property
    def size_bytes(self) -> int:
        """About what it takes in memory, with the texts."""
        return self._size

    def search(self, query: str, limit: int) -> list[TextMatch]:
        """The best `limit` texts, best first, newer ones before older ones that are as good."""
        parsed_query = parse_query(query, self._ranking.stop_words)
        with self._lock:
            return [] if self._closed or limit < 1 else self._search_locked(parsed_query, limit)

    def close(self) -> None:
        """Let go of the memory."""
        with self._lock:
            self._closed = True
            self._texts = []
            self._database.close()

    def _build_rows(self) -> Iterator[tuple[int, str]]:
        for place, text in enumerate(self._texts):
            for start, stop in _split_rows(text):
                found = [term.text for term in split_terms(text[start:stop])]
                yield len(self._row_documents), " ".join(found)
                self._row_documents.append(place)
                self._row_starts.append(start)
                self._row_lengths.append(len(found))

    def _measure_bytes(self) -> int:
        [size] = self._database.execute(
            "SELECT page_count * page_size FROM pragma_page_count, pragma_page_size"
        )
        held = (*self._texts, self._row_documents, self._row_starts, self._row_lengths)
        return _DATABASE_BYTES + int(size[0]) + sum(map(sys.getsizeof, held))

    def _search_locked(self, parsed_query: ParsedQuery, limit: int) -> list[TextMatch]:
        scores = RowScorer(self._ranking, self._row_lengths)
        worth = self._score_words(parsed_query, scores)
        for name in parsed_query.codes:
            scores.add_name(self._find_rows_with_sequence(name), len(name))
        best: dict[int, tuple[float, int]] = {}
        for row, score in scores.compute_shares().items():
            place = self._row_documents[row]
            best[place] = max(best.get(place, (0.0, 0)), (score, -row))
        if parsed_query.phrases:
            best = {
                place: best.get(place, (1.0, 0))
                for place in self._find_texts_with_phrases(parsed_query.phrases)
            }
        ranked = sorted(best.items(), key=lambda item: (item[1][0], item[0]), reverse=True)[:limit]
        return [
            TextMatch(place, score, self._find_match_offset(place, -row, parsed_query, worth))
            for place, (score, row) in ranked
        ]

    def _score_words(self, parsed_query: ParsedQuery, scores: RowScorer) -> dict[str, tuple[str, float]]:
        """Score words and beginnings; for each of their forms, which word it is of and how much it tells."""
        meant = {self._ranking.root(word): word for word in reversed(parsed_query.words)}
        groups = [(of, self._find_word_forms(word, of)) for of, word in meant.items()]
        groups += [(f"{start}*", set(self._find_terms_by_prefix(start))) for start in parsed_query.prefixes]
        worth: dict[str, tuple[str, float]] = {}
        for of, forms in groups:
            counts: dict[int, int] = {}
            for form in forms:
                for row, count in self._database.execute(_COUNTS, (form,)):
                    counts[row] = counts.get(row, 0) + count
            scores.add_word(counts)
            worth |= dict.fromkeys(forms, (of, scores.compute_weight(len(counts))))
        return worth

    def _find_word_forms(self, word: str, word_root: str) -> set[str]:
        """The terms that are forms of a word, itself among them."""
        # A stem is how its words begin, but for an e that came with it, an i that was a y, an l of -ility.
        shared = word_root[:-1] if len(word_root) > 2 and word_root[-1] in "eil" else word_root
        longest = len(word_root) + MAX_ENDING_CHARACTERS
        alike = [term for term in self._find_terms_by_prefix(shared) if len(term) <= longest]
        return {
            word,
            *(
                term
                for term in (*alike, *list_irregular_forms(word_root))
                if self._ranking.root(term) == word_root
            ),
        }

    def _find_terms_by_prefix(self, start: str) -> list[str]:
        found = self._database.execute(_BEGINNING, (start, start + _LAST, MAX_FORMS))
        return [term for (term,) in found]

    def _find_rows_with_sequence(self, name: Sequence[str]) -> list[int]:
        """Rows in which these terms follow one another."""
        return [row for (row,) in self._database.execute(_FOLLOWING, (f'"{" ".join(name)}"',))]

    def _find_texts_with_phrases(self, phrases: Sequence[str]) -> set[int]:
        """The texts that hold every phrase."""
        places = set.intersection(*(self._find_texts_with_terms(phrase) for phrase in phrases))
        wanted = [phrase.lower() for phrase in phrases]
        return {
            place for place in places if all(each in _normalize_text(self._texts[place]) for each in wanted)
        }

    def _find_texts_with_terms(self, phrase: str) -> set[int]:
        """Texts that hold all terms of a phrase, or all texts if it has none."""
        places: set[int] | None = None
        for term in {term.text for term in split_terms(phrase)}:
            found = {self._row_documents[row] for row, _ in self._database.execute(_COUNTS, (term,))}
            places = found if places is None else places & found
        return set(range(len(self._texts))) if places is None else places

    def _find_match_offset(
        self, place: int, row: int, parsed_query: ParsedQuery, word_scores: Mapping[str, tuple[str, float]]
    ) -> int:
        """Where in a text begins what says most of what was asked: a phrase, or in its best row a name."""
        text, start = self._texts[place], self._row_starts[row]
        if parsed_query.phrases:
            return _find_original_offset(text, _normalize_text(text).find(parsed_query.phrases[0].lower()))
        inside = list(split_terms(text[start : start + ROW_CHARACTERS]))
        said = tuple(term.text for term in inside)
        for name in parsed_query.codes:
            for first in range(len(said) - len(name) + 1):
                if said[first : first + len(name)] == name:
                    return start + inside[first].start
        matches = [(term.start, *word_scores[term.text]) for term in inside if term.text in word_scores]
        return start + (matches[find_densest_match(matches)][0] if matches else 0)


def _normalize_text(text: str) -> str:
    """In lower case, with single spaces."""
    return " ".join(text.lower().split())


def _find_original_offset(text: str, offset: int) -> int:
    """Where in a text stands what stands at an offset of what `_normalize_text` makes of it."""
    passed = 0
    for match in _WORD.finditer(text):
        if passed + len(match[0]) > offset:
            return match.start() + offset - passed
        passed += len(match[0]) + 1
    return 0


def _split_rows(text: str) -> Iterator[tuple[int, int]]:
    """Where the rows of a text begin and end, in characters; an empty text has one row that is empty."""
    start = 0
    while len(text) - start > ROW_CHARACTERS:
        row = text[start : start + ROW_CHARACTERS]
        middle = ROW_CHARACTERS // 2
        edge = _BEFORE_SPACE.search(row, middle) or _BEFORE_SEPARATOR.search(row, middle)
        stop = start + (edge.start() + 1 if edge else ROW_CHARACTERS)
        yield start, stop
        start = stop
    yield start, len(text)
