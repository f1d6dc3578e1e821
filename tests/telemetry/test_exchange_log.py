"""What is noted is priced, counted and kept, whoever relays it and whenever the store is away."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from compaction_proxy.core.cost.savings import Saving
from compaction_proxy.core.event import COMPACTED, FAILED, MEASURED, Event
from compaction_proxy.storage.keys import conversation_key, exchanges_key, scope_prefix
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.redis.store import RedisStore
from compaction_proxy.storage.redis.url import parse_redis_url
from compaction_proxy.storage.sqlite.store import SqliteStore
from compaction_proxy.storage.store import Lease, Store
from compaction_proxy.support.fail_open import suppress_and_report
from compaction_proxy.telemetry import exchange_log as module
from compaction_proxy.telemetry import usage as accounts_module
from compaction_proxy.telemetry.usage import ExchangeEntry, Totals
from tests.helpers.journals import DAY_S, TENANT, Process, exchange, noted
from tests.helpers.redis_servers import RedisServer

COST = 0.00011  # 40 fresh input tokens, 60 cached ones and 10 of output, at the prices of `journals`


class Faulty(MemoryStore):
    """A store that raises `fault` as long as there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.fault: Exception | None = None

    async def read(self, keys: Sequence[str]) -> list[bytes | None]:
        if self.fault is not None:
            raise self.fault
        return await super().read(keys)


async def totals(store: Store, conversation: str = "c_1", tenant: str = TENANT) -> Totals:
    """What a process that has just started would read."""
    [found] = await Process(store).accounts.read_totals([(tenant, conversation)])
    return found


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(100):
        while not condition():  # noqa: ASYNC110 - it is about a store, which sets no event
            await asyncio.sleep(0.002)


# Of a request that was read and went on as it came.
READ: dict[str, Any] = {"tokens_before": 100, "tokens_after": 100}


async def test_what_was_read_and_what_was_not_stay_in_their_order() -> None:
    process = Process(MemoryStore())
    for at, tokens in ((1.0, None), (2.0, None), (3.0, 100), (4.0, None), (5.0, 100)):
        process.journal.record_exchange(*noted(at, tokens_before=tokens, tokens_after=tokens))
    await process.journal.flush()

    kept = await process.accounts.list_exchanges(TENANT, "c_1", 500)
    assert [each.exchange.at for each in kept] == [1.0, 2.0, 3.0, 4.0, 5.0]


async def test_an_exchange_is_in_its_account_with_its_price() -> None:
    store = MemoryStore()
    process = Process(store)
    first = exchange(1.0, tokens_before=90, tokens_after=90, window=1_000, trigger=700)
    second = exchange(2.0, model="", prompt_tokens=None, completion_tokens=None, cached_tokens=None)
    for each in (first, second):
        process.journal.record_exchange(*noted(0.0)._replace(exchange=each))
    await process.journal.flush()
    found = await totals(store)
    assert found == Totals(
        model="m", status="none", requests=2, request_bytes=1_000,
        prompt_tokens=100, completion_tokens=10, cached_tokens=60,
        counted=1, sent_tokens=100, read_tokens=100, priced=1, cost_usd=COST,
        tokens_before=90, tokens_after=90,
        trigger=700, window=1_000, last_at=2.0,
    )  # fmt: skip
    kept = await process.accounts.list_exchanges(TENANT, "c_1", 500)
    assert kept == [
        ExchangeEntry(TENANT, "c_1", first, Saving(COST)),
        ExchangeEntry(TENANT, "c_1", second, None),
    ]


async def test_rounds_and_what_summaries_cost_are_in_the_account() -> None:
    store = MemoryStore()
    process = Process(store)
    for kind, cost in ((COMPACTED, 0.5), (FAILED, 0.25), (MEASURED, 1.0)):
        process.accounts.on_event(TENANT, Event(kind, 1.0, "c_1", cost_usd=cost, prompt_tokens=10))
    process.accounts.on_event(TENANT, Event(COMPACTED, 1.0, "c_1"))
    process.journal.record_exchange(*noted(1.0))
    await process.journal.flush()
    found = await totals(store)
    assert (found.rounds, found.summary_usd, found.net_usd, found.requests) == (2, 0.75, -0.75, 1)
    assert found.summary_tokens == 20


