"""`max_tokens` is lowered where the upstream refuses its sum with the prompt, and the client is told."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.system.black_box import Provider, Received, Reply, run_proxy
from tests.system.test_output_reserve import LARGE_FIXED, WIRES, Wire, prose, result_text, texts

STEPS = 20
HEADER = "x-compaction-max-tokens"


def answer(request: Received) -> Reply:
    if request.method == "GET":  # the proxy asks which window the model has
        return Reply(404)
    return WIRES["messages" if request.path.endswith("/messages") else "chat"].answer(request)


def requests(provider: Provider) -> list[Received]:
    return [each for each in provider.received if each.method == "POST"]


@pytest.mark.parametrize("window", [40_000, None], ids=["told", "not-told"])
@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
def test_an_upstream_that_adds_them_refuses_once(wire: Wire, window: int | None, tmp_path: Path) -> None:
    provider = Provider(answer)
    config: dict[str, Any] = {"summary": {"model": "none"}}
    if window:
        config["models"] = {"*": {"window": window}}
    task = prose(400, "task")
    messages: list[Any] = [{"role": "user", "content": task}]
    try:
        with run_proxy(tmp_path, provider.url, config) as proxy, proxy.client() as client:
            for step in range(STEPS):
                messages += wire.unit(step)
                body = wire.request("sum-40k", 32_000, LARGE_FIXED, messages)
                reply = client.post(wire.path, json=body)
                assert reply.status_code == 200, reply.text
                sent = requests(provider)[-1].json()
                assert 1_024 <= sent["max_tokens"] < 32_000
                assert reply.headers[HEADER] == str(sent["max_tokens"])
                seen = texts(sent)
                assert task in seen
                assert result_text(step) in seen
    finally:
        provider.close()
    assert [answer(each).status for each in requests(provider)] == [400] + [200] * STEPS


def test_false_forwards_the_refusal_and_changes_nothing(tmp_path: Path) -> None:
    wire, provider = WIRES["chat"], Provider(answer)
    config = {"upstream": {"lower_max_tokens": False}, "models": {"*": {"window": 40_000}}}
    messages = [{"role": "user", "content": "Read the first file."}, *wire.unit(0)]
    body = wire.request("sum-40k", 32_000, LARGE_FIXED, messages)
    try:
        with run_proxy(tmp_path, provider.url, config) as proxy, proxy.client() as client:
            reply = client.post(wire.path, json=body)
    finally:
        provider.close()
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "context_length_exceeded"
    assert HEADER not in reply.headers
    assert {each.json()["max_tokens"] for each in requests(provider)} == {32_000}


def test_a_refusal_of_the_prompt_that_names_a_limit_only_is_not_taken_for_one_of_the_sum(
    tmp_path: Path,
) -> None:
    window, wire = 40_000, WIRES["chat"]

    def refuse_long_prompts(request: Received) -> Reply:
        if request.method == "GET" or len(request.body) // 3 <= window:  # more tokens than we estimate
            return answer(request)
        words = f"This model's maximum context length is {window} tokens. "
        words += "Please reduce the length of the messages."
        error = {"message": words, "type": "invalid_request_error", "code": "context_length_exceeded"}
        return Reply(400, json.dumps({"error": error}).encode())

    provider = Provider(refuse_long_prompts)
    messages = [{"role": "user", "content": "Read it."}, *wire.unit(0, prose(26_500, "file"))]
    body = wire.request("m-100k", 16_000, 100, messages)
    try:
        with (
            run_proxy(tmp_path, provider.url, {"summary": {"model": "none"}}) as proxy,
            proxy.client() as client,
        ):
            replies = [client.post(wire.path, json=body) for _ in range(2)]
    finally:
        provider.close()
    assert [each.status_code for each in replies] == [200, 200]
    assert {each.json()["max_tokens"] for each in requests(provider)} == {16_000}


def test_thinking_keeps_the_output_that_it_needs(tmp_path: Path) -> None:
    wire, provider = WIRES["messages"], Provider(answer)
    messages = [{"role": "user", "content": "Read the first file."}, *wire.unit(0)]
    body = wire.request("sum-40k", 32_000, LARGE_FIXED, messages)
    body["thinking"] = {"type": "enabled", "budget_tokens": 30_000}
    try:
        with run_proxy(tmp_path, provider.url) as proxy, proxy.client() as client:
            reply = client.post(wire.path, json=body)
    finally:
        provider.close()
    assert reply.status_code == 400
    assert {each.json()["max_tokens"] for each in requests(provider)} == {32_000}


def test_an_upstream_that_counts_the_prompt_alone_gets_the_clients_bytes(tmp_path: Path) -> None:
    wire, provider = WIRES["chat"], Provider(answer)
    messages = [{"role": "user", "content": "Read the first file."}, *wire.unit(0)]
    body = wire.request("m-40k", 32_000, LARGE_FIXED, messages)
    try:
        with run_proxy(tmp_path, provider.url) as proxy, proxy.client() as client:
            reply = client.post(wire.path, json=body)
    finally:
        provider.close()
    assert (reply.status_code, HEADER in reply.headers) == (200, False)
    assert [each.json() for each in requests(provider)] == [body]
