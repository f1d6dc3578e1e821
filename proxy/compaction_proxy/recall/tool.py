"""What a model or an agent may ask of what was removed: every question is answered with text for a model.

No method raises because of the store, or because of arguments as models write them: a sentence says what is
wrong instead, and what to do.
"""

import json
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any, Final, Literal, NamedTuple

from compaction_proxy.core.errors import SearchUnavailableError
from compaction_proxy.core.json_bounds import has_too_many_brackets
from compaction_proxy.core.search_tool import (
    NO_HITS_TEXT,
    UNKNOWN_ID_TEXT,
    Count,
    QuotedMessage,
    format_hits,
    format_message,
)
from compaction_proxy.recall.search import SNIPPET_CHARACTERS, ArchiveSearch, Hit, RecalledMessage

Scope = Literal["conversation", "tenant"]

MOST_HITS: Final = 20
MAX_QUERY_CHARACTERS: Final = 1_000
# All snippets of one answer, in characters: about as many as its tokens have room for.
_SNIPPETS_CHARACTERS: Final = 5_000
# Arguments of a call that are read at all, in characters.
_MAX_ARGUMENTS_CHARACTERS: Final = 64_000
_NO_IDS: frozenset[str] = frozenset()
USAGE_TEXT: Final = (
    'Call it with {"query": "words to look for"}, or with {"id": "m_…", "lines": "1-40"} to read a message.'
)
STORE_UNAVAILABLE_TEXT: Final = (
    "What was removed cannot be searched right now: the store does not answer. Go on without it."
)

SEARCH_UNAVAILABLE_TEXT: Final = "What was removed cannot be searched by this installation. Go on without it."


class RecallContext(NamedTuple):
    """Who asks.

    Attributes:
        tenant: Whose conversations may be looked at.
        conversation: The conversation that is asked about, `c_…`; None: none in particular.
        known_ids: Ids of messages that may be found wherever they were archived, such as those of a request.
        source: `model`, or who else it is; a label of metrics.
    """

    tenant: str
    conversation: str | None
    known_ids: AbstractSet[str] = _NO_IDS
    source: str = "model"


class RecallTool:
    """Answers questions about what was removed, on one event loop.

    Args:
        archive_search: Finds it.
        count: Tokens of a text of at most some thousand characters.
        is_store_reachable: Whether the store answers; must not wait.
        on_search: Told of each search: who asked, and `found` or `nothing`.
    """

    def __init__(
        self,
        archive_search: ArchiveSearch,
        count: Count,
        *,
        is_store_reachable: Callable[[], bool] = lambda: True,
        on_search: Callable[[str, str], None] = lambda _source, _outcome: None,
    ) -> None:
        self._archive_search = archive_search
        self._count_tokens = count
        self._is_store_reachable = is_store_reachable
        self._on_search = on_search

    async def search(
        self, context: RecallContext, query: str, *, limit: int = 5, scope: Scope = "conversation"
    ) -> str:
        """The best hits, or a sentence; at most 2,000 tokens.

        Args:
            context: Who asks.
            query: Any text; its first 1,000 characters are looked for.
            limit: Most hits, 1 to 20.
            scope: Where to look: in the conversation that is asked about, or in all of the tenant's.
        """
        where = context.conversation if scope == "conversation" else None
        hits: list[Hit] = []
        if scope == "tenant" or where is not None:
            most = min(max(limit, 1), MOST_HITS)
            text = query[:MAX_QUERY_CHARACTERS]
            room = max(SNIPPET_CHARACTERS, _SNIPPETS_CHARACTERS // most)
            try:
                hits = await self._archive_search.search(
                    context.tenant, where, text, most, known=context.known_ids, snippet_characters=room
                )
            except SearchUnavailableError:
                return SEARCH_UNAVAILABLE_TEXT
        self._on_search(context.source, "found" if hits else "nothing")
        if not hits and not self._is_store_reachable():
            return STORE_UNAVAILABLE_TEXT
        return format_hits([_quote_hit(hit, context) for hit in hits], self._count_tokens) or NO_HITS_TEXT

    async def read_message(
        self, context: RecallContext, message_id: str, lines: str = "", *, scope: Scope = "conversation"
    ) -> str:
        """A message, or some of its lines, or a sentence; at most 2,000 tokens.

        Args:
            context: Who asks.
            message_id: Its id, `m_…`.
            lines: Which lines, such as "10-40"; empty for all. Those that have room are shown.
            scope: Where to look, as with `search`; the conversation that is asked about comes first.
        """
        found = await self._find_message(context, message_id.strip(), scope)
        if found is None:
            return UNKNOWN_ID_TEXT if self._is_store_reachable() else STORE_UNAVAILABLE_TEXT
        return format_message(_quote_message(found, context), lines, self._count_tokens)

    async def answer_call(self, context: RecallContext, arguments: str) -> str:
        """The result of a call of `memory_search`, as a model wrote it.

        Args:
            context: Who asks.
            arguments: JSON; where it cannot be used, the answer says what is wanted.
        """
        given = _parse_arguments(arguments)
        query, message_id = (_to_text(given.get(name)) for name in ("query", "id"))
        if message_id:
            return await self.read_message(context, message_id, _to_text(given.get("lines")))
        if query:
            return await self.search(context, query)
        return USAGE_TEXT

    async def _find_message(
        self, context: RecallContext, message_id: str, scope: Scope
    ) -> RecalledMessage | None:
        find, found = self._archive_search.find_message, None
        if context.conversation is not None:
            found = await find(context.tenant, context.conversation, message_id, known=context.known_ids)
        if found is None and scope == "tenant":
            found = await find(context.tenant, None, message_id, known=context.known_ids)
        return found


def _quote_hit(hit: Hit, context: RecallContext) -> QuotedMessage:
    elsewhere = "" if hit.conversation == context.conversation else hit.conversation
    return QuotedMessage(hit.message_id, hit.role, hit.snippet, hit.turn, hit.round, elsewhere)


def _quote_message(found: RecalledMessage, context: RecallContext) -> QuotedMessage:
    message, made = found.message, found.round
    elsewhere = "" if made.conversation == context.conversation else made.conversation
    return QuotedMessage(message.id, message.role, message.text, message.turn, made.number, elsewhere)


def _parse_arguments(arguments: str) -> dict[str, Any]:
    """The members of a JSON object; none if it is no such thing."""
    if len(arguments) > _MAX_ARGUMENTS_CHARACTERS or has_too_many_brackets(arguments):
        return {}
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return given if isinstance(given, dict) else {}


def _to_text(value: object) -> str:
    """A text or a number as text, without white space around it; empty if it is neither."""
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value).strip() if numeric or isinstance(value, str) else ""
