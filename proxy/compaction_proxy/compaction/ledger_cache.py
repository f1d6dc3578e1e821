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
from compaction_proxy.support.lru import LruCache

# Largest size of each cache, in characters of the texts or messages. The cached results take about as much
# memory again.
MAX_HELD_CHARACTERS = 6_000_000
# Characters that each cache entry counts in addition to those of its text. The entry of a short text takes
# memory mostly for its objects, not for the text.
RECORD_CHARACTERS = 300

_Known = TypeVar("_Known")
_Asked = TypeVar("_Asked", bound=Hashable)


class _BoundedMemo(Generic[_Asked, _Known]):
    """Caches the results of a function, and forgets the least recently used ones first."""

    def __init__(self, compute: Callable[[_Asked], _Known], max_held: int) -> None:
        self._compute = compute
        self._results: LruCache[_Asked, _Known] = LruCache(max_held)

    def __call__(self, key: _Asked, characters: int) -> _Known:
        result = self._results.get(key)
        if result is None:
            result = self._compute(key)
            self._results.put(key, result, characters + RECORD_CHARACTERS)
        return result


_Content = tuple[str, str, tuple[MessageToolCall, ...], tuple[str, ...]]


def _find_shown_facts(content: _Content) -> tuple[MessageFact, ...]:
    role, text, calls, answers = content
    return list_message_facts(Message(role, text, calls=calls, answered_call_ids=answers))


def _read_call(call_and_result: tuple[MessageToolCall, str | None]) -> Action:
    return read_action(*call_and_result)


class _CachedStatements(NamedTuple):
    """The cache entry for the active statements of a list of messages.

    Attributes:
        size: Size of the entry, in characters.
        shorter_list: The statements of the shorter list that this list extends; None if they are not cached.
    """

    size: int
    shorter_list: ActiveStatements | None


class LedgerCache:
    """Caches the statements of user messages, and the facts that other messages show.

    Only one thread may use it at a time.

    Args:
        max_held_characters: Largest size of each cache, in characters. Each entry counts as its text plus
            `RECORD_CHARACTERS`.
    """

    def __init__(self, max_held_characters: int = MAX_HELD_CHARACTERS) -> None:
        self._statements = _BoundedMemo(read_statements, max_held_characters)
        self._shown_facts = _BoundedMemo(_find_shown_facts, max_held_characters)
        self._actions = _BoundedMemo(_read_call, max_held_characters // 2)
        self._replies = _BoundedMemo(read_reply, max_held_characters // 2)
        self._active_statements: OrderedDict[ActiveStatements, _CachedStatements] = OrderedDict()
        self._max_held = max_held_characters

    def get_statements(self, text: str) -> tuple[Statement, ...]:
        """Returns the statements in a user's text (`core.ledger.statements`)."""
        return self._statements(text, len(text))

    def get_active_statements(self, messages: Sequence[Message]) -> ActiveStatements:
        """Returns the user statements in a list of messages that are still in force (`core.ledger.active`).

        If the list extends a cached list, only the new messages are read. The last two lists of each
        conversation are cached. So if a client edits its newest message, the list still extends the older of
        the two.
        """
        texts = list_user_texts(messages)
        shorter_lists = (each for each in self._active_statements if each.is_prefix_of(texts))
        longest = max(shorter_lists, key=len, default=None)
        statements = ActiveStatements(messages, self.get_statements, longest)
        self._store_active_statements(statements, longest)
        return statements

    def _store_active_statements(
        self, statements: ActiveStatements, shorter_list: ActiveStatements | None
    ) -> None:
        since = None
        if shorter_list is not None:
            entry = self._active_statements.pop(shorter_list)
            if len(shorter_list) < len(statements):
                if entry.shorter_list is not None:
                    self._active_statements.pop(entry.shorter_list, None)
                self._active_statements[shorter_list], since = (
                    _CachedStatements(entry.size, None),
                    shorter_list,
                )
        self._active_statements[statements] = _CachedStatements(
            statements.character_count + RECORD_CHARACTERS * statements.statement_count, since
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
        return self._shown_facts(
            (message.role, message.text, message.calls, message.answered_call_ids), characters
        )
