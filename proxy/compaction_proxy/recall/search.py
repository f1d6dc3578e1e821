"""Finding what rounds have taken out of a conversation, or of all that a tenant has.

Conversations that begin alike share archives. What is found belongs to the conversation asked about, or is a
message that whoever asks can name, because it stands in their own list.
"""

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from compaction_proxy.recall.archive import ArchiveReader, ArchiveRef, RecalledMessage
from compaction_proxy.recall.fulltext import TextIndexBuilder, TextMatch
from compaction_proxy.recall.index_cache import SearchIndexCache
from compaction_proxy.recall.retention import ArchiveRetention, ListedArchive
from compaction_proxy.storage.records import RecordStore
from compaction_proxy.telemetry.event_history import EventHistory

__all__ = ["ArchiveSearch", "Hit", "RecalledMessage"]

MAX_HITS = 100
SNIPPET_CHARACTERS = 300
# Longer runs without white space are no words that a snippet must not cut.
_WORD_CHARACTERS = 24
# How much of a snippet stands before what was found: one part in so many.
_LEAD_SHARE = 3
# How much of a tenant's archives is searched at once, the newest first: bytes of text, and archives.
SEARCHED_BYTES = 16_000_000
SEARCHED_ARCHIVES = 500
_NO_IDS: frozenset[str] = frozenset()


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
        score: How much of what was asked for stands there, above 0 and at most 1 (`ports.TextMatch`).
        snippet: What stands around the best match, at most 300 characters unless more were asked for.
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


