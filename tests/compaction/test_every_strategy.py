"""What holds of every strategy alike: statuses, frozen bytes, idempotence, small windows."""

import json
from typing import Any

import pytest

from compaction_proxy.compaction.types import CompactionMode, CompactionStatus, FitResult
from compaction_proxy.core.errors import SummaryError
from compaction_proxy.core.strategies import STRATEGIES
from tests.helpers.compaction_bench import (
    Bench,
    JsonObject,
    Summaries,
    bench,
    called,
    forwarded,
    prefix,
    says,
    talk,
    user,
)

NAMES = tuple(STRATEGIES)
SUMMARISING = tuple(name for name, row in STRATEGIES.items() if row.summary)
# Above this trigger, and well below the limit of the window.
LOW = {"trigger_tokens": 3_000}
RULE = "Never touch the file prod.env."


def work(turns: int) -> list[JsonObject]:
    """Talk and tool calls, about 170 tokens a turn, with a rule at its beginning."""
    messages: list[JsonObject] = [{"role": "system", "content": "Be brief."}, user(f"Build it. {RULE}")]
    for turn in range(turns):
        messages += [*called(turn, f"{turn}: " + "it works fine; " * 24), says(f"Step {turn} is done.")]
        messages.append(user(f"Step {turn}: please look again at the build."))
    return messages


async def settled(made: Bench, turns: int, **over: Any) -> FitResult:
    """The fit of a request that takes several rounds: `selective` guesses what its runs will come to."""
    fit = await made.fit(work(turns), **over)
    while (again := await made.fit(work(turns), **over)).report.status is CompactionStatus.APPLIED:
        assert len(again.raw) < len(fit.raw)
        fit = again
    return fit


async def fitted(made: Bench, turns: int) -> bytes:
    return (await made.fit(work(turns), **LOW)).raw


@pytest.mark.parametrize("strategy", NAMES)
async def test_a_round_is_applied_once_and_reused_with_the_same_bytes(strategy: str) -> None:
    async with bench(strategy=strategy) as made:
        first = await settled(made, 45, **LOW)
        calls = len(made.summaries.calls)
        again = await made.fit(work(45), **LOW)
        grown = await made.fit([*work(45), says("This."), user("Go on.")], **LOW)
    statuses = [each.report.status for each in (first, again, grown)]
    assert statuses == [CompactionStatus.APPLIED, CompactionStatus.REUSED, CompactionStatus.REUSED]
    assert again.raw == first.raw
    assert grown.raw.startswith(prefix(first))
    assert (first.report.tokens_after or 0) < (first.report.tokens_before or 0)
    assert len(made.summaries.calls) == calls
    assert (calls == 1) is (strategy in SUMMARISING) or strategy == "selective"


@pytest.mark.parametrize("strategy", NAMES)
async def test_two_replicas_make_the_same_bytes_of_the_same_request(strategy: str) -> None:
    async with bench(strategy=strategy) as one, bench(strategy=strategy) as other:
        assert await fitted(one, 45) == await fitted(other, 45)


@pytest.mark.parametrize("strategy", NAMES)
async def test_rounds_follow_each_other_and_each_keeps_the_request_small(strategy: str) -> None:
    async with bench(strategy=strategy) as made:
        fits = [await made.answered(work(turns), **LOW) for turns in range(30, 130, 5)]
        await made.settled()
    rounds = [fit.report.round for fit in fits if fit.report.round]
    assert rounds == sorted(rounds)
    assert (rounds[0], rounds[-1] >= 2) == (1, True)
    assert {fit.report.status for fit in fits[2:]} <= {CompactionStatus.APPLIED, CompactionStatus.REUSED}
    assert max(fit.report.tokens_after or 0 for fit in fits[4:]) < 9_000


@pytest.mark.parametrize("strategy", SUMMARISING)
@pytest.mark.parametrize("failure", ["refused", "http-404", "garbage"])
async def test_below_the_limit_a_seed_fails_open_and_anchored_goes_on_without_a_model(
    strategy: str, failure: str
) -> None:
    async with bench(Summaries([SummaryError(failure)]), strategy=strategy) as made:
        asked = made.ask(work(45), **LOW)
        fit = await made.compactor.fit_request(asked)
    assert fit.report.reason == failure
    if strategy == "anchored":
        assert fit.report.status is CompactionStatus.APPLIED
        assert RULE in fit.raw.decode()
        assert len(fit.raw) < len(asked.body.raw) / 2
    else:
        assert (fit.report.status, fit.raw is asked.body.raw) == (CompactionStatus.FAILED_OPEN, True)


@pytest.mark.parametrize("strategy", SUMMARISING)
async def test_above_the_limit_a_text_without_a_model_takes_the_summary_s_place(strategy: str) -> None:
    async with bench(Summaries([SummaryError("http-404")]), strategy=strategy, window=4_000) as made:
        fit = await settled(made, 60)
        again = await made.fit(work(60))
    assert (fit.report.status, fit.report.reason) == (CompactionStatus.APPLIED, "http-404")
    assert (fit.report.tokens_after or 0) <= 4_000
    assert RULE in fit.raw.decode()
    assert (again.report.status, again.raw) == (CompactionStatus.REUSED, fit.raw)
    assert len(made.summaries.calls) == 1  # the model is left alone for a while


@pytest.mark.parametrize("strategy", SUMMARISING)
async def test_without_a_summary_model_nothing_is_asked_and_nothing_fails(strategy: str) -> None:
    async with bench(strategy=strategy, window=4_000) as made:
        fits = [await made.answered(work(turns), resolve_summary_routes=tuple) for turns in (20, 30, 40, 60)]
        kinds = {event.kind for event in await made.events()}
    assert CompactionStatus.SCHEDULED not in {fit.report.status for fit in fits}
    assert {fit.report.reason for fit in fits} <= {None, "no-summary-model"}
    assert CompactionStatus.APPLIED in {fit.report.status for fit in fits}
    assert max(fit.report.tokens_after or 0 for fit in fits) <= 4_000
    assert ("failed" in kinds, made.summaries.calls) == (False, [])


