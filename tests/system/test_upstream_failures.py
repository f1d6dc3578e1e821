"""A provider that fails is visible: in the log, in the metrics, in the admin API and on the Failures page."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.free_ports import find_free_port
from tests.system.black_box import (
    COMMAND,
    Provider,
    Proxy,
    Received,
    Reply,
    chat_reply,
    run_command,
    run_proxy,
)

API_PATH = "/admin/v1/upstream-failures"
# None of these may stand in the log, in a metric or on the page.
SECRETS = ("words-of-the-user", "sk-a-credential", "query-of-the-client")
MESSAGES = [{"role": "user", "content": SECRETS[0]}]
CREDENTIAL = {"authorization": f"Bearer {SECRETS[1]}"}
READ = {"x-compaction": "force"}  # has even a small request read
CHAT = {"model": "m", "messages": MESSAGES}
RESPONSES = {"model": "m", "input": SECRETS[0]}
ANTHROPIC = {"model": "m", "max_tokens": 10, "messages": MESSAGES}
# Every way that a request takes through the proxy: path, body, headers.
WAYS: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    ("/v1/chat/completions", CHAT, {}),
    ("/v1/chat/completions", CHAT, READ),
    ("/v1/chat/completions", {**CHAT, "stream": True}, {}),
    ("/v1/chat/completions", {**CHAT, "stream": True}, READ),
    ("/v1/responses", RESPONSES, {}),
    ("/v1/responses", {**RESPONSES, "stream": True}, READ),
    ("/v1/messages", ANTHROPIC, {}),
    ("/v1/messages", {**ANTHROPIC, "stream": True}, READ),
    ("/v1/embeddings", {"model": "m", "input": SECRETS[0]}, {}),
]


def ask(
    client: httpx.Client, path: str, body: dict[str, Any], headers: Mapping[str, str] | None = None
) -> int:
    """The status of the answer to one request."""
    url = f"{path}?q={SECRETS[2]}"
    return client.post(url, json=body, headers={**CREDENTIAL, **(headers or {})}).status_code


def list_failures(client: httpx.Client) -> list[tuple[str, str, int]]:
    """Target, cause and count of each row that the admin API lists; nothing where there is no such list."""
    reply = client.get(API_PATH)
    rows = reply.json().get("failures", []) if reply.status_code == httpx.codes.OK else []
    return [(row["target"], row["cause"], row["count"]) for row in rows]


def read_metrics(client: httpx.Client) -> dict[tuple[str, str], float]:
    """Upstream errors by target and cause, as /metrics counts them."""
    found = re.findall(
        r'^upstream_errors_total\{cause="([^"]*)",target="([^"]*)"\} (\S+)$',
        client.get("/metrics").text,
        re.MULTILINE,
    )
    return {(target, cause): float(count) for cause, target, count in found}


def read_page(client: httpx.Client, path: str = "/ui/failures") -> str:
    """The text of a page of the dashboard, by default of Failures."""
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", client.get(path).text)).split())


@contextmanager
def watch(proxy: Proxy, *options: str) -> Iterator[list[str]]:
    """The lines that `watch` prints of a proxy, from when it has begun to listen."""
    lines: list[str] = []
    command = [COMMAND, "watch", "--url", proxy.url, *options]
    environ = {"HOME": str(proxy.folder), "PATH": os.environ["PATH"], "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environ, cwd=proxy.folder
    ) as process:
        reading = threading.Thread(target=lambda: lines.extend(process.stdout or ()), daemon=True)
        reading.start()
        try:
            with proxy.client() as client:  # what comes is told once the stream is open

                def is_listening() -> bool:
                    client.post("/v1/chat/completions", json={**CHAT, "model": "http-500"})
                    return bool(lines)

                proxy.wait_for(is_listening, "watch prints")
            yield lines
        finally:
            process.kill()
            reading.join()


def find_lines(proxy: Proxy, target: str) -> list[dict[str, Any]]:
    """Lines of the log, of whatever event, that name an upstream's address and a cause."""
    return [line for line in proxy.log_lines() if target in str(line.get("target")) and line.get("cause")]


