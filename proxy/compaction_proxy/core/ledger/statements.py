"""Splits user messages into statements, and finds the kind and the subject of each.

A statement is a sentence, quoted as it was written. This module also recognises orders in text that must not
contain any. An order is a sentence that tells its reader what to do or states a rule.
"""

# ruff: noqa: RUF001 - punctuation of many scripts

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

from compaction_proxy.core.ledger.cues import LABELS, NARRATIVE, STOP_WORDS, THESAURUS, StatementKind, has_cue
from compaction_proxy.core.ledger.facts import take_head_and_tail
from compaction_proxy.core.ledger.values import ExactValue, find_values

# Maximum characters of a statement. A longer sentence becomes several statements.
STATEMENT_CHARACTERS = 600
# Messages with more characters than this are mostly pasted. Only their lines of prose are read.
SHORT_CHARACTERS = 2_000
# Maximum number of statements that are read from one large message. Without this limit, a pasted document
# could fill the ledger.
MAX_STATEMENTS_PER_MESSAGE = 400
# The first statements of a large message, up to this number, are kept even if their kind is unknown.
HEAD_STATEMENTS = 6
# A message with more characters than this is large. After its first statements, only statements of a known
# kind are kept.
SMALL_TEXT_CHARACTERS = 4_096
# Maximum number of words whose stems are cached. Everyday text in one language hardly uses more words.
ROOT_CACHE_SIZE = 16_384

# An order counts as given by a user if one statement of the user contains at least this share of the order's
# words and values.
MIN_SHARED_SHARE = 0.5
# An order is compared with at most this many user statements, the newest ones.
MAX_COMPARED_STATEMENTS = 3_000

# Matches a closed code block, which is not read. A code block that is never closed is read like other text,
# because a rule may follow its first line.
_FENCE = re.compile(r"^[ \t]*(?:```|~~~)[^\n]*\n.*?^[ \t]*(?:```|~~~)[^\n]*$", re.DOTALL | re.MULTILINE)
_SENTENCE_END = re.compile(
    r"(?<=[.!?…])[\"'”’)\]]{0,2}[ \t]+(?=[^a-z \t])|(?<=[a-z]{3}[.!?])[ \t]+(?=[a-z])|(?<=[。！？।۔؟])[ \t]*"
)
_STOP = re.compile(r"[.!?…。！？।۔؟]")
_BULLET = re.compile(r"(?:[-*•‣◦]|\(?\d{1,2}[.)]|[a-z]\))[ \t]+")
# A Markdown heading, which labels the list below it, such as "## Rules".
_HEADING = re.compile(r"#{1,6}[ \t]+([^\n]{1,60}?)[ \t:#]*")
_LABEL = re.compile(
    r"(?P<loud>[A-Z][A-Z0-9 _/-]{1,40}):\s|(?P<said>[^\W\d_][^:.!?\n，。：]{1,40})[:：](?:\s|$|(?<=：))"
)
_PRINTED_LINE = re.compile(r">|\$ |\+\+\+|---|@@|[|#{}<\[\]]|\d+[:|]|\S+:\d+[:\s]|(?:/|[A-Z]:\\)\S+$")
_WORD = re.compile(r"[\w\u0600-\u06ff\u0900-\u0dff]+(?:['’-][\w\u0600-\u06ff\u0900-\u0dff]+)*")
_UNSPACED = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]{2,}")
_SUFFIXES = ("ing", "ed", "al", "en", "ly", "e")
_WEAK_KINDS = frozenset(
    {"number", "name", "language", "path", "percent", "amount", "phase", "time", "weekday"}
)
_COPULA = re.compile(
    r"\b(?:is|are|was|=|at|on|lives|runs|equals|es|son|está|est|sont|ist|sind|é|são|это|belongs|owns?|my|"
    r"our)\b|[:=]|是|は|है|هو|ہے|"
)

