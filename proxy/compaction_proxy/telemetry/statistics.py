"""Adds up all exchanges and events by hour, model and client key, and stores and reads the sums.

Every process has its own record in the store for each hour, and always writes the whole record. Processes
therefore never overwrite each other's counts, and a repeated write does no harm. A process that reads
statistics adds up the records of all processes, and caches the sums of hours that ended some time ago. The
statistics contain model names and digests of client keys, but no data of a single conversation. They
therefore stay in the store when a conversation is deleted. The module counts failures of upstreams
separately, by target and cause.
"""

import asyncio
import math
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from itertools import groupby
from operator import add
from secrets import token_hex
from typing import Any, Literal, NamedTuple

from compaction_proxy.core.event import (
    COMPACTED,
    FAILED_OPEN,
    FAILURE_KINDS,
    MEASURED,
    Event,
    is_shortened,
    parse_integer,
)
from compaction_proxy.core.upstream_failure import (
    UpstreamFailure,
    UpstreamFailures,
    add_failures,
    failures_to_fields,
    format_status_cause,
    parse_failures,
)
from compaction_proxy.storage.keys import (
    day_statistics_prefix,
    derive_client_key_name,
    hourly_counts_key,
    statistics_writers_key,
)
from compaction_proxy.storage.records import Fields, ListItem, RecordItem, RecordStore
from compaction_proxy.support.lru import LruCache
from compaction_proxy.telemetry.usage import DOLLARS, ExchangeEntry, parse_figures

HOUR_S = 3_600
HOURS_OF_A_DAY = 24
DAY_S = 86_400
# For each hour, a process has one set of counters for each pair of a model and a client key. This is the
# maximum number of pairs. A process counts all further pairs together, as `OTHERS`.
MAX_PAIRS = 500
OTHERS = ("other", "other")
# A process writes the record of an hour less often if the record has more than `SMALL_PAIRS` sets of counters
# (of pairs or of failures), because such a write takes longer. The pause after each write is `PAUSE_S`
# seconds for each set beyond `SMALL_PAIRS`.
SMALL_PAIRS = 50
PAUSE_S = 0.02
# Maximum number of hours whose counters stay in memory. If the store fails for so long that there
# would be more, a process drops the oldest hours, although it has not written them.
MAX_WAITING_HOURS = 48
# The store has a list, for each day, of the processes that have written records. This is the maximum number
# of processes in such a list. If there are more, the oldest entries are dropped, and the sums leave out the
# records of those processes.
MAX_WRITERS = 1_000
# Seconds after the end of an hour during which a process still adds late exchanges to the hour. After that,
# it drops the hour from its memory as soon as it has written the hour.
SETTLE_S = 900.0
# Seconds for which a process caches the sums of an hour. It caches only hours that ended more than twice
# `SETTLE_S` ago, because other processes may still add to hours that ended later.
CACHE_TTL_S = 3_600.0
# A query leaves out all hours that ended more than this many seconds ago.
MAX_READ_S = 400.0 * DAY_S
CACHE_BYTES = 8 * 1024 * 1024
# Approximate memory, in bytes, for one cached set of counters.
PAIR_BYTES = 1_000
# Maximum number of days that one query reads from the store at the same time.
DAYS_AT_ONCE = 4
_WRITER_BYTES = 8

Grouping = Literal["hour", "day", "model", "key", "total"]
# For each hour, a process counts the failures of each pair of an upstream and a cause separately. This is the
# maximum number of pairs. A process counts the failures of all further pairs together, as `OTHERS`.
MAX_FAILURES = 500


# Upper bounds, in seconds, of the buckets that count exchanges by their overhead: the time that the proxy
# itself took. One more bucket counts the exchanges above the last bound.
OVERHEAD_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_BUCKETS = len(OVERHEAD_BOUNDS_S) + 1
COUNTS = (
    "requests", "failed", "tokens_before", "tokens_after", "prompt_tokens", "completion_tokens",
    "cached_tokens", "rounds", "failures", "summary_calls", "summary_prompt_tokens",
    "summary_completion_tokens", "uncounted", "unpriced", "unpriced_summary_calls", "failed_open_compacted",
)  # fmt: skip
# Names of the counters that are dicts of numbers by a word, such as a status.
COUNTS_BY_WORD = ("statuses", "failed_open_reasons", "failure_kinds")
# Names of the counters that are histograms of overhead.
HISTOGRAMS = ("overhead", "waiting_overhead")


