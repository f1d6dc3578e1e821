"""The limits of a request, its sizes with and without a compaction, and why one is due."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from compaction_proxy.compaction.request_view import (
    FLOOR_SHARE,
    RequestLimits,
    RequestView,
    compute_limits,
    format_strategy_thread,
    has_price_trigger,
    replace_messages,
    resolve_policy,
)
from compaction_proxy.config.config import ModelSettings
from compaction_proxy.core.message import Message
from compaction_proxy.core.trigger import PriceThresholds, TriggerMarks
from compaction_proxy.providers.usage_baseline import UsageBaseline
from tests.helpers.compaction_bench import (
    HARD,
    SOFT,
    TRIGGER,
    USABLE,
    WINDOW,
    Bench,
    JsonObject,
    ask,
    bench,
    loop,
    says,
    talk,
    user,
)


def settings(*rows: dict[str, Any], strategy: str = "anchored") -> ModelSettings:
    """The settings of a model with these triggers."""
    section = {"strategy": strategy, **({"trigger": list(rows)} if rows else {})}
    return ask([user("x")], model={"compaction": section}).settings


def limits(
    *rows: dict[str, Any], asked: int | None = None, output: int | None = None, **options: Any
) -> RequestLimits:
    return compute_limits(settings(*rows), None, WINDOW, output, asked, **options)


@pytest.fixture
async def made() -> AsyncIterator[Bench]:
    async with bench() as replica:
        yield replica


async def load(made: Bench, messages: list[JsonObject], **over: Any) -> RequestView:
    return await made.compactor._loader.load_view(made.ask(messages, **over))


def test_the_limits_of_a_model_follow_from_its_window_and_its_strategy() -> None:
    found = limits()
    assert (found.budget.window, found.budget.usable) == (WINDOW, USABLE)
    assert found.marks == TriggerMarks(SOFT, TRIGGER, HARD)
    assert (found.policy.name, found.lowest_trigger, found.is_automatic) == ("anchored", TRIGGER, True)


def test_the_client_may_lower_the_trigger_but_not_raise_it() -> None:
    assert limits({"tokens": 5_000}).lowest_trigger == 5_000
    assert limits({"tokens": 5_000}, asked=3_000).lowest_trigger == 3_000
    assert limits({"tokens": 5_000}, asked=7_000).lowest_trigger == 5_000


def test_where_every_trigger_is_off_nothing_starts_by_itself_and_the_client_starts_nothing() -> None:
    off = limits({"tokens": 0}, asked=3_000)
    assert (off.is_automatic, off.lowest_trigger) == (False, None)


def test_a_trigger_may_depend_on_growth_or_on_prices() -> None:
    assert [limits(row).uses_growth_counts for row in ({"tokens": 9}, {"messages": 9})] == [False, True]
    assert has_price_trigger(settings({"price_tier": True}), None)
    assert not has_price_trigger(settings({"tokens": 9}), None)
    priced = limits({"price_tier": True}, price_thresholds=PriceThresholds(tier_tokens=6_000))
    assert priced.lowest_trigger is not None
    assert priced.lowest_trigger <= 6_000
    assert limits({"price_tier": True}).lowest_trigger == USABLE  # nobody knows the price


def test_an_upstream_that_counts_the_output_leaves_less_for_the_prompt() -> None:
    plain, adding = limits(output=4_000), limits(output=4_000, adds_output=True)
    assert (plain.budget.sum_limit, adding.budget.sum_limit is not None) == (None, True)


def test_limits_are_computed_once_for_the_same_settings() -> None:
    held = settings({"tokens": 9_000})
    made = [compute_limits(held, None, WINDOW, None, None) for _ in range(2)]
    assert made[0] is made[1]
    with pytest.raises(KeyError):
        resolve_policy(held, "no such strategy")


def test_messages_are_replaced_or_left_out_by_index() -> None:
    one, two, three = (Message("user", text) for text in "abc")
    assert replace_messages((one, two), {}) == (one, two)
    assert replace_messages((one, two, three), {0: three, 1: None}) == (three, three)


def test_a_thread_is_of_a_tenant_a_conversation_and_a_strategy() -> None:
    def thread(strategy: str = "anchored", **over: Any) -> str:
        return format_strategy_thread(replace(ask([user("x")]), **over), b"\1", strategy)

    assert thread() == "t/01/anchored/c_1"
    assert thread(conversation=None, continued_conversation="c_1") == thread()
    others = {thread(tenant="u"), thread("full"), thread(conversation="c_2"), thread(conversation=None)}
    assert len({thread(), *others}) == 5


async def test_without_a_compaction_the_effective_list_is_the_client_s(made: Bench) -> None:
    view = await load(made, talk(5))
    assert view.effective_messages is view.messages
    assert view.effective_tokens == view.tokens + view.overhead_tokens == view.count_tokens(view.messages)
    assert (view.checkpoint_id, view.conversation_id) == (b"", "c_1")


async def test_a_compaction_makes_the_effective_list_shorter_and_has_an_id(made: Bench) -> None:
    await made.fit(talk(93), conversation=None)
    view = await load(made, talk(93), conversation=None)
    plain = view.with_checkpoint(None)
    assert view.effective_tokens < plain.effective_tokens == plain.count_tokens(view.messages)
    shown = sum(each.tokens for each in view.effective_messages)
    assert view.effective_tokens == shown + view.overhead_tokens > shown
    assert (len(view.checkpoint_id) > 0, view.conversation_id is not None) == (True, True)
    assert view.baseline_key != plain.baseline_key
    basis = view.build_usage_basis()
    assert basis is not None
    assert (basis.root, basis.baseline_key) == (view.root, view.baseline_key)


async def test_what_no_compaction_removes_are_fixed_messages_tools_the_task_and_the_latest_question(
    made: Bench,
) -> None:
    tools = [{"type": "function", "function": {"name": "open", "description": "word " * 400}}]
    view = await load(made, talk(20), body={"tools": tools})
    system, task, *_, latest = view.messages
    assert view.overhead_tokens > 400
    assert view.policy.keep.keeps_task
    assert view.fixed_tokens == view.overhead_tokens + system.tokens + task.tokens + latest.tokens


async def test_a_request_that_is_nearly_all_fixed_is_irreducible(made: Bench) -> None:
    view = await load(made, [*talk(3)[:-1], user("word " * round(FLOOR_SHARE * TRIGGER * 1.3))])
    assert (view.is_irreducible, (await load(made, talk(90))).is_irreducible) == (True, False)


@pytest.mark.parametrize(
    ("turns", "over", "expected"),
    [
        (5, {}, None),
        (93, {}, "percent"),
        (20, {"trigger_tokens": 1_000}, "tokens"),
        (200, {}, "limit"),
        (200, {"model": {"compaction": {"trigger": [{"tokens": 0}]}}}, None),
        (9, {"model": {"compaction": {"trigger": [{"turns": 8}]}}}, "turns"),
    ],
)
async def test_a_compaction_is_due_for_the_reason_that_a_request_has_reached(
    made: Bench, turns: int, over: dict[str, Any], expected: str | None
) -> None:
    assert (await load(made, talk(turns), **over)).find_due_reason() == expected


async def test_what_a_user_has_undone_is_not_made_again_below_the_hard_mark(made: Bench) -> None:
    due, hard = await load(made, talk(93)), await load(made, talk(115))
    assert SOFT < due.effective_estimate < HARD < hard.effective_estimate
    due = replace(due, directives=replace(due.directives, suppressed=True))
    hard = replace(hard, directives=replace(hard.directives, suppressed=True))
    assert (due.is_suppressed, due.find_due_reason(), due.should_prepare_round()) == (True, None, False)
    assert (hard.is_suppressed, hard.find_due_reason() is not None) == (False, True)


async def test_a_compaction_is_prepared_from_the_soft_mark_on(made: Bench) -> None:
    small, large = await load(made, talk(20)), await load(made, talk(85))
    assert small.effective_estimate < SOFT < large.effective_estimate < TRIGGER
    assert (small.should_prepare_round(), large.should_prepare_round()) == (False, True)


async def test_the_provider_s_count_of_the_request_before_is_what_an_estimate_stands_on(made: Bench) -> None:
    view = await load(made, talk(20))
    counted = view.effective_tokens
    anchor = UsageBaseline(b"", 1, b"", estimate=counted, actual=3 * counted)
    anchored = replace(view, anchor=anchor)
    assert view.effective_estimate < 2 * counted
    assert anchored.effective_estimate == 3 * counted
    assert anchored.effective_bound >= anchored.effective_estimate
    assert anchored.calibration_ratio == pytest.approx(3.0)


async def test_a_size_that_was_just_compacted_is_corrected_by_what_was_learned(made: Bench) -> None:
    await made.fit(talk(93))
    view = await load(made, talk(93))
    anchor = UsageBaseline(b"", 1, b"", estimate=view.effective_tokens, actual=view.effective_tokens)
    drifting = replace(view, anchor=anchor, drift_ratio=1.5, has_new_round=False)
    fresh = drifting.with_checkpoint(view.checkpoint)
    assert fresh.has_new_round
    assert fresh.effective_estimate == int(1.5 * drifting.effective_estimate)
    assert not replace(view, anchor=None).with_checkpoint(view.checkpoint).has_new_round


async def test_a_compacted_list_is_never_estimated_larger_than_the_longer_list_of_the_client(
    made: Bench,
) -> None:
    await made.fit(talk(93))
    view = await load(made, talk(93))
    own_tokens = view.count_tokens(view.messages)
    anchor = UsageBaseline(b"", 1, b"", estimate=own_tokens, actual=own_tokens)
    fresh = replace(view, anchor=anchor, drift_ratio=own_tokens / view.effective_tokens + 0.1)
    fresh = fresh.with_checkpoint(view.checkpoint)
    assert fresh.effective_tokens < own_tokens
    assert fresh.effective_estimate == fresh.estimate_tokens(view.messages)


async def test_messages_that_a_client_moves_are_kept_by_the_plan(made: Bench) -> None:
    view = await load(made, [*talk(20), says("Ok."), user("Now the tests.")])
    moving = replace(view, moving_count=3)
    count = len(view.unfixed_messages)
    plan = moving.plan_constraints
    assert {count - 1, count - 2, count - 3} <= plan.staying_indices
    assert plan.fixed_tokens > view.plan_constraints.fixed_tokens


async def test_nothing_is_stored_of_a_request_without_a_root(made: Bench) -> None:
    view = await load(made, loop(3), uses_checkpoints=False)
    assert (view.root, view.build_usage_basis()) == (None, None)
