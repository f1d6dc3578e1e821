"""Calls of ours hidden in a stream, without any network: what the client gets of the upstream's bytes."""

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compaction_proxy.cli.demo import chat
from compaction_proxy.wires import sse
from compaction_proxy.wires.chat.search_tool import SEARCH_TOOL
from compaction_proxy.wires.search_tool import StreamJoiner

TOOL = "memory_search"
FIRST = chat.Envelope("chatcmpl-1", 1, "m-1")
LATER = chat.Envelope("chatcmpl-2", 2, "m-2")
USAGE = chat.DemoUsage(100, 10, 50)


def ours(number: int = 1, arguments: str = '{"query":"budget"}') -> chat.ToolCall:
    return chat.ToolCall(f"call_r{number}", TOOL, arguments)


def theirs(number: int = 1) -> chat.ToolCall:
    return chat.ToolCall(f"call_o{number}", "open", f'{{"path":"{number}.py"}}')


def streamed(
    text: str = "",
    *calls: chat.ToolCall,
    envelope: chat.Envelope = FIRST,
    reason: str = "",
    usage: bool = True,
) -> bytes:
    reply = chat.Reply(text, calls, reason or ("tool_calls" if calls else "stop"))
    return b"".join(chat.encode_stream(envelope, reply, USAGE if usage else None))


def event(**choice: Any) -> bytes:
    """One event of an upstream's, with these members of its choice."""
    return b"data: %b\n\n" % json.dumps({"id": "x", "choices": [{"index": 0, **choice}]}).encode()


def calling(*pieces: dict[str, Any]) -> bytes:
    return event(delta={"tool_calls": list(pieces)})


def head(index: int | None, call_id: str, name: str, arguments: str = "") -> dict[str, Any]:
    given = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return given if index is None else {"index": index, **given}


END = event(delta={}, finish_reason="tool_calls")
DONE = chat.DONE


def through(stream: StreamJoiner, data: bytes, cuts: Sequence[int] = (), *, whole: bool = True) -> bytes:
    """What the client gets of an answer that comes in these pieces."""
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    pieces = [data[start:stop] for start, stop in itertools.pairwise(places)]
    return b"".join(map(stream.feed, pieces)) + (stream.flush_rest() if whole else b"")


def told(data: bytes) -> list[Any]:
    """What the events of a stream carry, `[DONE]` left out."""
    carried = (sse.read_data(each) for each in sse.EventSplitter().feed(data))
    return [json.loads(each) for each in carried if each and each != b"[DONE]"]


def deltas(data: bytes) -> Iterator[dict[str, Any]]:
    return (payload["choices"][0]["delta"] for payload in told(data) if payload["choices"])


def text_of(data: bytes) -> str:
    return "".join(delta.get("content") or "" for delta in deltas(data))


def calls_of(data: bytes) -> list[tuple[int, str, str]]:
    """Index, id and arguments of each call, as a client puts them together by their index."""
    held: dict[int, list[str]] = {}
    for piece in (piece for delta in deltas(data) for piece in delta.get("tool_calls") or ()):
        known = held.setdefault(piece["index"], ["", ""])
        known[0] = piece.get("id") or known[0]
        known[1] += piece["function"].get("arguments") or ""
    return [(index, known[0], known[1]) for index, known in held.items()]


def reasons(data: bytes) -> list[str]:
    found = [choice.get("finish_reason") for payload in told(data) for choice in payload["choices"]]
    return [reason for reason in found if reason]


@pytest.mark.parametrize(
    "data",
    [
        streamed("Nothing was searched."),
        streamed("Look:", theirs(1), theirs(2)),
        streamed("No usage.", usage=False),
        streamed("CRLF.").replace(b"\n", b"\r\n"),
        streamed("CR.").replace(b"\n", b"\r"),
        streamed("No end.").removesuffix(DONE),
        streamed("No blank line.").rstrip(b"\n"),
        b": hello\n\n" + streamed("Comments.") + b": bye\n\n",
        b"event: message\nid: 7\ndata: {}\n\ndata: no json\n\ndata\n\n\n\n",
        b'data: 1\n\ndata: []\n\ndata: {"choices":[7]}\n\ndata: {"choices":{},"tool_calls":1}\n\n',
        event(delta={"tool_calls": [7, None]}, finish_reason="stop"),
        b'data: {"error":{"message":"broken","tool_calls":1}}\n\n',
        b"\xef\xbb\xbfdata: {}\n\n\xff\xfe\n\n",
        b"",
    ],
)
@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(0, 10_000), max_size=8))
def test_an_answer_without_calls_of_ours_passes_byte_for_byte(data: bytes, cuts: list[int]) -> None:
    stream = SEARCH_TOOL.open_stream_joiner(TOOL)
    assert (through(stream, data, cuts), stream.calls) == (data, ())


