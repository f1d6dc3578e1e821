"""Exact values in a text, and what can be observed of a conversation without a model.

Whatever comes from tools and from the assistant may be hostile. It is only ever quoted as short values of
known shapes, without control or invisible characters, and never as a sentence but for one line of an error.
"""

# ruff: noqa: RUF001 - letters of many scripts

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

from proxy.core.cues import IMPERATIVES
from proxy.core.message import Call, Message

# Of one text no more than this is looked at, in characters: its head and its tail.
HEAD_CHARACTERS, TAIL_CHARACTERS = 24 * 1024, 8 * 1024
# A line longer than this is no line that anyone wrote: only its beginning is looked at, in characters.
LINE_CHARACTERS = 2_000
# Quoted of a line that reports an error, of a shell command, and of any other value, in characters.
ERROR_CHARACTERS, COMMAND_CHARACTERS, VALUE_CHARACTERS = 120, 100, 160
# Messages are cached apart beyond the first, not at all beyond the second, so that caches stay small.
SMALL_CHARACTERS, LARGE_CHARACTERS = 4_096, 65_536
# What one message may contribute.
VALUES_A_MESSAGE, ERRORS_A_MESSAGE = 40, 3

_UNSEEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e"
    "\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\uffff\ud800-\udfff\U000e0000-\U000e0fff]+"
)

