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
from compaction_proxy.core.ledger.cues import StatementKind
from compaction_proxy.core.ledger.statements import Statement, fold_text, read_statements
from compaction_proxy.core.ledger.supersession import find_remainder, may_supersede, supersedes_statement
from compaction_proxy.core.message import Message

# How many statements that share a word are compared with a new one, newest first; keeps time linear.
COMPARED = 64
# The beginning of a message is looked at for what closes the request before, in characters.
CLOSING_CHARACTERS = 80
# In order of how much it costs to lose one.
_WEIGHT = {
    StatementKind.FACT: 1,
    StatementKind.DECISION: 2,
    StatementKind.PREFERENCE: 2,
    StatementKind.REQUEST: 3,
    StatementKind.RULE: 4,
}


@dataclass(frozen=True, slots=True)
class UserStatement:
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
    kind: StatementKind | None
    is_closed: bool = False
    is_withdrawn: bool = False


@dataclass(frozen=True, slots=True)
class SupersededStatements:
    """What users said and no longer holds.

    Attributes:
        texts: The statements, word for word, by the index of their message.
        values: Their values that no statement in force has, in lower case.
    """

    texts: Mapping[int, tuple[str, ...]]
    values: frozenset[str]


@dataclass(slots=True)
class _StatementIndex:
    """The statements that nothing said later has replaced, found again by their words.

    Attributes:
        spoken: By number, in the order in which they were said.
        lost: Those that were replaced, in whole or in part, as they were said.
        count: How many there have been.
    """

    spoken: dict[int, UserStatement] = field(default_factory=dict)
    lost: dict[int, UserStatement] = field(default_factory=dict)
    count: int = 0
    _by_word: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    _asked: list[int] = field(default_factory=list)

    def copy(self) -> Self:
        """The same, to be carried on."""
        by_word: defaultdict[str, list[int]] = defaultdict(list)
        by_word.update((word, list(held)) for word, held in self._by_word.items())
        return type(self)(dict(self.spoken), dict(self.lost), self.count, by_word, list(self._asked))

    def add(self, spoken: UserStatement) -> None:
        for key in self._find_rivals(spoken):
            old = self.spoken[key]
            if supersedes_statement(spoken.said, old.said, next_to=spoken.turn == old.turn + 1):
                self._remove_statement(key)
                spoken = replace(spoken, kind=_choose_weightier(spoken.kind, old.kind))
            elif left := find_remainder(spoken.said, old.said):
                self.lost.setdefault(key, old)
                self.spoken[key] = replace(old, said=left)
        self.spoken[self.count] = spoken
        for word in spoken.said.words:
            self._by_word[word].append(self.count)
        if spoken.kind is StatementKind.REQUEST and not spoken.said.label:
            self._asked.append(self.count)
        self.count += 1

    def _find_rivals(self, spoken: UserStatement) -> list[int]:
        """Keys of what it may replace, oldest first: what another message says of the same subject."""
        found: set[int] = set()
        for word in spoken.said.words:
            held = self._by_word[word]
            del held[:-COMPARED]
            found.update(held)
        new, turn = spoken.said, spoken.turn
        rivals = ((key, self.spoken[key]) for key in found)
        return sorted(key for key, old in rivals if old.turn != turn and may_supersede(new, old.said))

    def _remove_statement(self, key: int) -> None:
        old = self.spoken.pop(key)
        self.lost.setdefault(key, old)
        for word in old.said.words:
            if key in (held := self._by_word[word]):
                held.remove(key)

    def close_newest_request(self, turn: int, *, withdraws: bool) -> None:
        """The newest request so far is done or given up; one that the user labelled stays.

        Where the message before the turn asks for nothing, what is taken back is the newest rule in it.
        """
        self._asked = [key for key in self._asked[-COMPARED:] if key in self.spoken]
        newest = islice(reversed(self.spoken), COMPARED)
        before = [key for key in newest if self.spoken[key].turn == turn - 1]
        rules = [
            key
            for key in before
            if self.spoken[key].kind is StatementKind.RULE and not self.spoken[key].said.label
        ]
        if withdraws and rules and not any(key in self._asked for key in before):
            self._close_statement(rules[0], withdraws=True)
        elif self._asked:
            self._close_statement(self._asked.pop(), withdraws=withdraws)

    def _close_statement(self, key: int, *, withdraws: bool) -> None:
        self.spoken[key] = replace(self.spoken[key], kind=None, is_closed=True, is_withdrawn=withdraws)


def _choose_weightier(new: StatementKind | None, old: StatementKind | None) -> StatementKind | None:
    return max(new, old, key=lambda kind: _WEIGHT[kind] if kind else 0)


def _iter_user_texts(messages: Sequence[Message]) -> Iterator[tuple[int, str]]:
    for index in find_user_messages(messages):
        yield index, messages[index].text


def list_user_texts(messages: Sequence[Message]) -> list[str]:
    """The texts of users in a list, in order; what only answers calls is none."""
    return [text for _, text in _iter_user_texts(messages)]


class ActiveStatements:
    """What users have said, read in order, and what of it holds after the last word.

    Args:
        messages: All non-privileged messages of a request; an index is a position among them.
        statement_reader: What a text states; `core.ledger.statements.statements`, or a memory of it.
        earlier: What was read of a list in which users have said the same at first (`is_prefix_of`): only
            what is new is read. It stays as it is.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        statement_reader: Callable[[str], tuple[Statement, ...]] = read_statements,
        earlier: Self | None = None,
    ) -> None:
        users = list(_iter_user_texts(messages))
        self._ats = [at for at, _ in users]
        self._texts = [text for _, text in users]
        self.in_force: _StatementIndex = earlier.in_force.copy() if earlier else _StatementIndex()
        for turn in range(len(earlier or ()), len(self)):
            self._read_turn(turn, statement_reader)

    def __len__(self) -> int:
        """How many messages of users were read."""
        return len(self._texts)

    @property
    def statement_count(self) -> int:
        """How many statements they hold."""
        return self.in_force.count

    @property
    def character_count(self) -> int:
        """Length of their texts."""
        return sum(map(len, self._texts))

    def is_prefix_of(self, texts: Sequence[str]) -> bool:
        """Whether these texts of users begin with what was read, which is something."""
        length = len(self)
        if not 0 < length <= len(texts) or self._texts[-1] != texts[length - 1]:
            return False
        return self._texts == texts[:length]

    def _read_turn(self, turn: int, statement_reader: Callable[[str], tuple[Statement, ...]]) -> None:
        text = self._texts[turn]
        said_first = fold_text(text[:CLOSING_CHARACTERS])
        if cues.CLOSING.match(said_first):
            withdraws = len(text) < CLOSING_CHARACTERS and cues.WITHDRAWAL.match(said_first) is not None
            self.in_force.close_newest_request(turn, withdraws=withdraws)
        for each in statement_reader(text):
            self.in_force.add(UserStatement(each, turn, each.kind))

    def list_covered(self, covered: Collection[int]) -> list[tuple[int, UserStatement]]:
        """What was said in the covered messages and holds, each with the index of its message."""
        placed = ((self._ats[spoken.turn], spoken) for spoken in self.in_force.spoken.values())
        return [(at, spoken) for at, spoken in placed if at in covered and spoken.said.text]

    @cached_property
    def superseded(self) -> SupersededStatements:
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
        return SupersededStatements(
            {at: tuple(each) for at, each in texts.items()},
            frozenset(value for value in values if value not in valid),
        )
