"""Hysteresis: rounds that do no good, and floors that no round lowers."""

import pytest

from compaction_proxy.compaction.feedback import (
    FAILURE_GROWTH,
    MAX_CONVERSATIONS,
    PAUSE_S,
    RETRY_GROWTH,
    URGENT_GROWTH,
    RoundEffectiveness,
)
from compaction_proxy.compaction.types import CompactionMode, CompactionStatus
from tests.helpers.compaction_bench import Bench, JsonObject, bench, talk

WHO = "t/root/anchored/c_1"


def judged(clock: list[float], *rounds: tuple[int, int]) -> RoundEffectiveness:
    effects = RoundEffectiveness(lambda: clock[0])
    for number, (before, after) in enumerate(rounds):
        effects.record_round(WHO, bytes([number + 1]), before_tokens=before, after_tokens=after)
    return effects


def test_two_rounds_that_save_too_little_pause_a_conversation() -> None:
    assert not judged([0.0], (1_000, 900)).is_paused(WHO, 1_000)
    assert judged([0.0], (1_000, 900), (1_000, 860)).is_paused(WHO, 1_000)
    assert not judged([0.0], (1_000, 900), (1_000, 850)).is_paused(WHO, 1_000)


def test_a_good_round_in_between_counts_anew() -> None:
    assert not judged([0.0], (1_000, 900), (1_000, 400), (1_000, 900)).is_paused(WHO, 1_000)


def test_a_pause_ends_with_growth_or_time() -> None:
    clock = [0.0]
    effects = judged(clock, (1_000, 900), (1_000, 900))
    assert effects.is_paused(WHO, int(900 * (1 + RETRY_GROWTH)) - 1)
    assert not effects.is_paused(WHO, int(900 * (1 + RETRY_GROWTH)))
    clock[0] = PAUSE_S
    assert not effects.is_paused(WHO, 900)


def test_a_round_is_judged_once_and_others_are_not_touched() -> None:
    effects = RoundEffectiveness(lambda: 0.0)
    for _ in range(3):
        effects.record_round(WHO, b"same", before_tokens=1_000, after_tokens=900)
    assert not effects.is_paused(WHO, 900)
    effects.record_round(WHO, b"next", before_tokens=1_000, after_tokens=900)
    assert effects.is_paused(WHO, 900)
    assert not effects.is_paused("other", 900)
    assert not effects.is_paused("t/other/anchored/c_1", 900)


def failed_at(clock: list[float], *prefixes: bytes) -> RoundEffectiveness:
    effects = RoundEffectiveness(lambda: clock[0])
    effects.record_failure(WHO, prefixes, window=8_000, tokens=1_000)
    return effects


def test_a_round_that_failed_is_not_tried_again_for_the_same_messages_and_more() -> None:
    effects = failed_at([0.0], b"1", b"2")
    for prefixes in ((b"1", b"2"), (b"1", b"2", b"3")):
        assert effects.is_failing(WHO, prefixes, window=8_000, tokens=1_000, is_urgent=False)
    for others in ((b"1",), (b"1", b"other"), (b"1", b"other", b"3")):
        assert not effects.is_failing(WHO, others, window=8_000, tokens=1_000, is_urgent=False)
    assert not effects.is_failing(WHO, (b"1", b"2"), window=9_000, tokens=1_000, is_urgent=False)
    assert not effects.is_failing("other", (b"1", b"2"), window=8_000, tokens=1_000, is_urgent=False)


@pytest.mark.parametrize(("urgent", "growth"), [(False, FAILURE_GROWTH), (True, URGENT_GROWTH)])
def test_a_round_that_failed_is_tried_again_after_growth_or_time(*, urgent: bool, growth: float) -> None:
    clock = [0.0]
    effects = failed_at(clock, b"1")
    grown = int(1_000 * (1 + growth))
    assert effects.is_failing(WHO, (b"1",), window=8_000, tokens=grown - 1, is_urgent=urgent)
    assert not effects.is_failing(WHO, (b"1",), window=8_000, tokens=grown, is_urgent=urgent)
    clock[0] = PAUSE_S
    assert not effects.is_failing(WHO, (b"1",), window=8_000, tokens=1_000, is_urgent=urgent)


