"""Inserts excerpts of removed messages that match the latest user message. This is called auto-recall.

The excerpts form a separate message right before the latest user message, so that the model can use them for
its reply. All requests of a turn contain the same excerpts, so that the provider's prompt cache stays valid.
Requests of the next turn no longer contain these excerpts. Clients never see the excerpts, no compaction
summarises them, and no archive stores them. If the search fails or takes too long, the request is forwarded
without excerpts.
"""

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any, Final, NamedTuple, Protocol

import structlog

from compaction_proxy.compaction.message_reader import MessageReader
from compaction_proxy.compaction.request_view import compute_limits
from compaction_proxy.compaction.types import CompactedMessages, FitRequest, FitResult, UsageBasis
from compaction_proxy.config.sections import RecallSection
from compaction_proxy.core.digest import format_message_id
from compaction_proxy.core.errors import SearchUnavailableError
from compaction_proxy.core.message import Message, find_latest_user_message
from compaction_proxy.core.repair import insert_alternating_fillers
from compaction_proxy.core.search_tool import DATA_NOTICE, QuotedMessage, TokenCounter, format_hits
from compaction_proxy.recall.search import SearchHit
from compaction_proxy.recall.tokenize import STOP_WORDS, parse_query
from compaction_proxy.storage.records import RecordStore
from compaction_proxy.support.fail_open import suppress_and_report
from compaction_proxy.support.log_events import RECALL_FAILED
from compaction_proxy.support.lru import LruCache
from compaction_proxy.wires.body import rewrite_messages

# A request waits at most this many seconds for a search. If the search takes longer, nothing is inserted.
DEADLINE_S: Final = 0.15
# If the latest user message has fewer words than this, no search is made, unless the message contains a code,
# such as a path or an id. Common words such as "the" do not count as words.
LEAST_WORDS: Final = 2
# Largest number of hits that a search returns (`MAX_CANDIDATES`), and largest number of these hits that are
# inserted into a request (`MAX_HITS`).
MAX_CANDIDATES: Final = 20
MAX_HITS: Final = 3
# Largest size of the cache of inserted texts, in bytes. If a new text does not fit, it displaces the least
# recently used texts.
HELD_BYTES: Final = 4 * 1024 * 1024
# Approximate memory that a cache entry takes in addition to its text, in bytes.
_CHOICE_BYTES: Final = 600
HEADING: Final = (
    "From earlier messages that were removed, for reference: the request is the message after this. "
    f"{DATA_NOTICE}"
)

_log = structlog.get_logger()


class SearchFunction(Protocol):
    """A function that searches removed messages, such as `ArchiveSearch.search`."""

    def __call__(
        self,
        tenant: str,
        conversation: str | None,
        query: str,
        limit: int,
        *,
        known_ids: AbstractSet[str],
        root: bytes | None,
    ) -> Coroutine[Any, Any, list[SearchHit]]:
        """Returns at most `limit` hits, the best one first.

        If `conversation` is None, searches all conversations of the tenant. Messages with an id in
        `known_ids` may be returned even if they were removed from another conversation under `root`.
        """
        ...


class _RecallKey(NamedTuple):
    """Identifies one turn of a conversation. The text to insert in this turn is cached under this key.

    Attributes:
        tenant: The tenant of the conversation.
        conversation: The conversation id.
        prefix: Prefix digest of the messages up to the user message that begins the turn.
        section: The configuration of auto-recall.
    """

    tenant: str
    conversation: str
    prefix: bytes
    section: RecallSection


def build_recall_query(text: str) -> str:
    """Builds a search query from the text of a user message.

    Returns "" if the text contains no code, such as a path, and also has fewer than `LEAST_WORDS` words.
    Common words are not counted, even where `parse_query` keeps them because the text has no other words.
    Quotation marks and asterisks are removed, because they are operators of the query language. With
    quotation marks, for example, the search would find only messages with exactly the quoted words.
    """
    query = text.replace('"', " ").replace("*", " ")
    parsed = parse_query(query)
    is_specific = STOP_WORDS.isdisjoint(parsed.words) and len(parsed.words) >= LEAST_WORDS
    return query if is_specific or parsed.codes else ""


