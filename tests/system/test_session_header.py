"""Every answer to a conversation names it: `x-compaction-session`, also where the request was not read."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.free_ports import find_free_port
from tests.system.black_box import Provider, Proxy, Received, Reply, chat_reply, run_proxy

ADMIN_KEY = "secret-key-for-tests"
SESSION = "x-compaction-session"
CREDENTIAL = {"authorization": "Bearer sk-one"}
NAMED = {**CREDENTIAL, "x-session-id": "ticket-4711"}
TURN = [{"role": "user", "content": "Which port does the proxy use?"}]
READ = {"x-compaction": "force"}  # has even a small request read
PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
STREAM = Reply(
    headers={"content-type": "text/event-stream"}, chunks=(b'data: {"n": 1}\n\n', b"data: [DONE]\n\n")
)


def write_body(wire: str, messages: list[dict[str, str]] = TURN, **members: Any) -> dict[str, Any]:
    name = "input" if wire == "responses" else "messages"
    return {"model": "m", name: messages, "max_tokens": 100, **members}


def answer(request: Received) -> Reply:
    return STREAM if b'"stream"' in request.body else chat_reply(request)


@pytest.fixture
def provider() -> Iterator[Provider]:
    made = Provider(answer)
    yield made
    made.close()


@pytest.fixture
def proxy(tmp_path: Path, provider: Provider) -> Iterator[Proxy]:
    with run_proxy(tmp_path, provider.url, {"server": {"admin_key": ADMIN_KEY}}) as running:
        yield running


def ask(proxy: Proxy, wire: str, body: dict[str, Any], headers: dict[str, str]) -> tuple[int, str | None]:
    """Status of the answer, and the conversation that it names."""
    with proxy.client() as client:
        found = client.post(PATHS[wire], json=body, headers=headers)
    return found.status_code, found.headers.get(SESSION)


def list_ids(proxy: Proxy) -> set[str]:
    with proxy.client(headers={"authorization": f"Bearer {ADMIN_KEY}"}) as client:
        rows = client.get("/admin/v1/conversations").json()["conversations"]
    return {row["id"] for row in rows}


@pytest.mark.parametrize("wire", PATHS)
@pytest.mark.parametrize("members", [{}, {"stream": True}], ids=["whole", "streamed"])
@pytest.mark.parametrize("headers", [NAMED, CREDENTIAL], ids=["named", "unnamed"])
def test_a_small_request_that_is_not_read_gets_the_id_under_which_it_is_listed(
    proxy: Proxy, wire: str, members: dict[str, Any], headers: dict[str, str]
) -> None:
    status, session = ask(proxy, wire, write_body(wire, **members), headers)
    assert status == 200
    assert session is not None
    assert proxy.wait_for(lambda: list_ids(proxy), "the conversation is listed") == {session}


def test_an_id_in_the_body_is_as_good_as_one_in_a_header(proxy: Proxy) -> None:
    body = write_body("chat", metadata={"session_id": "s-1"})
    first, second = (ask(proxy, "chat", body, CREDENTIAL)[1] for _ in range(2))
    assert first is not None
    assert second == first


@pytest.mark.parametrize("headers", [NAMED, CREDENTIAL], ids=["named", "unnamed"])
def test_the_id_is_the_same_whether_a_request_is_read_or_not(proxy: Proxy, headers: dict[str, str]) -> None:
    later = [*TURN, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "And which host?"}]
    unread = ask(proxy, "chat", write_body("chat"), headers)[1]
    again = ask(proxy, "chat", write_body("chat", later), headers)[1]
    read = ask(proxy, "chat", write_body("chat", later), {**headers, **READ})[1]
    assert unread is not None
    assert (again, read) == (unread, unread)


@pytest.mark.parametrize("headers", [NAMED, CREDENTIAL], ids=["named", "unnamed"])
def test_an_error_of_the_provider_names_the_conversation(
    proxy: Proxy, provider: Provider, headers: dict[str, str]
) -> None:
    good = ask(proxy, "chat", write_body("chat"), headers)
    provider.answer = lambda _: Reply(429, json.dumps({"error": {"message": "slow down"}}).encode())
    refused = ask(proxy, "chat", write_body("chat"), headers)
    assert good[1] is not None
    assert refused == (429, good[1])


@pytest.mark.parametrize("headers", [NAMED, CREDENTIAL], ids=["named", "unnamed"])
def test_an_answer_of_the_proxy_itself_names_the_conversation(
    tmp_path: Path, headers: dict[str, str]
) -> None:
    with run_proxy(tmp_path, f"http://127.0.0.1:{find_free_port()}/v1") as proxy:
        first, second = (ask(proxy, "chat", write_body("chat"), headers) for _ in range(2))
    assert first[0] == 502
    assert first[1] is not None
    assert second == first


def test_a_request_for_a_title_is_part_of_no_conversation(proxy: Proxy) -> None:
    title = [{"role": "user", "content": "Write a short title for this conversation."}]
    assert ask(proxy, "chat", write_body("chat", title), NAMED) == (200, None)
