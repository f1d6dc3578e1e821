"""Finds exact values in a text by their shape: paths, amounts, names, dates and the like.

Most of a text consists of words at which no value begins. The search skips long sequences of such words in
one step. At every other place it tries only the shapes that can begin with the character at that place.
"""

# ruff: noqa: RUF001 - letters of many scripts

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from compaction_proxy.core.ledger.cues import IMPERATIVES

_MONTH = "(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]{0,6}"
_TOP_LEVEL_DOMAINS = (
    "internal|local|localhost|lan|corp|com|net|org|io|dev|app|ai|cloud|edu|gov|info|test|example|de|fr|es|"
    "it|nl|eu|uk|in|cn|jp|br|ru"
)
_PROGRAMMING = (
    "Python|JavaScript|TypeScript|Rust|Go|Golang|Kotlin|Swift|Java|Ruby|PHP|Perl|Scala|Haskell|Elixir|Bash|"
    "C\\+\\+|C#"
)
_SPOKEN = (
    "English|German|French|Spanish|Italian|Portuguese|Russian|Chinese|Japanese|Korean|Hindi|Arabic|Bengali|"
    "Urdu|Dutch|Polish|Turkish"
)
_SUFFIXES = (
    "py|pyi|js|jsx|ts|tsx|rs|go|java|kt|c|h|cc|cpp|hpp|rb|php|swift|sh|sql|md|rst|txt|pdf|csv|tsv|json|"
    "jsonl|ya?ml|toml|ini|cfg|conf|lock|xml|html|css|log|ipynb|proto|tf|env|docx?|xlsx?|png|jpe?g|svg|zip|gz"
)
_DAYS = (
    "lunes|martes|miércoles|jueves|viernes|lundi|mardi|mercredi|jeudi|vendredi|montag|dienstag|mittwoch|"
    "donnerstag|freitag"
)
_STARTS = (
    "the|a|an|only|no|not|never|always|do|don't|please|my|our|your|this|that|these|if|when|once|i|we|it|and|"
    "but|for|in|on|at|to|all|every|now|so"
)
# The order of the shapes matters: if two shapes match at the same place, the first one counts. Quantifiers
# are possessive (`++`) where a match never needs to give characters back, so that the time is linear in the
# length of the text.
_SHAPES = {
    "url": r"(?i:https?|wss?|postgres(?:ql)?|redis|s3|ssh|ftp)://[^\s<>\"'`|{}\\^\[\]]{1,300}",
    "email": r"[A-Za-z0-9][\w.+-]{0,63}+@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){1,4}",
    "id": r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b",
    "date": rf"\b\d{{4}}-\d\d?-\d\d?(?:T\d\d:\d\d(?::\d\d(?:\.\d{{1,9}})?)?(?:Z|[+-]\d\d:?\d\d)?)?\b|"
        r"\b\d{1,2}[./]\d{1,2}[./]\d{2,4}\b|"
        rf"\b(?i:{_MONTH})\.? \d{{1,2}}(?:st|nd|rd|th)?\b(?:,? \d{{4}}\b)?"
    rf"|\b\d{{1,2}}(?:st|nd|rd|th|\.)? (?i:{_MONTH})\b(?:,? \d{{4}}\b)?"
    r"|(?:\d{4}年)?\d{1,2}月\d{1,2}[日号]",
    "weekday": r"\b(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b"
    r"|(?:周|星期|礼拜)[一二三四五六日天]|[月火水木金土日]曜日?"
    rf"|\b(?i:{_DAYS})\b",
    "money":
        r"[$€£¥₹₽]\s?\d[\d,.]{0,30}\d?(?:[kKmM]\b)?|\b\d[\d,.]{0,30}+\s?(?i:usd|eur|gbp|inr|dollars?|euros?|pounds?|"
        r"rupees|dólares|reais|€|₽)(?!\w)|\d[\d,.]{0,30}+\s?(?:元|円|美元|欧元|रुपये|руб\w*|টাকা|روپے)",
    "percent": r"\b\d{1,20}+(?:\.\d{1,20}+)?+\s?%",
    "phase": r"\b\d{1,3} (?:of|von|de|sur|из) \d{1,3}\b",
    "address": r"\b\d{1,3}(?:\.\d{1,3}){3}\b(?::\d{2,5})?",
    "region": r"\b(?:us|eu|ap|sa|ca|me|af|cn|il|uk)-(?:gov-)?(?:north|south|east|west|central|northeast|"
        r"southeast|northwest|southwest)-?\d\b",
    "zone": r"\b[A-Z][a-z]{2,12}/[A-Z][A-Za-z_]{2,20}(?:/[A-Z][A-Za-z_]{2,20})?\b|\b(?:UTC|"
        r"GMT)(?:[+-]\d{1,2}(?::\d\d)?)?\b|\b(?:CE|E|P|C|M)[SD]?T\b",
    "branch": r"\b(?:feature|feat|fix|bugfix|hotfix|release|spike|chore|docs|task|wip|experiment|"
        r"refactor)/[\w.-]{1,80}",
    "path": rf"(?<![\w/.])(?:~|\.{{1,2}})?/?(?:[\w@+-][\w.@+-]{{0,80}}+/){{1,24}}[\w.@+-]{{0,120}}|"
        rf"(?<![\w/.])/[\w.@+-]{{2,80}}\b|\b[\w-][\w.-]{{0,80}}\.(?:{_SUFFIXES})\b",
    "host": rf"\b[a-z0-9][a-z0-9-]{{0,62}}+(?:\.[a-z0-9-]{{1,62}}){{0,5}}\.(?:{_TOP_LEVEL_DOMAINS})\b"
        rf"(?::\d{{2,5}})?|\blocalhost(?::\d{{2,5}})?\b",
    "time": r"\b\d{1,2}:\d\d(?::\d\d)?(?: ?[ap]m\b)?|\b\d{1,2} ?[ap]m\b",
    "amount": r"\b\d{1,20}+(?:[.,]\d{1,20}+){0,6}+\s?(?:ns|µs|ms|s|sec|secs|seconds?|minutes?|mins?|hours?|h|"
        r"days?|weeks?|months?|years?|[kKMGT]i?[bB]|rps|px|km|cm|mm|kg|g|[kmM])\b",
    "version": r"\bv\d+(?:\.\d+){0,3}(?:-[\w.]{1,20})?\b|\b\d+\.\d+\.\d+(?:-[\w.]{1,20})?\b|"
        r"\b(?<=[A-Za-z] )\d+\.\d+\b",
    "code":
        r"\b(?=[A-Za-z_#-]{0,40}+\d)(?=[\d_#-]{0,40}+[A-Za-z])[A-Za-z0-9]{1,40}(?:[_-][A-Za-z0-9]{1,40}){0,8}\b|"
        r"\b[A-Z][A-Z0-9]{1,30}(?:_[A-Z0-9]{1,30}){1,6}\b",
    "language": rf"\b(?:{_PROGRAMMING}|{_SPOKEN})(?!\w)",
    "name": rf"\b(?=[A-Z][a-z'’-]{{1,24}} [A-Z][a-z'’-])(?!(?i:{IMPERATIVES}|"
        rf"{_STARTS})\b)[A-Z][a-z'’-]{{1,24}}(?: [A-Z][a-z'’-]{{1,24}}){{1,3}}\b(?!/)",
    "number": r"(?<![\w.])\d{1,20}(?:[.,]\d{1,20}){0,3}(?!\w)",
}  # fmt: skip
# The shapes that are tried at a place in the text, by a pattern that the text from this place on matches. A
# number that is not followed by a sign of another shape can only have the shape `number`.
_SHAPES_BY_START = {
    r"\d{1,20}+(?![\w.,/:@+#%€₽-]|\s[^\W\d_btlqxz]|\s[%€₽])": "number",
    r"\d{1,20}+(?![\w.,/:@+#-])": "date money percent phase time amount number",
    r"\d": "email id date money percent phase address path host time amount version code number",
    "[a-z]": "url email id date weekday region branch path host version code",
    "[A-Z]": "url email id date weekday zone path code language name",
    "[$€£¥₹₽]": "money",
    "[~./@+-]": "path",
    r"[^\W\da-zA-Z]": "url date weekday path",  # U+017F is an s under IGNORECASE
}
# `_PLAIN_TEXT` matches text in which no value begins. Those of its alternatives that match words must end
# with `_PLAIN_END`. Otherwise a value might begin with the last characters of the match. The patterns limit
# lengths, so that an attempt that fails costs little. The most common alternative comes first.
_PLAIN_END = r"(?: (?!\d)|(?=[^\w@+/#\-.: ]|[.:](?:\s(?!\d)|\Z)|\Z))"
_NO_WORDS = "周星礼月火水木金土日"
_NAMES = (
    rf"(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b|(?:{_PROGRAMMING}|{_SPOKEN})(?!\w)|"
    rf"(?:UTC|GMT|(?:CE|E|P|C|M)[SD]?T)\b|(?=[DFJLMV])(?i:{_DAYS})\b"
)
_PLAIN_TEXT = "|".join(
    (
        rf"(?!(?=[dfjlmv])(?:{_DAYS}|localhost)\b)[a-z_]{{1,64}}+{_PLAIN_END}",
        r"[^\w~./@+$€£¥₹₽-]++",
        rf"(?!{_NAMES})[A-Z][A-Za-z]{{0,64}}+(?!['’]| [A-Z]){_PLAIN_END}",
        rf"(?!(?i:{_DAYS}|localhost)\b)[^\W\dA-Z{_NO_WORDS}][^\W\d{_NO_WORDS}]{{0,64}}+{_PLAIN_END}",
        r"[~.@+-]{1,64}+(?![\w~./@+-])",
        r"/{1,64}+(?![\w./@+-])",
    )
)


