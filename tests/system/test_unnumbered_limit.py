"""An upstream that refuses long requests and names no number to rely on: its limit is found, and kept."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.system.black_box import Provider, Received, Reply, run_proxy
from tests.system.test_learned_window import READ_ALL
from tests.system.test_output_reserve import prose

LIMIT_TOKENS = 9_000  # small enough that requests of this size go on unread by default
TURNS = 40
RESULT_TOKENS = 700
SUMMARY_NONE = {"summary": {"model": "none"}}
SSE = {"content-type": "text/event-stream"}
WORDS = "Your input exceeds the context window of this model. Please adjust your input and try again."
USAGE_NAMES = {
    "chat": ("prompt_tokens", "completion_tokens"),
    "messages": ("input_tokens", "output_tokens"),
    "responses": ("input_tokens", "output_tokens"),
}


def count(request: Received) -> int:
    """Tokens as the provider counts them: four bytes each."""
    return len(request.body) // 4


def write_events(*events: dict[str, Any]) -> bytes:
    names = (f"event: {each['type']}\n" if "type" in each else "" for each in events)
    return "".join(
        f"{name}data: {json.dumps(each)}\n\n" for name, each in zip(names, events, strict=True)
    ).encode()


@dataclass(frozen=True)
class Wire:
    """How one wire asks, answers and refuses.

    Attributes:
        name: Its name.
        path: Where conversations are posted.
        field: The member that holds the conversation.
        unit: A tool call and its result.
        answer: Events of an answer for a usage; of a plain one the last.
        refusal: Events of a refusal; of a plain one the last.
    """

    name: str
    path: str
    field: str
    unit: Callable[[int, str], list[dict[str, Any]]]
    answer: Callable[[dict[str, int]], list[dict[str, Any]]]
    refusal: Callable[[], list[dict[str, Any]]]

    def request(self, messages: list[Any], *, stream: bool, model: str = "some-model") -> dict[str, Any]:
        asked: dict[str, Any] = {"model": model, self.field: messages, "stream": stream}
        return asked | ({"max_tokens": 1_000} if self.name == "messages" else {})

    def reply(self, request: Received, *, refused: bool, status: int = 400) -> Reply:
        """The answer, or the refusal: in the stream with status 200 where one was asked for."""
        usage = dict(zip(USAGE_NAMES[self.name], (count(request), 1), strict=True))
        events = self.refusal() if refused else self.answer(usage)
        if request.json()["stream"]:
            return Reply(200, write_events(*events), SSE)
        plain = self.plain(events[-1], refused=refused)
        return Reply(status if refused else 200, json.dumps(plain).encode())

    def plain(self, event: dict[str, Any], *, refused: bool) -> dict[str, Any]:
        if self.name != "responses":
            return event
        response: dict[str, Any] = event["response"]
        return {"error": response["error"]} if refused else response


def chat_unit(step: int, text: str) -> list[dict[str, Any]]:
    function = {"name": "read", "arguments": json.dumps({"path": f"src/m{step}.py"})}
    calls = [{"id": f"call_{step}", "type": "function", "function": function}]
    return [
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": f"call_{step}", "content": text},
    ]


def chat_answer(usage: dict[str, int]) -> list[dict[str, Any]]:
    message = {"role": "assistant", "content": "ok"}
    choice = {"index": 0, "message": message, "delta": message, "finish_reason": "stop"}
    return [
        {
            "id": "c1",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [choice],
            "usage": usage,
        }
    ]


def chat_refusal() -> list[dict[str, Any]]:
    return [{"error": {"message": WORDS, "type": "invalid_request_error", "code": "context_length_exceeded"}}]


def messages_unit(step: int, text: str) -> list[dict[str, Any]]:
    use = {"type": "tool_use", "id": f"call_{step}", "name": "read", "input": {"path": f"src/m{step}.py"}}
    result = {"type": "tool_result", "tool_use_id": f"call_{step}", "content": text}
    return [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]


def messages_answer(usage: dict[str, int]) -> list[dict[str, Any]]:
    content = [{"type": "text", "text": "ok"}]
    message = {"id": "m1", "type": "message", "role": "assistant", "model": "m", "content": content}
    whole = {**message, "stop_reason": "end_turn", "stop_sequence": None, "usage": usage}
    return [
        {"type": "message_start", "message": {**whole, "content": [], "stop_reason": None}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "ok"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 1}},
        {"type": "message_stop", **{name: value for name, value in whole.items() if name != "type"}},
    ]


def messages_refusal() -> list[dict[str, Any]]:
    error = {"type": "invalid_request_error", "message": "prompt is too long"}
    return [{"type": "error", "error": error}]


def responses_unit(step: int, text: str) -> list[dict[str, Any]]:
    arguments = json.dumps({"path": f"src/m{step}.py"})
    return [
        {"type": "function_call", "call_id": f"call_{step}", "name": "read", "arguments": arguments},
        {"type": "function_call_output", "call_id": f"call_{step}", "output": text},
    ]


def responses_answer(usage: dict[str, int]) -> list[dict[str, Any]]:
    response = {"id": "r1", "object": "response", "created_at": 1, "model": "m"}
    text = {"type": "output_text", "text": "ok", "annotations": []}
    item = {"type": "message", "id": "i1", "role": "assistant", "status": "completed", "content": [text]}
    done = {**response, "status": "completed", "output": [item], "usage": usage}
    return [
        {"type": "response.created", "response": {**response, "status": "in_progress", "output": []}},
        {"type": "response.output_text.delta", "item_id": "i1", "delta": "ok"},
        {"type": "response.completed", "response": done},
    ]


def responses_refusal() -> list[dict[str, Any]]:
    response = {"id": "r1", "object": "response", "created_at": 1, "model": "m"}
    error = {"code": "context_length_exceeded", "message": WORDS}
    return [
        {"type": "response.created", "response": {**response, "status": "in_progress", "output": []}},
        {"type": "response.failed", "response": {**response, "status": "failed", "error": error}},
    ]


WIRES = {
    "chat": Wire("chat", "/v1/chat/completions", "messages", chat_unit, chat_answer, chat_refusal),
    "messages": Wire(
        "messages", "/v1/messages", "messages", messages_unit, messages_answer, messages_refusal
    ),
    "responses": Wire(
        "responses", "/v1/responses", "input", responses_unit, responses_answer, responses_refusal
    ),
}


class Upstream:
    """A provider of one wire that refuses what is over its limit, and says no number.

    Attributes:
        limit_tokens: The limit; tests may move it.
        refused: Sizes of the requests that it refused, in tokens.
        accepted: Sizes of those that it answered.
    """

    def __init__(self, wire: Wire, limit_tokens: int = LIMIT_TOKENS) -> None:
        self.wire = wire
        self.limit_tokens = limit_tokens
        self.refused: list[int] = []
        self.accepted: list[int] = []
        self.status = 400
        self.provider = Provider(self.answer)

    def answer(self, request: Received) -> Reply:
        if request.method == "GET":  # the proxy asks which window the model has
            return Reply(404)
        size = count(request)
        (self.refused if size > self.limit_tokens else self.accepted).append(size)
        return self.wire.reply(request, refused=size > self.limit_tokens, status=self.status)

    def last(self) -> Any:
        """The conversation that it was sent last."""
        posted = [each for each in self.provider.received if each.method == "POST"]
        return posted[-1].json()[self.wire.field]


@contextmanager
def session(folder: Path, upstream: Upstream, **config: Any) -> Iterator[httpx.Client]:
    try:
        with (
            run_proxy(folder, upstream.provider.url, {**SUMMARY_NONE, **config}) as proxy,
            proxy.client() as client,
        ):
            yield client
    finally:
        upstream.provider.close()


def grow(wire: Wire, turns: int = TURNS, first: int = 0) -> Iterator[list[Any]]:
    """A conversation that grows by one tool call a turn."""
    messages: list[Any] = [{"role": "user", "content": prose(300, "task")}]
    for step in range(first, first + turns):
        messages = [*messages, *wire.unit(step, prose(RESULT_TOKENS, f"result-{step}"))]
        yield messages


def post(
    client: httpx.Client, wire: Wire, messages: list[Any], *, stream: bool, **headers: str
) -> httpx.Response:
    reply = client.post(wire.path, json=wire.request(messages, stream=stream), headers=headers)
    assert reply.status_code == 200, reply.text
    assert "context_length_exceeded" not in reply.text
    assert "too long" not in reply.text
    return reply


@pytest.mark.parametrize("named", [True, False], ids=["session", "no-session"])
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
def test_a_growing_conversation_is_refused_once(
    wire: Wire, *, stream: bool, named: bool, tmp_path: Path
) -> None:
    upstream = Upstream(wire)
    headers = {"x-session-id": "s-1"} if named else {}
    with session(tmp_path, upstream) as client:
        for messages in grow(wire):
            post(client, wire, messages, stream=stream, **headers)
    assert len(upstream.accepted) == TURNS
    assert len(upstream.refused) == 1


def test_a_limit_that_the_conversation_mentions_is_refused_once(tmp_path: Path) -> None:
    wire = WIRES["chat"]
    upstream = Upstream(wire)
    error = {"message": f"This model's maximum context length is {LIMIT_TOKENS} tokens.", "code": None}
    refuse = partial(Reply, 400, json.dumps({"error": error}).encode())
    answer = upstream.provider.answer
    upstream.provider.answer = lambda request: refuse() if (reply := answer(request)).status == 400 else reply
    with session(tmp_path, upstream) as client:
        for messages in grow(wire):
            told = {"role": "user", "content": f"The model takes {LIMIT_TOKENS:,} tokens."}
            post(client, wire, [told, *messages], stream=False)
    assert len(upstream.accepted) == TURNS
    assert len(upstream.refused) == 1


# What goes on unread is counted by its bytes only, so its share is smaller.
@pytest.mark.parametrize(("config", "share"), [(READ_ALL, 0.97), ({}, 0.9)], ids=["read", "unread"])
@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
def test_the_limit_lies_between_what_was_accepted_and_what_was_refused(
    wire: Wire, config: dict[str, Any], share: float, tmp_path: Path
) -> None:
    upstream = Upstream(wire)
    with session(tmp_path, upstream, **config) as client:
        for messages in grow(wire):
            reply = post(client, wire, messages, stream=False)
            if upstream.refused:
                break
        accepted = max(upstream.accepted[:-1])
        reply = post(client, wire, messages, stream=False)
    limit = int(reply.headers["x-compaction-context-limit"])
    assert share * max(0.9 * upstream.refused[0], accepted) <= limit <= upstream.refused[0]
    assert len(upstream.refused) == 1


@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
def test_a_larger_request_that_is_accepted_lifts_the_limit_at_once(wire: Wire, tmp_path: Path) -> None:
    upstream = Upstream(wire)
    with session(tmp_path, upstream) as client:
        over = list(grow(wire, 18))[-1]
        post(client, wire, over, stream=False)
        assert len(upstream.refused) == 1
        assert upstream.last() != over
        upstream.limit_tokens = 10**9
        post(client, wire, over, stream=False, **{"x-compaction": "bypass"})
        assert upstream.last() == over
        another = list(grow(wire, 18, first=1_000))[-1]
        post(client, wire, another, stream=False)
        assert upstream.last() == another
    assert len(upstream.refused) == 1


@pytest.mark.parametrize("status", [413, 429])
def test_a_refusal_for_another_reason_teaches_no_limit(status: int, tmp_path: Path) -> None:
    wire = WIRES["chat"]
    upstream = Upstream(wire)
    upstream.status = status
    with session(tmp_path, upstream) as client:
        client.post(wire.path, json=wire.request(list(grow(wire, 18))[-1], stream=False))
        upstream.limit_tokens = 10**9
        another = list(grow(wire, 18, first=1_000))[-1]
        post(client, wire, another, stream=False)
        assert upstream.last() == another


def test_the_limit_of_one_tenant_is_not_that_of_another(tmp_path: Path) -> None:
    wire = WIRES["responses"]
    upstream = Upstream(wire)
    with session(tmp_path, upstream) as client:
        over = list(grow(wire, 18))[-1]
        post(client, wire, over, stream=False, authorization="Bearer one")
        upstream.limit_tokens = 10**9
        post(client, wire, over, stream=False, authorization="Bearer two")
        assert upstream.last() == over
        another = list(grow(wire, 18, first=1_000))[-1]
        post(client, wire, another, stream=False, authorization="Bearer one")
        assert upstream.last() != another


def test_the_limit_outlives_a_restart(tmp_path: Path) -> None:
    wire = WIRES["responses"]
    upstream = Upstream(wire)
    config = {"store": {"url": f"sqlite:///{tmp_path / 'state.db'}"}}
    turns = list(grow(wire, 18))
    with run_proxy(tmp_path, upstream.provider.url, {**SUMMARY_NONE, **config}) as proxy:
        with proxy.client() as client:
            post(client, wire, turns[-1], stream=False)
        proxy.wait_for_quiet()
    with session(tmp_path, upstream, **config) as client:
        post(client, wire, list(grow(wire, 18, first=1_000))[-1], stream=False)
    assert len(upstream.refused) == 1