async def test_a_record_of_an_earlier_version_is_added_to() -> None:
    store = MemoryStore()
    process = Process(store)
    earlier = {"requests": 3, "prompt_tokens": 5, "completion_tokens": "many", "model": "old", "last_at": 9.0}
    await process.records.overwrite(conversation_key(TENANT, "c_1"), earlier, ttl_s=DAY_S)
    process.journal.record_exchange(*noted(1.0, request_bytes=0))
    await process.journal.flush()
    assert await totals(store) == Totals(
        model="old", status="none", requests=4, prompt_tokens=105, completion_tokens=10, cached_tokens=60,
        counted=1, sent_tokens=100, read_tokens=100, priced=1, cost_usd=COST, last_at=9.0,
    )  # fmt: skip


async def test_what_has_no_conversation_or_no_price_counts_all_the_same() -> None:
    process = Process(MemoryStore())
    heard: list[ExchangeEntry] = []
    process.journal.listeners.append(heard.extend)
    some = [
        noted(5.0, None, **READ),
        noted(5.0, None, code=429, **READ),
        noted(5.0, None, model="unknown", **READ),
        noted(5.0, None, prompt_tokens=None, **READ),
        noted(5.0, None, tokens_before=200, tokens_after=100, status="applied"),
        noted(5.0, "c_1", **READ),
    ]
    for each in some:
        process.journal.record_exchange(*each)
    await process.journal.flush()
    savings = [Saving(COST), Saving(0.0), None, None, heard[4].saving, Saving(COST)]
    told = zip(some, savings, strict=True)
    assert heard == [ExchangeEntry(TENANT, each.conversation, each.exchange, saving) for each, saving in told]
    assert heard[4].saving is not None
    assert heard[4].saving.net > 0


@pytest.mark.parametrize("conversation", [None, "c_1"])
async def test_what_comes_at_once_is_added_up_as_if_it_came_one_by_one(conversation: str | None) -> None:
    process, other = (Process(MemoryStore(), lambda: 9.0) for _ in range(2))
    heard: list[ExchangeEntry] = []
    process.journal.listeners.append(heard.extend)
    unknown: dict[str, Any] = {"prompt_tokens": None, "completion_tokens": None, "cached_tokens": None}
    some = [
        *(noted(5.0, conversation, code=code) for code in (200, 200)),
        noted(5.0, conversation, code=500, **unknown),
        noted(5.0, conversation),
        noted(6.0, conversation, **unknown),
    ]
    for each in some:
        process.journal.record_exchange(*each)
        other.journal.record_exchange(*each)
        await other.journal.flush()  # each by itself
    await process.journal.flush()
    assert [each.saving for each in heard] == [Saving(COST), Saving(COST), Saving(0.0), Saving(COST), None]
    [[row], [one_by_one]] = [await each.statistics.list_rows(0, 10, "total") for each in (process, other)]
    assert row == one_by_one
    assert row.counters.cost_usd == pytest.approx(3 * COST)
    if conversation:
        names = [(TENANT, conversation)]
        [[totals], [single]] = [await each.accounts.read_totals(names) for each in (process, other)]
        assert replace(totals, cost_usd=0) == replace(single, cost_usd=0)
        assert totals.cost_usd == pytest.approx(single.cost_usd)
        lines = [await each.accounts.list_exchanges(TENANT, conversation, 500) for each in (process, other)]
        assert lines[0] == lines[1]


def failing(*_: object) -> None:
    raise ZeroDivisionError


async def test_a_listener_that_fails_keeps_nobody_from_hearing(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[BaseException] = []
    monkeypatch.setattr(module, "suppress_and_log", lambda _: suppress_and_report(reported.append))
    process = Process(MemoryStore())
    heard: list[ExchangeEntry] = []
    process.journal.listeners += [failing, heard.extend]
    process.journal.record_exchange(*noted(1.0, **READ))
    await process.journal.flush()
    assert (len(heard), [type(each) for each in reported]) == (1, [ZeroDivisionError])


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["note", "note", "flush", "restart"]), st.integers(0, 1), st.sampled_from("ab")
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=25)
@given(STEPS)
async def test_totals_add_up_across_flushes_restarts_and_replicas(steps: list[tuple[str, int, str]]) -> None:
    store = MemoryStore()
    processes = [Process(store), Process(store)]
    count = {"a": 0, "b": 0}
    for step, index, conversation in [*steps, ("restart", 0, ""), ("restart", 1, "")]:
        if step == "note":
            processes[index].journal.record_exchange(*noted(1.0, conversation))
            count[conversation] += 1
        elif step == "flush":
            await processes[index].journal.flush()
        else:
            await processes[index].journal.close()
            processes[index] = Process(store)
    for conversation, requests in count.items():
        found = await totals(store, conversation)
        assert (found.requests, found.prompt_tokens, found.cached_tokens) == (
            requests, 100 * requests, 60 * requests,
        )  # fmt: skip
        assert len(await processes[0].accounts.list_exchanges(TENANT, conversation, 500)) == requests


