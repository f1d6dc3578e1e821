"""Joins streams of Messages and of Responses without any network: upstream bytes in, client bytes out."""

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compaction_proxy.cli.demo import chat
from compaction_proxy.wires.messages.search_tool import SEARCH_TOOL as MESSAGES_TOOL
from compaction_proxy.wires.responses.search_tool import SEARCH_TOOL as RESPONSES_TOOL
from compaction_proxy.wires.search_tool import StreamJoiner
from compaction_proxy.wires.sse import EventSplitter, read_data
from tests.doubles.messages_wire import MESSAGES
from tests.doubles.provider_wire import WireAnswer, WireReply, WireRequest, WireUsage
from tests.doubles.responses_wire import RESPONSES

TOOL = "memory_search"
SEARCH = chat.ToolCall("call_r", TOOL, '{"query":"budget"}')
OPEN = chat.ToolCall("call_o", "open", '{"path":"1.py"}')
BODIES: dict[str, Any] = {"messages": {"messages": []}, "responses": {"input": []}}
FORMATS = {"messages": MESSAGES, "responses": RESPONSES}
JOINERS: dict[str, Callable[[str], StreamJoiner]] = {
    "messages": MESSAGES_TOOL.open_stream_joiner,
    "responses": RESPONSES_TOOL.open_stream_joiner,
}
WIRES = pytest.mark.parametrize("name", FORMATS)


def write(name: str, text: str, *calls: chat.ToolCall, reason: str = "", number: int = 1) -> bytes:
    reply = WireReply(text, calls, reason or ("tool_calls" if calls else "stop"))
    asked = WireRequest(BODIES[name], {"model": "m"}, 0, streamed=True)
    answer = WireAnswer(asked, number, 1, f"{number:02x}", reply, WireUsage(100, 10, 50))
    return b"".join(FORMATS[name].encode_events(answer))


def pass_through(stream: StreamJoiner, data: bytes, cuts: Sequence[int] = ()) -> bytes:
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    pieces = [data[start:stop] for start, stop in itertools.pairwise(places)]
    return b"".join(map(stream.feed, pieces)) + stream.flush_rest()


def list_payloads(data: bytes) -> list[Any]:
    return [json.loads(told) for told in map(read_data, EventSplitter().feed(data)) if told]


@WIRES
@pytest.mark.parametrize("ends", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("calls", [(), (OPEN,), (OPEN, OPEN)], ids=len)
@settings(max_examples=20, deadline=None)
@given(cuts=st.lists(st.integers(0, 20_000), max_size=8))
def test_a_stream_without_a_search_passes_byte_for_byte(
    name: str, ends: bytes, calls: tuple[chat.ToolCall, ...], cuts: list[int]
) -> None:
    data = b": hello\n\n" + write(name, 'It says "tool_use" and "error".', *calls)
    data = data.replace(b"\n", ends)
    stream = JOINERS[name](TOOL)
    assert (pass_through(stream, data, cuts), stream.calls) == (data, ())


@WIRES
@pytest.mark.parametrize("ends", [b"\n", b"\r\n", b"\r"])
@settings(max_examples=20, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 20_000), max_size=8),
    text=st.text(max_size=20),
    calls=st.lists(st.sampled_from([SEARCH, OPEN]), max_size=4),
)
def test_how_a_stream_was_sliced_makes_no_difference(
    name: str, ends: bytes, cuts: list[int], text: str, calls: list[chat.ToolCall]
) -> None:
    outcomes = []
    for places in (cuts, []):
        stream = JOINERS[name](TOOL)
        got = pass_through(stream, write(name, text, *calls).replace(b"\n", ends), places)
        searches = list(stream.calls)
        if searches:
            stream.start_next_answer(may_answer_calls=True)
            got += pass_through(stream, write(name, "Done.", number=2).replace(b"\n", ends), places)
        outcomes.append((got, searches))
    assert outcomes[0] == outcomes[1]
    assert TOOL.encode() not in outcomes[0][0]


