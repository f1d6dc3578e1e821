"""Auto-recall: what was removed and matches the latest user message is placed right before that message.

What stands there is a message of its own. It is the same for every request of a turn, so that a provider that
has read one has read the beginning of the next, and it is gone with the turn: clients never see it, no round
summarises it, no archive holds it. Whatever goes wrong or takes too long, the request goes on without it.
"""

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any, Final, NamedTuple, Protocol

import structlog

from compaction_proxy.compaction.message_reader import MessageReader
from compaction_proxy.compaction.request_limits import compute_limits
from compaction_proxy.compaction.request_view import build_counting_options
from compaction_proxy.compaction.types import CompactedMessages, FitRequest, FitResult
from compaction_proxy.config.sections import RecallSection
from compaction_proxy.core.digest import format_message_id
from compaction_proxy.core.errors import SearchUnavailableError
from compaction_proxy.core.message import Message, find_latest_user_message
from compaction_proxy.core.repair import alternate_roles
from compaction_proxy.core.search_tool import DATA_NOTICE, Count, QuotedMessage, format_hits
from compaction_proxy.recall.search import Hit
from compaction_proxy.recall.tokenize import STOP_WORDS, parse_query
from compaction_proxy.storage.records import RecordStore
from compaction_proxy.support.fail_open import suppress_and_report
from compaction_proxy.support.log_events import RECALL_FAILED
from compaction_proxy.support.lru import LruCache
from compaction_proxy.wires.body import rewrite_messages

# How long a request waits for a search, in seconds.
DEADLINE_S: Final = 0.15
# A message that asks for less, in words that tell something, says too little to be searched by.
LEAST_WORDS: Final = 2
# Hits that are looked at, and of these placed.
LOOKED_AT: Final = 20
MOST_HITS: Final = 3
# Choices that are held, by the bytes that they take.
HELD_BYTES: Final = 4 * 1024 * 1024
_CHOICE_BYTES: Final = 600
HEADING: Final = (
    "From earlier messages that were removed, for reference: the request is the message after this. "
    f"{DATA_NOTICE}"
)

_log = structlog.get_logger()


class SearchFunction(Protocol):
    """As `ArchiveSearch.search`."""

    def __call__(
        self, tenant: str, conversation: str | None, query: str, limit: int, *, known: AbstractSet[str]
    ) -> Coroutine[Any, Any, list[Hit]]:
        """The best hits, best first."""
        ...


class _RecallKey(NamedTuple):
    """What a choice is made for, once.

    Attributes:
        tenant: Whose it is.
        conversation: Its id.
        prefix: Prefix digest of the latest user message.
        section: What is configured.
    """

    tenant: str
    conversation: str
    prefix: bytes
    section: RecallSection


def build_query(text: str) -> str:
    """What to look for, by what a user said; empty if that tells too little.

    A user who quotes something does not ask for messages with that very quotation.
    """
    query = text.replace('"', " ").replace("*", " ")
    wanted = parse_query(query)
    telling = STOP_WORDS.isdisjoint(wanted.words) and len(wanted.words) >= LEAST_WORDS
    return query if telling or wanted.codes else ""


def build_recall_text(hits: Sequence[Hit], section: RecallSection, count: Count) -> str:
    """What is placed; empty if nothing matches well enough, or has room."""
    good = [hit for hit in hits if hit.score >= section.auto_score][:MOST_HITS]
    shown = [QuotedMessage(hit.message_id, hit.role, hit.snippet, hit.turn, hit.round) for hit in good]
    return format_hits(shown, count, section.auto_tokens, HEADING) if shown else ""


