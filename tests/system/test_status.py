"""The status tells the truth: `applied` and `reused` only where something is replaced.

Everywhere else the upstream gets the client's own bytes.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.black_box import Provider, Proxy, Received, Reply, chat_reply, run_proxy

CLEARED = "[cleared]"
RESULT_WORDS = 500
STEPS = 8
CONFIG = {"compaction": {"trigger": [{"tokens": 2_500}], "background": False}, "summary": {"model": "none"}}


class Wire:
    """Requests of one wire: a tool loop over one task."""

    def __init__(self, name: str, path: str) -> None:
        self.name = name
        self.path = path

    def unit(self, step: int, result: str) -> list[Any]:
        """A tool call and its result."""
        call = f"call_{step}"
        arguments = {"path": f"src/m{step}.py"}
        if self.name == "chat":
            function = {"name": "read", "arguments": json.dumps(arguments)}
            calls = [{"id": call, "type": "function", "function": function}]
            return [
                {"role": "assistant", "content": None, "tool_calls": calls},
                {"role": "tool", "tool_call_id": call, "content": result},
            ]
        if self.name == "messages":
            use = {"type": "tool_use", "id": call, "name": "read", "input": arguments}
            answer = {"type": "tool_result", "tool_use_id": call, "content": result}
            return [{"role": "assistant", "content": [use]}, {"role": "user", "content": [answer]}]
        asked = {"type": "function_call", "call_id": call, "name": "read", "arguments": json.dumps(arguments)}
        return [asked, {"type": "function_call_output", "call_id": call, "output": result}]

    def body(self, results: list[str]) -> bytes:
        """A request, written as no other program would write it."""
        listed: list[Any] = [{"role": "user", "content": "Find the error in these files."}]
        for step, result in enumerate(results):
            listed += self.unit(step, result)
        key = "input" if self.name == "responses" else "messages"
        made: dict[str, Any] = {"model": "m", "max_tokens": 500, key: listed}
        if self.name == "responses":
            made = {"model": "m", "store": False, key: listed}
        return json.dumps(made, indent=3).encode()


WIRES = {
    "chat": Wire("chat", "/v1/chat/completions"),
    "messages": Wire("messages", "/v1/messages"),
    "responses": Wire("responses", "/v1/responses"),
}


def answer(request: Received) -> Reply:
    used = {"input_tokens": len(request.body) // 4, "output_tokens": 1}
    if request.path.endswith("/messages"):
        body: dict[str, Any] = {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "model": "m",
            "usage": used,
        }
        body |= {"content": [{"type": "text", "text": "ok"}], "stop_reason": "end_turn"}
        return Reply(body=json.dumps(body).encode())
    if request.path.endswith("/responses"):
        body = {"id": "r1", "object": "response", "status": "completed", "model": "m", "output": []}
        return Reply(body=json.dumps({**body, "usage": used}).encode())
    return chat_reply(request)


@pytest.fixture
def provider() -> Iterator[Provider]:
    made = Provider(answer)
    yield made
    made.close()


@pytest.fixture
def proxy(tmp_path: Path, provider: Provider) -> Iterator[Proxy]:
    with run_proxy(tmp_path, provider.url, CONFIG) as running:
        yield running


def result_text(step: int) -> str:
    return f"File {step}. " + "one word and another " * (RESULT_WORDS // 4)


def send(proxy: Proxy, provider: Provider, wire: Wire, body: bytes) -> tuple[str, bytes]:
    """Sends a request; returns its status, and what the upstream got in its place."""
    headers = {"content-type": "application/json", "x-session-id": "s1"}
    provider.received.clear()
    with proxy.client() as client:
        found = client.post(wire.path, content=body, headers=headers)
    assert found.status_code == 200, found.text
    posted = [each for each in provider.received if each.method == "POST"]
    [received] = [each for each in posted if each.json()["model"] == "m"]
    return found.headers["x-compaction-status"], received.body


@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
def test_where_the_client_has_cleared_what_was_masked_its_own_bytes_go_on(
    proxy: Proxy, provider: Provider, wire: Wire
) -> None:
    results = [result_text(step) for step in range(STEPS)]
    status, forwarded = send(proxy, provider, wire, wire.body(results))
    assert status == "applied"
    kept = [result in forwarded.decode() for result in results]
    assert not all(kept)
    cleared = [result if stays else CLEARED for result, stays in zip(results, kept, strict=True)]
    body = wire.body(cleared)
    status, forwarded = send(proxy, provider, wire, body)
    assert (status, forwarded == body) == ("none", True)


@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
def test_each_status_says_whether_the_clients_bytes_went_on(
    proxy: Proxy, provider: Provider, wire: Wire
) -> None:
    results: list[str] = []
    seen: dict[str, set[bool]] = {}
    for step in range(3 * STEPS):
        results.append(result_text(step))
        if step % 5 == 4:  # clients clear old results now and then
            results[: step - 3] = [CLEARED] * (step - 3)
        body = wire.body(results)
        status, forwarded = send(proxy, provider, wire, body)
        seen.setdefault(status, set()).add(forwarded == body)
    assert "applied" in seen
    for status, own in seen.items():
        assert own == {status not in {"applied", "reused"}}, status