def test_only_so_many_failures_are_remembered() -> None:
    effects = failed_at([0.0], b"1")
    for number in range(MAX_CONVERSATIONS):
        effects.record_failure(str(number), (b"1",), window=8_000, tokens=1_000)
    assert not effects.is_failing(WHO, (b"1",), window=8_000, tokens=1_000, is_urgent=False)
    assert effects.is_failing("0", (b"1",), window=8_000, tokens=1_000, is_urgent=False)


def crowded(turns: int, system: int) -> list[JsonObject]:
    """A system prompt of about `system` tokens before some talk."""
    return [{"role": "system", "content": "Obey the law. " * (system // 4)}, *talk(turns)[1:]]


async def test_a_huge_system_prompt_is_reported_and_not_looped_on() -> None:
    async with bench() as made:
        fits = [await made.answered(crowded(turns, 9_500)) for turns in range(2, 14)]
        await made.settled()
    assert len(made.summaries.calls) <= 1
    assert {fit.report.status for fit in fits} <= {
        CompactionStatus.NONE,
        CompactionStatus.APPLIED,
        CompactionStatus.REUSED,
    }
    assert "irreducible" in {fit.report.reason for fit in fits}
    assert max(fit.report.tokens_after or 0 for fit in fits) < made.window


async def test_huge_definitions_of_tools_are_reported_and_not_looped_on() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "Do what is asked. " * 2_500}}
    async with bench() as made:
        fits = [await made.answered(talk(turns), body={"tools": [tool]}) for turns in range(2, 14)]
        await made.settled()
    assert len(made.summaries.calls) <= 1
    assert "irreducible" in {fit.report.reason for fit in fits}


async def test_a_floor_over_the_window_costs_no_call_per_request() -> None:
    async with bench() as made:
        fits = [await made.answered(crowded(turns, 20_000)) for turns in range(2, 14)]
    assert {fit.report.status for fit in fits} == {CompactionStatus.OVER_LIMIT}
    assert len(made.summaries.calls) <= 2


async def until_paused(made: Bench) -> int:
    """Rounds of which the provider counts that they have hardly saved anything; the turns of the pause."""
    for turns in range(92, 160, 3):
        fit = await made.answered(talk(turns), real=8_500 + turns)
        if fit.report.reason == "paused":
            assert (fit.report.status, fit.report.round) == (CompactionStatus.REUSED, 2)
            return turns
    raise AssertionError


async def test_two_rounds_without_effect_by_real_usage_pause_until_the_request_has_grown() -> None:
    async with bench() as made:
        turns = await until_paused(made)
        calls = len(made.summaries.calls)
        later = [await made.answered(talk(turns + more), real=8_500 + turns) for more in range(1, 15)]
    assert calls == 2
    resumed = next(fit for fit in later if fit.report.status is CompactionStatus.APPLIED)
    before = later[: later.index(resumed)]
    assert len(before) > 1
    assert {fit.report.reason for fit in before} == {"paused"}
    assert resumed.report.round == 3
    assert (resumed.report.tokens_without_round or 0) >= (8_500 + turns) * (1 + RETRY_GROWTH)


async def test_a_pause_ends_after_ten_minutes_and_for_force() -> None:
    async with bench() as made:
        turns = await until_paused(made)
        forced = await made.fit(talk(turns), mode=CompactionMode.FORCE, conversation="c_2")
    async with bench() as made:
        turns = await until_paused(made)
        made.now[0] += PAUSE_S
        later = await made.answered(talk(turns + 6), real=8_600)
    assert (forced.report.status, later.report.status) == (CompactionStatus.APPLIED, CompactionStatus.APPLIED)


async def test_rounds_that_do_good_go_on() -> None:
    async with bench() as made:
        fits = []
        for turns in range(60, 300, 5):
            asked = await made.fit(talk(turns))
            fits.append(await made.answered(talk(turns), real=asked.estimate))
            await made.settled()
    assert "paused" not in {fit.report.reason for fit in fits}
    assert max(fit.report.tokens_after or 0 for fit in fits) < 10_800
