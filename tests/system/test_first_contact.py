"""What a new user meets first: the banner names the dashboard, and a browser finds it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.system.black_box import Provider, Reply, run_proxy

FIREFOX = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
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
        assert find_dashboard_line(proxy.banner) == "closed at this address until server.admin_key is set"
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
