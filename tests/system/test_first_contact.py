"""What a new user meets first: the banner, the dashboard, prices of a gateway, windows of local models."""

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.system.black_box import COMMAND, Provider, Proxy, Reply, chat_reply, run_proxy

FIREFOX = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
OPEN_METRICS = "application/openmetrics-text"
THEIRS = b"the page of the provider"


@pytest.fixture
def provider() -> Iterator[Provider]:
    provider = Provider(lambda _: Reply(body=THEIRS))
    yield provider
    provider.close()


def find_dashboard_line(banner: Any) -> str:
    """What the banner says of the dashboard; empty where it says nothing."""
    return next((line.split(maxsplit=1)[1] for line in banner if line.split()[0] == "dashboard"), "")


@pytest.mark.parametrize("base_path", ["", "/own"])
def test_the_banner_names_the_address_at_which_a_browser_finds_the_dashboard(
    base_path: str, provider: Provider, tmp_path: Path
) -> None:
    config = {"server": {"base_path": base_path}}
    with run_proxy(tmp_path, provider.url, config) as proxy:
        address = find_dashboard_line(proxy.banner)
        assert address == f"{proxy.url}{base_path}/ui"
        assert "<h1>Overview</h1>" in httpx.get(address).text


def test_the_banner_says_that_the_dashboard_is_closed_at_a_public_address_without_a_key(
    provider: Provider, tmp_path: Path
) -> None:
    with run_proxy(tmp_path, provider.url, {"server": {"host": "0.0.0.0"}}) as proxy:
        assert find_dashboard_line(proxy.banner) == "closed until you set server.admin_key"
        assert httpx.get(f"{proxy.url}/ui").status_code == 403


@pytest.mark.parametrize("base_path", ["", "/own"])
def test_a_browser_that_opens_the_start_page_gets_the_dashboard(
    base_path: str, provider: Provider, tmp_path: Path
) -> None:
    config = {"server": {"base_path": base_path}}
    with run_proxy(tmp_path, provider.url, config) as proxy, proxy.client() as client:
        answer = client.get(f"{base_path}/", headers={"accept": FIREFOX})
        assert (answer.status_code, answer.headers.get("location")) == (302, f"{base_path}/ui")
        assert (answer.headers["vary"], answer.headers["cache-control"]) == ("accept", "no-store")
        page = client.get(f"{base_path}/", headers={"accept": FIREFOX}, follow_redirects=True)
        assert "<h1>Overview</h1>" in page.text
        assert provider.received == []


def test_no_other_request_is_led_to_the_dashboard(provider: Provider, tmp_path: Path) -> None:
    with run_proxy(tmp_path, provider.url) as proxy, proxy.client() as client:
        browser = {"accept": FIREFOX}
        led = client.get("/", headers=browser).status_code
        answers = [
            client.get("/"),
            client.get("/", headers={"accept": "application/json"}),
            client.get("/", headers={"accept": "text/htmlx, application/json"}),
            client.post("/", headers=browser),
            client.get("/v1", headers=browser),
            client.get("/v1/models", headers=browser),
        ]
        assert led == 302
        assert [(each.status_code, each.content) for each in answers] == [(200, THEIRS)] * len(answers)
        assert len(provider.received) == len(answers)


def test_each_operation_of_the_api_has_a_summary_in_words(provider: Provider, tmp_path: Path) -> None:
    with run_proxy(tmp_path, provider.url) as proxy, proxy.client() as client:
        paths = client.get("/admin/v1/openapi.json").json()["paths"]
    operations = {f"{method} {path}": it for path, methods in paths.items() for method, it in methods.items()}
    summaries = {name: it.get("summary", "") for name, it in operations.items()}
    assert {name: it for name, it in summaries.items() if len(it.split()) < 3} == {}
    assert len(set(summaries.values())) == len(summaries) > 20


def check_variables(folder: Path, variables: Mapping[str, str]) -> str:
    """What `check` says against environment variables; empty if it accepts them."""
    environ = {"HOME": str(folder), "PATH": os.environ["PATH"], **variables}
    ran = subprocess.run(
        [COMMAND, "check"], check=False, cwd=folder, env=environ, capture_output=True, text=True
    )
    return ran.stderr if ran.returncode else ""


