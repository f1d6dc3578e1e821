"""`savings`: tables, JSON, CSV and five lines, from what the admin API says."""

import csv
import io
import json
from collections.abc import Callable

import pytest
from typer.testing import Result

from compaction_proxy.admin.api.schemas import to_stats_row
from compaction_proxy.cli.savings import format_csv
from compaction_proxy.telemetry.statistics import ExchangeCounters, StatisticsRow
from tests.helpers.scripted_admin import Scripted

Run = Callable[..., Result]
TOTAL = {
    "requests": 1200, "rounds": 14, "tokens_before": 4_000_000, "tokens_after": 1_000_000,
    "prompt_tokens": 1_000_000, "cached_tokens": 900_000, "cost_usd": 3.5, "gross_usd": 10.0,
    "cache_loss_usd": 1.25, "summary_usd": 0.25, "net_usd": 8.5, "unpriced": 2, "uncounted": 100,
    "summary_calls": 14, "summary_prompt_tokens": 200_000, "unpriced_summary_calls": 3,
    "net_tokens": 2_800_000, "last_at": 1_795_348_800.0,
    "statuses": {"none": 1186, "applied": 14}, "overhead": [0, 1200, *[0] * 12],
    "overhead_p50_s": 0.00075, "overhead_p95_s": 0.000975,
}  # fmt: skip
UNPRICED = {
    "of": "=cmd|x", "requests": 2, "uncounted": 0, "tokens_before": 10, "net_tokens": -10, "net_usd": None,
    "overhead_p50_s": None, "overhead_p95_s": None,
}  # fmt: skip


NET = "$8.50 net saved: $10.00, minus $1.25 for cache misses and $0.2500 for summaries"


@pytest.fixture
def told(script: Scripted) -> Scripted:
    """A server with statistics."""
    rows = [{"of": "gpt-5.4", **TOTAL}, UNPRICED]
    script.put("GET", "/stats", {"since": 1_792_761_000.5, "rows": rows, "total": TOTAL})
    return script


def test_a_row_for_each_and_the_total_with_what_has_no_price_named(told: Scripted, run: Run) -> None:
    done = run("savings", "--since", "30d", "--by", "model", "--url", told.url)
    assert [" ".join(line.split()) for line in done.stdout.splitlines()] == [
        "model requests counted sent read tokens saved less cached cost saved cache loss summaries net saved",
        "gpt-5.4 1,200 1,100 4,000,000 1,200,000 2,800,000 70 % 90 % $3.50 $10.00 $1.25 $0.2500 $8.50",
        "=cmd|x 2 2 10 20 -10 -100 % n/a n/a n/a n/a n/a n/a",
        "total 1,200 1,100 4,000,000 1,200,000 2,800,000 70 % 90 % $3.50 $10.00 $1.25 $0.2500 $8.50",
        "the tokens exclude 100 of 1,200 requests, because their token counts are unknown",
        "the dollars exclude 2 of 1,200 requests, because their prices or token counts are unknown",
        "the dollars exclude 3 of 14 summary calls, because their prices or token counts are unknown",
        "`compaction-proxy models` lists the known prices",
        "from 2026-10-23T13:00:00Z to 2026-11-22T12:00:00Z, the time of the latest counted request",
    ]
    assert told.asked[0][1] == "/admin/v1/stats?since=30d&by=model"


def test_json_is_what_the_server_says(told: Scripted, run: Run) -> None:
    assert json.loads(run("savings", "--json", "--url", told.url).stdout)["total"] == TOTAL


def test_csv_has_every_single_counter_and_no_formula(told: Scripted, run: Run) -> None:
    done = run("savings", "--csv", "--url", told.url)
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [row["of"] for row in rows] == ["gpt-5.4", "'=cmd|x"]
    figures = ("cache_loss_usd", "net_usd", "statuses.applied", "overhead_p50_s", "overhead_p95_s")
    assert [[row[name] for name in figures] for row in rows] == [
        ["1.25", "8.5", "14", "0.00075", "0.000975"], [""] * 5,
    ]  # fmt: skip


def test_one_is_not_many(script: Scripted, run: Run) -> None:
    total = {**TOTAL, "requests": 1, "rounds": 1}
    script.put("GET", "/stats", {"rows": [], "total": total})
    assert run("savings", "--share", "--url", script.url).stdout.splitlines()[1] == (
        "1 request, 1 compaction"
    )
    one_unpriced = {**total, "uncounted": 0, "unpriced": 1, "unpriced_summary_calls": 0}
    script.put("GET", "/stats", {"rows": [], "total": one_unpriced})
    shown = run("savings", "--url", script.url).stdout
    assert "the dollars exclude 1 of 1 request, because their prices or token counts are unknown\n" in shown


