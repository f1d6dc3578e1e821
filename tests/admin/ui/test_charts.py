"""The charts on the pages as data: their columns, series and marks."""

import json

from compaction_proxy.admin.queries import CompactionRecord
from compaction_proxy.admin.ui.charts import (
    MAX_COLUMNS,
    build_period_charts,
    build_requests_chart,
    build_strategies_chart,
    sum_columns,
)
from compaction_proxy.core.event import COMPACTED, Event
from compaction_proxy.telemetry.statistics import ExchangeCounters, StatisticsRow
from tests.helpers.journals import exchange

HOUR_S = 3_600
MIDNIGHT = 1_795_132_800  # 2026-11-20T00:00Z


def test_hours_are_summed_to_columns_and_hours_without_requests_are_zero() -> None:
    rows = [
        StatisticsRow("2026-11-20T01", ExchangeCounters(requests=2)),
        StatisticsRow("2026-11-20T02", ExchangeCounters(requests=3)),
        StatisticsRow("2026-11-20T07", ExchangeCounters(requests=4)),
    ]
    columns = sum_columns(rows, 3 * HOUR_S, MIDNIGHT + 1, MIDNIGHT + 8 * HOUR_S)
    assert [((at - MIDNIGHT) // HOUR_S, each.requests) for at, each in columns] == [(0, 5), (3, 0), (6, 4)]


def test_a_period_without_requests_has_empty_charts_and_no_times() -> None:
    charts = build_period_charts(sum_columns([], HOUR_S, MIDNIGHT, MIDNIGHT + HOUR_S), HOUR_S)
    drawn = {name: json.loads(each) for name, each in charts.items()}
    assert set(drawn) == {"tokens", "requests", "dollars", "own", "waiting"}
    assert all(len(each["x"]) == 2 for each in drawn.values())
    assert {value for each in drawn["requests"]["series"] for value in each["values"]} == {0}
    assert {value for each in drawn["own"]["series"] for value in each["values"]} == {None}


def test_of_many_requests_the_newest_are_drawn_under_their_own_numbers() -> None:
    requests = [exchange(float(at)) for at in range(MAX_COLUMNS + 3)]
    chart = json.loads(build_requests_chart(requests, []))
    assert (chart["x"][0], chart["x"][-1], len(chart["x"])) == (4, MAX_COLUMNS + 3, MAX_COLUMNS)


def test_a_trigger_far_above_all_requests_is_not_drawn() -> None:
    def list_series(trigger: int) -> list[str]:
        near = exchange(1.0, tokens_before=1_000, trigger=trigger)
        return [each["name"] for each in json.loads(build_requests_chart([near], []))["series"]]

    assert "trigger" in list_series(3_000)
    assert "trigger" not in list_series(3_001)


def test_the_chart_of_strategies_draws_each_beside_what_the_client_would_send() -> None:
    results = [
        {"strategy": "full", "points": [{"before": 10, "after": 10}, {"before": 20, "after": 5}]},
        {"strategy": "prune", "points": [{"before": 10, "after": 9}]},
    ]
    chart = json.loads(build_strategies_chart(results))
    assert chart["x"] == [1, 2]
    assert {each["name"]: each["values"] for each in chart["series"]} == {
        "never compacting": [10, 20],
        "full": [10, 5],
        "prune": [9],
    }


def test_rounds_of_two_strategies_are_marked_apart_on_the_chart() -> None:
    def compacted(strategy: str) -> CompactionRecord:
        event = Event(COMPACTED, 1.0, round=1, strategy=strategy, place=f"{strategy}-1")
        return CompactionRecord(event, undone=False, pays_back_after=None, state="followed", used_at=1.0)

    requests = [
        exchange(float(at), strategy=strategy, round=number)
        for at, (strategy, number) in enumerate([("", None), ("full", 1), ("full", 1), ("split", 1)])
    ]
    chart = json.loads(build_requests_chart(requests, [compacted("full"), compacted("split")]))

    assert chart["marks"] == [None, 1, None, 1]
    assert chart["places"] == [None, "full-1", None, "split-1"]


def test_a_shortening_is_marked_without_a_number_at_the_request_for_which_it_was_made() -> None:
    def compacted(number: int, request: str, model: str) -> CompactionRecord:
        event = Event(
            COMPACTED, 1.0, request=request, round=number, strategy="anchored", place=request, model=model
        )
        return CompactionRecord(event, undone=False, pays_back_after=None, state="followed", used_at=1.0)

    requests = [
        exchange(float(at), strategy="anchored", round=number, request=f"r{at}")
        for at, number in enumerate([None, None, 1, 1, 1])
    ]
    rounds = [compacted(0, "r1", ""), compacted(1, "r2", "small"), compacted(1, "r4", "")]
    chart = json.loads(build_requests_chart(requests, rounds))

    assert chart["marks"] == [None, 0, 1, None, 0]
    assert chart["places"] == [None, "r1", "r2", None, "r4"]


def test_a_number_that_was_given_again_leads_to_the_round_that_the_request_used() -> None:
    def compacted(at: float, request: str = "") -> CompactionRecord:
        event = Event(COMPACTED, at, request=request, round=1, strategy="anchored", place=f"made-{at:.0f}")
        return CompactionRecord(event, undone=at < 4, pays_back_after=None, state="in-use", used_at=at)

    requests = [
        exchange(float(at), strategy="anchored", round=number, request=f"r{at}")
        for at, number in enumerate([None, None, 1, 1, None, 1])
    ]
    rounds = [compacted(1.0), compacted(5.5, "r5")]
    chart = json.loads(build_requests_chart(requests, rounds))

    assert chart["places"] == [None, None, "made-1", None, None, "made-6"]
