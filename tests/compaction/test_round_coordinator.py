"""How long a request waits for a summary, and what it gets where none comes in time."""

import asyncio
from typing import Any

import pytest

from compaction_proxy.compaction.types import CompactionStatus, FitResult
from compaction_proxy.core.event import COMPACTED
from compaction_proxy.core.summary.call import SummaryAnswer
from tests.helpers.compaction_bench import (
    RECORD,
    TRIGGER,
    Bench,
    Summaries,
    bench,
    forwarded,
    prefix,
    says,
    talk,
    user,
)

pytestmark = pytest.mark.virtual_time

DUE = 93
BLOCK_S = 8.0
SLOW_S = 20.0
QUICK: dict[str, Any] = {"model": {"compaction": {"max_block_s": BLOCK_S}}}
RULE = "Never touch the file prod.env."


async def timed(made: Bench, turns: int, start: str = "Build it.", **over: Any) -> tuple[FitResult, float]:
    clock = asyncio.get_running_loop().time
    started_s = clock()
    fit = await made.fit(talk(turns, start=f"{start} {RULE}"), **{**QUICK, **over})
    return fit, clock() - started_s


async def test_a_request_waits_for_a_summary_that_comes_in_time() -> None:
    async with bench(Summaries(takes_s=BLOCK_S / 2), ticking=True) as made:
        fit, _ = await timed(made, DUE)
    assert (fit.report.status, fit.report.reason) == (CompactionStatus.APPLIED, None)
    assert "it works fine" in forwarded(fit)[2]["content"]


async def test_after_max_block_s_a_text_without_a_model_is_in_force() -> None:
    async with bench(Summaries(takes_s=SLOW_S), ticking=True) as made:
        fit, seconds = await timed(made, DUE)
        again, at_once = await timed(made, DUE)
    assert seconds == pytest.approx(BLOCK_S)
    assert (fit.report.status, fit.report.reason, fit.report.round) == (
        CompactionStatus.APPLIED,
        "deadline",
        1,
    )
    assert (fit.report.tokens_after or 0) < TRIGGER / 2
    assert RULE in fit.raw.decode()
    assert RECORD not in forwarded(fit)[2]["content"]
    assert (again.raw, at_once) == (fit.raw, 0)


async def test_a_client_in_a_hurry_waits_a_quarter_of_its_patience_at_most() -> None:
    async with bench(Summaries(takes_s=SLOW_S), ticking=True) as made:
        fit, seconds = await timed(made, DUE, patience_s=8.0, model={})
    assert seconds == pytest.approx(2.0)
    assert (fit.report.status, fit.report.reason) == (CompactionStatus.APPLIED, "deadline")


async def test_a_late_summary_changes_no_byte_until_the_next_round_and_then_takes_its_record_s_place() -> (
    None
):
    async with bench(Summaries(takes_s=SLOW_S), ticking=True) as made:
        fit, _ = await timed(made, DUE)
        await made.settled()  # the late summary is there now
        again, _ = await timed(made, DUE)
        grown = [*talk(DUE, start=f"Build it. {RULE}"), says("This."), user("Go on.")]
        later = await made.fit(grown, **QUICK)
        assert (again.raw, len(made.summaries.calls)) == (fit.raw, 1)
        assert (later.report.status, later.raw.startswith(prefix(fit))) == (CompactionStatus.REUSED, True)
        made.summaries.takes_s = 0
        made.summaries.answers = [SummaryAnswer(RECORD.replace("steps so far", "further steps"))]
        await timed(made, 200)
        await made.settled()
        second, _ = await timed(made, 260)
    kept = [str(each["content"]) for each in forwarded(second)]
    assert second.report.round in {2, 3}
    assert "the steps so far are done" in kept[2]
    assert "Where it stopped" not in kept[2]
    assert made.records.is_in_use


