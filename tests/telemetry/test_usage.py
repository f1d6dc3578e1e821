"""Totals of a conversation: what is added up, what is the latest, and what is stored and read again."""

from itertools import chain, count, repeat
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.core.cost.savings import Saving
from compaction_proxy.core.event import COMPACTED, FAILED, MEASURED, Event
from compaction_proxy.core.exchange import Exchange
from compaction_proxy.storage.keys import conversation_key, lease_key
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.records import RecordStore
from compaction_proxy.telemetry import usage
from compaction_proxy.telemetry.usage import (
    MAX_LINES,
    ExchangeEntry,
    Totals,
    UsageStore,
    from_fields,
    parse_figures,
    to_fields,
    to_line,
)
from tests.helpers.journals import DAY_S, TENANT, exchange, ignored

SMALL = st.integers(0, 9)
ENTRIES = st.builds(
    lambda at, model, tokens, prompt, saving: entry(
        at, model=model, tokens_before=tokens, prompt_tokens=prompt, saving=saving
    ),
    SMALL,
    st.sampled_from(["", "a", "b"]),
    st.none() | SMALL,
    st.none() | SMALL,
    st.none() | st.builds(Saving, SMALL, SMALL, SMALL),
)


def entry(at: float, *, saving: Saving | None = None, **told: Any) -> ExchangeEntry:
    return ExchangeEntry(TENANT, "c_1", exchange(at, **told), saving)


def add_up(entries: list[ExchangeEntry]) -> Totals:
    totals = Totals()
    for each in entries:
        totals.add_entry(each)
    return totals


def open_usage(records: RecordStore | None = None) -> UsageStore:
    return UsageStore(records or RecordStore(MemoryStore(), ignored), DAY_S, clock=lambda: 0.0)


async def read(store: UsageStore, conversation: str = "c_1") -> Totals:
    [found] = await store.read_totals([(TENANT, conversation)])
    return found


@given(st.lists(ENTRIES, max_size=8), st.integers(0, 8))
def test_totals_of_two_parts_add_up_to_those_of_the_whole(entries: list[ExchangeEntry], at: int) -> None:
    totals, rest = add_up(entries[:at]), add_up(entries[at:])
    totals.add_totals(rest)
    whole = add_up(entries)
    names = (
        "requests", "prompt_tokens", "priced", "cost_usd", "gross_usd", "cache_loss_usd", "last_at",
        "counted", "sent_tokens", "read_tokens",
    )  # fmt: skip
    assert [getattr(totals, name) for name in names] == [getattr(whole, name) for name in names]


@given(st.lists(ENTRIES, max_size=8))
def test_stored_totals_are_read_as_they_were(entries: list[ExchangeEntry]) -> None:
    totals = add_up(entries)
    stored = to_fields(totals)
    assert None not in stored.values()
    assert from_fields(stored) == totals


def test_a_figure_that_is_not_summed_is_the_latest_known_one_whatever_comes_last() -> None:
    totals = add_up(
        [
            entry(5.0, model="new", window=100),
            entry(2.0, model="old", window=50, trigger=40),
            entry(9.0, model="", window=None),
        ]
    )
    assert (totals.model, totals.window, totals.trigger, totals.last_at) == ("new", 100, 40, 9.0)


def test_the_net_saving_is_unknown_until_a_request_has_a_price() -> None:
    unpriced, priced = entry(1.0), entry(1.0, saving=Saving(cost=2.0, gross=4.0, cache_loss=1.0))
    assert add_up([unpriced]).net_usd is None
    totals = Totals(summary_usd=0.25)
    totals.add_totals(add_up([unpriced, priced]))
    assert (totals.net_usd, totals.cost_usd, totals.priced, totals.requests) == (2.75, 2.0, 1, 2)


def test_the_saved_tokens_are_those_of_requests_with_known_sizes() -> None:
    assert (Totals(requests=1).gross_tokens, Totals(requests=1).net_tokens) == (None, None)
    read = entry(1.0, code=200, tokens_before=900, tokens_after=300, prompt_tokens=310)
    unread = entry(2.0, code=200, prompt_tokens=40)
    failed = entry(3.0, code=503, tokens_before=900, tokens_after=900, prompt_tokens=None)
    unknown = entry(4.0, code=200, prompt_tokens=None)
    totals = Totals(summary_tokens=100)
    totals.add_totals(add_up([read, unread, failed, unknown]))
    assert (totals.requests, totals.counted) == (4, 3)
    assert (totals.sent_tokens, totals.read_tokens) == (950, 350)
    assert (totals.gross_tokens, totals.net_tokens) == (600, 500)


def test_missing_and_invalid_figures_are_left_out() -> None:
    stored = {"requests": 3, "prompt_tokens": "many", "model": 7, "window": True, "last_at": 2, "new": 1}
    assert parse_figures(Totals, stored) == {"requests": 3, "last_at": 2}
    assert (from_fields(stored), from_fields(None)) == (Totals(requests=3, last_at=2), Totals())


def test_a_line_has_no_unknown_values_and_its_saving_by_name() -> None:
    plain = ExchangeEntry(TENANT, "c_1", Exchange(1.0, "m", "none"), None)
    line = to_line(plain)
    assert {"round", "strategy", "window", "saving"}.isdisjoint(line)
    assert to_line(plain._replace(saving=Saving(2.0))) == {
        **line, "saving": {"cost": 2.0, "gross": 0.0, "cache_loss": 0.0, "net": 0.0},
    }  # fmt: skip