_MONTH = "(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]{0,6}"
_TOPS = (
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
_STARTS = (
    "the|a|an|only|no|not|never|always|do|don't|please|my|our|your|this|that|these|if|when|once|i|we|it|and|"
    "but|for|in|on|at|to|all|every|now|so"
)
# In order: where two begin at the same place the first one counts.
_FAMILIES = {
    "url": r"(?i:https?|wss?|postgres(?:ql)?|redis|s3|ssh|ftp)://[^\s<>\"'`|{}\\^\[\]]{1,300}",
    "email": r"[A-Za-z0-9][\w.+-]{0,63}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){1,4}",
    "id": r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b",
    "date": rf"\b\d{{4}}-\d\d?-\d\d?\b(?:T[\d:.]{{4,12}}Z?)?|\b\d{{1,2}}[./]\d{{1,2}}[./]\d{{2,4}}\b|"
        rf"\b(?i:{_MONTH})\.? \d{{1,2}}(?:st|nd|rd|th)?\b(?:,? \d{{4}}\b)?"
    rf"|\b\d{{1,2}}(?:st|nd|rd|th|\.)? (?i:{_MONTH})\b(?:,? \d{{4}}\b)?"
    r"|(?:\d{4}年)?\d{1,2}月\d{1,2}[日号]",
    "weekday": r"\b(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b"
    r"|(?:周|星期|礼拜)[一二三四五六日天]|[月火水木金土日]曜日?"
    r"|\b(?i:lunes|martes|miércoles|jueves|viernes|lundi|mardi|mercredi|jeudi|vendredi|montag|dienstag|"
    r"mittwoch|donnerstag|freitag)\b",
    "money":
        r"[$€£¥₹₽]\s?\d[\d,.]{0,30}\d?(?:[kKmM]\b)?|\b\d[\d,.]{0,30}\s?(?i:usd|eur|gbp|inr|dollars?|euros?|pounds?|"
        r"rupees|dólares|reais|€|₽)(?!\w)|\d[\d,.]{0,30}\s?(?:元|円|美元|欧元|रुपये|руб\w*|টাকা|روپے)",
    "percent": r"\b\d{1,20}(?:\.\d{1,20})?\s?%",
    "phase": r"\b\d{1,3} (?:of|von|de|sur|из) \d{1,3}\b",
    "address": r"\b\d{1,3}(?:\.\d{1,3}){3}\b(?::\d{2,5})?",
    "region": r"\b(?:us|eu|ap|sa|ca|me|af|cn|il|uk)-(?:gov-)?(?:north|south|east|west|central|northeast|"
        r"southeast|northwest|southwest)-?\d\b",
    "zone": r"\b[A-Z][a-z]{2,12}/[A-Z][A-Za-z_]{2,20}(?:/[A-Z][A-Za-z_]{2,20})?\b|\b(?:UTC|"
        r"GMT)(?:[+-]\d{1,2}(?::\d\d)?)?\b|\b(?:CE|E|P|C|M)[SD]?T\b",
    "branch": r"\b(?:feature|feat|fix|bugfix|hotfix|release|spike|chore|docs|task|wip|experiment|"
        r"refactor)/[\w.-]{1,80}",
    "path": rf"(?<![\w/.])(?:~|\.{{1,2}})?/?(?:[\w@+-][\w.@+-]{{0,80}}/){{1,24}}[\w.@+-]{{0,120}}|"
        rf"(?<![\w/.])/[\w.@+-]{{2,80}}\b|\b[\w-][\w.-]{{0,80}}\.(?:{_SUFFIXES})\b",
    "host": rf"\b[a-z0-9][a-z0-9-]{{0,62}}(?:\.[a-z0-9-]{{1,62}}){{0,5}}\.(?:{_TOPS})\b(?::\d{{2,5}})?|"
        rf"\blocalhost(?::\d{{2,5}})?\b",
    "time": r"\b\d{1,2}:\d\d(?::\d\d)?(?: ?[ap]m\b)?|\b\d{1,2} ?[ap]m\b",
    "amount": r"\b\d{1,20}(?:[.,]\d{1,20}){0,6}\s?(?:ns|µs|ms|s|sec|secs|seconds?|minutes?|mins?|hours?|h|"
        r"days?|weeks?|months?|years?|[kKMGT]i?[bB]|rps|px|km|cm|mm|kg|g|[kmM])\b",
    "version": r"\bv\d+(?:\.\d+){0,3}(?:-[\w.]{1,20})?\b|\b\d+\.\d+\.\d+(?:-[\w.]{1,20})?\b|"
        r"\b(?<=[A-Za-z] )\d+\.\d+\b",
    "code":
        r"\b(?=[A-Za-z_#-]{0,40}\d)(?=[\d_#-]{0,40}[A-Za-z])[A-Za-z0-9]{1,40}(?:[_-][A-Za-z0-9]{1,40}){0,8}\b|"
        r"\b[A-Z][A-Z0-9]{1,30}(?:_[A-Z0-9]{1,30}){1,6}\b",
    "language": rf"\b(?:{_PROGRAMMING}|{_SPOKEN})(?!\w)",
    "name": rf"\b(?!(?i:{IMPERATIVES}|"
        rf"{_STARTS})\b)[A-Z][a-z'’-]{{1,24}}(?: [A-Z][a-z'’-]{{1,24}}){{1,3}}\b(?!/)",
    "number": r"(?<![\w.])\d{1,20}(?:[.,]\d{1,20}){0,3}(?!\w)",
}  # fmt: skip
_VALUE = re.compile("|".join(f"(?P<{name}>{pattern})" for name, pattern in _FAMILIES.items()))
# What a word just before says of a bare value.
_NAMED = re.compile(
    r"\b(?:(?P<commit>commit|sha|revision|rev)|(?P<branch>branch)|(?P<port>port))s?\b(?:[ :=]|is|"
    r"\w+ (?:is|now)){0,3}[ `'\"]*$",
    re.IGNORECASE,
)
_HEX = re.compile(r"[0-9a-f]{7,40}")
_ORDINAL = re.compile(r"\d+(?:st|nd|rd|th)|[a-z]{1,2}\d|utf-8|p\d\d|\d[dD]|\d+x", re.IGNORECASE)

# What identifies something, as opposed to how much or when.
OBJECTS = frozenset({"path", "code", "id", "name", "branch", "commit", "email"})
_OBSERVED = frozenset(
    {"url", "email", "id", "money", "version", "code", "date", "commit", "branch", "port", "address", "host"}
)

_ERROR = re.compile(
    r"\b(?:[A-Za-z_][\w.]{0,60}(?:Error|Exception|Failure|Warning)\b|Traceback\b|[Ee]rror[:\[ ]|ERROR\b|"
    r"FAILED?\b|[Ff]atal[: ]|panic(?:ked)?[: ]|command not found|No such file|Permission denied|"
    r"[Cc]annot find)"
)
_EXIT = re.compile(
    r"\b(?:exit(?:ed with)?(?: code| status)?|return ?code|exitCode)\"?[:= ]{1,3}(-?\d{1,3})\b", re.IGNORECASE
)

_PATH_KEY = re.compile(
    r'"(?:file_?path|path|file|filename|target_file|old_path|new_path|notebook_path|uri|source|destination|target|file_name)"\s*:\s*"((?:[^"\\]|\\.){1,400})"',
    re.IGNORECASE,
)
_COMMAND_KEY = re.compile(
    r'"(?:command|cmd|script|shell|code|bash_command)"\s*:\s*(?:\[[^\]"]*)?"((?:[^"\\]|\\.){1,2000})',
    re.IGNORECASE,
)
_SUBCOMMAND = re.compile(
    r'"(?:command|action|operation|type)"\s*:\s*"(view|create|str_replace|insert|write|read|delete|edit)"'
)
_PATCHED = re.compile(r"\*\*\* (Add|Update|Delete) File: ([^\\\n\"]{1,200})")
_DEEDS = (
    ("deleted", re.compile(r"delete|remove|unlink|trash|^rm$")),
    ("modified", re.compile(r"edit|patch|replace|update|modify|append|insert|rename|move|apply|^mv$|sed")),
    ("created", re.compile(r"create|write|save|touch|mkdir|new_?file|copy|^cp$")),
    (
        "read",
        re.compile(
            r"read|view|open|cat|show|get|load|grep|search|glob|list|find|^ls$|head|tail|sort|diff|wc"
        ),
    ),
)
_TARGET = r"([\w~./@+-]{2,160})"
_SHELL = (
    (
        "modified",
        re.compile(rf"(?<![>&\d])>>?\s*{_TARGET}|\b(?:sed\s+-i\S*\s+\S{{1,200}}|tee(?: -a)?)\s+{_TARGET}"),
    ),
    ("deleted", re.compile(rf"\brm\s+(?:-\w+\s+)*{_TARGET}")),
    ("created", re.compile(rf"\b(?:touch|mkdir(?: -p)?)\s+{_TARGET}")),
    ("read", re.compile(rf"\b(?:cat|less|head|tail)\s+(?:-\w+\s+(?:\d+\s+)?)*{_TARGET}")),
)


class Value(NamedTuple):
    """An exact value in a text.

    Attributes:
        kind: What it is, such as `money`; values of different kinds never take one another's place.
        text: As written.
        start: Offset in the text, in characters.
    """

    kind: str
    text: str
    start: int


@dataclass(frozen=True, slots=True)
class Observed:
    """Something seen in what tools and the assistant said.

    Attributes:
        kind: `path`, `error`, `exit`, `command`, or the kind of a value.
        text: One short line.
        at: Index of the newest message that shows it.
        deeds: For a path, what was done with it: `read`, `created`, `modified`, `deleted`, in that order.
    """

    kind: str
    text: str
    at: int
    deeds: tuple[str, ...] = ()


def looked_at(text: str) -> str:
    """Head and tail of a text that is too long to be read whole."""
    if len(text) <= HEAD_CHARACTERS + TAIL_CHARACTERS:
        return text
    return f"{text[:HEAD_CHARACTERS]}\n{text[-TAIL_CHARACTERS:]}"


def one_line(text: str, characters: int) -> str:
    """The beginning of a text as one line that hides nothing and opens no template."""
    seen = _UNSEEN.sub(" ", text[: 2 * characters]).replace("<|", "< |").replace("|>", "| >")
    return " ".join(seen.split())[:characters]


def _named(kind: str, text: str, before: str) -> str:
    said = _NAMED.search(before)
    if said and kind in {"code", "number", "path", "id"}:
        return said.lastgroup or kind
    return "commit" if kind == "code" and _HEX.fullmatch(text) and len(text) > 6 else kind


def values(text: str) -> Iterator[Value]:
    """Exact values in a text, in order; it should be bounded, see `looked_at`."""
    for found in _VALUE.finditer(text):
        kind, exact = found.lastgroup or "", found.group().rstrip(".,;:!?)-")
        if kind == "code" and _ORDINAL.fullmatch(exact):
            continue
        if exact:
            before = text[max(0, found.start() - 40) : found.start()]
            yield Value(_named(kind, exact, before), exact, found.start())


def _shell_paths(command: str) -> Iterator[tuple[str, str]]:
    for deed, pattern in _SHELL:
        for found in pattern.finditer(command):
            path = next(filter(None, found.groups()))
            if not path.startswith(("/dev/", "-")):
                yield deed, path


def _call_paths(call: Call, arguments: str) -> Iterator[tuple[str, str]]:
    sub = _SUBCOMMAND.search(arguments)
    name = sub.group(1) if sub else call.name.lower()
    deed = next((deed for deed, pattern in _DEEDS if pattern.search(name)), None)
    for found in _PATH_KEY.finditer(arguments):
        if deed:
            yield deed, found.group(1)
    for done, path in _PATCHED.findall(arguments):
        yield {"Add": "created", "Update": "modified", "Delete": "deleted"}[done], path


def _called(call: Call) -> Iterator[tuple[str, str, str]]:
    """What a call shows: kind, text, deed."""
    yield from (("path", path, deed) for deed, path in _call_paths(call, call.arguments))
    for found in _COMMAND_KEY.finditer(call.arguments):
        command = found.group(1).replace("\\n", "\n").replace('\\"', '"')
        if _SUBCOMMAND.match(f'"command":"{command}"'):
            continue
        yield "command", command.strip().partition("\n")[0][:COMMAND_CHARACTERS], ""
        yield from (("path", path, deed) for deed, path in _shell_paths(command))


def _errors(text: str) -> Iterator[tuple[str, str, str]]:
    shown = 0
    for line in text.splitlines():
        if shown < ERRORS_A_MESSAGE and (found := _ERROR.search(line, 0, LINE_CHARACTERS)):
            shown += 1
            yield "error", one_line(line[found.start() :], ERROR_CHARACTERS), ""
    if (code := _EXIT.search(text)) and code.group(1) != "0":
        yield "exit", f"exit code {code.group(1)}", ""


def _seen(message: Message) -> tuple[tuple[str, str, str], ...]:
    """What a message shows, in order. Only the parts that are looked at are held in a cache."""
    calls = tuple(replace(call, arguments=looked_at(call.arguments)) for call in message.calls)
    text = looked_at(message.text)
    result = bool(message.answers) or message.role in {"tool", "function"}
    size = len(text) + sum(len(call.id) + len(call.name) + len(call.arguments) for call in calls)
    if size > LARGE_CHARACTERS:
        return _shown(calls, text, result)
    return (_seen_in_small if size <= SMALL_CHARACTERS else _seen_in_large)(calls, text, result)


def _shown(calls: tuple[Call, ...], text: str, result: bool) -> tuple[tuple[str, str, str], ...]:  # noqa: FBT001 - an lru_cache tells by position
    found = [each for call in calls for each in _called(call)]
    if result:
        found += _errors(text)
    lines = "\n".join(line[:LINE_CHARACTERS] for line in text.splitlines())
    exact = (value for value in values(lines) if value.kind in _OBSERVED and len(value.text) > 2)
    found += [(value.kind, value.text, "") for value in islice(exact, VALUES_A_MESSAGE)]
    limits = {"error": ERROR_CHARACTERS, "command": COMMAND_CHARACTERS}
    return tuple(
        (kind, one_line(said, limits.get(kind, VALUE_CHARACTERS)), deed) for kind, said, deed in found
    )


_seen_in_small = lru_cache(maxsize=4096)(_shown)
_seen_in_large = lru_cache(maxsize=256)(_shown)


def observed(messages: Sequence[Message], covered: Collection[int]) -> tuple[Observed, ...]:
    """What the covered messages of tools and of the assistant show, each thing once, newest last."""
    found: dict[tuple[str, str], Observed] = {}
    for at in sorted(covered):
        message = messages[at]
        if message.privileged or (message.role == "user" and not message.answers):
            continue
        for kind, text, deed in _seen(message):
            known = found.pop((kind, text), None)
            deeds = {*(known.deeds if known else ()), *([deed] if deed else ())}
            ordered = tuple(each for each in ("read", "created", "modified", "deleted") if each in deeds)
            found[kind, text] = Observed(kind, text, at, ordered)
    return tuple(each for each in found.values() if each.text)
