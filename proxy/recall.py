"""Finding what rounds have taken out of a conversation.

Plain search over the archive: a message is found if it holds every word asked for, in any case. Conversations
that begin alike share archives; what is found belongs to the conversation asked about, or is a message that
whoever asks can name, because it stands in their own list.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from proxy.archive import KEPT_ARCHIVES, Round, round_of
from proxy.core.keys import archives_key
from proxy.history import History
from proxy.originals import Originals, Place, Recalled
from proxy.storage.records import Records

__all__ = ["Hit", "Recall", "Recalled", "terms"]

MAX_HITS = 100
MAX_TERMS = 16
MAX_TERM_CHARACTERS = 256
SNIPPET_CHARACTERS = 300
# How much of a snippet stands before what was found, in characters.
_LEAD_CHARACTERS = 100
_TERM = re.compile(r'"([^"]*)"|([^\s"]+)')
_NOBODY: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Hit:
    """A message that was found.

    Attributes:
        message_id: Its id, `m_…`.
        index: Its index among the non-privileged messages.
        role: Its role.
        round: The number of the round that took it out.
        strategy: The strategy of that round.
        at: When that was, in seconds since the epoch.
        score: Share of the terms that stand there as whole words, 0 to 1.
        snippet: At most 300 characters around the first match.
        conversation: The conversation that the round was made in, `c_…`.
        turn: The turn it belongs to, from 1; 0 before the first; None where it is not known.
    """

    message_id: str
    index: int
    role: str
    round: int
    strategy: str
    at: float
    score: float
    snippet: str
    conversation: str = ""
    turn: int | None = None


def terms(query: str) -> tuple[str, ...]:
    """What a query asks for: its words, and the phrases it has in double quotes; 16 at most."""
    found = (" ".join((phrase or word).split()) for phrase, word in _TERM.findall(query))
    return tuple(dict.fromkeys(each[:MAX_TERM_CHARACTERS] for each in found if each))[:MAX_TERMS]


def _patterns(asked: tuple[str, ...]) -> list[re.Pattern[str]]:
    """Matches each term in any case; white space inside a phrase may be any."""
    return [re.compile(r"\s+".join(map(re.escape, term.split())), re.IGNORECASE) for term in asked]


def _is_word(text: str, match: re.Match[str]) -> bool:
    start, stop = match.span()
    return not (text[max(0, start - 1) : start].isalnum() or text[stop : stop + 1].isalnum())


def _snippet(text: str, at: int) -> str:
    """The surroundings of a match, in one line."""
    start = max(0, min(at - _LEAD_CHARACTERS, len(text) - SNIPPET_CHARACTERS))
    return " ".join(text[start : start + SNIPPET_CHARACTERS].split())


def _match(text: str, patterns: list[re.Pattern[str]]) -> tuple[float, int] | None:
    """Score and offset of the first match; None unless every pattern is there."""
    words, first = 0, len(text)
    for pattern in patterns:
        found = pattern.search(text)
        if found is None:
            return None
        first = min(first, found.start())
        words += any(_is_word(text, match) for match in pattern.finditer(text))
    return words / len(patterns), first


def _hits(
    messages: list[Recalled], made: Round, patterns: list[re.Pattern[str]], allowed: Callable[[str], bool]
) -> list[Hit]:
    hits: list[Hit] = []
    for message in (each.message for each in messages):
        found = _match(message.text, patterns) if allowed(message.id) else None
        if found is not None:
            score, at = found
            hit = Hit(
                message_id=message.id,
                index=message.index,
                role=message.role,
                round=made.number,
                strategy=made.strategy,
                at=made.at,
                score=score,
                snippet=_snippet(message.text, at),
                conversation=made.conversation,
                turn=message.turn,
            )
            hits.append(hit)
    return hits


class Recall:
    """Searches archives. No method raises because of the store.

    Args:
        records: Where they are kept.
        history: Knows the roots of conversations.
        searched: Told of each search: how many hits it had.
    """

    def __init__(
        self, records: Records, history: History, searched: Callable[[int], None] | None = None
    ) -> None:
        self._records = records
        self._originals = Originals(records)
        self._history = history
        self._searched = searched

    async def search(
        self,
        tenant: str,
        conversation: str,
        query: str,
        limit: int = 20,
        *,
        known: AbstractSet[str] = _NOBODY,
    ) -> list[Hit]:
        """Messages that hold all words and quoted phrases of a query, whole words first, then newest first.

        Args:
            tenant: Whose it is.
            conversation: Its id.
            query: What to look for; nothing is found by an empty one.
            limit: Most hits, up to 100.
            known: Ids of messages that may be found wherever they were archived, such as those of a request.
        """
        patterns = _patterns(terms(query))
        found: dict[str, Hit] = {}
        if not patterns:
            return []
        async for record, made in self._archives(tenant, conversation, known):
            allowed = _allowed(made, conversation, known)
            # In a thread, so that a large archive holds nobody's answer up.
            for hit in await asyncio.to_thread(_hits, record, made, patterns, allowed):
                found.setdefault(hit.message_id, hit)
        if self._searched is not None:
            self._searched(len(found))
        ranked = sorted(found.values(), key=lambda hit: (-hit.score, -hit.at, -hit.index))
        return ranked[: min(limit, MAX_HITS)]

    async def message(
        self, tenant: str, conversation: str, message_id: str, *, known: AbstractSet[str] = _NOBODY
    ) -> Recalled | None:
        """The archived message with this id; None if there is none."""
        async for record, made in self._archives(tenant, conversation, known):
            if not _allowed(made, conversation, known)(message_id):
                continue
            for each in record:
                if each.message.id == message_id:
                    return each
        return None

    async def everything(self, tenant: str, conversation: str) -> list[Recalled]:
        """All that rounds of this very conversation have taken out and that is kept, in its order."""
        found: dict[str, Recalled] = {}
        async for record, _ in self._archives(tenant, conversation, _NOBODY):
            for each in record:
                found.setdefault(each.message.id, each)
        return sorted(found.values(), key=lambda each: (each.message.index, each.round.at))

    async def _archives(
        self, tenant: str, conversation: str, known: AbstractSet[str]
    ) -> AsyncIterator[tuple[list[Recalled], Round]]:
        """The archives that may hold messages of a conversation, newest first, read one at a time."""
        for place in await self._keys(tenant, conversation):
            if place.made.conversation == conversation or known:
                yield await self._originals.of(tenant, [place]), place.made

    async def _keys(self, tenant: str, conversation: str) -> list[Place]:
        found: dict[Place, None] = {}
        for root in await self._history.roots(tenant, conversation):
            for line in await self._records.tail(archives_key(tenant, root), KEPT_ARCHIVES):
                made = round_of(line)
                if made is not None:
                    found[Place(root, made)] = None
        return sorted(found, key=lambda place: place.made.at, reverse=True)


def _allowed(made: Round, conversation: str, known: AbstractSet[str]) -> Callable[[str], bool]:
    if made.conversation == conversation:
        return lambda _: True
    return lambda message_id: message_id in known
