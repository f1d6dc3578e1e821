"""Builds the data of the charts, as JSON.

The templates put the data into an attribute, and `static/pages.js` draws the chart from it. Next to each
chart is a table with the same figures, for readers who cannot see the chart or whose browser runs no scripts.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from compaction_proxy.admin.queries import CompactionRecord
from compaction_proxy.core.exchange import Exchange
from compaction_proxy.replay.provider import JsonObject
from compaction_proxy.telemetry.statistics import StatisticsRow

# Largest number of columns in a chart. If there are more, only the newest are drawn.
MAX_COLUMNS = 500
# Dash patterns, one for the line of each strategy: the numbers of pixels that are drawn and left out in turn.
DASHES = ((), (8, 4), (2, 3), (12, 3, 2, 3), (4, 4), (1, 2), (16, 4))
_STEPS_S = {"hour": 3_600, "day": 86_400}


def build_period_chart(rows: Sequence[StatisticsRow], by: str, since: float, until: float) -> str:
    """Builds the chart of sent, forwarded and cached tokens over time, with the number of compactions.

    Args:
        rows: Hours or days with exchanges.
        by: `hour` or `day`.
        since: Seconds since the epoch.
        until: Seconds since the epoch.
    """
    known = {_parse_timestamp(row.label): row.counters for row in rows}
    step = _STEPS_S[by]
    first, last = int(since) // step * step, int(until) // step * step
    columns = range(max(first, last - (MAX_COLUMNS - 1) * step), last + 1, step)
    drawn = [known.get(at) for at in columns]
    return _encode_json(
        {
            "kind": "period",
            "x": list(columns),
            "sent": [row and row.tokens_before for row in drawn],
            "forwarded": [row and row.tokens_after for row in drawn],
            "cached": [row and min(row.cached_tokens, row.tokens_after) for row in drawn],
            "rounds": [row and row.rounds for row in drawn],
        }
    )


def build_requests_chart(exchanges: Sequence[Exchange], rounds: Sequence[CompactionRecord]) -> str:
    """Builds the chart of a conversation's requests: their sizes, and which ones applied a new compaction."""
    drawn = exchanges[-MAX_COLUMNS:]
    first = len(exchanges) - len(drawn)
    marks = _find_round_marks(exchanges, rounds)[first:]
    return _encode_json(
        {
            "kind": "requests",
            "x": list(range(first + 1, first + len(drawn) + 1)),
            "sent": [each.tokens_before for each in drawn],
            "forwarded": [_get_forwarded_tokens(each) for each in drawn],
            "cached": [each.cached_tokens for each in drawn],
            "trigger": [each.trigger for each in drawn],
            "rounds": [mark and mark[0] for mark in marks],
            "places": [mark and mark[1] for mark in marks],
        }
    )


def build_strategies_chart(results: Sequence[JsonObject]) -> str:
    """Builds the chart of the tokens that each strategy would forward, request by request.

    `results` are those of `ReplayJobRunner.run_job`.
    """
    sent = [point["before"] for point in max((each["points"] for each in results), key=len, default=[])]
    return _encode_json(
        {
            "kind": "strategies",
            "x": list(range(1, len(sent) + 1)),
            "sent": sent,
            "names": [each["strategy"] for each in results],
            "dashes": DASHES,
            "forwarded": [[point["after"] for point in each["points"]] for each in results],
        }
    )


def _find_round_marks(
    exchanges: Sequence[Exchange], rounds: Sequence[CompactionRecord]
) -> list[tuple[int, str] | None]:
    """Returns, for each request, the number and the checkpoint id (`place`) of its new compaction.

    A compaction is new for the first request to which it is applied. Other requests have None. The number 0
    means that only tool results were shortened for the request.
    """
    places = {each.event.round: each.event.place for each in rounds}
    shortened = {each.event.request: each.event.place for each in rounds if each.event.round == 0}
    last = exchanges[0].round if exchanges else None
    marks: list[tuple[int, str] | None] = []
    for each in exchanges:
        changed = each.round if each.round != last else None
        zero = shortened.get(each.request) if each.request else None
        marks.append((changed, places.get(changed, "")) if changed else (0, zero) if zero else None)
        last = each.round
    return marks


def _get_forwarded_tokens(exchange: Exchange) -> int | None:
    """Returns the tokens of a forwarded request: the upstream's count, or else our estimate."""
    counted = exchange.first_prompt_tokens
    return exchange.tokens_after if counted is None else counted


def _parse_timestamp(text: str) -> int:
    """Parses an hour or a day, such as `2026-11-22T13`. Returns its beginning in seconds since the epoch."""
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp())


def _encode_json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, allow_nan=False, separators=(",", ":"))