def test_a_dead_upstream_is_named_in_log_metrics_api_and_page(tmp_path: Path) -> None:
    target = f"http://127.0.0.1:{find_free_port()}"
    with run_proxy(tmp_path, f"{target}/v1") as proxy, proxy.client() as client:
        statuses = {ask(client, *way) for way in WAYS for _ in range(3)}
        page = read_page(client)
        texts = [proxy.log_path.read_text(), page, client.get("/metrics").text]

        assert statuses == {502}
        assert [line["cause"] for line in find_lines(proxy, target)] == ["connection-refused"]
        assert find_lines(proxy, target)[0]["level"] == "warning"
        count = 3 * len(WAYS)
        assert read_metrics(client) == {(target, "connection-refused"): count}
        assert list_failures(client) == [(target, "connection-refused", count)]
        [row] = client.get(API_PATH).json()["failures"]
        assert row["last_at"] > 1_700_000_000

        def read_sum() -> Any:
            return client.get("/admin/v1/stats").json()["total"]

        chats = 3 * sum(path != "/v1/embeddings" for path, *_ in WAYS)
        proxy.wait_for(lambda: read_sum()["requests"] == chats, "the sums have all requests of conversations")
        assert (read_sum()["failed"], read_sum()["unpriced"]) == (chats, 0)
        assert "Nothing has failed" not in page
        assert f"{target} connection refused" in page
        assert [secret for secret in SECRETS for text in texts if secret in text] == []


def test_a_conversation_that_never_got_an_answer_is_found_where_failures_link_to_it(tmp_path: Path) -> None:
    target = f"http://127.0.0.1:{find_free_port()}"
    with run_proxy(tmp_path, f"{target}/v1") as proxy, proxy.client() as client:
        for headers in ({}, {"x-session-id": "mine"}):
            reply = client.post("/v1/chat/completions", json=CHAT, headers=headers)
            found = f"/admin/v1/conversations/{reply.headers['x-compaction-session']}"

            def is_told(path: str = found) -> bool:
                totals = client.get(path).json().get("totals", {})
                return bool(totals.get("failure") == "connection-refused" and totals["failed"] == 1)

            proxy.wait_for(is_told, "the conversation is found")
        assert reply.status_code == 502
        assert "No token count is known" in read_page(client, "/ui")


