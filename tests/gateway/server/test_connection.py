"""What clients meet at a connection of the server, over real sockets."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import structlog

from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.gateway.server.connection import MAX_DROPPED_BYTES, MAX_WAITING_REQUESTS

GET = b"GET %b HTTP/1.1\r\nhost: a\r\n\r\n"
LAST = b"GET /last HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
Answering = Callable[[Any, Any, Any], Awaitable[None]]


def application(answer: Answering) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for done in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{done}.complete"})
            return
        await answer(scope, receive, send)

    return app


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the path and the body, without saying how long that is."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message["body"]
        more = message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["raw_path"] + body})


async def said(answer: Answering, *pieces: bytes, pause_s: float = 0.01) -> list[bytes]:
    """The lines that come back until the connection is closed, without dates."""
    async with serve_embedded(application(answer)) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(pause_s)
        async with asyncio.timeout(100):
            came = await reader.read()
        writer.close()
    return [line for line in came.split(b"\r\n") if not line.startswith(b"date: ")]


def refusal(lines: list[bytes]) -> tuple[bytes, dict[str, Any]]:
    """Status line and error of an answer in OpenAI's shape, after which the connection ended."""
    assert b"connection: close" in lines
    return lines[0], json.loads(lines[-1])["error"]


async def test_an_offer_without_a_body_is_answered_and_the_connection_goes_on() -> None:
    offer = b"GET /ws HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
    lines = await said(echo, offer, LAST)
    assert [line for line in lines if line.startswith(b"/")] == [b"/ws", b"/last"]


async def test_requests_that_come_together_are_answered_in_their_order() -> None:
    lines = await said(echo, GET % b"/1" + GET % b"/2" + LAST)
    assert [line for line in lines if line.startswith(b"/")] == [b"/1", b"/2", b"/last"]


async def test_a_connection_ends_whose_client_was_never_told_to_go_on() -> None:
    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    head = b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\nexpect: 100-continue\r\n\r\n"
    assert b"connection: close" in await said(refuse, head)


async def test_what_cannot_be_read_costs_no_answer_that_is_under_way() -> None:
    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.05)
        await echo(scope, receive, send)

    lines = await said(slow, GET % b"/1", b"\x00 garbage")
    assert (lines[0], lines[-3]) == (b"HTTP/1.1 200 OK", b"0")
    assert b"/1" in lines


async def test_a_request_that_is_refused_while_it_is_read_is_nobody_s_fault() -> None:
    sent = b"POST / HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ntransfer-encoding: chunked\r\n\r\nZZ\r\n"
    with structlog.testing.capture_logs() as logged:

        async def reading(scope: Any, receive: Any, send: Any) -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        assert refusal(await said(reading, sent))[0] == b"HTTP/1.1 400 Bad Request"
    assert logged == []


async def test_who_is_sent_an_answer_early_cannot_send_for_ever() -> None:
    async def early(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    head = b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 9223372036854775807\r\n\r\n"
    lines = await said(early, head, *[b"x" * 65_536] * (MAX_DROPPED_BYTES // 65_536 + 1))
    assert lines[0] == b"HTTP/1.1 413 Content Too Large"


async def test_of_very_many_requests_at_once_the_first_are_answered() -> None:
    sent = GET % b"/1" * (2 * MAX_WAITING_REQUESTS)
    lines = await said(echo, sent)
    assert lines.count(b"/1") == 1 + MAX_WAITING_REQUESTS
    assert lines.count(b"connection: close") == 1