def test_an_upstream_for_which_list_prices_are_not_used_is_told_as_the_reason(
    script: Scripted, run: Run
) -> None:
    total = {**TOTAL, "net_usd": None}
    script.put("GET", "/stats", {"rows": [], "total": total, "list_prices": False})
    reason = (
        "list prices do not apply to an upstream on this machine or network; set `upstream.prices: list` or "
        "`models.*.prices` in config.yaml"
    )
    assert reason in run("savings", "--url", script.url).stdout.splitlines()
    assert (
        f"savings in dollars are unknown: {reason}"
        in run("savings", "--share", "--url", script.url).stdout.splitlines()
    )


def test_csv_has_the_columns_of_what_is_unknown_in_every_row(script: Scripted, run: Run) -> None:
    script.put("GET", "/stats", {"rows": [UNPRICED], "total": UNPRICED})
    done = run("savings", "--csv", "--url", script.url)
    assert done.stdout.splitlines() == [",".join(UNPRICED), "'=cmd|x,2,0,10,-10,,,"]


def test_what_the_server_says_of_a_row_is_all_in_the_csv_but_the_buckets() -> None:
    counted = ExchangeCounters(
        statuses={"none": 3}, failed_open_reasons={"unreadable": 1}, failure_kinds={"failed": 1}
    )
    told = to_stats_row(StatisticsRow("gpt-5.4", counted))
    [titles, _] = format_csv([told])
    words = {
        "statuses": "statuses.none",
        "failed_open_reasons": "failed_open_reasons.unreadable",
        "failure_kinds": "failure_kinds.failed",
    }
    histograms = {"overhead", "overhead_waiting"}
    assert titles.split(",") == [words.get(name, name) for name in told if name not in histograms]


def test_share_is_five_lines_without_names(told: Scripted, run: Run) -> None:
    assert run("savings", "--share", "--url", told.url).stdout.splitlines() == [
        "compaction-proxy, since 7d, up to 2026-11-22T12:00:00Z",
        "1,200 requests, 14 compactions",
        "4,000,000 tokens sent, 1,200,000 read including summaries (70 % less), of 1,100 of 1,200 requests",
        "90 % of the input came from the provider's cache",
        f"{NET}, of 1,198 of 1,200 requests, of 11 of 14 summary calls",
    ]


def test_figures_that_cover_everything_say_no_more_than_their_time(script: Scripted, run: Run) -> None:
    whole = {**TOTAL, "uncounted": 0, "unpriced": 0, "unpriced_summary_calls": 0}
    script.put("GET", "/stats", {"rows": [], "total": whole})
    [*_, total, last] = run("savings", "--url", script.url).stdout.splitlines()
    assert (total.split()[0], last.split()[0]) == ("total", "from")
    shared = run("savings", "--share", "--url", script.url).stdout
    assert " of 1,200 requests" not in shared
    assert "summary calls" not in shared


def test_sums_of_an_earlier_version_have_no_time_and_none_is_shown(script: Scripted, run: Run) -> None:
    script.put("GET", "/stats", {"rows": [], "total": {**TOTAL, "last_at": None}})
    assert "latest counted request" not in run("savings", "--url", script.url).stdout
    shared = run("savings", "--share", "--url", script.url).stdout.splitlines()
    assert (shared[0], len(shared)) == ("compaction-proxy, since 7d", 5)


@pytest.mark.parametrize(
    ("prompt_tokens", "reason"),
    [(9, "prices of all used models are unknown"), (0, "has not reported token counts")],
)
def test_where_there_are_no_dollars_the_shared_text_says_why(
    script: Scripted, run: Run, prompt_tokens: int, reason: str
) -> None:
    script.put("GET", "/stats", {"rows": [], "total": {"net_usd": None, "prompt_tokens": prompt_tokens}})
    assert reason in run("savings", "--share", "--url", script.url).stdout.splitlines()[-1]


def test_where_summaries_took_more_than_was_removed_the_shared_text_says_more(
    script: Scripted, run: Run
) -> None:
    script.put("GET", "/stats", {"rows": [], "total": {"tokens_before": 100, "net_tokens": -9}})
    assert (
        "100 tokens sent, 109 read including summaries (9 % more)"
        in run("savings", "--share", "--url", script.url).stdout
    )


@pytest.mark.parametrize("last_at", [None, "x", True, 1e400, 1e300, -1.0])
def test_a_time_that_makes_no_sense_is_not_shown(script: Scripted, run: Run, last_at: object) -> None:
    script.put("GET", "/stats", {"rows": [], "total": {**TOTAL, "last_at": last_at, "uncounted": "x"}})
    assert run("savings", "--url", script.url).exit_code == 0
    assert run("savings", "--share", "--url", script.url).exit_code == 0


@pytest.mark.parametrize("arguments", [["--by", "mood"], ["--csv", "--json"], ["--nonsense"]])
def test_wrong_usage_ends_with_2(arguments: list[str], run: Run) -> None:
    assert run("savings", *arguments).exit_code == 2
