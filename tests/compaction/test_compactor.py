"""The use case with the seeds' strategies: what becomes of requests, and how it is told."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import structlog

from compaction_proxy.compaction.types import CompactionMode, CompactionStatus
from compaction_proxy.config.config import Config, get_model_settings
from compaction_proxy.core.errors import StoreUnavailableError, SummaryError
from compaction_proxy.core.summary.call import SummaryAnswer
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.wires.context_errors import Overflow
from tests.helpers.compaction_bench import (
    Bench,
    JsonObject,
    Summaries,
    bench,
    forwarded,
    loop,
    talk,
)

SMALL_WINDOW = 4_000
FIRST = SummaryAnswer("### Work\nFirst record: the steps so far are done and it works fine.")
SECOND = SummaryAnswer("### Work\nSecond record: further steps are done and it works fine.")
DONE = SummaryAnswer("### Work\nAll done: the steps so far are done and it works fine.")


@pytest.fixture
async def chained() -> AsyncIterator[Bench]:
    async with bench(Summaries([DONE]), strategy="chained", window=SMALL_WINDOW) as made:
        yield made


async def test_a_small_conversation_goes_on_as_the_very_bytes_that_came(chained: Bench) -> None:
    asked = chained.ask(talk(2))
    fit = await chained.compactor.fit_request(asked)
    assert fit.raw is asked.body.raw
    assert (fit.report.status, chained.summaries.calls) == (CompactionStatus.NONE, [])


async def test_a_long_one_is_compacted_and_the_next_request_reuses_the_same_bytes(chained: Bench) -> None:
    first = await chained.fit(talk(40))
    assert (first.report.status, first.report.round) == (CompactionStatus.APPLIED, 1)
    grown = [*talk(40), {"role": "assistant", "content": "This."}, {"role": "user", "content": "Go on."}]
    second = await chained.fit(grown)
    assert (second.report.status, len(chained.summaries.calls)) == (CompactionStatus.REUSED, 1)
    start = first.raw[: first.raw.rindex(b', "seed"') - 1]  # all of the first list but its closing bracket
    assert second.raw.startswith(start)
    assert forwarded(second)[1]["content"].startswith(
        "## Session Summary (Compaction Round 1)\n\n### Original Task"
    )


async def test_the_next_round_integrates_the_one_before(chained: Bench) -> None:
    chained.summaries.answers = [
        FIRST,
        SECOND,
    ]
    await chained.fit(talk(40))
    fit = await chained.fit(talk(80))
    assert (fit.report.status, fit.report.round) == (CompactionStatus.APPLIED, 2)
    assert "First record" in chained.summaries.calls[1].prompt.partition("## Messages to Summarize")[0]
    assert "First record" not in chained.summaries.calls[0].prompt
    assert chained.summaries.calls[0].system == chained.summaries.calls[1].system
    [stand_in] = [each for each in forwarded(fit) if each["content"].startswith("## Session Summary")]
    assert stand_in["content"].startswith("## Session Summary (Compaction Round 2)")
    assert stand_in["content"].endswith("context from 1 previous compaction round.")


async def test_an_edited_message_makes_a_stored_summary_a_miss(chained: Bench) -> None:
    await chained.fit(talk(40))
    chained.summaries.answers = [SummaryError("http-404")]
    edited = talk(40)
    edited[5]["content"] = "Something else altogether. " * 10
    fit = await chained.fit(edited)
    assert not any("All done." in str(each["content"]) for each in forwarded(fit))


async def test_another_tenant_never_gets_the_summary(chained: Bench) -> None:
    await chained.fit(talk(40))
    fit = await chained.fit(talk(40), tenant="other", resolve_summary_routes=tuple)
    assert not any("All done." in str(each["content"]) for each in forwarded(fit))


async def test_a_branch_under_another_id_shares_what_its_ancestor_has_made(chained: Bench) -> None:
    await chained.fit(talk(40))
    fit = await chained.fit(talk(40), conversation="c_2")
    assert (fit.report.status, len(chained.summaries.calls)) == (CompactionStatus.REUSED, 1)


async def test_without_any_id_the_conversation_is_found_and_its_id_carried_along(chained: Bench) -> None:
    first = await chained.fit(talk(40), conversation=None)
    second = await chained.fit(talk(42), conversation=None)
    assert (second.report.status, second.report.conversation) == (
        CompactionStatus.REUSED,
        (await chained.fit(talk(44), conversation=None)).report.conversation,
    )
    assert second.report.conversation is not None
    assert first.report.conversation == second.report.conversation


async def test_requests_at_once_share_one_summary(chained: Bench) -> None:
    chained.summaries.hold = asyncio.Event()
    running = [asyncio.create_task(chained.fit(talk(40))) for _ in range(20)]
    while not chained.summaries.calls:  # noqa: ASYNC110 - the model is no event of ours
        await asyncio.sleep(0)
    chained.summaries.hold.set()
    fits = await asyncio.gather(*running)
    assert len(chained.summaries.calls) == 1
    assert len({fit.raw for fit in fits}) == 1


def other(messages: list[JsonObject]) -> list[JsonObject]:
    """The same conversation with other tool results."""
    results = {"content": "another line of code; " * 30}
    return [{**each, **results} if each["role"] == "tool" else each for each in messages]


async def test_other_tool_results_under_the_same_calls_never_get_the_summary(chained: Bench) -> None:
    chained.summaries.answers = [FIRST, SECOND]
    await chained.fit(loop(60))
    fit = await chained.fit(other(loop(60)))
    assert (b"First record" in fit.raw, b"Second record" in fit.raw) == (False, True)
    again = await chained.fit([*other(loop(60)), {"role": "assistant", "content": "Found it."}])
    assert (again.report.status, len(chained.summaries.calls)) == (CompactionStatus.REUSED, 2)


async def test_requests_at_once_with_other_tool_results_share_no_summary(chained: Bench) -> None:
    chained.summaries.answers = [FIRST, SECOND]
    chained.summaries.hold = asyncio.Barrier(2)
    async with asyncio.timeout(100):
        first, second = await asyncio.gather(chained.fit(loop(60)), chained.fit(other(loop(60))))
    told = [(b"First record" in fit.raw, b"Second record" in fit.raw) for fit in (first, second)]
    assert sorted(told) == [(False, True), (True, False)]


async def test_a_fault_of_ours_while_summarising_counts_as_no_summary(chained: Bench) -> None:
    chained.summaries.answers = []  # the summary model's own fault: IndexError
    fit = await chained.fit(talk(120))
    assert (fit.report.status, fit.report.reason) == (CompactionStatus.APPLIED, "internal")
    assert fit.report.tokens_after is not None
    assert fit.report.tokens_after <= SMALL_WINDOW


@pytest.mark.parametrize("shortage", [MemoryError(), RuntimeError("can't start new thread")])
async def test_a_round_for_which_no_memory_or_thread_is_left_is_no_fault(
    chained: Bench, shortage: Exception
) -> None:
    chained.summaries.answers = [shortage]
    with structlog.testing.capture_logs() as logged:
        fit = await chained.fit(talk(120))
    assert (fit.report.status, fit.report.reason) == (CompactionStatus.APPLIED, "out-of-resources")
    assert [line["event"] for line in logged if line["log_level"] == "warning"] == ["compaction.failed"]
    assert [line for line in logged if line["log_level"] == "error"] == []


async def test_a_request_whose_reading_takes_more_memory_than_is_left_goes_on_as_it_came(
    chained: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def starve(*_: object, **__: object) -> None:
        raise MemoryError

    asked = chained.ask(talk(40))
    monkeypatch.setattr(chained.compactor._loader, "load_view", starve)
    fit = await chained.compactor.fit_request(asked)
    assert fit.raw is asked.body.raw
    assert (fit.report.status, fit.report.reason) == (CompactionStatus.FAILED_OPEN, "out-of-resources")


async def test_below_the_limit_a_failed_summary_forwards_what_came(chained: Bench) -> None:
    chained.summaries.answers = [SummaryError("http-404")]
    asked = chained.ask(talk(26))
    fit = await chained.compactor.fit_request(asked)
    assert fit.raw is asked.body.raw
    assert (fit.report.status, fit.report.reason) == (CompactionStatus.FAILED_OPEN, "http-404")


async def test_below_the_limit_a_failed_summary_leaves_the_round_before_in_force(chained: Bench) -> None:
    await chained.fit(talk(26))
    chained.summaries.answers = [SummaryError("http-404")]
    fit = await chained.fit(talk(48))
    assert (fit.report.status, fit.report.reason) == (CompactionStatus.FAILED_OPEN, "http-404")
    assert fit.report.round == 1
    assert len(forwarded(fit)) < len(talk(48))


async def test_above_the_limit_a_text_without_a_model_stands_in_as_a_summary_would(chained: Bench) -> None:
    chained.summaries.answers = [SummaryError("http-404")]
    rule = "Never touch the file prod.env."
    fit = await chained.fit(talk(100, start=f"Build it. {rule}"))
    kept = forwarded(fit)
    assert (fit.report.status, fit.report.reason, fit.report.round) == (
        CompactionStatus.APPLIED,
        "http-404",
        1,
    )
    assert (fit.report.tokens_after or 0) <= SMALL_WINDOW
    assert kept[1]["role"] == "assistant"
    assert kept[1]["content"].startswith(
        "## Session Summary (Compaction Round 1)\n\n### Original Task\nBuild it."
    )
    assert rule in kept[1]["content"]
    assert [kept[0], *kept[2:]] == [talk(1)[0], *talk(100)[-10:]]


async def test_a_conversation_whose_summary_failed_is_left_alone_for_a_while(chained: Bench) -> None:
    chained.summaries.answers = [SummaryError("refused")]
    await chained.fit(talk(26))
    fit = await chained.fit(talk(27))
    assert (fit.report.status, fit.report.reason) == (CompactionStatus.FAILED_OPEN, "refused")
    assert len(chained.summaries.calls) == 1
    chained.now[0] += 31
    await chained.fit(talk(28))
    assert len(chained.summaries.calls) == 2


async def test_an_agent_loop_with_one_user_message_shrinks_around_it(chained: Bench) -> None:
    messages = loop(60)
    fit = await chained.fit(messages)
    kept = forwarded(fit)
    assert fit.report.status is CompactionStatus.APPLIED
    assert kept[0] == messages[0]
    assert kept[1]["role"] == "assistant"
    assert "### Original Task" not in kept[1]["content"]
    assert kept[-10:] == messages[-10:]
    assert (fit.report.tokens_after or 0) < (fit.report.tokens_before or 0) / 3


async def test_a_tool_result_that_the_client_has_cleared_still_matches(chained: Bench) -> None:
    await chained.fit(loop(60))
    cleared = loop(64)
    for message in cleared[:80]:
        if message["role"] == "tool":
            message["content"] = "[cleared]"
    assert (await chained.fit(cleared)).report.status is CompactionStatus.REUSED


async def test_going_back_to_where_the_last_user_message_is_covered_shows_that_message(
    chained: Bench,
) -> None:
    await chained.fit(talk(40))
    back = talk(40)[:60]  # ends with an answer; its last user message is inside the covered stretch
    fit = await chained.fit(back, resolve_summary_routes=tuple)
    assert back[59]["role"] == "user"
    assert forwarded(fit)[-1] == back[-1]


async def test_a_refused_request_is_made_shorter_than_the_limit_that_the_error_names(chained: Bench) -> None:
    asked = replace(chained.ask(talk(100)), settings=get_model_settings(Config(), "gpt-x"))
    sent = await chained.compactor.fit_request(asked)
    assert sent.report.status is CompactionStatus.NONE
    refit = await chained.compactor.refit_after_refusal(
        asked, sent, Overflow("context", limit_tokens=3_000, used_tokens=9_000)
    )
    assert refit is not None
    assert (refit.report.tokens_after or 0) <= 3_000
    assert (refit.report.window, refit.report.tokens_before) == (3_000, 9_000)  # the size that it names
    again = await chained.compactor.fit_request(asked)
    assert (again.report.window, again.report.status) == (3_000, CompactionStatus.REUSED)


async def test_a_refused_size_is_remembered_for_a_limit_that_the_request_mentions(chained: Bench) -> None:
    messages = talk(100)
    messages[3]["content"] = "maximum context length is 3,000 tokens"  # an error may echo it
    asked = replace(chained.ask(messages), settings=get_model_settings(Config(), "gpt-x"))
    sent = await chained.compactor.fit_request(asked)
    refit = await chained.compactor.refit_after_refusal(
        asked, sent, Overflow("context", limit_tokens=3_000, used_tokens=9_000)
    )
    assert refit is not None
    assert (refit.report.tokens_after or 0) <= 3_000
    assert (
        await chained.compactor.fit_request(asked)
    ).report.window == 8_100  # nine tenths of what was refused


async def test_what_one_tenant_provokes_teaches_nothing_about_another(chained: Bench) -> None:
    asked = replace(chained.ask(talk(100)), settings=get_model_settings(Config(), "gpt-x"))
    sent = await chained.compactor.fit_request(asked)
    await chained.compactor.refit_after_refusal(
        asked, sent, Overflow("context", limit_tokens=3_000, used_tokens=9_000)
    )
    other = await chained.compactor.fit_request(replace(asked, tenant="other"))
    assert (other.report.window, other.report.status) == (128_000, CompactionStatus.NONE)


async def test_nothing_is_done_where_every_trigger_is_off(chained: Bench) -> None:
    asked = chained.ask(talk(100), model={"compaction": {"trigger": 0}})
    fit = await chained.compactor.fit_request(asked)
    assert (fit.raw is asked.body.raw, fit.report.status) == (True, CompactionStatus.NONE)
    assert (
        await chained.compactor.refit_after_refusal(
            asked, fit, Overflow("context", limit_tokens=3_000, used_tokens=9_000)
        )
        is None
    )


async def test_the_client_may_lower_the_trigger_but_not_raise_it(chained: Bench) -> None:
    lowered = await chained.fit(talk(20), trigger_tokens=500)
    raised = await chained.fit(talk(40), trigger_tokens=10**8)
    assert (lowered.report.status, raised.report.status) == (
        CompactionStatus.APPLIED,
        CompactionStatus.APPLIED,
    )


async def test_shadow_reports_what_is_due_and_changes_nothing(chained: Bench) -> None:
    asked = chained.ask(talk(26), mode=CompactionMode.SHADOW)
    fit = await chained.compactor.fit_request(asked)
    assert fit.raw is asked.body.raw
    assert (fit.report.status, fit.report.reason, chained.summaries.calls) == (
        CompactionStatus.SHADOW,
        "percent",
        [],
    )


async def test_iterations_fire_every_eighth_and_not_on_every_request(chained: Bench) -> None:
    over = {"model": {"compaction": {"trigger": [{"iterations": 8}]}}, "window": 100_000}
    statuses = [(await chained.fit(talk(turns), **over)).report.status for turns in range(4, 28)]
    applied = [
        turns
        for turns, status in zip(range(4, 28), statuses, strict=True)
        if status is CompactionStatus.APPLIED
    ]
    assert applied == [8, 16, 24]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (SummaryAnswer(""), "empty"),
        (SummaryAnswer("x", finish_reason="length"), "truncated"),
        (SummaryAnswer("x", finish_reason="content_filter"), "content-filter"),
        (SummaryAnswer("x", called_tools=True), "tool-calls"),
        (SummaryAnswer("x", refused=True), "refused"),
        (SummaryAnswer("word " * 12_000), "longer"),
    ],
)
async def test_an_unusable_summary_is_never_used(chained: Bench, answer: SummaryAnswer, reason: str) -> None:
    chained.summaries.answers = [answer]
    asked = chained.ask(talk(26))
    fit = await chained.compactor.fit_request(asked)
    assert (fit.report.status, fit.report.reason) == (CompactionStatus.FAILED_OPEN, reason)
    assert fit.raw is asked.body.raw


async def test_a_store_that_fails_costs_no_summary_per_turn() -> None:
    class Broken(MemoryStore):
        async def read(self, keys: Any) -> Any:
            raise StoreUnavailableError("store-failed")

        async def commit(self, claim: Any, also: Any = (), *, lease: Any = None) -> Any:
            raise StoreUnavailableError("store-failed")

    async with bench(Summaries([DONE]), store=Broken(), strategy="chained", window=SMALL_WINDOW) as broken:
        await broken.fit(talk(40))
        assert (await broken.fit(talk(41))).report.status is CompactionStatus.REUSED
        assert len(broken.summaries.calls) == 1


async def test_strict_alternation_begins_with_a_user_message_and_alternates(chained: Bench) -> None:
    fit = await chained.fit(loop(60), model={"alternation": "strict"})
    roles = [each["role"] for each in forwarded(fit) if each["role"] in {"user", "assistant"}]
    plain = [role for role, after in zip(roles, [*roles[1:], ""], strict=True) if role != after]
    assert roles[0] == "user"
    assert len(plain) >= len(roles) - 5  # tool results stand between the assistant messages of the tail
