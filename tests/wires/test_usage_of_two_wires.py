"""What answers on the Responses and the Messages wire say of tokens, however they came."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from compaction_proxy.wires.messages.wire import MESSAGES
from compaction_proxy.wires.responses.wire import RESPONSES
from compaction_proxy.wires.usage import TokenUsage, UsageTap

STREAM = "text/event-stream"
KEPT_BYTES = 65_536
USED = {"input_tokens": 90, "input_tokens_details": {"cached_tokens": 64}, "output_tokens": 7}
LURE = '"usage":{"input_tokens":1,"output_tokens":1}}}'


def watched(
    tap: Callable[[str, str], UsageTap], pieces: Sequence[bytes], kind: str = STREAM
) -> TokenUsage | None:
    made = tap(kind, "")
    for piece in pieces:
        made.feed(piece)
    return made.result()


def event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


def response(text: str, **fields: Any) -> dict[str, Any]:
    """An answer in the order in which the provider writes it: usage behind output and tools."""
    output = [{"type": "message", "content": [{"type": "output_text", "text": text}]}]
    return {"id": "r", "status": "completed", "output": output, "tools": [], **fields, "metadata": {}}


CREATED = event("response.created", response=response("", usage=None))


@pytest.mark.parametrize("status", ["completed", "incomplete", "failed"])
def test_a_stream_ends_with_an_event_that_tells_usage_and_status(status: str) -> None:
    ended = event(f"response.{status}", response=response(LURE, usage=USED) | {"status": status})

    assert watched(RESPONSES.open_tap, [CREATED, ended, b"data: [DONE]\n\n"]) == TokenUsage(90, 7, 64, status)


@pytest.mark.parametrize("size", [KEPT_BYTES - 400, KEPT_BYTES, 3_000_000])
@pytest.mark.parametrize("behind", [{}, {"sequence_number": 9}])
def test_usage_is_found_behind_an_output_of_megabytes(size: int, behind: dict[str, Any]) -> None:
    ended = event("response.completed", response=response(LURE * (size // len(LURE)), usage=USED), **behind)
    found = watched(RESPONSES.open_tap, [CREATED, ended[:1_000], ended[1_000:]])

    assert found is not None
    assert found._replace(finish_reason="") == TokenUsage(90, 7, 64)


def test_text_that_is_cut_in_two_is_not_taken_for_usage() -> None:
    text = (LURE + " ") * 5_000

    assert (
        watched(RESPONSES.open_tap, [event("response.completed", response=response(text, usage=None))])
        is None
    )
    assert watched(RESPONSES.open_tap, [event("response.output_text.done", text=text, usage=USED)]) is None


@pytest.mark.parametrize("size", [1, KEPT_BYTES, 1_000_000])
def test_a_json_answer_tells_usage_and_status(size: int) -> None:
    raw = json.dumps(response("x" * size, usage=USED)).encode()
    found = watched(RESPONSES.open_tap, [raw], "application/json")

    assert found is not None
    assert found[:3] == TokenUsage(90, 7, 64)[:3]


@pytest.mark.parametrize(
    "used", [{}, {"input_tokens": -1}, {"input_tokens": True}, {"input_tokens": 10**12}, None]
)
def test_numbers_that_cannot_be_true_tell_nothing(used: Any) -> None:
    assert (
        watched(RESPONSES.open_tap, [event("response.completed", response=response("", usage=used))]) is None
    )


BEGUN = event(
    "message_start",
    message={"usage": {"input_tokens": 10, "cache_creation_input_tokens": 5, "cache_read_input_tokens": 80}},
)
ENDED = event("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 7})


@pytest.mark.parametrize("size", [0, 100, 200_000])
def test_a_messages_stream_tells_its_input_at_the_beginning_and_its_output_at_the_end(size: int) -> None:
    said = event("content_block_delta", delta={"text": LURE * (size // len(LURE))})

    assert watched(MESSAGES.open_tap, [BEGUN, said, ENDED]) == TokenUsage(95, 7, 80, "end_turn")
    assert watched(MESSAGES.open_tap, [BEGUN, said]) == TokenUsage(95, 0, 80, "")


def test_what_a_messages_stream_tells_at_its_end_is_believed_before_its_beginning() -> None:
    begun = event("message_start", message={"usage": {"input_tokens": 0, "output_tokens": 0}})
    ended = event("message_delta", delta={}, usage={"input_tokens": 90, "output_tokens": 7})

    assert watched(MESSAGES.open_tap, [begun, ended]) == TokenUsage(90, 7)


def test_a_json_message_tells_all_at_once() -> None:
    used = {"input_tokens": 10, "output_tokens": 7, "cache_read_input_tokens": 80}
    raw = json.dumps({"type": "message", "stop_reason": "max_tokens", "usage": used}).encode()

    assert watched(MESSAGES.open_tap, [raw], "application/json") == TokenUsage(90, 7, 80, "max_tokens")