def build_recall_text(hits: Sequence[SearchHit], section: RecallSection, count_tokens: TokenCounter) -> str:
    """Builds the text that is inserted into a request. It quotes the best hits, at most `MAX_HITS`.

    `section` is the configuration of auto-recall. Returns "" if no hit has the score that it requires, or if
    not even the best hit fits its token limit.
    """
    good = [hit for hit in hits if hit.score >= section.auto_score][:MAX_HITS]
    shown = [QuotedMessage(hit.message_id, hit.role, hit.snippet, hit.turn, hit.round) for hit in good]
    return format_hits(shown, count_tokens, section.auto_tokens, HEADING) if shown else ""


class AutoRecall:
    """Inserts excerpts of removed messages into requests. Not thread-safe: use it on one event loop.

    Args:
        search: Searches removed messages.
        reader: Counts the tokens of messages.
        records: The store of records. When records are deleted from it, the cache of inserted texts is
            cleared.
        count_tokens: Counts the tokens of a short text.
        on_search: Called after each search with the source `auto` and the outcome `found` or `nothing`.
    """

    def __init__(
        self,
        search: SearchFunction,
        reader: MessageReader,
        records: RecordStore,
        count_tokens: TokenCounter,
        *,
        on_search: Callable[[str, str], None] = lambda _source, _outcome: None,
    ) -> None:
        self._search = search
        self._reader = reader
        self._count = count_tokens
        self._on_search = on_search
        self._choices: LruCache[_RecallKey, str] = LruCache(HELD_BYTES)
        self._search_tasks: set[asyncio.Task[list[SearchHit]]] = set()
        records.on_delete_callbacks.append(self._clear_choices)

    async def __call__(self, fit: FitResult, ask: FitRequest) -> FitResult:
        """Inserts excerpts of removed messages before the latest user message. Returns the new result.

        Returns `fit` unchanged if auto-recall is off, if no messages have been removed, if the latest user
        message itself has been removed, if no removed message matches, if the request would become too large,
        or if an error occurs.

        Args:
            fit: The result of the compactor for the request.
            ask: The request.
        """
        compacted, usage_basis = fit.compacted_messages, fit.usage_basis
        conversation = fit.report.conversation
        if (
            ask.settings.recall.auto == "none"
            or compacted is None
            or usage_basis is None
            or conversation is None
        ):
            return fit
        with suppress_and_report(_log_failure):
            latest = find_latest_user_message(compacted.unfixed_messages)
            insert_index = find_latest_user_message(compacted.messages)
            if (
                latest is None
                or insert_index is None
                or compacted.messages[insert_index].raw != compacted.unfixed_messages[latest].raw
            ):
                return fit  # the message is now part of a replacement, so there is no place to insert
            turn = _RecallKey(ask.tenant, conversation, usage_basis.prefixes[latest], ask.settings.recall)
            text = await self._choose_text(
                turn, compacted, usage_basis, compacted.unfixed_messages[latest].text
            )
            return await self._insert_text(fit, compacted, ask, insert_index, text) if text else fit
        return fit

    async def close(self) -> None:
        """Cancels the searches that are still running."""
        tasks = list(self._search_tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _choose_text(
        self, key: _RecallKey, compacted: CompactedMessages, usage_basis: UsageBasis, user_text: str
    ) -> str:
        """Returns the text to insert in this turn; "" if nothing is to be inserted.

        The text is chosen at the first request of the turn and then taken from the cache.
        """
        # If records are deleted during the search, `_clear_choices` creates a new cache. The text that is
        # found here may quote deleted messages, so it must be stored only in the old cache (`chosen`).
        chosen = self._choices
        text = chosen.get(key)
        if text is None:
            query = build_recall_query(user_text)
            hits = await self._find_hits(key, compacted, usage_basis, query) if query else []
            text = build_recall_text(hits, key.section, self._count)
            chosen.put(key, text, len(text) + _CHOICE_BYTES)
        return text

    async def _find_hits(
        self, key: _RecallKey, compacted: CompactedMessages, usage_basis: UsageBasis, query: str
    ) -> list[SearchHit]:
        """Searches the removed and shortened messages of the request, and returns those that match.

        Returns an empty list if the search fails or takes longer than `DEADLINE_S` seconds. A search that
        takes longer continues in the background, because the data that it loads may make the next search
        faster.
        """
        affected = compacted.checkpoint.removed_indices | compacted.checkpoint.edited
        affected_ids = frozenset(format_message_id(usage_basis.prefixes[index]) for index in affected)
        search = self._search(
            key.tenant,
            key.conversation,
            query,
            MAX_CANDIDATES,
            known_ids=affected_ids,
            root=usage_basis.root,
        )
        task = asyncio.create_task(search)
        self._search_tasks.add(task)
        task.add_done_callback(self._finish_search)
        await asyncio.wait([task], timeout=DEADLINE_S)
        has_result = task.done() and not task.cancelled() and task.exception() is None
        hits = task.result() if has_result else []
        matching_hits = [hit for hit in hits if hit.message_id in affected_ids]
        self._on_search("auto", "found" if matching_hits else "nothing")
        return matching_hits

    async def _insert_text(
        self, fit: FitResult, compacted: CompactedMessages, ask: FitRequest, index: int, text: str
    ) -> FitResult:
        """Inserts the text as a user message before the message at `index`. Returns the new result.

        Returns `fit` unchanged if the request would become too large.
        """
        wire = ask.body.wire
        recall_message = wire.parse_message(wire.encode_message(Message(role="user", text=text)))
        messages = (*compacted.messages[:index], recall_message, *compacted.messages[index:])
        if ask.settings.alternation == "strict":
            messages = insert_alternating_fillers(messages)
        uncounted = [each for each in messages if not each.tokens]
        added = sum(
            each.tokens for each in await self._reader.add_token_counts(uncounted, ask.counting_options)
        )
        size = _estimate_size_tokens(fit, added)
        if size is None or size > _compute_limit(fit, ask):
            return fit
        report = fit.report._replace(messages_after=len(messages), tokens_after=size)
        return replace(
            fit,
            raw=rewrite_messages(ask.body, messages),
            estimate=fit.estimate + added,
            report=report,
            compacted_messages=compacted._replace(messages=messages),
        )

    def _finish_search(self, task: asyncio.Task[list[SearchHit]]) -> None:
        self._search_tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        # If this installation cannot search, the proxy has already reported this at its start.
        if error is not None and not isinstance(error, SearchUnavailableError):
            _log_failure(error)

    def _clear_choices(self, _prefix: str) -> None:
        self._choices = LruCache(HELD_BYTES)


def _estimate_size_tokens(fit: FitResult, added_tokens: int) -> int | None:
    """Estimates the size of the request after a text is added, in calibrated tokens.

    `added_tokens` is the size of the text as the proxy counts it, without calibration. Returns None if the
    size is unknown, or if the request would be larger than the client's own request.
    """
    before, after = fit.report.tokens_before, fit.report.tokens_after
    if before is None or after is None or fit.estimate + added_tokens > fit.client_tokens:
        return None
    size = after + math.ceil(added_tokens * after / max(1, fit.estimate))
    return size if size <= before else None


def _compute_limit(fit: FitResult, ask: FitRequest) -> int:
    """Returns the largest size that the request may have after the insertion, in calibrated tokens."""
    window, output = fit.report.window or 0, ask.body.max_output
    return compute_limits(
        ask.settings, ask.strategy, window, output, ask.trigger_tokens
    ).budget.compaction_limit


def _log_failure(error: BaseException) -> None:
    _log.warning(RECALL_FAILED, error=type(error).__name__)