# Most statements have some empty sets. They share this one, because each set takes 216 bytes.
_EMPTY: frozenset[Any] = frozenset()

# Names of cues and the kinds that they show. The first cue that a statement has decides its kind.
_KIND_CUES = (
    ("rule_start", StatementKind.RULE),
    ("rule", StatementKind.RULE),
    ("preference", StatementKind.PREFERENCE),
    ("decision", StatementKind.DECISION),
    ("request", StatementKind.REQUEST),
    ("request_start", StatementKind.REQUEST),
)
_SUBJECT_END = re.compile(r"(?<=\w)(?: (?:is|are|es|son|est|sont|é|são|ist|sind|это) |: |：|是|は)")


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement of a user.

    Attributes:
        text: The statement as written.
        kind: The kind of the statement; None if it is of no kind.
        label: The text before a colon that names the kind of the statement, such as "rule", in lower case;
            empty if there is none.
        words: The stems of the words, without exact values and stop words. They show what the statement is
            about.
        subject_words: The stems of the words before "is" or a colon; empty if neither occurs.
        values: The exact values as pairs of kind and text, in lower case.
        is_question: Whether the statement is a question or a supposition. Such a statement replaces no other
            statement.
        is_correction: Whether the statement says that it changes something, such as with "instead".
        is_addition: Whether the statement says that it adds something, such as with "also".
        folded_text: The text as `fold_text` returns it, by which statements are compared.
        kinds: The kinds of the exact values.
    """

    text: str
    kind: StatementKind | None
    label: str
    words: frozenset[str]
    subject_words: frozenset[str]
    values: frozenset[tuple[str, str]]
    is_question: bool = False
    is_correction: bool = False
    is_addition: bool = False
    folded_text: str = ""
    kinds: frozenset[str] = frozenset()


def collect_subject_words(statements: Iterable[Statement]) -> frozenset[str]:
    """Returns the words and values that show what statements are about.

    They are the stems of the words, and the exact values, of all the statements.
    """
    return frozenset(
        word for each in statements for word in (*each.words, *(value for _, value in each.values))
    )


def fold_text(text: str) -> str:
    """Returns a text in lower case, with plain apostrophes and single spaces, for comparisons."""
    if text.isascii():
        return " ".join(text.lower().split())
    plain = unicodedata.normalize("NFC", text).casefold().replace("’", "'")
    return " ".join(plain.split())


def stem_word(word: str) -> str:
    """Returns a word without its most common endings, so that most forms of a word give the same stem."""
    word = word.removesuffix("'s").removesuffix("s'")
    if len(word) > 3 and word.endswith("s") and not word.endswith("ss"):
        word = word[:-1]
    for suffix in _SUFFIXES:
        if word.endswith(suffix) and len(word) - len(suffix) >= 3:
            word = word.removesuffix(suffix)
            break
    return word[:-1] if len(word) > 3 and word[-1] == word[-2] else word


_SYNONYM_STEMS = {stem_word(word): row.split()[0] for row in THESAURUS for word in row.split()}


@lru_cache(maxsize=ROOT_CACHE_SIZE)
def _find_root(word: str) -> str:
    """Returns the stem of a word, or the synonym that represents the stem in comparisons.

    This synonym is the first word of the row in the thesaurus that contains the stem.
    """
    stem = stem_word(word)
    return _SYNONYM_STEMS.get(stem, stem)


@lru_cache(maxsize=256)
def _share_kinds(kinds: frozenset[str]) -> frozenset[str]:
    """Returns the same object for equal sets of kinds, so that statements share its memory."""
    return kinds


def _extract_words(text: str, values: list[ExactValue]) -> frozenset[str]:
    for value in reversed(values):
        text = f"{text[: value.start]} {text[value.start + len(value.text) :]}"
    plain = fold_text(text)
    pairs: set[str] = set()
    if not plain.isascii():
        pairs = {run[k : k + 2] for run in _UNSPACED.findall(plain) for k in range(len(run) - 1)}
        plain = _UNSPACED.sub(" ", plain)
    words = (word for word in _WORD.findall(plain) if len(word) > 1 and word not in STOP_WORDS)
    return frozenset(map(_find_root, words)).union(pairs) or _EMPTY


def _parse_label(text: str) -> tuple[str, StatementKind | None, int]:
    """Returns the label of a text, the kind that the label names, and the offset of the text after the label.

    A label in capitals that names no kind, such as "BUDGET:", makes the statement a fact. If the text has no
    label that shows a kind, the result is an empty label, None and 0.
    """
    found = _LABEL.match(text)
    if found is None:
        return "", None, 0
    label = fold_text(found.group(found.lastgroup or 0))
    kind = next((kind for kind, find_label in LABELS.items() if find_label(label)), None)
    if kind is None and found.lastgroup == "loud" and not has_cue(label, "printed"):
        kind = StatementKind.FACT
    return (label, kind, found.end()) if kind else ("", None, 0)


def _classify_words(plain: str) -> StatementKind | None:
    """Returns the kind that the words of a statement show, or None if they show none.

    `plain` is the statement as `fold_text` returns it, without its label. Words of a rule do not count in a
    statement that only narrates, such as "I always loved it".
    """
    is_narrative = has_cue(plain, "narrative")
    shown = (
        kind
        for name, kind in _KIND_CUES
        if has_cue(plain, name) and not (is_narrative and kind is StatementKind.RULE)
    )
    return next(shown, None)


def _classify_statement(
    plain: str, label_kind: StatementKind | None, values: frozenset[tuple[str, str]], *, question: bool
) -> StatementKind | None:
    kind = _classify_words(plain)
    if question:
        return (
            kind
            if kind is StatementKind.REQUEST and plain.startswith(("can", "could", "would", "will"))
            else None
        )
    if kind is StatementKind.RULE:
        return kind
    # A fact says that something has a value. Values of weak kinds do not count.
    has_value = not {kind for kind, _ in values} <= _WEAK_KINDS
    return label_kind or kind or (StatementKind.FACT if has_value and _COPULA.search(plain) else None)


def _build_statement(text: str, block: tuple[str, StatementKind | None]) -> Statement:
    label, labelled, start = _parse_label(text)
    if labelled is None:
        label, labelled = block
    body = text[start:]
    plain = fold_text(body)
    found, subject_end = list(find_values(body)), _SUBJECT_END.search(body)
    exact = frozenset((value.kind, value.text.casefold()) for value in found)
    question = plain.rstrip("\"')").endswith(("?", "？", "؟")) or (
        not plain.endswith((".", "!")) and has_cue(plain, "question")
    )
    return Statement(
        text,
        _classify_statement(plain, labelled, exact, question=question),
        label,
        _extract_words(body, found),
        _extract_words(body[: subject_end.start()], []) if subject_end else _EMPTY,
        exact or _EMPTY,
        question or has_cue(plain, "hypothesis"),
        has_cue(plain, "correction"),
        has_cue(plain, "addition"),
        fold_text(text),
        _share_kinds(frozenset(kind for kind, _ in exact)),
    )


def _split_long_sentence(sentence: str) -> Iterator[str]:
    while len(sentence) > STATEMENT_CHARACTERS:
        at = sentence.rfind(" ", STATEMENT_CHARACTERS // 2, STATEMENT_CHARACTERS)
        at = at if at > 0 else STATEMENT_CHARACTERS
        yield sentence[:at]
        sentence = sentence[at:].lstrip()
    yield sentence


def _is_prose(line: str) -> bool:
    """Returns whether a line of a long message looks like prose and not like program output."""
    if _PRINTED_LINE.match(line):
        return False
    letters = sum(map(str.isalpha, line)) + sum(map(str.isspace, line))
    return letters >= 0.8 * len(line)


def _split_sentences(line: str) -> Iterator[str]:
    """Yields the sentences of a line.

    `_SENTENCE_END` can match only after a full stop or a similar mark, so it is tried only at these places.
    """
    start = 0
    for stop in _STOP.finditer(line):
        if stop.end() >= start and (gap := _SENTENCE_END.match(line, stop.end())):
            yield line[start : gap.start()]
            start = gap.end()
    yield line[start:]


def _iter_statements(text: str) -> Iterator[Statement]:
    long = len(text) > SHORT_CHARACTERS
    block: tuple[str, StatementKind | None] = ("", None)
    visible = take_head_and_tail(text)
    fenced = "```" in visible or "~~~" in visible
    for raw in (_FENCE.sub("\n", visible) if fenced else visible).splitlines():
        bullet = _BULLET.match(line := raw.strip())
        line = line[bullet.end() :] if bullet else line
        heading = _HEADING.fullmatch(line)
        if heading:
            block = _parse_label(f"{heading[1]}:")[:2]
        if not line or (long and not _is_prose(line)):
            continue
        inherited = block if bullet else ("", None)
        if not (bullet or heading):
            block = _parse_label(line)[:2] if line.endswith((":", "：")) else ("", None)
        for sentence in _split_sentences(line):
            for piece in _split_long_sentence(sentence.strip()):
                if piece:
                    yield _build_statement(piece, inherited)
                    own = _parse_label(piece)[:2]
                    inherited = own if own[1] else inherited


def read_statements(text: str) -> tuple[Statement, ...]:
    """Returns the statements of a user's message.

    A message of more than `SMALL_TEXT_CHARACTERS` characters is large. Of a large message, the function reads
    at most `MAX_STATEMENTS_PER_MESSAGE` statements. It returns the first `HEAD_STATEMENTS` of them, and those
    of the others that are of a known kind.
    """
    if len(text) <= SMALL_TEXT_CHARACTERS:
        return tuple(_iter_statements(text))
    found = enumerate(islice(_iter_statements(take_head_and_tail(text)), MAX_STATEMENTS_PER_MESSAGE))
    return tuple(statement for number, statement in found if statement.kind or number < HEAD_STATEMENTS)


def reads_as_order(sentence: str) -> bool:
    """Returns whether a sentence is worded as a rule or an order."""
    plain = fold_text(sentence)
    is_addressed = has_cue(plain, "injected") or has_cue(plain, "imperative") or has_cue(plain, "obligation")
    return is_addressed or has_cue(NARRATIVE.sub(" ", plain), "rule")


# The check of one summary needs the statements of the same user texts many times, so they are cached. A
# larger cache would keep the texts of many conversations in memory.
@lru_cache(maxsize=2)
def _list_user_statements(texts: tuple[str, ...]) -> tuple[tuple[frozenset[str], bool], ...]:
    """Returns the newest statements of a user, beginning with the newest message.

    Each is a pair: the words and values of the statement, and whether it is negated.
    """
    found: list[tuple[frozenset[str], bool]] = []
    for text in reversed(texts):
        found += [
            (collect_subject_words([each]), has_cue(fold_text(each.text), "negation"))
            for each in read_statements(text)
        ]
        if len(found) >= MAX_COMPARED_STATEMENTS:
            break
    return tuple(found[:MAX_COMPARED_STATEMENTS])


def is_backed_by_user(order: str, user_texts: Sequence[str]) -> bool:
    """Returns whether a statement of the user contains enough of the words and values of `order`.

    The statement must contain at least the share `MIN_SHARED_SHARE` of them. It must be negated if `order` is
    negated, and must not be negated otherwise.
    """
    about, negated = collect_subject_words(read_statements(order)), has_cue(fold_text(order), "negation")
    return bool(about) and any(
        negated == sign and len(about & words) >= MIN_SHARED_SHARE * len(about)
        for words, sign in _list_user_statements(tuple(user_texts))
    )
