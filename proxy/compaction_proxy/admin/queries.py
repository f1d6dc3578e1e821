"""Queries of the admin API and pages: conversations, compactions, savings, statistics and events.

The queries change no stored data.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from compaction_proxy.compaction.directives import DirectiveStore
from compaction_proxy.compaction.request_view import compute_limits
from compaction_proxy.config.config import Config, get_model_settings
from compaction_proxy.core.cost.price import ModelPrice
from compaction_proxy.core.cost.savings import compute_break_even_requests
from compaction_proxy.core.errors import RequestRefusedError, StoreUnavailableError
from compaction_proxy.core.event import COMPACTED, INSTALLED, SCHEDULED, Event
from compaction_proxy.core.upstream_failure import UpstreamFailure
from compaction_proxy.gateway.identity import list_conversation_ids, map_wires_to_origins
from compaction_proxy.gateway.size_gate import GateLimits, SizeGate
from compaction_proxy.providers.model_limits import ModelLimits
from compaction_proxy.providers.types import PriceSource
from compaction_proxy.providers.windows import FALLBACK_WINDOW, find_shipped_window
from compaction_proxy.recall.round_detail import RoundDetail, RoundDetailReader
from compaction_proxy.storage.keys import derive_client_key_name
from compaction_proxy.storage.records import RecordStore
from compaction_proxy.telemetry.conversation_registry import ConversationRegistry, RegisteredConversation
from compaction_proxy.telemetry.event_history import EventHistory
from compaction_proxy.telemetry.live_feed import FeedItem, LiveFeed
from compaction_proxy.telemetry.statistics import (
    OTHERS,
    ExchangeCounters,
    Grouping,
    Statistics,
    StatisticsRow,
)
from compaction_proxy.telemetry.usage import ExchangeEntry, Totals, UsageStore

# A query that searches, sorts or exports conversations reads only the conversations that were used most
# recently, at most this many. The result leaves out older conversations.
MAX_SCANNED = 1_000
# A search by a client's own id finds a conversation if it is among these, or if its tenant is one of the
# tenants that were active most recently, at most this many.
MAX_SEARCHED_TENANTS = 32
# `list_models` lists the models that clients used within this time, in seconds.
RECENT_MODELS_S = 30 * 86_400.0
# Maximum number of conversations from which the names and labels on a page and the context windows of models
# are taken.
MAX_RECENT_CONVERSATIONS = 200
# Length of a checkpoint id, in bytes.
_PLACE_BYTES = 64
# A model name in the configuration that contains one of these characters is a pattern for several models.
_GLOB = frozenset("*?[")

Sort = Literal["last", "tokens", "net", "requests"]
# State of a compaction. `prepared`: it was made ahead of need, and no request has used it yet. `unused`: it
# was prepared, and a later compaction is in use. `in-use`: the newest one that requests use. `followed`:
# requests have used it, and a later one is in use. `undone`: a user has undone it, or has dropped it with an
# undo.
RoundState = Literal["prepared", "unused", "in-use", "followed", "undone"]


class ListedConversation(NamedTuple):
    """A conversation in a list.

    Attributes:
        id: Id of the conversation.
        totals: Totals of its usage.
        key: Name of the client key to which the conversation belongs, as in the statistics: `k_…`.
    """

    id: str
    totals: Totals
    key: str


class ConversationPage(NamedTuple):
    """A part of a list of conversations.

    Attributes:
        rows: The conversations.
        next: Number of conversations before the next part; None if this part is the last one.
    """

    rows: list[ListedConversation]
    next: int | None


@dataclass(frozen=True, slots=True)
class ConversationFilter:
    """Selects conversations. A conversation must match every attribute. An empty text matches all.

    Attributes:
        text: Part of the id, the model, the label, the stored name or the title, without regard to case, or
            the client's own id.
        session: The client's own id.
        model: Part of the model, without regard to case.
        key: Name of the client key: `k_…`.
        label: Label of the latest labelled request.
        strategy: Strategy of the latest compaction that was applied.
        status: What the proxy did with the last request, such as `reused`.
        since: Earliest time of the last request, in seconds since the epoch.
        until: Latest time of the last request, in seconds since the epoch.
    """

    text: str = ""
    session: str = ""
    model: str = ""
    key: str = ""
    label: str = ""
    strategy: str = ""
    status: str = ""
    since: float = -math.inf
    until: float = math.inf

    def matches(self, row: ListedConversation) -> bool:
        """Returns whether a conversation matches all attributes except `text` and `session`."""
        totals = row.totals
        pairs = (
            (self.key, row.key),
            (self.label, totals.label),
            (self.strategy, totals.strategy),
            (self.status, totals.status),
        )
        return (
            all(wanted in ("", known) for wanted, known in pairs)
            and self.model.casefold() in totals.model.casefold()
            and self.since <= totals.last_at <= self.until
        )

    def contains_text(self, row: ListedConversation) -> bool:
        """Returns whether the id, the model, the label, the name or the title contains `text`."""
        word, totals = self.text.casefold(), row.totals
        texts = (row.id, totals.model, totals.label, totals.name, totals.title)
        return any(word in each.casefold() for each in texts)


ALL_CONVERSATIONS = ConversationFilter()


class CompactionRecord(NamedTuple):
    """A compaction of a conversation, and whether it is worth its cost.

    Attributes:
        event: Event that reports the compaction.
        undone: Whether a user has undone the compaction, so that the proxy no longer applies it.
        pays_back_after: Estimated number of requests after which the compaction has saved as much as it has
            cost. None if the number is unknown or if the compaction never saves its cost.
        state: Whether requests use the compaction.
        used_at: When a request first used it, in seconds since the epoch; None if none has.
    """

    event: Event
    undone: bool
    pays_back_after: float | None
    state: RoundState
    used_at: float | None


class StatisticsReport(NamedTuple):
    """Sums of the exchanges and events in a period.

    Attributes:
        rows: One row for each hour, day, model or client key that has any of them, or a single row for all of
            them.
        total: Sum of all rows.
    """

    rows: tuple[StatisticsRow, ...]
    total: ExchangeCounters


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A model: its context window in tokens, and its prices in dollars per million tokens.

    An unknown price is None. `surcharge_tokens` is the request size, in tokens, above which every token of
    the request costs more; None if there is no such size.
    """

    model: str
    window: int
    # `configured`, `learned`, `upstream` (which has reported it), `table` (the shipped table) or `default`
    window_source: str
    input_usd: float | None
    cached_usd: float | None
    output_usd: float | None
    surcharge_tokens: int | None
    price_source: str | None
    price_date: str | None


