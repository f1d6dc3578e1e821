"""Properties of the learned ratio."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.providers.calibration import Calibration

RATIO = st.floats(0.31, 3.9)
ESTIMATE = st.integers(1_000, 1_000_000)
PAIRS = st.lists(st.tuples(ESTIMATE, RATIO), max_size=30)


def learned(pairs: list[tuple[int, float]], model: str = "gpt-5") -> Calibration:
    calibration = Calibration.build_prior(model)
    for estimate, ratio in pairs:
        calibration = calibration.add_observation(estimate, round(estimate * ratio))
    return calibration


@given(PAIRS, RATIO)
def test_it_converges_from_any_past(past: list[tuple[int, float]], ratio: float) -> None:
    calibration = learned(past + [(100_000, ratio)] * 300)
    assert calibration.ratio == pytest.approx(ratio, rel=0.01)


@given(RATIO)
def test_the_first_observation_replaces_the_prior(ratio: float) -> None:
    assert learned([(100_000, ratio)]).ratio == pytest.approx(ratio, rel=1e-4)


@given(PAIRS, RATIO, RATIO)
def test_a_higher_usage_never_lowers_the_ratio(
    past: list[tuple[int, float]], one: float, other: float
) -> None:
    low, high = sorted((one, other))
    calibration = learned(past)
    assert calibration.add_observation(10**6, round(10**6 * low)).ratio <= (
        calibration.add_observation(10**6, round(10**6 * high)).ratio + 1e-12
    )


@given(PAIRS, st.integers(0, 10**6), st.integers(0, 10**6))
def test_a_larger_estimate_never_has_a_smaller_size(
    past: list[tuple[int, float]], one: int, other: int
) -> None:
    calibration = learned(past)
    low, high = sorted((one, other))
    assert calibration.predict_tokens(low) <= calibration.predict_tokens(high)
    assert calibration.predict_upper_bound(low) <= calibration.predict_upper_bound(high)
    assert calibration.predict_tokens(low) <= calibration.predict_upper_bound(low)


@given(st.floats(0.5, 2.0), st.integers(3, 100), RATIO)
def test_one_outlier_after_an_even_past_moves_the_ratio_little(
    ratio: float, count: int, outlier: float
) -> None:
    before = learned([(100_000, ratio)] * count)
    after = before.add_observation(100_000, round(100_000 * outlier))
    assert abs(after.mean - before.mean) <= 4 * max(before.deviation, 0.01) / min(count + 1, 20) + 1e-12


@given(PAIRS)
def test_the_ratio_stays_between_what_was_seen(past: list[tuple[int, float]]) -> None:
    seen = [round(estimate * ratio) / estimate for estimate, ratio in past] or [1.0]
    assert min(seen) - 1e-9 <= learned(past).ratio <= max(seen) + 1e-9


@pytest.mark.parametrize(
    ("estimate", "actual"), [(180, 199), (0, 5_000), (-1, 5_000), (10_000, 2_999), (10_000, 40_001)]
)
def test_nothing_is_learned_from_an_implausible_usage(estimate: int, actual: int) -> None:
    calibration = learned([(10_000, 1.1)])
    assert calibration.add_observation(estimate, actual) is calibration


def test_the_limits_of_plausibility_themselves_count() -> None:
    fresh = Calibration.build_prior("gpt-5")
    counts = [(200, 200), (10_000, 3_000), (10_000, 40_000)]
    assert [fresh.add_observation(*pair).observations for pair in counts] == [1, 1, 1]


def test_the_margin_of_a_size_ends_with_the_first_observation() -> None:
    fresh = Calibration(mean=0.0, deviation=0.08)
    assert fresh.predict_tokens(10_000) == math.ceil(10_000 * math.exp(0.1))
    assert fresh.add_observation(10_000, 10_000).predict_tokens(10_000) == 10_000
    assert fresh.add_observation(10_000, 10_000).predict_upper_bound(10_000) == math.ceil(
        10_000 * math.exp(0.1)
    )


@pytest.mark.parametrize(
    ("model", "ratio"),
    [
        ("gpt-4o", 1.0),
        ("openai/o3-mini", 1.0),
        ("meta-llama/Llama-3.3-70B-Instruct", 1.0),
        ("moonshotai/kimi-k2", 1.0),
        ("glm-4.6", 1.0),
        ("Qwen/Qwen3-32B", 1.07),
        ("deepseek-chat", 1.07),
        ("mistral-large-latest", 1.12),
        ("gemini-2.5-pro", 1.2),
        ("claude-3-5-sonnet-20241022", 1.15),
        ("anthropic/claude-opus-4.6", 1.15),
        ("us.anthropic.claude-opus-4-7-20260401-v1:0", 1.45),
        ("my-local", 1.07),
        ("", 1.07),
    ],
)
def test_the_prior_is_the_familys(model: str, ratio: float) -> None:
    assert Calibration.build_prior(model).ratio == pytest.approx(ratio)


def test_a_first_request_to_an_unknown_model_is_sized_a_fifth_up() -> None:
    assert Calibration.build_prior("my-local").predict_tokens(100_000) == pytest.approx(120_000, rel=0.01)


@given(PAIRS)
def test_it_survives_storing(past: list[tuple[int, float]]) -> None:
    calibration = learned(past)
    assert Calibration.from_dict(json.loads(json.dumps(calibration.to_dict()))) == calibration


@pytest.mark.parametrize(
    "changed",
    [{"mean": 3.0}, {"mean": math.nan}, {"deviation": -0.1}, {"deviation": math.inf}, {"observations": -1}],
)
def test_stored_nonsense_is_refused(changed: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="not valid"):
        Calibration.from_dict(Calibration.build_prior("gpt-5").to_dict() | changed)
