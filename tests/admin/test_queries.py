"""What the dashboard and the API ask: conversations, compactions, statistics and models."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from compaction_proxy.admin.queries import (
    ConversationFilter,
    ConversationQueries,
    Sort,
    build_model_row,
    estimate_hard_mark,
)
from compaction_proxy.compaction.compacted_conversations import CompactedConversations
from compaction_proxy.config.config import Config
from compaction_proxy.core.errors import RequestRefusedError, StoreUnavailableError
from compaction_proxy.core.event import COMPACTED, FAILED, INSTALLED, Event
from compaction_proxy.core.exchange import Exchange
from compaction_proxy.gateway.size_gate import build_gates
from compaction_proxy.providers.windows import FALLBACK_WINDOW, WINDOWS
from compaction_proxy.storage.keys import conversation_key, derive_client_key_name
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.telemetry.event_history import build_round_event_line
from compaction_proxy.telemetry.usage import Caption, Totals
from tests.helpers.watched import ORIGIN, PRICE, Prices, Watched

NOW, DAY_S = 1_800_000_000.0, 86_400.0
TENANT, ROOT = "t_1", bytes(32)
ONE, TWO, THREE = (f"c_{digit * 24}" for digit in "123")
KNOWN = next(iter(WINDOWS))


def place(number: int) -> bytes:
    return number.to_bytes(64, "big")


class Faulty(MemoryStore):
    """A store that can be away."""

    away = False

    async def read(self, keys: Sequence[str]) -> list[bytes | None]:
        if self.away:
            raise OSError("gone")
        return await super().read(keys)


class Bench:
    """Queries, and what they are about."""

    def __init__(self, store: Faulty | None = None, now: float = NOW, **config: Any) -> None:
        self.store = store or Faulty()
        self.parts = Watched(self.store, 90 * DAY_S, lambda: now, **config)
        self.queries: ConversationQueries = self.parts.watching

    async def exchange(self, name: str, at: float, model: str = "gpt-x", **figures: Any) -> None:
        told = {"prompt_tokens": 400, "completion_tokens": 10, "cached_tokens": 0, **figures}
        await self.parts.owners.record_activity(TENANT, name)
        self.parts.journal.record_exchange(TENANT, name, ORIGIN, Exchange(at, model, "none", 200, **told))
        await self.parts.journal.flush()

    async def compact(self, number: int, **figures: Any) -> Event:
        """Records a compaction of conversation `ONE`."""
        event = Event(COMPACTED, NOW, ONE, round=number, place=place(number).hex(), **figures)
        line = build_round_event_line(TENANT, ROOT, event, DAY_S)
        await self.parts.history.record_root(TENANT, ONE, ROOT)
        await self.parts.records.save_if_absent(f"{line.key}:{number}", {}, ttl_s=DAY_S, other_items=[line])
        return event

    async def list_ids(self, limit: int = 9, **options: Any) -> list[str]:
        given = {name: options.pop(name) for name in ("sort", "offset") if name in options}
        page = await self.queries.list_conversations(limit, ConversationFilter(**options), **given)
        return [each.id for each in page.rows]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    await made.exchange(ONE, NOW - 30, prompt_tokens=100, window=77_000)
    await made.exchange(TWO, NOW - 20, "local", prompt_tokens=900)
    for _ in range(3):
        await made.exchange(THREE, NOW - 10, "gpt-y", prompt_tokens=10)
    yield made
    await made.parts.records.close()


@pytest.mark.parametrize(
    ("sort", "expected"),
    [("last", [THREE, TWO, ONE]), ("tokens", [TWO, ONE, THREE]), ("requests", [THREE, TWO, ONE])],
)
async def test_conversations_are_sorted_the_largest_first(
    bench: Bench, sort: Sort, expected: list[str]
) -> None:
    assert await bench.list_ids(sort=sort) == expected
    assert await bench.list_ids(1, sort=sort) == expected[:1]


async def test_a_conversation_with_an_unknown_saving_comes_last(bench: Bench) -> None:
    assert (await bench.list_ids(sort="net"))[-1] == TWO  # nobody knows the price of its model


@pytest.mark.parametrize(("text", "expected"), [("GPT-", [THREE, ONE]), (ONE[:8], [ONE]), ("x y", [])])
async def test_conversations_are_found_by_id_and_model(bench: Bench, text: str, expected: list[str]) -> None:
    assert await bench.list_ids(text=text) == expected


async def test_a_conversation_without_stored_requests_was_last_used_when_it_was_seen(bench: Bench) -> None:
    await bench.parts.records.overwrite(conversation_key(TENANT, ONE), {"name": "kept"}, ttl_s=DAY_S)
    page = await bench.queries.list_conversations(9, ConversationFilter(text="kept"))
    assert [each.totals.last_at for each in page.rows] == [NOW]


async def test_exchanges_of_a_conversation_come_oldest_first(bench: Bench) -> None:
    await bench.exchange(ONE, NOW - 5, prompt_tokens=7)
    found = await bench.queries.list_exchanges(ONE, 9)
    assert [each.exchange.prompt_tokens for each in found] == [100, 7]


async def test_an_unknown_conversation_and_an_unknown_compaction_are_404(bench: Bench) -> None:
    await bench.compact(1)
    for call in (
        bench.queries.list_exchanges("c_none", 9),
        bench.queries.list_compactions("c_none"),
        bench.queries.get_compaction(ONE, "no hex"),
        bench.queries.get_compaction(ONE, "ab"),
        bench.queries.get_compaction(ONE, place(2).hex()),
    ):
        with pytest.raises(RequestRefusedError) as refused:
            await call
        assert refused.value.status == 404


async def test_a_compaction_is_told_whether_it_was_undone_and_when_it_pays_back(bench: Bench) -> None:
    await bench.compact(1, tokens_before=100_000, tokens_after=20_000, calls=1, cost_usd=0.4)
    await bench.compact(2, tokens_before=100_000, tokens_after=20_000, calls=1, cost_usd=0.4, asked="local")
    await bench.compact(3, tokens_after=20_000)
    await bench.parts.history.record_event(TENANT, Event(FAILED, NOW, ONE, reason="timeout"))
    await bench.parts.wishing.update(TENANT, ONE, lambda known: known.with_undone_round(place(2)))
    found = await bench.queries.list_compactions(ONE)
    assert [(each.event.round, each.undone) for each in found] == [(1, False), (2, True), (3, False)]
    # 80,000 tokens less at 2 dollars a million save 0.16 a request
    assert found[0].pays_back_after is not None
    assert found[0].pays_back_after > 0
    assert [each.pays_back_after for each in found[1:]] == [None, None]
    [record, detail] = await bench.queries.get_compaction(ONE, place(1).hex())
    assert (record, detail.event) == (found[0], found[0].event)


async def test_a_compaction_is_in_use_from_when_a_request_has_used_it(bench: Bench) -> None:
    made = [
        await bench.compact(number, outcome=outcome)
        for number, outcome in enumerate(("applied", "scheduled", "scheduled", "applied", "scheduled"), 1)
    ]
    used = Event(INSTALLED, NOW + 9, ONE, round=2, place=made[1].place, outcome="applied")
    await bench.parts.history.record_event(TENANT, used)
    found = await bench.queries.list_compactions(ONE)
    assert [(each.state, each.used_at) for each in found] == [
        ("followed", NOW),
        ("followed", NOW + 9),
        ("unused", None),
        ("in-use", NOW),
        ("prepared", None),
    ]
    assert (await bench.queries.get_compaction(ONE, made[4].place))[0] == found[4]


@pytest.mark.parametrize(
    ("config", "window", "expected"),
    [
        ({}, 128_000, 106_200),
        ({}, None, None),
        ({"compaction": {"trigger": [{"tokens": 0}]}}, 128_000, None),
        ({"compaction": {"strategies": {"anchored": {"hard_percent": 80}}}}, 128_000, 94_400),
    ],
)
def test_the_hard_mark_is_estimated_from_the_window_of_the_last_request(
    config: dict[str, Any], window: int | None, expected: int | None
) -> None:
    totals = Totals(model="m", window=window)
    assert estimate_hard_mark(Config.model_validate(config), totals) == expected


async def test_the_total_of_statistics_is_the_sum_of_the_rows(bench: Bench) -> None:
    report = await bench.queries.get_statistics(NOW - 3_600, NOW, "model")
    assert {row.label: row.counters.requests for row in report.rows} == {"gpt-x": 1, "local": 1, "gpt-y": 3}
    assert (report.total.requests, report.total.prompt_tokens) == (5, 1_030)


async def test_statistics_can_be_those_of_one_model_or_key(bench: Bench) -> None:
    key = derive_client_key_name(TENANT)
    by = [
        await bench.queries.get_statistics(NOW - 3_600, NOW, "total", **wanted)
        for wanted in ({"model": "gpt-y"}, {"key": key}, {"model": "local", "key": "k_other"})
    ]
    assert [report.total.requests for report in by] == [3, 5, 0]


async def test_recent_conversations_have_their_key_label_title_and_name(bench: Bench) -> None:
    for name, caption in ((ONE, Caption("desk", "Fix it")), (TWO, Caption("night")), (THREE, Caption())):
        exchange = Exchange(NOW, "m", "none", 200, label="team-a" if name == ONE else "")
        bench.parts.journal.record_exchange(TENANT, name, ORIGIN, exchange, caption=caption)
    await bench.parts.journal.flush()
    key = derive_client_key_name(TENANT)
    found = await bench.queries.list_recent_conversations()
    assert {each.key for each in found} == {key}
    assert {(each.id, each.totals.label, each.totals.name, each.totals.title) for each in found} == {
        (ONE, "team-a", "desk", "Fix it"), (TWO, "", "night", ""), (THREE, "", "", ""),
    }  # fmt: skip


async def test_models_are_those_that_are_named_or_were_used_of_late() -> None:
    long_ago = Bench(now=NOW - 40 * DAY_S)
    await long_ago.exchange(TWO, NOW - 40 * DAY_S, "old-1")
    bench = Bench(long_ago.store, models={"named-1": {"window": 9_000}, "gpt-*": {}})
    await bench.exchange(ONE, NOW - 30, window=77_000)
    rows = await bench.queries.list_models()
    assert [(row.model, row.window, row.window_source) for row in rows] == [
        ("gpt-x", 77_000, "learned"), ("named-1", 9_000, "configured"),
    ]  # fmt: skip
    assert (rows[0].input_usd, rows[1].input_usd) == (PRICE.tiers[0].input, None)
    await bench.parts.records.close()


async def test_every_conversation_is_exported_with_its_exchanges_and_events(bench: Bench) -> None:
    event = await bench.compact(1)
    exported = [each async for each in bench.queries.iter_conversations()]
    assert [listed.id for listed, _, _ in exported] == [THREE, TWO, ONE]
    assert [len(exchanges) for _, exchanges, _ in exported] == [3, 1, 1]
    assert [[each.place for each in events] for _, _, events in exported] == [[], [], [event.place]]


async def test_a_store_that_is_away_is_an_error_but_failures_of_upstreams_are_told(
    bench: Bench,
) -> None:
    assert await bench.queries.list_upstream_failures(0, NOW) == ([], True)
    bench.store.away = True
    while bench.parts.records.is_in_use:
        await bench.parts.records.get_many(["v1:{x}:y"])
    for call in (
        bench.queries.list_conversations(9),
        bench.queries.get_statistics(0, NOW, "total"),
        bench.queries.list_recent_items(9),
        bench.queries.list_models(),
        bench.queries.list_compactions(ONE),
    ):
        with pytest.raises(StoreUnavailableError):
            await call
    assert (await bench.queries.list_upstream_failures(0, NOW))[1] is False


async def test_the_limits_of_the_gate_are_those_at_the_upstream_that_answers_the_conversation() -> None:
    other = "https://other.example:443"
    upstream = {"base_url": f"{ORIGIN}/v1", "wires": {"messages": {"base_url": f"{other}/v1"}}}
    bench = Bench(upstream=upstream)
    await bench.parts.owners.record_activity(TENANT, ONE)
    records, settings = bench.parts.records, bench.queries.config
    limits, compacted = bench.queries.model_limits, CompactedConversations(records, DAY_S)
    gates = build_gates(settings, limits, bench.parts.wishing, compacted, Prices())
    queries = replace(bench.queries, gates=tuple(dict.fromkeys(gates.values())))
    before = await queries.get_gate_limits(ONE, "m")
    await limits.learn_window(TENANT, other, "m", 9_000)
    after = await queries.get_gate_limits(ONE, "m")
    assert before == gates["chat"].get_limits(TENANT, "m")
    assert after == gates["messages"].get_limits(TENANT, "m")
    assert before is not None
    assert after is not None
    assert (after.trigger_tokens or 0) < 9_000 < (before.trigger_tokens or 0)


@pytest.mark.parametrize(
    ("name", "last_window", "discovered_window", "expected"),
    [
        (KNOWN, None, None, (WINDOWS[KNOWN], "table")),
        (KNOWN, WINDOWS[KNOWN], None, (WINDOWS[KNOWN], "table")),
        (KNOWN, 5_000, None, (5_000, "learned")),
        (KNOWN, 5_000, 7_000, (5_000, "learned")),
        (KNOWN, 7_000, 7_000, (7_000, "upstream")),
        (KNOWN, WINDOWS[KNOWN], 7_000, (7_000, "upstream")),
        ("named-1", 5_000, 7_000, (9_000, "configured")),
        ("nobody-knows-it", None, None, (FALLBACK_WINDOW, "default")),
        ("nobody-knows-it", None, 7_000, (7_000, "upstream")),
    ],
)
def test_a_window_is_the_configured_one_the_learned_one_that_of_the_upstream_or_that_of_the_table(
    name: str, last_window: int | None, discovered_window: int | None, expected: tuple[int, str]
) -> None:
    config = Config.model_validate({"models": {"named-1": {"window": 9_000}}})
    row = build_model_row(config, name, None, last_window, discovered_window)
    assert (row.window, row.window_source) == expected


def test_a_price_is_that_of_a_request_without_a_surcharge() -> None:
    row = build_model_row(Config(), "gpt-x", PRICE)
    assert (row.input_usd, row.cached_usd, row.output_usd) == (2.0, 0.5, 8.0)
    assert (row.surcharge_tokens, row.price_source, row.price_date) == (200_000, "a table 1", "2026-11-01")
