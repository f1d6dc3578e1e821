"""Calls of summary models: retries, the breaker, the allowance of a tenant, and how long calls take."""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import replace

import pytest

from compaction_proxy.compaction.summary_client import HOUR_S, MAX_TENANTS, CallBudget, is_temporary_failure
from compaction_proxy.compaction.summary_request import (
    AlignedConversation,
    SummaryRequest,
    SummaryRoute,
    SummaryUsage,
)
from compaction_proxy.core.errors import SummaryError
from compaction_proxy.wires.body import parse_body
from compaction_proxy.wires.chat.wire import CHAT
from tests.helpers.summary_bench import (
    BRIEF,
    CHEAP,
    DONE,
    OWN,
    RAW,
    SYSTEM,
    TEXT,
    USER,
    Bench,
    failed,
    summary_bench,
)

pytestmark = pytest.mark.virtual_time


@pytest.fixture
def bench() -> Iterator[Bench]:
    with summary_bench() as made:
        yield made


# Retries.


@pytest.mark.parametrize("reason", ["http-429", "http-500", "http-503", "unreachable", "garbage"])
async def test_what_may_pass_is_tried_three_times_with_pauses_that_double(bench: Bench, reason: str) -> None:
    bench.model.answers = [failed(reason), failed(reason), DONE]
    assert (await bench.write()).texts == (TEXT,)
    assert bench.clock.slept == [0.2, 0.4]


async def test_a_fourth_time_is_not_tried(bench: Bench) -> None:
    bench.model.answers = [failed("garbage")]
    assert await bench.reason() == "garbage"
    assert len(bench.model.calls) == 3


@pytest.mark.parametrize("reason", ["http-400", "http-401", "http-403"])
async def test_what_will_not_pass_is_tried_once(bench: Bench, reason: str) -> None:
    bench.model.answers = [failed(reason)]
    assert await bench.reason() == reason
    assert len(bench.model.calls) == 1


async def test_a_provider_is_left_alone_for_as_long_as_it_says(bench: Bench) -> None:
    bench.model.answers = [failed("http-429", retry_after_s=3.0), DONE]
    await bench.write()
    assert bench.clock.slept == [3.0]


async def test_a_provider_that_wants_too_long_a_pause_is_given_up(bench: Bench) -> None:
    bench.model.answers = [failed("http-429", retry_after_s=60.0), DONE]
    assert await bench.reason() == "http-429"
    assert bench.clock.slept == []


async def test_usage_counts_every_attempt_even_where_all_fail(bench: Bench) -> None:
    bench.model.answers = [replace(DONE, text=""), failed("http-500"), replace(DONE, text="")]
    brief = replace(BRIEF, usage=SummaryUsage())
    with pytest.raises(SummaryError):
        await bench.summarising.write_summary(brief)
    spent = brief.usage
    assert (spent.calls, spent.prompt_tokens, spent.completion_tokens) == (3, 200, 40)


# The breaker.


async def broken(bench: Bench, brief: SummaryRequest = BRIEF) -> None:
    """Three failures in a row."""
    bench.model.answers = [failed("http-500")]
    assert await bench.reason(brief) == "http-500"
    bench.model.calls.clear()


async def test_after_three_failures_nobody_asks_for_half_a_minute(bench: Bench) -> None:
    await broken(bench)
    bench.model.answers = [DONE]
    bench.clock.now += 29
    assert await bench.reason() == "breaker-open"
    assert bench.model.calls == []
    bench.clock.now += 1
    assert (await bench.write()).texts == (TEXT,)
    assert (await bench.write()).texts == (TEXT,)


async def test_each_probe_that_fails_doubles_the_rest_up_to_ten_minutes(bench: Bench) -> None:
    await broken(bench)
    rests = []
    for _ in range(6):
        started = bench.clock.now
        while await bench.reason() == "breaker-open":
            bench.clock.now += 15
        rests.append(bench.clock.now - started)
    assert rests == pytest.approx([30, 60, 120, 240, 480, 600])
    assert len(bench.model.calls) == 6  # a probe is not tried again


async def test_one_probe_at_a_time(bench: Bench) -> None:
    await broken(bench)
    bench.model.answers = [DONE]
    bench.clock.now += 30
    results = await asyncio.gather(*(bench.write() for _ in range(3)), return_exceptions=True)
    reasons = [each.reason for each in results if isinstance(each, SummaryError)]
    assert (len(bench.model.calls), reasons) == (1, ["breaker-open"] * 2)


@pytest.mark.parametrize("reason", ["http-401", "http-403"])
async def test_a_refused_key_opens_the_breaker_at_once(bench: Bench, reason: str) -> None:
    bench.model.answers = [failed(reason)]
    assert [await bench.reason(), await bench.reason()] == [reason, "breaker-open"]


@pytest.mark.parametrize(
    "other",
    [
        replace(BRIEF, tenant="u"),
        replace(BRIEF, routes=(OWN,)),
        replace(BRIEF, routes=(replace(CHEAP, url="https://x/"),)),
    ],
)
async def test_one_tenant_s_trouble_with_one_model_is_no_other_s(bench: Bench, other: SummaryRequest) -> None:
    await broken(bench)
    bench.model.answers = [DONE]
    assert (await bench.write(other)).texts == (TEXT,)
    assert await bench.reason() == "breaker-open"


async def test_three_deadlines_in_a_row_open_the_breaker(bench: Bench) -> None:
    bench.model.hangs = True
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await bench.write()
    assert await bench.reason() == "breaker-open"