@WIRES
def test_each_event_passes_as_soon_as_it_is_whole(name: str) -> None:
    stream = JOINERS[name](TOOL)
    for each in EventSplitter().feed(write(name, "One two three four five six seven.")):
        assert (stream.feed(each[:-1]), stream.feed(each[-1:])) == (b"", each)


@WIRES
def test_a_call_that_was_cut_short_is_left_out_and_the_answer_ends_as_it_did(name: str) -> None:
    stream = JOINERS[name](TOOL)
    cut = chat.ToolCall("call_r", TOOL, '{"que')
    got = list_payloads(pass_through(stream, write(name, "Half", cut, reason="length")))
    assert stream.calls == ()
    if name == "messages":
        assert got[-2]["delta"]["stop_reason"] == "max_tokens"
    else:
        assert got[-1]["type"] == "response.incomplete"
        assert [item["type"] for item in got[-1]["response"]["output"]] == ["message"]


@WIRES
def test_comments_pass_while_the_end_is_kept_back(name: str) -> None:
    stream = JOINERS[name](TOOL)
    pass_through(stream, write(name, "So", SEARCH))
    assert (len(stream.calls), stream.is_done) == (1, True)
    assert stream.feed(b": keep-alive\n\n") == b": keep-alive\n\n"


@WIRES
def test_an_error_behind_a_call_reaches_the_client_and_ends_the_matter(name: str) -> None:
    stream = JOINERS[name](TOOL)
    told = b'{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}'
    pass_through(stream, write(name, "So", SEARCH))
    assert list_payloads(stream.feed(b"event: error\ndata: %b\n\n" % told)) == [json.loads(told)]
    assert stream.calls == ()


def test_blocks_go_back_as_they_were_put_together() -> None:
    """Citations, thoughts and tools of the provider's own are part of what the model said."""
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": {"id": "msg_1", "usage": {"input_tokens": 1}}},
        *open_block(0, {"type": "thinking", "thinking": "", "signature": ""}),
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "Hm"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": "s"}},
        *open_block(1, {"type": "server_tool_use", "id": "srv_1", "name": "web_search", "input": {}}),
        {"type": "content_block_delta", "index": 1, "delta": input_delta('{"query":')},
        {"type": "content_block_delta", "index": 1, "delta": input_delta('"x"}')},
        *open_block(2, {"type": "web_search_tool_result", "tool_use_id": "srv_1", "content": []}),
        *open_block(3, {"type": "text", "text": "", "citations": []}),
        {"type": "content_block_delta", "index": 3, "delta": {"type": "text_delta", "text": "So"}},
        {
            "type": "content_block_delta",
            "index": 3,
            "delta": {"type": "citations_delta", "citation": {"a": 1}},
        },
        *open_block(4, {"type": "text", "text": ""}),
        *open_block(5, {"type": "tool_use", "id": "toolu_1", "name": TOOL, "input": {}}),
        {"type": "content_block_delta", "index": 5, "delta": input_delta('{"query":"b"}')},
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 1}},
        {"type": "message_stop"},
    ]
    stream = MESSAGES_TOOL.open_stream_joiner(TOOL)
    stream.feed(b"".join(b"data: %b\n\n" % json.dumps(each).encode() for each in events))
    assert list(stream.calls) == ['{"query":"b"}']
    assert stream.start_next_answer(may_answer_calls=True) == {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm", "signature": "s"},
            {"type": "server_tool_use", "id": "srv_1", "name": "web_search", "input": {"query": "x"}},
            {"type": "web_search_tool_result", "tool_use_id": "srv_1", "content": []},
            {"type": "text", "text": "So", "citations": [{"a": 1}]},
            {"type": "tool_use", "id": "toolu_1", "name": TOOL, "input": {"query": "b"}},
        ],
    }


def open_block(index: int, block: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "content_block_start", "index": index, "content_block": block}]


def input_delta(text: str) -> dict[str, str]:
    return {"type": "input_json_delta", "partial_json": text}
