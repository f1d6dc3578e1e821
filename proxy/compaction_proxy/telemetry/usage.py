"""Collects the usage of conversations (totals and exchanges) in memory, and writes it periodically.

To write, a process takes a lease on the conversation's record, reads the stored totals, adds its own and
writes the sum. The lease ensures that processes that serve the same conversation do not overwrite each
other's sums. The process writes the exchanges together with the totals that include them.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain, zip_longest
from operator import attrgetter
from typing import Any, NamedTuple

from compaction_proxy.core import exchange as exchanges_of
from compaction_proxy.core.cost.savings import Saving
from compaction_proxy.core.errors import StoreUnavailableError
from compaction_proxy.core.event import COMPACTED, MEASURED, Event, parse_integer, parse_number
from compaction_proxy.core.exchange import Exchange
from compaction_proxy.storage.keys import conversation_key, exchanges_key, lease_key
from compaction_proxy.storage.records import ListItem, RecordStore

# Maximum number of conversations whose usage may wait to be written, and the largest part of it that one
# tenant may use. `UsageStore` drops exchanges of further conversations.
MAX_WAITING = 10_000
TENANT_SHARE = 0.75
# A flush begins no write after this many seconds. The next flush begins with the tenants that have waited
# longest, so that a tenant with very many conversations delays others only a little.
FLUSH_LIMIT_S = 0.5
# Number of conversations that a flush writes at the same time. It is less than the number of calls that the
# store gets at a time (`storage.resilient`), so that requests do not wait for all writes.
WRITES_AT_ONCE = 2
# Each exchange is stored as a line. These are the maximum number of lines of a conversation that may wait to
# be written, and the maximum number that the store keeps. If there are more, the oldest lines are dropped.
# The totals still include their exchanges.
MAX_LINES = 32
KEPT_LINES = 1_000
# Seconds after which a lease that was not released ends, so that another process may take it.
LEASE_S = 5.0
# When this process ends, another process may hold the lease of a conversation, or the store may be suspended
# after a slow call. This process therefore tries several times to write its usage before it drops the usage.
# These are the number of attempts, and the pause between two attempts, in seconds. After `CLOSE_LIMIT_S`
# seconds no write begins any more, because the server limits the time of a shutdown.
LAST_TRIES = 20
LAST_TRY_INTERVAL_S = 0.05
CLOSE_LIMIT_S = 2.5
# Age of a lease, in seconds, after which the holder no longer starts a write. It is well below `LEASE_S`, so
# that even a slow write ends before another process can get the lease.
LEASE_SAFE_S = 2.5


# Names of the fields that contain dollars, in both `Totals` and `statistics.ExchangeCounters`.
DOLLARS = ("cost_usd", "gross_usd", "cache_loss_usd", "summary_usd")
# Fields of `Totals` that are sums over exchanges and events. Each other field has the value of the latest
# exchange for which it is known.
SUMMED = (
    "requests", "request_bytes", "prompt_tokens", "completion_tokens", "cached_tokens", "recalls", "rounds",
    "counted", "sent_tokens", "read_tokens", "summary_tokens", "priced", "failed", *DOLLARS,
)  # fmt: skip
_LATEST = (
    "model", "status", "strategy", "label", "failure", "tokens_before", "tokens_after", "trigger", "window",
)  # fmt: skip
_get_latest = attrgetter(*_LATEST)


class ExchangeEntry(NamedTuple):
    """An exchange and its saving, with its tenant and conversation.

    Attributes:
        tenant: Tenant of the exchange.
        conversation: Conversation of the exchange; None if it is unknown.
        exchange: Figures of the exchange.
        saving: Saving of the exchange; None if it is unknown.
    """

    tenant: str
    conversation: str | None
    exchange: Exchange
    saving: Saving | None


class Caption(NamedTuple):
    """By what people recognise a conversation in a list.

    Attributes:
        name: The client's own id; empty if it is unknown or must not be stored.
        title: The beginning of the latest user message; empty if it is unknown or must not be stored.
    """

    name: str = ""
    title: str = ""


NO_CAPTION = Caption()


def to_line(entry: ExchangeEntry) -> dict[str, Any]:
    """Returns an exchange and its saving as JSON values, by name. Leaves out unknown values."""
    values = exchanges_of.to_fields(entry.exchange)
    return values if entry.saving is None else {**values, "saving": entry.saving._asdict()}


def _parse_saving(stored: object) -> Saving | None:
    if not isinstance(stored, dict):
        return None
    values = [parse_number(stored.get(name)) for name in Saving._fields]
    known = [value for value in values if value is not None]
    return Saving(*known) if len(known) == len(values) else None


def _parse_text(value: object) -> str | None:
    return value if isinstance(value, str) else None


_PARSERS: Mapping[Any, Callable[[object], Any]] = {
    int: parse_integer, int | None: parse_integer, float: parse_number, str: _parse_text,
}  # fmt: skip


def parse_figures(record: type, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the numbers and texts in `stored` that belong to fields of the dataclass `record`, by name.

    Leaves out invalid values.
    """
    kinds = {each.name: each.type for each in fields(record) if each.name in stored and each.type in _PARSERS}
    parsed = {name: _PARSERS[kind](stored[name]) for name, kind in kinds.items()}
    return {name: value for name, value in parsed.items() if value is not None}