# Only these shapes can begin inside a word of ASCII letters and digits, and only texts with "@" or "://" can
# contain them. All other texts are searched with a faster pattern, which skips the rest of such a word.
_ADDRESS_KINDS = ("url", "email")
_WITHIN_A_WORD = r"(?<=\w)[A-Za-z_]++|(?<=\w)\d{1,32}+(?![\d,.年月]|\s?[元円美欧रрট])"


def _compile_shapes(plain: str, excluded: Sequence[str] = ()) -> re.Pattern[str]:
    """Compiles all shapes except `excluded` into one pattern.

    Each group is named after its shape and the position of its entry in `_SHAPES_BY_START`. A match without a
    group is text that `plain` matches. It contains no value, and the caller ignores it.
    """
    begun = []
    for number, (first, names) in enumerate(_SHAPES_BY_START.items()):
        shapes = (f"(?P<{name}_{number}>{_SHAPES[name]})" for name in names.split() if name not in excluded)
        begun.append(f"(?={first})(?:{'|'.join(shapes)})")
    return re.compile(f"(?:{plain})++|{'|'.join(begun)}")


_VALUE = _compile_shapes(_PLAIN_TEXT)
_VALUE_WITHOUT_ADDRESSES = _compile_shapes(f"{_WITHIN_A_WORD}|{_PLAIN_TEXT}", _ADDRESS_KINDS)
_KINDS = {group: group.partition("_")[0] for group in _VALUE.groupindex}
# Words just before a value that show its kind, such as "branch" or "port".
_KIND_WORD = re.compile(
    r"\b(?:(?P<commit>commit|sha|revision|rev)|(?P<branch>branch)|(?P<port>port))s?\b(?:[ :=]|is|"
    r"\w+ (?:is|now)){0,3}[ `'\"]*$",
    re.IGNORECASE,
)
_HEX = re.compile(r"[0-9a-f]{7,40}")
_ORDINAL = re.compile(r"\d+(?:st|nd|rd|th)|[a-z]{1,2}\d|utf-8|p\d\d|\d[dD]|\d+x", re.IGNORECASE)

