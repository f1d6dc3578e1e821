"""Statistics: what all exchanges come to, by hour, model and key, whoever has relayed them.

Every process overwrites records of its own, one for each hour, so nothing is lost between workers or
replicas, and a write that is made twice does no harm. Reading sums over all processes; hours that are long
over are held. What stands here is of no conversation: it outlives those that are deleted, and so do the
names of models and the digests of keys in it. Failures of upstreams are counted beside the exchanges, by
target and cause.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import groupby
from secrets import token_hex
from typing import Literal, NamedTuple

from compaction_proxy.core.event import Event
from compaction_proxy.core.upstream_failure import (
    UpstreamFailure,
    UpstreamFailures,
    add_failures,
    failures_to_fields,
    parse_failures,
)
from compaction_proxy.storage.keys import client_key_name, day_prefix, hours_key, writers_key
from compaction_proxy.storage.records import Fields, ListItem, RecordItem, RecordStore
from compaction_proxy.support.lru import LruCache
from compaction_proxy.telemetry.counters import ExchangeCounters, from_fields, to_fields
from compaction_proxy.telemetry.exchange_batch import ExchangeBatch, ExchangeEntry

HOUR_S = 3_600
HOURS_OF_A_DAY = 24
DAY_S = 86_400
# Pairs of a model and a key that one process counts apart in an hour; more than that are counted together.
MAX_PAIRS = 500
OTHERS = ("other", "other")
# An hour of more pairs than this is written again only after so many seconds for each of them.
SMALL_PAIRS = 50
PAUSE_S = 0.02
# Hours that may wait for a store that is away.
MAX_WAITING_HOURS = 48
# Processes of one day that are read.
MAX_WRITERS = 1_000
# An hour may still be written for so long after its end: by a process whose store was away.
SETTLED_S = 900.0
# Hours that are over are held for so long.
HELD_S = 3_600.0
MAX_READ_S = 400.0 * DAY_S
HELD_BYTES = 8 * 1024 * 1024
# What holding one pair of an hour takes, about.
PAIR_BYTES = 1_000
DAYS_AT_ONCE = 4
_WRITER_BYTES = 8

By = Literal["hour", "day", "model", "key", "total"]
# Pairs of a target and a cause that one process counts apart in an hour; more are counted together.
MAX_FAILURES = 500


@dataclass(frozen=True, slots=True)
class HourCounters:
    """What one or more processes have counted in an hour.

    Attributes:
        pairs: Counters by model and tenant.
        failures: Failures of upstreams, by target and cause.
    """

    pairs: dict[tuple[str, str], ExchangeCounters] = field(default_factory=dict)
    failures: UpstreamFailures = field(default_factory=dict)

    @property
    def entry_count(self) -> int:
        """How many things are counted apart."""
        return len(self.pairs) + len(self.failures)


class StatisticsRow(NamedTuple):
    """Counters, and what they are of: an hour (`2026-11-22T13`, UTC), a day, a model, a key, or `total`."""

    label: str
    counters: ExchangeCounters


def _format_day(hour: int) -> str:
    return datetime.fromtimestamp(hour * HOUR_S, UTC).strftime("%Y-%m-%d")


def _format_row_label(by: By, hour: int, pair: tuple[str, str]) -> str:
    if by in {"hour", "day"}:
        at = datetime.fromtimestamp(hour * HOUR_S, UTC)
        return at.strftime("%Y-%m-%dT%H" if by == "hour" else "%Y-%m-%d")
    return {"model": pair[0], "key": pair[1]}.get(by, by)


def _merge_hours(ours: HourCounters, others: Iterable[HourCounters]) -> HourCounters:
    """The sum of what processes have counted; `others` are added to in place, ours are not."""
    found = HourCounters()
    for hour in others:
        add_failures(found.failures, hour.failures.values())
        for pair, counters in hour.pairs.items():
            if pair in found.pairs:
                found.pairs[pair].add_counters(counters)
            else:
                found.pairs[pair] = counters
    add_failures(found.failures, ours.failures.values())
    for pair, counters in ours.pairs.items():
        found.pairs.setdefault(pair, ExchangeCounters()).add_counters(counters)
    return found


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
    """Counts, writes and reads, on one event loop. No method raises because of the store.

    Args:
        records: Where they are kept.
        ttl_s: Seconds that an hour is kept.
        now: Seconds since the epoch.
    """

    def __init__(self, records: RecordStore, ttl_s: float, now: Callable[[], float] = time.time) -> None:
        self._records = records
        self._ttl_s = ttl_s
        self._now = now
        self._writer = token_hex(_WRITER_BYTES)
        self._own_hours: dict[
            int, HourCounters
        ] = {}  # the hours that this process may still add to, or has to write
        self._unwritten: set[int] = set()
        self._due: dict[int, float] = {}  # when an hour may be written again
        self._listed: set[str] = set()  # days among whose writers this process is
        self._cached_hours: LruCache[int, tuple[float, HourCounters]] = LruCache(HELD_BYTES)
        self._flushing = asyncio.Lock()

    def add_entries(self, entries: Iterable[ExchangeEntry]) -> None:
        """Count exchanges in the hours that they came in."""
        now = self._now()
        for tenant, _, exchange, saving in entries:
            counters = self._get_counters(exchange.at, exchange.model, tenant, now)
            counters.add_exchange(exchange)
            if saving is not None:
                counters.add_price(saving.cost, saving.gross, saving.cache_loss)
            elif not exchange.has_failed:
                counters.unpriced += 1

    def add_batch(self, batch: ExchangeBatch) -> None:
        """Count exchanges that were not read, in the hour of the last."""
        self._get_counters(batch.columns.at[-1], batch.model, batch.tenant, self._now()).add_batch(batch)

    def on_event(self, tenant: str, event: Event) -> None:
        """Count one event, under the model that the conversation asks (an `announcing.Listener`)."""
        self._get_counters(event.at, event.asked, tenant, self._now()).add_event(event)

    def record_upstream_failure(self, target: str, cause: str) -> None:
        """Count a failure of an upstream that happens now."""
        now = self._now()
        failures = self._get_own_hour(int(now // HOUR_S)).failures
        if (target, cause) not in failures and len(failures) >= MAX_FAILURES:
            target, cause = OTHERS
        add_failures(failures, [UpstreamFailure(target, cause, 1, now)])

    async def flush(self, *, at_last: bool = False) -> None:
        """Write the hours that have changed; large ones less often, but `at_last`."""
        async with self._flushing:
            for hour in sorted(self._unwritten):
                if not self._records.is_in_use:
                    return  # the rest waits until the store is back
                if not at_last and self._due.get(hour, 0.0) > self._now():
                    continue
                self._unwritten.discard(hour)
                if not await self._write_hour(hour):
                    self._unwritten.add(hour)
            self._drop_old_hours()

    async def list_rows(self, since: float, until: float, by: By) -> list[StatisticsRow]:
        """What the hours that lie in `[since, until)`, if only in part, come to, in the order of names.

        Args:
            since: Seconds since the epoch; not more than `ttl_s` ago has any effect.
            until: Seconds since the epoch.
            by: What a row is of.
        """
        found: dict[str, ExchangeCounters] = {}
        async for number, hour in self._iter_hours(since, until):
            for pair, counters in hour.pairs.items():
                found.setdefault(_format_row_label(by, number, pair), ExchangeCounters()).add_counters(
                    counters
                )
        return [StatisticsRow(of, found[of]) for of in sorted(found)]

    async def list_upstream_failures(self, since: float, until: float) -> list[UpstreamFailure]:
        """Failures of upstreams in the hours of `list_rows`; the one that happened last comes first."""
        found: UpstreamFailures = {}
        async for _, hour in self._iter_hours(since, until):
            add_failures(found, hour.failures.values())
        return sorted(found.values(), key=lambda each: each.last_at, reverse=True)

    def _get_counters(self, at: float, model: str, tenant: str, now: float) -> ExchangeCounters:
        # What came longer ago is counted later: what was written of that hour is not held any more.
        pairs = self._get_own_hour(int(max(at, now - SETTLED_S) // HOUR_S)).pairs
        pair = (model, client_key_name(tenant))
        counters = pairs.get(pair)
        if counters is None:
            pair = pair if len(pairs) < MAX_PAIRS else OTHERS
            counters = pairs.setdefault(pair, ExchangeCounters())
        return counters

    def _get_own_hour(self, number: int) -> HourCounters:
        """An hour of our own that is about to be added to."""
        hour = self._own_hours.get(number)
        if hour is None:
            hour = self._own_hours[number] = HourCounters()
        self._unwritten.add(number)
        return hour

    async def _write_hour(self, number: int) -> bool:
        day = _format_day(number)
        items: list[RecordItem | ListItem] = [
            RecordItem(
                hours_key(day, number % HOURS_OF_A_DAY, self._writer),
                _encode_hour(self._own_hours[number]),
                self._ttl_s,
            )
        ]
        if day not in self._listed:
            items.append(ListItem(writers_key(day), {"writer": self._writer}, self._ttl_s, MAX_WRITERS))
        written = await self._records.write(items)
        if written:
            self._listed.add(day)
            self._due[number] = self._now() + PAUSE_S * max(
                0, self._own_hours[number].entry_count - SMALL_PAIRS
            )
        return written

    async def _iter_hours(self, since: float, until: float) -> AsyncIterator[tuple[int, HourCounters]]:
        """The hours of these times of which anything is known, oldest first."""
        first = int(max(since, self._now() - min(self._ttl_s, MAX_READ_S)) // HOUR_S)
        last = math.ceil(min(until, self._now() + DAY_S) / HOUR_S)
        days = [list(hours) for _, hours in groupby(range(first, last), _format_day)]
        for start in range(0, len(days), DAYS_AT_ONCE):
            for found in await asyncio.gather(*map(self._load_day, days[start : start + DAYS_AT_ONCE])):
                for hour in sorted(found):
                    yield hour, found[hour]

    async def _load_day(self, hours: Sequence[int]) -> dict[int, HourCounters]:
        """These hours of one day."""
        now = self._now()
        known = {hour: held[1] for hour in hours if (held := self._cached_hours.get(hour)) and held[0] > now}
        asked = [hour for hour in hours if hour not in known]
        unanswered = self._records.failed_reads
        stored = await self._read_stored_hours(asked) if asked else []
        is_whole = self._records.failed_reads == unanswered
        for hour in asked:
            others = [part for at, part in stored if at == hour]
            known[hour] = _merge_hours(self._own_hours.get(hour) or HourCounters(), others)
            if is_whole and (hour + 1) * HOUR_S + 2 * SETTLED_S < now:
                self._cached_hours.put(
                    hour, (now + HELD_S, known[hour]), PAIR_BYTES * (known[hour].entry_count + 1)
                )
        return known

    async def _read_stored_hours(self, hours: Sequence[int]) -> list[tuple[int, HourCounters]]:
        """What processes have written of these hours of one day; of our own, what is not at hand."""
        day = _format_day(hours[0])
        lines = await self._records.read_tail(writers_key(day), MAX_WRITERS)
        writers = {writer for line in lines if isinstance(writer := line.get("writer"), str)}
        asked = [
            (hour, writer)
            for hour in hours
            for writer in sorted(writers)
            if writer != self._writer or hour not in self._own_hours
        ]
        keys = [hours_key(day, hour % HOURS_OF_A_DAY, writer) for hour, writer in asked]
        found = await self._records.get_many(keys, bypass_cache=True) if keys else []
        self._records.evict_cached_prefix(day_prefix(day))  # they would drive out what requests need
        return [(hour, _parse_hour(fields)) for (hour, _), fields in zip(asked, found, strict=True) if fields]

    def _drop_old_hours(self) -> None:
        """Hold no hours of our own that nobody adds to any more; those that could not be written a while."""
        settled = int((self._now() - SETTLED_S) // HOUR_S)
        for number in [each for each in self._own_hours if each < settled and each not in self._unwritten]:
            del self._own_hours[number]
        for number in sorted(self._own_hours)[:-MAX_WAITING_HOURS]:
            del self._own_hours[number]
            self._unwritten.discard(number)
        self._due = {number: due for number, due in self._due.items() if number in self._own_hours}
        self._listed &= {_format_day(number) for number in self._own_hours}