@dataclass(slots=True)
class ExchangeCounters:
    """Sums of exchanges and events. The class is mutable, because every request adds to the sums.

    Attributes:
        requests: Number of exchanges.
        statuses: Number of exchanges by `Exchange.status`, which says what the proxy did with the request.
        failed: Number of exchanges that the upstream answered with an error status, or did not answer.
        tokens_before: Tokens of the requests as clients sent them (`Exchange.sizes`).
        tokens_after: Tokens of the same requests as upstreams read them.
        prompt_tokens: Input tokens, as upstreams counted them.
        completion_tokens: Output tokens, as upstreams counted them.
        cached_tokens: Input tokens that upstreams had cached.
        rounds: Number of compactions.
        failures: Number of events that report a failure: a compaction was due and not made, or a request was
            forwarded unchanged because of a fault of the proxy, or was forwarded although it was too long.
        summary_calls: Number of calls of summary models.
        summary_prompt_tokens: Input tokens of summary calls.
        summary_completion_tokens: Output tokens of summary calls.
        failed_open_reasons: Number of exchanges that failed open, by `Exchange.reason`.
        failed_open_compacted: Number of exchanges that failed open, and to which earlier compactions still
            applied.
        failure_kinds: The events in `failures` by `Event.kind`. Earlier versions have not stored it.
        uncounted: Number of exchanges that are not in `tokens_before` and `tokens_after`, because their sizes
            are unknown.
        unpriced: Number of exchanges whose cost is unknown. Failed exchanges are not included.
        unpriced_summary_calls: Number of calls of summary models whose cost is unknown.
        cost_usd: Cost of the exchanges whose price is known, in dollars. Summaries are not included.
        gross_usd: Additional dollars that the same exchanges would have cost without compaction.
        cache_loss_usd: Additional dollars that the same exchanges cost because compaction broke prompt
            caches.
        summary_usd: Cost of summaries, in dollars.
        last_at: Time of the latest exchange, in seconds since the epoch; 0 if there is none.
        overhead: Number of exchanges in each bucket of overhead, which is the time of an exchange without the
            wait for the upstream. There is one bucket for each upper bound in `OVERHEAD_BOUNDS_S`. A bucket
            includes its bound. A last bucket counts the exchanges above all bounds.
        waiting_overhead: The same for the exchanges that waited for a compaction
            (`Exchange.has_waited_for_round`). They are in `overhead`, too.
    """

    requests: int = 0
    failed: int = 0
    tokens_before: int = 0
    tokens_after: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    rounds: int = 0
    failures: int = 0
    summary_calls: int = 0
    summary_prompt_tokens: int = 0
    summary_completion_tokens: int = 0
    uncounted: int = 0
    unpriced: int = 0
    unpriced_summary_calls: int = 0
    failed_open_compacted: int = 0
    cost_usd: float = 0.0
    gross_usd: float = 0.0
    cache_loss_usd: float = 0.0
    summary_usd: float = 0.0
    last_at: float = 0.0
    statuses: dict[str, int] = field(default_factory=dict)
    failed_open_reasons: dict[str, int] = field(default_factory=dict)
    failure_kinds: dict[str, int] = field(default_factory=dict)
    overhead: list[int] = field(default_factory=lambda: [0] * _BUCKETS)
    waiting_overhead: list[int] = field(default_factory=lambda: [0] * _BUCKETS)

    @property
    def own_overhead(self) -> list[int]:
        """The histogram of the exchanges that did not wait for a compaction."""
        pairs = zip(self.overhead, self.waiting_overhead, strict=True)
        return [max(0, count - waiting) for count, waiting in pairs]

    @property
    def failed_open(self) -> int:
        """The number of exchanges that failed open."""
        return self.statuses.get(FAILED_OPEN, 0)

    @property
    def read_tokens(self) -> int:
        """The tokens that upstreams and summary models read."""
        return self.tokens_after + self.summary_prompt_tokens

    @property
    def net_tokens(self) -> int:
        """The tokens that clients sent, less those that upstreams and summary models read."""
        return self.tokens_before - self.tokens_after - self.summary_prompt_tokens

    @property
    def net_usd(self) -> float:
        """The gross saving less cache loss and the cost of summaries, in dollars."""
        return self.gross_usd - self.cache_loss_usd - self.summary_usd

    def add_entry(self, entry: ExchangeEntry) -> None:
        """Adds the figures of one exchange, and its cost and saving if they are known."""
        exchange, saving = entry.exchange, entry.saving
        self.requests += 1
        self.failed += bool(exchange.failure)
        self.last_at = max(self.last_at, exchange.at)
        sizes = exchange.sizes
        if sizes is None:
            self.uncounted += 1
        else:
            self.tokens_before += sizes[0]
            self.tokens_after += sizes[1]
        self.prompt_tokens += exchange.prompt_tokens or 0
        self.completion_tokens += exchange.completion_tokens or 0
        self.cached_tokens += exchange.cached_tokens or 0
        self.statuses[exchange.status] = self.statuses.get(exchange.status, 0) + 1
        if exchange.status == FAILED_OPEN:
            self.failed_open_reasons[exchange.reason] = self.failed_open_reasons.get(exchange.reason, 0) + 1
            self.failed_open_compacted += is_shortened(exchange.tokens_before, exchange.tokens_after)
        bucket = bisect_left(OVERHEAD_BOUNDS_S, exchange.overhead_s)
        self.overhead[bucket] += 1
        self.waiting_overhead[bucket] += exchange.has_waited_for_round
        if saving is not None:
            self.cost_usd += saving.cost
            self.gross_usd += saving.gross
            self.cache_loss_usd += saving.cache_loss
        elif not exchange.failure:
            self.unpriced += 1

    def add_event(self, event: Event) -> None:
        """Adds the figures of one event, unless it only reports an upstream's token count (`MEASURED`)."""
        if event.kind == MEASURED:
            return
        self.rounds += event.kind == COMPACTED
        if event.kind in FAILURE_KINDS:
            self.failures += 1
            self.failure_kinds[event.kind] = self.failure_kinds.get(event.kind, 0) + 1
        self.summary_calls += event.calls or 0
        self.summary_prompt_tokens += event.prompt_tokens or 0
        self.summary_completion_tokens += event.completion_tokens or 0
        self.summary_usd += event.cost_usd or 0.0
        self.unpriced_summary_calls += (event.calls or 0) if event.cost_usd is None else 0

    def add_counters(self, other: "ExchangeCounters") -> None:
        """Adds all counts and dollar amounts of `other`. Keeps the later of the two times."""
        self.last_at = max(self.last_at, other.last_at)
        for name in COUNTS + DOLLARS:
            more = getattr(other, name)
            if more:
                setattr(self, name, getattr(self, name) + more)
        for name in COUNTS_BY_WORD:
            counts = getattr(self, name)
            for word, count in getattr(other, name).items():
                counts[word] = counts.get(word, 0) + count
        for name in HISTOGRAMS:
            setattr(self, name, list(map(add, getattr(self, name), getattr(other, name))))

    def compute_overhead_quantile_s(self, share: float) -> float | None:
        """Returns the overhead, in seconds, that this `share` (0 to 1) of the exchanges does not exceed."""
        return compute_quantile_s(self.overhead, share)