@pytest.mark.parametrize("strategy", NAMES)
async def test_what_cannot_be_made_to_fit_is_forwarded_and_said_to_be_over_the_limit(strategy: str) -> None:
    messages = [{"role": "system", "content": "Obey the law of the land. " * 1_000}, *work(10)[1:]]
    async with bench(strategy=strategy, window=4_000) as made:
        fits = [await made.fit(messages) for _ in range(3)]
        grown = [await made.fit([*messages, *(says("Yes."), user("Go on.")) * n]) for n in range(1, 8)]
    assert {fit.report.status for fit in (*fits, *grown)} == {CompactionStatus.OVER_LIMIT}
    assert all(len(forwarded(fit)) >= 2 for fit in fits)
    assert all(forwarded(fit)[0] == messages[0] for fit in fits)
    assert len(made.summaries.calls) <= 2


@pytest.mark.parametrize("strategy", NAMES)
async def test_shadow_and_bypass_change_nothing(strategy: str) -> None:
    async with bench(strategy=strategy) as made:
        shadow = made.ask(work(45), mode=CompactionMode.SHADOW, **LOW)
        bypassed = made.ask(work(45), mode=CompactionMode.BYPASS, **LOW)
        fits = [await made.compactor.fit_request(asked) for asked in (shadow, bypassed)]
    assert [fit.report.status for fit in fits] == [CompactionStatus.SHADOW, CompactionStatus.BYPASSED]
    assert [fit.raw for fit in fits] == [shadow.body.raw, bypassed.body.raw]
    assert fits[0].report.reason in {"tokens", "iterations"}
    assert made.summaries.calls == []


@pytest.mark.parametrize("strategy", NAMES)
async def test_force_compacts_what_is_small_and_is_told_where_nothing_can_be_taken(strategy: str) -> None:
    async with bench(strategy=strategy) as made:
        forced = await made.fit(work(30), mode=CompactionMode.FORCE)
        short = await made.fit(
            [user("Hello."), says("Hi."), user("And?")], mode=CompactionMode.FORCE, conversation="c_2"
        )
    assert forced.report.status is CompactionStatus.APPLIED
    assert (short.report.status, short.report.reason) == (CompactionStatus.NONE, "nothing-to-take")


@pytest.mark.parametrize("strategy", [name for name in NAMES if name != "anchored"])
async def test_only_anchored_works_ahead_of_need(strategy: str) -> None:
    async with bench(strategy=strategy) as made:
        fits = [await made.answered(work(turns), **LOW) for turns in range(5, 28)]
    assert not any(fit.should_prepare for fit in fits)


@pytest.mark.parametrize("strategy", NAMES)
@pytest.mark.parametrize("window", [900, 2_000, 8_192])
async def test_small_windows_work(strategy: str, window: int) -> None:
    async with bench(strategy=strategy, window=window) as made:
        fits = [await made.answered(work(turns)) for turns in range(1, 120, 7)]
        await made.settled()
    assert max(fit.report.tokens_after or 0 for fit in fits) <= window
    assert {fit.report.status for fit in fits} <= {*CompactionStatus} - {
        CompactionStatus.OVER_LIMIT,
        CompactionStatus.FAILED_OPEN,
    }
    lists = [forwarded(fit) for fit in fits]
    if strategy != "full":
        assert all(kept[-1] == work(turns)[-1] for kept, turns in zip(lists, range(1, 120, 7), strict=True))
    assert all(kept[0] == work(1)[0] for kept in lists)


async def test_a_request_chooses_its_strategy_and_checkpoints_do_not_mix() -> None:
    async with bench() as made:
        plain = await made.fit(work(45), strategy=None, **LOW)
        chained = await made.fit(work(45), strategy="chained", **LOW)
        again = await made.fit(work(45), strategy=None, **LOW)
        pruned = await made.fit(work(45), strategy="prune", **LOW)
    assert [fit.report.strategy for fit in (plain, chained, again, pruned)] == [
        "anchored",
        "chained",
        "anchored",
        "prune",
    ]
    assert [fit.report.status for fit in (plain, chained, again)] == [
        CompactionStatus.APPLIED,
        CompactionStatus.APPLIED,
        CompactionStatus.REUSED,
    ]
    assert again.raw == plain.raw
    assert b"## Session Summary (Compaction Round 1)" in chained.raw
    assert b"## Session Summary" not in plain.raw


@pytest.mark.parametrize("strategy", NAMES)
async def test_the_rest_of_the_body_stays_as_it_came(strategy: str) -> None:
    tools = [{"type": "function", "function": {"name": "read"}}]
    async with bench(strategy=strategy) as made:
        asked = made.ask(work(45), body={"tools": tools, "x": [1.0]}, **LOW)
        fit = await made.compactor.fit_request(asked)
    sent, came = json.loads(fit.raw), json.loads(asked.body.raw)
    assert {**sent, "messages": came["messages"]} == came
    assert list(sent) == list(came)


async def test_talk_alone_shrinks_with_every_strategy() -> None:
    sizes = {}
    for strategy in NAMES:
        async with bench(strategy=strategy) as made:
            fit = await made.fit(talk(60), **LOW)
            sizes[strategy] = (fit.report.tokens_after or 0) / (fit.report.tokens_before or 1)
    assert {name for name, share in sizes.items() if share > 0.6} <= {*NAMES} - {*SUMMARISING} | {"selective"}
