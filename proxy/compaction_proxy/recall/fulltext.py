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

from compaction_proxy.core.errors import SearchUnavailable
from compaction_proxy.recall.ranking import Ranking, Scores, densest
from compaction_proxy.recall.stems import irregular
from compaction_proxy.recall.tokenize import Query, asked, terms


class Passage(NamedTuple):  # made for each message of an archive
    """One message as a search sees it.

    Attributes:
        id: The message's id.
        text: Its whole text, whatever that holds.
        role: Its role.
    """

    id: str
    text: str
    role: str


class Found(NamedTuple):
    """One passage that a query found.

    Attributes:
        place: Its index in the sequence that the index was built of.
        score: Above 0 and at most 1, higher is better: how much of what was asked for stands there and around
            it, words that stand nowhere included. Exact within one query, and about the same between several.
        offset: Where in the passage's text the best match begins, in characters; 0 if it is found by its
            neighbours alone.
    """

    place: int
    score: float
    offset: int


class TextIndex(Protocol):
    """Passages that can be searched. Any thread may search, one at a time is served."""

    @property
    def size_bytes(self) -> int:
        """About what it takes in memory."""
        ...

    def search(self, query: str, limit: int) -> list[Found]:
        """The best `limit` passages, best first; empty if nothing matches, or after `close`.

        Any text is a query: plain words rank, any of them is enough; a phrase in double quotes must stand in
        what is found; `word*` stands for every word that begins like that. Never raises.
        """
        ...

    def close(self) -> None:
        """Let go of the memory. Calling it twice does no harm."""
        ...


class FullText(Protocol):
    """Makes indexes of the messages of a conversation, or of several."""

    def build(self, passages: Sequence[Passage]) -> TextIndex:
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
MISSING = "The SQLite of this Python has no FTS5: what was removed cannot be searched."


def is_there() -> bool:
    """Whether this Python's SQLite has what it takes."""
    with closing(sqlite3.connect(":memory:")) as lists:
        try:
            lists.executescript(_LISTS)
        except sqlite3.OperationalError:
            return False
    return True


class SqliteFullText:
    """Makes indexes in memory: about 0.3 s of a processor and 2 MB for each megabyte of text.

    Args:
        ranking: What counts.
    """

    def __init__(self, ranking: Ranking | None = None) -> None:
        self._ranking = ranking or Ranking()

    def build(self, passages: Sequence[Passage]) -> "SqliteTextIndex":
        """An index of these, whatever they hold. May run in any thread.

        Raises:
            SearchUnavailable: SQLite was made without FTS5.
        """
        if not is_there():
            raise SearchUnavailable("no-full-text", MISSING)
        return SqliteTextIndex([passage.text for passage in passages], self._ranking)


