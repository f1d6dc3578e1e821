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

from compaction_proxy.compaction.message_reader import Reading
from compaction_proxy.compaction.request_limits import terms_for
from compaction_proxy.compaction.request_view import gauge_of
from compaction_proxy.compaction.types import Ask, Fit, Forwarded
from compaction_proxy.config.sections import RecallSection
from compaction_proxy.core.digest import message_id
from compaction_proxy.core.errors import SearchUnavailable
from compaction_proxy.core.message import Message, latest_user
from compaction_proxy.core.repair import alternate
from compaction_proxy.core.search_tool import DATA, Count, Remembered, hits_text
from compaction_proxy.recall.search import Hit
from compaction_proxy.recall.tokenize import STOP_WORDS, asked
from compaction_proxy.storage.records import Records
from compaction_proxy.support.fail_open import contained
from compaction_proxy.support.log_events import RECALL_FAILED
from compaction_proxy.support.lru import Lru
from compaction_proxy.wires.body import write

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
    f"From earlier messages that were removed, for reference: the request is the message after this. {DATA}"
)

_log = structlog.get_logger()


class Search(Protocol):
    """As `Recall.search`."""

    def __call__(
        self, tenant: str, conversation: str | None, query: str, limit: int, *, known: AbstractSet[str]
    ) -> Coroutine[Any, Any, list[Hit]]:
        """The best hits, best first."""
        ...


class _Turn(NamedTuple):
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


def query_of(text: str) -> str:
    """What to look for, by what a user said; empty if that tells too little.

    A user who quotes something does not ask for messages with that very quotation.
    """
    query = text.replace('"', " ").replace("*", " ")
    wanted = asked(query)
    telling = STOP_WORDS.isdisjoint(wanted.words) and len(wanted.words) >= LEAST_WORDS
    return query if telling or wanted.codes else ""


def text_of(hits: Sequence[Hit], section: RecallSection, count: Count) -> str:
    """What is placed; empty if nothing matches well enough, or has room."""
    good = [hit for hit in hits if hit.score >= section.auto_score][:MOST_HITS]
    shown = [Remembered(hit.message_id, hit.role, hit.snippet, hit.turn, hit.round) for hit in good]
    return hits_text(shown, count, section.auto_tokens, HEADING) if shown else ""


class Reminder:
    """Places what matches in requests, on one event loop.

    Args:
        search: Finds it.
        reading: Counts it.
        records: Say when something is forgotten.
        count: Tokens of a text of at most some thousand characters.
        searched: Told of each search: `auto`, and `found` or `nothing`.
    """

    def __init__(
        self,
        search: Search,
        reading: Reading,
        records: Records,
        count: Count,
        *,
        searched: Callable[[str, str], None] = lambda _source, _outcome: None,
    ) -> None:
        self._search = search
        self._reading = reading
        self._count = count
        self._searched = searched
        self._chosen: Lru[_Turn, str] = Lru(HELD_BYTES)
        self._searching: set[asyncio.Task[list[Hit]]] = set()
        records.forgetters.append(self._forget)

    async def __call__(self, fit: Fit, ask: Ask) -> Fit:
        """The fit with what matches the latest user message before it; as it is where nothing does."""
        put, footing = fit.forwarded, fit.footing
        conversation = fit.report.conversation
        if ask.settings.recall.auto == "none" or put is None or footing is None or conversation is None:
            return fit
        with contained(_failed):
            latest = latest_user(put.body)
            at = latest_user(put.messages)
            if latest is None or at is None or put.messages[at].raw != put.body[latest].raw:
                return fit  # it has moved into a stand-in
            turn = _Turn(ask.tenant, conversation, footing.prefixes[latest], ask.settings.recall)
            text = await self._choice(turn, put, footing.prefixes, put.body[latest].text)
            return await self._placed(fit, put, ask, at, text) if text else fit
        return fit

    async def close(self) -> None:
        """End what is still under way."""
        tasks = list(self._searching)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _choice(self, turn: _Turn, put: Forwarded, prefixes: Sequence[bytes], said: str) -> str:
        """What is placed in this turn, chosen once; empty: nothing."""
        chosen = self._chosen  # another's once something is forgotten
        text = chosen.get(turn)
        if text is None:
            query = query_of(said)
            hits = await self._hits(turn, put, prefixes, query) if query else []
            text = text_of(hits, turn.section, self._count)
            chosen.put(turn, text, len(text) + _CHOICE_BYTES)
        return text

    async def _hits(self, turn: _Turn, put: Forwarded, prefixes: Sequence[bytes], query: str) -> list[Hit]:
        """Hits among what is not there any more, or shortened; none if that takes too long.

        The search itself goes on to its end, because it may be what makes the next one quick.
        """
        gone = put.checkpoint.gone | put.checkpoint.edited
        removed = frozenset(message_id(prefixes[index]) for index in gone)
        search = self._search(turn.tenant, turn.conversation, query, LOOKED_AT, known=removed)
        task = asyncio.create_task(search)
        self._searching.add(task)
        task.add_done_callback(self._done)
        await asyncio.wait([task], timeout=DEADLINE_S)
        hits = task.result() if task.done() and not task.exception() else []
        found = [hit for hit in hits if hit.message_id in removed]
        self._searched("auto", "found" if found else "nothing")
        return found

    async def _placed(self, fit: Fit, put: Forwarded, ask: Ask, at: int, text: str) -> Fit:
        """The fit with the text before its message at `at`, if it has room."""
        dialect = ask.body.dialect
        ours = dialect.message(dialect.compose(Message(role="user", text=text)))
        messages = (*put.messages[:at], ours, *put.messages[at:])
        if ask.settings.alternation == "strict":
            messages = alternate(messages)
        new = [each for each in messages if not each.tokens]
        added = sum(each.tokens for each in await self._reading.counted(new, gauge_of(ask)))
        size = _size(fit, added)
        if size is None or size > _limit(fit, ask):
            return fit
        report = fit.report._replace(messages_after=len(messages), tokens_after=size)
        return replace(
            fit,
            raw=write(ask.body, messages),
            estimate=fit.estimate + added,
            report=report,
            forwarded=put._replace(messages=messages),
            added=added,
        )

    def _done(self, task: asyncio.Task[list[Hit]]) -> None:
        self._searching.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, SearchUnavailable):  # that was said at the start
            _failed(error)

    def _forget(self, _prefix: str) -> None:
        self._chosen = Lru(HELD_BYTES)


def _size(fit: Fit, added: int) -> int | None:
    """The calibrated size with so many counted tokens more; None where it is larger than what came."""
    after = fit.report.tokens_after
    if after is None or fit.estimate + added > fit.listed:
        return None
    return after + math.ceil(added * after / max(1, fit.estimate))


def _limit(fit: Fit, ask: Ask) -> int:
    """What a request may come to, in calibrated tokens."""
    window, output = fit.report.window or 0, ask.body.max_output
    return terms_for(ask.settings, ask.strategy, window, output, ask.trigger_tokens).budget.limit


def _failed(error: BaseException) -> None:
    _log.warning(RECALL_FAILED, error=type(error).__name__)
