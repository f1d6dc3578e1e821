"""Caches the statements and facts that are found in messages, so that each message is searched only once.

The result depends on the message alone, and clients send the whole history with every request. So each
compaction searches only the messages that are new since the previous one.
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

# Size of each cache, in characters of the texts or messages. The cached results take about as much memory
# again.
MAX_HELD_CHARACTERS = 6_000_000
# Characters that each cache entry counts in addition to those of its text. The entry of a short text takes
# memory mostly for its objects, not for the text.
RECORD_CHARACTERS = 300

_Known = TypeVar("_Known")
_Asked = TypeVar("_Asked", bound=Hashable)


class _BoundedMemo(Generic[_Asked, _Known]):
    """Caches the results of a function, and forgets the least recently used ones first."""

    def __init__(self, work_out: Callable[[_Asked], _Known], max_held: int) -> None:
        self._compute = work_out
        self._max_held = max_held
        self._held: OrderedDict[_Asked, tuple[_Known, int]] = OrderedDict()
        self._size = 0

    def __call__(self, asked: _Asked, characters: int) -> _Known:
        if (entry := self._held.get(asked)) is not None:
            self._held.move_to_end(asked)
            return entry[0]
        result, size = self._compute(asked), characters + RECORD_CHARACTERS
        self._held[asked] = result, size
        self._size += size
        while self._size > self._max_held:
            self._size -= self._held.popitem(last=False)[1][1]
        return result


_Content = tuple[str, str, tuple[MessageToolCall, ...], tuple[str, ...]]


def _find_shown_facts(content: _Content) -> tuple[MessageFact, ...]:
    role, text, calls, answers = content
    return list_message_facts(Message(role, text, calls=calls, answers=answers))


def _read_call(asked: tuple[MessageToolCall, str | None]) -> Action:
    return read_action(*asked)


class _CachedStatements(NamedTuple):
    """The cache entry for the active statements of a list of messages.

    Attributes:
        size: Size of the entry, in characters.
        since: The statements of the shorter list that this list extends; None if they are not cached.
    """

    size: int
    since: ActiveStatements | None


class LedgerCache:
    """Caches the statements of user messages, and the facts that other messages show.

    Only one thread may use it at a time.

    Args:
        max_held: Size of each cache, in characters. Each entry counts `RECORD_CHARACTERS` more.
    """

    def __init__(self, max_held: int = MAX_HELD_CHARACTERS) -> None:
        self._statements = _BoundedMemo(read_statements, max_held)
        self._shown_facts = _BoundedMemo(_find_shown_facts, max_held)
        self._actions = _BoundedMemo(_read_call, max_held // 2)
        self._replies = _BoundedMemo(read_reply, max_held // 2)
        self._active_statements: OrderedDict[ActiveStatements, _CachedStatements] = OrderedDict()
        self._max_held = max_held

    def get_statements(self, text: str) -> tuple[Statement, ...]:
        """Returns the statements in a user's text (`core.ledger.statements`)."""
        return self._statements(text, len(text))

    def get_active_statements(self, messages: Sequence[Message]) -> ActiveStatements:
        """Returns the user statements in a list of messages that are still in force (`core.ledger.active`).

        If the list extends a cached list, only the new messages are read. The last two lists of each
        conversation are cached: if a client edits its newest message, the list still extends the older one.
        """
        texts = list_user_texts(messages)
        shorter_lists = (each for each in self._active_statements if each.is_prefix_of(texts))
        longest = max(shorter_lists, key=len, default=None)
        statements = ActiveStatements(messages, self.get_statements, longest)
        self._store_active_statements(statements, longest)
        return statements

    def _store_active_statements(self, made: ActiveStatements, before: ActiveStatements | None) -> None:
        since = None
        if before is not None:
            entry = self._active_statements.pop(before)
            if len(before) < len(made):
                if entry.since is not None:
                    self._active_statements.pop(entry.since, None)
                self._active_statements[before], since = _CachedStatements(entry.size, None), before
        self._active_statements[made] = _CachedStatements(
            made.character_count + RECORD_CHARACTERS * made.statement_count, since
        )
        while (
            len(self._active_statements) > 1
            and sum(each.size for each in self._active_statements.values()) > self._max_held
        ):
            self._active_statements.popitem(last=False)

    def get_frontier(self, messages: Sequence[Message]) -> Frontier:
        """Returns the frontier of a conversation (`core.ledger.frontier`). Only new texts are read."""
        return read_frontier(messages, self.get_statements, self._get_action, self._get_reply)

    def _get_action(self, call: MessageToolCall, result: str | None) -> Action:
        return self._actions((call, result), len(call.arguments) + len(result or ""))

    def _get_reply(self, text: str) -> ReplyReading:
        return self._replies(text, len(text))

    def get_shown_facts(self, message: Message) -> tuple[MessageFact, ...]:
        """Returns the facts that a message of a tool or of the assistant shows (`core.ledger.facts`)."""
        characters = len(message.text) + sum(len(call.arguments) for call in message.calls)
        return self._shown_facts((message.role, message.text, message.calls, message.answers), characters)
