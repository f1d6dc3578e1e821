"""What is told of rounds: as it is kept, with what they took and kept, and when they took effect."""

import asyncio
from dataclasses import replace

import pytest

from compaction_proxy.compaction.types import CompactionStatus
from compaction_proxy.core.errors import SummaryError
from compaction_proxy.core.event import COMPACTED, FAILED, INSTALLED, MEASURED
from compaction_proxy.core.summary.call import SummaryAnswer
from compaction_proxy.recall.round_detail import KEPT, MAX_PROMPTS, STAND_IN, RoundDetailReader, SummaryPrompt
from compaction_proxy.storage.memory import MemoryStore
from tests.helpers.compaction_bench import (
    RECORD,
    ROUTE,
    TRIGGER,
    WINDOW,
    Bench,
    Summaries,
    bench,
    forwarded,
    loop,
    says,
    talk,
    user,
)

SOON, DUE = 80, 93
COUNTED = SummaryAnswer(RECORD, "stop", prompt_tokens=700, completion_tokens=50, cached_tokens=100)
GARBLED = SummaryAnswer("", "stop", prompt_tokens=600, completion_tokens=1)


def kinds(made: Bench) -> list[tuple[str, str]]:
    return [(event.kind, event.outcome) for event in made.heard]


async def test_a_round_is_announced_as_it_is_kept_with_what_it_took() -> None:
    async with bench(Summaries([COUNTED])) as made:
        fit = await made.fit(talk(DUE))
        [told] = made.heard
        assert [told] == await made.events()
    report = fit.report
    assert told.id.startswith("e_")
    assert (told.kind, told.outcome, told.round, told.place) == (
        COMPACTED,
        "applied",
        1,
        report.checkpoint_id,
    )
    assert (told.asked, told.model, told.trigger, told.window) == ("gpt-x", "cheap", report.trigger, WINDOW)
    assert report.trigger is not None
    assert TRIGGER < report.trigger < TRIGGER + 20  # the fixed part is small
    assert (told.listed, told.tokens_before) == (2 * DUE + 2, report.tokens_before)
    assert (told.calls, told.prompt_tokens, told.completion_tokens, told.cached_tokens) == (1, 700, 50, 100)
    assert told.cost_usd == 700 - 100 + 2 * 50


async def test_answers_that_were_of_no_use_are_paid_for_too() -> None:
    async with bench(Summaries([GARBLED, COUNTED])) as made:
        await made.fit(talk(DUE))
        [told] = made.heard
    assert (told.calls, told.prompt_tokens, told.completion_tokens) == (2, 1_300, 51)
    assert told.cost_usd == 602 + 700


async def test_a_round_that_fails_tells_what_its_calls_took() -> None:
    refused = replace(COUNTED, refused=True)
    async with bench(Summaries([refused]), strategy="chained") as made:
        fit = await made.fit(talk(DUE), trigger_tokens=5_000)
        [told] = made.heard
        await asyncio.sleep(0)
        assert [told] == await made.events()
    assert (fit.report.status, told.kind, told.reason) == (CompactionStatus.FAILED_OPEN, FAILED, "refused")
    assert (told.asked, told.calls, told.cost_usd, told.facts) == ("gpt-x", 1, 700.0, {})


async def test_a_round_without_a_model_took_no_call() -> None:
    async with bench(Summaries([SummaryError("http-404")])) as made:
        await made.fit(talk(DUE))
        failed, told = made.heard
    assert (failed.kind, failed.calls, failed.cost_usd) == (FAILED, 1, 0.0)
    assert (told.kind, told.model, told.calls, told.cost_usd) == (COMPACTED, "extract", None, None)


async def test_a_round_made_ahead_says_when_it_took_effect() -> None:
    async with bench() as made:
        await made.answered(talk(SOON))
        await made.settled()
        [scheduled] = await made.events()
        fit = await made.answered(talk(DUE), real=4_000)
        assert kinds(made) == [(COMPACTED, "scheduled"), (INSTALLED, "applied"), (MEASURED, "")]
        installed = made.heard[1]
        assert await made.events() == [replace(scheduled, outcome="applied", tokens_real=4_000), installed]
    report = fit.report
    assert (scheduled.outcome, installed.place, installed.round) == ("scheduled", scheduled.place, 1)
    assert (installed.tokens_before, installed.tokens_after) == (report.tokens_before, report.tokens_after)
    assert installed.reason == "percent"


