"""Implements the search tool, with which a model or an agent searches removed messages.

Every result is text for a model. No method raises an error if the store fails or if the arguments of a call
are wrong. In such a case, the result describes the problem and says what the model can do.
"""

import json
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any, Final, Literal, NamedTuple

from compaction_proxy.core.errors import SearchUnavailableError
from compaction_proxy.core.json_bounds import has_too_many_brackets
from compaction_proxy.core.search_tool import (
    UNKNOWN_ID_TEXT,
    QuotedMessage,
    TokenCounter,
    format_hits,
    format_message,
)
from compaction_proxy.recall.archive import RecalledMessage
from compaction_proxy.recall.search import SNIPPET_CHARACTERS, ArchiveSearch, SearchHit

Scope = Literal["conversation", "tenant"]

MAX_HITS: Final = 20
MAX_QUERY_CHARACTERS: Final = 1_000
# The snippets of one search share this many characters (about 2,000 tokens) equally. But each snippet may
# have at least `SNIPPET_CHARACTERS` characters, so the snippets of many hits together may have more.
_MAX_SNIPPETS_CHARACTERS: Final = 5_000
# Maximum characters of the arguments of a call. If they have more, the result of the call is `USAGE_TEXT`.
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
    """The caller of the tool, and the messages that the caller may search.

    Attributes:
        tenant: The tenant whose conversations the caller may search.
        conversation: The id of the conversation to search, `c_…`. None if the caller has no conversation.
        known_ids: Ids of messages that may be returned even if another conversation's compaction removed
            them, such as the messages of the caller's request.
        source: The kind of the caller, such as `model`. A metric counts searches by this kind.
        root: The root of the caller's request, if known (`ArchiveSearch.search`).
    """

    tenant: str
    conversation: str | None
    known_ids: AbstractSet[str] = _NO_IDS
    source: str = "model"
    root: bytes | None = None


class RecallTool:
    """Searches and reads removed messages for models and agents. Use the object on one event loop.

    Args:
        archive_search: Searches the archives.
        count: Returns the number of tokens of a text. It is called for texts of at most a few thousand
            characters.
        is_store_reachable: Returns whether the store can be reached. It must return without waiting.
        on_search: Called for each search with `RecallContext.source` and the outcome (`found` or `nothing`).
    """

    def __init__(
        self,
        archive_search: ArchiveSearch,
        count: TokenCounter,
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
        """Returns the best hits as text of at most about 2,000 tokens. Without hits, the text says so.

        Args:
            context: The caller and what it may search.
            query: Any text (`ArchiveSearch.search`). Only its first 1,000 characters are used. If no message
                contains its phrases, their words are searched instead.
            limit: Maximum number of hits, from 1 to 20. A smaller number counts as 1, a larger one as 20.
            scope: Where to search: `conversation` for the context's conversation, or `tenant` for all
                conversations of the tenant.
        """
        conversation = context.conversation if scope == "conversation" else None
        hits: list[SearchHit] = []
        if scope == "tenant" or conversation is not None:
            most = min(max(limit, 1), MAX_HITS)
            text = query[:MAX_QUERY_CHARACTERS]
            room = max(SNIPPET_CHARACTERS, _MAX_SNIPPETS_CHARACTERS // most)
            try:
                # If no message contains the query's phrases, as a model remembers them, their words count.
                for words in dict.fromkeys((text, text.replace('"', " "))):
                    hits = hits or await self._archive_search.search(
                        context.tenant,
                        conversation,
                        words,
                        most,
                        known_ids=context.known_ids,
                        root=context.root,
                        snippet_characters=room,
                    )
            except SearchUnavailableError:
                return SEARCH_UNAVAILABLE_TEXT
        self._on_search(context.source, "found" if hits else "nothing")
        if not hits and not self._is_store_reachable():
            return STORE_UNAVAILABLE_TEXT
        return format_hits([_quote_hit(hit, context) for hit in hits], self._count_tokens)

    async def read_message(
        self, context: RecallContext, message_id: str, lines: str = "", *, scope: Scope = "conversation"
    ) -> str:
        """Returns a message or some of its lines as text of at most about 2,000 tokens.

        If there is no such message, the text says so.

        Args:
            context: The caller and what it may search.
            message_id: The message's id, `m_…`.
            lines: The lines to return, such as "10-40"; empty for all. The result contains only as many lines
                as fit into 2,000 tokens.
            scope: Where to look for the message, as in `search`. With `tenant`, the method looks in the
                context's conversation first.
        """
        found = await self._find_message(context, message_id.strip(), scope)
        if found is None:
            return UNKNOWN_ID_TEXT if self._is_store_reachable() else STORE_UNAVAILABLE_TEXT
        return format_message(_quote_message(found, context), lines, self._count_tokens)

    async def answer_call(self, context: RecallContext, arguments: str) -> str:
        """Returns the result of a model's call of the search tool (`memory_search`).

        Args:
            context: The caller and what it may search.
            arguments: The arguments of the call as JSON. If they contain neither a query nor an id, or are
                not valid, the result is `USAGE_TEXT`.
        """
        parsed = _parse_arguments(arguments)
        query, message_id = (_to_text(parsed.get(name)) for name in ("query", "id"))
        if message_id:
            return await self.read_message(context, message_id, _to_text(parsed.get("lines")))
        if query:
            return await self.search(context, query)
        return USAGE_TEXT

    async def _find_message(
        self, context: RecallContext, message_id: str, scope: Scope
    ) -> RecalledMessage | None:
        find, found = self._archive_search.find_message, None
        if context.conversation is not None:
            found = await find(
                context.tenant,
                context.conversation,
                message_id,
                known_ids=context.known_ids,
                root=context.root,
            )
        if found is None and scope == "tenant":
            found = await find(context.tenant, None, message_id)
        return found


def _quote_hit(hit: SearchHit, context: RecallContext) -> QuotedMessage:
    elsewhere = "" if hit.conversation == context.conversation else hit.conversation
    return QuotedMessage(hit.message_id, hit.role, hit.snippet, hit.turn, hit.round, elsewhere)


def _quote_message(found: RecalledMessage, context: RecallContext) -> QuotedMessage:
    message, archived_round = found.message, found.round
    elsewhere = "" if archived_round.conversation == context.conversation else archived_round.conversation
    return QuotedMessage(
        message.id, message.role, message.text, message.turn, archived_round.number, elsewhere
    )


def _parse_arguments(arguments: str) -> dict[str, Any]:
    """Returns the arguments by name, or an empty dict if the text is too long or no valid JSON object."""
    if len(arguments) > _MAX_ARGUMENTS_CHARACTERS or has_too_many_brackets(arguments):
        return {}
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _to_text(value: object) -> str:
    """Returns a string without white space around it, a number as text, or "" for any other value."""
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value).strip() if numeric or isinstance(value, str) else ""
