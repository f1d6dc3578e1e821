"""What messages say and show, worked out once for each.

Both follow from a message alone, and clients send the whole history with every request: a further round reads
only what has come since the last one.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

from compaction_proxy.core.ledger.actions import Action, read_action
from compaction_proxy.core.ledger.active import ActiveStatements, list_user_texts
from compaction_proxy.core.ledger.facts import MessageFact, list_message_facts
from compaction_proxy.core.ledger.frontier import Frontier, ReplyReading, read_frontier, read_reply
from compaction_proxy.core.ledger.statements import Statement, read_statements
from compaction_proxy.core.message import Message, MessageToolCall

# Of texts, and of messages, so many characters are remembered; what they say and show takes about as much.
MAX_HELD_CHARACTERS = 6_000_000
# What remembering one takes beside its own characters; nearly all, where they are short.
RECORD_CHARACTERS = 300

_Known = TypeVar("_Known")
_Asked = TypeVar("_Asked", bound=Hashable)


class _BoundedMemo(Generic[_Asked, _Known]):
    """Answers of a function, those that were not asked for longest forgotten first."""

    def __init__(self, work_out: Callable[[_Asked], _Known], max_held: int) -> None:
        self._compute = work_out
        self._max_held = max_held
        self._held: OrderedDict[_Asked, tuple[_Known, int]] = OrderedDict()
        self._size = 0

    def __call__(self, asked: _Asked, characters: int) -> _Known:
        if (found := self._held.get(asked)) is not None:
            self._held.move_to_end(asked)
            return found[0]
        known, size = self._compute(asked), characters + RECORD_CHARACTERS
        self._held[asked] = known, size
        self._size += size
        while self._size > self._max_held:
            self._size -= self._held.popitem(last=False)[1][1]
        return known


_Content = tuple[str, str, tuple[MessageToolCall, ...], tuple[str, ...]]


def _find_shown_facts(content: _Content) -> tuple[MessageFact, ...]:
    role, text, calls, answers = content
    return list_message_facts(Message(role, text, calls=calls, answers=answers))


def _read_call(asked: tuple[MessageToolCall, str | None]) -> Action:
    return read_action(*asked)


class _CachedStatements(NamedTuple):
    """What is known of a list that is remembered.

    Attributes:
        size: What it takes, in characters.
        since: The list that it grew from, if that is remembered too.
    """

    size: int
    since: ActiveStatements | None


class LedgerCache:
    """Remembers what users' texts state and what other messages show; to be asked in one thread at a time.

    Args:
        max_held: Size of each memory, in characters and `RECORD_CHARACTERS` for each text.
    """

    def __init__(self, max_held: int = MAX_HELD_CHARACTERS) -> None:
        self._statements = _BoundedMemo(read_statements, max_held)
        self._shown_facts = _BoundedMemo(_find_shown_facts, max_held)
        self._actions = _BoundedMemo(_read_call, max_held // 2)
        self._replies = _BoundedMemo(read_reply, max_held // 2)
        self._active_statements: OrderedDict[ActiveStatements, _CachedStatements] = OrderedDict()
        self._max_held = max_held

    def get_statements(self, text: str) -> tuple[Statement, ...]:
        """What a user's text states (`core.ledger.statements`)."""
        return self._statements(text, len(text))

    def get_active_statements(self, messages: Sequence[Message]) -> ActiveStatements:
        """What holds of what users say in a list (`core.ledger.active`); of a grown one, what is new is read.

        The last two lists of each conversation are remembered, so that an edited message costs no more.
        """
        texts = list_user_texts(messages)
        begun = (each for each in self._active_statements if each.is_prefix_of(texts))
        before = max(begun, key=len, default=None)
        made = ActiveStatements(messages, self.get_statements, before)
        self._store_active_statements(made, before)
        return made

    def _store_active_statements(self, made: ActiveStatements, before: ActiveStatements | None) -> None:
        since = None
        if before is not None:
            known = self._active_statements.pop(before)
            if len(before) < len(made):
                if known.since is not None:
                    self._active_statements.pop(known.since, None)
                self._active_statements[before], since = _CachedStatements(known.size, None), before
        self._active_statements[made] = _CachedStatements(
            made.character_count + RECORD_CHARACTERS * made.statement_count, since
        )
        while (
            len(self._active_statements) > 1
            and sum(each.size for each in self._active_statements.values()) > self._max_held
        ):
            self._active_statements.popitem(last=False)

    def get_frontier(self, messages: Sequence[Message]) -> Frontier:
        """Where a conversation stands (`core.ledger.frontier`); of a grown one, only new texts are read."""
        return read_frontier(messages, self.get_statements, self._get_action, self._get_reply)

    def _get_action(self, call: MessageToolCall, result: str | None) -> Action:
        return self._actions((call, result), len(call.arguments) + len(result or ""))

    def _get_reply(self, text: str) -> ReplyReading:
        return self._replies(text, len(text))

    def get_shown_facts(self, message: Message) -> tuple[MessageFact, ...]:
        """What a message of a tool or of the assistant shows (`core.ledger.facts`)."""
        characters = len(message.text) + sum(len(call.arguments) for call in message.calls)
        return self._shown_facts((message.role, message.text, message.calls, message.answers), characters)