def compute_quantile_s(histogram: Sequence[int], share: float) -> float | None:
    """Returns the overhead, in seconds, that this `share` (0 to 1) of the exchanges does not exceed.

    `histogram` has the number of exchanges in each bucket. Returns None if there are none. The result is
    interpolated within a bucket. It is at most the last bound, even if exchanges have a higher overhead.
    """
    wanted = share * sum(histogram)
    low, passed = 0.0, 0
    for bound, count in zip(OVERHEAD_BOUNDS_S, histogram, strict=False):
        if count and passed + count >= wanted:
            return low + (bound - low) * (wanted - passed) / count
        low, passed = bound, passed + count
    return OVERHEAD_BOUNDS_S[-1] if sum(histogram) else None


def to_fields(counters: ExchangeCounters) -> dict[str, Any]:
    """Returns the counters as JSON values, by name. Leaves out counters that are zero."""
    values = {each.name: getattr(counters, each.name) for each in fields(counters)}
    return {name: value for name, value in values.items() if value and (name not in HISTOGRAMS or any(value))}


def from_fields(stored: Mapping[str, Any]) -> ExchangeCounters:
    """Restores counters from stored fields. A missing or invalid value counts as 0."""
    counters = ExchangeCounters(**parse_figures(ExchangeCounters, stored))
    for name in COUNTS_BY_WORD:
        counts = stored.get(name)
        if isinstance(counts, Mapping):
            setattr(counters, name, {str(word): parse_integer(count) or 0 for word, count in counts.items()})
    if counters.requests and not counters.last_at:
        # An earlier version has written the fields. It left out the tokens of requests that it did not read,
        # and did not count these requests. All of them have this status.
        counters.uncounted = counters.statuses.get("none", 0)
    for name in HISTOGRAMS:
        histogram = stored.get(name)
        if isinstance(histogram, list) and len(histogram) == _BUCKETS and set(map(type, histogram)) == {int}:
            setattr(counters, name, histogram)
    return counters