async def test_two_replicas_that_put_a_round_in_force_are_one_line_of_the_history() -> None:
    store = MemoryStore()
    async with bench(store=store) as one, bench(store=store) as other:
        await one.answered(talk(SOON))
        await one.settled()
        await asyncio.gather(one.fit(talk(DUE)), other.fit(talk(DUE)))
        assert [event.kind for event in await one.events()] == [COMPACTED, INSTALLED]


async def test_a_summary_that_came_too_late_is_not_said_to_be_in_force() -> None:
    async with bench(Summaries(hold=asyncio.Event())) as made:
        fit = await made.fit(talk(DUE), patience_s=0.01)
        assert fit.report.reason == "deadline"
        made.summaries.release()
        await made.settled()
        told = [(event.outcome, event.model) for event in made.heard]
    assert told == [("applied", "extract"), ("scheduled", "cheap")]


async def test_what_the_model_saw_and_was_asked_is_kept_with_what_was_removed() -> None:
    async with bench() as made:
        sent = talk(DUE)
        fit = await made.fit(sent)
        place = bytes.fromhex(fit.report.checkpoint_id)
        detail = await RoundDetailReader(made.records, made.history).find_detail("t", "c_1", place)
        [call] = made.summaries.calls
        assert detail is not None
        assert [detail.event] == made.heard
    assert [(each.role, each.text) for each in detail.visible_messages] == [
        (each["role"], each["content"])
        for each in forwarded(fit)[1:]  # the first one is privileged
    ]
    assert detail.prompts == (SummaryPrompt(ROUTE.model, call.system, call.prompt),)
    kept = {each.id for each in detail.visible_messages if each.origin == KEPT}
    gone = {each.id for each in detail.removed}
    assert {each.origin for each in detail.visible_messages} == {KEPT, STAND_IN}
    assert (len(gone | kept), gone & kept) == (len(sent) - 1, set())


async def test_a_masked_result_is_shown_as_a_stand_in_under_its_own_id() -> None:
    async with bench() as made:
        fit = await made.fit(loop(24, lines=95))
        place = bytes.fromhex(fit.report.checkpoint_id)
        detail = await RoundDetailReader(made.records, made.history).find_detail("t", "c_1", place)
    assert detail is not None
    assert detail.prompts == ()
    masked = {each.id for each in detail.visible_messages if each.origin == STAND_IN}
    assert masked == {each.id for each in detail.removed}
    assert masked


async def test_facts_kept_and_lost_are_counted_by_kind() -> None:
    said = [
        user("RULE: never touch the billing tables."),
        says("Noted: the build is c0ffee1 at https://ci.acme.dev/7."),
    ]
    async with bench() as made:
        await made.fit([*talk(3)[:-1], *said, *talk(DUE)[1:]])
        [told] = made.heard
    assert told.facts["rule"] == (1, 1)
    assert told.facts["url"][1] == 1


@pytest.mark.parametrize("place", [bytes(64), b""])
async def test_of_a_place_without_a_round_there_is_no_detail(place: bytes) -> None:
    async with bench() as made:
        await made.fit(talk(DUE))
        assert await RoundDetailReader(made.records, made.history).find_detail("t", "c_1", place) is None
        assert await RoundDetailReader(made.records, made.history).find_detail("t", "c_2", place) is None


async def test_a_round_of_an_expired_detail_still_says_what_is_known() -> None:
    async with bench() as made:
        fit = await made.fit(talk(DUE))
        async with bench() as other:  # the event alone is there
            root = (await made.history.list_roots("t", "c_1"))[0]
            await other.history.record_root("t", "c_1", root)
            [event] = await made.events()
            await other.history.record_event("t", event)
            found = await RoundDetailReader(other.records, other.history).find_detail(
                "t", "c_1", bytes.fromhex(fit.report.checkpoint_id)
            )
    assert found is not None
    assert (found.event, found.removed, found.prompts, found.visible_messages) == (event, (), (), ())


def test_eight_prompts_are_kept() -> None:
    assert MAX_PROMPTS == 8
