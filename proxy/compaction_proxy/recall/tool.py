"""What a model or an agent may ask of what was removed: every question is answered with text for a model.

No method raises because of the store, or because of arguments as models write them: a sentence says what is
wrong instead, and what to do.
"""

import json
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any, Final, Literal, NamedTuple

from compaction_proxy.core.errors import SearchUnavailable
from compaction_proxy.core.json_bounds import is_crowded
from compaction_proxy.core.search_tool import ABSENT, NOTHING, Count, Remembered, hits_text, message_text
from compaction_proxy.recall.search import SNIPPET_CHARACTERS, Hit, Recall, Recalled

Scope = Literal["conversation", "tenant"]

MOST_HITS: Final = 20
MAX_QUERY_CHARACTERS: Final = 1_000
# All snippets of one answer, in characters: about as many as its tokens have room for.
_SNIPPETS_CHARACTERS: Final = 5_000
# Arguments of a call that are read at all, in characters.
_MAX_ARGUMENTS_CHARACTERS: Final = 64_000
_NOBODY: frozenset[str] = frozenset()
WANTED: Final = (
    'Call it with {"query": "words to look for"}, or with {"id": "m_…", "lines": "1-40"} to read a message.'
)
AWAY: Final = "What was removed cannot be searched right now: the store does not answer. Go on without it."

UNSEARCHABLE: Final = "What was removed cannot be searched by this installation. Go on without it."


class Asker(NamedTuple):
    """Who asks.

    Attributes:
        tenant: Whose conversations may be looked at.
        conversation: The conversation that is asked about, `c_…`; None: none in particular.
        known: Ids of messages that may be found wherever they were archived, such as those of a request.
        source: `model`, or who else it is; a label of metrics.
    """

    tenant: str
    conversation: str | None
    known: AbstractSet[str] = _NOBODY
    source: str = "model"


class Memory:
    """Answers questions about what was removed, on one event loop.

    Args:
        recall: Finds it.
        count: Tokens of a text of at most some thousand characters.
        reachable: Whether the store answers; must not wait.
        searched: Told of each search: who asked, and `found` or `nothing`.
    """

    def __init__(
        self,
        recall: Recall,
        count: Count,
        *,
        reachable: Callable[[], bool] = lambda: True,
        searched: Callable[[str, str], None] = lambda _source, _outcome: None,
    ) -> None:
        self._recall = recall
        self._count = count
        self._reachable = reachable
        self._searched = searched

    async def search(self, asker: Asker, query: str, *, limit: int = 5, scope: Scope = "conversation") -> str:
        """The best hits, or a sentence; at most 2,000 tokens.

        Args:
            asker: Who asks.
            query: Any text; its first 1,000 characters are looked for.
            limit: Most hits, 1 to 20.
            scope: Where to look: in the conversation that is asked about, or in all of the tenant's.
        """
        where = asker.conversation if scope == "conversation" else None
        hits: list[Hit] = []
        if scope == "tenant" or where is not None:
            most = min(max(limit, 1), MOST_HITS)
            text = query[:MAX_QUERY_CHARACTERS]
            room = max(SNIPPET_CHARACTERS, _SNIPPETS_CHARACTERS // most)
            try:
                hits = await self._recall.search(
                    asker.tenant, where, text, most, known=asker.known, snippet_characters=room
                )
            except SearchUnavailable:
                return UNSEARCHABLE
        self._searched(asker.source, "found" if hits else "nothing")
        if not hits and not self._reachable():
            return AWAY
        return hits_text([_hit(hit, asker) for hit in hits], self._count) or NOTHING

    async def get(
        self, asker: Asker, message_id: str, lines: str = "", *, scope: Scope = "conversation"
    ) -> str:
        """A message, or some of its lines, or a sentence; at most 2,000 tokens.

        Args:
            asker: Who asks.
            message_id: Its id, `m_…`.
            lines: Which lines, such as "10-40"; empty for all. Those that have room are shown.
            scope: Where to look, as with `search`; the conversation that is asked about comes first.
        """
        found = await self._message(asker, message_id.strip(), scope)
        if found is None:
            return ABSENT if self._reachable() else AWAY
        return message_text(_message(found, asker), lines, self._count)

    async def answer(self, asker: Asker, arguments: str) -> str:
        """The result of a call of `memory_search`, as a model wrote it.

        Args:
            asker: Who asks.
            arguments: JSON; where it cannot be used, the answer says what is wanted.
        """
        given = _object(arguments)
        query, message_id = (_text(given.get(name)) for name in ("query", "id"))
        if message_id:
            return await self.get(asker, message_id, _text(given.get("lines")))
        if query:
            return await self.search(asker, query)
        return WANTED

    async def _message(self, asker: Asker, message_id: str, scope: Scope) -> Recalled | None:
        find, found = self._recall.message, None
        if asker.conversation is not None:
            found = await find(asker.tenant, asker.conversation, message_id, known=asker.known)
        if found is None and scope == "tenant":
            found = await find(asker.tenant, None, message_id, known=asker.known)
        return found


def _hit(hit: Hit, asker: Asker) -> Remembered:
    elsewhere = "" if hit.conversation == asker.conversation else hit.conversation
    return Remembered(hit.message_id, hit.role, hit.snippet, hit.turn, hit.round, elsewhere)


def _message(found: Recalled, asker: Asker) -> Remembered:
    message, made = found.message, found.round
    elsewhere = "" if made.conversation == asker.conversation else made.conversation
    return Remembered(message.id, message.role, message.text, message.turn, made.number, elsewhere)


def _object(arguments: str) -> dict[str, Any]:
    """The members of a JSON object; none if it is no such thing."""
    if len(arguments) > _MAX_ARGUMENTS_CHARACTERS or is_crowded(arguments):
        return {}
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return given if isinstance(given, dict) else {}


def _text(value: object) -> str:
    """A text or a number as text, without white space around it; empty if it is neither."""
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value).strip() if numeric or isinstance(value, str) else ""