def _extract_snippet(text: str, at: int, characters: int = SNIPPET_CHARACTERS) -> str:
    """The surroundings of a match, in one line, without the halves of words at its ends."""
    start = max(0, min(at - characters // _LEAD_SHARE, len(text) - characters))
    stop = start + characters
    words = text[start:stop].split()
    if start and _is_cut_word(text, start, words[:1]):
        words = words[1:]
    if stop < len(text) and _is_cut_word(text, stop, words[-1:]):
        words = words[:-1]
    return " ".join(words)


def _is_cut_word(text: str, at: int, word: Sequence[str]) -> bool:
    """Whether this is what a cut has left of a word; a cut may go through what is longer than words are."""
    inside = not (text[at - 1].isspace() or text[at].isspace())
    return inside and all(len(each) <= _WORD_CHARACTERS for each in word)


def _build_hit(recalled: RecalledMessage, found: TextMatch, characters: int) -> Hit:
    message, made = recalled.message, recalled.round
    return Hit(
        message_id=message.id,
        index=message.index,
        role=message.role,
        round=made.number,
        strategy=made.strategy,
        at=made.at,
        score=found.score,
        snippet=_extract_snippet(message.text, found.offset, characters),
        conversation=made.conversation,
        turn=message.turn,
    )


def _select_newest(archives: Iterable[ListedArchive]) -> list[ArchiveRef]:
    """The newest archives of these, as many as are searched at once."""
    remaining_bytes = SEARCHED_BYTES
    places: list[ArchiveRef] = []
    for each in sorted(archives, key=lambda each: each.ref.round.at, reverse=True)[:SEARCHED_ARCHIVES]:
        remaining_bytes -= each.size_bytes
        if remaining_bytes < 0 and places:
            break
        places.append(each.ref)
    return places


class ArchiveSearch:
    """Searches archives. No method raises because of the store, or of any query.

    Args:
        records: Where archives are kept.
        history: Knows the roots of conversations.
        retention: Know which archives there are.
        index_builder: Ranks what is in them.
    """

    def __init__(
        self,
        records: RecordStore,
        history: EventHistory,
        retention: ArchiveRetention,
        index_builder: TextIndexBuilder,
    ) -> None:
        self._history = history
        self._retention = retention
        self._archive_reader = ArchiveReader(records)
        self._index_cache = SearchIndexCache(records, index_builder)

    async def close(self) -> None:
        """Let go of what is held."""
        await self._index_cache.close()

    async def search(
        self,
        tenant: str,
        conversation: str | None,
        query: str,
        limit: int = 5,
        *,
        known: AbstractSet[str] = _NO_IDS,
        snippet_characters: int = SNIPPET_CHARACTERS,
    ) -> list[Hit]:
        """The messages that answer a query best, the best first.

        Args:
            tenant: Whose it is.
            conversation: Its id; None for all that the tenant has, of which the newest 16 MB are searched.
            query: Any text: words, any of which will do, `beginnings*` and "quoted phrases". Of a
                long one both ends are looked for (`recall.tokenize.asked`).
            limit: Most hits, up to 100.
            known: Ids of messages that may be found wherever they were archived, such as those of a request.
            snippet_characters: Most characters of a snippet.

        Raises:
            SearchUnavailable: This installation cannot search.
        """
        most = max(0, min(limit, MAX_HITS))
        if not query.strip() or not most:
            return []
        places = await self._find_archives(tenant, conversation, known)
        indexed = await self._index_cache.get_or_load(tenant, places)
        allowed = _build_access_filter(conversation, known)
        # Of what may not be told there may be any number before what may.
        sought = (
            len(indexed) if conversation and any(map(_build_foreign_filter(conversation), places)) else most
        )
        found = await indexed.search(query, sought) if len(indexed) else []
        self._index_cache.evict_excess()
        return [_build_hit(each, hit, snippet_characters) for each, hit in found if allowed(each)][:most]

    async def find_message(
        self,
        tenant: str,
        conversation: str | None,
        message_id: str,
        *,
        known: AbstractSet[str] = _NO_IDS,
    ) -> RecalledMessage | None:
        """The archived message with this id, of the conversation or (None) of the tenant; None if none."""
        indexed = await self._index_cache.get_or_load(
            tenant, await self._find_archives(tenant, conversation, known)
        )
        self._index_cache.evict_excess()
        found = indexed.find_message(message_id)
        return found if found is not None and _build_access_filter(conversation, known)(found) else None

    async def list_removed_messages(self, tenant: str, conversation: str) -> list[RecalledMessage]:
        """All that rounds of this very conversation have taken out and that is kept, in its order."""
        found: dict[str, RecalledMessage] = {}
        for each in await self._archive_reader.read_messages(
            tenant, await self._find_archives(tenant, conversation, _NO_IDS)
        ):
            found.setdefault(each.message.id, each)
        return sorted(found.values(), key=lambda each: (each.message.index, each.round.at))

    async def record_deleted_roots(self, tenant: str, roots: Iterable[bytes]) -> None:
        """Everything under these roots was deleted: let nobody look for it."""
        await self._retention.record_deleted_roots(tenant, roots)

    async def _find_archives(
        self, tenant: str, conversation: str | None, known: AbstractSet[str]
    ) -> Sequence[ArchiveRef]:
        """The archives that may hold what is asked for, those of the conversation first, the newest first."""
        if conversation is None:
            return _select_newest(await self._retention.list_archives(tenant))
        found: list[ArchiveRef] = []
        for root in await self._history.list_roots(tenant, conversation):
            found += [held.ref for held in await self._retention.list_root_archives(tenant, root)]
        newest = sorted(dict.fromkeys(found), key=lambda place: place.round.at, reverse=True)
        foreign = _build_foreign_filter(conversation)
        others = [place for place in newest if foreign(place)] if known else []
        return [*(place for place in newest if not foreign(place)), *others]


def _build_foreign_filter(conversation: str) -> Callable[[ArchiveRef], bool]:
    """Whether an archive is another conversation's."""
    return lambda place: place.round.conversation != conversation


def _build_access_filter(
    conversation: str | None, known: AbstractSet[str]
) -> Callable[[RecalledMessage], bool]:
    """Whether a message may be told."""
    if conversation is None:
        return lambda _: True
    return lambda each: each.round.conversation == conversation or each.message.id in known
