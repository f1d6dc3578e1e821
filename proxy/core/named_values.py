"""Exact values with the names of what they belong to: JSON is read by its keys, text by what stands before.

A value is a whole token. What is cut out of a longer one, such as the hour of a time stamp or the number in a
field's name, says nothing to a reader and is left out.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import NamedTuple

from proxy.core.cues import STOP_WORDS
from proxy.core.json_bounds import read_json
from proxy.core.values import Value, values

# What is looked at in front of a value for its name, in characters.
NAMED_WITHIN = 60
# Leaves of one JSON text that are looked at, levels that are entered, and characters of one leaf.
MAX_LEAVES, MAX_DEPTH, LEAF_CHARACTERS = 4_000, 12, 2_000
# A bare code in prose is quoted without a name only in texts as short as this, in characters.
SHORT_TEXT_CHARACTERS = 200
LEAST_CODE = 5

_GENERIC = frozenset(
    {"id", "name", "key", "code", "value", "number", "amount", "date", "type", "status", "price", "total"}
    | {"created_at", "updated_at", "time", "url", "version", "email", "title", "label", "text", "data"}
)
_ID_KEY = re.compile(r"(?:^|_)(?:id|ids|number|no|key|code|uuid)$|[a-z]Id$|^name$", re.IGNORECASE)
# What belongs to a token besides letters and digits, and what may stand around one.
_TOKEN = re.compile(r"[\w.@/\\~+&%-]+")
_AROUND = ".,;:!?-+~%&"
_LABEL = re.compile(r"([^\W\d_][\w /-]{0,38}?)[\"'`*_)\]]{0,4}[ \t]{0,2}[:=：][ \t]{0,3}[\"'`*(\[$#<]{0,4}\Z")  # noqa: RUF001 - a wide colon
_WORDS = re.compile(r"[^\W_][\w-]*")
# What a stop ends, a name does not reach across.
_BREAK = re.compile(r"[.!?;\n\t|(){}\[\]<>。！？]")  # noqa: RUF001 - stops of other scripts
_KEY_FOLLOWS = re.compile(r"[\"']?\s{0,2}:\s")
# Kinds whose name says enough where nothing else does.
_SELF_NAMED = frozenset({"url", "email", "host", "commit", "branch", "port", "version", "address"})
# Kinds of text that has a newer value, not a further one, where the same label stands before it again.
_CHANGING = frozenset({"money", "version", "date", "port", "host", "address", "branch", "commit"})


class NamedValue(NamedTuple):
    """A whole value and what it belongs to.

    Attributes:
        kind: As in `core.values`.
        text: As written.
        name: What it is called; "" where nothing says.
        thing: What has it, in whatever message it is shown; "" where that is not known.
    """

    kind: str
    text: str
    name: str
    thing: str = ""


def find_named_values(text: str, kinds: frozenset[str]) -> Iterator[NamedValue]:
    """Yields the values of these kinds in a text, in order; the text should be bounded."""
    held = read_json(text)
    if held is None:
        yield from _in_text(text, kinds)
        return
    for name, thing, leaf in islice(_leaves(held), MAX_LEAVES):
        for value in values(leaf[:LEAF_CHARACTERS]):
            if value.kind not in kinds:
                continue
            if len(value.text) == len(leaf):
                yield NamedValue(value.kind, value.text, name, thing)
            elif _is_whole(leaf, value):
                yield NamedValue(value.kind, value.text, _name_before(leaf, value) or name)


def _leaves(held: object) -> Iterator[tuple[str, str, str]]:
    """The strings in JSON values, in order: name, what has it, and the string."""
    rest: list[tuple[object, str, str, int]] = [(held, "", "", 0)]
    while rest:
        value, key, thing, depth = rest.pop()
        if isinstance(value, str):
            yield key, thing, value
        elif depth < MAX_DEPTH and isinstance(value, Mapping):
            own = _own_id(value)
            inner = [
                (each, _name_of(name, key, own), f"{own or thing}\n{name}" if own or thing else "", depth + 1)
                if not isinstance(each, Mapping | list)
                else (each, _parent_of(name, key), own or thing, depth + 1)
                for name, each in value.items()
                if isinstance(name, str)
            ]
            rest.extend(reversed(inner))
        elif depth < MAX_DEPTH and isinstance(value, list):
            rest.extend((each, key, thing, depth + 1) for each in reversed(value))


def _own_id(value: Mapping[object, object]) -> str:
    """What identifies an object among others; "" where nothing does."""
    found = (each for key, each in value.items() if isinstance(key, str) and _ID_KEY.search(key))
    return next((str(each) for each in found if isinstance(each, str | int) and str(each)), "")


def _name_of(name: str, parent: str, own: str) -> str:
    """A leaf's name: its key, and where that says too little, what it is a key of."""
    if name.lower() not in _GENERIC:
        return name
    if name.lower() in {"id", "name", "key", "code", "number"} or not own:
        return f"{parent}.{name}" if parent else name
    return f"{own} {name}"


def _parent_of(name: str, parent: str) -> str:
    """What the values of an inner object are called after: not after one that is itself a value."""
    return parent if any(map(str.isdigit, name)) and parent else name


def _in_text(text: str, kinds: frozenset[str]) -> Iterator[NamedValue]:
    is_short = len(text) <= SHORT_TEXT_CHARACTERS
    for value in values(text):
        if value.kind not in kinds or not _is_whole(text, value):
            continue
        name = _name_before(text, value)
        if value.kind == "code" and not (_is_made(value.text) and (name or is_short)):
            continue
        thing = f"\n{name}" if name and value.kind in _CHANGING else ""
        yield NamedValue(value.kind, value.text, name, thing)


def _is_made(code: str) -> bool:
    """Whether a code looks made to tell things apart, and is no word of a program."""
    parts = sum(map(str.isdigit, code)) >= 2 and len(code) >= LEAST_CODE  # noqa: PLR2004 - one digit is in many words
    return parts and (
        not code.islower() or "-" in code or "_" in code or sum(map(str.isdigit, code)) > len(code) // 3
    )


def _is_whole(text: str, value: Value) -> bool:
    """Whether a value is a token of its own, and neither a part of one nor the name of a field."""
    start, stop = value.start, value.start + len(value.text)
    before = text[max(0, start - NAMED_WITHIN) : start]
    after = text[stop : stop + NAMED_WITHIN]
    left = next((k for k in range(len(before), 0, -1) if not _TOKEN.match(before[k - 1])), 0)
    right = _TOKEN.match(after)
    around = before[left:].strip(_AROUND) + (right.group().strip(_AROUND) if right else "")
    if around:
        return False
    return not (before[-1:] in {'"', "'"} and _KEY_FOLLOWS.match(after))


def _name_before(text: str, value: Value) -> str:
    """What stands before a value and names it; "" where nothing does."""
    before = text[max(0, value.start - NAMED_WITHIN) : value.start]
    line = before.rpartition("\n")[2]
    if label := _LABEL.search(line):
        words = label.group(1).split()
        return " ".join(words[-4:])
    if value.kind in _SELF_NAMED:
        return ""
    said = _BREAK.split(line.rstrip(" (\"'`*[#$<"))[-1]
    words = _WORDS.findall(said)[-4:]
    return next(
        (w for w in reversed(words) if w.lower() not in STOP_WORDS and not any(map(str.isdigit, w))), ""
    )
