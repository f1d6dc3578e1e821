"""Cues: words and patterns that show the kind of a statement, such as a rule, a request or a correction.

The file `data/cues.toml` lists the cues. Each is searched for in the text of one statement, in the form that
`core.ledger.statements.fold_text` returns: in lower case, with plain apostrophes and single spaces. Callers
limit the length of this text.
"""

import re
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from importlib.resources import files

_TABLES = tomllib.loads(files("compaction_proxy").joinpath("data", "cues.toml").read_text("utf-8"))
STOP_WORDS = frozenset(_TABLES["stop_words"].split())
# Each row lists words, separated by spaces, that mean the same in a rule.
THESAURUS: Sequence[str] = _TABLES["thesaurus"]
# Verbs with which a request may begin, as the alternatives of a regular expression.
IMPERATIVES = "".join(_TABLES["words"]["imperatives"])

# Letters of writing systems that have no spaces between words, or that have vowel signs which `\b` treats as
# ends of words. Phrases in these writing systems match anywhere in a text, even inside a word.
_UNSPACED_LETTER = re.compile("[\u0600-\u06ff\u0900-\u0dff\u3040-\u30ff\u3400-\u9fff]")
_CHOICE = re.compile(r"\(\?:([^()]*)\)(\??)(?![*+{])")
_LETTER = re.compile(r"\w(?![?*+{])")

CueFinder = Callable[[str], re.Match[str] | None]


class StatementKind(StrEnum):
    """The kind of a user statement."""

    RULE = "rule"
    REQUEST = "request"
    DECISION = "decision"
    PREFERENCE = "preference"
    FACT = "fact"


def _expand_choice(phrase: str) -> Iterator[str]:
    """Yields every variant of a phrase that begins with a choice, such as `(?:i|we) need`."""
    choice = _CHOICE.match(phrase)
    if choice is None:
        yield phrase
        return
    for begun in [*choice[1].split("|"), *([""] if choice[2] else [])]:
        yield from _expand_choice(begun + phrase[choice.end() :])


def _build_whole_word_pattern(phrases: Sequence[str]) -> str:
    """Returns a pattern that matches the phrases, but only as whole words.

    The phrases are grouped by their first letter, so that a search rejects most words of a text by one
    comparison.
    """
    by_letter: defaultdict[str, list[str]] = defaultdict(list)
    for phrase in phrases:
        by_letter[phrase[0] if _LETTER.match(phrase) else ""].append(phrase)
    others = by_letter.pop("", [])
    grouped = [f"{letter}(?:{'|'.join(each[1:] for each in some)})" for letter, some in by_letter.items()]
    return rf"\b(?:{'|'.join(grouped + others)})\b" if phrases else "(?!)"


def _compile_phrases(phrases: Sequence[str]) -> CueFinder:
    """Returns a function that finds the first phrase in a text.

    If several phrases match at the same place, the function need not find the longest. Phrases in writing
    systems that separate words match only whole words. ASCII text is searched only for the phrases that can
    occur in it.
    """
    bare = [phrase for phrase in phrases if _UNSPACED_LETTER.search(phrase)]
    spaced = [each for phrase in phrases if phrase not in bare for each in _expand_choice(phrase)]
    plain = [each for each in spaced if each[0].isascii() or not _LETTER.match(each)]
    pattern = re.compile("|".join([_build_whole_word_pattern(spaced), *bare]))
    ascii_pattern = re.compile(_build_whole_word_pattern(plain))
    return lambda text: (ascii_pattern if text.isascii() else pattern).search(text)


def _compile_pattern(pieces: Sequence[str]) -> re.Pattern[str]:
    pattern = "".join(pieces)
    for name, words in _TABLES["words"].items():
        pattern = pattern.replace(f"<{name}>", "".join(words))
    return re.compile(pattern)


NARRATIVE = _compile_pattern(_TABLES["anywhere"]["narrative"])
# A user may put a label before a statement, such as "Rule:". For each kind of statement, this table has a
# function that finds the words for the kind in a label.
LABELS = {StatementKind(kind): _compile_phrases(phrases) for kind, phrases in _TABLES["labels"].items()}
_FINDERS: dict[str, CueFinder] = {
    **{name: _compile_phrases(phrases) for name, phrases in _TABLES["phrases"].items()},
    **{name: _compile_pattern(pieces).match for name, pieces in _TABLES["start"].items()},
    **{name: _compile_pattern(pieces).search for name, pieces in _TABLES["anywhere"].items()},
}


def has_cue(plain: str, name: str) -> bool:
    """Returns whether a text contains one of the cues that `data/cues.toml` lists under `name`.

    `plain` is the text as `fold_text` returns it.
    """
    return _FINDERS[name](plain) is not None