async def test_work_ahead_of_need_builds_on_the_late_summary_too() -> None:
    async with bench(Summaries(takes_s=SLOW_S), ticking=True) as made:
        fit, _ = await timed(made, DUE)
        await made.settled()
        made.summaries.takes_s = 0
        turns = DUE
        while not fit.should_prepare:
            turns += 5
            fit = await made.answered(talk(turns, start=f"Build it. {RULE}"), **QUICK)
        await made.settled()
        due, _ = await timed(made, turns + 20)
    assert (due.report.status, due.report.round) == (CompactionStatus.APPLIED, 2)
    assert "the steps so far are done" in str(forwarded(due)[2]["content"])


async def test_a_model_known_to_be_slow_is_not_waited_for_the_second_time() -> None:
    async with bench(Summaries(takes_s=SLOW_S), ticking=True) as made:
        await timed(made, DUE)
        await made.settled()
        patient = {"compaction": {"max_block_s": 0.95 * SLOW_S}}
        fit, seconds = await timed(made, DUE, "Make it.", conversation="c_2", model=patient)
        await made.settled()
    assert seconds == 0
    assert (fit.report.status, fit.report.reason) == (CompactionStatus.APPLIED, "deadline")
    assert len(made.summaries.calls) == 2  # it is asked all the same: its text serves the next round


async def test_a_seed_strategy_waits_as_long_as_a_summary_may_take() -> None:
    async with bench(Summaries(takes_s=SLOW_S), ticking=True, strategy="chained") as made:
        fit, seconds = await timed(made, DUE, model={}, trigger_tokens=3_000)
    assert seconds == pytest.approx(SLOW_S)
    assert (fit.report.status, fit.report.reason) == (CompactionStatus.APPLIED, None)


async def test_a_summary_that_hangs_ends_with_its_own_deadline_and_rests() -> None:
    section = {"compaction": {"max_block_s": BLOCK_S}, "summary": {"timeout_s": 2 * BLOCK_S}}
    async with bench(Summaries(hold=asyncio.Event()), ticking=True) as made:
        fit, _ = await timed(made, DUE, model=section)
        await made.settled()
        later, seconds = await timed(made, 190, model=section)
        events = await made.events()
    assert (fit.report.status, fit.report.reason) == (CompactionStatus.APPLIED, "deadline")
    assert (later.report.status, later.report.reason) == (CompactionStatus.APPLIED, "timeout")
    assert seconds == 0
    assert len(made.summaries.calls) == 1
    assert [event.reason for event in events if event.kind != COMPACTED] == ["timeout"]


async def test_a_client_that_leaves_lets_the_summary_be_finished_and_saved() -> None:
    async with bench(Summaries(takes_s=SLOW_S), ticking=True) as made:
        leaving = asyncio.create_task(made.fit(talk(DUE)))
        await made.summaries.asked()
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await made.settled()
        fit = await made.fit(talk(DUE))
    assert (fit.report.status, fit.report.reason, len(made.summaries.calls)) == (
        CompactionStatus.APPLIED,
        None,
        1,
    )


async def test_a_client_that_leaves_ends_the_summary_where_the_configuration_says_so() -> None:
    section = {"model": {"compaction": {"on_disconnect": "cancel"}}}
    async with bench(Summaries(hold=asyncio.Event()), ticking=True) as made:
        leaving = asyncio.create_task(made.fit(talk(DUE), **section))
        await made.summaries.asked()
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await made.settled()
        assert not made.rounds.is_busy


@pytest.mark.parametrize("text", ["", "   \n", "I'm sorry, I can't help with that."])
async def test_an_answer_that_says_nothing_costs_no_wait_and_no_request(text: str) -> None:
    async with bench(Summaries([SummaryAnswer(text)]), ticking=True) as made:
        fit, seconds = await timed(made, DUE)
    assert fit.report.status is CompactionStatus.APPLIED
    assert fit.report.reason is not None
    assert seconds == 0
    assert RULE in fit.raw.decode()
