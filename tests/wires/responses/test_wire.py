"""A Responses body as the wire reads it: what is refused, how it grows, and what it is written as again."""

import json
from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.core.message import iter_units
from compaction_proxy.wires.body import RequestBody, parse_body, rewrite_messages
from compaction_proxy.wires.incremental_reader import KEY_BYTES, IncrementalReader
from compaction_proxy.wires.responses.wire import RESPONSES
from tests.helpers.wires.responses_items import (
    ANSWERED,
    ASKED,
    CALLED,
    COMPACTED,
    CUSTOM,
    PATCHED,
    SAID,
    SEARCHED,
    THOUGHT,
    body,
    raw_of,
    records,
)

# The machine may be busy.
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
KEY = bytes(range(KEY_BYTES))


def reason(raw: bytes) -> str:
    with pytest.raises(UnreadableBodyError) as refused:
        parse_body(raw, RESPONSES)
    return refused.value.reason


def test_a_text_for_an_input_is_what_one_user_message_says() -> None:
    cut = parse_body(body('say "hi"'), RESPONSES)

    [message] = [RESPONSES.parse_message(each) for each in cut.messages]
    assert (message.role, message.text) == ("user", 'say "hi"')
    assert rewrite_messages(cut, [message]) == cut.raw  # which is shorter than a list
    assert (
        json.loads(rewrite_messages(cut, [message] * 2))["input"]
        == [{"role": "user", "content": 'say "hi"'}] * 2
    )


def test_instructions_tools_and_format_count_and_the_output_has_a_limit() -> None:
    cut = parse_body(
        body([ASKED], instructions="be", tools=[1], text={"a": 1}, max_output_tokens=9), RESPONSES
    )

    assert (cut.prompt_members, cut.max_output) == (('"be"', "[1]", '{"a": 1}'), 9)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (body([ASKED], previous_response_id="resp_1"), "stateful"),
        (body([ASKED], conversation={"id": "conv_1"}), "stateful"),
        (body([ASKED, {"type": "item_reference", "id": "msg_1"}]), "stateful"),
        (body([ASKED, {"id": "msg_1"}]), "stateful"),
        (body([ASKED], context_management=[{"type": "compaction"}]), "provider-compacts"),
        (body([ASKED, {"type": "compaction_trigger"}]), "provider-compacts"),
        (body([ASKED, 1]), "no-messages"),
        (body([]), "no-messages"),
        (body({}), "no-array"),
        (b'{"messages":[{}]}', "no-messages"),
    ],
)
def test_what_only_the_provider_can_put_together_is_left_as_it_is(raw: bytes, expected: str) -> None:
    assert reason(raw) == expected


def test_members_that_say_nothing_keep_nobody_from_reading() -> None:
    raw = body([ASKED], previous_response_id=None, conversation=None, context_management=[])

    assert parse_body(raw, RESPONSES).messages == (raw_of(ASKED),)


def event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


CREATED = event("response.created", response={"error": None, "tools": [{"type": "function"}]})


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (b"", True),
        (b": ping\n\n", True),
        (CREATED, True),
        (CREATED + event("response.queued") + event("response.in_progress") + b"event: resp", True),
        (CREATED + event("response.output_item.added"), False),
        (CREATED + event("error", code="context_length_exceeded"), False),
        (event("response.failed"), False),
        (b"data: x\n\n", False),
        (b"data: [1]\n\n", False),
    ],
)
def test_a_stream_is_held_back_as_long_as_nothing_of_the_answer_has_come(
    seen: bytes,
    expected: bool,  # noqa: FBT001 - a case of the table
) -> None:
    assert RESPONSES.may_hold_back_stream(seen) is expected


TEXT = st.text(st.characters(codec=None) | st.sampled_from('"\\/:{}[], '), max_size=8)
IDS = st.sampled_from(["a", "b", "c"])
THOUGHTS = st.just(THOUGHT) | st.just({**THOUGHT, "id": "rs_2"})
MESSAGES = st.builds(
    lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "system"]), TEXT
)
SPOKEN = st.builds(lambda text: {**SAID, "content": [{"type": "output_text", "text": text}]}, TEXT)
CALLS = st.builds(lambda called: {**CALLED, "call_id": called}, IDS)
CUSTOMS = st.builds(lambda called: {**CUSTOM, "call_id": called}, IDS)
RESULTS = st.builds(lambda called, text: {**ANSWERED, "call_id": called, "output": text}, IDS, TEXT)
DONE = st.builds(lambda called: {**PATCHED, "call_id": called}, IDS)
ITEMS = (
    MESSAGES | THOUGHTS | SPOKEN | CALLS | CUSTOMS | RESULTS | DONE | st.just(SEARCHED) | st.just(COMPACTED)
)
LAYOUTS: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [{"separators": (",", ":")}, {"ensure_ascii": False}, {"indent": 1}]
)
REFUSED = st.sampled_from([{"type": "item_reference", "id": "x"}, {"type": "compaction_trigger"}, 1])


def judged(reader: Callable[[bytes], RequestBody], raw: bytes) -> tuple[Any, ...] | str:
    try:
        read_body = reader(raw)
    except UnreadableBodyError as refused:
        return refused.reason
    return read_body.messages_slice, read_body.messages, read_body.model, read_body.max_output