@dataclass(slots=True)
class Totals:
    """Usage of a conversation. The class is mutable, because each request adds to the usage.

    Attributes:
        model: Model of the latest request whose model is known; empty if there was none.
        status: What the proxy did with the last request (`Exchange.status`).
        strategy: Strategy of the latest request to which a compaction was applied; empty if there was none.
        label: Label of the latest request that has one (`Exchange.label`); empty if there was none.
        name: The client's own id of the conversation (`Caption.name`).
        title: The beginning of the latest user message (`Caption.title`).
        requests: Number of requests.
        request_bytes: Total size of the request bodies, as the client sent them, in bytes.
        prompt_tokens: Input tokens, as the upstream counted them.
        completion_tokens: Output tokens, as the upstream counted them.
        cached_tokens: Input tokens that the upstream had cached.
        recalls: Number of further replies that the model gave after it had searched removed messages.
        rounds: Number of compactions.
        counted: Number of requests whose sizes are known (`Exchange.sizes`).
        sent_tokens: Tokens of these requests as the client sent them.
        read_tokens: Tokens of the same requests as the upstream read them.
        summary_tokens: Input tokens of summary calls.
        priced: Number of requests whose price is known.
        failed: Number of requests that the upstream answered with an error status, or did not answer.
        failure: Why the last of them failed (`Exchange.failure`); empty if there was none.
        cost_usd: Cost of the requests whose price is known, in dollars. Summaries are not included.
        gross_usd: Additional dollars that the same requests would have cost without compaction.
        cache_loss_usd: Additional dollars that the same requests cost because compaction broke prompt caches.
        summary_usd: Cost of summaries, in dollars.
        tokens_before: Tokens of the latest request that the proxy counted, as the client sent it; None if no
            request was counted.
        tokens_after: Tokens of the latest request that the proxy counted, as it was forwarded; None if no
            request was counted.
        trigger: T for the latest request that the proxy read, in tokens; None if unknown.
        window: Context window of the model of that request, in tokens; None if unknown.
        last_at: Time of the last request, in seconds since the epoch.
    """

    model: str = ""
    status: str = ""
    strategy: str = ""
    label: str = ""
    name: str = ""
    title: str = ""
    requests: int = 0
    request_bytes: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    recalls: int = 0
    rounds: int = 0
    counted: int = 0
    sent_tokens: int = 0
    read_tokens: int = 0
    summary_tokens: int = 0
    priced: int = 0
    failed: int = 0
    failure: str = ""
    cost_usd: float = 0.0
    gross_usd: float = 0.0
    cache_loss_usd: float = 0.0
    summary_usd: float = 0.0
    tokens_before: int | None = None
    tokens_after: int | None = None
    trigger: int | None = None
    window: int | None = None
    last_at: float = 0.0

    @property
    def gross_tokens(self) -> int | None:
        """Tokens that the client sent and the upstream did not read; None if no request is counted."""
        return self.sent_tokens - self.read_tokens if self.counted else None

    @property
    def net_tokens(self) -> int | None:
        """`gross_tokens` less the input tokens of summary calls; None if no request is counted."""
        return self.sent_tokens - self.read_tokens - self.summary_tokens if self.counted else None

    @property
    def net_usd(self) -> float | None:
        """Gross saving less cache loss and the cost of summaries, in dollars; None if no price is known."""
        return self.gross_usd - self.cache_loss_usd - self.summary_usd if self.priced else None

    def add_entry(self, entry: ExchangeEntry) -> None:
        """Adds the figures of one request, and its cost and saving if they are known."""
        exchange, saving = entry.exchange, entry.saving
        self.requests += 1
        self.request_bytes += exchange.request_bytes
        self.prompt_tokens += exchange.prompt_tokens or 0
        self.completion_tokens += exchange.completion_tokens or 0
        self.cached_tokens += exchange.cached_tokens or 0
        self.recalls += exchange.recalls or 0
        if (sizes := exchange.sizes) is not None:
            self.counted += 1
            self.sent_tokens += sizes[0]
            self.read_tokens += sizes[1]
        self.failed += bool(exchange.failure)
        if saving is not None:
            self.priced += 1
            self.cost_usd += saving.cost
            self.gross_usd += saving.gross
            self.cache_loss_usd += saving.cache_loss
        self._update_latest(exchange, exchange.at)

    def add_totals(self, other: "Totals") -> None:
        """Adds the figures of `other` that are sums.

        Replaces the other figures, such as `model`, by those of `other` if these are at least as recent.
        """
        for name in SUMMED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.set_caption(other.name, other.title)
        self._update_latest(other, other.last_at)

    def set_caption(self, name: str, title: str) -> None:
        """Replaces the name and the title by those of these that are not empty."""
        self.name, self.title = name or self.name, title or self.title

    def _update_latest(self, source: "Exchange | Totals", at: float) -> None:
        """Copies the known figures that are not sums, such as `model`, from `source`, whose time is `at`.

        If a figure is already known here, replaces it only if `at` is not before `last_at`.
        """
        is_later = at >= self.last_at
        for name, value in zip(_LATEST, _get_latest(source), strict=True):
            if value is None or value == "":
                continue
            if is_later or getattr(self, name) in (None, ""):
                setattr(self, name, value)
        self.last_at = max(at, self.last_at)