async def figures_of_four(stores: Sequence[Store]) -> None:
    """Four workers relay two conversations at once, and everybody reads the same sums."""
    at = 1_000_000.0
    processes = [Process(store, lambda: at) for store in stores]

    async def relay(process: Process) -> None:
        for turn in range(10):
            for conversation in ("c_1", "c_2", None):
                process.journal.record_exchange(*noted(at + turn, conversation, model=f"m-{turn % 2}"))
            process.accounts.on_event(TENANT, Event(COMPACTED, at, "c_1", cost_usd=0.25))
            process.statistics.on_event(TENANT, Event(COMPACTED, at, "c_1", cost_usd=0.25, asked="m-0"))
            await process.journal.flush()

    await asyncio.gather(*map(relay, processes))
    for process in processes:  # what another was writing
        await process.journal.flush()
    for process in processes:
        [row] = await process.statistics.list_rows(at, at + 1, "total")
        counters = row.counters
        assert (counters.requests, counters.prompt_tokens, counters.rounds) == (120, 12_000, 40)
        assert counters.cost_usd == pytest.approx(120 * COST)
        assert counters.summary_usd == 10.0
        one, two = await process.accounts.read_totals([(TENANT, "c_1"), (TENANT, "c_2")])
        assert [(each.requests, each.priced, each.rounds) for each in (one, two)] == [
            (40, 40, 40),
            (40, 40, 0),
        ]
        assert len(await process.accounts.list_exchanges(TENANT, "c_1", 500)) == 40
    for process in processes:
        await process.records.close()


async def test_figures_of_four_replicas_on_one_redis_sum_exactly(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        await figures_of_four([RedisStore(parse_redis_url(server.url)) for _ in range(4)])


async def test_figures_of_four_workers_on_one_file_sum_exactly(tmp_path: Path) -> None:
    await figures_of_four([SqliteStore(tmp_path / "state.db") for _ in range(4)])


async def test_what_waits_while_the_store_is_away_is_written_when_it_is_back() -> None:
    store = Faulty()
    process = Process(store)
    process.journal.record_exchange(*noted(1.0))
    await process.journal.flush()
    store.fault = OSError("gone")
    while process.records.is_in_use:
        await process.records.get_many(["v1:{x}:y"])
    for _ in range(3):
        process.journal.record_exchange(*noted(1.0))
        process.journal.record_exchange(*noted(1.0, "c_2"))
        await process.journal.flush()
    store.fault = None
    assert [(await totals(store, name)).requests for name in ("c_1", "c_2")] == [1, 0]
    await eventually(lambda: process.records.is_in_use)
    await process.journal.flush()
    assert [(await totals(store, name)).requests for name in ("c_1", "c_2")] == [4, 3]
    await process.records.close()


async def test_a_fault_of_ours_neither_ends_the_writing_nor_loses_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "FLUSH_INTERVAL_S", 0.005)
    reported: list[BaseException] = []
    monkeypatch.setattr(module, "suppress_and_log", lambda _: suppress_and_report(reported.append))
    store = Faulty()
    store.fault = ZeroDivisionError()
    process = Process(store)
    process.journal.start()
    process.journal.record_exchange(*noted(1.0))
    await eventually(lambda: len(reported) >= 2)
    store.fault = None
    process.journal.record_exchange(*noted(1.0))
    await process.journal.close()
    assert (await totals(store)).requests == 2


async def test_no_more_waits_than_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts_module, "MAX_WAITING", 2)
    store = MemoryStore()
    process = Process(store)
    for name in ("c_1", "c_2", "c_3", "c_1"):
        process.journal.record_exchange(*noted(1.0, name))
    await process.journal.flush()
    process.journal.record_exchange(*noted(1.0, "c_3"))
    await process.journal.flush()
    assert [(await totals(store, name)).requests for name in ("c_1", "c_2", "c_3")] == [2, 1, 1]


async def test_a_stop_says_how_many_exchanges_it_could_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts_module, "LAST_TRY_INTERVAL_S", 0.0)
    store = MemoryStore()
    process, other = Process(store), Process(store)
    await other.records.acquire_lease(f"{conversation_key(TENANT, 'c_2')}:lease", 60.0)
    for name in ("c_1", "c_2", "c_2"):
        process.journal.record_exchange(*noted(1.0, name))
    with capture_logs() as logs:
        await process.journal.close()
    assert (await totals(store)).requests == 1
    assert logs == [{"event": "journal.not_written", "log_level": "warning", "exchanges": 2}]


