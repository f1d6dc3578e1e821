"""Caches the user's statements and the facts that are found in messages.

The statements and facts in a message depend on that message alone. Clients send the whole history with every
request. Because of the cache, a compaction has to search only the messages that are new since the previous
compaction.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from enum import Enum
from sys import getsizeof
from threading import Lock
from typing import Any, NamedTuple, TypeVar

from compaction_proxy.core.ledger.actions import Action, read_action
from compaction_proxy.core.ledger.active import ActiveStatements, list_user_texts
from compaction_proxy.core.ledger.facts import MessageFact, list_message_facts
from compaction_proxy.core.ledger.frontier import Frontier, ReplyReading, read_frontier, read_reply
from compaction_proxy.core.ledger.statements import Statement, read_statements
from compaction_proxy.core.message import Message, MessageToolCall
from compaction_proxy.support.lru import LruCache

# Largest size of the cache of statements, facts, actions and replies, and largest size of the cache of active
# statements, in bytes of memory. If a cache is full, the least recently used entries are dropped. A
# conversation of 0.9 MB that consists of 8,000 messages with two rules each fits into both. Measured with
# tracemalloc, the statements of a text take 11 to 42 bytes for each of its characters.
MAX_HELD_BYTES = 24 * 1024 * 1024
# Bytes of memory that an entry of the first cache takes besides its key and its result.
ENTRY_BYTES = 250
# Bytes of memory that a list of active statements takes for each statement, besides the statement. Measured
# with tracemalloc, it took 130 to 310.
ACTIVE_STATEMENT_BYTES = 200

_Known = TypeVar("_Known")


class _CachedStatements(NamedTuple):
    """Describes the cached active statements in a list of messages.

    A statement of the user is active if no later message has replaced it.

    Attributes:
        size_bytes: Size of the list with its statements, in bytes of memory.
        counted_bytes: The part of this size that counts. The statements do not count if a longer list of the
            same conversation has them, too.
        shorter_list: The active statements of the previous, shorter list of the same conversation; None if
            they are not cached.
    """

    size_bytes: int
    counted_bytes: int
    shorter_list: ActiveStatements | None


class LedgerCache:
    """Caches the statements in user messages, and the facts, actions and replies in other messages.

    Several threads may use an instance at the same time.

    Args:
        max_held_bytes: Largest size of each of the two caches, in bytes of memory: of the cache of results,
            and of the cache of active statements.
    """

    def __init__(self, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        self._results: LruCache[tuple[str, Hashable], Any] = LruCache(max_held_bytes)
        self._active_statements: OrderedDict[ActiveStatements, _CachedStatements] = OrderedDict()
        self._max_held_bytes = max_held_bytes
        self._lock = Lock()  # held while the caches are read or changed, and not while a text is read

    def _compute_once(self, kind: str, content: Hashable, compute: Callable[[], _Known]) -> _Known:
        """Returns the cached result of this kind for `content`, or computes the result and caches it."""
        key = (kind, content)
        with self._lock:
            result: _Known | None = self._results.get(key)
        if result is None:
            result = compute()
            size_bytes = _measure_bytes((content, result)) + ENTRY_BYTES
            with self._lock:
                self._results.put(key, result, size_bytes)
        return result

    def get_statements(self, text: str) -> tuple[Statement, ...]:
        """Returns the statements in a user's text (`core.ledger.statements`)."""
        return self._compute_once("statements", text, lambda: read_statements(text))

    def get_active_statements(self, messages: Sequence[Message]) -> ActiveStatements:
        """Returns the user's statements that no later message has replaced (`core.ledger.active`).

        If the list of messages extends a cached list, only the new messages are read. The last two lists of
        each conversation are cached: if a client edits its newest message, the new list does not extend the
        last list, but it still extends the list before that.
        """
        texts = list_user_texts(messages)
        with self._lock:
            lists = list(self._active_statements.items())
        longest, entry = max(
            (each for each in lists if each[0].is_prefix_of(texts)),
            key=lambda each: len(each[0]),
            default=(None, None),
        )
        size_bytes = entry.size_bytes if entry else 0

        def read_new_text(text: str) -> tuple[Statement, ...]:
            nonlocal size_bytes
            found = self.get_statements(text)
            size_bytes += _measure_bytes((text, found)) + ACTIVE_STATEMENT_BYTES * len(found)
            return found

        statements = ActiveStatements(messages, read_new_text, longest)
        with self._lock:
            self._store_active_statements(statements, longest, size_bytes)
        return statements

    def _store_active_statements(
        self, statements: ActiveStatements, shorter_list: ActiveStatements | None, size_bytes: int
    ) -> None:
        since = None
        if shorter_list is not None:
            # None: another thread has removed the shorter list meanwhile.
            entry = self._active_statements.pop(shorter_list, None)
            if entry is not None and len(shorter_list) < len(statements):
                if entry.shorter_list is not None:
                    self._active_statements.pop(entry.shorter_list, None)
                own_bytes = ACTIVE_STATEMENT_BYTES * shorter_list.statement_count
                self._active_statements[shorter_list], since = (
                    _CachedStatements(entry.size_bytes, own_bytes, None),
                    shorter_list,
                )
        self._active_statements[statements] = _CachedStatements(size_bytes, size_bytes, since)
        while sum(each.counted_bytes for each in self._active_statements.values()) > self._max_held_bytes:
            self._active_statements.popitem(last=False)

    def get_frontier(self, messages: Sequence[Message]) -> Frontier:
        """Returns the frontier of a conversation: the states of the user's requests, and the last steps.

        Messages that were read before are not read again, because the results are cached. The module
        `core.ledger.frontier` describes the states and steps.
        """
        return read_frontier(messages, self.get_statements, self._get_action, self._get_reply)

    def _get_action(self, call: MessageToolCall, result: str | None) -> Action:
        return self._compute_once("action", (call, result), lambda: read_action(call, result))

    def _get_reply(self, text: str) -> ReplyReading:
        return self._compute_once("reply", text, lambda: read_reply(text))

    def get_shown_facts(self, message: Message) -> tuple[MessageFact, ...]:
        """Returns the facts in a tool result or an assistant message (`core.ledger.facts`)."""
        content = (message.role, message.text, message.calls, message.answered_call_ids)
        return self._compute_once("facts", content, lambda: list_message_facts(message))


def _measure_bytes(value: object) -> int:
    """Returns how many bytes of memory a key or a result takes, with all its parts.

    Parts that several results share, such as the stems of common words, count for each of them. So the sum
    for statements was up to 1.4 times what tracemalloc measured.
    """
    if not value or isinstance(value, bool | Enum):
        return 0  # all results share these objects
    parts = value if isinstance(value, tuple | frozenset) else ()
    attributes = [getattr(value, name) for name in getattr(type(value), "__slots__", ())]
    return getsizeof(value) + sum(map(_measure_bytes, (*parts, *attributes)))
