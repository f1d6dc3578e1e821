"""Metrics: what is counted, how it is named, and that nothing a client chooses can do harm there."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics_of
from prometheus_client.parser import text_string_to_metric_families as metrics_of

from compaction_proxy.core.cost.savings import Saving
from compaction_proxy.core.event import COMPACTED, FAILED, FAILED_OPEN, MEASURED, Event
from compaction_proxy.core.exchange import Exchange
from compaction_proxy.telemetry.metrics import (
    ACTIVE_S,
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    MAX_LABEL_VALUES,
    PREFIX,
    LabelValues,
    Metrics,
    _observe_all,
    to_public_name,
)
from compaction_proxy.telemetry.usage import ExchangeEntry

ROOT = Path(__file__).resolve().parents[2]
NAMES = {*COUNTERS, *HISTOGRAMS, *GAUGES}
# A metric ends with what it is counted in; what has no unit is a share, a state or a number of things.
UNITS = (
    "_seconds", "_bytes", "_ratio", "_tokens", "_usd", "_requests",
    "_state", "_successful", "_active", "_info",
)  # fmt: skip
# All that may tell series apart: none of these takes as many values as there are clients.
LABELS = {
    "model", "status", "strategy", "trigger", "outcome", "reason", "direction", "source", "op", "code",
    "target", "version", "cause",
}  # fmt: skip
USUAL = Exchange(
    at=1.0, model="gpt", status="none", code=200, overhead_s=0.002, first_byte_s=0.2, upstream_s=3.0
)
REDUCED = USUAL._replace(
    status="applied", strategy="anchored", round=1, tokens_before=10_000, tokens_after=4_000, window=8_000,
    prompt_tokens=5_000, cached_tokens=1_000, completion_tokens=7, overhead_s=0.5,
)  # fmt: skip


class Clock:
    def __init__(self) -> None:
        self.s = 1_000.0

    def __call__(self) -> float:
        return self.s


async def samples(metrics: Metrics) -> dict[str, float]:
    """What is neither zero nor a bucket, as `name{label=value}`, by old names; not of the process."""
    text, _ = await metrics.render()
    found = {}
    for family in metrics_of(text.decode()):
        for sample in family.samples:
            if sample.name.startswith(PREFIX):
                continue
            if sample.value and "le" not in sample.labels and not sample.name.startswith("process_"):
                labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    fixed = ("build_info", "config_last_reload")
    return {name: value for name, value in found.items() if not name.startswith(fixed)}


async def test_each_metric_has_the_same_values_under_its_public_name() -> None:
    metrics = Metrics("1.0")
    metrics.count_upstream_error("http://provider:80", "timeout")
    text, _ = await metrics.render()
    families = {family.name: family for family in metrics_of(text.decode())}
    old = {name: family for name, family in families.items() if not name.startswith(PREFIX)}

    assert len(families) == 2 * len(old)
    for name in ("upstream_errors", "build_info", "compaction_overhead_seconds"):
        renamed = families[to_public_name(name)]
        assert (renamed.type, renamed.documentation) == (old[name].type, old[name].documentation)
        expected = [each._replace(name=to_public_name(each.name)) for each in old[name].samples]
        assert renamed.samples == expected


async def test_exchanges_are_counted_by_what_was_done_and_what_they_were_worth() -> None:
    metrics = Metrics("1.0")
    metrics.count_exchanges([
        ExchangeEntry("t", "c_1", USUAL, Saving(cost=0.5)),
        ExchangeEntry("t", "c_1", REDUCED, Saving(cost=0.25, gross=0.75, cache_loss=1.0, net=-0.25)),
        ExchangeEntry("t", "c_2", REDUCED, None),
        ExchangeEntry("t", None, Exchange(at=3.0, model="", status="none"), None),
        ExchangeEntry("t", None, Exchange(2.0, "gpt", "none", 200, prompt_tokens=60), Saving(cost=0.0)),
        ExchangeEntry("t", None, Exchange(2.0, "gpt", "none", 429), None),  # has no cost
    ])  # fmt: skip
    assert await samples(metrics) == {
        "compaction_requests_total{model=gpt,status=none}": 3,
        "compaction_requests_total{model=gpt,status=applied}": 2,
        "compaction_requests_total{model=unknown,status=none}": 1,
        "compaction_tokens_before_total{model=gpt}": 22_060,
        "compaction_tokens_after_total{model=gpt}": 10_060,
        "compaction_tokens_removed_total{model=gpt}": 12_000,
        "compaction_requests_uncounted_total{model=gpt}": 1,
        "compaction_requests_uncounted_total{model=unknown}": 1,
        "compaction_last_request_timestamp_seconds": 3,
        "compaction_input_tokens_total{model=gpt}": 10_060,
        "compaction_cached_input_tokens_total{model=gpt}": 2_000,
        "compaction_output_tokens_total{model=gpt}": 14,
        "compaction_requests_cost_usd_total{model=gpt}": 0.75,
        "compaction_saved_cost_usd_total": 0.75,
        "compaction_cache_loss_cost_usd_total": 1.0,
        "compaction_requests_unpriced_total{model=gpt}": 1,
        "compaction_requests_unpriced_total{model=unknown}": 1,
        "compaction_overhead_seconds_count": 6,
        "compaction_overhead_seconds_sum": 1.002,
        "compaction_context_used_ratio_count": 2,
        "compaction_context_used_ratio_sum": 1.0,
        "compaction_token_estimate_error_ratio_count": 2,
        "compaction_token_estimate_error_ratio_sum": pytest.approx(0.4),
        "compaction_prefix_stable_ratio_count": 1,  # of one request it is known what was before it
        "compaction_sessions_active": 2,
        "upstream_request_duration_seconds_count{code=200,model=gpt}": 3,
        "upstream_request_duration_seconds_sum{code=200,model=gpt}": 9,
        "upstream_time_to_first_chunk_seconds_count{model=gpt}": 3,
        "upstream_time_to_first_chunk_seconds_sum{model=gpt}": pytest.approx(0.6),
    }


async def test_rounds_and_failures_are_counted_from_events() -> None:
    metrics = Metrics("1.0")
    made = Event(
        COMPACTED, 1.0, strategy="anchored", reason="tokens,http-500", outcome="applied", seconds=3.5,
        calls=2, tokens_before=1_000, tokens_after=250, prompt_tokens=900, completion_tokens=80,
        cost_usd=0.125,
    )  # fmt: skip
    for event in (
        made,
        Event(FAILED, 2.0, strategy="full", reason="timeout", calls=1, prompt_tokens=100),
        Event(FAILED_OPEN, 3.0, reason="crashed"),
        Event(MEASURED, 4.0, tokens_real=251),
    ):
        metrics.on_event("tenant", event)
    assert await samples(metrics) == {
        "compaction_runs_total{outcome=applied,strategy=anchored,trigger=tokens}": 1,
        "compaction_runs_total{outcome=failed,strategy=full,trigger=unknown}": 1,
        "compaction_failures_total{reason=timeout}": 1,
        "compaction_failures_total{reason=crashed}": 1,
        "compaction_ratio_count": 1,
        "compaction_ratio_sum": 0.25,
        "compaction_summary_duration_seconds_count": 1,
        "compaction_summary_duration_seconds_sum": 3.5,
        "compaction_summary_tokens_total{direction=input}": 1_000,
        "compaction_summary_tokens_total{direction=output}": 80,
        "compaction_summary_cost_usd_total": 0.125,
        "compaction_summary_calls_unpriced_total": 1,
    }


async def test_a_conversation_is_active_for_five_minutes_and_a_breaker_is_asked_each_time() -> None:
    clock = Clock()
    metrics, resting = Metrics("1.0", clock=clock), [True]
    metrics.breakers["store"] = lambda: resting[0]
    metrics.count_exchanges([ExchangeEntry("t", "c_1", USUAL, None)])
    clock.s += ACTIVE_S - 1
    metrics.count_exchanges([ExchangeEntry("t", "c_2", USUAL, None)])
    before = await samples(metrics)
    clock.s += 2
    resting[0] = False
    after = await samples(metrics)
    names = ("compaction_sessions_active", "circuit_breaker_state{target=store}")
    assert [(each.get(names[0]), each.get(names[1])) for each in (before, after)] == [(2, 1), (1, None)]


async def test_a_refused_configuration_is_shown_and_the_last_good_one_stays_known() -> None:
    clock = Clock()
    metrics = Metrics("1.0", now=clock)
    clock.s += 5
    metrics.record_reload(succeeded=False)
    text, _ = await metrics.render()
    assert b"config_last_reload_successful 0.0" in text
    assert b"config_last_reload_success_timestamp_seconds 1000.0" in text


def test_the_first_models_have_series_of_their_own_and_refused_ones_never() -> None:
    names = LabelValues()
    assert names.to_label_value("tried-by-a-stranger", may_add=False) == "other"
    firsts = [names.to_label_value(f"model-{number}") for number in range(MAX_LABEL_VALUES)]
    assert firsts == [f"model-{number}" for number in range(MAX_LABEL_VALUES)]
    assert [names.to_label_value(name, may_add=False) for name in ("model-7", "one-more", "")] == [
        "model-7",
        "other",
        "unknown",
    ]


async def test_models_that_upstreams_refuse_or_do_not_answer_take_no_series_from_others() -> None:
    metrics = Metrics("1.0")
    for number in range(MAX_LABEL_VALUES):
        for code in (0, 404):
            made_up = USUAL._replace(model=f"made-up-{number}", code=code)
            metrics.count_exchanges([ExchangeEntry("t", None, made_up, None)])
    metrics.count_exchanges([ExchangeEntry("u", None, USUAL, None)])
    found = await samples(metrics)
    requests = {name: value for name, value in found.items() if name.startswith("compaction_requests_total")}
    assert requests == {
        "compaction_requests_total{model=other,status=none}": 2 * MAX_LABEL_VALUES,
        "compaction_requests_total{model=gpt,status=none}": 1,
    }


@settings(max_examples=50)
@given(st.text())
async def test_whatever_a_client_calls_its_model_the_answer_can_be_read(name: str) -> None:
    metrics = Metrics("1.0")
    metrics.count_exchanges([ExchangeEntry("t", None, USUAL._replace(model=name), None)])
    for accept, parsed in (("", metrics_of), ("application/openmetrics-text", open_metrics_of)):
        text, _ = await metrics.render(accept)
        [family] = [each for each in parsed(text.decode()) if each.name == "compaction_requests"]
        [sample] = family.samples
        assert len(sample.labels["model"]) <= 100
        assert sample.labels["model"].isprintable()


@given(st.lists(st.floats(0, 700)))
def test_many_amounts_at_once_are_what_they_are_one_by_one(amounts: list[float]) -> None:
    one, many = (
        Histogram("some_seconds", "Some.", buckets=(0.5, 1, 600), registry=CollectorRegistry()) for _ in "12"
    )
    for amount in amounts:
        one.observe(amount)
    _observe_all(many, amounts)
    [expected], [found] = one.collect(), many.collect()
    assert {(each.name, str(each.labels)): each.value for each in found.samples} == pytest.approx(
        {(each.name, str(each.labels)): each.value for each in expected.samples}
    )


async def test_it_answers_in_the_form_that_is_asked_for() -> None:
    metrics = Metrics("1.0")
    plain, open_form = (
        await metrics.render("text/plain"),
        await metrics.render(
            "application/openmetrics-text;version=nonsense;q=0.5,text/plain;version=0.0.4;q=0.2"
        ),
    )
    assert plain[1] == "text/plain; version=0.0.4; charset=utf-8"
    assert open_form[1] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert open_form[0].endswith(b"# EOF\n")
    families = open_metrics_of(open_form[0].decode())  # type: ignore[no-untyped-call]
    assert {each.name for each in families} >= {name.removesuffix("_total") for name in NAMES}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_names_follow_the_rules(name: str) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name)
    assert name.endswith("_total") == (name in COUNTERS)
    assert not re.search(r"_(ms|milliseconds|minutes|percent|kb|count|sum|bucket)(_|$)", name)
    described: Any = COUNTERS.get(name) or HISTOGRAMS.get(name) or GAUGES[name]
    assert set(described.labels) <= LABELS
    assert not set(name.split("_")) & set(described.labels)
    assert described.help_text.endswith(".")
    if name not in COUNTERS:
        assert name.endswith(UNITS)
    if name in HISTOGRAMS:
        buckets = HISTOGRAMS[name].buckets
        assert sorted(set(buckets)) == list(buckets)


def rows(text: str) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Name, kind and labels of every metric that a page of the manual lists."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| `") and len(cells) == 4:
            yield cells[0].strip("`"), cells[1], tuple(re.findall(r"`(\w+)`", cells[2]))


def test_the_manual_lists_every_metric_and_no_other() -> None:
    told = list(rows((ROOT / "docs/metrics.md").read_text(encoding="utf-8")))
    there = [
        *((to_public_name(name), "counter", it.labels) for name, it in COUNTERS.items()),
        *((to_public_name(name), "histogram", it.labels) for name, it in HISTOGRAMS.items()),
        *((to_public_name(name), "gauge", it.labels) for name, it in GAUGES.items()),
    ]
    assert sorted(told) == sorted(there)
