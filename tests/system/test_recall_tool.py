"""On every wire the model finds in the middle of its answer what a round has removed."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.system.black_box import Provider, Received, Reply, run_proxy

TOOL = "memory_search"
FACT = "the caretaker keeps the spare key under the blue flowerpot"
FILLER = "The sun went down behind the hills and the shepherds drove their flocks home. " * 12
BEFORE, FOUND, MISSED = "Let me look. ", "It is under the blue flowerpot.", "I do not know."
CONFIG = {
    "recall": {"tool": "inject"},
    "models": {"*": {"window": 6_000, "tools": True}},
    "summary": {"model": "none"},
}
Events = list[dict[str, Any]]


def make_talk() -> list[dict[str, str]]:
    """A conversation of plain text; only an early answer of the assistant holds the fact."""
    talk = []
    for number in range(30):
        told = FACT if number == 2 else "nothing of note"
        talk += [
            {"role": "user", "content": f"Read page {number}."},
            {"role": "assistant", "content": f"{FILLER}{told}. {FILLER}"},
        ]
    return [*talk, {"role": "user", "content": "Where is the spare key?"}]


def write_events(events: Events) -> bytes:
    """Server-sent events, each under its name."""
    return b"".join(f"event: {each['type']}\ndata: {json.dumps(each)}\n\n".encode() for each in events)


def read_events(body: bytes) -> Events:
    lines = [line[5:].strip() for line in body.decode().splitlines() if line.startswith("data:")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@dataclass(frozen=True)
class Wire:
    """How one wire asks and answers.

    Attributes:
        path: Where conversations are posted.
        request: Body of a conversation.
        names: Names of the tools that a request offers.
        result: The text of the tool result that a request ends in; empty if it ends in none.
        answer: What a model writes: a text, whether it calls the tool behind that, whether it streams.
        read: Text and reason of the end of an answer, whole or streamed; fails where the answer is not valid.
    """

    path: str
    request: Callable[[list[dict[str, str]]], dict[str, Any]]
    names: Callable[[Mapping[str, Any]], list[str]]
    result: Callable[[Mapping[str, Any]], str]
    answer: Callable[..., bytes]
    read: Callable[..., tuple[str, str]]


CALL_ID = "call_1"
ARGUMENTS = '{"query": "where is the spare key"}'


def write_chat(text: str, *, calling: bool, streamed: bool) -> bytes:
    function = {"name": TOOL, "arguments": ARGUMENTS}
    call = {"id": CALL_ID, "type": "function", "function": function}
    end = "tool_calls" if calling else "stop"
    message: dict[str, Any] = {"role": "assistant", "content": text}
    message |= {"tool_calls": [call]} if calling else {}
    envelope = {"id": "chatcmpl-1", "created": 1, "model": "m"}
    if not streamed:
        choice = {"index": 0, "message": message, "finish_reason": end}
        usage = {"prompt_tokens": 1_000, "completion_tokens": 5, "total_tokens": 1_005}
        return json.dumps(
            {**envelope, "object": "chat.completion", "choices": [choice], "usage": usage}
        ).encode()
    deltas: list[tuple[dict[str, Any], str | None]] = [({"role": "assistant", "content": text}, None)]
    deltas += [({"tool_calls": [{"index": 0, **call}]}, None)] if calling else []
    chunks = [
        {**envelope, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
        for delta, reason in [*deltas, ({}, end)]
    ]
    return b"".join(f"data: {json.dumps(each)}\n\n".encode() for each in chunks) + b"data: [DONE]\n\n"


def read_chat(body: bytes, *, streamed: bool) -> tuple[str, str]:
    if not streamed:
        choice = json.loads(body)["choices"][0]
        assert "tool_calls" not in choice["message"]
        return choice["message"]["content"], choice["finish_reason"]
    choices = [choice for event in read_events(body) for choice in event["choices"]]
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    assert not any("tool_calls" in choice["delta"] for choice in choices)
    assert (len(reasons), body.count(b"[DONE]")) == (1, 1)
    return "".join(choice["delta"].get("content") or "" for choice in choices), reasons[0]


def find_chat_result(body: Mapping[str, Any]) -> str:
    last = body["messages"][-1]
    return last["content"] if last["role"] == "tool" else ""


def write_message(text: str, *, calling: bool, streamed: bool) -> bytes:
    blocks: list[dict[str, Any]] = [{"type": "text", "text": text}]
    use = {"type": "tool_use", "id": CALL_ID, "name": TOOL, "input": json.loads(ARGUMENTS)}
    blocks += [use] if calling else []
    end = {"stop_reason": "tool_use" if calling else "end_turn", "stop_sequence": None}
    usage = {"input_tokens": 1_000, "output_tokens": 5}
    envelope = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m"}
    if not streamed:
        return json.dumps({**envelope, "content": blocks, **end, "usage": usage}).encode()
    begun: dict[str, Any] = {
        **envelope,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }
    events: Events = [{"type": "message_start", "message": begun}]
    for index, block in enumerate(blocks):
        called = block["type"] == "tool_use"
        empty = {**block, "input": {}} if called else {**block, "text": ""}
        delta = {"type": "text_delta", "text": text}
        delta = {"type": "input_json_delta", "partial_json": ARGUMENTS} if called else delta
        events += [
            {"type": "content_block_start", "index": index, "content_block": empty},
            {"type": "content_block_delta", "index": index, "delta": delta},
            {"type": "content_block_stop", "index": index},
        ]
    return write_events(
        [
            *events,
            {"type": "message_delta", "delta": end, "usage": {"output_tokens": 5}},
            {"type": "message_stop"},
        ]
    )


def read_message(body: bytes, *, streamed: bool) -> tuple[str, str]:
    if not streamed:
        message = json.loads(body)
        blocks = message["content"]
        assert {block["type"] for block in blocks} == {"text"}
        return "".join(block["text"] for block in blocks), message["stop_reason"]
    events = read_events(body)
    kinds = [event["type"] for event in events]
    assert (kinds.count("message_start"), kinds[0]) == (1, "message_start")
    assert (kinds.count("message_stop"), kinds.count("message_delta"), kinds[-1]) == (1, 1, "message_stop")
    begun = [event for event in events if event["type"] == "content_block_start"]
    assert [event["index"] for event in begun] == list(range(len(begun)))
    assert {event["content_block"]["type"] for event in begun} == {"text"}
    texts = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    return "".join(texts), events[-2]["delta"]["stop_reason"]


def find_message_result(body: Mapping[str, Any]) -> str:
    last = body["messages"][-1]["content"]
    blocks = last if isinstance(last, list) else []
    return "".join(block["content"] for block in blocks if block["type"] == "tool_result")


def write_response(text: str, *, calling: bool, streamed: bool) -> bytes:
    part = {"type": "output_text", "text": text, "annotations": []}
    message = {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }
    call = {"type": "function_call", "id": "fc_1", "call_id": CALL_ID, "name": TOOL, "arguments": ARGUMENTS}
    output: Events = [SEALED, message, *([call] if calling else [])]
    usage = {"input_tokens": 1_000, "output_tokens": 5, "total_tokens": 1_005}
    envelope = {"id": "resp_1", "object": "response", "created_at": 1, "model": "m"}
    response = {**envelope, "status": "completed", "output": output, "usage": usage}
    if not streamed:
        return json.dumps(response).encode()
    begun = {**envelope, "status": "in_progress", "output": [], "usage": None}
    events: Events = [{"type": "response.created", "response": begun}]
    for index, item in enumerate(output):
        events += [{"type": "response.output_item.added", "output_index": index, "item": item}]
        if item is message:
            where = {"output_index": index, "item_id": item["id"], "content_index": 0}
            events += [{"type": "response.output_text.delta", **where, "delta": text}]
        events += [{"type": "response.output_item.done", "output_index": index, "item": item}]
    events += [{"type": "response.completed", "response": response}]
    return write_events([{**event, "sequence_number": number} for number, event in enumerate(events)])


def read_response(body: bytes, *, streamed: bool) -> tuple[str, str]:
    response = json.loads(body) if not streamed else {}
    if streamed:
        events = read_events(body)
        kinds = [event["type"] for event in events]
        assert (kinds.count("response.created"), kinds.count("response.completed")) == (1, 1)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        response = events[-1]["response"]
        done = [event for event in events if event["type"] == "response.output_item.done"]
        assert [event["output_index"] for event in done] == list(range(len(done)))
        assert [event["item"] for event in done] == response["output"]
    kinds = [item["type"] for item in response["output"]]
    assert set(kinds) == {"reasoning", "message"}
    parts = [part for item in response["output"] for part in item.get("content", ())]
    return "".join(part["text"] for part in parts), response["status"]


def find_response_result(body: Mapping[str, Any]) -> str:
    """The result; fails unless the reasoning that the provider has sealed came back with it."""
    last = body["input"][-1]
    if last.get("type") != "function_call_output":
        return ""
    assert SEALED in body["input"]
    return str(last["output"])


SEALED = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "c2VhbGVk"}
WIRES = {
    "chat": Wire(
        "/v1/chat/completions",
        lambda talk: {"messages": talk},
        lambda body: [tool["function"]["name"] for tool in body.get("tools", ())],
        find_chat_result,
        write_chat,
        read_chat,
    ),
    "messages": Wire(
        "/v1/messages",
        lambda talk: {"messages": talk, "max_tokens": 200},
        lambda body: [tool["name"] for tool in body.get("tools", ())],
        find_message_result,
        write_message,
        read_message,
    ),
    "responses": Wire(
        "/v1/responses",
        lambda talk: {"input": talk, "store": False},
        lambda body: [tool["name"] for tool in body.get("tools", ())],
        find_response_result,
        write_response,
        read_response,
    ),
}


@pytest.fixture
def model(request: pytest.FixtureRequest) -> Iterator[Provider]:
    """A provider whose model searches once where it may, and then says what it was told."""
    wire = WIRES[request.param]

    def answer(received: Received) -> Reply:
        body = received.json()
        streamed = bool(body.get("stream"))
        found = wire.result(body)
        calling = TOOL in wire.names(body) and not found
        text = BEFORE if calling else FOUND if FACT in found else MISSED
        kind = "text/event-stream" if streamed else "application/json"
        return Reply(
            body=wire.answer(text, calling=calling, streamed=streamed), headers={"content-type": kind}
        )

    running = Provider(answer)
    yield running
    running.close()


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("model", "wire"), list(WIRES.items()), indirect=["model"], ids=list(WIRES))
def test_the_model_finds_what_was_removed_and_the_client_sees_one_answer(
    tmp_path: Path, model: Provider, wire: Wire, *, streamed: bool
) -> None:
    with run_proxy(tmp_path, model.url, CONFIG) as proxy, proxy.client() as client:
        body = {"model": "m", **wire.request(make_talk()), "stream": streamed}
        reply = client.post(wire.path, json=body)

    assert reply.status_code == 200, reply.text
    assert reply.headers["x-compaction-status"] == "applied"
    assert FACT.encode() not in model.received[0].body
    text, end = wire.read(reply.content, streamed=streamed)
    assert text == BEFORE + FOUND
    assert end not in {"tool_calls", "tool_use"}
    assert TOOL not in reply.text
    assert f"call {TOOL} with words".encode() in model.received[0].body  # the record says how to search


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_model_that_only_ever_searches_leaves_the_client_a_text_and_no_null(
    tmp_path: Path, provider: Provider, *, streamed: bool
) -> None:
    def answer(received: Received) -> Reply:
        is_stream = bool(received.json().get("stream"))
        body = write_chat("", calling=True, streamed=is_stream).replace(b'"content": ""', b'"content": null')
        kind = "text/event-stream" if is_stream else "application/json"
        return Reply(body=body, headers={"content-type": kind})

    provider.answer = answer
    config = {**CONFIG, "recall": {"tool": "inject", "max_hops": 2}}
    with run_proxy(tmp_path, provider.url, config) as proxy, proxy.client() as client:
        body = {"model": "m", "messages": make_talk(), "stream": streamed}
        reply = client.post("/v1/chat/completions", json=body)

    assert (reply.status_code, len(provider.received)) == (200, 3)
    assert read_chat(reply.content, streamed=streamed) == ("", "stop")
    if streamed:  # what a client that adds pieces up has in the end
        pieces = [each["choices"][0]["delta"].get("content") for each in read_events(reply.content)]
        assert "" in pieces
