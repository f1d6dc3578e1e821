"""On every wire the model searches in the middle of an answer, and the client sees one valid answer."""

import asyncio
import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple

import httpx
import pytest

from compaction_proxy.wires import sse

THOUGHT = "The budget is not here."
STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])


class Seen(NamedTuple):
    """What a client makes of an answer: `end` is `stop`, `calls` or `cut`."""

    text: str
    calls: list[str]
    end: str
    prompt_tokens: int


ENDS = {"stop": "stop", "end_turn": "stop", "completed": "stop", "tool_calls": "calls", "tool_use": "calls"}


def read_chat(answer: Any) -> Seen:
    if "json" in answer.headers["content-type"]:
        told = answer.json()
        choice = told["choices"][0]
        message = choice["message"]
        calls = [call["id"] for call in message.get("tool_calls", ())]
        end = ENDS.get(choice["finish_reason"], "cut")
        return Seen(message["content"] or "", calls, end, told["usage"]["prompt_tokens"])
    payloads = list_payloads(answer.content)
    choices = [choice for each in payloads for choice in each["choices"]]
    [reason] = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    pieces = [piece for choice in choices for piece in choice["delta"].get("tool_calls", ())]
    assert sorted({piece["index"] for piece in pieces}) == list(range(len({p["index"] for p in pieces})))
    calls = [piece["id"] for piece in pieces if piece.get("id")]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    [usage] = [each["usage"] for each in payloads if each.get("usage")]
    return Seen(text, calls, ENDS.get(reason, "cut"), usage["prompt_tokens"])


def list_payloads(stream: bytes) -> list[Any]:
    carried = (sse.read_data(each) for each in sse.EventSplitter().feed(stream))
    return [json.loads(each) for each in carried if each and each != b"[DONE]"]


def read_messages(answer: Any) -> Seen:
    message = answer.json() if "json" in answer.headers["content-type"] else join_blocks(answer.content)
    texts = [block["text"] for block in message["content"] if block["type"] == "text"]
    calls = [block["id"] for block in message["content"] if block["type"] == "tool_use"]
    usage = message["usage"]
    counts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    tokens = sum(usage[name] for name in counts)
    return Seen("".join(texts), calls, ENDS.get(message["stop_reason"], "cut"), tokens)


def join_blocks(stream: bytes) -> Any:
    """The message that a client puts together; fails where the events are not in order."""
    events = [each for each in list_payloads(stream) if each["type"] != "ping"]
    message, ended = events[0]["message"], events[-2]
    assert [each["type"] for each in (events[0], ended, events[-1])] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    opened = -1
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert (event["index"], opened) == (len(message["content"]), -1)
            message["content"].append(event["content_block"])
            opened = event["index"]
        assert event["index"] == opened
        if event["type"] == "content_block_delta" and event["delta"]["type"] == "text_delta":
            message["content"][-1]["text"] += event["delta"]["text"]
        if event["type"] == "content_block_stop":
            opened = -1
    message["usage"] |= ended["usage"]
    return message | ended["delta"]


def read_responses(answer: Any) -> Seen:
    response = answer.json() if "json" in answer.headers["content-type"] else join_items(answer.content)
    output = response["output"]
    texts = [part["text"] for item in output if item["type"] == "message" for part in item["content"]]
    calls = [item["call_id"] for item in output if item["type"] == "function_call"]
    end = "calls" if calls else ENDS.get(response["status"], "cut")
    return Seen("".join(texts), calls, end, response["usage"]["input_tokens"])


def join_items(stream: bytes) -> Any:
    """The response that a stream ends in; fails where its events do not add up to that."""
    events = list_payloads(stream)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"] for event in events]
    assert (kinds.count("response.created"), kinds[0]) == (1, "response.created")
    assert (kinds.count("response.completed"), kinds[-1]) == (1, "response.completed")
    response = events[-1]["response"]
    assert response["id"] == events[0]["response"]["id"]
    for name in ("added", "done"):
        told = [event for event in events if event["type"] == f"response.output_item.{name}"]
        assert [event["output_index"] for event in told] == list(range(len(response["output"])))
    assert [event["item"] for event in told] == response["output"]
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    texts = [part["text"] for item in response["output"] for part in item.get("content", ())]
    assert "".join(deltas) == "".join(texts)
    return response


