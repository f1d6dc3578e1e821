"""What the configuration makes of each strategy, key by key."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.compaction.request_view import resolve_policy
from compaction_proxy.config.config import Config, ModelSettings, get_model_settings
from compaction_proxy.config.strategies import (
    POLICY_FIELDS,
    StrategiesSection,
    get_policy_setting,
    replace_policy_field,
)
from compaction_proxy.core.strategies import (
    ANCHORED,
    CHAINED,
    FULL,
    ITERATIONS,
    PRUNE,
    SELECTIVE,
    SPLIT,
    STRATEGIES,
    Policy,
    ScaledLimit,
    SummaryFrame,
    SummaryShape,
)
from compaction_proxy.core.trigger import TriggerRule, has_active_rule

# What a field is changed to that is no number.
OTHER = {
    "tag": "digest",
    "take": "one",
    "summary_model": {"cheap": "same", "same": "cheap"},
    "summary_input": {"transcript": "aligned", "aligned": "transcript"},
    "stand_in_role": {"user": "assistant", "assistant": "user", "system": "user"},
}
WORDS = {"prompt_file", "instructions"}


def settings(compaction: Mapping[str, Any], **sections: Mapping[str, Any]) -> ModelSettings:
    return get_model_settings(Config.model_validate({"compaction": compaction, **sections}), "any")


def configured(name: str, **fields: object) -> Policy:
    """The row with fields of its own section set."""
    return resolve_policy(settings({"strategy": name, "strategies": {name: fields}}))


def shape(row: Policy) -> SummaryShape:
    assert row.summary
    return row.summary


def fields() -> Iterator[tuple[str, str, object]]:
    """Every field of every strategy's row, and its default."""
    for strategy, section in StrategiesSection():
        for name, value in section:
            if name not in WORDS:
                yield strategy, name, value


def other(name: str, value: Any) -> Any:
    """A value that is not the default."""
    choice = OTHER.get(name)
    if choice is not None:
        return choice[value] if isinstance(choice, dict) else choice
    return 7 if value is None else value + 1


@pytest.mark.parametrize("name", STRATEGIES)
def test_without_configuration_a_strategy_is_its_row(name: str) -> None:
    assert (
        resolve_policy(settings({"strategy": name})) == STRATEGIES[name] == resolve_policy(settings({}), name)
    )


def test_the_strategy_of_a_request_beats_the_configured_one() -> None:
    held = settings({"strategy": "full", "strategies": {"split": {"keep_messages": 9}}})
    assert resolve_policy(held) == FULL
    assert resolve_policy(held, "split").keep == replace(SPLIT.keep, messages=9)
    assert resolve_policy(held, "split") is resolve_policy(held, "split")


def test_a_strategy_that_does_not_exist_has_no_policy() -> None:
    with pytest.raises(KeyError, match="nonsense"):
        resolve_policy(settings({}), "nonsense")


@pytest.mark.parametrize(("strategy", "name", "default"), list(fields()))
def test_a_field_shows_what_the_row_says(strategy: str, name: str, default: object) -> None:
    assert get_policy_setting(STRATEGIES[strategy], name) == default


@pytest.mark.parametrize(("strategy", "name", "default"), list(fields()))
def test_a_field_that_is_set_is_what_the_row_says(strategy: str, name: str, default: object) -> None:
    value = other(name, default)
    made = configured(strategy, **{name: value})
    assert (get_policy_setting(made, name), made == STRATEGIES[strategy]) == (value, False)


@pytest.mark.parametrize(("strategy", "name", "default"), list(fields()))
def test_a_field_that_is_set_changes_no_other(strategy: str, name: str, default: object) -> None:
    made = configured(strategy, **{name: other(name, default)})
    now = {
        field: get_policy_setting(made, field)
        for owner, field, _ in fields()
        if owner == strategy and field != name
    }
    own = {field: value for owner, field, value in fields() if owner == strategy and field != name}
    along = {"summary_max_tokens"} if name == "summary_tokens" else set()
    assert {field for field in own if now[field] != own[field]} <= along


@given(st.sampled_from([name for name in POLICY_FIELDS if name.endswith("_percent")]), st.floats(0, 100))
def test_a_percentage_is_a_share_of_the_row(name: str, percent: float) -> None:
    assert get_policy_setting(replace_policy_field(ANCHORED, name, percent), name) == pytest.approx(
        percent, abs=1e-6
    )


def test_further_triggers_of_selective_are_alternatives() -> None:
    made = configured("selective", messages=40, turns=12)
    assert made == replace(
        SELECTIVE, trigger=(TriggerRule(tokens=60_000), TriggerRule(messages=40), TriggerRule(turns=12))
    )


def test_zero_switches_a_row_of_the_trigger_off() -> None:
    assert not has_active_rule(configured("full", tokens=0).trigger)
    assert [row.active for row in configured("iterations", iterations=0).trigger] == [False, True]


def test_a_tag_stands_around_the_summary() -> None:
    frame = SummaryFrame(opening="<the-tag_1>\n", closing="\n</the-tag_1>")
    assert configured("selective", tag="the-tag_1") == replace(SELECTIVE, frame=frame)


