"""A conversation that people want to be left alone: its requests go on as they come, and nothing is lost."""

from dataclasses import replace

from compaction_proxy.compaction.types import CompactionMode, CompactionStatus
from compaction_proxy.wires.context_errors import Overflow
from tests.helpers.compaction_bench import WINDOW, bench, mark, says, talk, user

SOON, DUE = 80, 93
WHO = ("t", "c_1")


async def test_a_bypassed_request_goes_on_as_it_came_and_resuming_brings_the_round_back() -> None:
    longer = [*talk(DUE), says("This."), user("Go on.")]
    async with bench() as made:
        assert (await made.fit(talk(DUE))).report.status is CompactionStatus.APPLIED
        before = await made.fit(longer)
        assert await made.wishing.update(*WHO, lambda known: replace(known, bypass=True))
        asked = made.ask(longer)
        fit = await made.compactor.fit_request(asked)
        assert fit.raw is asked.body.raw
        assert (fit.report.status, fit.report.reason, fit.report.round) == (
            CompactionStatus.BYPASSED,
            "asked",
            None,
        )
        assert (fit.report.tokens_before, fit.should_prepare) == (fit.report.tokens_after, False)
        assert await made.wishing.update(*WHO, lambda known: replace(known, bypass=False))
        after = await made.fit(longer)
        assert (after.report.status, after.raw) == (CompactionStatus.REUSED, before.raw)
        assert len(made.summaries.calls) == 1


async def test_no_round_is_made_of_a_bypassed_conversation_whatever_is_due() -> None:
    async with bench() as made:
        await made.wishing.update(*WHO, lambda known: replace(known, bypass=True))
        await made.wishing.update(*WHO, mark)
        fits = [
            await made.answered(talk(SOON)),
            await made.answered(talk(DUE)),
            await made.answered(talk(DUE), mode=CompactionMode.FORCE),
            await made.answered(talk(300)),  # more than the window
        ]
        await made.settled()
        assert [fit.report.status for fit in fits] == [CompactionStatus.BYPASSED] * 4
        assert (made.summaries.calls, made.heard) == ([], [])
        assert (await made.wishing.get(*WHO)).compact


async def test_a_bypassed_request_that_the_upstream_refuses_is_not_made_shorter() -> None:
    overflow = Overflow(kind="context", limit_tokens=8_000, used_tokens=9_500)
    async with bench() as made:
        await made.wishing.update(*WHO, lambda known: replace(known, bypass=True))
        asked = made.ask(talk(DUE))
        fit = await made.compactor.fit_request(asked)
        assert await made.compactor.refit_after_refusal(asked, fit, overflow) is None
        unread = await made.compactor.refit_after_refusal(
            asked, await made.fit(talk(3), mode=CompactionMode.BYPASS), overflow
        )
        assert (unread, asked.settings.window) == (None, WINDOW)


async def test_a_branch_of_a_bypassed_conversation_is_compacted_under_its_own_name() -> None:
    async with bench() as made:
        await made.wishing.update(*WHO, lambda known: replace(known, bypass=True))
        fit = await made.fit(talk(DUE), conversation="c_2")
        assert fit.report.status is CompactionStatus.APPLIED