@dataclass(frozen=True, slots=True)
class HourCounters:
    """Counters of one hour, from one or more processes.

    Attributes:
        pairs: A set of counters for each pair of a model and a client key.
        failures: The failures of upstreams, by upstream and cause.
    """

    pairs: dict[tuple[str, str], ExchangeCounters] = field(default_factory=dict)
    failures: UpstreamFailures = field(default_factory=dict)

    @property
    def entry_count(self) -> int:
        """Number of sets of counters: the entries of `pairs` and the entries of `failures`."""
        return len(self.pairs) + len(self.failures)


class StatisticsRow(NamedTuple):
    """Counters and their label: an hour (`2026-11-22T13`, UTC), a day, a model, a client key, or `total`."""

    label: str
    counters: ExchangeCounters


def _format_time(hour: int, pattern: str = "%Y-%m-%d") -> str:
    return datetime.fromtimestamp(hour * HOUR_S, UTC).strftime(pattern)


def _format_row_label(by: Grouping, hour: int, pair: tuple[str, str]) -> str:
    if by in {"hour", "day"}:
        return _format_time(hour, "%Y-%m-%dT%H" if by == "hour" else "%Y-%m-%d")
    return {"model": pair[0], "key": pair[1]}.get(by, by)


def _merge_hours(hours: Iterable[HourCounters]) -> HourCounters:
    """Adds up the counters of several processes for the same hour."""
    merged = HourCounters()
    for hour in hours:
        add_failures(merged.failures, hour.failures.values())
        for pair, counters in hour.pairs.items():
            merged.pairs.setdefault(pair, ExchangeCounters()).add_counters(counters)
    return merged


def _encode_hour(hour: HourCounters) -> Fields:
    pairs = hour.pairs.items()
    rows = [{"model": model, "key": key, **to_fields(counters)} for (model, key), counters in pairs]
    failures = failures_to_fields(hour.failures.values())
    return {"rows": rows, **({"upstream_failures": failures} if failures else {})}


def _parse_hour(fields: Fields) -> HourCounters:
    rows, hour = fields.get("rows"), HourCounters()
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, dict):
            hour.pairs[str(row.get("model", "")), str(row.get("key", ""))] = from_fields(row)
    add_failures(hour.failures, parse_failures(fields.get("upstream_failures")))
    return hour


