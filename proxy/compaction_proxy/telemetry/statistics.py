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
    list_fields,
    parse_failures,
)
from compaction_proxy.storage.keys import day_prefix, hours_key, key_name, writers_key
from compaction_proxy.storage.records import Fields, Item, Line, Records
from compaction_proxy.support.lru import Lru
from compaction_proxy.telemetry.counters import Counters, from_fields, to_fields
from compaction_proxy.telemetry.exchange_batch import Alike, Entry

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
class Hour:
    """What one or more processes have counted in an hour.

    Attributes:
        pairs: Counters by model and tenant.
        failures: Failures of upstreams, by target and cause.
    """

    pairs: dict[tuple[str, str], Counters] = field(default_factory=dict)
    failures: UpstreamFailures = field(default_factory=dict)

    @property
    def size(self) -> int:
        """How many things are counted apart."""
        return len(self.pairs) + len(self.failures)


class Row(NamedTuple):
    """Counters, and what they are of: an hour (`2026-11-22T13`, UTC), a day, a model, a key, or `total`."""

    of: str
    counters: Counters


def _day(hour: int) -> str:
    return datetime.fromtimestamp(hour * HOUR_S, UTC).strftime("%Y-%m-%d")


def _name(by: By, hour: int, pair: tuple[str, str]) -> str:
    if by in {"hour", "day"}:
        at = datetime.fromtimestamp(hour * HOUR_S, UTC)
        return at.strftime("%Y-%m-%dT%H" if by == "hour" else "%Y-%m-%d")
    return {"model": pair[0], "key": pair[1]}.get(by, by)


def _joined(ours: Hour, others: Iterable[Hour]) -> Hour:
    """The sum of what processes have counted; `others` are added to in place, ours are not."""
    found = Hour()
    for hour in others:
        add_failures(found.failures, hour.failures.values())
        for pair, counters in hour.pairs.items():
            if pair in found.pairs:
                found.pairs[pair].join(counters)
            else:
                found.pairs[pair] = counters
    add_failures(found.failures, ours.failures.values())
    for pair, counters in ours.pairs.items():
        found.pairs.setdefault(pair, Counters()).join(counters)
    return found


def _written(hour: Hour) -> Fields:
    pairs = hour.pairs.items()
    rows = [{"model": model, "key": key, **to_fields(counters)} for (model, key), counters in pairs]
    failures = list_fields(hour.failures.values())
    return {"rows": rows, **({"upstream_failures": failures} if failures else {})}


