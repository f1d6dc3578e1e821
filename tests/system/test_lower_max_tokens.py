"""`max_tokens` is lowered where the upstream refuses its sum with the prompt, and the client is told."""

import json
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.redis_servers import RedisServer
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


@pytest.mark.parametrize("path", [("thinking", "budget_tokens"), ("reasoning", "max_tokens")], ids=".".join)
@pytest.mark.parametrize(("asked", "thinking"), [(64_000, 63_999), (64_000, 32_000), (40_000, 30_000)])
@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
def test_the_budget_of_thinking_falls_with_max_tokens(
    wire: Wire, asked: int, thinking: int, path: tuple[str, str], tmp_path: Path
) -> None:
    member, key = path
    if (wire.name, member) == ("messages", "reasoning"):
        pytest.skip("no member of this wire")
    provider = Provider(answer)
    messages: list[Any] = [{"role": "user", "content": "Read the files."}]
    try:
        with run_proxy(tmp_path, provider.url) as proxy, proxy.client() as client:
            for step in range(4):
                messages += wire.unit(step)
                body = wire.request("sum-40k", asked, 1_000, messages)
                body[member] = {"type": "enabled", key: thinking, "kept": [key, thinking]}
                reply = client.post(wire.path, json=body)
                assert reply.status_code == 200, reply.text
                sent = requests(provider)[-1].json()
                lowered = sent["max_tokens"]
                assert reply.headers[HEADER] == str(lowered)
                assert 1_024 <= sent[member][key] <= min(thinking, lowered - 1_024)
                assert sent == {
                    **body,
                    "max_tokens": lowered,
                    member: {**body[member], key: sent[member][key]},
                }
    finally:
        provider.close()
    assert [answer(each).status for each in requests(provider)] == [400] + [200] * 4


@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
def test_thinking_is_lowered_to_the_least_where_little_output_fits(wire: Wire, tmp_path: Path) -> None:
    provider = Provider(answer)
    fixed = 40_000 - 1_500  # tokens at four bytes each
    body = wire.request("sum-40k", 32_000, 100, [{"role": "user", "content": ""}])
    body["thinking"] = {"type": "enabled", "budget_tokens": 30_000}
    body["messages"][-1]["content"] = prose(fixed, "task")[: 4 * fixed - len(json.dumps(body))]
    try:
        with (
            run_proxy(tmp_path, provider.url, {"summary": {"model": "none"}}) as proxy,
            proxy.client() as client,
        ):
            reply = client.post(wire.path, json=body)
    finally:
        provider.close()
    sent = requests(provider)[-1].json()
    assert (reply.status_code, reply.headers.get(HEADER)) == (200, str(sent["max_tokens"]))
    assert sent["thinking"]["budget_tokens"] == 1_024 < sent["max_tokens"] <= 1_500
    assert sent["messages"] == body["messages"]


@pytest.mark.parametrize("headers", [{}, {"x-session-id": "s-1"}], ids=["no-session", "session"])
@pytest.mark.parametrize("window", [24_000, 40_000])
@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
def test_max_tokens_as_large_as_the_window_is_refused_once(
    wire: Wire, window: int, headers: dict[str, str], tmp_path: Path
) -> None:
    provider = Provider(answer)
    model = f"sum-{window // 1_000}k"
    short = [{"role": "user", "content": "Give this session a title."}]
    messages: list[Any] = [{"role": "user", "content": "Read the files."}]
    try:
        with run_proxy(tmp_path, provider.url) as proxy, proxy.client(headers=headers) as client:
            for step in range(5):
                messages += wire.unit(step)
                for listed in (messages, short):
                    body = wire.request(model, window, 1_000, listed)
                    reply = client.post(wire.path, json=body)
                    assert reply.status_code == 200, reply.text
                    assert reply.headers[HEADER] == str(requests(provider)[-1].json()["max_tokens"])
    finally:
        provider.close()
    assert [answer(each).status for each in requests(provider)] == [400] + [200] * 10