async def _write_nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class ConversationQueries:
    """Runs the queries of the admin API. All calls must come from the same event loop.

    A query about one conversation raises `RequestRefusedError` (404) if the conversation is unknown. All
    queries except `list_upstream_failures` raise `StoreUnavailableError` if the store is not reachable.

    Attributes:
        records: The store.
        conversation_registry: Lists conversations and finds their tenants.
        usage: Reads totals and exchanges of conversations.
        history: Reads events of conversations.
        details: Reads details of compactions.
        directives: Reads directives for conversations, such as pins.
        statistics: Reads the sums of all exchanges.
        feed: Live feed, which provides the latest events and exchanges of all conversations.
        pricing: Source of prices.
        model_limits: Knows the context windows that the upstream has reported.
        config: Configuration.
        origin: Origin (scheme, host and port) of the upstream. The queries use the prices of this upstream.
        get_secret: Returns the secret key from which the ids of conversations are derived.
        now: Returns the current time in seconds since the epoch.
        gates: Know up to which size requests pass unread, one for each origin of an upstream.
        flush: Writes what this process has recorded of requests that have ended. Called before each query, so
            that its result includes them.
    """

    records: RecordStore
    conversation_registry: ConversationRegistry
    usage: UsageStore
    history: EventHistory
    details: RoundDetailReader
    directives: DirectiveStore
    statistics: Statistics
    feed: LiveFeed
    pricing: PriceSource
    model_limits: ModelLimits
    config: Config
    origin: str
    get_secret: Callable[[], bytes]
    now: Callable[[], float] = time.time
    gates: Sequence[SizeGate] = ()
    flush: Callable[[], Awaitable[None]] = _write_nothing

    async def list_conversations(
        self,
        limit: int,
        wanted: ConversationFilter = ALL_CONVERSATIONS,
        *,
        offset: int = 0,
        sort: Sort = "last",
    ) -> ConversationPage:
        """Returns conversations with their totals, from the `MAX_SCANNED` most recently used conversations.

        Args:
            limit: Largest number of conversations in the result.
            wanted: Selects conversations.
            offset: Number of conversations at the beginning of the list that are left out.
            sort: Sort key: `last` (time of the last request), `tokens` (input tokens that the upstream
                counted), `net` (net saving in dollars), or `requests` (number of requests). The conversation
                with the largest value comes first. Conversations with an unknown net saving come last.
        """
        stop = offset + limit
        plain = sort == "last" and wanted == ALL_CONVERSATIONS
        seen = await self._list_recent(min(stop + 1, MAX_SCANNED) if plain else MAX_SCANNED)
        named = await self._find_sessions(wanted.text, seen) if wanted.text else {}
        tenants = (
            await self._find_sessions(wanted.session, seen)
            if wanted.session
            else {each.id: each.tenant for each in seen} | named
        )
        rows, seen_at = await self._read_totals(tenants), {each.id: each.last_at for each in seen}
        for each in rows:  # the figures of the last requests may be lost, for example with a restored backup
            each.totals.last_at = each.totals.last_at or seen_at.get(each.id, 0.0)
        matches = [
            each for each in rows if wanted.matches(each) and (each.id in named or wanted.contains_text(each))
        ]
        matches.sort(key=lambda each: _get_sort_key(each.totals, sort), reverse=True)
        return ConversationPage(matches[offset:stop], stop if stop < len(matches) else None)

    async def get_gate_limits(self, conversation: str, model: str) -> GateLimits | None:
        """Returns the current limits for requests of a conversation for a model; None without a gate.

        If there are several gates, uses the one whose upstream has answered the conversation's tenant.
        """
        tenant = await self._find_tenant(conversation)
        gates = [each for each in self.gates if len(self.gates) == 1 or await each.has_learned(tenant, model)]
        return next((each.get_limits(tenant, model) for each in (*gates, *self.gates)), None)

    async def list_exchanges(self, conversation: str, limit: int) -> list[ExchangeEntry]:
        """Returns the newest exchanges of a conversation, at most `limit`, oldest first."""
        return await self.usage.list_exchanges(await self._find_tenant(conversation), conversation, limit)

    async def list_compactions(self, conversation: str) -> list[CompactionRecord]:
        """Returns the compactions of a conversation, oldest first."""
        return await self._build_compactions(await self._find_tenant(conversation), conversation)

    async def get_compaction(self, conversation: str, place: str) -> tuple[CompactionRecord, RoundDetail]:
        """Returns a compaction with its details.

        Args:
            conversation: Id of the conversation.
            place: Id of the compaction's checkpoint (`Event.place`), as hex digits.

        Raises:
            RequestRefusedError: If the conversation is unknown or has no such compaction (404).
        """
        tenant, at = await self._find_tenant(conversation), _parse_checkpoint_id(place)
        detail = await self.details.find_detail(tenant, conversation, at) if at else None
        if detail is None:
            raise _build_no_compaction_error()
        records = await self._build_compactions(tenant, conversation)
        record = next((each for each in records if each.event.place == detail.event.place), None)
        if record is None:  # deleted meanwhile
            raise _build_no_compaction_error()
        return record, detail

    async def get_statistics(
        self, since: float, until: float, by: Grouping, *, model: str = "", key: str = ""
    ) -> StatisticsReport:
        """Returns the sums of all exchanges in a period.

        Args:
            since: Start of the period, in seconds since the epoch.
            until: End of the period, in seconds since the epoch. The sums include the whole of each hour that
                the period overlaps.
            by: What each row covers: an hour, a day, a model, a client key, or all exchanges (`total`).
            model: Name of the only model to count; empty for all.
            key: Name of the only client key to count (`k_…`); empty for all.
        """
        await self.check_store()
        rows = await self.statistics.list_rows(since, until, by, model=model, key=key)
        total = ExchangeCounters()
        for row in rows:
            total.add_counters(row.counters)
        return StatisticsReport(tuple(rows), total)

    async def list_recent_conversations(self) -> list[ListedConversation]:
        """Returns the conversations that were used most recently, at most `MAX_RECENT_CONVERSATIONS`."""
        seen = await self._list_recent(MAX_RECENT_CONVERSATIONS)
        return await self._read_totals({each.id: each.tenant for each in seen})

    async def list_recent_items(self, limit: int, *, failures: bool = False) -> list[FeedItem]:
        """Returns the latest events of all conversations, at most `limit`, newest first.

        If `failures` is true, returns only events that report a failure.
        """
        await self.check_store()
        return await self.feed.list_recent_events(limit, failures=failures)

    async def list_upstream_failures(self, since: float, until: float) -> tuple[list[UpstreamFailure], bool]:
        """Returns the failures of upstreams in a period, and whether all reads of the store succeeded.

        The latest failure comes first. If a read of the store failed, the list may contain only failures
        that this process has counted.

        Args:
            since: Start of the period, in seconds since the epoch.
            until: End of the period, in seconds since the epoch.
        """
        failed_before = self.records.failed_reads
        failures = await self.statistics.list_upstream_failures(since, until)
        return failures, self.records.failed_reads == failed_before

    async def list_models(self) -> list[ModelRow]:
        """Returns the models that are configured by name or were used in the last 30 days, sorted by name."""
        await self.check_store()
        rows = await self.statistics.list_rows(self.now() - RECENT_MODELS_S, self.now(), "model")
        seen = {row.label for row in rows} - {"", OTHERS[0]}
        named = {name for name in self.config.models if _GLOB.isdisjoint(name)}
        used: dict[str, int] = {}
        for each in await self.list_recent_conversations():
            if each.totals.window:
                used.setdefault(each.totals.model, each.totals.window)
        origins = map_wires_to_origins(self.config.upstream).values()
        discovered = await self.model_limits.list_discovered_windows(*origins)
        return [
            build_model_row(
                self.config,
                name,
                self.pricing.get_price(name, self.origin),
                used.get(name),
                discovered.get(name),
            )
            for name in sorted(seen | named)
        ]

    async def iter_conversations(
        self,
    ) -> AsyncIterator[tuple[ListedConversation, list[ExchangeEntry], list[Event]]]:
        """Yields at most `MAX_SCANNED` conversations, each with its exchanges and events.

        The most recently used conversation comes first. The method reads one conversation at a time, to save
        memory.
        """
        for seen in await self._list_recent(MAX_SCANNED):
            [totals] = await self.usage.read_totals([(seen.tenant, seen.id)])
            exchanges = await self.usage.list_exchanges(seen.tenant, seen.id, MAX_SCANNED)
            yield (
                ListedConversation(seen.id, totals, derive_client_key_name(seen.tenant)),
                exchanges,
                await self.history.list_events(seen.tenant, seen.id),
            )

    async def _build_compactions(self, tenant: str, conversation: str) -> list[CompactionRecord]:
        [totals] = await self.usage.read_totals([(tenant, conversation)])
        undone = {place.hex() for place in (await self.directives.get(tenant, conversation)).undone}
        events = await self.history.list_events(tenant, conversation)
        installed_at = {event.place: event.at for event in events if event.kind == INSTALLED}
        records: list[CompactionRecord] = []
        is_followed = False  # whether a later compaction is in use
        for event in reversed([event for event in events if event.kind == COMPACTED]):
            is_used = event.outcome != SCHEDULED
            state = _find_round_state(is_used, event.place in undone, is_followed)
            is_followed = is_followed or state == "in-use"
            used_at = installed_at.get(event.place, event.at) if is_used else None
            records.append(
                CompactionRecord(
                    event, event.place in undone, self._estimate_payback(event, totals), state, used_at
                )
            )
        return records[::-1]

    def _estimate_payback(self, event: Event, totals: Totals) -> float | None:
        """Returns the estimated number of requests after which a compaction has saved what it has cost.

        Returns None if the number is unknown, or if the compaction never saves its cost.
        """
        before, after = event.tokens_before, event.tokens_real or event.tokens_after
        if before is None or after is None:
            return None
        price = self.pricing.get_price(event.asked or totals.model, self.origin)
        paid = event.cost_usd if event.calls else 0.0
        caches = 1.0 if totals.cached_tokens else 0.0
        return compute_break_even_requests(before, after, price, summary_usd=paid, cached_share=caches)

    async def _find_sessions(self, session: str, seen: Sequence[RegisteredConversation]) -> dict[str, str]:
        """Returns the conversations that their clients call `session`: their ids, each with its tenant.

        `seen` are the conversations that were used most recently, the latest first. Their tenants are
        searched. The client's own ids are not stored, so the method derives the ids that such conversations
        would have.
        """
        secret, section = self.get_secret(), self.config.session
        tenants = list(dict.fromkeys(each.tenant for each in seen))

        def derive_ids() -> dict[str, str]:
            return {
                each: tenant
                for tenant in tenants
                for each in list_conversation_ids(section, secret, tenant, session)
            }

        derived = await asyncio.to_thread(derive_ids)
        searched, known = set(tenants[:MAX_SEARCHED_TENANTS]), {each.id for each in seen}
        named = {each: tenant for each, tenant in derived.items() if tenant in searched or each in known}
        return {each.id: named[each.id] for each in await self._read_totals(named) if each.totals.requests}

    async def _read_totals(self, tenants: Mapping[str, str]) -> list[ListedConversation]:
        """Reads the totals of conversations. `tenants` maps the id of each conversation to its tenant."""
        totals = await self.usage.read_totals([(tenant, each) for each, tenant in tenants.items()])
        return [
            ListedConversation(each, used, derive_client_key_name(tenant))
            for (each, tenant), used in zip(tenants.items(), totals, strict=True)
        ]

    async def _list_recent(self, limit: int) -> list[RegisteredConversation]:
        await self.check_store()
        return await self.conversation_registry.list_recent(limit)

    async def _find_tenant(self, conversation: str) -> str:
        await self.check_store()
        tenant = await self.conversation_registry.find_tenant(conversation)
        if tenant is None:
            raise RequestRefusedError(404, "This conversation does not exist.", "conversation_not_found")
        return tenant

    async def check_store(self) -> None:
        """Raises `StoreUnavailableError` if the store is not reachable. Otherwise calls `flush`.

        An endpoint with a streamed response calls this method first, because the status of a response cannot
        change after the response has begun.
        """
        if not await self.records.open():
            raise StoreUnavailableError("store-failed", "the store is not reachable")
        await self.flush()


