"""The operator chooses how much the log says: its lowest level, and a line for each request or each error."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.proxy_processes import command
from tests.system.black_box import Provider, Proxy, Received, Reply, chat_reply, run_proxy

SECRETS = ("words-of-the-user", "sk-a-credential", "query-of-the-client")
CREDENTIAL = {"authorization": f"Bearer {SECRETS[1]}"}
MESSAGES = [{"role": "user", "content": SECRETS[0]}]
CHAT = "/v1/chat/completions"


def answer(request: Received) -> Reply:
    """A whole answer, an error or a cut, as the model's name says."""
    model = request.json().get("model", "")
    if model == "refuses":
        return Reply(429, b'{"error": {"message": "slow down"}}')
    return Reply(body=b'{"id": "', cut=True) if model == "cuts" else chat_reply(request)


@pytest.fixture
def provider() -> Iterator[Provider]:
    made = Provider(answer)
    yield made
    made.close()


def run(folder: Path, provider: Provider, **observability: str) -> Any:
    """A proxy with these keys of the section `observability`."""
    config = {"observability": {"log_format": "json", **observability}}
    return run_proxy(folder, provider.url, config)


def ask_in_every_way(client: httpx.Client) -> None:
    """A whole answer, an error, a cut, a path that is only relayed, and a page of the proxy's own."""
    for path, body in (
        (CHAT, {"model": "m", "messages": MESSAGES}),
        (CHAT, {"model": "refuses", "messages": MESSAGES}),
        ("/v1/embeddings", {"model": "m", "input": SECRETS[0]}),
    ):
        client.post(f"{path}?q={SECRETS[2]}", json=body, headers=CREDENTIAL)
    with pytest.raises(httpx.RemoteProtocolError):
        client.post(CHAT, json={"model": "cuts", "messages": MESSAGES}, headers=CREDENTIAL)
    client.get("/admin/v1/nothing")


def find_lines(proxy: Proxy, count: int) -> list[tuple[Any, ...]]:
    """Method, path, status and end of each request in the log, once there are as many."""
    lines = proxy.wait_for(
        lambda: len(found := proxy.log_lines("request.answered")) >= count and found, "the lines are there"
    )
    return [(line["method"], line["path"], line.get("status"), line.get("end")) for line in lines]


ERRORS = [("POST", CHAT, 429, None), ("POST", CHAT, 200, "cut"), ("GET", "/admin/v1/nothing", 404, None)]


def test_each_request_has_a_line_without_its_query_and_its_text(tmp_path: Path, provider: Provider) -> None:
    with run(tmp_path, provider, access_log="all") as proxy, proxy.client() as client:
        ask_in_every_way(client)
        lines = find_lines(proxy, 5)
        text = proxy.log_path.read_text()
        first = proxy.log_lines("request.answered")[0]

    assert lines == [
        ("POST", CHAT, 200, None),
        ERRORS[0],
        ("POST", "/v1/embeddings", 200, None),
        *ERRORS[1:],
    ]
    assert first["request"].startswith("r_")
    assert first["bytes"] > 0
    assert first["seconds"] >= 0
    assert [secret for secret in SECRETS if secret in text] == []


def test_only_errors_and_cuts_have_a_line_where_that_is_asked_for(tmp_path: Path, provider: Provider) -> None:
    with run(tmp_path, provider, access_log="errors") as proxy, proxy.client() as client:
        ask_in_every_way(client)
        assert find_lines(proxy, 3) == ERRORS
        assert {line["level"] for line in proxy.log_lines("request.answered")} == {"warning"}


def test_a_client_that_leaves_is_told_from_a_cut(tmp_path: Path, provider: Provider) -> None:
    def stream() -> Iterator[bytes]:
        while True:
            yield b"data: {}\n\n" * 1_000

    provider.answer = lambda _: Reply(headers={"content-type": "text/event-stream"}, chunks=stream())
    body = {"model": "m", "messages": MESSAGES, "stream": True}
    with run(tmp_path, provider, access_log="all") as proxy, proxy.client() as client:
        with client.stream("POST", CHAT, json=body) as reply:
            next(reply.iter_raw())
        assert find_lines(proxy, 1) == [("POST", CHAT, 200, "client-left")]


def test_without_the_key_no_request_has_a_line(tmp_path: Path, provider: Provider) -> None:
    with run(tmp_path, provider) as proxy, proxy.client() as client:
        ask_in_every_way(client)
        proxy.wait_for(lambda: proxy.log_lines("upstream.failed"), "the failures are logged")
        assert proxy.log_lines("request.answered") == []


def test_lines_below_the_level_are_left_out(tmp_path: Path, provider: Provider) -> None:
    with run(tmp_path, provider, log_level="warning", access_log="all") as proxy, proxy.client() as client:
        ask_in_every_way(client)
        assert find_lines(proxy, 3) == ERRORS
        assert {line["level"] for line in proxy.log_lines()} == {"warning"}


@pytest.mark.parametrize("written", ["off", '"off"', "all", "errors"])
def test_each_value_can_be_written_without_quotes(tmp_path: Path, written: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"observability:\n  access_log: {written}\n  log_level: debug\n")
    code, _, errors = command(f"check --config {path}", tmp_path)
    assert (code, errors) == (0, "")