@contextmanager
def answer_raw(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """The origin of a server that does with each connection what `answer` does, and closes it."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:  # the test is over
                    return
                with closing(connection):
                    answer(connection)

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)


def reset(connection: socket.socket) -> None:
    """Answer a request with a reset."""
    connection.recv(1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def hang_up(connection: socket.socket) -> None:
    """Answer a request with the end of the connection."""
    connection.recv(65_536)


def talk_nonsense(connection: socket.socket) -> None:
    """Answer a request with something that is not HTTP."""
    connection.recv(65_536)
    connection.sendall(b"220 mail.example ESMTP\r\n\r\n")


def stay_silent(connection: socket.socket) -> None:
    """Answer nothing until the other side gives up."""
    while connection.recv(65_536):
        pass


def begin_and_stop(connection: socket.socket) -> None:
    """Answer the beginning of a stream, and no more until the other side gives up."""
    connection.recv(65_536)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 100\r\n\r\n"
    connection.sendall(head + b"data: {}\n\n")
    stay_silent(connection)


def begin_and_hang_up(connection: socket.socket) -> None:
    """Answer the beginning of a stream."""
    connection.recv(65_536)
    connection.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n9\r\ndata: {}\n\r\n")


@pytest.mark.parametrize(
    ("answer", "cause", "status"),
    [
        (reset, "connection-reset", 502),
        (hang_up, "invalid-answer", 502),
        (talk_nonsense, "invalid-answer", 502),
        (stay_silent, "answer-timeout", 504),
        (begin_and_stop, "answer-stalled", 200),
        (begin_and_hang_up, "answer-cut", 200),
    ],
)
def test_each_way_to_fail_has_a_cause_of_its_own(
    tmp_path: Path, answer: Callable[[socket.socket], None], cause: str, status: int
) -> None:
    with (
        answer_raw(answer) as target,
        run_proxy(tmp_path, f"{target}/v1", {"upstream": {"timeout_s": 1}}) as proxy,
        proxy.client() as client,
    ):
        for path, body in (("/v1/chat/completions", {**CHAT, "stream": True}), ("/v1/embeddings", {})):
            with client.stream("POST", path, json=body) as reply:
                assert reply.status_code == status
                if status == httpx.codes.OK:
                    with pytest.raises(httpx.RemoteProtocolError):  # a cut stream stays cut
                        reply.read()

        assert [line["cause"] for line in find_lines(proxy, target)] == [cause]
        assert list_failures(client) == [(target, cause, 2)]
        assert read_metrics(client) == {(target, cause): 2}


def test_a_provider_that_speaks_no_tls_is_named(tmp_path: Path, provider: Provider) -> None:
    origin = provider.url.removesuffix("/v1").replace("http:", "https:")
    with run_proxy(tmp_path, origin) as proxy, proxy.client() as client:
        assert ask(client, "/v1/chat/completions", CHAT) == 502
        assert list_failures(client) == [(origin, "tls-failed", 1)]


def test_a_name_that_cannot_be_resolved_is_named(tmp_path: Path) -> None:
    target = "http://nobody.invalid:80"
    with run_proxy(tmp_path, "http://nobody.invalid/v1") as proxy, proxy.client() as client:
        assert ask(client, "/v1/chat/completions", CHAT) == 502
        assert list_failures(client) == [(target, "name-not-resolved", 1)]


@pytest.mark.parametrize("status", [401, 402, 403, 429, 500, 503, 529])
def test_an_error_status_of_the_provider_is_shown_and_relayed(
    tmp_path: Path, provider: Provider, status: int
) -> None:
    body = b'{"error": {"message": "in the words of the provider"}}'
    provider.answer = lambda _: Reply(status, body)
    target = provider.url.removesuffix("/v1")
    with run_proxy(tmp_path, provider.url) as proxy, proxy.client() as client:
        for path, content, headers in WAYS:
            reply = client.post(path, json=content, headers=headers)
            assert (reply.status_code, reply.content) == (status, body)
        cause = f"http-{status}"

        assert [line["cause"] for line in find_lines(proxy, target)] == [cause]
        assert list_failures(client) == [(target, cause, len(WAYS))]
        assert read_metrics(client) == {(target, cause): len(WAYS)}
        assert f"{target} upstream answered {status}" in read_page(client)
        assert "in the words" not in proxy.log_path.read_text()


QUOTA = b'{"error": {"message": "words of the provider", "type": "billing", "code": "insufficient_quota"}}'


def test_the_code_of_the_error_the_model_and_the_conversation_are_shown(
    tmp_path: Path, provider: Provider
) -> None:
    provider.answer = lambda request: Reply(429, QUOTA) if request.json()["model"] == "big" else Reply(500)
    target, told = provider.url.removesuffix("/v1"), "2 of 2 requests failed: 429 insufficient_quota"
    with (
        run_proxy(tmp_path, provider.url) as proxy,
        proxy.client(headers={"x-session-id": "ticket-1"}) as client,
        watch(proxy, "--failures") as lines,
    ):
        for way in (CHAT, {**CHAT, "stream": True}):
            reply = client.post("/v1/chat/completions", json={**way, "model": "big"})
            assert (reply.status_code, reply.content) == (429, QUOTA)

        def find_conversation() -> str:
            rows = client.get("/admin/v1/conversations", params={"model": "big"}).json()["conversations"]
            [row] = rows if rows and rows[0]["failed"] == 2 else [{"id": ""}]
            return str(row["id"])

        conversation = proxy.wait_for(find_conversation, "the figures are written")
        [row] = [each for each in client.get(API_PATH).json()["failures"] if each["cause"] == "http-429"]
        assert (row["target"], row["cause"], row["count"]) == (target, "http-429", 2)
        assert (row["errors"], row["models"]) == (["insufficient_quota"], ["big"])
        assert row["conversation"] == conversation
        link = f'href="/ui/conversations/{conversation}"'
        for path in ("/ui", "/ui/failures"):
            assert link in client.get(path).text
            assert "http-429: insufficient_quota 2 " in read_page(client, path)
            assert f"big {conversation[:10]}…" in read_page(client, path)
        page = read_page(client, f"/ui/conversations/{conversation}")
        assert f"{told}." in page
        assert "has not reported token counts" not in page
        assert told in read_page(client, "/ui/conversations")
        exchanges = client.get(f"/admin/v1/conversations/{conversation}/exchanges").json()["exchanges"]
        assert {each["error"] for each in exchanges} == {"insufficient_quota"}
        for command in ("show", "list"):
            options = ["--search", "big"] if command == "list" else [conversation]
            assert told in proxy.run_command("none", "sessions", command, *options).stdout
        done = proxy.run_command("none", "sessions", "exchanges", conversation)
        assert done.stdout.count("429 insufficient_quota") == 2
        [line] = [each for each in find_lines(proxy, target) if each["cause"] == "http-429"]
        assert line["error"] == "insufficient_quota"
        text = f"upstream    failed       {target}  upstream answered 429 (http-429): insufficient_quota"
        proxy.wait_for(lambda: any(text in each for each in list(lines)), "the line is printed")
        proxy.wait_for(lambda: any("error insufficient_quota" in each for each in list(lines)), "an exchange")
        assert "words of the provider" not in proxy.log_path.read_text()
        assert "insufficient_quota" not in client.get("/metrics").text


@pytest.mark.parametrize("status", [400, 404, 413, 422])
def test_an_error_of_the_client_is_counted_and_is_no_failure(
    tmp_path: Path, provider: Provider, status: int
) -> None:
    provider.answer = lambda _: Reply(status, b'{"error": {"message": "no"}}')
    target = provider.url.removesuffix("/v1")
    with run_proxy(tmp_path, provider.url) as proxy, proxy.client() as client:
        assert {ask(client, path, {}) for path in ("/v1/chat/completions", "/v1/embeddings")} == {status}

        assert read_metrics(client) == {(target, f"http-{status}"): 2}
        assert list_failures(client) == []
        assert find_lines(proxy, target) == []


def test_one_line_says_that_it_fails_and_one_that_it_answers_again(tmp_path: Path) -> None:
    port = find_free_port()
    target = f"http://127.0.0.1:{port}"
    with run_proxy(tmp_path, f"{target}/v1") as proxy, proxy.client() as client:
        assert {ask(client, "/v1/chat/completions", CHAT) for _ in range(20)} == {502}
        provider = Provider(port=port)
        try:
            assert {ask(client, "/v1/chat/completions", CHAT) for _ in range(3)} == {200}
        finally:
            provider.close()
        lines = [line for line in proxy.log_lines() if line.get("target") == target]

    assert [line["event"] for line in lines] == ["upstream.failed", "upstream.recovered"]
    assert lines[1]["failures"] == 20


def test_failures_survive_a_restart(tmp_path: Path) -> None:
    target = f"http://127.0.0.1:{find_free_port()}"
    config = {"store": {"url": f"sqlite:///{tmp_path}/state.db"}}
    with run_proxy(tmp_path, f"{target}/v1", config) as proxy:
        with proxy.client() as client:
            assert {ask(client, "/v1/chat/completions", CHAT) for _ in range(3)} == {502}
        proxy.process.send_signal(signal.SIGTERM)
        proxy.process.wait(timeout=60)
    with run_proxy(tmp_path, f"{target}/v1", config) as proxy, proxy.client() as client:
        assert list_failures(client) == [(target, "connection-refused", 3)]
        assert f"{target} connection refused" in read_page(client)


def test_every_worker_shows_the_failures_of_all(tmp_path: Path) -> None:
    target = f"http://127.0.0.1:{find_free_port()}"
    config = {"store": {"url": f"sqlite:///{tmp_path}/state.db"}, "server": {"workers": 2}}
    with run_proxy(tmp_path, f"{target}/v1", config) as proxy:
        for _ in range(20):
            with proxy.client() as client:  # a connection of its own, which either worker may take
                assert ask(client, "/v1/chat/completions", CHAT) == 502

        def are_shown() -> bool:
            seen = []
            for _ in range(4):
                with proxy.client() as client:
                    seen += [list_failures(client) == [(target, "connection-refused", 20)]]
            return all(seen)

        proxy.wait_for(are_shown, "all failures in every answer")
        with proxy.client() as client:
            assert sum(read_metrics(client).values()) == 20


def test_without_a_store_the_page_shows_what_the_process_knows(tmp_path: Path) -> None:
    target = f"http://127.0.0.1:{find_free_port()}"
    config = {"store": {"url": f"redis://127.0.0.1:{find_free_port()}/0"}}
    with run_proxy(tmp_path, f"{target}/v1", config) as proxy, proxy.client() as client:
        assert {ask(client, "/v1/chat/completions", CHAT) for _ in range(3)} == {502}

        assert list_failures(client) == [(target, "connection-refused", 3)]
        assert client.get(API_PATH).json()["complete"] is False
        page = client.get("/ui/failures")
        assert page.status_code == 200
        assert f"{target} connection refused" in read_page(client)


def test_a_request_that_is_too_long_for_the_provider_and_then_shorter_is_no_failure(
    tmp_path: Path, provider: Provider
) -> None:
    error = {"message": "maximum context length is 1000 tokens", "code": "context_length_exceeded"}

    def refuse_long(request: Received) -> Reply:
        if len(request.body) > 10_000:
            return Reply(400, json.dumps({"error": error}).encode())
        return chat_reply(request)

    provider.answer = refuse_long
    turns = [
        {"role": role, "content": f"{number} {'word ' * 200}"}
        for number in range(20)
        for role in ("user", "assistant")
    ]
    body = {"model": "m", "messages": [*turns, *MESSAGES]}
    with run_proxy(tmp_path, provider.url) as proxy, proxy.client() as client:
        ask(client, "/v1/chat/completions", body)

        assert list_failures(client) == []
        assert read_metrics(client).get((provider.url.removesuffix("/v1"), "http-400"), 0) >= 1


KINDS = {"http-429": 3, "http-503": 2, "answer-cut": 4, "answer-timeout": 1}


def fail_by_model(request: Received) -> Reply:
    """The failure that the name of the model asks for."""
    model = request.json()["model"]
    if model.startswith("http-"):
        return Reply(int(model.removeprefix("http-")), b'{"error": {"message": "no"}}')
    if model == "answer-timeout":
        time.sleep(3)  # longer than the proxy waits
    return Reply(body=b'{"id": "', cut=True) if model == "answer-cut" else chat_reply(request)


def fail_in_every_way(client: httpx.Client) -> None:
    """As many failures of each kind as `KINDS` says, and as many requests that succeed."""
    for cause, count in KINDS.items():
        for model in (cause, "m") * count:
            with contextlib.suppress(httpx.RemoteProtocolError):  # a cut answer stays cut
                client.post("/v1/chat/completions", json={**CHAT, "model": model})


@pytest.fixture
def failing(tmp_path: Path, provider: Provider) -> Iterator[Proxy]:
    """A proxy before a provider that fails as the model's name says."""
    provider.answer = fail_by_model
    with run_proxy(tmp_path, provider.url, {"upstream": {"timeout_s": 1}}) as proxy:
        yield proxy


def test_overview_and_failures_list_each_target_and_cause_with_the_same_count(
    failing: Proxy, provider: Provider
) -> None:
    target = provider.url.removesuffix("/v1")
    with failing.client() as client:
        fail_in_every_way(client)
        overview, failures = read_page(client, "/ui"), read_page(client)

    rows = {"http-429": "upstream answered 429", "http-503": "upstream answered 503"}
    rows |= {"answer-cut": "answer cut off", "answer-timeout": "no answer in time"}
    for cause, count in KINDS.items():
        row = f"{target} {rows[cause]} {cause} {count} "
        assert row in overview
        assert row in failures
    assert (
        f"Upstream failures {sum(KINDS.values())} requests to the provider failed in the last 24 hours"
        in overview
    )


def test_an_overview_without_other_requests_names_the_provider_that_is_down(tmp_path: Path) -> None:
    target = f"http://127.0.0.1:{find_free_port()}"
    with run_proxy(tmp_path, f"{target}/v1") as proxy, proxy.client() as client:
        assert "Upstream failures" not in read_page(client, "/ui")
        ask(client, "/v1/embeddings", {})  # is only relayed, and no request of a conversation
        overview = read_page(client, "/ui")
    assert f"{target} connection refused connection-refused 1 " in overview
    assert "1 request to the provider failed" in overview
    assert "No request in the last 24 hours" in overview


def test_watch_says_which_provider_fails_and_why_and_how_often(failing: Proxy, provider: Provider) -> None:
    target = provider.url.removesuffix("/v1")
    with watch(failing, "--json", "--failures") as lines, failing.client() as client:
        provider_told: Counter[str] = Counter()

        def count_causes() -> Counter[str]:
            provider_told.clear()
            for told in map(json.loads, list(lines)):
                if told["event"] == "upstream" and told["data"]["target"] == target:
                    provider_told[told["data"]["cause"]] += told["data"]["count"]
            del provider_told["http-500"]  # what `watch` has asked
            return provider_told

        fail_in_every_way(client)
        failing.wait_for(lambda: count_causes() >= Counter(KINDS), "all failures are told")
        assert provider_told == Counter(KINDS)
    with watch(failing) as texts, failing.client() as client:
        fail_in_every_way(client)
        line = f"upstream    failed       {target}  upstream answered 429 (http-429)"
        failing.wait_for(lambda: any(line in text for text in list(texts)), "the line is printed")


def test_doctor_says_first_that_the_proxy_which_runs_forwards_elsewhere(
    tmp_path: Path, provider: Provider
) -> None:
    """Without the options of `serve`, `doctor` checks an upstream that the running proxy never asks."""
    wrong = f"http://127.0.0.1:{find_free_port()}/v1"
    with run_proxy(tmp_path, provider.url) as proxy:
        options = ["--config", str(proxy.folder / "config.json"), "--upstream"]
        environ = {"COMPACTION_PROXY__SERVER__PORT": proxy.url.rpartition(":")[2]}

        def diagnose(upstream: str) -> list[str]:
            done = run_command(proxy.folder, "doctor", *options, upstream, environ=environ)
            return [" ".join(line.split()) for line in done.stdout.splitlines()]

        lines = diagnose(wrong)
        after_address = next(place for place, line in enumerate(lines, 1) if line.startswith("ok address"))
        line = lines[after_address]
        what = f"the running proxy forwards to {provider.url}, but the checks below use {wrong}; fix: "
        assert line.startswith(f"warning upstream {what}run doctor with the options")
        assert line.endswith(f" --upstream {provider.url}")
        assert not any("forwards to" in line for line in diagnose(provider.url))