def to_fields(totals: Totals) -> dict[str, Any]:
    """Returns the totals as JSON values, by name. Leaves out values that are None."""
    values = {each.name: getattr(totals, each.name) for each in fields(totals)}
    return {name: value for name, value in values.items() if value is not None}


def from_fields(stored: Mapping[str, Any] | None) -> Totals:
    """Restores totals from stored fields. A missing or invalid value gets the default of its field."""
    return Totals(**parse_figures(Totals, stored or {}))


@dataclass(slots=True)
class _PendingUsage:
    """Usage of one conversation that is not written yet.

    Attributes:
        lines_key: Store key of the conversation's list of exchanges.
        totals: Sums of all exchanges that are not written yet.
        entries: The newest of these exchanges, at most `MAX_LINES`.
    """

    lines_key: str
    totals: Totals = field(default_factory=Totals)
    entries: deque[ExchangeEntry] = field(default_factory=lambda: deque(maxlen=MAX_LINES))


def get_entry_time(entry: ExchangeEntry) -> float:
    """Returns the time at which an exchange began, in seconds since the epoch."""
    return entry.exchange.at


class UsageStore:
    """Collects and writes the usage of conversations. Not thread-safe: use it on one event loop.

    No method raises an error if the store fails.

    Args:
        records: Store for totals and exchanges.
        ttl_s: Seconds for which the store keeps the records of a conversation after their last write.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self, records: RecordStore, ttl_s: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._records = records
        self._ttl_s = ttl_s
        self._clock = clock
        # The pending usage of each tenant's conversations, by store key. The tenant whose usage was written
        # last is at the end.
        self._pending: dict[str, dict[str, _PendingUsage]] = {}
        self._pending_count = 0
        records.on_delete_callbacks.append(self._forget_prefix)

    @property
    def pending_requests(self) -> int:
        """Number of exchanges whose usage is pending."""
        return sum(each.totals.requests for pending in self._pending.values() for each in pending.values())

    def add_entry(
        self, conversation: str, entry: ExchangeEntry, start_mark: int | None, caption: Caption = NO_CAPTION
    ) -> bool:
        """Adds an exchange to the pending usage of its conversation. Returns False if it drops the exchange.

        Drops the exchange if the usage of too many conversations of all tenants (`MAX_WAITING`) or of this
        tenant (`TENANT_SHARE`) waits to be written, or if the conversation was deleted after the request
        began.

        Args:
            conversation: Id of the conversation.
            entry: The exchange and its saving.
            start_mark: Number of deletions that this process had made when the request began
                (`storage.deletions`); None if unknown.
            caption: By what people recognise the conversation.
        """
        waiting = self._get_or_create_pending(entry.tenant, conversation, start_mark)
        if waiting is None:
            return False
        waiting.totals.add_entry(entry)
        waiting.totals.set_caption(*caption)
        waiting.entries.append(entry)
        return True

    def on_event(self, tenant: str, event: Event) -> None:
        """Adds the compaction that an event reports, its tokens and its cost to the conversation's totals.

        Ignores events that report no compaction and have neither tokens nor a cost. This is an
        `EventListener`.
        """
        paid, made, tokens = event.cost_usd or 0.0, event.kind == COMPACTED, event.prompt_tokens or 0
        if event.kind == MEASURED or not event.conversation or not (paid or made or tokens):
            return
        waiting = self._get_or_create_pending(
            tenant, event.conversation, self._records.deletion_fence.get_start_mark()
        )
        if waiting is not None:
            waiting.totals.summary_usd += paid
            waiting.totals.summary_tokens += tokens
            waiting.totals.rounds += made

    async def flush(self, limit_s: float = FLUSH_LIMIT_S) -> None:
        """Writes pending usage, and begins no write after `limit_s` seconds. Tenants take turns.

        The usage of a conversation also stays pending if another process holds the lease on its record.
        """
        until = self._clock() + limit_s
        turns = self._iter_turns()

        async def write_in_turn() -> None:
            for tenant, key in turns:
                if not self._records.is_in_use or self._clock() > until:
                    return  # the other usage stays pending
                with self._records.deletion_fence.scoped_start_mark():
                    await self._write_under_lease(tenant, key)

        await asyncio.gather(*(write_in_turn() for _ in range(WRITES_AT_ONCE)))

    async def close(self) -> None:
        """Writes the pending usage. Keeps usage that it cannot write within `CLOSE_LIMIT_S` seconds.

        Gives up after about a second if another process holds the leases, or if the store does not answer.
        """
        until = self._clock() + CLOSE_LIMIT_S
        for _ in range(LAST_TRIES):
            await self.flush(until - self._clock())
            if not self._pending or self._clock() > until:
                return
            await asyncio.sleep(LAST_TRY_INTERVAL_S)

    async def list_exchanges(self, tenant: str, conversation: str, limit: int) -> list[ExchangeEntry]:
        """Returns the newest stored exchanges of a conversation, at most `limit`, oldest first."""
        lines = await self._records.read_tail(exchanges_key(tenant, conversation), limit)
        return [
            ExchangeEntry(tenant, conversation, exchange, _parse_saving(line.get("saving")))
            for line in lines
            if (exchange := exchanges_of.from_fields(line)) is not None
        ]

    async def read_totals(self, conversations: Sequence[tuple[str, str]]) -> list[Totals]:
        """Returns the stored totals of conversations, in the order of `conversations`.

        Each conversation is given as its tenant and its id. If the totals of a conversation are not stored
        or cannot be read, returns zeros for it.
        """
        keys = [conversation_key(tenant, conversation) for tenant, conversation in conversations]
        stored = await self._records.get_many(keys, bypass_cache=True) if keys else []
        return [from_fields(fields) for fields in stored]

    def _get_or_create_pending(
        self, tenant: str, conversation: str, start_mark: int | None
    ) -> _PendingUsage | None:
        """Returns the pending usage of a conversation, to which the caller then adds figures.

        Returns None if the conversation was deleted after the request began (`start_mark`), or if the usage
        of too many other conversations is pending (`MAX_WAITING`, `TENANT_SHARE`).
        """
        key = conversation_key(tenant, conversation)
        if self._records.deletion_fence.is_deleted_since(key, start_mark):
            return None
        pending = self._pending.get(tenant, {})
        waiting = pending.get(key)
        if (
            waiting is None
            and len(pending) < TENANT_SHARE * MAX_WAITING
            and self._pending_count < MAX_WAITING
        ):
            self._pending_count += 1
            waiting = pending[key] = _PendingUsage(exchanges_key(tenant, conversation))
            self._pending[tenant] = pending
        return waiting

    def _iter_turns(self) -> Iterator[tuple[str, str]]:
        """Yields the tenant and the store key of all pending usage: one of each tenant, then the next one."""
        tenants = [[(tenant, key) for key in pending] for tenant, pending in self._pending.items()]
        return filter(None, chain.from_iterable(zip_longest(*tenants)))

    async def _write_under_lease(self, tenant: str, key: str) -> None:
        begun = self._clock()
        try:
            lease = await self._records.acquire_lease(lease_key(key), LEASE_S)
            if lease is not None:
                try:
                    await self._write_pending(tenant, key, begun + LEASE_SAFE_S)
                finally:
                    await self._records.release_lease(lease)
        except StoreUnavailableError:
            return  # the store has reported the error, and the usage stays pending

    async def _write_pending(self, tenant: str, key: str, until: float) -> None:
        [held] = await self._records.get_many([key], bypass_cache=True)
        if self._records.deletion_fence.is_deleted(
            key
        ):  # `held` may be outdated; usage added since the deletion waits for the next flush
            return
        if key not in self._pending.get(tenant, {}) or self._clock() > until:
            return
        waiting = self._remove_pending(tenant, key)
        # The usage is no longer pending even if the write fails: missing usage is better than usage that is
        # counted twice.
        totals = from_fields(held)
        totals.add_totals(waiting.totals)
        lines = [
            ListItem(waiting.lines_key, to_line(entry), self._ttl_s, KEPT_LINES)
            for entry in sorted(waiting.entries, key=get_entry_time)
        ]
        await self._records.overwrite(key, to_fields(totals), ttl_s=self._ttl_s, other_items=lines)

    def _remove_pending(self, tenant: str, key: str) -> _PendingUsage:
        """Returns usage that then is no longer pending. The tenant's other usage moves to the end."""
        pending = self._pending.pop(tenant)
        waiting = pending.pop(key)
        self._pending_count -= 1
        if pending:
            self._pending[tenant] = pending
        return waiting

    def _forget_prefix(self, prefix: str) -> None:
        for tenant, pending in list(self._pending.items()):
            for key in [key for key in pending if key.startswith(prefix)]:
                self._remove_pending(tenant, key)