def test_iterations_are_kept_whole_with_their_results() -> None:
    made = configured("iterations", keep_iterations=5)
    assert made == replace(ITERATIONS, keep=replace(ITERATIONS.keep, iterations=5, messages=10))


def test_chained_leaves_one_message_more_than_it_keeps_alone() -> None:
    own = configured("chained", keep_messages=4)
    every = resolve_policy(settings({"strategy": "chained", "keep": {"messages": 4}}))
    assert own == every == replace(CHAINED, keep=replace(CHAINED.keep, messages=4), least_messages=5)
    assert configured("selective", keep_messages=1).least_messages == SELECTIVE.least_messages


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"summary_tokens": 8_000}, (8_000, 10_000)),
        ({"summary_max_tokens": 600}, (600, 600)),
        ({"summary_tokens": 900, "summary_max_tokens": 1_000}, (900, 1_000)),
        ({"summary_tokens": 900, "summary_max_tokens": 500}, (500, 500)),
    ],
)
def test_no_more_is_asked_for_than_allowed(fields: dict[str, int], expected: tuple[int, int]) -> None:
    summary = shape(configured("chained", **fields))
    assert (summary.tokens, summary.max_tokens) == expected


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_target_of_all_strategies_is_the_number_itself(name: str) -> None:
    target = resolve_policy(settings({"strategy": name, "target_tokens": 50_000})).target
    assert target is not None
    assert target.compute_tokens(60_000) == 50_000


def test_keys_for_all_strategies_beat_the_strategy_s_own() -> None:
    held = settings(
        {
            "max_block_s": 3,
            "stand_in_role": "assistant",
            "keep": {"messages": 2, "tail_tokens": 900, "user_tokens": 800, "tool_results": 5},
            "strategies": {"anchored": {"max_block_s": 1, "keep_messages": 9, "tail_tokens": 1}},
        },
        summary={"max_tokens": 2_000, "input": "aligned"},
    )
    assert ANCHORED.layout
    assert resolve_policy(held) == replace(
        ANCHORED,
        max_block_s=3,
        stand_in_role="assistant",
        keep=replace(ANCHORED.keep, messages=2, tail=ScaledLimit(900, 0.20), tool_results=5),
        layout=replace(ANCHORED.layout, ledger=ScaledLimit(800, ANCHORED.layout.ledger.share)),
        summary=replace(shape(ANCHORED), tokens=2_000, max_tokens=2_000, form="aligned"),
    )


def test_a_row_without_a_part_is_left_as_it_is() -> None:
    keep = {"user_tokens": 800, "tool_results": 0}
    held = settings({"strategy": "prune", "keep": keep}, summary={"max_tokens": 9, "input": "aligned"})
    assert resolve_policy(held) == PRUNE


def test_a_row_without_a_tail_gets_one() -> None:
    made = resolve_policy(settings({"strategy": "chained", "keep": {"tail_tokens": 700}}))
    assert made == replace(CHAINED, keep=replace(CHAINED.keep, tail=ScaledLimit(700, 1.0)))


@pytest.mark.parametrize(
    ("strategy", "background", "soft_share"),
    [
        ("anchored", None, ANCHORED.soft_share),
        ("anchored", False, 0.0),
        ("anchored", True, ANCHORED.soft_share),
        ("chained", None, 0.0),
        ("chained", True, ANCHORED.soft_share),
    ],
)
def test_background_is_a_soft_mark(strategy: str, background: object, soft_share: float) -> None:
    held = settings({"strategy": strategy, "background": background})
    assert resolve_policy(held) == replace(STRATEGIES[strategy], soft_share=soft_share)


def test_a_trigger_for_all_strategies_takes_the_place_of_every_row() -> None:
    trigger = [{"percent": 60}, {"iterations": 8, "tokens": 20_000}]
    made = resolve_policy(settings({"strategy": "iterations", "trigger": trigger}))
    assert made == replace(
        ITERATIONS, trigger=(TriggerRule(percent=60), TriggerRule(iterations=8, tokens=20_000))
    )


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("off", [0, []])
def test_a_trigger_of_zero_switches_everything_automatic_off(name: str, off: object) -> None:
    assert resolve_policy(settings({"strategy": name, "trigger": off})) == replace(
        STRATEGIES[name], trigger=()
    )


def test_the_output_reserve_of_a_model_is_the_strategy_s() -> None:
    held = Config.model_validate({"models": {"m*": {"reserve_output": 77}}})
    for name, row in STRATEGIES.items():
        assert resolve_policy(get_model_settings(held, "mine"), name) == replace(
            row, reserves=replace(row.reserves, output=77)
        )


def test_every_key_that_names_a_row_field_is_in_the_table() -> None:
    assert {name for _, name, _ in fields()} == set(POLICY_FIELDS)


def test_every_strategy_with_a_summary_has_its_prompt() -> None:
    prompts = Path(__file__).resolve().parents[2] / "proxy" / "compaction_proxy" / "prompts"
    named = {row.summary.prompt_name for row in STRATEGIES.values() if row.summary}
    assert named - {path.stem for path in prompts.glob("*.md")} == set()
