"""Builds the data of the charts on the pages, as JSON.

The templates write this data into an HTML attribute, and the script `static/pages.js` draws the chart. In the
data, `x` has the numbers of requests, or the times at which columns start if `step` (the seconds that a
column covers) is not 0. `series` has bars and lines over `x`. Their `sign` selects a colour. `unit` says how
a value is written. `marks` has the compactions of each column, and `places` their checkpoint ids. The chart
of a conversation has only series with values.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from compaction_proxy.admin.api.schemas import to_counters
from compaction_proxy.admin.queries import CompactionRecord
from compaction_proxy.core.event import Event
from compaction_proxy.core.exchange import Exchange
from compaction_proxy.replay.provider import JsonObject
from compaction_proxy.telemetry.statistics import ExchangeCounters, StatisticsRow, compute_quantile_s

# Maximum number of columns in a chart. Each column shows a request or a period. If there are more requests
# or periods, the chart shows only the newest.
MAX_COLUMNS = 500
# Dash patterns for the lines of a chart, one for each strategy. A pattern lists the lengths of a dash, a gap,
# the next dash and so on, in pixels. The empty pattern is a solid line.
DASHES = ((), (8, 4), (2, 3), (12, 3, 2, 3), (4, 4), (1, 2), (16, 4))
# Numbers of seconds that a column of the overview's charts may cover, and the maximum number of columns.
STEPS_S = (3_600, 10_800, 21_600, 43_200, 86_400, 172_800, 604_800, 2_592_000)
MAX_PERIODS = 48
DAY_S = 86_400
_DASHED = (6, 4)


def sum_columns(
    rows: Sequence[StatisticsRow], step: int, since: float, until: float
) -> list[tuple[int, ExchangeCounters]]:
    """Sums up statistics of hours or days for the columns of a chart.

    Returns the start of each column, in seconds since the epoch, and its sums.

    Args:
        rows: Statistics of the hours or days that have exchanges.
        step: Number of seconds that a column covers.
        since: Start of the chart, in seconds since the epoch.
        until: End of the chart, in seconds since the epoch.
    """
    first = int(since) // step * step
    columns = {at: ExchangeCounters() for at in range(first, int(until) + 1, step)}
    for row in rows:
        # The label is the start of an hour (`2026-11-22T13`) or of a day (`2026-11-22`).
        at = int(datetime.fromisoformat(row.label).replace(tzinfo=UTC).timestamp()) // step * step
        columns.setdefault(at, ExchangeCounters()).add_counters(row.counters)
    return sorted(columns.items())


def build_period_charts(columns: Sequence[tuple[int, ExchangeCounters]], step: int) -> dict[str, str]:
    """Builds the data of the charts on the overview, each as JSON, by the name of the chart."""
    x, sums = [at for at, _ in columns], [each for _, each in columns]
    money = [to_counters(each) for each in sums]

    def build_lines(histograms: Sequence[Sequence[int]]) -> list[JsonObject]:
        return [
            _build_line(name, sign, [compute_quantile_s(each, share) for each in histograms], dash)
            for name, share, sign, dash in (
                ("median", 0.5, "forwarded", ()),
                ("p95", 0.95, "waiting", _DASHED),
            )
        ]

    series = {
        "tokens": [
            _build_bars("clients sent", "sent", [each.tokens_before for each in sums]),
            _build_bars("providers read", "forwarded", [each.read_tokens for each in sums]),
            _build_bars("cached", "cached", [min(each.cached_tokens, each.tokens_after) for each in sums]),
        ],
        "requests": [
            _build_bars("requests", "sent", [each.requests for each in sums]),
            _build_bars("failed", "failed", [each.failed for each in sums]),
            *_build_failed_open_line(sums),
        ],
        "dollars": [
            _build_bars("cost of requests", "sent", [each["cost_usd"] or 0 for each in money]),
            _build_bars("net saved", "forwarded", [each["net_usd"] or 0 for each in money]),
        ],
        "own": build_lines([each.own_overhead for each in sums]),
        "waiting": build_lines([each.waiting_overhead for each in sums]),
    }  # fmt: skip
    units = {"own": "seconds", "waiting": "seconds"}
    marks = {"tokens": [each.rounds for each in sums]}
    return {
        name: _encode_json(
            {"unit": units.get(name, name), "step": step, "x": x, "series": each, "marks": marks.get(name)}
        )
        for name, each in series.items()
    }


def _build_failed_open_line(sums: Sequence[ExchangeCounters]) -> list[JsonObject]:
    values = [each.failed_open for each in sums]
    return [_build_line("without a due compaction", "waiting", values, _DASHED)] if any(values) else []


def _build_bars(name: str, sign: str, values: Sequence[float | None]) -> JsonObject:
    return {"name": name, "sign": sign, "look": "bar", "values": values}


def _build_line(name: str, sign: str, values: Sequence[float | None], dash: Sequence[int] = ()) -> JsonObject:
    return {"name": name, "sign": sign, "look": "line", "values": values, "dash": dash}


def build_requests_chart(exchanges: Sequence[Exchange], rounds: Sequence[CompactionRecord]) -> str:
    """Builds the data of the chart of a conversation's requests, as JSON.

    The chart shows the sizes of the newest requests in tokens. For each compaction, it marks the first
    request to which the compaction was applied.
    """
    drawn = exchanges[-MAX_COLUMNS:]
    first = len(exchanges) - len(drawn)
    marks = _find_round_marks(exchanges, rounds)[first:]
    bars = [
        _build_bars("client sent", "sent", [each.tokens_before for each in drawn]),
        _build_bars("forwarded", "forwarded", [_get_forwarded_tokens(each) for each in drawn]),
        _build_bars("cached", "cached", [each.cached_tokens for each in drawn]),
    ]
    series = [each for each in bars if each["sign"] == "forwarded" or any(each["values"])]
    triggers = [each.trigger for each in drawn if each.trigger]
    largest = max((each.tokens_before or each.prompt_tokens or 0 for each in drawn), default=0)
    if triggers and min(triggers) <= 3 * largest:  # one far above everything would leave the bars no height
        series.append(_build_line("trigger", "trigger", [each.trigger for each in drawn], _DASHED))
    return _encode_json(
        {
            "unit": "tokens",
            "step": 0,
            "x": list(range(first + 1, first + len(drawn) + 1)),
            "series": series,
            "marks": [mark and mark[0] for mark in marks],
            "places": [mark and mark[1] for mark in marks],
        }
    )


def build_strategies_chart(results: Sequence[JsonObject]) -> str:
    """Builds the data of the chart of the tokens that each strategy would forward, as JSON.

    `results` is the return value of `ReplayJobRunner.run_job`.
    """
    sent = [point["before"] for point in max((each["points"] for each in results), key=len, default=[])]
    lines = [
        _build_line(
            each["strategy"],
            "forwarded" if number % 2 == 0 else "waiting",
            [point["after"] for point in each["points"]],
            DASHES[number % len(DASHES)],
        )
        for number, each in enumerate(results)
    ]
    return _encode_json(
        {
            "unit": "tokens",
            "step": 0,
            "x": list(range(1, len(sent) + 1)),
            "series": [_build_line("never compacting", "sent", sent), *lines],
            "marks": None,
        }
    )


def _find_round_marks(
    exchanges: Sequence[Exchange], rounds: Sequence[CompactionRecord]
) -> list[tuple[int, str] | None]:
    """Returns, for each request, the number and the checkpoint id (`place`) of its new compaction.

    A compaction is new for the first request to which it is applied. For a request without a new compaction,
    the entry is None. The number 0 means that the proxy only shortened tool results, which has no number of
    its own. The id is empty if it is unknown.
    """
    # Each strategy numbers its compactions from 1. After an undo, a number is given again.
    same_number: dict[tuple[str, int | None], list[Event]] = {}
    for made in rounds:
        same_number.setdefault((made.event.strategy, made.event.round), []).append(made.event)
    shortened = {each.event.request: each.event.place for each in rounds if not each.event.model}
    last = (exchanges[0].strategy, exchanges[0].round) if exchanges else None
    marks: list[tuple[int, str] | None] = []
    for each in exchanges:
        applied = (each.strategy, each.round)
        zero = shortened.get(each.request) if each.request else None
        if each.round and applied != last:
            marks.append((each.round, _find_place(same_number.get(applied, []), each)))
        else:
            marks.append((0, zero) if zero else None)
        last = applied
    return marks


def _find_place(events: Sequence[Event], exchange: Exchange) -> str:
    """Returns the checkpoint id of the compaction that was applied to a request; empty if it is unknown.

    `events` are the compactions with the number of the applied one, oldest first. It is the one that was made
    during the request, or else the newest one that is older than the request.
    """
    own = [each for each in events if exchange.request and each.request == exchange.request]
    older = [each for each in events if each.at <= exchange.at]
    return next((found[-1].place for found in (own, older, events[:1]) if found), "")


def _get_forwarded_tokens(exchange: Exchange) -> int | None:
    """Returns the tokens of a forwarded request as the upstream counted them, or else as the proxy did."""
    counted = exchange.first_prompt_tokens
    return exchange.tokens_after if counted is None else counted


def _encode_json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, allow_nan=False, separators=(",", ":"))