async def test_a_probe_that_is_cut_off_leaves_room_for_the_next(bench: Bench) -> None:
    await broken(bench)
    bench.clock.now += 30
    bench.model.hangs = True
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await bench.write()
    assert await bench.reason() == "breaker-open"
    bench.clock.now += 60
    bench.model.hangs, bench.model.answers = False, [DONE]
    assert (await bench.write()).texts == (TEXT,)


async def test_failures_with_answers_between_them_open_nothing(bench: Bench) -> None:
    down = failed("unreachable")
    bench.model.answers = [down, down, DONE, down, down, DONE]
    assert [(await bench.write()).texts for _ in range(2)] == [(TEXT,)] * 2


# The allowance.


async def test_a_tenant_over_its_budget_asks_no_more_within_the_hour(bench: Bench) -> None:
    brief = replace(BRIEF, calls_per_hour=2)
    await bench.write(brief)
    bench.clock.now += 600
    await bench.write(brief)
    assert await bench.reason(brief) == "budget"
    await bench.write(replace(brief, tenant="u"))
    bench.clock.now += HOUR_S - 600
    await bench.write(brief)
    assert await bench.reason(brief) == "budget"
    assert len(bench.model.calls) == 4


async def test_attempts_count_towards_the_budget(bench: Bench) -> None:
    bench.model.answers = [failed("garbage")]
    assert await bench.reason(replace(BRIEF, calls_per_hour=2)) == "budget"
    assert len(bench.model.calls) == 2


async def test_a_long_call_counts_as_several_so_that_tokens_are_bounded_too(bench: Bench) -> None:
    wide = replace(CHEAP, window=1_000_000)
    brief = replace(BRIEF, calls_per_hour=5, routes=(wide,), instructions="word " * 200_000)  # 250,000 tokens
    await bench.write(brief)
    await bench.write(brief)
    assert await bench.reason(replace(brief, instructions="")) == "budget"
    bench.clock.now += HOUR_S
    await bench.write(brief)
    assert len(bench.model.calls) == 3


async def test_a_long_aligned_call_counts_as_several(bench: Bench) -> None:
    long = AlignedConversation(parse_body(RAW, CHAT), (SYSTEM, replace(USER, tokens=250_000)))
    brief = replace(BRIEF, calls_per_hour=3, routes=(replace(OWN, window=1_000_000),), aligned=long)
    await bench.write(brief)
    assert await bench.reason(brief) == "budget"


# How long it takes.


async def test_the_expected_time_is_that_of_answers_and_of_deadlines(bench: Bench) -> None:
    async def slow(seconds: float) -> None:
        def pass_time() -> None:
            bench.clock.now += seconds

        bench.model.asked = pass_time
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.02 if bench.model.hangs else None):
                await bench.write()

    def expected(*routes: SummaryRoute, tenant: str = BRIEF.tenant) -> float | None:
        return bench.summarising.estimate_call_duration_s(replace(BRIEF, routes=routes, tenant=tenant))

    assert expected(CHEAP) is None
    await slow(2.0)
    assert expected(CHEAP, OWN) == pytest.approx(2.0)
    assert expected(OWN) is None
    assert expected() is None
    assert expected(CHEAP, tenant="another") is None
    bench.model.hangs = True
    await slow(12.0)
    assert expected(CHEAP) == pytest.approx(5.0)
    await slow(1.0)  # a client that left early says nothing
    assert expected(CHEAP) == pytest.approx(5.0)


async def given_up(bench: Bench, after_s: float) -> None:
    """One call that is cancelled after so many seconds, by the bench's clock."""
    bench.model.hangs = True
    asking = asyncio.create_task(bench.write(replace(BRIEF, deadline_s=30.0)))
    while not bench.model.calls or asking.done():  # noqa: ASYNC110 - the model is no event of ours
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.001)
    bench.clock.now += after_s
    asking.cancel()
    await asyncio.wait({asking})
    bench.model.hangs = False
    bench.model.calls.clear()


async def test_clients_that_leave_early_close_no_model_to_others(bench: Bench) -> None:
    for _ in range(5):
        await given_up(bench, 2.0)
    assert (await bench.write()).texts == (TEXT,)


async def test_deadlines_that_pass_close_a_model_for_a_while(bench: Bench) -> None:
    for _ in range(3):
        await given_up(bench, 30.0)
    assert await bench.reason() == "breaker-open"


def test_the_memory_of_tenants_is_bounded() -> None:
    allowance = CallBudget(lambda: 0.0)
    for number in range(MAX_TENANTS + 5):
        allowance.book_call(str(number), 1)
    assert len(allowance._calls) == MAX_TENANTS


def test_calls_are_counted_for_each_tenant_and_a_limit_of_nothing_is_none() -> None:
    now = [0.0]
    allowance = CallBudget(lambda: now[0])
    for _ in range(1_000):
        allowance.book_call("free", 0, 10**9)
    allowance.book_call("t", 1)
    allowance.book_call("u", 1)
    with pytest.raises(SummaryError, match="budget"):
        allowance.book_call("t", 1)
    now[0] += HOUR_S
    allowance.book_call("t", 1)


@pytest.mark.parametrize(
    ("reason", "expected"),
    [("http-500", True), ("http-429", True), ("timeout", True), ("http-400", False), ("garbage", False)],
)
def test_a_failure_is_temporary_or_not(
    reason: str,
    expected: bool,  # noqa: FBT001 - a case of the table
) -> None:
    assert is_temporary_failure(reason) is expected


async def test_a_model_that_rests_is_known_until_its_rest_is_over(bench: Bench) -> None:
    assert not bench.summarising.has_resting_model
    await broken(bench)
    assert bench.summarising.has_resting_model
    bench.clock.now += 30
    assert not bench.summarising.has_resting_model
