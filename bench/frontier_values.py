"""Judges observed values against their sources: are they whole, and named by what they belong to?

Nothing of the proxy is used. Results and arguments that are JSON are read as trees: a value belongs to its
key and to the key above that (a date of `flights`; an item of a list to the list's key). In text a value
belongs to the words that stand before it. Strict where the source allows it:

- *Whole*: the value is a whole scalar, a key that holds a digit, or a token of a text that nothing continues
  on either side. A field name is no value.
- *Named*: the label holds all words of the key, or all words of the label stand before the value in a text,
  on its line or on the line above. A URL, an address of mail, a path, a line of an error and a command name
  themselves, if they are that.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from frontier_lists import Value, words

# Characters before a value in which its name may stand.
NAME_CHARACTERS = 80
# A quoted line may end early from this length on.
LINE_CHARACTERS = 90
_DELIMITERS = r"\s\"'`<>()\[\]{},;|*"
_LEFT = re.compile(rf"[^{_DELIMITERS}]+\Z")
_RIGHT = re.compile(rf"[^{_DELIMITERS}]+")
_LEAD = re.compile(r"^[A-Za-z_-]+[=:]+$")
_FIELD = re.compile(r"^[a-z_]+\d*$")
_PATH_KEYS = re.compile(r"path|file|uri|\bdir|cwd|notebook", re.IGNORECASE)
_COMMAND_KEYS = re.compile(r"command|cmd|script|code|shell", re.IGNORECASE)
_PATH = re.compile(r"^(?:~|\.{1,2})?/[\w.@~+-]|^[\w@~+-][\w./@ ~+-]*\.[A-Za-z]\w{0,7}$|^[\w.@-]+/[\w./@-]+$")
_URL = re.compile(r"^https?://\S+$")
_MAIL = re.compile(r"^[\w.+-]+@[\w-]+\.[\w.-]+$")
_ERROR = re.compile(
    r"error|exception|fail|traceback|not found|cannot|denied|fatal|panic|warning|no such", re.IGNORECASE
)
_EXIT = re.compile(r"(?:exit|return)(?:ed)?(?: with)?(?:[ _]?code| status)?", re.IGNORECASE)
_EXIT_CODE = re.compile(r"(?:exit code )?(-?\d+)")


@dataclass(slots=True)
class Sources:
    """What a conversation's tools, calls and replies hold.

    Attributes:
        owners: For each scalar, and each key that holds a digit, the keys above it, nearest first.
        fields: All keys of objects.
        texts: Every text that is no JSON, and every string of several words inside JSON.
    """

    owners: dict[str, list[tuple[str, ...]]] = field(default_factory=lambda: defaultdict(list))
    fields: set[str] = field(default_factory=set)
    texts: list[str] = field(default_factory=list)


def read_sources(messages: Sequence[dict[str, Any]]) -> Sources:
    """Reads what a ledger may have observed: everything but the words of users and privileged messages."""
    sources = Sources()
    for message in messages:
        if message["role"] in {"system", "developer", "user"}:
            continue
        for call in message.get("tool_calls") or ():
            _read(sources, call["function"]["arguments"])
        _read(sources, str(message.get("content") or ""))
    return sources


def _read(sources: Sources, text: str) -> None:
    try:
        tree = json.loads(text)
    except ValueError:
        sources.texts.append(text)
        return
    if isinstance(tree, (dict, list)):
        _walk(sources, tree, ())
    else:
        sources.texts.append(text)


def _walk(sources: Sources, node: object, above: tuple[str, ...]) -> None:
    if isinstance(node, dict):
        for key, held in node.items():
            sources.fields.add(key)
            if re.search(r"\d", key) and not _FIELD.match(key):
                sources.owners[key].append(above)
            _walk(sources, held, (key, *above))
    elif isinstance(node, list):
        for held in node:
            _walk(sources, held, above)
    elif node is not None:
        text = node if isinstance(node, str) else json.dumps(node)
        sources.owners[text].append(above)
        if isinstance(node, str) and re.search(r"\s", node):
            sources.texts.append(text)


def judge(value: Value, sources: Sources) -> tuple[bool, bool]:
    """Whether a value is whole, and whether it is named by what it belongs to."""
    text = value.text
    if "exit" in words(value.label) and (exit_code := _EXIT_CODE.fullmatch(text)):
        wanted = re.compile(rf"{_EXIT.pattern}[\"'=: ]+{exit_code[1]}(?!\d)", re.IGNORECASE)
        is_there = any(map(wanted.search, sources.texts))
        return is_there, is_there
    owners = sources.owners.get(text, [])
    if not owners and text in sources.fields and _FIELD.match(text):
        return False, False
    before = list(_before(text, sources.texts))
    if not owners and not before:
        return False, False
    label = value.label.casefold()
    named = (
        any(_owns(value.label, above) for above in owners)
        or any(_is_named(value.label, said) for said in before)
        or _names_itself(label, text, sources)
    )
    return True, named


def _before(text: str, texts: Sequence[str]) -> Iterator[str]:
    """What stands before each whole occurrence: its heading and the line up to it."""
    pattern = re.compile(r"\s+".join(map(re.escape, text.split())) or r"\Z\A")
    for source in texts:
        for found in pattern.finditer(source):
            start, stop = found.span()
            if _is_whole(source, start, stop, text):
                line = source.rfind("\n", 0, start) + 1
                above = source[:line].rstrip().rpartition("\n")[2]
                yield f"{above[-NAME_CHARACTERS:]}\n{source[line:start][-NAME_CHARACTERS:]}"


def _is_whole(source: str, start: int, stop: int, text: str) -> bool:
    """Whether nothing continues an occurrence; `name=` may lead it, a line number may follow a path."""
    left = _LEFT.search(source, max(0, start - NAME_CHARACTERS), start)
    right = _RIGHT.match(source, stop)
    leads, follows = left[0] if left else "", right[0] if right else ""
    if _PATH.match(text):
        follows = re.sub(r"^(?::\d+)+", "", follows)
    is_end = not follows.strip(".:!?…") or len(text) >= LINE_CHARACTERS
    return is_end and (not leads or bool(_LEAD.match(leads)))


def _stems(text: str) -> set[str]:
    split = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text).replace("_", " ")
    return {word.removesuffix("s") if len(word) > 3 else word for word in words(split)}


def _owns(label: str, above: tuple[str, ...]) -> bool:
    """Whether a label holds every word of the key above a value, or of the one above that."""
    keys = [key for key in above if not re.search(r"\d", key)]
    return any(_stems(key) <= _stems(label) for key in keys[:2])


def _is_named(label: str, said: str) -> bool:
    """Whether every word of a label stands before the value; `code` and `value` say nothing of any."""
    stems = _stems(label) - {"code", "value"}
    return bool(stems) and stems <= _stems(said)


def _names_itself(label: str, text: str, sources: Sources) -> bool:
    stems = _stems(label)
    if _URL.match(text):
        return bool(stems & {"url", "link", "address"})
    if _MAIL.match(text):
        return bool(stems & {"email", "mail"})
    if stems & {"path", "file"}:
        return bool(_PATH.match(text)) or any(
            _PATH_KEYS.search(key) for above in sources.owners.get(text, []) for key in above[:1]
        )
    if "error" in stems:
        return bool(_ERROR.search(text))
    if stems & {"command", "ran"}:
        return any(
            held.lstrip().startswith(text)
            for held, owners in sources.owners.items()
            if any(above and _COMMAND_KEYS.search(above[0]) for above in owners)
        )
    return False
