"""What messages say and show, worked out once for each.

Both follow from a message alone, and clients send the whole history with every request: a further round reads
only what has come since the last one.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

from compaction_proxy.core.ledger.actions import Action, read_action
from compaction_proxy.core.ledger.active import Standing, said_by_users
from compaction_proxy.core.ledger.facts import Shown, shown
from compaction_proxy.core.ledger.frontier import Frontier, ReplyReading, read_frontier, read_reply
from compaction_proxy.core.ledger.statements import Statement, statements
from compaction_proxy.core.message import Call, Message

# Of texts, and of messages, so many characters are remembered; what they say and show takes about as much.
MAX_HELD_CHARACTERS = 6_000_000
# What remembering one takes beside its own characters; nearly all, where they are short.
RECORD_CHARACTERS = 300

_Known = TypeVar("_Known")
_Asked = TypeVar("_Asked", bound=Hashable)


class _Memory(Generic[_Asked, _Known]):
    """Answers of a function, those that were not asked for longest forgotten first."""

    def __init__(self, work_out: Callable[[_Asked], _Known], max_held: int) -> None:
        self._work_out = work_out
        self._max_held = max_held
        self._held: OrderedDict[_Asked, tuple[_Known, int]] = OrderedDict()
        self._size = 0

    def __call__(self, asked: _Asked, characters: int) -> _Known:
        if (found := self._held.get(asked)) is not None:
            self._held.move_to_end(asked)
            return found[0]
        known, size = self._work_out(asked), characters + RECORD_CHARACTERS
        self._held[asked] = known, size
        self._size += size
        while self._size > self._max_held:
            self._size -= self._held.popitem(last=False)[1][1]
        return known


_Content = tuple[str, str, tuple[Call, ...], tuple[str, ...]]


def _shown(content: _Content) -> tuple[Shown, ...]:
    role, text, calls, answers = content
    return shown(Message(role, text, calls=calls, answers=answers))


def _read_call(asked: tuple[Call, str | None]) -> Action:
    return read_action(*asked)


class _Kept(NamedTuple):
    """What is known of a list that is remembered.

    Attributes:
        size: What it takes, in characters.
        since: The list that it grew from, if that is remembered too.
    """

    size: int
    since: Standing | None


class Gleanings:
    """Remembers what users' texts state and what other messages show; to be asked in one thread at a time.

    Args:
        max_held: Size of each memory, in characters and `RECORD_CHARACTERS` for each text.
    """

    def __init__(self, max_held: int = MAX_HELD_CHARACTERS) -> None:
        self._said = _Memory(statements, max_held)
        self._seen = _Memory(_shown, max_held)
        self._actions = _Memory(_read_call, max_held // 2)
        self._replies = _Memory(read_reply, max_held // 2)
        self._standings: OrderedDict[Standing, _Kept] = OrderedDict()
        self._max_held = max_held

    def said(self, text: str) -> tuple[Statement, ...]:
        """What a user's text states (`core.ledger.statements`)."""
        return self._said(text, len(text))

    def standing(self, messages: Sequence[Message]) -> Standing:
        """What holds of what users say in a list (`core.ledger.active`); of a grown one, what is new is read.

        The last two lists of each conversation are remembered, so that an edited message costs no more.
        """
        texts = said_by_users(messages)
        begun = (each for each in self._standings if each.begins(texts))
        before = max(begun, key=len, default=None)
        made = Standing(messages, self.said, before)
        self._keep(made, before)
        return made

    def _keep(self, made: Standing, before: Standing | None) -> None:
        since = None
        if before is not None:
            known = self._standings.pop(before)
            if len(before) < len(made):
                if known.since is not None:
                    self._standings.pop(known.since, None)
                self._standings[before], since = _Kept(known.size, None), before
        self._standings[made] = _Kept(made.characters + RECORD_CHARACTERS * made.count, since)
        while (
            len(self._standings) > 1 and sum(each.size for each in self._standings.values()) > self._max_held
        ):
            self._standings.popitem(last=False)

    def frontier(self, messages: Sequence[Message]) -> Frontier:
        """Where a conversation stands (`core.ledger.frontier`); of a grown one, only new texts are read."""
        return read_frontier(messages, self.said, self._act, self._reply)

    def _act(self, call: Call, result: str | None) -> Action:
        return self._actions((call, result), len(call.arguments) + len(result or ""))

    def _reply(self, text: str) -> ReplyReading:
        return self._replies(text, len(text))

    def seen(self, message: Message) -> tuple[Shown, ...]:
        """What a message of a tool or of the assistant shows (`core.ledger.facts`)."""
        characters = len(message.text) + sum(len(call.arguments) for call in message.calls)
        return self._seen((message.role, message.text, message.calls, message.answers), characters)
