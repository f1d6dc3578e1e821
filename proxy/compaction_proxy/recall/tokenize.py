"""Splits texts into the terms of an index, and parses queries.

A term usually consists of the letters, digits and Unicode marks between two separators, in lower case and
without accents. A term keeps its ending, so that a search can also find an exact text. The search decides
which terms are forms of the same word (`recall.stems`). A name in camel case gives a term for the whole name
and one for each of its pieces. A number with thousands separators gives a term without the separators. Text
in a writing system without spaces between words gives a term for each pair of neighbouring characters.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple

# Maximum characters of a term. If there are more letters and digits without a separator between them, only
# the first ones become a term.
MAX_TERM_CHARACTERS = 128
# Limits of a query. If a query has too many characters or words, `parse_query` uses only those at its
# beginning and its end, because a question usually comes before or after the text that it is about. If it has
# too many phrases, prefixes or codes, `parse_query` uses only the first ones. It cuts off the end of a longer
# phrase. A longer code gives only words, and a name with more camel-case pieces gives only one term.
MAX_QUERY_CHARACTERS = 8_192
MAX_QUERY_WORDS = 64
MAX_QUERY_PHRASES = 16
MAX_PHRASE_CHARACTERS = 256
MAX_QUERY_PREFIXES = 8
MAX_QUERY_CODES = 16
MAX_CODE_TERMS = 32
MAX_CAMEL_PIECES = 8
# Minimum characters of a code (`ParsedQuery.codes`) that contains a digit. A shorter text with a digit is no
# code, because short numbers occur too often to identify one thing.
MIN_CODE_CHARACTERS = 5

# Characters of writing systems without spaces between words: Thai and Lao; Myanmar; Khmer; Chinese, Japanese
# and Korean with their extensions.
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3"
    "\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003134f"
)
# Ranges of Unicode marks inside words: accents, points of Hebrew and Arabic, vowel signs of Indian writing
# systems, and signs above and below the characters in `_UNSPACED`. The ranges also contain some letters. This
# does no harm, because letters belong to words as well.
_MARKS = (
    "\u0300-\u036f\u0591-\u05c7\u0610-\u061a\u064b-\u065f\u0670\u0900-\u0903\u093a-\u0963\u0981-\u0983\u09bc-\u0a03"
    "\u0a3c-\u0dff\u0e31-\u0e3a\u0e47-\u0e4e\u0eb1-\u0ecd\u102b-\u103e\u17b6-\u17d3"
)
_CONTRACTED = r"(?<=[^\W_])['\u2019](?:[dmst]|ll|re|ve)\b"
_GROUPED = r"(?<![^\W_])[0-9]{1,3}(?:,[0-9]{3}){1,6}(?!,?[0-9])"
_RUN = re.compile(rf"{_CONTRACTED}|{_GROUPED}|(?:[^\W_]+|[{_MARKS}]+)+")
_UNSPACED_RUN = re.compile(f"[{_UNSPACED}]+|[^{_UNSPACED}]+")
_IS_UNSPACED = re.compile(f"[{_UNSPACED}]")
_CAMEL = re.compile(r"[A-Z]+(?![a-z])[0-9]*|[A-Z]?[a-z]+[0-9]*|[0-9]+")
# Replacements for letters that Unicode normalisation does not reduce to the letters a to z.
_STROKES = str.maketrans(
    {"ø": "o", "ł": "l", "đ": "d", "\u0131": "i", "æ": "ae", "œ": "oe", "þ": "th", "ð": "d"}
)

_PHRASE = re.compile(r'"([^"]*)"')
_INNER_SEPARATOR = re.compile(r"[^\W_](?:[_/\\@#=:]|[./\\:_@-]{2}|\.)[^\W_]")
_DIGIT = re.compile(r"[0-9]")
_CAMEL_CASE = re.compile(r"[a-z0-9][A-Z]|[A-Z]{2}[a-z]{2}")
_TRIMMED_CHUNK = re.compile(r"[^\W_](?:.*[^\W_])?", re.DOTALL)

# Words that occur in many questions and say nothing about the subject of a question. `parse_query` ignores
# them if the query has other words or prefixes.
_STOP_WORD_TEXT = """
a about after again all also am an and any are as at be because been before being both but by
can could d did do does doing done down each few for from further had has have having he her
here hers him his how i if in into is it its just ll m may me might mine more most must my no
nor not of off on once only or other our ours out over own re s same shall she should so some
such t than that the their theirs them then there these they this those to too under up us ve
very was we were what when where which while who whom whose why will with would you your yours
don doesn didn isn aren wasn weren won wouldn couldn shouldn hasn haven hadn
"""
STOP_WORDS = frozenset(_STOP_WORD_TEXT.split())


class Term(NamedTuple):
    """One term of a text.

    Attributes:
        text: The term.
        start: Offset of the term in the text, in characters.
    """

    text: str
    start: int


@dataclass(frozen=True, slots=True)
class ParsedQuery:
    """The parts of a query.

    Attributes:
        words: Terms by which a search ranks its results, without duplicates. They include stop words only if
            the query has no other words and no prefixes.
        prefixes: Beginnings of terms, from words of the query that end with `*`.
        codes: Parts of the query that identify one thing, such as a path, an id, a version or an amount. A
            code has no white space. Each code is given as the sequence of its terms.
        phrases: Texts that every result must contain. A search does not distinguish upper and lower case, or
            kinds and lengths of white space.
    """

    words: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()
    codes: tuple[tuple[str, ...], ...] = ()
    phrases: tuple[str, ...] = ()


def split_terms(text: str) -> Iterator[Term]:
    """Yields the terms of a text in their order in the text.

    The pieces of a camel-case name come before the whole name.
    """
    known: dict[str, tuple[str, ...]] = {}
    for match in _RUN.finditer(text):
        run, start = match[0], match.start()
        if run[0] in "'\u2019":
            continue
        if run.isascii():
            if run.islower() or run.isdigit():
                yield Term(run[:MAX_TERM_CHARACTERS], start)
                continue
        elif _IS_UNSPACED.search(run):
            yield from _split_unspaced(run, start)
            continue
        found = known.get(run)
        if found is None:
            found = known[run] = _split_run(run)
        for each in found:
            yield Term(each, start)


def fold_case(run: str) -> str:
    """Returns `run`, a text of letters, digits and Unicode marks, in lower case and without accents."""
    if run.isascii():
        return run.lower()
    plain = "".join(each for each in unicodedata.normalize("NFKD", run) if not unicodedata.combining(each))
    # The conversion can add characters that a term must not contain. For example, "ŉ" gives an apostrophe.
    return "".join(_RUN.findall(plain.casefold().translate(_STROKES))) or run


def _split_run(run: str) -> tuple[str, ...]:
    """Returns the terms of a text without separators, or of a number with thousands separators.

    A name in camel case gives its pieces and the whole name. A number with thousands separators gives one
    term without the separators. Any other text gives one term.
    """
    if run[0].isdigit() and "," in run:
        return (run.replace(",", "")[:MAX_TERM_CHARACTERS],)
    whole = fold_case(run[:MAX_TERM_CHARACTERS])
    if not run.isascii() or run.isupper() or len(run) > MAX_TERM_CHARACTERS:
        return (whole,)
    pieces = _CAMEL.findall(run)
    if not 1 < len(pieces) <= MAX_CAMEL_PIECES:
        return (whole,)
    return (*map(str.lower, pieces), whole)


def _split_unspaced(run: str, start: int) -> Iterator[Term]:
    """Yields the terms of a text that contains characters of writing systems without spaces (`_UNSPACED`).

    Each of these characters gives a term of two characters, together with the next one. The last one before
    another character or the end gives a term of one character. `_split_run` splits the other parts of `run`.
    `start` is the offset of `run` in the whole text.
    """
    for match in _UNSPACED_RUN.finditer(run):
        part, at = match[0], start + match.start()
        if _IS_UNSPACED.match(part):
            part = unicodedata.normalize("NFC", part)
            yield from (Term(part[k : k + 2], at + k) for k in range(len(part)))
        else:
            yield from (Term(each, at) for each in _split_run(part))


def parse_query(query: str, stop_words: AbstractSet[str] = STOP_WORDS) -> ParsedQuery:
    """Parses a query, which may be any text. Leaves out what exceeds the limits above (`MAX_QUERY_…`)."""
    if len(query) > MAX_QUERY_CHARACTERS:
        query = f"{query[: MAX_QUERY_CHARACTERS // 2]} {query[-MAX_QUERY_CHARACTERS // 2 :]}"
    phrases = [" ".join(each.split())[:MAX_PHRASE_CHARACTERS].strip() for each in _PHRASE.findall(query)]
    words: dict[str, None] = {}
    prefixes: dict[str, None] = {}
    codes: dict[tuple[str, ...], None] = {}
    for chunk in query.replace('"', " ").split():
        found = _drop_repeated_last_characters(split_terms(chunk))
        if chunk.endswith("*") or (len(found) == 1 and _is_lone_character(found[0])):
            prefixes |= dict.fromkeys(found[-1:])
            found = found[:-1]
        elif _is_code(chunk, found):
            codes[found] = None
        words |= dict.fromkeys(found)
    return ParsedQuery(
        words=_select_ranking_words(words, stop_words, allow_stop_words=not prefixes),
        prefixes=tuple(prefixes)[:MAX_QUERY_PREFIXES],
        codes=tuple(codes)[:MAX_QUERY_CODES],
        phrases=tuple(dict.fromkeys(filter(None, phrases)))[:MAX_QUERY_PHRASES],
    )


def _drop_repeated_last_characters(found: Iterable[Term]) -> tuple[str, ...]:
    """Returns the terms, but without each term of one character that repeats the end of the term before it.

    `_split_unspaced` yields such a term after the last pair of characters.
    """
    terms: list[str] = []
    for term in found:
        if not (_is_lone_character(term.text) and terms and terms[-1].endswith(term.text)):
            terms.append(term.text)
    return tuple(terms)


def _is_lone_character(term: str) -> bool:
    return len(term) == 1 and bool(_IS_UNSPACED.match(term))


def _select_ranking_words(
    words: Iterable[str], stop_words: AbstractSet[str], *, allow_stop_words: bool
) -> tuple[str, ...]:
    """Returns the words by which a search ranks its results, at most `MAX_QUERY_WORDS`.

    Leaves out stop words, unless all words are stop words and `allow_stop_words` is true. If there are too
    many words, returns only those at the beginning and at the end, half of the allowed number from each.
    """
    ranking_words = [word for word in words if word not in stop_words] or (
        list(words) if allow_stop_words else []
    )
    half = MAX_QUERY_WORDS // 2
    return tuple(
        ranking_words
        if len(ranking_words) <= MAX_QUERY_WORDS
        else ranking_words[:half] + ranking_words[-half:]
    )


def _is_code(chunk: str, terms: tuple[str, ...]) -> bool:
    """Returns whether `chunk` is a code, a part of a query that identifies one thing, such as a path.

    `chunk` contains no white space. `terms` are its terms. A code contains a digit, a separator inside, or a
    change of case as in a camel-case name, or it has several terms and begins with an `_UNSPACED` character.
    A chunk of stop words, one with more than `MAX_CODE_TERMS` terms, and one with a digit but fewer than
    `MIN_CODE_CHARACTERS` characters are no codes.
    """
    core = _TRIMMED_CHUNK.search(chunk)
    if not core or not terms or len(terms) > MAX_CODE_TERMS or STOP_WORDS.issuperset(terms):
        return False
    if _DIGIT.search(core[0]):
        return len(core[0]) >= MIN_CODE_CHARACTERS
    if _IS_UNSPACED.match(core[0]):
        return len(terms) > 1
    return bool(_INNER_SEPARATOR.search(core[0]) or _CAMEL_CASE.search(core[0]))