@pytest.mark.parametrize("ends", [b"\n", b"\r\n", b"\r"])
@settings(max_examples=40, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 10_000), max_size=8),
    text=st.text(max_size=20),
    calls=st.lists(st.sampled_from([ours(1), ours(2, "{"), theirs(1), theirs(2)]), unique=True, max_size=4),
)
def test_how_the_stream_was_sliced_makes_no_difference(
    ends: bytes, cuts: list[int], text: str, calls: list[chat.ToolCall]
) -> None:
    outcomes = []
    for places in (cuts, []):
        stream = SEARCH_TOOL.open_stream_joiner(TOOL)
        got = through(stream, streamed(text, *calls).replace(b"\n", ends), places)
        if stream.calls:
            stream.start_next_answer(may_answer_calls=True)
            got += through(stream, streamed("Done.", envelope=LATER).replace(b"\n", ends), places)
        outcomes.append((got, stream.calls))
    assert outcomes[0] == outcomes[1]


def test_each_event_passes_as_soon_as_it_is_whole() -> None:
    stream = SEARCH_TOOL.open_stream_joiner(TOOL)
    for each in chat.encode_stream(FIRST, chat.Reply("One two three four five six seven."), USAGE):
        assert (stream.feed(each[:-1]), stream.feed(each[-1:])) == (b"", each)


def test_an_answer_goes_on_as_if_it_had_never_ended() -> None:
    stream = SEARCH_TOOL.open_stream_joiner(TOOL)
    got = through(stream, streamed("Let me see", ours()))
    [call] = stream.calls
    assert (call, stream.is_done) == ('{"query":"budget"}', True)
    message = stream.start_next_answer(may_answer_calls=True)
    got += through(stream, streamed(", it was $5.", envelope=LATER))
    assert message == {
        "role": "assistant",
        "content": "Let me see",
        "tool_calls": [
            {
                "id": "call_r1",
                "type": "function",
                "function": {"name": TOOL, "arguments": '{"query":"budget"}'},
            }
        ],
    }
    assert (text_of(got), calls_of(got), reasons(got)) == ("Let me see, it was $5.", [], ["stop"])
    assert {(each["id"], each["created"], each["model"]) for each in told(got)} == {("chatcmpl-1", 1, "m-1")}
    assert [delta["role"] for delta in deltas(got) if "role" in delta] == ["assistant"]
    assert [each["usage"] for each in told(got) if each["usage"]] == [chat.DemoUsage(200, 20, 100).to_json()]
    assert got.count(DONE) == 1
    assert got.endswith(DONE)


def test_a_call_at_the_very_start_leaves_no_trace_but_the_role() -> None:
    stream = SEARCH_TOOL.open_stream_joiner(TOOL)
    got = through(stream, streamed("", ours()))
    assert list(deltas(got)) == [{"role": "assistant", "content": None, "refusal": None}]
    stream.start_next_answer(may_answer_calls=True)
    assert text_of(got + through(stream, streamed("Five."))) == "Five."


def test_a_sentence_that_has_ended_is_parted_from_what_follows() -> None:
    texts = []
    for before, after in (("Let me see.", "Five."), ("It was ", "five."), ("So", "\n- five")):
        stream = SEARCH_TOOL.open_stream_joiner(TOOL)
        got = through(stream, streamed(before, ours()))
        stream.start_next_answer(may_answer_calls=True)
        texts.append(text_of(got + through(stream, streamed(after))))
    assert texts == ["Let me see.\n\nFive.", "It was five.", "So\n- five"]


@pytest.mark.parametrize(
    ("calls", "kept"),
    [
        ((ours(), theirs(1)), [(0, "call_o1")]),
        ((theirs(1), ours()), [(0, "call_o1")]),
        (
            (theirs(1), ours(1), theirs(2), ours(2), theirs(3)),
            [(0, "call_o1"), (1, "call_o2"), (2, "call_o3")],
        ),
    ],
)
def test_beside_the_client_s_calls_ours_are_left_out_and_no_index_is_missing(
    calls: tuple[chat.ToolCall, ...], kept: list[tuple[int, str]]
) -> None:
    stream = SEARCH_TOOL.open_stream_joiner(TOOL)
    got = through(stream, streamed("Both.", *calls))
    assert [(index, name) for index, name, _ in calls_of(got)] == kept
    assert all(arguments == f'{{"path":"{index + 1}.py"}}' for index, _, arguments in calls_of(got))
    assert (reasons(got), stream.calls, got.count(DONE)) == (["tool_calls"], (), 1)
    assert TOOL.encode() not in got


