"""Compaction triggers and items of our own in a Responses body."""

import json
from typing import Any

import pytest

from compaction_proxy.wires.responses.compaction_item import (
    TOKEN_PREFIX,
    build_item,
    build_response,
    build_stream,
    demote_privileged_item,
    expand_tokens,
    parse_triggered_request,
)

TRIGGER = {"type": "compaction_trigger"}
RULES = {"type": "message", "role": "developer", "content": "rules"}
ASKED = {"role": "user", "content": "do it"}
ASKED_IN_PARTS = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "do it"}]}
RECORD = {"role": "user", "content": "record"}
OURS = build_item("cmp_1", TOKEN_PREFIX + "x")
THEIRS = build_item("cmp_2", "gAAA")


def body(*items: Any, **members: Any) -> bytes:
    return json.dumps({"model": "m", "input": list(items), **members}).encode()


def expanded(*items: Any, held: list[Any]) -> list[Any]:
    raw = expand_tokens(body(*items), lambda _: json.dumps(held).encode())
    listed: list[Any] = json.loads(raw)["input"]
    return listed


def test_a_trigger_is_the_last_item_and_is_taken_out() -> None:
    found = parse_triggered_request(body(ASKED, TRIGGER, stream=True))
    assert found is not None
    assert (json.loads(found.raw)["input"], found.is_streamed) == ([ASKED], True)


@pytest.mark.parametrize(
    "raw",
    [
        body(TRIGGER, ASKED),
        body(TRIGGER, ASKED, TRIGGER),
        body({"role": "user", "content": "compaction_trigger"}),
        json.dumps({"input": "compaction_trigger"}).encode(),
        b'"compaction_trigger"',
        b"compaction_trigger",
    ],
)
def test_no_other_body_ends_in_a_trigger(raw: bytes) -> None:
    assert parse_triggered_request(raw) is None


def test_what_the_client_kept_of_a_token_is_not_put_back_twice() -> None:
    held = [ASKED, RECORD, RULES]
    assert expanded(OURS, held=held) == held
    assert expanded(ASKED_IN_PARTS, OURS, held=held) == [ASKED_IN_PARTS, RECORD, RULES]
    assert expanded(OURS, ASKED_IN_PARTS, held=held) == [*held, ASKED_IN_PARTS]


def test_a_body_that_is_compacted_again_ends_in_the_latest_message_of_the_user() -> None:
    first = {"role": "user", "content": "the task"}
    held = json.dumps([first, RECORD, ASKED]).encode()
    raw = expand_tokens(body(first, ASKED_IN_PARTS, OURS), lambda _: held, with_latest=True)
    assert json.loads(raw)["input"] == [first, ASKED_IN_PARTS, RECORD, ASKED]


def test_instructions_of_the_request_replace_those_of_a_token() -> None:
    new = {**RULES, "content": "newer rules"}
    assert expanded(OURS, new, held=[RULES, RECORD]) == [RECORD, new]


def test_a_token_that_comes_twice_is_put_back_once() -> None:
    assert expanded(OURS, OURS, held=[RECORD]) == [RECORD]


def test_bodies_without_a_token_of_ours_stay_the_very_bytes() -> None:
    for raw in (
        body(THEIRS, ASKED),
        body({"role": "user", "content": TOKEN_PREFIX}),
        b"no JSON",
        b'{"input":"x"}',
    ):
        assert expand_tokens(raw, lambda _: b"[]") is raw


def test_a_stand_in_is_sealed_as_a_message_of_the_user() -> None:
    assert (
        json.loads(demote_privileged_item(json.dumps({**RULES, "role": "system"}).encode()))["role"] == "user"
    )
    call = json.dumps({"type": "function_call", "call_id": "a", "name": "n", "arguments": "{}"}).encode()
    assert demote_privileged_item(call) is call


def test_a_stream_has_the_item_once_done_and_then_completes() -> None:
    response = build_response("resp_1", "m", 1, OURS, {"total_tokens": 3})
    lines = build_stream(response).decode().splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert [each["sequence_number"] for each in events] == list(range(5))
    assert [each["item"] for each in events if each["type"] == "response.output_item.done"] == [OURS]
    assert events[-1] == {"type": "response.completed", "sequence_number": 4, "response": response}
