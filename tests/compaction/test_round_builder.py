"""The chain of records that `anchored` builds: frozen bytes, consolidation, the ledger, undoing."""

import json
from itertools import pairwise

from compaction_proxy.compaction.types import CompactionMode, CompactionStatus, FitResult
from compaction_proxy.core.errors import SummaryError
from compaction_proxy.core.summary.call import SummaryAnswer
from tests.helpers.compaction_bench import (
    RECORD,
    Answer,
    Bench,
    JsonObject,
    Summaries,
    bench,
    called,
    forwarded,
    mark,
    says,
    undo,
    user,
)

RULES = ("Never touch the file prod.env.", "Always answer in one sentence.")


def talk(turns: int) -> list[JsonObject]:
    """Turns of about 100 tokens; the rules are said at the start and in turn 20."""
    messages: list[JsonObject] = [{"role": "system", "content": "Be brief."}, user(f"Build it. {RULES[0]}")]
    for turn in range(turns):
        messages.append(says(f"Done {turn}: " + "it works fine " * 14))
        messages.append(user(f"Step {turn}: {RULES[1] if turn == 20 else ''} " + "please look again " * 14))
    return messages


def numbered(count: int) -> Summaries:
    """A summary model that says which call it was."""
    return Summaries(
        [
            SummaryAnswer(RECORD.replace("steps so far", f"steps of stretch {number}"))
            for number in range(count)
        ]
    )


def records(fit: FitResult) -> list[str]:
    return [
        each["content"]
        for each in forwarded(fit)
        if isinstance(each["content"], str) and each["content"].startswith("[Record ")
    ]


def carried(fit: FitResult) -> str:
    [found] = [each["content"] for each in forwarded(fit) if str(each["content"]).startswith("[Carried over")]
    return str(found)


async def rounds(made: Bench, turns: range) -> list[FitResult]:
    """The fits of a growing conversation for which a round was applied."""
    fits = []
    for count in turns:
        fits.append(await made.answered(talk(count)))
        await made.settled()
    return [fit for fit in fits if fit.report.status is CompactionStatus.APPLIED]


async def test_records_are_frozen_and_each_round_adds_one_until_all_are_written_anew() -> None:
    async with bench(numbered(30)) as made:
        applied = await rounds(made, range(60, 500, 3))
        calls = [call.prompt for call in made.summaries.calls]
    held = [records(fit) for fit in applied]
    assert [fit.report.round for fit in applied] == list(range(1, len(applied) + 1))
    anew = next(k for k in range(1, len(held)) if held[k][:1] != held[0][:1])
    for before, after in pairwise(held[:anew]):
        assert after[:-1] == before
    assert len(held[anew]) == 1
    assert 1 < len(held[anew - 1]) <= 6
    # Consolidation reads the originals, never what a model wrote of them.
    assert "Done 0: it works fine" in calls[anew]
    assert not any(f"stretch {number}" in calls[anew] for number in range(30))
    assert "Done 0: it works fine" not in calls[anew - 1]


async def test_every_rule_is_there_after_every_round_whatever_the_model_writes() -> None:
    bad: list[Answer] = [
        SummaryAnswer(""),
        SummaryError("http-404"),
        SummaryAnswer(RECORD),
        SummaryAnswer("Sorry."),
    ]
    async with bench(Summaries([*bad, *bad, *bad])) as made:
        applied = []
        for fit in await rounds(made, range(60, 400, 4)):
            made.now[0] += 60
            applied.append(fit)
    assert len(applied) > 3
    for fit in applied:
        assert all(rule in fit.raw.decode() for rule in RULES)


async def test_the_ledger_is_written_anew_with_each_round_and_stands_behind_the_records() -> None:
    async with bench(numbered(9)) as made:
        first, second, *_ = await rounds(made, range(60, 250, 3))
    assert carried(first) != carried(second)
    for fit in (first, second):
        lists = [str(each["content"]) for each in forwarded(fit)]
        assert lists[:2] == [str(each["content"]) for each in talk(1)[:2]]
        assert lists.index(carried(fit)) == 2 + len(records(fit))


async def test_pins_stand_in_the_ledger_of_every_round() -> None:
    async with bench(numbered(9)) as made:
        await made.fit(talk(5))
        await made.wishing.add_pin("t", "c_1", "The port is 8443.")
        applied = await rounds(made, range(60, 250, 3))
        header = await made.fit(
            talk(130), pins=("The host is db7.",), mode=CompactionMode.FORCE, conversation="c_2"
        )
    assert len(applied) > 1
    assert all("The port is 8443." in carried(fit) for fit in applied)
    assert "The host is db7." in carried(header)


async def test_a_pin_is_kept_before_its_request_goes_on() -> None:
    async with bench(numbered(9)) as made:
        await made.fit(talk(5), pins=("The host is db7.", "The port is 8443."))
        assert (await made.wishing.get("t", "c_1")).pins == ("The host is db7.", "The port is 8443.")
        forced = await made.fit(
            talk(130), pins=("The key is k9.",), mode=CompactionMode.FORCE, conversation=None
        )
        minted = forced.report.conversation
        assert minted is not None
        assert (await made.wishing.get("t", minted)).pins == ("The key is k9.",)
        await made.fit(talk(6), pins=("Past us, too.",), mode=CompactionMode.BYPASS, conversation="c_2")
        assert (await made.wishing.get("t", "c_2")).pins == ("Past us, too.",)