class SqliteTextIndex:
    """Texts that can be searched. Any thread may search, one at a time is served.

    Args:
        texts: What can be found; neighbours are neighbours in conversation.
        ranking: What counts.
    """

    def __init__(self, texts: Sequence[str], ranking: Ranking) -> None:
        self._texts = list(texts)
        self._ranking = ranking
        self._lock = Lock()
        self._closed = False
        # Of each row: which text it is of, where it begins in there, and how many terms it has.
        self._place, self._start, self._length = array("l"), array("l"), array("l")
        self._lists = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        weakref.finalize(self, self._lists.close)
        self._lists.executescript(_LISTS)
        self._lists.execute("BEGIN")
        self._lists.executemany("INSERT INTO rows (rowid, terms) VALUES (?, ?)", self._rows())
        self._lists.execute("INSERT INTO rows (rows) VALUES ('optimize')")
        self._lists.execute("COMMIT")
        self._size = self._measured()

    @property
    def size_bytes(self) -> int:
        """About what it takes in memory, with the texts."""
        return self._size

    def search(self, query: str, limit: int) -> list[Found]:
        """The best `limit` texts, best first, newer ones before older ones that are as good."""
        wanted = asked(query, self._ranking.stop_words)
        with self._lock:
            return [] if self._closed or limit < 1 else self._search(wanted, limit)

    def close(self) -> None:
        """Let go of the memory."""
        with self._lock:
            self._closed = True
            self._texts = []
            self._lists.close()

    def _rows(self) -> Iterator[tuple[int, str]]:
        for place, text in enumerate(self._texts):
            for start, stop in _cuts(text):
                found = [term.text for term in terms(text[start:stop])]
                yield len(self._place), " ".join(found)
                self._place.append(place)
                self._start.append(start)
                self._length.append(len(found))

    def _measured(self) -> int:
        [size] = self._lists.execute("SELECT page_count * page_size FROM pragma_page_count, pragma_page_size")
        held = (*self._texts, self._place, self._start, self._length)
        return _DATABASE_BYTES + int(size[0]) + sum(map(sys.getsizeof, held))

    def _search(self, wanted: Query, limit: int) -> list[Found]:
        scores = Scores(self._ranking, self._length)
        worth = self._add_words(wanted, scores)
        for name in wanted.codes:
            scores.add_name(self._following(name), len(name))
        best: dict[int, tuple[float, int]] = {}
        for row, score in scores.shares().items():
            place = self._place[row]
            best[place] = max(best.get(place, (0.0, 0)), (score, -row))
        if wanted.phrases:
            best = {place: best.get(place, (1.0, 0)) for place in self._holding(wanted.phrases)}
        ranked = sorted(best.items(), key=lambda item: (item[1][0], item[0]), reverse=True)[:limit]
        return [
            Found(place, score, self._offset(place, -row, wanted, worth)) for place, (score, row) in ranked
        ]

    def _add_words(self, wanted: Query, scores: Scores) -> dict[str, tuple[str, float]]:
        """Score words and beginnings; for each of their forms, which word it is of and how much it tells."""
        meant = {self._ranking.root(word): word for word in reversed(wanted.words)}
        groups = [(of, self._forms(word, of)) for of, word in meant.items()]
        groups += [(f"{start}*", set(self._beginning(start))) for start in wanted.prefixes]
        worth: dict[str, tuple[str, float]] = {}
        for of, forms in groups:
            counts: dict[int, int] = {}
            for form in forms:
                for row, count in self._lists.execute(_COUNTS, (form,)):
                    counts[row] = counts.get(row, 0) + count
            scores.add_word(counts)
            worth |= dict.fromkeys(forms, (of, scores.weight(len(counts))))
        return worth

    def _forms(self, word: str, of: str) -> set[str]:
        """The terms that are forms of a word, itself among them."""
        # A stem is how its words begin, but for an e that came with it, an i that was a y, an l of -ility.
        shared = of[:-1] if len(of) > 2 and of[-1] in "eil" else of
        longest = len(of) + MAX_ENDING_CHARACTERS
        alike = [term for term in self._beginning(shared) if len(term) <= longest]
        return {word, *(term for term in (*alike, *irregular(of)) if self._ranking.root(term) == of)}

    def _beginning(self, start: str) -> list[str]:
        found = self._lists.execute(_BEGINNING, (start, start + _LAST, MAX_FORMS))
        return [term for (term,) in found]

    def _following(self, name: Sequence[str]) -> list[int]:
        """Rows in which these terms follow one another."""
        return [row for (row,) in self._lists.execute(_FOLLOWING, (f'"{" ".join(name)}"',))]

    def _holding(self, phrases: Sequence[str]) -> set[int]:
        """The texts that hold every phrase."""
        places = set.intersection(*(self._may_hold(phrase) for phrase in phrases))
        wanted = [phrase.lower() for phrase in phrases]
        return {place for place in places if all(each in _plain(self._texts[place]) for each in wanted)}

    def _may_hold(self, phrase: str) -> set[int]:
        """Texts that hold all terms of a phrase, or all texts if it has none."""
        places: set[int] | None = None
        for term in {term.text for term in terms(phrase)}:
            found = {self._place[row] for row, _ in self._lists.execute(_COUNTS, (term,))}
            places = found if places is None else places & found
        return set(range(len(self._texts))) if places is None else places

    def _offset(self, place: int, row: int, wanted: Query, worth: Mapping[str, tuple[str, float]]) -> int:
        """Where in a text begins what says most of what was asked: a phrase, or in its best row a name."""
        text, start = self._texts[place], self._start[row]
        if wanted.phrases:
            return _original(text, _plain(text).find(wanted.phrases[0].lower()))
        inside = list(terms(text[start : start + ROW_CHARACTERS]))
        said = tuple(term.text for term in inside)
        for name in wanted.codes:
            for first in range(len(said) - len(name) + 1):
                if said[first : first + len(name)] == name:
                    return start + inside[first].start
        matches = [(term.start, *worth[term.text]) for term in inside if term.text in worth]
        return start + (matches[densest(matches)][0] if matches else 0)


def _plain(text: str) -> str:
    """In lower case, with single spaces."""
    return " ".join(text.lower().split())


def _original(text: str, offset: int) -> int:
    """Where in a text stands what stands at an offset of what `_plain` makes of it."""
    passed = 0
    for match in _WORD.finditer(text):
        if passed + len(match[0]) > offset:
            return match.start() + offset - passed
        passed += len(match[0]) + 1
    return 0


def _cuts(text: str) -> Iterator[tuple[int, int]]:
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