@st.composite
def histories(draw: st.DrawFn) -> list[bytes]:
    """Bodies as one client might send them after one another."""
    items: Any = draw(st.lists(ITEMS, min_size=1, max_size=4))
    layout, raws = draw(LAYOUTS), list[bytes]()
    members: list[dict[str, Any]] = [{}, {"store": False}, {"previous_response_id": "r"}]
    behind = draw(st.sampled_from(members))
    for _ in range(draw(st.integers(1, 6))):
        fields = {"model": "m", "input": items, **behind}
        raws.append(json.dumps(fields, **layout).encode("utf-8", "replace"))
        if draw(st.integers(0, 9)) == 0:
            items = draw(st.lists(ITEMS | REFUSED, min_size=1, max_size=2) | TEXT)
        elif isinstance(items, list):
            items = [*items, *draw(st.lists(ITEMS, max_size=4))]
    return raws


@UNHURRIED
@given(histories())
def test_a_body_that_has_grown_is_read_as_if_nothing_had_been_read_before(raws: list[bytes]) -> None:
    reader = IncrementalReader(KEY, RESPONSES)
    for raw in raws:
        grown = judged(partial(reader.read, tenant="t", conversation="c"), raw)
        assert grown == judged(partial(parse_body, wire=RESPONSES), raw)


def test_late_pieces_are_cut_out_alone_where_the_list_has_only_grown() -> None:
    reader = IncrementalReader(KEY, RESPONSES)
    first = reader.read(body([ASKED, THOUGHT, CALLED, ANSWERED]), "t", "c")
    grown = reader.read(body([ASKED, THOUGHT, CALLED, ANSWERED, THOUGHT, SAID, ASKED]), "t", "c")
    compacted = reader.read(
        body([ASKED, THOUGHT, CALLED, ANSWERED, THOUGHT, SAID, ASKED, COMPACTED, ASKED]), "t", "c"
    )

    assert (grown.previous_fingerprint, grown.new_pieces) == (
        first.fingerprint,
        (b",".join(map(raw_of, [THOUGHT, SAID])), raw_of(ASKED)),
    )
    assert (compacted.previous_fingerprint, len(compacted.new_pieces)) == (b"", 2)


@UNHURRIED
@given(st.lists(ITEMS, min_size=1, max_size=12), LAYOUTS)
def test_untouched_pieces_are_the_client_s_list_and_its_bytes(
    items: list[Any], layout: dict[str, Any]
) -> None:
    raw = json.dumps({"input": items, "model": "m"}, **layout).encode("utf-8", "replace")
    cut = parse_body(raw, RESPONSES)
    listed = [RESPONSES.parse_message(each) for each in cut.messages]
    written = rewrite_messages(cut, listed)

    assert json.loads(written) == json.loads(raw)
    assert [each.raw for each in listed] == list(cut.messages)
    assert all(
        part in raw
        for each in cut.messages
        for part in RESPONSES.split_message_list(memoryview(b"[%b]" % each))
    )
    assert written[: cut.messages_slice.start] == raw[: cut.messages_slice.start]


def orphans(items: list[Any]) -> list[str]:
    """Ids of results without a call before them, and of reasoning without what came of it."""
    found: list[str] = []
    open_calls: set[tuple[str, str]] = set()
    for index, item in enumerate(items):
        kind = item.get("type", "")
        if kind.endswith("_call"):
            open_calls.add((item["type"], item.get("call_id", "")))
        elif kind.endswith("_output"):
            key = (kind.removesuffix("_output"), item["call_id"])
            found += [] if key in open_calls else [item["call_id"]]
        elif kind == "reasoning" and index + 1 == len(items):
            found.append(item["id"])
    return found


@st.composite
def sessions(draw: st.DrawFn) -> list[Any]:
    """Inputs as clients send them: each call is answered, at once or behind others of its answer."""
    items: list[Any] = []
    for number in range(draw(st.integers(1, 6))):
        items.append({"role": "user", "content": f"turn {number}"})
        for step in range(draw(st.integers(0, 3))):
            items += [THOUGHT] if draw(st.booleans()) else []
            ids = [f"c{number}.{step}.{k}" for k in range(draw(st.integers(1, 3)))]
            calls = [{**CALLED, "call_id": each} for each in ids]
            results = [{**ANSWERED, "call_id": each} for each in ids]
            apart = draw(st.booleans())
            items += (
                [each for pair in zip(calls, results, strict=True) for each in pair]
                if apart
                else calls + results
            )
        items.append(SAID)
    return items


@UNHURRIED
@given(sessions(), st.data())
def test_whatever_units_leave_no_result_is_an_orphan_and_calls_keep_their_reasoning(
    items: list[Any], data: st.DataObject
) -> None:
    listed = records(items)
    kept = [each for each in iter_units(listed) if data.draw(st.booleans())]
    left = json.loads(
        b"[%b]" % RESPONSES.join_messages([each for span in kept for each in listed[span.start : span.stop]])
    )

    assert orphans(left) == []
    before = reasoned(items)
    assert [called for called, thoughts in reasoned(left).items() if thoughts < before[called]] == []


def reasoned(items: list[Any]) -> dict[str, int]:
    """Whether a thought stands before a call, nothing but calls and results between; by the call's id."""
    found: dict[str, int] = {}
    for is_step, together in groupby(items, lambda each: each.get("type") not in {None, "message"}):
        thoughts = 0
        for each in together if is_step else ():
            thoughts = thoughts or int(each["type"] == "reasoning")
            if each["type"] == "function_call":
                found[each["call_id"]] = thoughts
    return found