class Reading(NamedTuple):
    """How a test reads one wire.

    Attributes:
        seen: Reads an answer.
        results: Texts of the search results that a request of ours brings.
        refused: Members with which the tool is not offered.
        error: The body of an error that speaks of tools.
    """

    seen: Callable[[Any], Seen]
    results: Callable[[Any], list[str]]
    refused: tuple[dict[str, Any], ...]


def results_in_messages(body: Any) -> list[str]:
    blocks = [
        block for each in body["messages"] if isinstance(each["content"], list) for block in each["content"]
    ]
    return [block["content"] for block in blocks if block["type"] == "tool_result"]


SCHEMA = {"type": "object"}
READINGS = {
    "chat": Reading(
        read_chat,
        lambda body: [each["content"] for each in body["messages"] if each["role"] == "tool"],
        ({"tool_choice": "auto", "tools": None}, {"n": 2}, {"response_format": {"type": "json_object"}}),
    ),
    "messages": Reading(
        read_messages,
        results_in_messages,
        (
            {"tool_choice": {"type": "none"}},
            {"tool_choice": {"type": "any"}},
            {"tool_choice": {"type": "tool", "name": "open"}},
            {"tool_choice": {"type": "auto"}, "tools": []},
            {"tools": [{"name": "memory_search", "input_schema": SCHEMA}]},
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            {"output_format": {"type": "json_schema", "schema": SCHEMA}},
            {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "So,"}]},
        ),
    ),
    "responses": Reading(
        read_responses,
        lambda body: [each["output"] for each in body["input"] if each.get("type") == "function_call_output"],
        (
            {"tool_choice": "none"},
            {"tool_choice": "required"},
            {"tool_choice": {"type": "function", "name": "open"}},
            {"tool_choice": "auto", "tools": []},
            {"tools": [{"type": "function", "name": "memory_search", "parameters": SCHEMA}]},
            {"text": {"format": {"type": "json_object"}}},
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
            {"store": True},
            {"store": None},
            {"previous_response_id": "resp_1"},
            {"conversation": "conv_1"},
            {"background": True},
            {"prompt": {"id": "pmpt_1"}},
            {"input": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "So,"}]},
        ),
    ),
}


