"""Finds exact values with their names: in JSON by the keys, in other text by the words before a value.

A value must be a whole token. A part of a longer token, such as the hour of a time stamp or the number in a
field's name, is useless to a reader and is left out.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import NamedTuple

from compaction_proxy.core.json_bounds import parse_json_container
from compaction_proxy.core.ledger.cues import STOP_WORDS
from compaction_proxy.core.ledger.values import ExactValue, find_values

# Characters before a value that are searched for its name.
NAME_SEARCH_CHARACTERS = 60
# Maximum number of strings read from one JSON text, of nesting levels, and of characters read of one string.
MAX_LEAVES, MAX_DEPTH, LEAF_CHARACTERS = 4_000, 12, 2_000
# A code, an amount of money, a version or a commit without a name is quoted only if the text has at most this
# many characters.
SHORT_TEXT_CHARACTERS = 200
# Minimum characters of a code, of a complete date and of a word that names a value. Maximum number of words
# in a name that is taken from the end of a label.
MIN_CODE_CHARACTERS, MIN_DATE_CHARACTERS, MIN_WORD_CHARACTERS, MAX_LABEL_WORDS = 5, 8, 3, 4
# Maximum number of meaningless words, such as "of", between a name and its value.
MAX_SKIPPED_WORDS = 2

_GENERIC_KEYS = frozenset(
    {"id", "name", "key", "code", "value", "number", "amount", "date", "type", "status", "price", "total"}
    | {"created_at", "updated_at", "time", "url", "version", "email", "title", "label", "text", "data"}
)
_ID_KEY = re.compile(r"(?:^|_)(?:id|ids|number|no|key|code|uuid)$|[a-z]Id$|^name$", re.IGNORECASE)
# Characters of a token, and characters that may surround one.
_TOKEN = re.compile(r"[\w.@/\\~+&%-]+")
_SURROUNDING_CHARACTERS = ".,;:!?-+~%&"
_LABEL = re.compile(r"([^\W\d_][\w /-]{0,38}?)[\"'`*_)\]]{0,4}[ \t]{0,2}[:=：][ \t\"'`*(\[$#<]{0,6}\Z")  # noqa: RUF001 - a wide colon
_WORDS = re.compile(r"[^\W\d_]+")
# Characters that may separate a word from the value that it names.
_OPENING_CHARACTERS = " (\"'`*[#$<"
_TECHNICAL_TERM = re.compile(
    r"\d+-[a-z]+|(?:utf|sha|iso|base|aes|md|u?int|float|win|x)-?\d{1,4}", re.IGNORECASE
)
# Colours, and attributes in program code that look like host names, are no useful values and are left out.
_COLOUR = re.compile(r"[0-9a-f]{3}(?:[0-9a-f]{3})?(?:[0-9a-f]{2})?", re.IGNORECASE)
_ATTRIBUTE = re.compile(r"(?:self|this|cls|super|args|opts?|config|module|req|res|ctx)\.")
_COMMIT_SIZES = frozenset({7, 40})
_COMMIT_WORDS = frozenset({"commit", "sha", "revision", "rev", "head"})
_KEY_FOLLOWS = re.compile(r"[\"']?\s{0,2}:\s")
# Kinds of values that are clear without a name, so that the word before them is not used as one.
_UNNAMED_KINDS = frozenset({"url", "email", "host", "branch", "port", "address"})
# In text that is not JSON, a later value of these kinds replaces the earlier value with the same name. Values
# of other kinds, such as codes, are all kept.
_REPLACING_KINDS = frozenset({"money", "version", "date", "port", "host", "address", "branch", "commit"})


class NamedValue(NamedTuple):
    """A value with its name and the object that has it.

    Attributes:
        kind: The kind of the value, as in `core.ledger.values`.
        text: The value as written.
        name: Its name; "" if it has none.
        owner_key: Key made of the value's name and of the object that it belongs to, such as an order. The
            key is the same in all messages; "" if it is unknown.
    """

    kind: str
    text: str
    name: str
    owner_key: str = ""


def find_named_values(text: str, kinds: frozenset[str]) -> Iterator[NamedValue]:
    """Yields the values of these kinds in a text, in order. The caller must limit the length of the text."""
    parsed = parse_json_container(text)
    if parsed is None:
        yield from _find_text_values(text, kinds)
        return
    for name, thing, leaf in islice(_iter_named_leaves(parsed), MAX_LEAVES):
        for value in find_values(leaf[:LEAF_CHARACTERS]):
            if value.kind not in kinds:
                continue
            if len(value.text) == len(leaf):
                yield NamedValue(value.kind, value.text, name, thing)
            elif _is_whole(leaf, value):
                yield NamedValue(value.kind, value.text, _find_name(leaf, value) or name)


def _iter_named_leaves(json_value: object) -> Iterator[tuple[str, str, str]]:
    """Yields the name, the key (`NamedValue.owner_key`) and the text of each string in a JSON value."""
    rest: list[tuple[object, str, str, int]] = [(json_value, "", "", 0)]
    while rest:
        value, key, thing, depth = rest.pop()
        if isinstance(value, str):
            yield key, thing, value
        elif depth < MAX_DEPTH and isinstance(value, Mapping):
            own = _find_own_id(value)
            inner = [
                (
                    each,
                    _name_leaf(name, key, own),
                    f"{own or thing}\n{name}" if own or thing else "",
                    depth + 1,
                )
                if not isinstance(each, Mapping | list)
                else (each, _name_inner_object(name, key), own or thing, depth + 1)
                for name, each in value.items()
                if isinstance(name, str)
            ]
            rest.extend(reversed(inner))
        elif depth < MAX_DEPTH and isinstance(value, list):
            rest.extend((each, key, thing, depth + 1) for each in reversed(value))


def _find_own_id(value: Mapping[object, object]) -> str:
    """Returns the value that identifies a JSON object among others, or "" if there is none."""
    found = (each for key, each in value.items() if isinstance(key, str) and _ID_KEY.search(key))
    return next((str(each) for each in found if isinstance(each, str | int) and str(each)), "")


def _name_leaf(name: str, parent: str, own_id: str) -> str:
    """Returns the name of a value in a JSON object: its key, or more if the key is generic, such as "status".

    A generic key is put after the parent's name, as in "order.id", or after the id of its object.
    """
    if name.lower() not in _GENERIC_KEYS:
        return name
    if name.lower() in {"id", "name", "key", "code", "number"} or not own_id:
        return f"{parent}.{name}" if parent else name
    return f"{own_id} {name}"


def _name_inner_object(name: str, parent: str) -> str:
    """Returns the name of an inner JSON object or list.

    This is its key, or the parent's name if the key contains digits and is therefore no real name.
    """
    return parent if any(map(str.isdigit, name)) and parent else name


def _find_text_values(text: str, kinds: frozenset[str]) -> Iterator[NamedValue]:
    is_short = len(text) <= SHORT_TEXT_CHARACTERS
    for value in find_values(text):
        if value.kind not in kinds or not _is_whole(text, value):
            continue
        label = _find_label(text, value)
        name = label or _find_naming_word(text, value)
        if not _is_informative(value, label=label, name=name, is_short=is_short):
            continue
        thing = f"\n{name}" if name and value.kind in _REPLACING_KINDS else ""
        yield NamedValue(value.kind, value.text, name, thing)


def _is_informative(value: ExactValue, *, label: str, name: str, is_short: bool) -> bool:
    """Returns whether a value in prose or in program output is useful to a reader."""
    text = value.text
    if value.kind == "host":
        return not _ATTRIBUTE.match(text) and (bool(label) or text != "localhost")
    if value.kind == "code":
        is_loud = text.isupper() or "-" in text or "_" in text
        return _is_identifier(text) and bool(label or ((is_short or name) and is_loud))
    if value.kind == "date":
        return bool(label or (name and text[-2:].isdigit() and len(text) >= MIN_DATE_CHARACTERS))
    if value.kind == "commit":
        return bool(label) or is_short or len(text) in _COMMIT_SIZES or name.lower() in _COMMIT_WORDS
    if value.kind in {"money", "version"}:
        return bool(name) or is_short
    return value.kind != "email" or not text.rpartition(".")[2].isdigit()


def _is_identifier(code: str) -> bool:
    """Returns whether a code looks like an identifier and not like a technical term such as "utf-8"."""
    digits = sum(map(str.isdigit, code))
    return digits > 1 and len(code) >= MIN_CODE_CHARACTERS and not _TECHNICAL_TERM.fullmatch(code)


def _is_whole(text: str, value: ExactValue) -> bool:
    """Returns whether a value is a whole token, and neither a colour nor the key of a field."""
    start, stop = value.start, value.start + len(value.text)
    before = text[max(0, start - NAME_SEARCH_CHARACTERS) : start]
    after = text[stop : stop + NAME_SEARCH_CHARACTERS]
    left = next((k for k in range(len(before), 0, -1) if not _TOKEN.match(before[k - 1])), 0)
    right = _TOKEN.match(after)
    around = before[left:].strip(_SURROUNDING_CHARACTERS) + (
        right.group().strip(_SURROUNDING_CHARACTERS) if right else ""
    )
    if around:
        return False
    if before.endswith("#") and _COLOUR.fullmatch(value.text) and not value.text.isdigit():
        return False
    return not (before[-1:] in {'"', "'"} and _KEY_FOLLOWS.match(after))


def _find_name(text: str, value: ExactValue) -> str:
    """Returns the label or word before a value that names it, or "" if there is none."""
    return _find_label(text, value) or _find_naming_word(text, value)


def _find_label(text: str, value: ExactValue) -> str:
    """Returns the label in front of a value, such as "Total" in "Total: 5", or "" if there is none."""
    line = text[max(0, value.start - NAME_SEARCH_CHARACTERS) : value.start].rpartition("\n")[2]
    label = _LABEL.search(line)
    return " ".join(label.group(1).split()[-MAX_LABEL_WORDS:]) if label else ""


def _find_naming_word(text: str, value: ExactValue) -> str:
    """Returns the nearest meaningful word before a value, or "" if there is none or the kind needs none."""
    if value.kind in _UNNAMED_KINDS:
        return ""
    line = (
        text[max(0, value.start - NAME_SEARCH_CHARACTERS) : value.start]
        .rpartition("\n")[2]
        .rstrip(_OPENING_CHARACTERS)
    )
    for word in reversed(_WORDS.findall(line)[-MAX_SKIPPED_WORDS - 1 :]):
        if not line.endswith(word):
            return ""
        if len(word) >= MIN_WORD_CHARACTERS and word.lower() not in STOP_WORDS:
            return str(word)
        line = line.removesuffix(word).rstrip(_OPENING_CHARACTERS)
    return ""
