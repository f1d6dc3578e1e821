"""What users have said and still holds: statements, later ones taking the place of earlier ones.

What holds after a message follows from what stands before it alone. So of a conversation that has grown only
what is new is read.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Self

from compaction_proxy.core.ledger import cues
from compaction_proxy.core.ledger.client_forms import find_user_messages
from compaction_proxy.core.ledger.cues import Kind
from compaction_proxy.core.ledger.statements import Statement, folded, statements
from compaction_proxy.core.ledger.supersession import concerns, remainder, supersedes
from compaction_proxy.core.message import Message

# How many statements that share a word are compared with a new one, newest first; keeps time linear.
COMPARED = 64
# The beginning of a message is looked at for what closes the request before, in characters.
CLOSING_CHARACTERS = 80
# In order of how much it costs to lose one.
_WEIGHT = {Kind.FACT: 1, Kind.DECISION: 2, Kind.PREFERENCE: 2, Kind.REQUEST: 3, Kind.RULE: 4}


@dataclass(frozen=True, slots=True)
class Spoken:
    """A statement that holds, in its place.

    Attributes:
        said: The statement, or what is left of it.
        turn: Which user message of the conversation it stands in.
        kind: What it is to be gone by; weightier than the statement's own where it replaced such a one.
        is_closed: Whether the user has given it up, or called it done.
        is_withdrawn: Whether the user has taken it back, so that it is not even quoted.
    """

    said: Statement
    turn: int
    kind: Kind | None
    is_closed: bool = False
    is_withdrawn: bool = False


@dataclass(frozen=True, slots=True)
class Outdated:
    """What users said and no longer holds.

    Attributes:
        texts: The statements, word for word, by the index of their message.
        values: Their values that no statement in force has, in lower case.
    """

    texts: Mapping[int, tuple[str, ...]]
    values: frozenset[str]


@dataclass(slots=True)
class _InForce:
    """The statements that nothing said later has replaced, found again by their words.

    Attributes:
        spoken: By number, in the order in which they were said.
        lost: Those that were replaced, in whole or in part, as they were said.
        count: How many there have been.
    """

    spoken: dict[int, Spoken] = field(default_factory=dict)
    lost: dict[int, Spoken] = field(default_factory=dict)
    count: int = 0
    _by_word: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    _asked: list[int] = field(default_factory=list)

    def copied(self) -> Self:
        """The same, to be carried on."""
        by_word: defaultdict[str, list[int]] = defaultdict(list)
        by_word.update((word, list(held)) for word, held in self._by_word.items())
        return type(self)(dict(self.spoken), dict(self.lost), self.count, by_word, list(self._asked))

    def add(self, spoken: Spoken) -> None:
        for key in self._rivals(spoken):
            old = self.spoken[key]
            if supersedes(spoken.said, old.said, next_to=spoken.turn == old.turn + 1):
                self._drop(key)
                spoken = replace(spoken, kind=_weightier(spoken.kind, old.kind))
            elif left := remainder(spoken.said, old.said):
                self.lost.setdefault(key, old)
                self.spoken[key] = replace(old, said=left)
        self.spoken[self.count] = spoken
        for word in spoken.said.words:
            self._by_word[word].append(self.count)
        if spoken.kind is Kind.REQUEST and not spoken.said.label:
            self._asked.append(self.count)
        self.count += 1

    def _rivals(self, spoken: Spoken) -> list[int]:
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
        old = self.spoken.pop(key)
        self.lost.setdefault(key, old)
        for word in old.said.words:
            if key in (held := self._by_word[word]):
                held.remove(key)

    def close(self, turn: int, *, withdraws: bool) -> None:
        """The newest request so far is done or given up; one that the user labelled stays.

        Where the message before the turn asks for nothing, what is taken back is the newest rule in it.
        """
        self._asked = [key for key in self._asked[-COMPARED:] if key in self.spoken]
        newest = islice(reversed(self.spoken), COMPARED)
        before = [key for key in newest if self.spoken[key].turn == turn - 1]
        rules = [
            key for key in before if self.spoken[key].kind is Kind.RULE and not self.spoken[key].said.label
        ]
        if withdraws and rules and not any(key in self._asked for key in before):
            self._close(rules[0], withdraws=True)
        elif self._asked:
            self._close(self._asked.pop(), withdraws=withdraws)

    def _close(self, key: int, *, withdraws: bool) -> None:
        self.spoken[key] = replace(self.spoken[key], kind=None, is_closed=True, is_withdrawn=withdraws)


def _weightier(new: Kind | None, old: Kind | None) -> Kind | None:
    return max(new, old, key=lambda kind: _WEIGHT[kind] if kind else 0)


def _users(messages: Sequence[Message]) -> Iterator[tuple[int, str]]:
    for index in find_user_messages(messages):
        yield index, messages[index].text


def said_by_users(messages: Sequence[Message]) -> list[str]:
    """The texts of users in a list, in order; what only answers calls is none."""
    return [text for _, text in _users(messages)]


class Standing:
    """What users have said, read in order, and what of it holds after the last word.

    Args:
        messages: All non-privileged messages of a request; an index is a position among them.
        said: What a text states; `core.ledger.statements.statements`, or a memory of it.
        before: What was read of a list in which users have said the same at first (`begins`): only what is
            new is read. It stays as it is.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        said: Callable[[str], tuple[Statement, ...]] = statements,
        before: Self | None = None,
    ) -> None:
        users = list(_users(messages))
        self._ats = [at for at, _ in users]
        self._texts = [text for _, text in users]
        self.in_force: _InForce = before.in_force.copied() if before else _InForce()
        for turn in range(len(before or ()), len(self)):
            self._read(turn, said)

    def __len__(self) -> int:
        """How many messages of users were read."""
        return len(self._texts)

    @property
    def count(self) -> int:
        """How many statements they hold."""
        return self.in_force.count

    @property
    def characters(self) -> int:
        """Length of their texts."""
        return sum(map(len, self._texts))

    def begins(self, texts: Sequence[str]) -> bool:
        """Whether these texts of users begin with what was read, which is something."""
        length = len(self)
        if not 0 < length <= len(texts) or self._texts[-1] != texts[length - 1]:
            return False
        return self._texts == texts[:length]

    def _read(self, turn: int, said: Callable[[str], tuple[Statement, ...]]) -> None:
        text = self._texts[turn]
        said_first = folded(text[:CLOSING_CHARACTERS])
        if cues.CLOSING.match(said_first):
            withdraws = len(text) < CLOSING_CHARACTERS and cues.WITHDRAWAL.match(said_first) is not None
            self.in_force.close(turn, withdraws=withdraws)
        for each in said(text):
            self.in_force.add(Spoken(each, turn, each.kind))

    def of(self, covered: Collection[int]) -> list[tuple[int, Spoken]]:
        """What was said in the covered messages and holds, each with the index of its message."""
        placed = ((self._ats[spoken.turn], spoken) for spoken in self.in_force.spoken.values())
        return [(at, spoken) for at, spoken in placed if at in covered and spoken.said.text]

    @cached_property
    def outdated(self) -> Outdated:
        """What later messages have replaced, so that no summary brings it back."""
        lost = [self.in_force.lost[key] for key in sorted(self.in_force.lost)]
        turns = {spoken.turn for spoken in lost}
        holding = self.in_force.spoken.values()
        kept = {(spoken.turn, spoken.said.text) for spoken in holding if spoken.turn in turns}
        gone = [spoken for spoken in lost if (spoken.turn, spoken.said.text) not in kept]
        texts: defaultdict[int, list[str]] = defaultdict(list)
        for spoken in gone:
            texts[self._ats[spoken.turn]].append(spoken.said.text)
        values = {value for spoken in gone for _, value in spoken.said.values}
        valid = " ".join(spoken.said.text for spoken in holding).casefold() if values else ""
        return Outdated(
            {at: tuple(each) for at, each in texts.items()},
            frozenset(value for value in values if value not in valid),
        )
