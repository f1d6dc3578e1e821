"""Statistics add up: by hour, day, model and key, across processes, restarts and stores that are away."""

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compaction_proxy.core.cost.savings import Saving
from compaction_proxy.core.errors import StoreUnavailableError
from compaction_proxy.core.event import COMPACTED, FAILED, MEASURED, OVER_LIMIT, PINNED, Event
from compaction_proxy.core.upstream_failure import UpstreamFailure, parse_failures
from compaction_proxy.storage.keys import derive_client_key_name, hourly_counts_key, statistics_writers_key
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.records import RecordStore
from compaction_proxy.telemetry import statistics as module
from compaction_proxy.telemetry.statistics import (
    COUNTS_BY_WORD,
    HISTOGRAMS,
    ExchangeCounters,
    Statistics,
    StatisticsRow,
    compute_quantile_s,
    from_fields,
    to_fields,
)
from compaction_proxy.telemetry.usage import ExchangeEntry
from tests.helpers.journals import DAY_S, MONTH_S, Process, exchange, ignored

HOUR_S = 3_600.0
NOON = 1_795_348_800.0 - 1_795_348_800.0 % DAY_S + DAY_S / 2
WAYS = ("hour", "day", "model", "key", "total")


def summed(rows: list[StatisticsRow]) -> dict[str, Any]:
    whole = ExchangeCounters()
    for row in rows:
        whole.add_counters(row.counters)
    return to_fields(whole)


EXCHANGES = st.lists(
    st.tuples(
        st.integers(0, 1),  # of which process
        st.integers(0, 40),  # how many hours ago
        st.sampled_from(["a", "b", "c"]),
        st.sampled_from(["t_1", "t_2"]),
        st.sampled_from([200, 429]),
        st.sampled_from([None, Saving(0.5, 0.25, 0.125, 0.125)]),  # sums of these are exact
    ),
    max_size=30,
)


@settings(deadline=None, max_examples=25)
@given(EXCHANGES)
async def test_every_way_to_split_them_adds_up_to_the_same(exchanges: list[Any]) -> None:
    store, now = MemoryStore(), [NOON]
    processes = [Process(store, lambda: now[0]) for _ in range(2)]
    whole = ExchangeCounters()
    for index, hours, model, tenant, code, saving in sorted(exchanges, key=lambda each: -each[1]):
        now[0] = NOON - hours * HOUR_S
        made = exchange(now[0], model=model, code=code, tokens_before=7, tokens_after=5)
        processes[index].statistics.add_entries([ExchangeEntry(tenant, None, made, saving)])
        whole.add_entry(ExchangeEntry(tenant, None, made, saving))
        await processes[index].statistics.flush()
    now[0] = NOON
    fresh = Process(store, lambda: NOON).statistics
    for reader in (fresh, fresh, processes[0].statistics):
        for way in WAYS:
            rows = await reader.list_rows(NOON - 2 * DAY_S, NOON + 1, way)  # type: ignore[arg-type]
            assert summed(rows) == to_fields(whole)
            assert [row.label for row in rows] == sorted({row.label for row in rows})


async def test_rows_are_named_for_what_they_are_of() -> None:
    process = Process(MemoryStore(), lambda: NOON)
    process.statistics.add_entries([ExchangeEntry("t_1", None, exchange(NOON), None)])
    process.statistics.add_entries([ExchangeEntry("t_2", None, exchange(NOON, model="n"), None)])
    told = {}
    for way in WAYS:
        rows = await process.statistics.list_rows(NOON, NOON + 1, way)  # type: ignore[arg-type]
        told[way] = [row.label for row in rows]
    assert told == {
        "hour": ["2026-11-22T12"],
        "day": ["2026-11-22"],
        "model": ["m", "n"],
        "key": sorted([derive_client_key_name("t_1"), derive_client_key_name("t_2")]),
        "total": ["total"],
    }
    assert await process.statistics.list_rows(NOON - 2 * HOUR_S, NOON, "total") == []