async def test_an_undone_round_is_not_applied_and_none_is_made_until_the_hard_mark() -> None:
    async with bench() as made:
        fit = await made.fit(talk(95))
        assert fit.report.status is CompactionStatus.APPLIED
        await made.wishing.update("t", "c_1", undo(bytes.fromhex(fit.report.checkpoint_id)))
        undone = [await made.answered(talk(count)) for count in (95, 96, 97)]
        assert {each.report.status for each in undone} == {CompactionStatus.NONE}
        assert not any(each.should_prepare for each in undone)
        hard = await made.fit(talk(125))
        after = await made.fit(talk(126))
    assert (hard.report.status, after.report.status) == (CompactionStatus.APPLIED, CompactionStatus.REUSED)
    assert hard.report.checkpoint_id != fit.report.checkpoint_id


async def test_force_ends_an_undo_and_the_very_round_may_come_back() -> None:
    async with bench() as made:
        fit = await made.fit(talk(95))
        await made.wishing.update("t", "c_1", undo(bytes.fromhex(fit.report.checkpoint_id)))
        forced = await made.fit(talk(95), mode=CompactionMode.FORCE)
        after = await made.fit(talk(95))
    assert (forced.report.status, after.report.status) == (CompactionStatus.APPLIED, CompactionStatus.REUSED)
    assert forced.raw == fit.raw == after.raw
    assert len(made.summaries.calls) == 1


async def test_an_undone_round_made_ahead_of_need_is_not_installed() -> None:
    async with bench() as made:
        await made.answered(talk(80))
        await made.settled()
        [event] = await made.events()
        assert (event.reason, event.outcome) == ("soft", "scheduled")
        await made.wishing.update("t", "c_1", undo(bytes.fromhex(event.place)))
        fit = await made.fit(talk(95))
        forced = await made.fit(talk(95), mode=CompactionMode.FORCE)
    assert fit.report.status is CompactionStatus.NONE
    assert (forced.report.status, forced.report.checkpoint_id != event.place) == (
        CompactionStatus.APPLIED,
        True,
    )


async def test_a_prepared_round_is_not_used_after_an_undo_of_the_round_before() -> None:
    async with bench(numbered(9)) as made:
        first, *_ = await rounds(made, range(60, 110, 3))
        turns = 110
        while (await made.events())[-1].outcome != "scheduled":
            await made.answered(talk(turns))
            await made.settled()
            turns += 1
        prepared = (await made.events())[-1]
        await made.wishing.update("t", "c_1", undo(bytes.fromhex(first.report.checkpoint_id)))
        over = await made.fit(talk(turns + 30))
        after = await made.fit(talk(turns + 31))
    assert (over.report.status, over.report.round) == (CompactionStatus.APPLIED, 1)
    assert over.report.checkpoint_id not in {first.report.checkpoint_id, prepared.place}
    assert records(over)[:1] != records(first)[:1]
    assert after.report.checkpoint_id == over.report.checkpoint_id


async def test_a_round_that_a_request_waited_for_says_that_it_was_applied() -> None:
    async with bench() as made:
        fit = await made.fit(talk(95))
        [event] = await made.events()
    assert (fit.report.status, event.reason, event.outcome) == (
        CompactionStatus.APPLIED,
        "percent",
        "applied",
    )


async def test_after_an_undo_the_round_before_is_in_force() -> None:
    async with bench(numbered(9)) as made:
        first, second, *_ = await rounds(made, range(60, 250, 3))
        await made.wishing.update("t", "c_1", undo(bytes.fromhex(second.report.checkpoint_id)))
        back = await made.fit(
            [*talk((second.report.messages_before or 0) // 2 - 1), says("Yes."), user("Go.")]
        )
    assert (back.report.round, records(back)) == (1, records(first))


async def test_a_mark_compacts_the_next_request_and_ends() -> None:
    async with bench() as made:
        await made.wishing.update("t", "c_1", mark)
        marked = await made.fit(talk(60))
        after = await made.fit(talk(61))
    assert (marked.report.status, after.report.status) == (CompactionStatus.APPLIED, CompactionStatus.REUSED)


async def test_a_mark_ends_where_there_is_nothing_to_take() -> None:
    short = [user("Hello."), says("Hi."), user("And?"), says("Yes."), user("Go.")]
    async with bench() as made:
        await made.wishing.update("t", "c_1", mark)
        marked = await made.fit(short)
        wishes = await made.wishing.get("t", "c_1")
    assert (marked.report.status, marked.report.reason) == (CompactionStatus.NONE, "nothing-to-take")
    assert (wishes.compact, json.loads(marked.raw)["messages"]) == (False, short)


async def test_a_mark_stays_where_the_summary_fails() -> None:
    async with bench(Summaries([SummaryError("refused")]), strategy="chained") as made:
        await made.wishing.update("t", "c_1", mark)
        marked = await made.fit(talk(60))
        wishes = await made.wishing.get("t", "c_1")
    assert (marked.report.status, wishes.compact) == (CompactionStatus.FAILED_OPEN, True)


async def test_calls_and_results_of_rounds_are_whole_or_gone() -> None:
    messages: list[JsonObject] = [user("Find it.")]
    for step in range(150):
        messages += called(step, f"{step}: " + "it works fine; " * 20)
    async with bench(numbered(9)) as made:
        for stop in range(161, len(messages) + 1, 10):
            fit = await made.answered(messages[:stop])
            await made.settled()
            kept = forwarded(fit)
            calls = [call["id"] for each in kept for call in each.get("tool_calls", ())]
            answers = [each["tool_call_id"] for each in kept if each["role"] == "tool"]
            assert calls == answers
