"""Reads a forwarded list from outside: what stands in for removed messages, and what it says of them.

It knows the words that a reader sees (headings, bullets, table rows) and nothing of the code that wrote them.
So the same reading serves every version of the proxy.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

JsonObject = dict[str, Any]

# A line that lists values holds this word in its heading.
_OBSERVED = re.compile(r"\bobserved\b", re.IGNORECASE)
_DONE = re.compile(r"^done\b", re.IGNORECASE)
_RULES = re.compile(r"\brules?\b", re.IGNORECASE)
# A heading over work that is called unfinished, a cell or an ending that calls one item so.
_OPEN_HEADING = re.compile(r"\b(open|pending|unfinished|unanswered|not done|outstanding)\b", re.IGNORECASE)
_OPEN_WORD = r"(?:still )?(?:open|pending|in progress|unfinished|not done)"
_OPEN_CELL = re.compile(rf"^\W*{_OPEN_WORD}\W*$", re.IGNORECASE)
_OPEN_START = re.compile(rf"^{_OPEN_WORD}\s*(?:[:\u2014-]|->|→)\s*(?=\S)", re.IGNORECASE)
_OPEN_END = re.compile(rf"(?:→|->|=>|\(|\[|\bstatus:)\s*{_OPEN_WORD}\b[^\w]*$", re.IGNORECASE)
_BULLET = re.compile(r"^\s*(?:[-*•]|\d{1,2}[.)])\s+")
_ORIGIN = re.compile(r"\s*[\[(]m_[0-9a-f]+[\])]")
_DEEDS = re.compile(r"\s*\((?:read|created|modified|deleted)(?:, (?:read|created|modified|deleted))*\)$")
_DONE_PATH = re.compile(r"^(.+): (?:(?:read|created|modified|deleted)(?:, )?)+$")
_PAIR = re.compile(r"^([^\W\d][\w ./\[\]-]{0,60}?)\s*[:=]\s+(\S.*)$")
_PARTS = re.compile(r"; |\s(?:→|->)\s|, (?=[^\W\d][\w .-]{0,40}[:=]\s)")
_WORD = re.compile(r"[^\W_]+")
# Labels whose value is a whole line, in which colons and semicolons say nothing.
_LINES = frozenset({"error", "exit", "command"})
# Labels of accounts, not of values. Of what they tell only tokens with a digit behind a name are values.
_ACCOUNTS = frozenset(
    {
        "done",
        "failed",
        "ran",
        "call",
        "called",
        "wrote",
        "answered",
        "last step",
        "last call",
        "to do",
        "next",
        "said",
    }
)
_ARROW = re.compile(r"\s(?:→|->)\s")
_NAMED = re.compile(r"^([a-z][a-z_]{2,40}) (\S.*)$")
_TOKEN = re.compile(r"^[\w./-]*\d[\w./-]*$")


@dataclass(frozen=True, slots=True)
class Item:
    """A bullet, a table row or a plain line of a stand-in, with the heading that it stands under."""

    heading: str
    text: str


@dataclass(frozen=True, slots=True)
class Value:
    """A value that a stand-in says was observed.

    Attributes:
        label: What it is called.
        text: The value.
        section: `observed` or `done`.
    """

    label: str
    text: str
    section: str


@dataclass(frozen=True, slots=True)
class Forwarded:
    """What reached the provider for one request.

    Attributes:
        client: The messages that the client sent.
        messages: The messages that were forwarded.
        status: The proxy's status header.
        session: The proxy's id of the conversation.
        round: The number of the compaction in force; 0: none.
    """

    client: Sequence[JsonObject]
    messages: Sequence[JsonObject]
    status: str
    session: str
    round: int = 0

    @property
    def stand_ins(self) -> list[str]:
        """The texts of the messages that the client did not send in this form."""
        sent = Counter(map(_key, self.client))
        return [_content(each) for each in self.messages if not _take(sent, _key(each))]

    @property
    def ledger(self) -> str:
        """The stand-ins that carry over what was said and seen, apart from the records of rounds."""
        texts = self.stand_ins
        carried = [text for text in texts if "carried over" in text[:80].lower()]
        return "\n".join(carried or [text for text in texts if not text.startswith("[Record")])

    @property
    def text(self) -> str:
        """Everything but privileged messages: contents and the arguments of calls."""
        return "\n".join(
            f"{_content(each)}\n{call['function']['name']} {call['function']['arguments']}"
            if call
            else _content(each)
            for each in self.messages
            if each["role"] not in {"system", "developer"}
            for call in each.get("tool_calls") or [None]
        )

    @property
    def is_compacted(self) -> bool:
        """Whether anything was removed."""
        return len(self.messages) < len(self.client) and bool(self.stand_ins)

    def holds(self, message: Mapping[str, Any]) -> bool:
        """Whether a message of the client stands there as it was sent."""
        return _key(message) in set(map(_key, self.messages))


def _content(message: Mapping[str, Any]) -> str:
    held = message.get("content")
    if isinstance(held, list):
        return "\n".join(str(part.get("text", "")) for part in held)
    return held or ""


def _key(message: Mapping[str, Any]) -> str:
    return json.dumps([message["role"], _content(message), message.get("tool_calls")], sort_keys=True)


def _take(counts: Counter[str], key: str) -> bool:
    counts[key] -= 1
    return counts[key] >= 0


def read_items(text: str) -> Iterator[Item]:
    """Yields the items of a stand-in, each with its heading; a line that goes on belongs to its item."""
    heading, held = "", ""
    for line in [*text.splitlines(), ""]:
        is_row = line.lstrip().startswith("|")
        if held and line.startswith("  ") and not _BULLET.match(line) and not is_row:
            held += f" {line.strip()}"
            continue
        if held:
            yield Item(heading, held)
            held = ""
        if _BULLET.match(line) or is_row:
            held = line.strip()
        elif line.startswith("#") or line.rstrip().endswith(":"):
            heading = line.strip("#: ").strip()
        elif line.strip() and not line.startswith("["):
            held = line.strip()


def bare(text: str) -> str:
    """The text of an item without its bullet and without ids of messages."""
    return _ORIGIN.sub("", _BULLET.sub("", text)).strip()


def open_items(texts: Sequence[str]) -> list[str]:
    """The items that stand-ins call open: by their heading, a cell, their start or their end."""
    found = []
    for item in (each for text in texts for each in read_items(text)):
        said = bare(item.text)
        cells = [cell.strip() for cell in said.strip("|").split("|")] if said.startswith("|") else []
        if cells and any(map(_OPEN_CELL.match, cells[1:])):
            found.append(cells[0])
        elif not cells and (
            _OPEN_HEADING.search(item.heading) or _OPEN_START.match(said) or _OPEN_END.search(said)
        ):
            found.append(_OPEN_END.sub("", _OPEN_START.sub("", said)))
    return found


def rule_items(texts: Sequence[str]) -> list[str]:
    """The items that stand-ins list as rules of the user."""
    items = (each for text in texts for each in read_items(text))
    return [bare(each.text) for each in items if _RULES.search(each.heading)]


def observed_values(texts: Sequence[str]) -> Iterator[Value]:
    """Yields the values under headings of what was observed, and the paths that a record calls done."""
    for item in (each for text in texts for each in read_items(text)):
        said = bare(item.text)
        if _OBSERVED.search(item.heading):
            yield from _values(said)
        elif _DONE.search(item.heading) and (path := _DONE_PATH.match(said)):
            yield Value("path", path[1], "done")


def _values(said: str) -> Iterator[Value]:
    """The values of a line `label: value`, or `thing: key: value; key: value`."""
    head, colon, rest = said.partition(": ")
    if not colon:
        yield Value("", said, "observed")
        return
    if head.lower() in _LINES:
        yield Value(head, rest, "observed")
        return
    if head.lower() in _ACCOUNTS:
        yield from _account_values(head.lower(), rest)
        return
    for part in _PARTS.split(_DEEDS.sub("", rest)):
        pair = _PAIR.match(part)
        label, text = (f"{head} {pair[1]}", pair[2]) if pair else (head, part)
        pieces = text.split(", ")
        is_list = len(pieces) > 1 and not any(" " in piece for piece in pieces)
        for piece in pieces if is_list else [text]:
            yield Value(label, piece.strip(), "observed")


def _account_values(label: str, said: str) -> Iterator[Value]:
    """The values of an account of calls: tokens with a digit behind a name.

    What was asked (`answered`) and what was intended (`last step`) are somebody's words, and no values.
    """
    call, *outcome = _ARROW.split(said, maxsplit=1)
    if label == "answered":
        call = ""
    elif label.startswith("last"):
        call = call.rpartition(": ")[2]
    told = [call.partition(" ")[2], *outcome]  # the tool comes first
    for part in re.split(r"; |, |: |\s(?:→|->)\s", " → ".join(told)):
        if named := _NAMED.match(part):
            tokens = filter(_TOKEN.match, named[2].split())
            yield from (Value(named[1], text, "observed") for text in tokens)


def words(text: str) -> set[str]:
    """The words of a text in lower case."""
    return {word.casefold() for word in _WORD.findall(text)}


def phrase(text: str) -> str:
    """A text reduced to its words, to be found in another one that was reduced likewise."""
    return f" {' '.join(word.casefold() for word in _WORD.findall(text))} "