async def test_events_are_counted_with_what_they_cost() -> None:
    process = Process(MemoryStore(), lambda: NOON)
    paid = {"calls": 2, "prompt_tokens": 50, "completion_tokens": 5, "cost_usd": 0.25, "asked": "m"}
    for kind in (COMPACTED, FAILED, MEASURED):
        process.statistics.on_event("t_1", Event(kind, NOON, "c_1", **paid))  # type: ignore[arg-type]
    for kind in (OVER_LIMIT, PINNED):
        process.statistics.on_event("t_1", Event(kind, NOON, "c_1"))
    [other, row] = await process.statistics.list_rows(NOON, NOON + 1, "model")
    assert (other.label, to_fields(other.counters)) == (
        "",
        {"failures": 1, "failure_kinds": {"over-limit": 1}},
    )
    assert (row.label, to_fields(row.counters)) == ("m", {
        "rounds": 1, "failures": 1, "failure_kinds": {"failed": 1}, "summary_calls": 4,
        "summary_prompt_tokens": 100, "summary_completion_tokens": 10, "summary_usd": 0.5,
    })  # fmt: skip
    assert row.counters.net_usd == -0.5


async def test_what_came_before_its_hour_was_settled_counts_now() -> None:
    """A record that was written and let go must not be begun again: it would lose what it held."""
    store, now = MemoryStore(), [NOON]
    process = Process(store, lambda: now[0])
    for hours in (0, 2, 2):
        now[0] = NOON + hours * HOUR_S
        process.statistics.add_entries([ExchangeEntry("t", None, exchange(NOON), None)])
        await process.statistics.flush()
    rows = await Process(store, lambda: now[0]).statistics.list_rows(NOON, now[0] + 1, "hour")
    assert [(row.label, row.counters.requests) for row in rows] == [
        ("2026-11-22T12", 1),
        ("2026-11-22T13", 2),
    ]


async def test_hours_wait_for_a_store_that_is_away() -> None:
    class Away(MemoryStore):
        away = False

        async def write(self, items: Any) -> None:
            if self.away:
                raise StoreUnavailableError("store-full")
            await super().write(items)

    store, now = Away(), [NOON]
    process = Process(store, lambda: now[0])
    for store.away in (True, True, False):
        process.statistics.add_entries([ExchangeEntry("t", None, exchange(now[0]), None)])
        await process.statistics.flush()
        now[0] += HOUR_S
    rows = await Process(store, lambda: now[0]).statistics.list_rows(NOON, now[0], "hour")
    assert [row.counters.requests for row in rows] == [1, 1, 1]


async def test_a_large_hour_is_written_less_often_but_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMALL_PAIRS", 1)
    monkeypatch.setattr(module, "PAUSE_S", 5.0)
    store, now = MemoryStore(), [NOON]
    process = Process(store, lambda: now[0])

    async def written(*, at_last: bool = False) -> int:
        for model in "ab":
            process.statistics.add_entries([ExchangeEntry("t", None, exchange(NOON, model=model), None)])
        await process.statistics.flush(force=at_last)
        [row] = await Process(store, lambda: now[0]).statistics.list_rows(NOON, NOON + 1, "total")
        return row.counters.requests

    counts = [await written()]
    for now[0] in (NOON + 4.0, NOON + 5.0):
        counts.append(await written())
    assert [*counts, await written(at_last=True)] == [2, 2, 6, 8]


async def test_models_and_keys_beyond_a_bound_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PAIRS", 2)
    process = Process(MemoryStore(), lambda: NOON)
    for model in "abcda":
        process.statistics.add_entries([ExchangeEntry("t", None, exchange(NOON, model=model), None)])
    rows = await process.statistics.list_rows(NOON, NOON + 1, "model")
    assert [(row.label, row.counters.requests) for row in rows] == [("a", 2), ("b", 1), ("other", 2)]


async def test_hours_that_are_long_over_are_read_once() -> None:
    class Counted(MemoryStore):
        reads = 0

        async def read(self, keys: Any) -> list[bytes | None]:
            self.reads += bool(keys)
            return await super().read(keys)

    store = Counted()
    process = Process(store, lambda: NOON - DAY_S)
    process.statistics.add_entries([ExchangeEntry("t", None, exchange(NOON - DAY_S), None)])
    await process.statistics.flush()
    reader = Process(store, lambda: NOON).statistics
    found = [await reader.list_rows(NOON - DAY_S, NOON - DAY_S / 2, "total") for _ in range(3)]
    assert (found[0][0].counters.requests, found[1:], store.reads) == (1, [found[0]] * 2, 1)


