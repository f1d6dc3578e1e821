"""A large `max_tokens` costs a conversation nothing: its task and its newest tool result stay whole.

The provider counts the prompt alone against its window, as llama.cpp does, or prompt and `max_tokens`
together, as vLLM does.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.system.black_box import Provider, Proxy, Received, Reply, chat_reply, run_proxy

WINDOWS = (28_000, 40_000)
MAX_TOKENS = (None, 1_000, 8_000, 20_000, 32_000)
# Tokens of system prompt and tools: one like Claude Code's, and a small agent's.
LARGE_FIXED, SMALL_FIXED = 18_000, 3_000
RESULT_TOKENS = 1_400
STEPS = 25
WORDS = (
    "The worker reads the next job from the queue and writes its result into the table of reports. "
    "A job that fails three times is moved aside and the owner of the queue gets a message. "
)


def prose(tokens: int, name: str) -> str:
    """Running English of about so many tokens, with a beginning and an end of its own."""
    lines = (f"{name} line {k}: {WORDS}" for k in range(max(1, tokens // 42)))
    return "\n".join((f"<{name} begins>", *lines, f"<{name} ends>"))


def result_text(step: int) -> str:
    return prose(RESULT_TOKENS, f"result-{step}")


class Wire:
    """Requests and answers of one wire."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.path = "/v1/chat/completions" if name == "chat" else "/v1/messages"

    def request(self, model: str, max_tokens: int | None, fixed: int, messages: list[Any]) -> dict[str, Any]:
        tool = {"name": "read", "description": prose(fixed // 2, "tools")}
        schema = {"type": "object", "properties": {"path": {"type": "string"}}}
        system = prose(fixed // 2, "system")
        limit = {} if max_tokens is None else {"max_tokens": max_tokens}
        if self.name == "chat":
            function = {"type": "function", "function": {**tool, "parameters": schema}}
            listed = [{"role": "system", "content": system}, *messages]
            return {"model": model, "messages": listed, "tools": [function], **limit}
        listed_tools = [{**tool, "input_schema": schema}]
        return {"model": model, "system": system, "messages": messages, "tools": listed_tools, **limit}

    def unit(self, step: int, text: str | None = None) -> list[Any]:
        """A tool call and its result."""
        call, result = f"call_{step}", result_text(step) if text is None else text
        if self.name == "chat":
            function = {"name": "read", "arguments": json.dumps({"path": f"src/m{step}.py"})}
            calls = [{"id": call, "type": "function", "function": function}]
            return [
                {"role": "assistant", "content": None, "tool_calls": calls},
                {"role": "tool", "tool_call_id": call, "content": result},
            ]
        use = {"type": "tool_use", "id": call, "name": "read", "input": {"path": f"src/m{step}.py"}}
        answer = {"type": "tool_result", "tool_use_id": call, "content": result}
        return [{"role": "assistant", "content": [use]}, {"role": "user", "content": [answer]}]

    def answer(self, request: Received) -> Reply:
        """An answer, or this wire's refusal of what is over the window, at four bytes a token."""
        body = request.json()
        window, used = 1_000 * int(body["model"].rpartition("-")[2][:-1]), len(request.body) // 4
        asked = body.get("max_tokens", 0) if body["model"].startswith("sum-") else 0
        if used + asked > window:
            return self.refusal(window, used, asked)
        if self.name == "chat":
            return chat_reply(request)
        message = {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "model": body["model"],
            "content": [{"type": "text", "text": "ok"}],
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": {"input_tokens": used, "output_tokens": 1},
        }
        return Reply(body=json.dumps(message).encode())

    def refusal(self, window: int, used: int, asked: int) -> Reply:
        words = f"prompt is too long: {used} tokens > {window} maximum"
        if asked:
            words = f"input length and `max_tokens` exceed context limit: {used} + {asked} > {window}"
        error = {"type": "invalid_request_error", "message": words}
        if self.name == "messages":
            return Reply(400, json.dumps({"type": "error", "error": error}).encode())
        words = f"This model's maximum context length is {window} tokens. However, "
        words += f"you requested {used + asked} tokens ({used} in the messages, {asked} in the completion)."
        error = {**error, "message": words, "code": "context_length_exceeded"}
        return Reply(400, json.dumps({"error": error}).encode())


WIRES = {"chat": Wire("chat"), "messages": Wire("messages")}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Proxy, Provider]]:
    def answer(request: Received) -> Reply:
        return WIRES["messages" if request.path.endswith("/messages") else "chat"].answer(request)

    provider = Provider(answer)
    models = {f"*-{window // 1_000}k": {"window": window} for window in WINDOWS}
    config = {"models": models, "summary": {"model": "none"}}
    folder = tmp_path_factory.mktemp("proxy")
    try:
        with run_proxy(folder, provider.url, config) as proxy:
            yield proxy, provider
    finally:
        provider.close()


def texts(body: Any) -> str:
    """All that the provider was sent, as one text."""
    return json.dumps(body, ensure_ascii=False).replace("\\n", "\n")


def play(
    proxy: Proxy, provider: Provider, wire: Wire, model: str, fixed: int, asked: int | None
) -> list[str]:
    """Plays a growing tool loop; returns what of each request did not reach the provider word for word."""
    task = f"{prose(400, 'task')}\nSession {wire.name} {model} {fixed} {asked}."
    messages: list[Any] = [{"role": "user", "content": task}]
    lost: list[str] = []
    with proxy.client(headers={"x-session-id": f"{wire.name}-{model}-{fixed}-{asked}"}) as client:
        for step in range(STEPS):
            messages += wire.unit(step)
            provider.received.clear()
            client.post(wire.path, json=wire.request(model, asked, fixed, messages))
            assert provider.received, "nothing was forwarded"
            for request in provider.received:
                seen = texts(request.json())
                lost += [f"step {step}: task"] if task not in seen else []
                lost += [f"step {step}: newest result"] if result_text(step) not in seen else []
    return lost


@pytest.mark.parametrize(
    ("max_tokens", "fixed"), [*((asked, LARGE_FIXED) for asked in MAX_TOKENS), (32_000, SMALL_FIXED)]
)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
def test_task_and_newest_tool_result_stay_whole(
    running: tuple[Proxy, Provider], wire: Wire, window: int, max_tokens: int | None, fixed: int
) -> None:
    lost = play(*running, wire, f"m-{window // 1_000}k", fixed, max_tokens)
    assert lost == [], f"{len(lost)} texts were not whole"


@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
def test_nothing_is_cut_for_max_tokens_where_the_provider_adds_them_to_the_prompt(
    running: tuple[Proxy, Provider], wire: Wire
) -> None:
    lost = play(*running, wire, "sum-40k", LARGE_FIXED, 20_000)
    assert lost == [], f"{len(lost)} texts were not whole"


@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
def test_a_request_that_cannot_fit_goes_as_it_came(running: tuple[Proxy, Provider], wire: Wire) -> None:
    proxy, provider = running
    messages = [{"role": "user", "content": "Read the first file."}, *wire.unit(0)]
    body = wire.request("m-28k", 1_000, 32_000, messages)
    with proxy.client() as client:
        answer = client.post(wire.path, json=body)
    assert provider.received[-1].json() == body
    assert answer.headers["x-compaction-status"] == "over-limit"
    assert answer.status_code == 400