def relay_chat(proxy: Proxy, model: str, **headers: str) -> None:
    """Have one small chat request answered, and wait until the statistics hold it."""
    with proxy.client() as client:
        body = {"model": model, "messages": [{"role": "user", "content": "Which port?"}]}
        client.post("/v1/chat/completions", json=body, headers=headers).raise_for_status()
        stats = "/admin/v1/stats?since=24h&by=total"
        proxy.wait_for(lambda: client.get(stats).json()["total"]["requests"], "the request is counted")


def test_where_no_price_is_known_tokens_come_first_and_one_line_says_why(tmp_path: Path) -> None:
    local = Provider(chat_reply)
    with run_proxy(tmp_path, local.url) as proxy, proxy.client() as client:
        relay_chat(proxy, "gpt-5.4-mini", **{"x-compaction": "force"})
        page = client.get("/ui").text
    local.close()
    first = page.partition('class="figure first">')[2].partition('<div class="figure')[0]
    words = " ".join(unescape(re.sub(r"<[^>]+>", " ", first)).split())
    assert words.startswith("Tokens")
    assert words.count("No dollars: list prices do not apply to an upstream on this machine or network;") == 1
    assert "Net saved" not in words


def test_commands_say_why_there_are_no_dollars_and_show_the_saved_tokens(tmp_path: Path) -> None:
    local = Provider(chat_reply)
    with run_proxy(tmp_path, local.url) as proxy:
        relay_chat(proxy, "gpt-4o-mini", **{"x-session-id": "invoice-7"})
        shown = [
            proxy.run_command("none", *command).stdout
            for command in (["sessions", "show", "invoice-7"], ["savings"], ["models"])
        ]
        found = proxy.run_command("none", "sessions", "list", "--search", "invoice").stdout
    local.close()
    for text in shown:
        assert "list prices do not apply to an upstream on this machine or network;" in text
    assert re.search(r"^tokens saved, net +0$", shown[0], re.MULTILINE)
    assert re.search(
        r"^context now +\d+ tokens \(counted by the provider\); compacts at", shown[0], re.MULTILINE
    )
    assert re.search(r"^from \S+ to \S+, the time of the latest counted request$", shown[1], re.MULTILINE)
    assert "session.store_names" in found


@pytest.mark.parametrize(("prices", "has_price"), [("auto", False), ("list", True)])
def test_list_prices_behind_a_gateway_are_used_where_they_are_asked_for(
    prices: str, *, has_price: bool, tmp_path: Path
) -> None:
    gateway = Provider(chat_reply)
    variables = {"COMPACTION_PROXY__UPSTREAM__PRICES": prices}
    assert check_variables(tmp_path, variables) == ""
    with run_proxy(tmp_path, gateway.url, environ=variables) as proxy, proxy.client() as client:
        relay_chat(proxy, "gpt-5.4-mini", **{"x-compaction": "force"})
        [row] = client.get("/admin/v1/models").json()["models"]
        total = client.get("/admin/v1/stats?since=24h&by=total").json()["total"]
    gateway.close()
    assert (row["input_usd"] is not None, total["unpriced"]) == (has_price, 0 if has_price else 1)
    assert bool(total["cost_usd"]) == has_price


def list_metric_names(proxy: Proxy) -> set[str]:
    """The names of all metrics, in both formats."""
    with proxy.client() as client:
        texts = [client.get("/metrics", headers={"accept": each}).text for each in ("", OPEN_METRICS)]
    return {name for text in texts for name in re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)}


def test_all_metrics_begin_with_the_name_of_the_proxy_and_old_names_stay(tmp_path: Path) -> None:
    provider = Provider(chat_reply)
    with run_proxy(tmp_path, provider.url) as proxy:
        relay_chat(proxy, "m")
        names = list_metric_names(proxy)
    ours = {name for name in names if name.startswith("compaction_proxy_")}
    assert {"compaction_proxy_requests_total", "compaction_proxy_upstream_errors_total"} <= ours
    assert {"compaction_requests_total", "upstream_errors_total", "build_info"} <= names

    variables = {"COMPACTION_PROXY__OBSERVABILITY__OLD_METRIC_NAMES": "false"}
    with run_proxy(tmp_path, provider.url, environ=variables) as proxy:
        relay_chat(proxy, "m")
        assert list_metric_names(proxy) == ours
    provider.close()