def test_calls_are_told_apart_whatever_their_index() -> None:
    """Gemini gives every call of an answer the index 0, and some servers give none."""
    for index, ids in ((0, ("a", "b")), (None, ("a", "b")), (0, ("", "")), (None, ("", "")), (0, ("a", "a"))):
        mine, other = head(index, ids[0], TOOL, "{}"), head(index, ids[1], "open", "{}")
        got = through(SEARCH_TOOL.open_stream_joiner(TOOL), calling(mine) + calling(other) + END)
        pieces = [piece for delta in deltas(got) for piece in delta.get("tool_calls", ())]
        assert pieces == [other]


def test_an_id_that_changes_with_every_piece_makes_no_new_call() -> None:
    stream = SEARCH_TOOL.open_stream_joiner(TOOL)
    pieces = [
        {"index": 0, "id": f"x{at}", "function": {"arguments": part}}
        for at, part in enumerate('{"query":"a"}')
    ]
    through(stream, calling(head(0, "x", TOOL)) + b"".join(map(calling, pieces)) + END)
    assert list(stream.calls) == ['{"query":"a"}']


def test_a_name_in_pieces_is_waited_for() -> None:
    stream = SEARCH_TOOL.open_stream_joiner(TOOL)
    mine = calling(head(0, "a", "memory_")) + calling({"index": 0, "function": {"name": "search"}})
    other = calling(head(1, "b", "memory_")) + calling(
        {"index": 1, "function": {"name": "game", "arguments": "{}"}}
    )
    got = through(stream, mine + other + END)
    assert calls_of(got) == [(0, "b", "{}")]
    assert [piece for delta in deltas(got) for piece in delta.get("tool_calls", ())] == [
        head(0, "b", "memory_game", "{}")
    ]


def test_a_name_that_comes_behind_arguments_is_waited_for() -> None:
    for name in (TOOL, "open"):
        stream = SEARCH_TOOL.open_stream_joiner(TOOL)
        pieces = [{"index": 0, "id": "a", "function": {"arguments": '{"query":'}}]
        pieces.append({"index": 0, "function": {"name": name, "arguments": '"a"}'}})
        got = through(stream, b"".join(map(calling, pieces)) + END)
        shown = [] if name == TOOL else [(0, "a", '{"query":"a"}')]
        assert (calls_of(got), len(stream.calls)) == (shown, 1 - len(shown))


def test_a_name_that_is_said_again_with_each_piece_makes_no_new_call() -> None:
    for call_id in ("a", ""):
        stream = SEARCH_TOOL.open_stream_joiner(TOOL)
        pieces = [head(0, call_id, TOOL, part) for part in ('{"query":', '"{}"', "}", "")]
        through(stream, b"".join(map(calling, pieces)) + END)
        assert list(stream.calls) == ['{"query":"{}"}']


def test_a_call_that_never_says_its_name_is_the_client_s_to_judge() -> None:
    stream = SEARCH_TOOL.open_stream_joiner(TOOL)
    got = through(stream, calling({"index": 0, "id": "a"}) + END)
    assert [delta for delta in deltas(got) if delta] == [{"tool_calls": [{"index": 0, "id": "a"}]}]


def test_custom_calls_are_the_client_s() -> None:
    data = calling({"index": 0, "id": "a", "type": "custom", "custom": {"name": TOOL, "input": ""}}) + END
    assert through(SEARCH_TOOL.open_stream_joiner(TOOL), data) == data


def test_two_calls_of_ours_are_both_to_be_answered() -> None:
    stream = SEARCH_TOOL.open_stream_joiner(TOOL)
    got = through(stream, streamed("", ours(1), ours(2, '{"id":"m_1"}')))
    assert list(stream.calls) == ['{"query":"budget"}', '{"id":"m_1"}']
    assert (reasons(got), DONE in got) == ([], False)


@pytest.mark.parametrize("arguments", ["", "{", "[1]", "null", '"x"', "\ud800"])
def test_arguments_that_are_no_object_are_run_as_they_are_and_given_back_empty(arguments: str) -> None:
    stream = SEARCH_TOOL.open_stream_joiner(TOOL)
    through(stream, streamed("", ours(1, arguments)))
    assert list(stream.calls) == [arguments]
    [given_back] = stream.start_next_answer(may_answer_calls=True)["tool_calls"]
    assert given_back["function"] == {"name": TOOL, "arguments": "{}"}


@pytest.mark.parametrize("reason", ["length", "content_filter"])
def test_a_call_that_was_cut_short_is_left_out_and_the_answer_ends_as_it_did(reason: str) -> None:
    stream = SEARCH_TOOL.open_stream_joiner(TOOL)
    got = through(stream, streamed("Half", ours(1, '{"que'), reason=reason))
    assert (text_of(got), reasons(got), stream.calls, got.count(DONE)) == ("Half", [reason], (), 1)