def _read(fields: Fields) -> Hour:
    rows, hour = fields.get("rows"), Hour()
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

    def __init__(self, records: Records, ttl_s: float, now: Callable[[], float] = time.time) -> None:
        self._records = records
        self._ttl_s = ttl_s
        self._now = now
        self._writer = token_hex(_WRITER_BYTES)
        self._ours: dict[int, Hour] = {}  # the hours that this process may still add to, or has to write
        self._unwritten: set[int] = set()
        self._due: dict[int, float] = {}  # when an hour may be written again
        self._listed: set[str] = set()  # days among whose writers this process is
        self._held: Lru[int, tuple[float, Hour]] = Lru(HELD_BYTES)
        self._flushing = asyncio.Lock()

    def add(self, entries: Iterable[Entry]) -> None:
        """Count exchanges in the hours that they came in."""
        now = self._now()
        for tenant, _, exchange, saving in entries:
            counters = self._counters(exchange.at, exchange.model, tenant, now)
            counters.add(exchange)
            if saving is not None:
                counters.price(saving.cost, saving.gross, saving.cache_loss)
            elif not exchange.failed:
                counters.unpriced += 1

    def add_alike(self, alike: Alike) -> None:
        """Count exchanges that were not read, in the hour of the last."""
        self._counters(alike.columns.at[-1], alike.model, alike.tenant, self._now()).add_alike(alike)

    def heard(self, tenant: str, event: Event) -> None:
        """Count one event, under the model that the conversation asks (an `announcing.Listener`)."""
        self._counters(event.at, event.asked, tenant, self._now()).hear(event)

    def record_upstream_failure(self, target: str, cause: str) -> None:
        """Count a failure of an upstream that happens now."""
        now = self._now()
        failures = self._hour(int(now // HOUR_S)).failures
        if (target, cause) not in failures and len(failures) >= MAX_FAILURES:
            target, cause = OTHERS
        add_failures(failures, [UpstreamFailure(target, cause, 1, now)])

    async def flush(self, *, at_last: bool = False) -> None:
        """Write the hours that have changed; large ones less often, but `at_last`."""
        async with self._flushing:
            for hour in sorted(self._unwritten):
                if not self._records.in_use:
                    return  # the rest waits until the store is back
                if not at_last and self._due.get(hour, 0.0) > self._now():
                    continue
                self._unwritten.discard(hour)
                if not await self._write(hour):
                    self._unwritten.add(hour)
            self._let_go()

    async def rows(self, since: float, until: float, by: By) -> list[Row]:
        """What the hours that lie in `[since, until)`, if only in part, come to, in the order of names.

        Args:
            since: Seconds since the epoch; not more than `ttl_s` ago has any effect.
            until: Seconds since the epoch.
            by: What a row is of.
        """
        found: dict[str, Counters] = {}
        async for number, hour in self._hours(since, until):
            for pair, counters in hour.pairs.items():
                found.setdefault(_name(by, number, pair), Counters()).join(counters)
        return [Row(of, found[of]) for of in sorted(found)]

    async def list_upstream_failures(self, since: float, until: float) -> list[UpstreamFailure]:
        """Failures of upstreams in the hours of `rows`; the one that happened last comes first."""
        found: UpstreamFailures = {}
        async for _, hour in self._hours(since, until):
            add_failures(found, hour.failures.values())
        return sorted(found.values(), key=lambda each: each.last_at, reverse=True)

    def _counters(self, at: float, model: str, tenant: str, now: float) -> Counters:
        # What came longer ago is counted later: what was written of that hour is not held any more.
        pairs = self._hour(int(max(at, now - SETTLED_S) // HOUR_S)).pairs
        pair = (model, key_name(tenant))
        counters = pairs.get(pair)
        if counters is None:
            pair = pair if len(pairs) < MAX_PAIRS else OTHERS
            counters = pairs.setdefault(pair, Counters())
        return counters

    def _hour(self, number: int) -> Hour:
        """An hour of our own that is about to be added to."""
        hour = self._ours.get(number)
        if hour is None:
            hour = self._ours[number] = Hour()
        self._unwritten.add(number)
        return hour

    async def _write(self, number: int) -> bool:
        day = _day(number)
        items: list[Item | Line] = [
            Item(
                hours_key(day, number % HOURS_OF_A_DAY, self._writer),
                _written(self._ours[number]),
                self._ttl_s,
            )
        ]
        if day not in self._listed:
            items.append(Line(writers_key(day), {"writer": self._writer}, self._ttl_s, MAX_WRITERS))
        written = await self._records.write(items)
        if written:
            self._listed.add(day)
            self._due[number] = self._now() + PAUSE_S * max(0, self._ours[number].size - SMALL_PAIRS)
        return written

    async def _hours(self, since: float, until: float) -> AsyncIterator[tuple[int, Hour]]:
        """The hours of these times of which anything is known, oldest first."""
        first = int(max(since, self._now() - min(self._ttl_s, MAX_READ_S)) // HOUR_S)
        last = math.ceil(min(until, self._now() + DAY_S) / HOUR_S)
        days = [list(hours) for _, hours in groupby(range(first, last), _day)]
        for start in range(0, len(days), DAYS_AT_ONCE):
            for found in await asyncio.gather(*map(self._of_day, days[start : start + DAYS_AT_ONCE])):
                for hour in sorted(found):
                    yield hour, found[hour]

    async def _of_day(self, hours: Sequence[int]) -> dict[int, Hour]:
        """These hours of one day."""
        now = self._now()
        known = {hour: held[1] for hour in hours if (held := self._held.get(hour)) and held[0] > now}
        asked = [hour for hour in hours if hour not in known]
        unanswered = self._records.unanswered
        stored = await self._stored(asked) if asked else []
        is_whole = self._records.unanswered == unanswered
        for hour in asked:
            others = [part for at, part in stored if at == hour]
            known[hour] = _joined(self._ours.get(hour) or Hour(), others)
            if is_whole and (hour + 1) * HOUR_S + 2 * SETTLED_S < now:
                self._held.put(hour, (now + HELD_S, known[hour]), PAIR_BYTES * (known[hour].size + 1))
        return known

    async def _stored(self, hours: Sequence[int]) -> list[tuple[int, Hour]]:
        """What processes have written of these hours of one day; of our own, what is not at hand."""
        day = _day(hours[0])
        lines = await self._records.tail(writers_key(day), MAX_WRITERS)
        writers = {writer for line in lines if isinstance(writer := line.get("writer"), str)}
        asked = [
            (hour, writer)
            for hour in hours
            for writer in sorted(writers)
            if writer != self._writer or hour not in self._ours
        ]
        keys = [hours_key(day, hour % HOURS_OF_A_DAY, writer) for hour, writer in asked]
        found = await self._records.find(keys, fresh=True) if keys else []
        self._records.let_go(day_prefix(day))  # they would drive out what requests need
        return [(hour, _read(fields)) for (hour, _), fields in zip(asked, found, strict=True) if fields]

    def _let_go(self) -> None:
        """Hold no hours of our own that nobody adds to any more; those that could not be written a while."""
        settled = int((self._now() - SETTLED_S) // HOUR_S)
        for number in [each for each in self._ours if each < settled and each not in self._unwritten]:
            del self._ours[number]
        for number in sorted(self._ours)[:-MAX_WAITING_HOURS]:
            del self._ours[number]
            self._unwritten.discard(number)
        self._due = {number: due for number, due in self._due.items() if number in self._ours}
        self._listed &= {_day(number) for number in self._ours}
