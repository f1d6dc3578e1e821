"""Refusals of a request's length are found before anything is relayed, in errors and in streams."""

import asyncio
import gzip
import json
from typing import Any

import pytest

from compaction_proxy.gateway.overflow_probe import HOLD_BYTES, detect_overflow
from compaction_proxy.gateway.upstream import UpstreamResponse
from compaction_proxy.wires.chat.wire import CHAT
from compaction_proxy.wires.context_errors import Overflow
from compaction_proxy.wires.messages.wire import MESSAGES
from compaction_proxy.wires.responses.wire import RESPONSES

TOO_LONG = {"type": "invalid_request_error", "message": "prompt is too long: 2600 tokens > 2000 maximum"}
FOUND = Overflow("context", limit_tokens=2_000, used_tokens=2_600)
STREAM = (b"content-type", b"text/event-stream; charset=utf-8")
JSON = (b"content-type", b"application/json")


def event(**told: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (told["type"].encode(), json.dumps(told).encode())


REFUSAL = event(type="error", error=TOO_LONG)
START = event(type="message_start", message={"id": "m", "content": []})
PING = event(type="ping")
WORD = event(type="content_block_delta", delta={"type": "text_delta", "text": "an error"})


class Reply:
    """An answer in pieces, after which nothing comes until it is closed.

    Attributes:
        read_count: How many pieces were read.
    """

    reason = b""

    def __init__(self, status: int, *pieces: bytes, fields: list[tuple[bytes, bytes]], ends: bool) -> None:
        self.status = status
        self.headers = fields
        self.read_count = 0
        self._pieces = list(pieces)
        self._ends = ends

    async def read(self) -> bytes:
        if not self._pieces:
            return b"" if self._ends else await asyncio.Future()
        self.read_count += 1
        return self._pieces.pop(0)

    async def aclose(self) -> None:
        pass


def answer(
    *pieces: bytes,
    status: int = 200,
    kind: tuple[bytes, bytes] = STREAM,
    ends: bool = True,
    encoding: bytes = b"",
) -> tuple[UpstreamResponse, Reply]:
    fields = [kind, *([(b"content-encoding", encoding)] if encoding else [])]
    reply = Reply(status, *pieces, fields=fields, ends=ends)
    return UpstreamResponse(reply), reply


@pytest.mark.parametrize("status", [400, 413])
async def test_an_error_that_refuses_the_length_is_found_and_can_still_be_relayed(status: int) -> None:
    body = json.dumps({"error": TOO_LONG}).encode()
    response, _ = answer(body[:9], body[9:], status=status, kind=JSON)
    found = await detect_overflow(response, CHAT)
    assert (found and (found.kind, found.limit_tokens)) == ("context", 2_000)
    assert [await response.read() for _ in range(3)] == [body[:9], body[9:], b""]


async def test_a_compressed_error_is_read() -> None:
    body = gzip.compress(json.dumps({"error": TOO_LONG}).encode())
    response, _ = answer(body, status=400, kind=JSON, encoding=b"gzip")
    assert await detect_overflow(response, CHAT) == FOUND


@pytest.mark.parametrize(
    ("status", "message"),
    [(400, "no such model"), (401, "bad key"), (500, "error"), (302, TOO_LONG["message"])],
)
async def test_other_errors_say_nothing_of_the_length(status: int, message: str) -> None:
    response, _ = answer(json.dumps({"error": {"message": message}}).encode(), status=status, kind=JSON)
    assert await detect_overflow(response, CHAT) is None


@pytest.mark.parametrize("kind", [STREAM, (b"content-type", b" Text/Event-Stream")])
async def test_a_refusal_inside_a_stream_is_found_behind_events_that_say_nothing(
    kind: tuple[bytes, bytes],
) -> None:
    pieces = START, PING, REFUSAL
    response, _ = answer(*pieces, kind=kind)
    assert await detect_overflow(response, MESSAGES) == FOUND
    assert [await response.read() for _ in pieces] == list(pieces)


async def test_a_refusal_as_a_whole_answer_with_status_200_is_found() -> None:
    response, _ = answer(json.dumps({"error": TOO_LONG}).encode(), kind=JSON)
    assert await detect_overflow(response, CHAT) == FOUND


async def test_a_stream_is_relayed_as_soon_as_it_says_something() -> None:
    response, reply = answer(START, WORD, REFUSAL)
    assert await detect_overflow(response, MESSAGES) is None
    assert reply.read_count == 2


@pytest.mark.parametrize(("kind", "encoding"), [(JSON, b""), (STREAM, b"gzip")])
async def test_what_is_no_plain_stream_is_not_held_back(kind: tuple[bytes, bytes], encoding: bytes) -> None:
    response, reply = answer(START, PING, WORD, kind=kind, encoding=encoding)
    assert await detect_overflow(response, MESSAGES) is None
    assert reply.read_count == 1


@pytest.mark.virtual_time
async def test_a_stream_that_falls_silent_is_held_back_for_a_limited_time() -> None:
    response, _ = answer(START, ends=False)
    async with asyncio.timeout(60):
        assert await detect_overflow(response, MESSAGES) is None
    assert await response.read() == START
    await response.aclose()


async def test_a_stream_that_says_nothing_is_held_back_up_to_a_number_of_bytes() -> None:
    created = event(type="response.created", response={"tools": "a tool " * 5_000})
    pieces = [created] * (HOLD_BYTES // len(created) + 9)
    response, reply = answer(*pieces)
    assert await detect_overflow(response, RESPONSES) is None
    assert reply.read_count == HOLD_BYTES // len(created) + 1