@pytest.fixture(params=READINGS)
def wire(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def reading(wire: str) -> Reading:
    return READINGS[wire]


@pytest.fixture
def on_wire(stack: Any, s: Any, wire: str) -> Any:
    stack.on = s.wires[wire]
    return stack


def check_accepted(stack: Any) -> None:
    """Fails where a provider of the wire would refuse a request."""
    assert [asked.wrong for asked in stack.asked] == [""] * len(stack.asked)


def more(wire: str, *, streamed: bool) -> dict[str, Any]:
    wanted = {"stream_options": {"include_usage": True}} if wire == "chat" and streamed else {}
    return {"stream": streamed, **wanted}


def asked_tokens(stack: Any) -> int:
    """Tokens that the provider has counted of all requests."""
    return sum(100 * len(asked.messages) for asked in stack.asked)


@STREAMED
@pytest.mark.parametrize("calls", [0, 2])
async def test_an_answer_without_a_search_passes_byte_for_byte(
    on_wire: Any, s: Any, wire: str, calls: int, *, streamed: bool
) -> None:
    reply = s.said("Plain.", *[s.opened(number) for number in range(calls)])
    on_wire.script(reply)
    got = await on_wire.post(**more(wire, streamed=streamed))
    tools = [*on_wire.on.request["tools"], s.definitions[wire]]
    assert got.content == on_wire.written(reply, **more(wire, streamed=streamed), tools=tools)
    assert on_wire.asked[0].body["tools"] == tools


@STREAMED
async def test_a_search_is_answered_and_the_client_sees_one_answer(
    on_wire: Any, s: Any, reading: Reading, wire: str, *, streamed: bool
) -> None:
    on_wire.script(s.said("Let me see. ", s.recall()), s.said("Five."))
    got = await on_wire.post(**more(wire, streamed=streamed))
    assert reading.seen(got) == ("Let me see. Five.", [], "stop", asked_tokens(on_wire))
    assert (len(on_wire.asked), got.headers["x-request-id"]) == (2, "req_1")
    first, later = on_wire.asked
    assert first.body["tools"] == later.body["tools"]
    assert later.messages[: len(first.messages)] == first.messages
    [result] = reading.results(later.body)
    assert "Nothing that was removed" in result
    assert (first.fields["accept-encoding"], "idempotency-key" in later.fields) == ("identity", False)


@STREAMED
@pytest.mark.parametrize(
    ("answers", "text"),
    [
        ([("", 1), ("Five.", 0)], "Five."),
        ([("It is ", 1), ("five", 1), (" dollars.", 0)], "It is five dollars."),
        ([("It is five.", 1), ("", 0)], "It is five."),
        ([("Both: ", 2), ("found.", 0)], "Both: found."),
    ],
    ids=["at the start", "twice", "at the end", "in parallel"],
)
async def test_however_it_searches_the_client_sees_one_answer(
    on_wire: Any, s: Any, reading: Reading, wire: str, answers: Any, text: str, *, streamed: bool
) -> None:
    ids = count()
    on_wire.script(*[s.said(said, *[s.recall(next(ids)) for _ in range(calls)]) for said, calls in answers])
    got = await on_wire.post(**more(wire, streamed=streamed))
    assert reading.seen(got) == (text, [], "stop", asked_tokens(on_wire))
    assert len(reading.results(on_wire.asked[-1].body)) == sum(calls for _, calls in answers)
    check_accepted(on_wire)


@STREAMED
async def test_a_search_before_the_client_s_calls_is_answered(
    on_wire: Any, s: Any, reading: Reading, wire: str, *, streamed: bool
) -> None:
    on_wire.script(s.said("Opening ", s.recall()), s.said("it.", s.opened(1), s.opened(2)))
    got = await on_wire.post(**more(wire, streamed=streamed))
    assert reading.seen(got) == ("Opening it.", ["call_o1", "call_o2"], "calls", asked_tokens(on_wire))


@STREAMED
async def test_beside_the_client_s_calls_a_search_is_left_out(
    on_wire: Any, s: Any, reading: Reading, wire: str, *, streamed: bool
) -> None:
    on_wire.script(s.said("Both.", s.recall(1), s.opened(1), s.recall(2), s.opened(2)))
    got = await on_wire.post(**more(wire, streamed=streamed))
    assert reading.seen(got) == ("Both.", ["call_o1", "call_o2"], "calls", 100)
    assert (len(on_wire.asked), b"call_r" in got.content) == (1, False)


@STREAMED
async def test_broken_arguments_are_answered_with_what_is_wanted(
    on_wire: Any, s: Any, reading: Reading, wire: str, *, streamed: bool
) -> None:
    on_wire.script(s.said("", s.recall(1, '{"query":')), s.said("Never mind."))
    got = await on_wire.post(**more(wire, streamed=streamed))
    assert reading.seen(got)[:3] == ("Never mind.", [], "stop")
    check_accepted(on_wire)
    assert ['{"query": "words to look for"}' in each for each in reading.results(on_wire.asked[1].body)] == [
        True
    ]


@STREAMED
async def test_one_that_searches_for_ever_is_stopped(
    on_wire: Any, s: Any, reading: Reading, wire: str, *, streamed: bool
) -> None:
    on_wire.script(s.said("a", s.recall()))
    got = await on_wire.post(**more(wire, streamed=streamed))
    assert reading.seen(got) == ("aaaaa", [], "stop", asked_tokens(on_wire))
    assert [asked.tools for asked in on_wire.asked] == [["open", "memory_search"]] * 4 + [["open"]]


@STREAMED
@pytest.mark.parametrize("wire", ["messages", "responses"])
async def test_what_was_thought_goes_back_as_it_came(
    on_wire: Any, s: Any, reading: Reading, wire: str, *, streamed: bool
) -> None:
    """For ever, so that the last answer is asked for as well."""
    on_wire.script(*[replace(s.said("a", s.recall(at)), thought=THOUGHT) for at in range(5)])
    got = await on_wire.post(**SEALING.get(wire, {}), **more(wire, streamed=streamed))
    assert reading.seen(got)[:3] == ("aaaaa", [], "stop")
    check_accepted(on_wire)
    thoughts = ("encrypted_content" if wire == "responses" else THOUGHT).encode()
    assert on_wire.asked[-1].raw.count(thoughts) - (wire == "responses") == 4


SEALING = {"responses": {"include": ["reasoning.encrypted_content"]}}


async def test_where_thoughts_are_refused_the_tool_is_offered_without_them(stack: Any, s: Any) -> None:
    stack.on = s.wires["messages"]
    thought = {"type": "thinking", "thinking": "Hm", "signature": "s"}
    said = {"role": "assistant", "content": [thought, {"type": "text", "text": "So."}]}
    error = {"type": "invalid_request_error", "message": "`thinking` is bound to a different conversation"}
    refusal = json.dumps({"type": "error", "error": error}).encode()
    stack.script(s.Raw([refusal], 400, [s.JSON]), s.said("", s.recall()), s.said("Five."))
    got = await stack.post(messages=[*s.hello, said, *s.hello])
    assert read_messages(got).text == "Five."
    assert [asked.tools for asked in stack.asked] == [["open", "memory_search"]] * 3
    assert [b'"signature"' in asked.raw for asked in stack.asked] == [True, False, False]


@STREAMED
async def test_reasoning_that_the_provider_does_not_keep_is_left_out(
    stack: Any, s: Any, *, streamed: bool
) -> None:
    stack.on = s.wires["responses"]
    reply = replace(s.said("", s.recall()), thought=THOUGHT)
    told = stack.written(reply, stream=streamed)
    bare = re.sub(rb'"encrypted_content":"[^"]*"', b'"encrypted_content":null', told)
    stack.script(s.Raw([bare], fields=[s.EVENTS if streamed else s.JSON]), s.said("Five."))
    got = await stack.post(stream=streamed)
    assert read_responses(got).text == "Five."
    _, *more_items = stack.asked[1].messages
    assert [each["type"] for each in more_items] == ["function_call", "function_call_output"]
    assert [each for each in more_items if "id" in each] == []


async def test_without_other_tools_the_last_answer_is_asked_for_with_the_tool_forbidden(
    on_wire: Any, s: Any, reading: Reading, wire: str
) -> None:
    on_wire.script(s.said("", s.recall()), s.said("Five."))
    got = await on_wire.post(model="short", tools=None, **more(wire, streamed=True))
    first, later = on_wire.asked
    assert (first.tools, later.tools) == (["memory_search"], ["memory_search"])
    forbidden = {"type": "none"} if wire == "messages" else "none"
    assert ("tool_choice" in first.body, later.body["tool_choice"]) == (False, forbidden)
    assert reading.seen(got).text == "Five."


@pytest.mark.parametrize(
    ("wire", "given"),
    [(name, given) for name, each in READINGS.items() for given in each.refused],
    ids=str,
)
async def test_where_the_tool_has_no_place_the_request_goes_on_as_it_came(
    on_wire: Any, s: Any, given: dict[str, Any]
) -> None:
    on_wire.script(s.said("Fine."))
    await on_wire.post(**given)
    assert on_wire.asked[0].body == {"model": "always", **on_wire.on.request, **given}


async def test_where_the_tool_is_refused_the_request_goes_on_as_it_came(
    on_wire: Any, s: Any, reading: Reading, wire: str
) -> None:
    error = {"type": "invalid_request_error", "message": "tools: array too long. 128 at most."}
    refusal = json.dumps({"type": "error", "error": error}).encode()
    on_wire.script(s.Raw([refusal], 400, [s.JSON]), s.said("Fine."))
    got = await on_wire.post(**more(wire, streamed=True))
    assert [each.tools for each in on_wire.asked] == [["open", "memory_search"], ["open"]]
    assert reading.seen(got).text == "Fine."


ERROR = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded.", "code": None}}


async def test_a_stream_that_cannot_go_on_says_why_and_is_cut(on_wire: Any, s: Any, wire: str) -> None:
    for body, told in ((json.dumps(ERROR).encode(), "Overloaded."), (b"<h1>Down</h1>", "did not continue")):
        on_wire.key += "x"
        on_wire.script(s.said("So", s.recall()), s.Raw([body], 503, [s.JSON]))
        got, whole = await receive(on_wire, wire)
        last = list_payloads(got)[-1]
        assert (told in last["error"]["message"], whole) == (True, False)
        assert wire == "chat" or (b"event: error\n" in got and last["type"] == "error")


async def test_an_error_on_the_way_is_the_client_s_where_nothing_was_sent(on_wire: Any, s: Any) -> None:
    body = json.dumps(ERROR).encode()
    on_wire.script(s.said("So", s.recall()), s.Raw([body], 529, [s.JSON, ("retry-after", "7")]))
    got = await on_wire.post()
    assert (got.status_code, got.content, got.headers["retry-after"]) == (529, body, "7")


async def test_an_answer_on_the_way_that_is_none_is_an_error_in_the_wire_s_shape(
    on_wire: Any, s: Any, wire: str
) -> None:
    on_wire.script(s.said("So", s.recall()), s.Raw([b"no json"], fields=[s.JSON]))
    got = await on_wire.post()
    assert (got.status_code, got.json().get("type")) == (502, "error" if wire == "messages" else None)


async def test_the_beginning_of_an_answer_is_not_held_back(on_wire: Any, s: Any, wire: str) -> None:
    """Events that come before the call are at the client while the upstream is silent."""
    body = {**on_wire.on.request, **more(wire, streamed=True)}
    events = on_wire.provider.written(s.said("One two three four five."), body, 1, on_wire.on).chunks
    held = {"chat": 2, "messages": 4, "responses": 5}[wire]
    on_wire.script(s.Raw(events[:held], ending="open"))
    got = b""
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        sent = {"model": "always", **body}
        url = f"{on_wire.url}{on_wire.on.path}"
        async with client.stream("POST", url, json=sent, headers=on_wire.fields) as answer:
            async for chunk in answer.aiter_raw():
                got += chunk
                if got == b"".join(events[:held]):
                    break
    assert b"One" in got


async def test_a_client_that_leaves_ends_the_upstream_s_next_answer(on_wire: Any, s: Any, wire: str) -> None:
    body = {**on_wire.on.request, **more(wire, streamed=True)}
    events = on_wire.provider.written(s.said("One two three four five."), body, 1, on_wire.on).chunks
    on_wire.script(s.said("", s.recall()), s.Raw(events[:2], ending="open"))
    task = asyncio.create_task(on_wire.post(**more(wire, streamed=True)))
    await wait_until(lambda: len(on_wire.asked) == 2)
    task.cancel()
    await wait_until(lambda: on_wire.asked[-1].departed)
    await asyncio.gather(task, return_exceptions=True)


async def wait_until(condition: Callable[[], bool]) -> None:
    """Waits for a condition; the outer bound only catches a hang."""
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit
        await asyncio.sleep(0.01)


async def receive(stack: Any, wire: str) -> tuple[bytes, bool]:
    """What a client got of a streamed answer, and whether that was all of it."""
    got = b""
    given = {"model": "always", **stack.on.request, **more(wire, streamed=True)}
    async with (
        httpx.AsyncClient(trust_env=False, timeout=60) as client,
        client.stream("POST", f"{stack.url}{stack.on.path}", json=given, headers=stack.fields) as answer,
    ):
        try:
            async for chunk in answer.aiter_raw():
                got += chunk
        except httpx.RemoteProtocolError:
            return got, False
    return got, True
