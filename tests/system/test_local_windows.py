"""The window of a local model is asked for at first sight of it, and shown where people look for it."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.system.black_box import Provider, Proxy, Received, Reply, chat_reply, run_command, run_proxy

PATH = "/v1/chat/completions"
WINDOW = 9_216


def answer(request: Received) -> Reply:
    """A server like vLLM, which says in its list how large the window of its model is."""
    if request.method == "POST":
        return chat_reply(request)
    if not request.path.endswith("/models"):
        return Reply(404)
    rows = [{"id": "qwen", "max_model_len": WINDOW}, {"id": "other"}]
    return Reply(body=json.dumps({"object": "list", "data": rows}).encode())


@pytest.fixture
def provider() -> Iterator[Provider]:
    provider = Provider(answer)
    yield provider
    provider.close()


def ask(
    client: httpx.Client, text: str = "Which port?", model: str = "qwen", **headers: str
) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": text}]}
    return client.post(PATH, json=body, headers=headers)


def find_row(client: httpx.Client, model: str = "qwen") -> tuple[int, str] | None:
    """The window of a model and where it is from, as the admin API has them."""
    rows = client.get("/admin/v1/models").json()["models"]
    return next(((row["window"], row["window_source"]) for row in rows if row["model"] == model), None)


def await_window(proxy: Proxy, client: httpx.Client) -> None:
    proxy.wait_for(lambda: find_row(client) == (WINDOW, "upstream"), "the window is shown")


def test_a_small_request_is_enough_to_have_the_window_asked_for_once(
    provider: Provider, tmp_path: Path
) -> None:
    with run_proxy(tmp_path, provider.url) as proxy, proxy.client() as client:
        first = ask(client)
        assert first.headers["x-compaction-reason"] == "small"
        await_window(proxy, client)
        asked = [each.path for each in provider.asked]
        assert asked.count("/v1/models") == 1
        for _ in range(5):
            ask(client).raise_for_status()
        assert [each.path for each in provider.asked] == asked
        assert [each.method for each in provider.received] == ["POST"] * 6
        # The window decides when the next request is compacted.
        large = ask(client, "some words about ports " * 2_000)
        assert large.headers["x-compaction-context-limit"] == str(WINDOW)


def test_the_window_is_shown_by_models_and_doctor_and_by_the_banner_of_the_next_start(
    provider: Provider, tmp_path: Path
) -> None:
    config: dict[str, Any] = {"store": {"url": f"sqlite:///{tmp_path}/state.db"}}
    with run_proxy(tmp_path, provider.url, config) as proxy, proxy.client() as client:
        assert not [line for line in proxy.banner if "windows" in line]
        ask(client).raise_for_status()
        await_window(proxy, client)
        shown = run_command(tmp_path, "models", "--url", proxy.url)
        [row] = [line.split() for line in shown.stdout.splitlines() if line.startswith("qwen")]
        assert row[1:3] == ["9,216", "upstream"]
        found = run_command(tmp_path, "doctor", "--json", "--upstream", provider.url)
        windows = {
            each["what"]: each for each in json.loads(found.stdout)["findings"] if each["topic"] == "window"
        }
        assert windows["qwen: 9,216 tokens, reported by the upstream"]["level"] == "ok"
        [other] = [each for what, each in windows.items() if what.startswith("other: ")]
        assert (other["level"], "models.other.window" in other["fix"]) == ("note", True)
    with run_proxy(tmp_path, provider.url, config) as proxy:
        [line] = [line.split(maxsplit=1) for line in proxy.banner if line.split()[0] == "windows"]
        assert line[1] == "qwen 9,216 tokens, as the upstream has reported"


def test_a_window_that_is_configured_is_not_asked_for(provider: Provider, tmp_path: Path) -> None:
    config = {"models": {"qwen": {"window": 20_000}}}
    with run_proxy(tmp_path, provider.url, config) as proxy, proxy.client() as client:
        ask(client).raise_for_status()
        proxy.wait_for(lambda: find_row(client), "the model is listed")
        assert find_row(client) == (20_000, "configured")
        assert provider.asked == []


@pytest.mark.parametrize("status", [400, 404, 500])
def test_a_model_that_the_upstream_refuses_is_no_sight_of_it(
    status: int, provider: Provider, tmp_path: Path
) -> None:
    provider.answer = lambda request: Reply(status) if request.method == "POST" else answer(request)
    with run_proxy(tmp_path, provider.url) as proxy, proxy.client() as client:
        assert ask(client, model="nonsense").status_code == status
        provider.answer = answer
        ask(client).raise_for_status()
        await_window(proxy, client)
        assert not [each for each in provider.asked if "nonsense" in each.path]


def test_a_server_that_fails_to_say_its_window_fails_no_request(provider: Provider, tmp_path: Path) -> None:
    provider.answer = lambda request: chat_reply(request) if request.method == "POST" else Reply(cut=True)
    with run_proxy(tmp_path, provider.url) as proxy, proxy.client() as client:
        assert [ask(client).status_code for _ in range(3)] == [200] * 3
        proxy.wait_for(lambda: provider.asked, "the window is asked for")
        assert ask(client).status_code == 200
        proxy.wait_for(lambda: find_row(client), "the model is listed")
        assert find_row(client) == (128_000, "default")


def test_names_that_clients_have_chosen_control_no_terminal_and_do_not_flood_the_banner(
    provider: Provider, tmp_path: Path
) -> None:
    def serve_any_name(request: Received) -> Reply:
        if request.method == "POST":
            return chat_reply(request)
        if not request.path.endswith("/models"):
            return Reply(404)
        return Reply(body=json.dumps({"data": [{"id": "x", "meta": {"n_ctx": WINDOW}}]}).encode())

    provider.answer = serve_any_name  # as llama.cpp does
    config: dict[str, Any] = {"store": {"url": f"sqlite:///{tmp_path}/state.db"}}
    names = ["evil\x1b[2J\u202e", *(f"name-{number}" for number in range(12))]
    with run_proxy(tmp_path, provider.url, config) as proxy, proxy.client() as client:
        for name in names[::-1]:
            ask(client, model=name).raise_for_status()
            is_shown = partial(lambda name: find_row(client, name) == (WINDOW, "upstream"), name)
            proxy.wait_for(is_shown, "the window is shown")
    with run_proxy(tmp_path, provider.url, config) as proxy:
        [line] = [line for line in proxy.banner if line.split()[0] == "windows"]
        assert line.isprintable()
        assert r"evil\x1b[2J\u202e 9,216 and 3 more tokens" in line