# Kinds of values that change to another kind if a word that matches `_KIND_WORD` comes just before the value.
_NAMEABLE = frozenset({"code", "number", "path", "id"})

# Kinds of values that identify something, unlike amounts and times.
IDENTIFYING_KINDS = frozenset({"path", "code", "id", "name", "branch", "commit", "email"})

# Every word that `_KIND_WORD` matches contains one of these strings. A text that contains none of them is not
# searched for the words.
_KIND_WORD_HINTS = ("commit", "sha", "rev", "branch", "port")
# Number of characters before a value that are searched for a word that names its kind.
KIND_SEARCH_CHARACTERS = 40


class ExactValue(NamedTuple):
    """An exact value in a text.

    Attributes:
        kind: The kind, such as `money`. Values of different kinds never replace one another.
        text: The value as written.
        start: Offset of the value in the text, in characters.
    """

    kind: str
    text: str
    start: int


def _refine_kind(kind: str, text: str, before: str) -> str:
    if before and (match := _KIND_WORD.search(before)):
        return match.lastgroup or kind
    return "commit" if kind == "code" and _HEX.fullmatch(text) and len(text) > 6 else kind


def find_values(text: str) -> Iterator[ExactValue]:
    """Yields the exact values in a text, in order.

    The caller must limit the length of the text, such as with `core.ledger.facts.take_head_and_tail`.
    """
    plain = text.lower() if text.isascii() else ""
    named = not plain or any(hint in plain for hint in _KIND_WORD_HINTS)
    pattern = _VALUE if "@" in text or "://" in text else _VALUE_WITHOUT_ADDRESSES
    for found in pattern.finditer(text):
        if (group := found.lastgroup) is None:
            continue
        kind, exact = _KINDS[group], found.group().rstrip(".,;:!?)-")
        if not exact or (kind == "code" and _ORDINAL.fullmatch(exact)):
            continue
        start = found.start()
        if kind in _NAMEABLE:
            before = text[max(0, start - KIND_SEARCH_CHARACTERS) : start] if named else ""
            kind = _refine_kind(kind, exact, before)
        yield ExactValue(kind, exact, start)