async def test_exchanges_are_stored_in_the_order_of_their_time_with_their_savings() -> None:
    store = open_usage()
    entries = [entry(at, saving=saving) for at, saving in ((3.0, None), (1.0, Saving(2.0)), (2.0, None))]
    assert all(store.add_entry("c_1", each, None) for each in entries)
    await store.flush()
    by_time = sorted(entries, key=usage.get_entry_time)
    assert await store.list_exchanges(TENANT, "c_1", 9) == by_time
    assert await store.list_exchanges(TENANT, "c_1", 2) == by_time[1:]


async def test_of_many_exchanges_at_once_the_newest_have_lines_and_all_are_in_the_totals() -> None:
    store = open_usage()
    for at in range(MAX_LINES + 5):
        store.add_entry("c_1", entry(float(at)), None)
    await store.flush()
    kept = await store.list_exchanges(TENANT, "c_1", 99)
    assert [each.exchange.at for each in kept] == [float(at) for at in range(5, MAX_LINES + 5)]
    assert (await read(store)).requests == MAX_LINES + 5


async def test_an_exchange_is_dropped_where_too_many_conversations_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(usage, "MAX_WAITING", 1)
    store = open_usage()
    taken = [store.add_entry(name, entry(1.0), None) for name in ("c_1", "c_2", "c_1")]
    assert taken == [True, False, True]


async def test_a_flood_of_one_tenant_drops_none_of_the_exchanges_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(usage, "MAX_WAITING", 8)
    store = open_usage()
    taken = [store.add_entry(f"c_{number}", entry(1.0), None) for number in range(8)]
    assert taken == [True] * 6 + [False] * 2
    assert store.add_entry("c_1", entry(1.0)._replace(tenant="other"), None)
    assert store.pending_requests == 7


async def test_one_flush_writes_usage_of_each_tenant_while_much_of_one_is_pending() -> None:
    seconds = count()
    store = UsageStore(
        RecordStore(MemoryStore(), ignored), DAY_S, clock=lambda: next(seconds) * usage.FLUSH_LIMIT_S / 50
    )
    for number in range(200):
        store.add_entry(f"c_{number}", entry(1.0), None)
    store.add_entry("c_1", entry(1.0)._replace(tenant="other"), None)
    await store.flush()
    [others] = await store.read_totals([("other", "c_1")])
    assert others.requests == 1
    assert 100 < store.pending_requests < 200


async def test_the_next_flush_begins_with_the_tenants_that_the_last_one_did_not_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(usage, "WRITES_AT_ONCE", 1)
    seconds = count()
    store = UsageStore(RecordStore(MemoryStore(), ignored), DAY_S, clock=lambda: float(next(seconds)))
    tenants = ["a", "b", "c"]
    for tenant in tenants:
        for number in range(3):
            store.add_entry(f"c_{number}", entry(1.0)._replace(tenant=tenant), None)
    for _ in tenants:
        await store.flush(limit_s=1.0)  # the time for one write
    totals = await store.read_totals([(tenant, "c_0") for tenant in tenants])
    assert [each.requests for each in totals] == [1, 1, 1]


async def test_compactions_and_summaries_count_and_measured_events_do_not() -> None:
    store = open_usage()
    for kind, cost in ((COMPACTED, 0.5), (FAILED, 0.25), (MEASURED, 1.0), (COMPACTED, None)):
        store.on_event(TENANT, Event(kind, 1.0, "c_1", cost_usd=cost))
    store.on_event(TENANT, Event(COMPACTED, 1.0, "", cost_usd=0.5))
    await store.flush()
    totals = await read(store)
    assert (totals.rounds, totals.summary_usd, totals.requests) == (2, 0.75, 0)


async def test_usage_waits_while_another_replica_holds_the_lease_of_the_conversation() -> None:
    shared = MemoryStore()
    store = open_usage(RecordStore(shared, ignored))
    store.add_entry("c_1", entry(1.0), None)
    lease = await shared.acquire_lease(lease_key(conversation_key(TENANT, "c_1")), 60)
    assert lease is not None
    await store.flush()
    assert (await read(store)).requests == 0
    await shared.release_lease(lease)
    await store.flush()
    await store.flush()  # nothing is written twice
    assert (await read(store)).requests == 1


async def test_nothing_is_written_under_a_lease_that_is_too_old() -> None:
    times = chain([0.0] * 3, [usage.LEASE_SAFE_S + 0.1], repeat(10.0))
    store = UsageStore(RecordStore(MemoryStore(), ignored), DAY_S, clock=lambda: next(times))
    store.add_entry("c_1", entry(1.0), None)
    await store.flush()
    assert (await read(store)).requests == 0
    await store.flush()
    assert (await read(store)).requests == 1


async def test_the_usage_of_a_forgotten_conversation_is_not_written() -> None:
    store = open_usage()
    store.add_entry("c_1", entry(1.0), None)
    await store._records.delete_prefix(conversation_key(TENANT, "c_1"))
    await store.flush()
    assert await read(store) == Totals()