class AutoRecall:
    """Places what matches in requests, on one event loop.

    Args:
        search: Finds it.
        reader: Counts it.
        records: Say when something is forgotten.
        count: Tokens of a text of at most some thousand characters.
        on_search: Told of each search: `auto`, and `found` or `nothing`.
    """

    def __init__(
        self,
        search: SearchFunction,
        reader: MessageReader,
        records: RecordStore,
        count: Count,
        *,
        on_search: Callable[[str, str], None] = lambda _source, _outcome: None,
    ) -> None:
        self._search = search
        self._reader = reader
        self._count = count
        self._on_search = on_search
        self._choices: LruCache[_RecallKey, str] = LruCache(HELD_BYTES)
        self._search_tasks: set[asyncio.Task[list[Hit]]] = set()
        records.on_delete_callbacks.append(self._clear_choices)

    async def __call__(self, fit: FitResult, ask: FitRequest) -> FitResult:
        """The fit with what matches the latest user message before it; as it is where nothing does."""
        put, footing = fit.compacted_messages, fit.usage_basis
        conversation = fit.report.conversation
        if ask.settings.recall.auto == "none" or put is None or footing is None or conversation is None:
            return fit
        with suppress_and_report(_log_failure):
            latest = find_latest_user_message(put.body)
            at = find_latest_user_message(put.messages)
            if latest is None or at is None or put.messages[at].raw != put.body[latest].raw:
                return fit  # it has moved into a stand-in
            turn = _RecallKey(ask.tenant, conversation, footing.prefixes[latest], ask.settings.recall)
            text = await self._choose_text(turn, put, footing.prefixes, put.body[latest].text)
            return await self._insert_text(fit, put, ask, at, text) if text else fit
        return fit

    async def close(self) -> None:
        """End what is still under way."""
        tasks = list(self._search_tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _choose_text(
        self, turn: _RecallKey, put: CompactedMessages, prefixes: Sequence[bytes], user_text: str
    ) -> str:
        """What is placed in this turn, chosen once; empty: nothing."""
        chosen = self._choices  # another's once something is forgotten
        text = chosen.get(turn)
        if text is None:
            query = build_query(user_text)
            hits = await self._find_hits(turn, put, prefixes, query) if query else []
            text = build_recall_text(hits, turn.section, self._count)
            chosen.put(turn, text, len(text) + _CHOICE_BYTES)
        return text

    async def _find_hits(
        self, turn: _RecallKey, put: CompactedMessages, prefixes: Sequence[bytes], query: str
    ) -> list[Hit]:
        """Hits among what is not there any more, or shortened; none if that takes too long.

        The search itself goes on to its end, because it may be what makes the next one quick.
        """
        gone = put.checkpoint.removed_indices | put.checkpoint.edited
        removed = frozenset(format_message_id(prefixes[index]) for index in gone)
        search = self._search(turn.tenant, turn.conversation, query, LOOKED_AT, known=removed)
        task = asyncio.create_task(search)
        self._search_tasks.add(task)
        task.add_done_callback(self._finish_search)
        await asyncio.wait([task], timeout=DEADLINE_S)
        hits = task.result() if task.done() and not task.exception() else []
        found = [hit for hit in hits if hit.message_id in removed]
        self._on_search("auto", "found" if found else "nothing")
        return found

    async def _insert_text(
        self, fit: FitResult, put: CompactedMessages, ask: FitRequest, at: int, text: str
    ) -> FitResult:
        """The fit with the text before its message at `at`, if it has room."""
        dialect = ask.body.wire
        ours = dialect.parse_message(dialect.encode_message(Message(role="user", text=text)))
        messages = (*put.messages[:at], ours, *put.messages[at:])
        if ask.settings.alternation == "strict":
            messages = alternate_roles(messages)
        new = [each for each in messages if not each.tokens]
        added = sum(
            each.tokens for each in await self._reader.add_token_counts(new, build_counting_options(ask))
        )
        size = _estimate_size(fit, added)
        if size is None or size > _compute_limit(fit, ask):
            return fit
        report = fit.report._replace(messages_after=len(messages), tokens_after=size)
        return replace(
            fit,
            raw=rewrite_messages(ask.body, messages),
            estimate=fit.estimate + added,
            report=report,
            compacted_messages=put._replace(messages=messages),
            added_tokens=added,
        )

    def _finish_search(self, task: asyncio.Task[list[Hit]]) -> None:
        self._search_tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, SearchUnavailableError):  # that was said at the start
            _log_failure(error)

    def _clear_choices(self, _prefix: str) -> None:
        self._choices = LruCache(HELD_BYTES)


def _estimate_size(fit: FitResult, added: int) -> int | None:
    """The calibrated size with so many counted tokens more; None where it is larger than what came."""
    after = fit.report.tokens_after
    if after is None or fit.estimate + added > fit.client_tokens:
        return None
    return after + math.ceil(added * after / max(1, fit.estimate))


def _compute_limit(fit: FitResult, ask: FitRequest) -> int:
    """What a request may come to, in calibrated tokens."""
    window, output = fit.report.window or 0, ask.body.max_output
    return compute_limits(ask.settings, ask.strategy, window, output, ask.trigger_tokens).budget.limit


def _log_failure(error: BaseException) -> None:
    _log.warning(RECALL_FAILED, error=type(error).__name__)
