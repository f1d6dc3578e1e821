"""Searches texts in memory: SQLite FTS5 finds the terms, and `recall.ranking` ranks the results.

Each text is that of a message. A short text is one row of the FTS5 index. A long text is cut into several
rows, so that a word in a long message counts about as much as a word in a short message. The index contains
the terms that `recall.tokenize` finds in each row. A search uses the index to find the rows in which a term
occurs. It does not use the ranking of FTS5, because that ranking scores each row without its neighbours.
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


class TextMatch(NamedTuple):
    """A document that a search has found. A document is one of the indexed texts.

    Attributes:
        document_index: Index of the document in the sequence of texts from which the search index was built.
        score: Score of the document as a share of the highest possible score for the query, above 0 and at
            most 1. Words in neighbouring documents count in part. Words of the query that occur in no
            document lower the share. Scores of different queries are only roughly comparable.
        offset: Offset of the best match in the document, in characters. If only neighbouring documents
            match, the offset of a row of this document (`ROW_CHARACTERS`).
    """

    document_index: int
    score: float
    offset: int


class TextIndex(Protocol):
    """A search index of documents. Any thread may search. Searches of several threads run one by one."""

    @property
    def size_bytes(self) -> int:
        """Approximate memory use of the index, in bytes."""
        ...

    def search(self, query: str, limit: int) -> list[TextMatch]:
        """Returns at most `limit` matching documents, best first. Returns an empty list after `close`.

        Any text is a valid query. A document matches if it, or a document near it, contains one of the words
        of the query. If the query has phrases in double quotes, the document must contain all of them.
        `word*` matches all words that begin with `word`. Never raises.
        """
        ...

    def close(self) -> None:
        """Frees the memory of the index. A second call does nothing."""
        ...


class TextIndexBuilder(Protocol):
    """Builds search indexes from the messages of one or several conversations."""

    def build(self, texts: Sequence[str]) -> TextIndex:
        """Builds an index of texts. Texts that are neighbours in `texts` are neighbours in the conversation.

        Call this method in a thread, because it takes seconds for many megabytes of text.

        Raises:
            SearchUnavailableError: If this installation has no full-text search.
        """
        ...


# Maximum characters of a row of the index. `_split_rows` splits a longer text into several rows: after white
# space if possible, otherwise after a separator (such as a hyphen), otherwise inside a word.
ROW_CHARACTERS = 2_000
# For each prefix in a query, a search reads the indexed terms that begin with the prefix. For each word, it
# reads the terms that begin with the root of the word. This is the maximum number of terms that it reads for
# one prefix or word. It ignores further terms.
MAX_FORMS = 1_024
# Maximum number of letters by which a form of a word may be longer than the root of the word. A search
# ignores longer forms.
MAX_ENDING_CHARACTERS = 9
# Bytes that SQLite needs for a database in memory in addition to the database's pages. Measured with 2,000
# databases.
_DATABASE_BYTES = 64 * 1024

_WORD = re.compile(r"\S+")
_BEFORE_SPACE = re.compile(r"\s\S*\Z")
_BEFORE_SEPARATOR = re.compile(r"[\W_][^\W_]*\Z")
_SCHEMA_SQL = """
    PRAGMA journal_mode = OFF;
    CREATE VIRTUAL TABLE rows USING fts5(terms, content='', columnsize=0, tokenize='ascii');
    CREATE VIRTUAL TABLE places USING fts5vocab('rows', 'instance');
    CREATE VIRTUAL TABLE known USING fts5vocab('rows', 'row');
"""
_ROW_COUNTS_SQL = "SELECT doc, count(*) FROM places WHERE term = ? GROUP BY doc"
_TERMS_BY_PREFIX_SQL = "SELECT term FROM known WHERE term >= ? AND term < ? LIMIT ?"
_MATCHING_ROWS_SQL = "SELECT rowid FROM rows WHERE rows MATCH ?"
# The highest Unicode character. All terms that begin with a prefix sort before the prefix followed by this
# character.
_LAST_CHARACTER = "\U0010ffff"
FTS5_MISSING = "The SQLite of this Python has no FTS5, so removed messages cannot be searched."


def is_fts5_available() -> bool:
    """Returns whether this Python's SQLite has FTS5."""
    with closing(sqlite3.connect(":memory:")) as lists:
        try:
            lists.executescript(_SCHEMA_SQL)
        except sqlite3.OperationalError:
            return False
    return True