def _find_round_state(is_used: bool, is_undone: bool, is_followed: bool) -> RoundState:  # noqa: FBT001
    if is_undone:
        return "undone"
    if is_used:
        return "followed" if is_followed else "in-use"
    return "unused" if is_followed else "prepared"


def estimate_hard_mark(config: Config, totals: Totals) -> int | None:
    """Estimates the request size, in tokens, from which compactions are made in spite of an undo.

    The exact size depends on the next request: on its output limit, and on the parts that no compaction
    removes. Returns None if the context window is unknown or if no compaction is made automatically.
    """
    if not totals.window:
        return None
    limits = compute_limits(get_model_settings(config, totals.model), None, totals.window, None, None)
    return limits.marks.hard_tokens if limits.is_automatic else None


def build_model_row(
    config: Config,
    name: str,
    price: ModelPrice | None,
    last_window: int | None = None,
    discovered_window: int | None = None,
) -> ModelRow:
    """Builds the row of a model. Its prices are those of requests that are too small for a surcharge.

    Args:
        config: The configuration.
        name: Name of the model.
        price: Prices of the model; None if they are unknown.
        last_window: Context window, in tokens, that the proxy used for the last request to the model; None if
            unknown.
        discovered_window: Context window, in tokens, that the upstream has reported; None if there is none.
    """
    configured, shipped = get_model_settings(config, name).window, find_shipped_window(name)
    supposed = window = shipped or FALLBACK_WINDOW
    source = "table" if shipped else "default"
    if configured is not None:
        window, source = configured, "configured"
    elif last_window not in {None, supposed, discovered_window}:
        window, source = last_window or supposed, "learned"
    elif discovered_window is not None:
        window, source = discovered_window, "upstream"
    least = price.tiers[0] if price else None
    return ModelRow(
        model=name,
        window=window,
        window_source=source,
        input_usd=least.input if least else None,
        cached_usd=least.cached if least else None,
        output_usd=least.output if least else None,
        surcharge_tokens=price.surcharge_tokens if price else None,
        price_source=price.source if price else None,
        price_date=(price.date or None) if price else None,
    )


def _get_sort_key(totals: Totals, sort: Sort) -> tuple[float, float]:
    """Returns the sort key of a conversation: the value of `sort`, then the time of the last request."""
    net = totals.net_usd
    by: dict[Sort, float] = {
        "last": totals.last_at,
        "tokens": totals.prompt_tokens,
        "net": -math.inf if net is None else net,
        "requests": totals.requests,
    }
    return by[sort], totals.last_at


def _build_no_compaction_error() -> RequestRefusedError:
    return RequestRefusedError(404, "This compaction does not exist.", "compaction_not_found")


def _parse_checkpoint_id(digits: str) -> bytes | None:
    try:
        place = bytes.fromhex(digits)
    except ValueError:
        return None
    return place if len(place) == _PLACE_BYTES else None