async def test_a_stop_waits_for_a_store_that_is_suspended_after_a_slow_call() -> None:
    store = Faulty()
    store.fault = OSError("slow")
    process = Process(store)
    while process.records.is_in_use:
        await process.records.get_many(["v1:{x}:y"])
    process.journal.record_exchange(*noted(1.0))
    store.fault = None
    await process.journal.close()
    assert (await totals(store)).requests == 1
    await process.records.close()


async def test_a_stop_that_is_cancelled_says_how_many_exchanges_are_not_counted() -> None:
    class Hanging(MemoryStore):
        async def acquire_lease(self, key: str, ttl_s: float) -> Lease | None:
            reached.set()
            return await asyncio.Future[Lease | None]()

    reached = asyncio.Event()
    process = Process(Hanging())
    process.journal.record_exchange(*noted(1.0))
    with capture_logs() as logs:
        closing = asyncio.create_task(process.journal.close())
        await reached.wait()
        process.journal.record_exchange(*noted(1.0))
        closing.cancel()
        await closing
    assert logs == [{"event": "journal.not_written", "log_level": "warning", "exchanges": 2}]


async def test_of_a_crowd_no_more_waits_for_the_next_flush_than_a_queue_holds() -> None:
    process = Process(MemoryStore())
    heard: list[int] = []
    process.journal.listeners.append(lambda entries: heard.append(len(entries)))
    for _ in range(2 * module.QUEUE_LENGTH):
        process.journal.record_exchange(*noted(1.0))
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert sum(heard) == 2 * module.QUEUE_LENGTH


async def test_nothing_is_written_of_what_was_forgotten_since_its_request_began() -> None:
    store = MemoryStore()
    process = Process(store)
    with process.records.deletion_fence.scoped_start_mark():
        process.journal.record_exchange(*noted(1.0))
        process.journal.record_exchange(*noted(1.0, "c_2"))
        await process.records.delete_prefix(scope_prefix(TENANT, "c_1"))
        process.journal.record_exchange(*noted(1.0))  # of a request from before
        process.accounts.on_event(TENANT, Event(COMPACTED, 1.0, "c_1", cost_usd=1.0))
    await process.journal.flush()
    assert [(await totals(store, name)).requests for name in ("c_1", "c_2")] == [0, 1]
    assert await process.accounts.list_exchanges(TENANT, "c_1", 500) == []


async def test_what_is_forgotten_while_it_is_written_does_not_come_back() -> None:
    class Slow(MemoryStore):
        forgets = False

        async def read(self, keys: Sequence[str]) -> list[bytes | None]:
            found = await super().read(keys)
            if self.forgets:
                self.forgets = False
                await process.records.delete_prefix(scope_prefix(TENANT, "c_1"))
                with process.records.deletion_fence.scoped_start_mark():  # a new request
                    process.journal.record_exchange(*noted(1.0, request_bytes=7))
            return found

    store = Slow()
    process = Process(store)
    for store.forgets in (False, True, False):
        process.journal.record_exchange(*noted(1.0, request_bytes=1))
        await process.journal.flush()
    found = await totals(store)
    assert (found.requests, found.request_bytes) == (2, 8)
    assert len(await process.accounts.list_exchanges(TENANT, "c_1", 500)) == 2


async def test_what_another_process_is_writing_waits() -> None:
    store = MemoryStore()
    ours, other = Process(store), Process(store)
    lease = await other.records.acquire_lease(f"{conversation_key(TENANT, 'c_1')}:lease", 10.0)
    assert lease is not None
    ours.journal.record_exchange(*noted(1.0))
    await ours.journal.flush()
    assert (await totals(store)).requests == 0
    await other.records.release_lease(lease)
    await ours.journal.flush()
    assert (await totals(store)).requests == 1


async def test_a_line_that_says_nothing_is_passed_over() -> None:
    process = Process(MemoryStore())
    key = exchanges_key(TENANT, "c_1")
    for line in ({"model": "m"}, {"at": 1.0, "saving": {"cost": "much"}}, {"at": 2.0, "saving": [1]}):
        await process.records.append_line(key, line, ttl_s=DAY_S, max_lines=9)
    kept = await process.accounts.list_exchanges(TENANT, "c_1", 2)
    assert [(each.exchange.at, each.saving) for each in kept] == [(1.0, None), (2.0, None)]