async def test_records_that_make_no_sense_count_nothing() -> None:
    records = RecordStore(MemoryStore(), ignored)
    day = "2026-11-22"
    for writer, told in (("a", {"rows": 7}), ("b", {"rows": [5, {"model": "m", "requests": "x"}]})):
        await records.append_line(statistics_writers_key(day), {"writer": writer}, ttl_s=DAY_S, max_lines=9)
        await records.overwrite(hourly_counts_key(day, 12, writer), told, ttl_s=DAY_S)
    await records.append_line(statistics_writers_key(day), {"writer": 7}, ttl_s=DAY_S, max_lines=9)
    rows = await Statistics(records, MONTH_S, lambda: NOON).list_rows(NOON, NOON + 1, "model")
    assert [(row.label, to_fields(row.counters)) for row in rows] == [("m", {})]


COUNTS = st.integers(0, 10**15)
COUNTERS = st.builds(
    ExchangeCounters,
    **{
        each.name: COUNTS if each.type == "int" or each.type is int else st.floats(0, 1e6)
        for each in fields(ExchangeCounters)
        if each.name not in {*COUNTS_BY_WORD, *HISTOGRAMS, "last_at"}
    },
    last_at=st.floats(1, 1e10),
    statuses=st.dictionaries(st.sampled_from(["none", "applied"]), st.integers(1, 9)),
    failed_open_reasons=st.dictionaries(st.sampled_from(["", "timeout"]), st.integers(1, 9)),
    failure_kinds=st.dictionaries(st.sampled_from(["failed", "over-limit"]), st.integers(1, 9)),
    **dict.fromkeys(HISTOGRAMS, st.lists(COUNTS, min_size=14, max_size=14)),
)


@settings(deadline=None, max_examples=25)
@given(COUNTERS)
def test_counters_survive_being_written(counters: ExchangeCounters) -> None:
    assert from_fields(to_fields(counters)) == counters


def test_sums_cover_small_requests_and_tell_which_they_do_not_cover() -> None:
    counters = ExchangeCounters()
    small, read = {"reason": "small"}, {"tokens_before": 900, "tokens_after": 400}
    for at, figures in (
        (5.0, {**small, "prompt_tokens": 60}),
        (9.0, {**read, "prompt_tokens": 410}),
        (7.0, {**read, "prompt_tokens": None}),
        (3.0, {**small, "prompt_tokens": None}),
        (4.0, {**read, "prompt_tokens": None, "code": 429}),
    ):
        counters.add_entry(ExchangeEntry("t", None, exchange(at, **figures), None))
    counters.add_event(Event(COMPACTED, 11.0, calls=3, prompt_tokens=50))
    counters.add_event(Event(FAILED, 11.0, calls=1, prompt_tokens=20, cost_usd=0.5))
    assert (counters.tokens_before, counters.tokens_after) == (60 + 910 + 900, 60 + 410 + 400)
    assert counters.net_tokens == 1_000 - 70
    assert (counters.uncounted, counters.unpriced, counters.unpriced_summary_calls) == (1, 4, 3)
    assert counters.last_at == 9.0

    other = ExchangeCounters(requests=1, uncounted=1, last_at=8.0)
    other.add_counters(counters)
    assert (other.uncounted, other.last_at) == (2, 9.0)


def test_requests_that_an_earlier_version_may_have_left_out_are_in_no_sum() -> None:
    stored = {"requests": 9, "tokens_before": 700, "tokens_after": 500, "statuses": {"none": 6, "reused": 3}}
    assert from_fields(stored).uncounted == 6
    assert from_fields({**stored, "last_at": 5.0}).uncounted == 0


@pytest.mark.parametrize(
    ("overheads", "share", "expected"),
    [([], 0.5, None), ([0.0004], 0.5, 0.00025), ([0.0004] * 9 + [0.9], 0.95, 0.75), ([9.0], 0.5, 5.0)],
)
def test_a_quantile_of_the_overhead_is_told_from_its_buckets(
    overheads: list[float], share: float, expected: float | None
) -> None:
    counters = ExchangeCounters()
    for overhead in overheads:
        counters.add_entry(ExchangeEntry("t", None, exchange(1.0, overhead_s=overhead), None))
    assert counters.compute_overhead_quantile_s(share) == (
        expected if expected is None else pytest.approx(expected)
    )


