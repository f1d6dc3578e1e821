"""Counts the facts in the replaced messages that the model still sees word for word after a compaction.

The facts are the user's rules, and the facts that `core.ledger.facts` finds. Their kinds are merged into
fewer kinds. The proxy shows the counts to people. No compaction depends on them. Counting takes time that is
linear in the length of the texts, and this length is limited. So counting delays no compaction for long.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice

from compaction_proxy.core.ledger.facts import (
    HEAD_CHARACTERS,
    TAIL_CHARACTERS,
    MessageFact,
    list_message_facts,
)
from compaction_proxy.core.message import Message

# Maximum number of characters that are read from the replaced messages, newest message first.
MAX_CHARACTERS = 1_000_000
# Maximum number of characters that are read from the texts that the model still sees, first text first.
MAX_SEEN_CHARACTERS = 500_000
# At most this many facts of each kind are counted: the newest ones.
MAX_FACTS = 500
# To find a fact in a text, at most this many places of the fact's rarest word are checked.
MAX_PLACES = 200
RULE = "rule"

_KIND_GROUPS = {
    "path": "path", "command": "command", "error": "error", "exit": "error",
    "url": "url", "host": "url", "address": "url",
    "id": "id", "code": "id", "commit": "id", "branch": "id", "email": "id",
    "money": "number", "version": "number", "date": "number", "port": "number",
}  # fmt: skip
_WORD = re.compile(r"\w+")


class _IndexedText:
    """A text with an index of the places at which each word occurs."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._text = _join_texts(texts)
        self._places: defaultdict[str, list[int]] = defaultdict(list)
        for found in _WORD.finditer(self._text):
            self._places[found.group()].append(found.start())

    def contains_fact(self, fact: str) -> bool:
        """Returns whether the text contains a fact as whole words, not only as a part of a longer word."""
        if not fact.isascii():  # some scripts do not separate words, so that a fact may be inside a long word
            return fact in self._text
        words = [(self._places.get(found.group(), ()), found.start()) for found in _WORD.finditer(fact)]
        if not words:
            return fact in self._text
        places, offset = min(words, key=lambda word: len(word[0]))
        return any(self._is_whole_word(place - offset, fact) for place in islice(places, MAX_PLACES))

    def _is_whole_word(self, start: int, fact: str) -> bool:
        stop = start + len(fact)
        if start < 0 or not self._text.startswith(fact, start):
            return False
        before, after = self._text[start - 1 : start], self._text[stop : stop + 1]
        return not (_is_same_word(before, fact[0]) or _is_same_word(fact[-1], after))


def _is_same_word(left: str, right: str) -> bool:
    """Returns whether two neighbouring characters belong to the same word."""
    return bool(_WORD.match(left) and _WORD.match(right))


def _join_texts(texts: Iterable[str]) -> str:
    """Returns the first `MAX_SEEN_CHARACTERS` characters of the joined texts, with single spaces."""
    parts, room = [], MAX_SEEN_CHARACTERS
    for text in texts:
        parts.append(text[:room])
        room -= len(text)
        if room <= 0:
            break
    return " ".join(" ".join(parts).split())


def _collect_facts(
    removed: Sequence[Message], fact_reader: Callable[[Message], Sequence[MessageFact]]
) -> dict[str, list[str]]:
    """Returns the facts of each kind, each fact once, the newest first."""
    found: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for message in _iter_newest_messages(removed):
        for kind, text, *_ in reversed(fact_reader(message)):
            if kind in _KIND_GROUPS and text:
                found[_KIND_GROUPS[kind]].setdefault(" ".join(text.split()))
    return {kind: list(islice(texts, MAX_FACTS)) for kind, texts in found.items()}


def _iter_newest_messages(removed: Sequence[Message]) -> Iterator[Message]:
    room = MAX_CHARACTERS
    for message in reversed(removed):
        size = len(message.text) + sum(len(call.arguments) for call in message.calls)
        room -= min(size, HEAD_CHARACTERS + TAIL_CHARACTERS) + 1
        if room < 0:
            return
        yield message


def count_retained_facts(
    removed: Sequence[Message],
    visible_texts: Iterable[str],
    rules: Sequence[str] = (),
    fact_reader: Callable[[Message], Sequence[MessageFact]] = list_message_facts,
) -> Mapping[str, tuple[int, int]]:
    """Returns, by kind of fact, how many facts the model still sees and how many there were.

    The kinds are `path`, `command`, `error`, `url`, `id`, `number` (amounts, versions, dates, ports) and
    `rule`. A kind without any fact is left out.

    Args:
        removed: The messages that a compaction replaces or shortens, in their order.
        visible_texts: The texts that the model sees once the compaction is in force, the replacements first.
        rules: The rules in the removed messages that are still in force.
        fact_reader: Returns the facts of a message: `core.ledger.facts.list_message_facts` or a cache of it.
    """
    facts = _collect_facts(removed, fact_reader)
    facts[RULE] = list(dict.fromkeys(" ".join(rule.split()) for rule in rules))[-MAX_FACTS:]
    text = _IndexedText(visible_texts)
    return {kind: (sum(map(text.contains_fact, said)), len(said)) for kind, said in facts.items() if said}
