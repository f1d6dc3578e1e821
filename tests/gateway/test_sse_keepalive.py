"""Comments in the silences of event streams: where they stand, and where none may."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from compaction_proxy.gateway.sse_keepalive import COMMENT, KeepaliveChannel, can_take_comments

pytestmark = pytest.mark.virtual_time

SILENCE_S = 0.02
STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]


class Client(list[bytes]):
    """What a client has got, piece by piece; one that takes nothing for a while is not `taking`."""

    def __init__(self) -> None:
        super().__init__()
        self.taking = asyncio.Event()
        self.taking.set()

    async def __call__(self, message: Any) -> None:
        await self.taking.wait()
        self.append(message.get("body", b"head"))


@contextlib.asynccontextmanager
async def streaming(client: Client, headers: Any = STREAM) -> AsyncIterator[Any]:
    with KeepaliveChannel(client, SILENCE_S) as send:
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def piece(body: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more})

        yield piece


async def silence(times: float = 1.5) -> None:
    await asyncio.sleep(SILENCE_S * times)


@pytest.mark.parametrize("said", [b"", b"data: a\n\n", b"data: a\r\n\r\n", b"data: a\r\r", b"data: a\n\r\n"])
@pytest.mark.parametrize("step", [1, 100])
async def test_a_silence_between_events_gets_a_comment(said: bytes, step: int) -> None:
    client = Client()
    pieces = [said[at : at + step] for at in range(0, len(said), step)]
    async with streaming(client) as piece:
        for each in pieces:
            await piece(each)
        await silence()
        await piece(b"data: b\n\n", more=False)
    assert client == [b"head", *pieces, COMMENT, b"data: b\n\n"]


@pytest.mark.parametrize(
    "said", [b"d", b"data: a", b"data: a\n", b"data: a\r\n", b"data: a\r\n\r", b"data: a\r"]
)
async def test_a_silence_within_an_event_gets_none(said: bytes) -> None:
    client = Client()
    async with streaming(client) as piece:
        await piece(b"data: 0\n\n")
        await piece(said)
        await silence(3)
    assert client == [b"head", b"data: 0\n\n", said]


async def test_a_silence_that_lasts_gets_one_each_time_and_none_behind_its_end() -> None:
    client = Client()
    async with streaming(client) as piece:
        await silence(3.5)
        await piece(b"data: [DONE]\n\n")
        await silence()
        await piece(b"", more=False)
        await silence(3)
    await silence(3)
    assert client == [b"head", COMMENT, COMMENT, COMMENT, b"data: [DONE]\n\n", COMMENT, b""]


async def test_a_stream_that_is_left_says_nothing_more() -> None:
    client = Client()
    async with streaming(client) as piece:
        await piece(b"data: a\n\n")
    await silence(3)
    assert client == [b"head", b"data: a\n\n"]


async def test_a_comment_that_waits_for_the_client_stands_before_what_comes_next() -> None:
    client = Client()
    async with streaming(client) as piece:
        client.taking.clear()
        await silence(3)
        going_on = asyncio.create_task(piece(b"data: half"))
        await silence(3)
        client.taking.set()
        await going_on
        await silence(3)
    assert client == [b"head", COMMENT, b"data: half"]


async def test_a_client_that_leaves_while_a_comment_waits_gets_none() -> None:
    client = Client()
    async with streaming(client):
        client.taking.clear()
        await silence(2)
    client.taking.set()
    await silence()
    assert client == [b"head"]


async def test_nothing_is_said_before_the_head() -> None:
    client = Client()
    with KeepaliveChannel(client, SILENCE_S):
        await silence(3)
    assert client == []


@pytest.mark.parametrize(
    ("headers", "taken"),
    [
        (STREAM, True),
        ([*STREAM, (b"content-encoding", b"identity")], True),
        ([*STREAM, (b"content-encoding", b"gzip")], False),
        ([*STREAM, (b"content-length", b"7")], False),
        ([(b"content-type", b"application/json")], False),
        ([], False),
    ],
)
def test_comments_stand_in_plain_event_streams_of_unknown_length_only(headers: Any, *, taken: bool) -> None:
    assert can_take_comments({"type": "http.response.start", "status": 200, "headers": headers}) == taken