async def test_failures_of_upstreams_add_up_across_processes_and_hours_and_outlive_them() -> None:
    store, now = MemoryStore(), [NOON]
    processes = [Process(store, lambda: now[0]) for _ in range(2)]
    for hours in (30, 2, 1, 0):
        now[0] = NOON - hours * HOUR_S
        for process in processes:
            process.statistics.record_upstream_failure("http://up:80", "connection-refused")
            await process.statistics.flush()
    processes[0].statistics.record_upstream_failure("http://up:80", "http-503")
    await processes[0].statistics.flush()
    now[0] = NOON + 1
    reader = Process(store, lambda: now[0]).statistics
    refused = UpstreamFailure("http://up:80", "connection-refused", 6, NOON)
    failed = UpstreamFailure("http://up:80", "http-503", 1, NOON)
    for each in (reader, processes[0].statistics, reader):  # read again: hours that are over are held
        assert set(await each.list_upstream_failures(NOON - DAY_S, NOON + 1)) == {refused, failed}
    assert await reader.list_upstream_failures(NOON - 3 * DAY_S, NOON - DAY_S) == [
        UpstreamFailure("http://up:80", "connection-refused", 2, NOON - 30 * HOUR_S)
    ]
    assert await reader.list_rows(NOON - DAY_S, NOON + 1, "model") == []


async def test_hours_that_are_read_without_the_store_are_not_held() -> None:
    store, now = MemoryStore(), [NOON - 5 * HOUR_S]
    other = Process(store, lambda: now[0])
    other.statistics.record_upstream_failure("http://up:80", "tls-failed")
    await other.statistics.flush()
    now[0] = NOON
    reader = Process(store, lambda: now[0])
    tail = store.read_tail

    async def fail(*_: object) -> list[bytes]:
        raise StoreUnavailableError("store-full")  # the store is not left alone because of it

    store.read_tail = fail  # type: ignore[method-assign, assignment]
    assert await reader.statistics.list_upstream_failures(NOON - DAY_S, NOON) == []
    store.read_tail = tail  # type: ignore[method-assign]
    [found] = await reader.statistics.list_upstream_failures(NOON - DAY_S, NOON)
    assert (found.cause, found.count) == ("tls-failed", 1)


async def test_too_many_kinds_of_failures_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FAILURES", 2)
    statistics = Process(MemoryStore(), lambda: NOON).statistics
    for status in (500, 501, 502, 503, 500):
        statistics.record_upstream_failure("http://up:80", f"http-{status}")
    found = await statistics.list_upstream_failures(NOON - HOUR_S, NOON + 1)
    assert sorted((each.cause, each.count) for each in found) == [
        ("http-500", 2), ("http-501", 1), ("other", 2),
    ]  # fmt: skip


def test_failures_that_another_version_wrote_are_read_as_far_as_they_are_known() -> None:
    whole = {"target": "t", "cause": "c", "count": 2, "last_at": 5.0}
    assert parse_failures([{**whole, "more": 1}, {**whole, "count": "2"}, {"target": "t"}, 7]) == [
        UpstreamFailure("t", "c", 2, 5.0)
    ]
    assert parse_failures("nothing") == []


@pytest.mark.parametrize(
    ("status", "reason", "waited"),
    [
        ("applied", "", True),
        ("failed-open", "deadline", True),
        ("over-limit", "http-503", True),
        ("failed-open", "breaker-open", False),
        ("reused", "", False),
        ("none", "small", False),
    ],
)
def test_time_of_requests_that_waited_for_a_round_is_told_apart(
    status: str, reason: str, *, waited: bool
) -> None:
    counters = ExchangeCounters()
    for made in (exchange(1.0, status=status, reason=reason, overhead_s=0.9), exchange(1.0)):
        counters.add_entry(ExchangeEntry("t", None, made, None))
    assert (sum(counters.overhead), sum(counters.waiting_overhead)) == (2, int(waited))
    assert sum(counters.own_overhead) == 2 - waited
    assert (compute_quantile_s(counters.waiting_overhead, 0.5) is not None) is waited


async def test_sums_can_be_those_of_one_model_or_one_key() -> None:
    statistics = Statistics(RecordStore(MemoryStore(), ignored), MONTH_S, lambda: NOON)
    for tenant, model in (("a", "m"), ("a", "n"), ("b", "m"), ("b", "m")):
        statistics.add_entries([ExchangeEntry(tenant, None, exchange(NOON, model=model), None)])

    async def count(**wanted: str) -> int:
        rows = await statistics.list_rows(NOON, NOON + 1, "total", **wanted)
        return sum(row.counters.requests for row in rows)

    assert await count(model="m") == 3
    assert await count(key=derive_client_key_name("a")) == 2
    assert await count(model="m", key=derive_client_key_name("b")) == 2
    assert await count(model="x") == 0
