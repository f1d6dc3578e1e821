"""Searches removed messages, in one conversation or in all conversations of a tenant.

Conversations with the same beginning share a root, under which their archives are stored. A search of one
conversation must not return messages that only the other conversations contain. It therefore returns only
messages that compactions of this conversation removed, and messages whose ids the caller passes. The caller
passes the ids of messages that its own request contains.
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

MAX_HITS = 100
SNIPPET_CHARACTERS = 300
# A snippet leaves out a word (text without white space) that its beginning or end would cut. But if the part
# of the word inside the snippet has more than this many characters, the snippet contains this part.
_WORD_CHARACTERS = 24
# Distance between the beginning of a snippet and the match, as a fraction: the maximum length of the snippet
# is divided by this number. Near the beginning and the end of a text, the distance is different.
_LEAD_SHARE = 3
# Maximum bytes of text, and maximum number of archives, that a search of all conversations of a tenant reads.
# The search begins with the newest archive, and ignores the archives beyond these limits.
SEARCHED_BYTES = 16_000_000
SEARCHED_ARCHIVES = 500
_NO_KNOWN_IDS: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class SearchHit:
    """A message that a search found.

    Attributes:
        message_id: The message's id, `m_…`.
        index: Its index among the messages of the conversation that are not fixed.
        role: Its role.
        round: The number of the compaction that removed the message.
        strategy: The strategy of that compaction.
        at: Time of that compaction, in seconds since the epoch.
        score: Score as a share of the highest possible score, above 0 and at most 1 (`fulltext.TextMatch`).
        snippet: A part of the message's text around the best match, on one line. "…" stands for the rest.
        conversation: The id of the conversation in which that compaction was made, `c_…`.
        turn: The number of the message's turn, from 1; 0 if it precedes the first turn; None if unknown.
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
    """Returns at most `characters` characters around the match at offset `at`, on one line.

    Leaves out a word that the beginning or the end of the snippet cuts, unless more than `_WORD_CHARACTERS`
    characters of the word are inside the snippet. "…" stands for the text before and after the snippet.
    """
    if len(text) > characters:
        characters -= len("… ") + len(" …")
    start = max(0, min(at - characters // _LEAD_SHARE, len(text) - characters))
    stop = start + characters
    words = text[start:stop].split()
    if start and _is_cut_word(text, start, words[:1]):
        words = words[1:]
    if stop < len(text) and _is_cut_word(text, stop, words[-1:]):
        words = words[:-1]
    before, after = text[:start].strip(), text[stop:].strip()
    return " ".join([*(["…"] if before else []), *words, *(["…"] if after else [])])


def _is_cut_word(text: str, at: int, word: Sequence[str]) -> bool:
    """Returns whether a snippet must leave out the word that its beginning or end, at offset `at`, cuts.

    `word` is a list with the part of the word that is inside the snippet, or an empty list. If this part has
    more than `_WORD_CHARACTERS` characters, the result is False.
    """
    inside = not (text[at - 1].isspace() or text[at].isspace())
    return inside and all(len(each) <= _WORD_CHARACTERS for each in word)


def _build_hit(recalled: RecalledMessage, found: TextMatch, characters: int) -> SearchHit:
    message, archived_round = recalled.message, recalled.round
    return SearchHit(
        message_id=message.id,
        index=message.index,
        role=message.role,
        round=archived_round.number,
        strategy=archived_round.strategy,
        at=archived_round.made_at,
        score=found.score,
        snippet=_extract_snippet(message.text, found.offset, characters),
        conversation=archived_round.conversation,
        turn=message.turn,
    )


def _select_newest(archives: Iterable[ListedArchive]) -> list[ArchiveRef]:
    """Returns the newest archives within `SEARCHED_ARCHIVES` and `SEARCHED_BYTES`, newest first.

    Returns the newest archive even if it alone exceeds `SEARCHED_BYTES`.
    """
    remaining_bytes = SEARCHED_BYTES
    places: list[ArchiveRef] = []
    for each in sorted(archives, key=lambda each: each.ref.round.made_at, reverse=True)[:SEARCHED_ARCHIVES]:
        remaining_bytes -= each.size_bytes
        if remaining_bytes < 0 and places:
            break
        places.append(each.ref)
    return places


class ArchiveSearch:
    """Searches archives. No method raises an error because the store fails or because of a query's text.

    Args:
        records: The store of the archives.
        history: Lists the roots under which the archives of a conversation are stored.
        retention: Lists the archives under a root, and those of a tenant.
        index_builder: Builds the search indexes.
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
        """Frees the cached search indexes, and stops the threads that build and search them."""
        await self._index_cache.close()

    async def search(
        self,
        tenant: str,
        conversation: str | None,
        query: str,
        limit: int = 5,
        *,
        known_ids: AbstractSet[str] = _NO_KNOWN_IDS,
        root: bytes | None = None,
        snippet_characters: int = SNIPPET_CHARACTERS,
    ) -> list[SearchHit]:
        """Returns the messages that match a query best, best first.

        Args:
            tenant: The tenant that owns the archives.
            conversation: The conversation's id. None searches the newest archives of all conversations of
                the tenant, up to `SEARCHED_BYTES` of text.
            query: Any text. It may contain words, prefixes (`begin*`) and "phrases" in double quotes. A
                message matches if it, or a message near it, contains one of the words. But it must contain
                all phrases. The search uses only the beginning and the end of a long query
                (`recall.tokenize.parse_query`).
            limit: Maximum number of hits. A limit above `MAX_HITS` counts as `MAX_HITS`.
            known_ids: Ids of messages that may be returned even if another conversation's compaction removed
                them, such as the messages of the caller's request.
            root: The root of the caller's request. Without it, a conversation that only reuses the
                compactions of others has no archives to search.
            snippet_characters: Maximum characters of a hit's snippet.

        Raises:
            SearchUnavailableError: If this installation cannot search.
        """
        most = max(0, min(limit, MAX_HITS))
        if not query.strip() or not most:
            return []
        places = await self._find_archives(tenant, conversation, known_ids, root)
        index = await self._index_cache.get_or_load(tenant, places)
        is_allowed = _build_access_filter(conversation, known_ids)
        # Messages of other conversations, which the caller must not see, may rank before messages of this
        # one. If the index contains other conversations, the search therefore returns all matches, and the
        # filter below selects from them.
        search_limit = (
            len(index) if conversation and any(map(_build_foreign_filter(conversation), places)) else most
        )
        found = await index.search(query, search_limit) if len(index) else []
        self._index_cache.evict_excess()
        return [_build_hit(each, hit, snippet_characters) for each, hit in found if is_allowed(each)][:most]

    async def find_message(
        self,
        tenant: str,
        conversation: str | None,
        message_id: str,
        *,
        known_ids: AbstractSet[str] = _NO_KNOWN_IDS,
        root: bytes | None = None,
    ) -> RecalledMessage | None:
        """Returns the archived message with this id, or None if there is none.

        `tenant`, `conversation`, `known_ids` and `root` have the same meaning as in `search`.
        """
        index = await self._index_cache.get_or_load(
            tenant, await self._find_archives(tenant, conversation, known_ids, root)
        )
        self._index_cache.evict_excess()
        found = index.find_message(message_id)
        return found if found is not None and _build_access_filter(conversation, known_ids)(found) else None

    async def list_removed_messages(self, tenant: str, conversation: str) -> list[RecalledMessage]:
        """Returns all archived messages that this conversation's compactions removed, ordered by index."""
        found: dict[str, RecalledMessage] = {}
        for each in await self._archive_reader.read_messages(
            tenant, await self._find_archives(tenant, conversation, _NO_KNOWN_IDS)
        ):
            found.setdefault(each.message.id, each)
        return sorted(found.values(), key=lambda each: (each.message.index, each.round.made_at))

    async def record_deleted_roots(self, tenant: str, roots: Iterable[bytes]) -> None:
        """Records that the caller has deleted all archives under these roots. Later searches ignore them."""
        await self._retention.record_deleted_roots(tenant, roots)

    async def _find_archives(
        self, tenant: str, conversation: str | None, known: AbstractSet[str], root: bytes | None = None
    ) -> Sequence[ArchiveRef]:
        """Returns the archives to search.

        The archives of the conversation come first, newest first. If `known`, which has message ids, is not
        empty, the archives of other conversations under the same roots, and under `root`, follow. If
        `conversation` is None, returns the newest archives of the tenant instead.
        """
        if conversation is None:
            return _select_newest(await self._retention.list_archives(tenant))
        found: list[ArchiveRef] = []
        roots = await self._history.list_roots(tenant, conversation)
        for each in dict.fromkeys((root, *roots) if root else roots):
            found += [held.ref for held in await self._retention.list_root_archives(tenant, each)]
        newest = sorted(dict.fromkeys(found), key=lambda place: place.round.made_at, reverse=True)
        foreign = _build_foreign_filter(conversation)
        others = [place for place in newest if foreign(place)] if known else []
        return [*(place for place in newest if not foreign(place)), *others]


def _build_foreign_filter(conversation: str) -> Callable[[ArchiveRef], bool]:
    """Returns a function that tells whether an archive belongs to another conversation."""
    return lambda place: place.round.conversation != conversation


def _build_access_filter(
    conversation: str | None, known: AbstractSet[str]
) -> Callable[[RecalledMessage], bool]:
    """Returns a function that tells whether a search may return a message.

    `known` contains the ids of messages that the search may return even if a compaction of another
    conversation removed them.
    """
    if conversation is None:
        return lambda _: True
    return lambda each: each.round.conversation == conversation or each.message.id in known