def test_responses_lowers_max_output_tokens_and_the_budget_of_reasoning(tmp_path: Path) -> None:
    window = 40_000

    def answer_response(request: Received) -> Reply:
        if request.method == "GET":
            return Reply(404)
        body, used = request.json(), len(request.body) // 4
        if used + body["max_output_tokens"] > window:
            return WIRES["chat"].refusal(window, used, body["max_output_tokens"])
        text = {"type": "output_text", "text": "ok", "annotations": []}
        message = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed"}
        usage = {"input_tokens": used, "output_tokens": 1, "total_tokens": used + 1}
        response = {"id": "resp_1", "object": "response", "status": "completed", "model": body["model"]}
        return Reply(
            body=json.dumps({**response, "output": [{**message, "content": [text]}], "usage": usage}).encode()
        )

    provider = Provider(answer_response)
    items: list[Any] = []
    try:
        with run_proxy(tmp_path, provider.url) as proxy, proxy.client() as client:
            for step in range(4):
                items.append({"role": "user", "content": prose(1_000, f"part-{step}")})
                body = {"model": "sum-40k", "store": False, "input": items, "max_output_tokens": window}
                reply = client.post("/v1/responses", json={**body, "reasoning": {"max_tokens": window - 1}})
                assert reply.status_code == 200, reply.text
                sent = requests(provider)[-1].json()
                assert reply.headers[HEADER] == str(sent["max_output_tokens"])
                assert 1_024 <= sent["reasoning"]["max_tokens"] <= sent["max_output_tokens"] - 1_024
    finally:
        provider.close()
    assert [answer_response(each).status for each in requests(provider)] == [400] + [200] * 4


@pytest.mark.parametrize("asked", [38_000, 40_000])
@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_the_next_process_gets_no_refusal(kind: str, asked: int, tmp_path: Path) -> None:
    wire, provider = WIRES["messages"], Provider(answer)
    messages = [{"role": "user", "content": "Read the first file."}, *wire.unit(0)]
    body = wire.request("sum-40k", asked, 1_000, messages)
    try:
        with ExitStack() as stack:
            url = f"sqlite:///{tmp_path / 'state.db'}"
            if kind == "redis":
                url = f"redis://127.0.0.1:{stack.enter_context(RedisServer(tmp_path)).port}"
            for _ in range(2):
                with (
                    run_proxy(tmp_path, provider.url, {"store": {"url": url}}) as proxy,
                    proxy.client() as client,
                ):
                    assert client.post(wire.path, json=body).status_code == 200
    finally:
        provider.close()
    assert [answer(each).status for each in requests(provider)] == [400, 200, 200]


def test_a_limit_that_stands_in_the_text_is_not_remembered(tmp_path: Path) -> None:
    wire, provider = WIRES["messages"], Provider(answer)
    messages = [{"role": "user", "content": "Their limit is 40,000 tokens."}, *wire.unit(0)]
    body = wire.request("sum-40k", 40_000, 1_000, messages)
    try:
        with run_proxy(tmp_path, provider.url) as proxy, proxy.client() as client:
            replies = [client.post(wire.path, json=body) for _ in range(2)]
    finally:
        provider.close()
    assert [each.status_code for each in replies] == [200, 200]
    assert [answer(each).status for each in requests(provider)] == [400, 200] * 2


@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
def test_a_count_that_differs_a_little_from_the_last_is_not_refused(wire: Wire, tmp_path: Path) -> None:
    window, more = 24_000, 200

    def recount(request: Received) -> Reply:
        """The wire's answer; every other request counts more tokens than its bytes say."""
        if request.method == "GET":
            return Reply(404)
        body = request.json()
        used = len(request.body) // 4 + more * (len(body["messages"]) % 4 > 1)
        if used + body["max_tokens"] > window:
            return wire.refusal(window, used, body["max_tokens"])
        return Reply(
            body=re.sub(rb'("(?:input|prompt)_tokens": ?)\d+', rb"\g<1>%d" % used, answer(request).body)
        )

    provider = Provider(recount)
    messages: list[Any] = [{"role": "user", "content": "Read the files."}]
    try:
        with run_proxy(tmp_path, provider.url) as proxy, proxy.client() as client:
            for step in range(STEPS):
                messages += wire.unit(step, prose(100, f"file-{step}"))
                body = wire.request("sum-24k", 16_000, 12_000, messages)
                reply = client.post(wire.path, json=body)
                assert reply.status_code == 200, reply.text
    finally:
        provider.close()
    assert [recount(each).status for each in requests(provider)] == [400] + [200] * STEPS


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