class SqliteTextIndexBuilder:
    """Builds indexes in memory.

    An index of a megabyte of text takes about 0.3 s of processor time and 2 MB of memory.

    Args:
        ranking: The parameters of the ranking. None uses the defaults.
    """

    def __init__(self, ranking: RankingParameters | None = None) -> None:
        self._ranking = ranking or RankingParameters()

    def build(self, texts: Sequence[str]) -> "SqliteTextIndex":
        """Builds an index of texts. Any thread may call it.

        Raises:
            SearchUnavailableError: If SQLite was built without FTS5.
        """
        if not is_fts5_available():
            raise SearchUnavailableError("no-full-text", FTS5_MISSING)
        return SqliteTextIndex(texts, self._ranking)


class SqliteTextIndex:
    """A search index of texts. Any thread may search. Searches of several threads run one by one.

    Args:
        texts: The texts to index. Texts that are neighbours here are neighbours in the conversation.
        ranking: The parameters of the ranking.
    """

    def __init__(self, texts: Sequence[str], ranking: RankingParameters) -> None:
        self._texts = list(texts)
        self._ranking = ranking
        self._lock = Lock()
        self._closed = False
        # For each row: the index of its text in `_texts`, its offset in this text, and its number of terms.
        self._row_documents, self._row_starts, self._row_lengths = array("l"), array("l"), array("l")
        self._database = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        weakref.finalize(self, self._database.close)
        self._database.executescript(_SCHEMA_SQL)
        self._database.execute("BEGIN")
        self._database.executemany("INSERT INTO rows (rowid, terms) VALUES (?, ?)", self._build_rows())
        self._database.execute("INSERT INTO rows (rows) VALUES ('optimize')")
        self._database.execute("COMMIT")
        self._size = self._measure_bytes()

    @property
    def size_bytes(self) -> int:
        """Approximate memory use of the index, including the texts, in bytes."""
        return self._size

    def search(self, query: str, limit: int) -> list[TextMatch]:
        """Returns at most `limit` texts that match the query, best first (`TextIndex.search`).

        Of two texts with equal scores, the later one comes first.
        """
        parsed_query = parse_query(query, self._ranking.stop_words)
        with self._lock:
            return [] if self._closed or limit < 1 else self._search_locked(parsed_query, limit)

    def close(self) -> None:
        """Frees the memory of the index. Later searches find no documents."""
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
        objects = (*self._texts, self._row_documents, self._row_starts, self._row_lengths)
        return _DATABASE_BYTES + int(size[0]) + sum(map(sys.getsizeof, objects))

    def _search_locked(self, parsed_query: ParsedQuery, limit: int) -> list[TextMatch]:
        scores = RowScorer(self._ranking, self._row_lengths)
        word_weights = self._score_words(parsed_query, scores)
        for name in parsed_query.codes:
            scores.add_code(self._find_rows_with_sequence(name), len(name))
        best: dict[int, tuple[float, int]] = {}
        for row, score in scores.compute_relative_scores().items():
            place = self._row_documents[row]
            best[place] = max(best.get(place, (0.0, 0)), (score, -row))
        if parsed_query.phrases:
            best = {
                place: best.get(place, (1.0, 0))
                for place in self._find_texts_with_phrases(parsed_query.phrases)
            }
        ranked = sorted(best.items(), key=lambda item: (item[1][0], item[0]), reverse=True)[:limit]
        return [
            TextMatch(place, score, self._find_match_offset(place, -row, parsed_query, word_weights))
            for place, (score, row) in ranked
        ]

    def _score_words(self, parsed_query: ParsedQuery, scores: RowScorer) -> dict[str, tuple[str, float]]:
        """Adds the scores of the query's words and prefixes to `scores`.

        Returns a dict with a pair for each indexed term that matches a word or prefix of the query. The first
        element of the pair is the word's root, or the prefix followed by `*`. The second is the weight of the
        word or prefix.
        """
        words_by_root = {self._ranking.find_root(word): word for word in reversed(parsed_query.words)}
        groups = [(of, self._find_word_forms(word, of)) for of, word in words_by_root.items()]
        groups += [(f"{start}*", set(self._find_terms_by_prefix(start))) for start in parsed_query.prefixes]
        word_weights: dict[str, tuple[str, float]] = {}
        for of, forms in groups:
            counts: dict[int, int] = {}
            for form in forms:
                for row, count in self._database.execute(_ROW_COUNTS_SQL, (form,)):
                    counts[row] = counts.get(row, 0) + count
            scores.add_word(counts)
            word_weights |= dict.fromkeys(forms, (of, scores.compute_word_weight(len(counts))))
        return word_weights

    def _find_word_forms(self, word: str, word_root: str) -> set[str]:
        """Returns the indexed terms with the root `word_root`, and `word` itself."""
        # The regular forms of a word begin with its root. Only the last letter of the root may be missing or
        # different, because the stemmer adds an e, turns a y into an i, or leaves an l (as in -ility). The
        # method therefore leaves out a last letter e, i or l when it looks for terms with this beginning.
        shared = word_root[:-1] if len(word_root) > 2 and word_root[-1] in "eil" else word_root
        longest = len(word_root) + MAX_ENDING_CHARACTERS
        candidates = [term for term in self._find_terms_by_prefix(shared) if len(term) <= longest]
        return {
            word,
            *(
                term
                for term in (*candidates, *list_irregular_forms(word_root))
                if self._ranking.find_root(term) == word_root
            ),
        }

    def _find_terms_by_prefix(self, start: str) -> list[str]:
        found = self._database.execute(_TERMS_BY_PREFIX_SQL, (start, start + _LAST_CHARACTER, MAX_FORMS))
        return [term for (term,) in found]

    def _find_rows_with_sequence(self, name: Sequence[str]) -> list[int]:
        """Returns the numbers of the rows that contain the terms in `name` directly one after another."""
        return [row for (row,) in self._database.execute(_MATCHING_ROWS_SQL, (f'"{" ".join(name)}"',))]

    def _find_texts_with_phrases(self, phrases: Sequence[str]) -> set[int]:
        """Returns the indices of the texts that contain every phrase.

        Does not distinguish upper and lower case, or different kinds and lengths of white space.
        """
        places = set.intersection(*(self._find_texts_with_terms(phrase) for phrase in phrases))
        wanted = [phrase.lower() for phrase in phrases]
        return {
            place for place in places if all(each in _normalize_text(self._texts[place]) for each in wanted)
        }

    def _find_texts_with_terms(self, phrase: str) -> set[int]:
        """Returns the indices of texts with all terms of a phrase, or of all texts if it has no terms."""
        places: set[int] | None = None
        for term in {term.text for term in split_terms(phrase)}:
            found = {self._row_documents[row] for row, _ in self._database.execute(_ROW_COUNTS_SQL, (term,))}
            places = found if places is None else places & found
        return set(range(len(self._texts))) if places is None else places

    def _find_match_offset(
        self,
        document_index: int,
        row: int,
        parsed_query: ParsedQuery,
        word_weights: Mapping[str, tuple[str, float]],
    ) -> int:
        """Returns the offset of the best match in a text, in characters. `row` is the best row of the text.

        If the query has phrases, the best match is the first phrase. Otherwise it is the first code of the
        query (`ParsedQuery.codes`) that occurs in `row`. If no code occurs there, it is the passage of `row`
        whose matching words have the most weight. If no term of `row` matches, returns the start of `row`.
        """
        text, start = self._texts[document_index], self._row_starts[row]
        if parsed_query.phrases:
            return _find_original_offset(text, _normalize_text(text).find(parsed_query.phrases[0].lower()))
        terms = list(split_terms(text[start : start + ROW_CHARACTERS]))
        term_texts = tuple(term.text for term in terms)
        for name in parsed_query.codes:
            for first in range(len(term_texts) - len(name) + 1):
                if term_texts[first : first + len(name)] == name:
                    return start + terms[first].start
        matches = [(term.start, *word_weights[term.text]) for term in terms if term.text in word_weights]
        return start + (matches[find_densest_match(matches)][0] if matches else 0)


def _normalize_text(text: str) -> str:
    """Returns a text in lower case, with one space in place of each stretch of white space."""
    return " ".join(text.lower().split())


def _find_original_offset(text: str, offset: int) -> int:
    """Converts an offset in the result of `_normalize_text(text)` to the corresponding offset in `text`."""
    length = 0
    for match in _WORD.finditer(text):
        if length + len(match[0]) > offset:
            return match.start() + offset - length
        length += len(match[0]) + 1
    return 0


def _split_rows(text: str) -> Iterator[tuple[int, int]]:
    """Splits a text into rows. Yields the start and end offset of each row, in characters.

    An empty text gives one empty row.
    """
    start = 0
    while len(text) - start > ROW_CHARACTERS:
        row = text[start : start + ROW_CHARACTERS]
        middle = ROW_CHARACTERS // 2
        edge = _BEFORE_SPACE.search(row, middle) or _BEFORE_SEPARATOR.search(row, middle)
        stop = start + (edge.start() + 1 if edge else ROW_CHARACTERS)
        yield start, stop
        start = stop
    yield start, len(text)
