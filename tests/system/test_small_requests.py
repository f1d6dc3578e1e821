"""A request below the gate is told apart wherever requests are shown: not inspected, with its size."""

import json
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from tests.system.black_box import Provider, Proxy, Received, Reply, chat_reply, run_proxy

MESSAGES = [{"role": "user", "content": "Which port?"}]
WIRES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"model": "m", "messages": MESSAGES}),
    "responses": ("/v1/responses", {"model": "m", "input": "Which port?"}),
    "messages": ("/v1/messages", {"model": "m", "messages": MESSAGES}),
}
SESSION = {"x-session-id": "s1", "content-type": "application/json"}


@pytest.fixture
def proxy(tmp_path: Path, provider: Provider) -> Iterator[Proxy]:
    with run_proxy(tmp_path, provider.url) as running:
        yield running


def read_text(proxy: Proxy, path: str) -> str:
    """The text of a page."""
    with proxy.client() as client:
        return " ".join(unescape(re.sub(r"<[^>]+>", " ", client.get(path).text)).split())


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("stream", [False, True])
def test_the_answer_to_a_small_request_says_why_nothing_was_done(
    proxy: Proxy, wire: str, *, stream: bool
) -> None:
    path, body = WIRES[wire]
    with proxy.client() as client:
        answer = client.post(path, json={**body, **({"stream": True} if stream else {})})
    ours = {name: value for name, value in answer.headers.items() if name.startswith("x-compaction")}
    assert ours.pop("x-compaction-session").startswith("c_")
    assert ours == {"x-compaction-status": "none", "x-compaction-reason": "small"}


def test_an_error_of_the_upstream_keeps_the_reason_and_an_inspected_request_has_another(
    proxy: Proxy, provider: Provider
) -> None:
    path, body = WIRES["chat"]
    provider.answer = lambda _: Reply(503, b"{}")
    with proxy.client() as client:
        assert client.post(path, json=body).headers["x-compaction-reason"] == "small"
        read = client.post(path, json=body, headers={"x-compaction": "shadow"})
    assert read.headers.get("x-compaction-reason") != "small"
    assert read.headers["x-compaction-tokens-before"]


def test_pages_and_api_say_that_a_small_request_was_not_inspected_and_how_large_it_was(proxy: Proxy) -> None:
    path, body = WIRES["chat"]
    raw = json.dumps(body).encode()
    with proxy.client() as client:
        assert client.post(path, content=raw, headers=SESSION).status_code == 200

        def list_conversations() -> Any:
            return client.get("/admin/v1/conversations").json()["conversations"]

        [row] = proxy.wait_for(list_conversations, "the conversation is listed")
        name = row["id"]
        proxy.wait_for(lambda: list_conversations()[0]["requests"] == 1, "the request is counted")
        [exchange] = client.get(f"/admin/v1/conversations/{name}/exchanges").json()["exchanges"]
    shown = f"not inspected (small), {len(raw)} bytes"
    assert (exchange["status"], exchange["reason"], exchange["request_bytes"]) == ("none", "small", len(raw))
    page = read_text(proxy, f"/ui/conversations/{name}")
    assert re.search(rf"The last request: {re.escape(shown)}; up to [\d,]+ need no compaction\.", page)
    assert re.search(r"Context now \d+ \d+ tokens, counted by the provider\.", page)
    assert re.search(r"Compacts at [\d,]+ tokens\.", page)
    assert f"{shown} " in page  # its row in the table of requests
    assert "n/a" not in page
    assert f"not inspected, {len(raw)} bytes in 1 request" in read_text(proxy, "/ui/conversations")


def test_a_request_that_is_sent_again_shorter_is_not_called_small(tmp_path: Path, provider: Provider) -> None:
    error = {"message": "maximum context length is 1000 tokens", "code": "context_length_exceeded"}

    def refuse_long(request: Received) -> Reply:
        if len(request.body) > 10_000:
            return Reply(400, json.dumps({"error": error}).encode())
        return chat_reply(request)

    provider.answer = refuse_long
    turns = [{"role": role, "content": "word " * 200} for _ in range(20) for role in ("user", "assistant")]
    with run_proxy(tmp_path, provider.url) as proxy, proxy.client() as client:
        body = {"model": "m", "messages": [*turns, *MESSAGES]}
        answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert answer.headers["x-compaction-status"] == "applied"
    assert answer.headers.get("x-compaction-reason") != "small"


def test_a_small_side_call_of_no_conversation_is_in_the_sums(proxy: Proxy) -> None:
    path, body = WIRES["chat"]
    raw = json.dumps(body).encode()
    side = {"x-claude-code-request-class": "auxiliary", "content-type": "application/json"}
    with proxy.client() as client:
        answer = client.post(path, content=raw, headers=side)
        assert "x-compaction-session" not in answer.headers

        def get_total() -> Any:
            total = client.get("/admin/v1/stats").json()["total"]
            return total["requests"] == 1 and total

        total = proxy.wait_for(get_total, "the request is counted")
    read = len(raw) // 4
    assert (total["tokens_before"], total["tokens_after"], total["prompt_tokens"]) == (read, read, read)
