"""Working ahead of need: begun after an answer, installed when it is due, and only where it still stands."""

import asyncio
import gc
from typing import Any

import pytest

from compaction_proxy.compaction.round_job import RoundJob
from compaction_proxy.compaction.types import CompactionMode, CompactionStatus
from compaction_proxy.core.errors import SummaryError
from compaction_proxy.core.summary.call import SummaryAnswer
from compaction_proxy.storage.memory import MemoryStore
from tests.helpers.compaction_bench import (
    HARD,
    RECORD,
    SOFT,
    TARGET,
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

# Turns of `talk`, about 98 tokens each.
BELOW, SOON, DUE = 70, 80, 93


async def warmed(made: Bench, turns: int = SOON, **over: Any) -> None:
    """A request above the soft mark, and the work that it starts, done."""
    assert (await made.answered(talk(turns), **over)).should_prepare
    await made.settled()


async def test_below_the_soft_mark_nothing_is_prepared() -> None:
    async with bench() as made:
        fit = await made.answered(talk(BELOW))
        await made.settled()
    assert (fit.report.tokens_after or 0) < SOFT
    assert (fit.report.status, fit.should_prepare, made.summaries.calls) == (CompactionStatus.NONE, False, [])


async def test_between_soft_and_trigger_work_begins_after_the_answer_and_changes_no_byte() -> None:
    async with bench() as made:
        asked = made.ask(talk(SOON))
        fit = await made.compactor.fit_request(asked)
        assert SOFT <= (fit.report.tokens_after or 0) < TRIGGER
        assert (fit.report.status, fit.should_prepare, made.summaries.calls) == (
            CompactionStatus.SCHEDULED,
            True,
            [],
        )
        assert fit.raw is asked.body.raw
        await made.compactor.prepare_round(asked)
        await made.settled()
        assert len(made.summaries.calls) == 1
        again = await made.compactor.fit_request(asked)
    assert (again.report.status, again.raw is asked.body.raw) == (CompactionStatus.SCHEDULED, True)


async def test_one_round_is_prepared_however_often_it_is_begun() -> None:
    async with bench(Summaries(hold=asyncio.Event())) as made:
        for turns in range(SOON, SOON + 5):
            await made.answered(talk(turns))
        await made.summaries.asked()
        made.summaries.release()
        await made.settled()
        await made.answered(talk(SOON + 5))
        await made.settled()
        assert len(made.summaries.calls) == 1


async def test_a_round_keeps_no_copy_of_the_clients_body_while_it_is_made() -> None:
    async with bench(Summaries(hold=asyncio.Event())) as made:
        await made.answered(talk(SOON))
        await made.summaries.asked()
        jobs = [each for each in gc.get_objects() if isinstance(each, RoundJob)]
        made.summaries.release()
        await made.settled()
    assert {each.view.request.body.raw for each in jobs} == {b""}


async def test_conversations_that_begin_alike_are_prepared_side_by_side_and_one_list_only_once() -> None:
    own = [*talk(SOON // 2), says("That is another way."), user("Take it."), *talk(SOON // 2)]
    async with bench(Summaries(hold=asyncio.Event())) as made:
        await made.answered(talk(SOON))
        await made.answered(talk(SOON + 1), conversation="c_2")
        await made.answered(own, conversation="c_3")
        await made.answered([*own, says("Done."), user("Go on.")], conversation="c_3")
        await made.summaries.asked(2)
        made.summaries.release()
        await made.settled()
        assert len(made.summaries.calls) == 2


async def test_at_the_trigger_the_ready_round_is_installed_without_another_call() -> None:
    async with bench() as made:
        await warmed(made)
        made.summaries.hold = asyncio.Event()  # whoever asks now waits for ever
        async with asyncio.timeout(100):
            fit = await made.fit(talk(DUE))
        assert (fit.report.status, fit.report.round, fit.report.reason) == (CompactionStatus.APPLIED, 1, None)
        assert len(made.summaries.calls) == 1
        again = await made.fit([*talk(DUE), says("This."), user("Go on.")])
    assert again.report.status is CompactionStatus.REUSED
    assert again.raw.startswith(prefix(fit))
    assert forwarded(fit)[-1] == talk(DUE)[-1]


async def test_everything_said_since_the_work_began_is_forwarded() -> None:
    async with bench() as made:
        await warmed(made)
        fit = await made.fit(talk(DUE))
    assert forwarded(fit)[-2 * (DUE - SOON) :] == talk(DUE)[-2 * (DUE - SOON) :]


async def test_another_replica_installs_the_same_bytes() -> None:
    store = MemoryStore()
    async with bench(store=store) as one, bench(store=store) as other:
        await warmed(one)
        theirs = await other.fit(talk(DUE))
        ours = await one.fit(talk(DUE))
        assert (theirs.report.status, ours.report.status) == (
            CompactionStatus.APPLIED,
            CompactionStatus.REUSED,
        )
        assert (ours.raw, other.summaries.calls, len(one.summaries.calls)) == (theirs.raw, [], 1)


async def test_a_ready_round_that_would_leave_too_much_is_not_installed() -> None:
    async with bench() as made:
        await warmed(made)
        await made.fit(talk(160))  # three quarters of T have come since
        assert len(made.summaries.calls) == 2


async def test_a_round_that_is_being_made_is_joined_at_the_trigger() -> None:
    async with bench(Summaries(hold=asyncio.Event())) as made:
        await made.answered(talk(SOON))
        await made.summaries.asked()
        waiting = asyncio.create_task(made.fit(talk(DUE)))
        await asyncio.sleep(0.05)
        made.summaries.release()
        fit = await waiting
        assert (fit.report.status, fit.report.reason, len(made.summaries.calls)) == (
            CompactionStatus.APPLIED,
            None,
            1,
        )
        assert (fit.report.tokens_after or 0) < TRIGGER / 2 + TARGET


async def test_an_edit_during_the_work_discards_it_for_that_branch_and_keeps_it_for_the_other() -> None:
    async with bench(Summaries(hold=asyncio.Event())) as made:
        await made.answered(talk(SOON))
        await made.summaries.asked()
        edited = talk(DUE)
        edited[9] = user("Something else altogether, please. " * 10)
        branch = asyncio.create_task(made.fit(edited))
        await made.summaries.asked(2)
        made.summaries.release()
        kept, other = await made.fit(talk(DUE)), await branch
        assert (kept.report.status, other.report.status) == (
            CompactionStatus.APPLIED,
            CompactionStatus.APPLIED,
        )
        assert kept.report.checkpoint_id != other.report.checkpoint_id
        assert len(made.summaries.calls) == 2


async def test_going_back_behind_a_ready_round_leaves_it_unused() -> None:
    async with bench() as made:
        await warmed(made, SOON)
        back = talk(30)
        fit = await made.fit(back, trigger_tokens=2_000)
        assert (fit.report.status, len(made.summaries.calls)) == (CompactionStatus.APPLIED, 2)
        assert forwarded(fit)[-1] == back[-1]


async def test_a_failed_preparation_costs_one_call_and_no_request_anything() -> None:
    async with bench(Summaries([SummaryError("http-404")])) as made:
        fits = [await made.answered(talk(turns)) for turns in range(SOON, SOON + 6)]
        await made.settled()
        assert {fit.report.status for fit in fits} == {CompactionStatus.SCHEDULED}
        assert len(made.summaries.calls) == 1
        fit = await made.fit(talk(DUE))
        assert (fit.report.status, fit.report.reason) == (CompactionStatus.APPLIED, "http-404")


async def test_nothing_is_prepared_in_shadow_or_bypass_or_without_a_model() -> None:
    async with bench() as made:
        fits = [
            await made.answered(talk(SOON), mode=CompactionMode.SHADOW),
            await made.answered(talk(SOON), mode=CompactionMode.BYPASS),
            await made.answered(talk(SOON), resolve_summary_routes=tuple),
            await made.answered(talk(SOON), uses_checkpoints=False),
            await made.answered(talk(SOON), model={"compaction": {"background": False}}),
        ]
        assert [fit.should_prepare for fit in fits] == [False] * 5
        assert made.summaries.calls == []


async def test_the_next_round_is_prepared_on_top_of_the_one_in_force() -> None:
    async with bench() as made:
        await warmed(made)
        await made.fit(talk(DUE))
        ahead = 0
        for turns in range(DUE, DUE + 100, 5):
            fit = await made.answered(talk(turns))
            await made.settled()
            ahead += fit.should_prepare
            if fit.report.round == 2:
                break
        assert (fit.report.status, fit.report.round) == (CompactionStatus.APPLIED, 2)
        assert (len(made.summaries.calls), ahead > 0) == (2, True)
        assert (fit.report.tokens_before or 0) > HARD


@pytest.mark.parametrize("conversation", ["c_1", None])
async def test_every_request_of_a_growing_conversation_fits_and_few_calls_are_made(
    conversation: str | None,
) -> None:
    async with bench() as made:
        fits = []
        for turns in range(60, 300, 3):
            fits.append(await made.answered(talk(turns), conversation=conversation))
            await made.settled()
        assert max(fit.report.tokens_after or 0 for fit in fits) < HARD
        assert CompactionStatus.FAILED_OPEN not in {fit.report.status for fit in fits}
        assert len(made.summaries.calls) <= 6


async def test_a_strategy_that_leaves_earlier_rounds_shows_the_model_none_of_them() -> None:
    async with bench(Summaries([SummaryAnswer(RECORD)]), strategy="split", window=4_000) as made:
        for turns in (40, 80, 120):
            fit = await made.fit(talk(turns))
    assert (fit.report.round or 0) > 1
    assert [RECORD in call.prompt for call in made.summaries.calls] == [False] * len(made.summaries.calls)