def test_the_last_answer_ends_where_it_calls_once_more() -> None:
    stream = SEARCH_TOOL.open_stream_joiner(TOOL)
    got = through(stream, streamed("One", ours()))
    stream.start_next_answer(may_answer_calls=False)
    got += through(stream, streamed(" two", ours(), envelope=LATER))
    assert (text_of(got), reasons(got), stream.calls, got.count(DONE)) == ("One two", ["stop"], (), 1)


def test_a_stream_that_ends_without_saying_so_is_not_gone_on_with() -> None:
    stream = SEARCH_TOOL.open_stream_joiner(TOOL)
    got = through(stream, calling(head(0, "a", TOOL, "{}")))
    assert (got, stream.calls) == (b"", ())


@pytest.mark.parametrize(
    "data", [calling(head(0, "a", TOOL, "{}")) + DONE, calling(head(0, "a", TOOL, "{}")) + END]
)
def test_either_way_of_saying_so_is_enough(data: bytes) -> None:
    stream = SEARCH_TOOL.open_stream_joiner(TOOL)
    assert [through(stream, data), len(stream.calls)] == [b"", 1]


def test_comments_pass_at_every_stage_and_other_fields_stay() -> None:
    stream = SEARCH_TOOL.open_stream_joiner(TOOL)
    alive = b": keep-alive\n\n"
    first = through(stream, alive + streamed("", ours()).replace(DONE, alive + DONE))
    stream.start_next_answer(may_answer_calls=True)
    named = streamed("Five.", usage=False).replace(b"data: {", b"event: chunk\r\ndata: {")
    later = through(stream, alive + named)
    assert (first.count(alive), later.count(alive)) == (2, 1)
    assert later.count(b"event: chunk\r\ndata: {") == len(told(later))


def test_what_was_thought_goes_back_and_is_numbered_on() -> None:
    stream = SEARCH_TOOL.open_stream_joiner(TOOL)
    thought = [{"index": 0, "type": "reasoning.text", "text": "Hm"}, {"index": 1, "data": "sealed"}]
    data = event(delta={"role": "assistant", "reasoning_details": thought[:1], "reasoning_content": "Hm"})
    data += event(delta={"reasoning_details": [{"index": 0, "text": "m", "signature": "s"}, thought[1]]})
    data += (
        calling({**head(0, "a", TOOL, "{}"), "extra_content": {"google": {"thought_signature": "z"}}}) + END
    )
    got = through(stream, data)
    message = stream.start_next_answer(may_answer_calls=True)
    assert message["reasoning_content"] == "Hm"
    assert message["reasoning_details"] == [
        {"index": 0, "type": "reasoning.text", "text": "Hmm", "signature": "s"},
        {"index": 1, "data": "sealed"},
    ]
    assert message["tool_calls"][0]["extra_content"] == {"google": {"thought_signature": "z"}}
    got = through(stream, event(delta={"reasoning_details": [{"index": 0, "text": "So"}]}))
    assert [delta["reasoning_details"] for delta in deltas(got)] == [[{"index": 2, "text": "So"}]]


def test_usage_is_added_up_wherever_a_provider_tells_it() -> None:
    """In every event, in the event of the end, in the choice (Kimi), or beside it (Groq)."""
    counts = {"prompt_tokens": 5, "completion_tokens": 1, "details": {"cached_tokens": 2}, "note": None}
    places: list[dict[str, Any]] = [
        {"usage": counts},
        {"x_groq": {"usage": counts}},
        {"choices": [{"delta": {}, "usage": counts}]},
    ]
    for place in places:
        stream = SEARCH_TOOL.open_stream_joiner(TOOL)
        choice = {"delta": {"tool_calls": [head(0, "a", TOOL, "{}")]}, "finish_reason": "tool_calls"}
        choice |= place.get("choices", [{}])[0] | {"delta": choice["delta"]}
        through(stream, b"data: %b\n\n" % json.dumps({**place, "choices": [choice]}).encode())
        stream.start_next_answer(may_answer_calls=True)
        ends = {"delta": {}, "finish_reason": "stop", **place.get("choices", [{}])[0]}
        got = through(stream, b"data: %b\n\n" % json.dumps({**place, "choices": [ends]}).encode())
        total = {"prompt_tokens": 10, "completion_tokens": 2, "details": {"cached_tokens": 4}, "note": None}
        assert json.dumps(total) in json.dumps(told(got))


def test_an_error_after_a_call_reaches_the_client_and_ends_the_matter() -> None:
    stream = SEARCH_TOOL.open_stream_joiner(TOOL)
    error = b'data: {"error":{"message":"overloaded"}}\n\n'
    got = through(stream, calling(head(0, "a", TOOL, "{}")) + END + error)
    assert (got, stream.calls) == (error, ())


def test_an_event_too_large_to_be_looked_at_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 1_000)
    data = event(delta={"content": "x" * 5_000}) + streamed("Small.")
    assert through(SEARCH_TOOL.open_stream_joiner(TOOL), data, range(0, 6_000, 100)) == data
