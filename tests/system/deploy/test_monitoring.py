"""Prometheus, its alerts and the dashboard: each asks for metrics that there are, as they are labelled."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from compaction_proxy.core.upstream_failure import CAUSES, is_failure_status
from compaction_proxy.telemetry.metrics import COUNTERS, GAUGES, HISTOGRAMS, to_public_name

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "deploy" / "monitoring"
DASHBOARD = FOLDER / "grafana" / "dashboards" / "compaction-proxy.json"
# Labels that Prometheus itself adds, and metrics of its own.
ADDED = {"instance", "job"}
OWN = {"up": ADDED}
FUNCTIONS = {
    "sum", "max", "min", "count", "by", "rate", "increase", "histogram_quantile", "label_values", "vector",
    "time", "or",
}  # fmt: skip


def series() -> Mapping[str, set[str]]:
    """Every name that can be asked for, and its labels."""
    plain = {name: set(it.labels) for name, it in COUNTERS.items()}
    plain |= {name: set(it.labels) for name, it in GAUGES.items()}
    parts = {
        f"{name}_{part}": set(it.labels) | ({"le"} if part == "bucket" else set())
        for name, it in HISTOGRAMS.items()
        for part in ("bucket", "sum", "count")
    }
    return {to_public_name(name): labels | ADDED for name, labels in (plain | parts).items()} | OWN


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return found


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def queries() -> Iterator[str]:
    """Every query of the dashboard, those of its variables too."""
    for panel in panels():
        yield from (target["expr"] for target in panel["targets"])
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def rules(documents: Any) -> list[dict[str, Any]]:
    (document,) = documents("deploy/monitoring/alerts.yml")
    return [rule for group in document["groups"] for rule in group["rules"]]


def wrong(query: str) -> set[str]:
    """Names in a query that are neither metrics nor functions, and labels that its metrics do not have."""
    known = series()
    selectors = re.findall(r"(\w+)?\{([^}]*)\}", query)
    found = {
        f"{name}{{{label}}}"
        for name, inside in selectors
        for label in re.findall(r"(\w+)\s*[=!]", inside)
        if label not in known.get(name, set())
    }
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\"[^\"]*\"", "", query)
    grouped = {name for inside in re.findall(r"by \(([^)]*)\)", bare) for name in re.findall(r"\w+", inside)}
    words = set(re.findall(r"\b[a-zA-Z_]\w*", re.sub(r"by \([^)]*\)", "by", bare)))
    asked = words & known.keys()
    allowed = set().union(*(known[name] for name in asked))
    if query.startswith("label_values"):
        words, grouped = words & asked, words - asked - FUNCTIONS
    return (
        found | (words - known.keys() - FUNCTIONS) | (grouped - allowed) | (set() if asked else {"nothing"})
    )


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ('sum by (model) (rate(compaction_proxy_requests_total{status="none"}[5m]))', set()),
        ("sum(rate(compaction_request_total[5m]))", {"compaction_request_total", "nothing"}),
        ('compaction_proxy_requests_total{reason="x"}', {"compaction_proxy_requests_total{reason}"}),
        ("sum by (reason) (compaction_proxy_requests_total)", {"reason"}),
        ("label_values(compaction_proxy_requests_total, strategy)", {"strategy"}),
    ],
)
def test_what_is_wrong_with_a_query_is_seen(query: str, expected: set[str]) -> None:
    assert wrong(query) == expected


def test_the_dashboard_asks_for_what_there_is() -> None:
    asked = list(queries())
    assert len(asked) > 30
    assert {query: wrong(query) for query in asked if wrong(query)} == {}
    shown = " ".join(asked)
    names = map(to_public_name, (*COUNTERS, *HISTOGRAMS, *GAUGES))
    assert [name for name in names if name not in shown] == []


def test_the_dashboard_takes_whatever_prometheus_there_is_and_overlaps_nowhere() -> None:
    variables = {each["name"]: each["type"] for each in dashboard()["templating"]["list"]}
    assert variables == {"datasource": "datasource", "instance": "query", "model": "query"}
    sources = {target["datasource"]["uid"] for panel in panels() for target in panel["targets"]}
    assert sources == {"${datasource}"}
    assert set(re.findall(r"\$(\w+)", " ".join(queries()))) <= {*variables, "__range", "__rate_interval"}
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(set(ids)) == len(ids)
    cells = [
        (grid["x"] + column, grid["y"] + line)
        for grid in (panel["gridPos"] for panel in dashboard()["panels"])
        for column in range(grid["w"])
        for line in range(grid["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(column for column, _ in cells) < 24
    assert [panel["title"] for panel in panels() if not panel["fieldConfig"]["defaults"]["unit"]] == []


def test_alerts_ask_for_what_there_is_and_say_what_it_means(documents: Any) -> None:
    found = rules(documents)
    assert {rule["alert"]: wrong(rule["expr"]) for rule in found if wrong(rule["expr"])} == {}
    names = {rule["alert"] for rule in found}
    assert len(names) == len(found)
    assert names >= {
        "CompactionFailOpen", "CompactionOverheadHigh", "CompactionStoreErrors", "CompactionEstimateOff",
        "CompactionConfigRefused", "CompactionBreakerOpen",
    }  # fmt: skip
    for rule in found:
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert set(rule["annotations"]) == {"summary", "description"}
        told = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        kept = {
            label for inside in re.findall(r"by \(([^)]*)\)", rule["expr"]) for label in inside.split(", ")
        }
        assert told <= (ADDED if rule["alert"] == "CompactionProxyDown" else kept)


def find_upstream_alerts(rules: list[dict[str, Any]], cause: str) -> list[str]:
    """The alerts that a failure of a provider with this cause raises."""
    matchers = {
        rule["alert"]: re.findall(r'cause(=~|!~)"([^"]*)"', rule["expr"])
        for rule in rules
        if "upstream_errors_total" in rule["expr"]
    }
    return [
        alert
        for alert, found in matchers.items()
        if all(bool(re.fullmatch(pattern, cause)) == (sign == "=~") for sign, pattern in found)
    ]


@pytest.mark.parametrize(
    ("alert", "causes"),
    [
        ("CompactionUpstreamFails", ("connection-refused", "tls-failed", "http-500", "http-503", "http-529")),
        ("CompactionUpstreamTimesOut", ("connect-timeout", "answer-timeout", "answer-stalled", "http-408")),
        ("CompactionUpstreamCuts", ("answer-cut", "connection-reset", "invalid-answer")),
        ("CompactionUpstreamRefuses", ("http-429", "http-401", "http-402", "http-403", "http-407")),
        (None, ("http-400", "http-404", "http-413", "http-422")),
    ],
)
def test_errors_timeouts_cuts_and_refusals_of_a_provider_raise_alerts_of_their_own(
    documents: Any, alert: str | None, causes: tuple[str, ...]
) -> None:
    expected = [] if alert is None else [alert]
    found = {cause: find_upstream_alerts(rules(documents), cause) for cause in causes}
    assert found == dict.fromkeys(causes, expected)
    for rule in rules(documents):
        if rule["alert"] == alert:
            assert "by (target, cause)" in rule["expr"]


def test_each_cause_of_a_failure_raises_one_alert(documents: Any) -> None:
    statuses = {f"http-{status}" for status in range(400, 600) if is_failure_status(status)}
    raised = {cause: find_upstream_alerts(rules(documents), cause) for cause in CAUSES | statuses}
    assert {cause: alerts for cause, alerts in raised.items() if len(alerts) != 1} == {}


def test_the_pieces_find_one_another(documents: Any) -> None:
    (prometheus,) = documents("deploy/monitoring/prometheus.yml")
    (compose,) = documents("docker-compose.yml")
    services = compose["services"]
    mounted = dict(
        volume.split(":")[:2]
        for name in ("prometheus", "grafana")
        for volume in services[name]["volumes"]
        if volume.startswith("./")
    )
    assert [path for path in mounted if not (ROOT / path).exists()] == []
    assert set(prometheus["rule_files"]) <= set(mounted.values())
    [job] = prometheus["scrape_configs"]
    assert (job["job_name"], job["static_configs"]) == ("compaction-proxy", [{"targets": ["proxy:4141"]}])
    (sources,) = documents("deploy/monitoring/grafana/provisioning/datasources/prometheus.yml")
    assert [each["url"] for each in sources["datasources"]] == ["http://prometheus:9090"]
    (provided,) = documents("deploy/monitoring/grafana/provisioning/dashboards/compaction-proxy.yml")
    [provider] = provided["providers"]
    assert provider["options"]["path"] == mounted["./deploy/monitoring/grafana/dashboards"]
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/{DASHBOARD.name}"
    assert all(services[name]["profiles"] == ["monitoring"] for name in ("prometheus", "grafana"))