class Statistics:
    """Counts exchanges and events, and stores and reads the sums. Not thread-safe: use it on one event loop.

    No method raises an error if the store fails.

    Args:
        records: Store for the counters.
        ttl_s: Seconds for which the store keeps the record of an hour after its last write.
        now: Returns the seconds since the epoch.
    """

    def __init__(self, records: RecordStore, ttl_s: float, now: Callable[[], float] = time.time) -> None:
        self._records = records
        self._ttl_s = ttl_s
        self._now = now
        self._writer = token_hex(_WRITER_BYTES)
        self._own_hours: dict[
            int, HourCounters
        ] = {}  # hours to which this process may still add exchanges, or which it has to write
        self._unwritten: set[int] = set()
        self._due: dict[int, float] = {}  # time from which an hour may be written again
        self._listed: set[str] = set()  # days whose list of writers contains this process
        self._cached_hours: LruCache[int, tuple[float, HourCounters]] = LruCache(CACHE_BYTES)
        self._flushing = asyncio.Lock()

    def add_entries(self, entries: Iterable[ExchangeEntry]) -> None:
        """Counts exchanges, each in the hour in which it began.

        Counts an exchange that began more than `SETTLE_S` seconds ago as if it had begun `SETTLE_S` seconds
        ago.
        """
        now = self._now()
        for entry in entries:
            exchange = entry.exchange
            self._get_or_create_counters(exchange.at, exchange.model, entry.tenant, now).add_entry(entry)

    def on_event(self, tenant: str, event: Event) -> None:
        """Counts one event under the model that its conversation uses. This is an `EventListener`."""
        self._get_or_create_counters(event.at, event.asked, tenant, self._now()).add_event(event)

    def record_upstream_failure(self, target: str, cause: str, error: str = "") -> None:
        """Counts a failure of an upstream (`target`) in the current hour.

        `error` is what the upstream calls the error; empty if unknown.
        """
        now = self._now()
        failures = self._get_own_hour(int(now // HOUR_S)).failures
        if (target, cause) not in failures and len(failures) >= MAX_FAILURES:
            target, cause = OTHERS
        add_failures(failures, [UpstreamFailure(target, cause, 1, now, (error,) if error else ())])

    def add_failure_details(self, target: str, entry: ExchangeEntry) -> None:
        """Adds the model and the conversation of a failed exchange to the failures of the current hour.

        Does nothing if no failure of this upstream (`target`) with this cause was counted in the hour.
        """
        exchange = entry.exchange
        cause = format_status_cause(exchange.code) if exchange.has_failed else exchange.error
        number = int(self._now() // HOUR_S)
        hour = self._own_hours.get(number)
        if hour is not None and (target, cause) in hour.failures:
            models = (exchange.model,) if exchange.model else ()
            last_at = hour.failures[target, cause].last_at
            add_failures(
                hour.failures,
                [UpstreamFailure(target, cause, 0, last_at, (), models, entry.conversation or "")],
            )
            self._unwritten.add(number)

    async def flush(self, *, force: bool = False) -> None:
        """Writes the counters of each hour to the store if they have changed since their last write.

        If `force` is false, skips an hour with many counters until the pause after its last write is over
        (`PAUSE_S`).
        """
        async with self._flushing:
            for hour in sorted(self._unwritten):
                if not self._records.is_in_use:
                    return  # the other hours stay unwritten until the store answers again
                if not force and self._due.get(hour, 0.0) > self._now():
                    continue
                self._unwritten.discard(hour)
                if not await self._write_hour(hour):
                    self._unwritten.add(hour)
            self._drop_old_hours()

    async def list_rows(
        self, since: float, until: float, by: Grouping, *, model: str = "", key: str = ""
    ) -> list[StatisticsRow]:
        """Returns the sums of all hours that the period from `since` to `until` overlaps.

        The result has one row for each label, and is sorted by label.

        Args:
            since: Start of the period, in seconds since the epoch. The method has no data of hours that ended
                more than `ttl_s` or `MAX_READ_S` seconds ago.
            until: End of the period, in seconds since the epoch.
            by: What each row sums up: an hour, a day, a model, a client key, or everything (`total`).
            model: Name of the only model to count; empty for all.
            key: Name of the only client key to count (`k_…`); empty for all.
        """
        sums: dict[str, ExchangeCounters] = {}
        async for number, hour in self._iter_hours(since, until):
            for pair, counters in hour.pairs.items():
                if model not in {"", pair[0]} or key not in {"", pair[1]}:
                    continue
                sums.setdefault(_format_row_label(by, number, pair), ExchangeCounters()).add_counters(
                    counters
                )
        return [StatisticsRow(label, sums[label]) for label in sorted(sums)]

    async def list_upstream_failures(self, since: float, until: float) -> list[UpstreamFailure]:
        """Returns the failures of upstreams in all hours that the period from `since` to `until` overlaps.

        There is one entry for each pair of an upstream and a cause. The latest failure comes first.
        `since` and `until` are in seconds since the epoch.
        """
        failures: UpstreamFailures = {}
        async for _, hour in self._iter_hours(since, until):
            add_failures(failures, hour.failures.values())
        return sorted(failures.values(), key=lambda each: each.last_at, reverse=True)

    def _get_or_create_counters(self, at: float, model: str, tenant: str, now: float) -> ExchangeCounters:
        # If `at` is more than `SETTLE_S` seconds ago, this process may have dropped that hour from memory
        # already. The exchange or event then counts in the hour of `SETTLE_S` seconds ago.
        pairs = self._get_own_hour(int(max(at, now - SETTLE_S) // HOUR_S)).pairs
        pair = (model, derive_client_key_name(tenant))
        counters = pairs.get(pair)
        if counters is None:
            pair = pair if len(pairs) < MAX_PAIRS else OTHERS
            counters = pairs.setdefault(pair, ExchangeCounters())
        return counters

    def _get_own_hour(self, number: int) -> HourCounters:
        """Returns this process's counters of an hour, and records that the hour must be written."""
        self._unwritten.add(number)
        if number not in self._own_hours:
            self._own_hours[number] = HourCounters()
        return self._own_hours[number]

    async def _write_hour(self, number: int) -> bool:
        day = _format_time(number)
        items: list[RecordItem | ListItem] = [
            RecordItem(
                hourly_counts_key(day, number % HOURS_OF_A_DAY, self._writer),
                _encode_hour(self._own_hours[number]),
                self._ttl_s,
            )
        ]
        if day not in self._listed:
            items.append(
                ListItem(statistics_writers_key(day), {"writer": self._writer}, self._ttl_s, MAX_WRITERS)
            )
        written = await self._records.write(items)
        if written:
            self._listed.add(day)
            self._due[number] = self._now() + PAUSE_S * max(
                0, self._own_hours[number].entry_count - SMALL_PAIRS
            )
        return written

    async def _iter_hours(self, since: float, until: float) -> AsyncIterator[tuple[int, HourCounters]]:
        """Yields the number (hours since the epoch) and the sums of each hour of the period, oldest first."""
        first = int(max(since, self._now() - min(self._ttl_s, MAX_READ_S)) // HOUR_S)
        last = math.ceil(min(until, self._now() + DAY_S) / HOUR_S)
        days = [list(hours) for _, hours in groupby(range(first, last), _format_time)]
        for start in range(0, len(days), DAYS_AT_ONCE):
            for counted in await asyncio.gather(
                *map(self._load_hours_of_day, days[start : start + DAYS_AT_ONCE])
            ):
                for hour in sorted(counted):
                    yield hour, counted[hour]

    async def _load_hours_of_day(self, hours: Sequence[int]) -> dict[int, HourCounters]:
        """Returns the sums over all processes for `hours`, which are hours of the same day.

        Takes the sums of an hour from the cache. If they are not there, adds up the records in the store and
        the counters in this process's memory.
        """
        now = self._now()
        known = {hour: held[1] for hour in hours if (held := self._cached_hours.get(hour)) and held[0] > now}
        asked = [hour for hour in hours if hour not in known]
        unanswered = self._records.failed_reads
        stored = await self._read_stored_hours(asked) if asked else []
        is_whole = self._records.failed_reads == unanswered
        for hour in asked:
            parts = [part for at, part in stored if at == hour]
            known[hour] = _merge_hours([*parts, self._own_hours.get(hour) or HourCounters()])
            if is_whole and (hour + 1) * HOUR_S + 2 * SETTLE_S < now:
                self._cached_hours.put(
                    hour, (now + CACHE_TTL_S, known[hour]), PAIR_BYTES * (known[hour].entry_count + 1)
                )
        return known

    async def _read_stored_hours(self, hours: Sequence[int]) -> list[tuple[int, HourCounters]]:
        """Reads the records of all processes for `hours`, which are hours of the same day.

        Leaves out this process's own records of hours that it has in memory.
        """
        day = _format_time(hours[0])
        lines = await self._records.read_tail(statistics_writers_key(day), MAX_WRITERS)
        writers = {writer for line in lines if isinstance(writer := line.get("writer"), str)}
        asked = [
            (hour, writer)
            for hour in hours
            for writer in sorted(writers)
            if writer != self._writer or hour not in self._own_hours
        ]
        keys = [hourly_counts_key(day, hour % HOURS_OF_A_DAY, writer) for hour, writer in asked]
        found = await self._records.get_many(keys, bypass_cache=True) if keys else []
        # The next line removes these records from the cache of `RecordStore`. There they would displace
        # records that requests need.
        self._records.evict_cached_prefix(day_statistics_prefix(day))
        return [(hour, _parse_hour(fields)) for (hour, _), fields in zip(asked, found, strict=True) if fields]

    def _drop_old_hours(self) -> None:
        """Frees the memory of hours that ended more than `SETTLE_S` seconds ago and are already written.

        If more than `MAX_WAITING_HOURS` hours remain, also drops the oldest, even if they are not written.
        """
        settled = int((self._now() - SETTLE_S) // HOUR_S)
        for number in [each for each in self._own_hours if each < settled and each not in self._unwritten]:
            del self._own_hours[number]
        for number in sorted(self._own_hours)[:-MAX_WAITING_HOURS]:
            del self._own_hours[number]
            self._unwritten.discard(number)
        self._due = {number: due for number, due in self._due.items() if number in self._own_hours}
        self._listed &= {_format_time(number) for number in self._own_hours}
