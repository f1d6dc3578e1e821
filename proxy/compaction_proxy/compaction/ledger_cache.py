"""Caches the user's statements and the facts that are found in messages.

The statements and facts in a message depend on that message alone. Clients send the whole history with every
request. Because of the cache, a compaction has to search only the messages that are new since the previous
compaction.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock
from typing import NamedTuple, TypeVar

from compaction_proxy.core.ledger.actions import Action, read_action
from compaction_proxy.core.ledger.active import ActiveStatements, list_user_texts
from compaction_proxy.core.ledger.facts import MessageFact, list_message_facts
from compaction_proxy.core.ledger.frontier import Frontier, ReplyReading, read_frontier, read_reply
from compaction_proxy.core.ledger.statements import Statement, read_statements
from compaction_proxy.core.message import Message, MessageToolCall
from compaction_proxy.support.lru import LruCache

# Largest size of each cache, in characters of the texts from which the cached results were computed. The
# results take about the same memory in addition. If a cache is full, the least recently used entries are
# dropped.
MAX_HELD_CHARACTERS = 6_000_000
# This many characters are added to the size of each cache entry, for its Python objects. If the text is
# short, these objects take more memory than the text.
RECORD_CHARACTERS = 300

_Key = TypeVar("_Key")
_Known = TypeVar("_Known")


_Content = tuple[str, str, tuple[MessageToolCall, ...], tuple[str, ...]]


class _CachedStatements(NamedTuple):
    """Describes the cached active statements in a list of messages.

    A statement of the user is active if no later message has replaced it.

    Attributes:
        size: Size of the statements, in characters.
        shorter_list: The active statements of the previous, shorter list of the same conversation; None if
            they are not cached.
    """

    size: int
    shorter_list: ActiveStatements | None


class LedgerCache:
    """Caches the statements in user messages, and the facts, actions and replies in other messages.

    Several threads may use an instance at the same time.

    Args:
        max_held_characters: Largest size of each cache, in characters. The size of an entry is the length of
            its text plus `RECORD_CHARACTERS`. The caches of actions and of replies get half of this size.
    """

    def __init__(self, max_held_characters: int = MAX_HELD_CHARACTERS) -> None:
        self._statements: LruCache[str, tuple[Statement, ...]] = LruCache(max_held_characters)
        self._shown_facts: LruCache[_Content, tuple[MessageFact, ...]] = LruCache(max_held_characters)
        self._actions: LruCache[tuple[MessageToolCall, str | None], Action] = LruCache(
            max_held_characters // 2
        )
        self._replies: LruCache[str, ReplyReading] = LruCache(max_held_characters // 2)
        self._active_statements: OrderedDict[ActiveStatements, _CachedStatements] = OrderedDict()
        self._max_held = max_held_characters
        self._lock = Lock()  # held while the caches are read or changed, and not while a text is read

    def _compute_once(
        self, cache: LruCache[_Key, _Known], key: _Key, characters: int, compute: Callable[[], _Known]
    ) -> _Known:
        """Returns the cached result under `key`, or computes the result and caches it.

        `characters` is the length of the texts in the key, which decides the size of the cache entry.
        """
        with self._lock:
            result = cache.get(key)
        if result is None:
            result = compute()
            with self._lock:
                cache.put(key, result, characters + RECORD_CHARACTERS)
        return result

    def get_statements(self, text: str) -> tuple[Statement, ...]:
        """Returns the statements in a user's text (`core.ledger.statements`)."""
        return self._compute_once(self._statements, text, len(text), lambda: read_statements(text))

    def get_active_statements(self, messages: Sequence[Message]) -> ActiveStatements:
        """Returns the user's statements that no later message has replaced (`core.ledger.active`).

        If the list of messages extends a cached list, only the new messages are read. The last two lists of
        each conversation are cached: if a client edits its newest message, the new list does not extend the
        last list, but it still extends the list before that.
        """
        texts = list_user_texts(messages)
        with self._lock:
            lists = list(self._active_statements)
        shorter_lists = (each for each in lists if each.is_prefix_of(texts))
        longest = max(shorter_lists, key=len, default=None)
        statements = ActiveStatements(messages, self.get_statements, longest)
        with self._lock:
            self._store_active_statements(statements, longest)
        return statements

    def _store_active_statements(
        self, statements: ActiveStatements, shorter_list: ActiveStatements | None
    ) -> None:
        since = None
        if shorter_list is not None:
            # None: another thread has removed the shorter list meanwhile.
            entry = self._active_statements.pop(shorter_list, None)
            if entry is not None and len(shorter_list) < len(statements):
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
        """Returns the frontier of a conversation: the states of the user's requests, and the last steps.

        Messages that were read before are not read again, because the results are cached. The module
        `core.ledger.frontier` describes the states and steps.
        """
        return read_frontier(messages, self.get_statements, self._get_action, self._get_reply)

    def _get_action(self, call: MessageToolCall, result: str | None) -> Action:
        characters = len(call.arguments) + len(result or "")
        return self._compute_once(
            self._actions, (call, result), characters, lambda: read_action(call, result)
        )

    def _get_reply(self, text: str) -> ReplyReading:
        return self._compute_once(self._replies, text, len(text), lambda: read_reply(text))

    def get_shown_facts(self, message: Message) -> tuple[MessageFact, ...]:
        """Returns the facts in a tool result or an assistant message (`core.ledger.facts`)."""
        characters = len(message.text) + sum(len(call.arguments) for call in message.calls)
        content = (message.role, message.text, message.calls, message.answered_call_ids)
        return self._compute_once(self._shown_facts, content, characters, lambda: list_message_facts(message))
