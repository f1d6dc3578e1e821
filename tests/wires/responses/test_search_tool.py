"""The search tool on the Responses wire: where it is offered, what is hidden, and how answers are joined."""

import json
from typing import Any

import pytest

from compaction_proxy.core.search_tool import TOOL_NAME
from compaction_proxy.wires.messages.search_tool import SEARCH_TOOL as MESSAGES_TOOL
from compaction_proxy.wires.responses.search_tool import SEARCH_TOOL, build_message, must_client_answer
from compaction_proxy.wires.sse import EventSplitter, read_data

SAID = {"type": "message", "id": "msg_1", "role": "assistant", "content": []}
SEARCHED = {
    "type": "function_call", "id": "fc_1", "call_id": "a", "name": TOOL_NAME, "arguments": '{"query":"x"}',
}  # fmt: skip
OPENED = {**SEARCHED, "id": "fc_2", "call_id": "b", "name": "open"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"}


def supports_tool(**members: Any) -> bool:
    raw = json.dumps({"input": [], "store": False, **members}).encode()
    return SEARCH_TOOL.inspect_tool_support(raw, TOOL_NAME).can_add_tool


def whole(*items: Any, number: int = 1, **members: Any) -> bytes:
    """An answer that is no stream."""
    usage = {"input_tokens": 10, "output_tokens": 1}
    return json.dumps(
        {"id": f"resp_{number}", "status": "completed", "output": items, "usage": usage, **members}
    ).encode()


def stream(*items: Any, number: int = 1, status: str = "completed") -> bytes:
    """The events of an answer."""
    response = {"id": f"resp_{number}", "usage": {"input_tokens": 10, "output_tokens": 1}}
    events: list[dict[str, Any]] = [{"type": "response.created", "response": response}]
    for index, item in enumerate(items):
        events += [
            {"type": f"response.output_item.{step}", "output_index": index, "item": item}
            for step in ("added", "done")
        ]
    events.append({"type": f"response.{status}", "response": {**response, "output": items}})
    return b"".join(
        b"data: %b\n\n" % json.dumps({**each, "sequence_number": number}).encode()
        for number, each in enumerate(events)
    )


def list_payloads(data: bytes) -> list[Any]:
    return [json.loads(read_data(event)) for event in EventSplitter().feed(data)]


def list_items(payloads: list[Any]) -> list[tuple[int, str]]:
    """Returns the output index and the id of each item that is done."""
    return [
        (each["output_index"], each["item"]["id"])
        for each in payloads
        if each["type"] == "response.output_item.done"
    ]


def test_the_tool_is_a_function_that_is_not_strict_with_the_same_arguments_as_on_other_wires() -> None:
    defined = json.loads(SEARCH_TOOL.definition_json)
    other = json.loads(MESSAGES_TOOL.definition_json)
    assert defined == {
        "type": "function",
        "name": TOOL_NAME,
        "description": other["description"],
        "parameters": other["input_schema"],
        "strict": False,
    }


@pytest.mark.parametrize(
    "members",
    [{}, {"tools": [OPENED], "tool_choice": "auto"}, {"text": {"format": {"type": "text"}}}],
)
def test_the_tool_is_offered_where_the_provider_stores_nothing(members: dict[str, Any]) -> None:
    assert supports_tool(**members)


@pytest.mark.parametrize(
    "members",
    [
        {"store": True},
        {"store": None},
        {"background": True},
        {"previous_response_id": "resp_0"},
        {"conversation": "conv_1"},
        {"prompt": {"id": "pmpt_1"}},
        {"tools": [OPENED], "tool_choice": "required"},
        {"tool_choice": "auto"},
        {"text": {"format": {"type": "json_object"}}},
    ],
)
def test_the_tool_is_not_offered_where_an_answer_could_not_go_on(members: dict[str, Any]) -> None:
    assert not supports_tool(**members)


@pytest.mark.parametrize(
    ("item", "expected"),
    [(SAID, False), (THOUGHT, False), ({"type": "web_search_call"}, False), (OPENED, True), ({}, True)],
)
def test_the_client_answers_its_own_calls_and_items_of_unknown_type(
    item: dict[str, Any],
    expected: bool,  # noqa: FBT001 - a case of the table
) -> None:
    assert must_client_answer(item) is expected


def test_reasoning_with_content_goes_back_unchanged_with_all_ids() -> None:
    assert build_message([THOUGHT, SAID, SEARCHED]) == {"output": [THOUGHT, SAID, SEARCHED]}


def test_reasoning_without_content_is_left_out_with_the_ids_of_the_other_items() -> None:
    empty = {**THOUGHT, "encrypted_content": None}
    [said, searched] = build_message([empty, SAID, SEARCHED])["output"]
    assert (said, searched) == (
        {key: value for key, value in SAID.items() if key != "id"},
        {key: value for key, value in SEARCHED.items() if key != "id"},
    )


def test_arguments_that_are_no_object_go_back_empty_and_a_call_without_an_id_gets_one() -> None:
    broken = {"type": "function_call", "name": TOOL_NAME, "arguments": '{"que'}
    [call] = build_message([broken])["output"]
    assert call == {**broken, "call_id": "call_0", "arguments": "{}"}
    assert SEARCH_TOOL.build_turn({"output": [call]}, ["found"]) == [
        call,
        {"type": "function_call_output", "call_id": "call_0", "output": "found"},
    ]


def test_a_stream_that_goes_on_is_one_response_with_the_items_of_both_answers() -> None:
    joiner = SEARCH_TOOL.open_stream_joiner(TOOL_NAME)
    first = list_payloads(joiner.feed(stream(SAID, SEARCHED)))
    assert (joiner.calls, list_items(first)) == (('{"query":"x"}',), [(0, "msg_1")])
    assert [each["type"] for each in first][-1] == "response.output_item.done"  # the end is kept back

    joiner.start_next_answer(may_answer_calls=True)
    later = {**SAID, "id": "msg_2"}
    second = list_payloads(joiner.feed(stream(later, OPENED, number=2)))
    assert list_items(second) == [(1, "msg_2"), (2, "fc_2")]
    numbers = [each["sequence_number"] for each in [*first, *second]]
    assert numbers == list(range(len(numbers)))
    assert second[-1]["response"] == {
        "id": "resp_1",
        "output": [SAID, later, OPENED],
        "usage": {"input_tokens": 20, "output_tokens": 2},
    }


def test_a_search_next_to_a_call_of_the_client_is_removed_and_not_answered() -> None:
    joiner = SEARCH_TOOL.open_stream_joiner(TOOL_NAME)
    payloads = list_payloads(joiner.feed(stream(SEARCHED, OPENED)))
    assert (joiner.calls, list_items(payloads)) == ((), [(0, "fc_2")])
    assert payloads[-1]["response"]["output"] == [OPENED]


def test_an_error_is_an_event_with_the_documented_members_and_the_next_number() -> None:
    joiner = SEARCH_TOOL.open_stream_joiner(TOOL_NAME)
    joiner.feed(stream(SAID, SEARCHED))
    error = {"message": "gone", "code": "upstream_unreachable"}
    [event] = list_payloads(joiner.encode_error_event(json.dumps({"error": error}).encode()))
    assert event == {
        "type": "error", "sequence_number": 3, "code": "upstream_unreachable", "message": "gone",
        "param": None, "error": error,
    }  # fmt: skip


def test_whole_answers_are_joined_and_one_without_a_search_stays_the_same_bytes() -> None:
    plain = whole(SAID, OPENED)
    assert SEARCH_TOOL.open_answer_joiner(TOOL_NAME).join_answer(plain, may_answer_calls=True) is plain

    joiner = SEARCH_TOOL.open_answer_joiner(TOOL_NAME)
    assert joiner.join_answer(whole(SAID, SEARCHED), may_answer_calls=True) is None
    assert (joiner.calls, joiner.message) == (('{"query":"x"}',), {"output": [SAID, SEARCHED]})
    later = {**SAID, "id": "msg_2"}
    body = joiner.join_answer(whole(later, number=2), may_answer_calls=True)
    assert json.loads(body or b"") == {
        "id": "resp_1",
        "status": "completed",
        "output": [SAID, later],
        "usage": {"input_tokens": 20, "output_tokens": 2},
    }


def test_an_answer_that_was_cut_short_is_not_gone_on_with() -> None:
    joiner = SEARCH_TOOL.open_answer_joiner(TOOL_NAME)
    body = joiner.join_answer(whole(SAID, SEARCHED, status="incomplete"), may_answer_calls=True)
    assert json.loads(body or b"")["output"] == [SAID]
