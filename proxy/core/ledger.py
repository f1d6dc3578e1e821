"""The ledger: rules, wishes and facts lifted word for word from a conversation; no summary can lose them.

Only what users say themselves becomes an entry. What tools and the assistant say is observed: short values,
kept apart. What was said later of the same subject takes the place of what was said before.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from proxy.core import cues
from proxy.core.cues import Kind
from proxy.core.facts import Observed, Shown, observed, shown
from proxy.core.ledger_text import Entry, Ledger, Remark, flat, rendered
from proxy.core.message import Message
from proxy.core.statements import Statement, folded, statements
from proxy.core.supersession import concerns, remainder, supersedes

__all__ = [
    "Entry",
    "Kind",
    "Ledger",
    "Observed",
    "Outdated",
    "Remark",
    "Standing",
    "ledger",
    "outdated",
    "rendered",
    "rules",
]

# How many statements that share a word are compared with a new one, newest first; keeps time linear.
COMPARED = 64
# The beginning of a long message that is quoted with the remaining words of the user, in characters.
HEAD_CHARACTERS = 600
PIN = -1
# In order of how much it costs to lose one.
_WEIGHT = {Kind.FACT: 1, Kind.DECISION: 2, Kind.PREFERENCE: 2, Kind.REQUEST: 3, Kind.RULE: 4}


@dataclass(frozen=True, slots=True)
class _Spoken:
    """A statement in its place: message index, and which user message of the conversation it is."""

    said: Statement
    at: int
    turn: int
    kind: Kind | None


def _users(messages: Sequence[Message]) -> Iterator[tuple[int, Message]]:
    for index, message in enumerate(messages):
        if message.role == "user" and not message.answers:
            yield index, message


class _InForce:
    """The statements that nothing said later has replaced, found again by their words."""

    def __init__(self) -> None:
        self.spoken: dict[int, _Spoken] = {}
        self._by_word: defaultdict[str, list[int]] = defaultdict(list)
        self._asked: list[int] = []
        self._next = 0

    def add(self, spoken: _Spoken) -> None:
        for key in self._rivals(spoken):
            old = self.spoken[key]
            if supersedes(spoken.said, old.said, next_to=spoken.turn == old.turn + 1):
                self._drop(key)
                spoken = replace(spoken, kind=_weightier(spoken.kind, old.kind))
            elif left := remainder(spoken.said, old.said):
                self.spoken[key] = replace(old, said=left)
        self.spoken[self._next] = spoken
        for word in spoken.said.words:
            self._by_word[word].append(self._next)
        if spoken.kind is Kind.REQUEST and not spoken.said.label:
            self._asked.append(self._next)
        self._next += 1

    def _rivals(self, spoken: _Spoken) -> list[int]:
        """Keys of what it may replace, oldest first: what another message says of the same subject."""
        found: set[int] = set()
        for word in spoken.said.words:
            held = self._by_word[word]
            del held[:-COMPARED]
            found.update(held)
        new, turn = spoken.said, spoken.turn
        rivals = ((key, self.spoken[key]) for key in found)
        return sorted(key for key, old in rivals if old.turn != turn and concerns(new, old.said))

    def _drop(self, key: int) -> None:
        for word in self.spoken.pop(key).said.words:
            if key in (held := self._by_word[word]):
                held.remove(key)

    def close(self) -> None:
        """The newest request so far is done or given up; one that the user labelled stays."""
        while self._asked:
            key = self._asked.pop()
            if key in self.spoken:
                self.spoken[key] = replace(self.spoken[key], kind=None)
                return


def _weightier(new: Kind | None, old: Kind | None) -> Kind | None:
    return max(new, old, key=lambda kind: _WEIGHT[kind] if kind else 0)


@dataclass(frozen=True, slots=True)
class Outdated:
    """What users said and no longer holds.

    Attributes:
        texts: The statements, word for word, by the index of their message.
        values: Their values that no statement in force has, in lower case.
    """

    texts: Mapping[int, tuple[str, ...]]
    values: frozenset[str]


class Standing:
    """What users have said, read in order, and what of it holds after the last word.

    Args:
        messages: All non-privileged messages of a request; an index is a position among them.
        said: What a text states; `core.statements.statements`, or a memory of it.
    """

    def __init__(
        self, messages: Sequence[Message], said: Callable[[str], tuple[Statement, ...]] = statements
    ) -> None:
        self._said = [(at, said(message.text)) for at, message in _users(messages)]
        found = _InForce()
        for turn, (at, stated) in enumerate(self._said):
            if cues.CLOSING.match(folded(messages[at].text[:80])):
                found.close()
            for each in stated:
                found.add(_Spoken(each, at, turn, each.kind))
        self._holding = list(found.spoken.values())

    def of(self, covered: Collection[int]) -> list[_Spoken]:
        """What was said in the covered messages and holds."""
        return [spoken for spoken in self._holding if spoken.at in covered and spoken.said.text]

    def outdated(self) -> Outdated:
        """What later messages have replaced, so that no summary brings it back."""
        kept = {(spoken.at, spoken.said.text) for spoken in self._holding}
        gone = [(at, said) for at, all_ in self._said for said in all_ if (at, said.text) not in kept]
        texts: defaultdict[int, list[str]] = defaultdict(list)
        for at, said in gone:
            texts[at].append(said.text)
        valid = " ".join(spoken.said.text for spoken in self._holding).casefold()
        values = {value for _, said in gone for _, value in said.values}
        return Outdated(
            {at: tuple(each) for at, each in texts.items()},
            frozenset(value for value in values if value not in valid),
        )


def ledger(
    messages: Sequence[Message],
    covered: Collection[int],
    name: Callable[[int], str],
    pins: Sequence[str] = (),
    *,
    standing: Standing | None = None,
    seen: Callable[[Message], tuple[Shown, ...]] = shown,
) -> Ledger:
    """What has to be kept of the covered messages.

    Args:
        messages: All non-privileged messages of the request; an index is a position among them.
        covered: Indices that the forwarded list will not contain any more. Only they are quoted, but what
            is said in any message replaces what was said before.
        name: The id of the message at an index.
        pins: Rules given by header or API; they come first.
        standing: Of these messages, where it is known already.
        seen: What a message shows; `core.facts.shown`, or a memory of it.
    """
    gone = frozenset(covered)
    kept = (standing or Standing(messages)).of(gone)
    pinned = tuple(Entry(Kind.RULE, pin.strip(), "", PIN) for pin in dict.fromkeys(pins) if pin.strip())
    entries = tuple(
        Entry(spoken.kind, spoken.said.text, name(spoken.at), spoken.at, bool(spoken.said.label))
        for spoken in kept
        if spoken.kind
    )
    return Ledger(pinned + entries, tuple(_remarks(kept, name)), observed(messages, gone, seen))


def _remarks(kept: Sequence[_Spoken], name: Callable[[int], str]) -> Iterator[Remark]:
    """What is no entry, message by message."""
    rest: dict[int, list[str]] = {}
    for spoken in kept:
        if not spoken.kind:
            rest.setdefault(spoken.at, []).append(spoken.said.text)
    for at, said in rest.items():
        yield Remark(" ".join(said)[:HEAD_CHARACTERS], name(at), at)


def outdated(messages: Sequence[Message]) -> Outdated:
    """What later messages have replaced, so that no summary brings it back."""
    return Standing(messages).outdated()


def rules(ledger: Ledger) -> tuple[str, ...]:
    """The texts of rules and pins as they are rendered, in one line; each has to be in what is forwarded."""
    return tuple(flat(entry.text) for entry in ledger.entries if entry.kind is Kind.RULE)
