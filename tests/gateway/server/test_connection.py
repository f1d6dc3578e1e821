"""What clients meet at a connection of the server, over real sockets."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import pytest
import structlog

from compaction_proxy.gateway.server import ClientDeadlines, serve_embedded
from compaction_proxy.gateway.server.connection import MAX_DROPPED_BYTES, MAX_WAITING_REQUESTS
from compaction_proxy.gateway.server.cycle import encode_header_lines
from compaction_proxy.gateway.server.parser import MAX_FIELDS, MAX_FRAMING_BYTES, MAX_HEAD_BYTES

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
        async with asyncio.timeout(30):
            came = await reader.read()
        writer.close()
    return [line for line in came.split(b"\r\n") if not line.startswith(b"date: ")]


def refusal(lines: list[bytes]) -> tuple[bytes, dict[str, Any]]:
    """Status line and error of an answer in OpenAI's shape, after which the connection ended."""
    assert b"connection: close" in lines
    return lines[0], json.loads(lines[-1])["error"]


@pytest.mark.parametrize("step", [1, 7, 1_000])
@pytest.mark.parametrize("offered", [b"h2c", b"H2C", b"TLS/1.2", b"h2c, websocket", b"foo"])
@pytest.mark.parametrize(
    "framed",
    [
        b"content-length: 5\r\n\r\nhello",
        b"transfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n",
    ],
)
async def test_a_request_that_offers_another_protocol_is_read_with_its_body(
    framed: bytes, offered: bytes, step: int
) -> None:
    fields = b"connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
    request = b"POST /1 HTTP/1.1\r\nhost: a\r\n" + fields + b"upgrade: " + offered + b"\r\n" + framed
    sent = GET % b"/0" + request + request + LAST
    pieces = [sent[at : at + step] for at in range(0, len(sent), step)]
    lines = await said(echo, *pieces, pause_s=0)
    assert [line for line in lines if line.startswith(b"/")] == [b"/0", b"/1hello", b"/1hello", b"/last"]


async def test_an_offer_without_a_body_is_answered_and_the_connection_goes_on() -> None:
    offer = b"GET /ws HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
    lines = await said(echo, offer, LAST)
    assert [line for line in lines if line.startswith(b"/")] == [b"/ws", b"/last"]


async def test_what_a_body_holds_is_no_head_even_when_the_answer_is_out() -> None:
    async def early(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": scope["raw_path"]})

    body = b"POST /x HTTP/1.1\r\nhost: a\r\nupgrade: h2c\r\nx: 1\r\n\r\n"
    head = b"POST /1 HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body)
    lines = await said(early, head, body, LAST)
    assert [line for line in lines if line.startswith(b"/")] == [b"/1", b"/last"]


async def test_requests_that_come_together_are_answered_in_their_order() -> None:
    lines = await said(echo, GET % b"/1" + GET % b"/2" + LAST)
    assert [line for line in lines if line.startswith(b"/")] == [b"/1", b"/2", b"/last"]


@pytest.mark.parametrize("step", [1, 7, 50])
async def test_a_request_may_come_in_any_pieces(step: int) -> None:
    request = b"POST /x?y=%20 HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\nconnection: close\r\n\r\nabc"
    pieces = [request[at : at + step] for at in range(0, len(request), step)]
    assert (await said(echo, *pieces))[-4:-2] == [b"/xabc", b"0"]


async def test_a_head_goes_out_as_soon_as_the_application_waits() -> None:
    go_on = asyncio.Event()

    async def late(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await go_on.wait()
        await send({"type": "http.response.body", "body": b"ok"})

    async with serve_embedded(application(late)) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
        writer.write(GET % b"/")
        async with asyncio.timeout(30):
            head = await reader.readuntil(b"\r\n\r\n")
            go_on.set()
            assert (head[:15], await reader.readexactly(2)) == (b"HTTP/1.1 200 OK", b"ok")
        writer.close()


async def test_who_speaks_http_1_0_gets_no_chunks() -> None:
    lines = await said(echo, b"GET /x HTTP/1.0\r\n\r\n")
    assert lines == [b"HTTP/1.1 200 OK", b"connection: close", b"", b"/x"]


async def test_an_answer_to_head_says_how_long_it_would_be_and_has_no_body() -> None:
    async def two(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    head = b"HEAD / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
    assert await said(two, head) == [
        b"HTTP/1.1 200 OK",
        b"content-length: 2",
        b"connection: close",
        b"",
        b"",
    ]


async def test_a_client_is_told_to_go_on_when_its_body_is_wanted() -> None:
    head = b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\nexpect: 100-continue\r\n"
    head += b"connection: close\r\n\r\n"
    lines = await said(echo, head, b"ok")
    assert (lines[0], lines[2], lines[-4]) == (b"HTTP/1.1 100 Continue", b"HTTP/1.1 200 OK", b"/xok")


async def test_a_connection_ends_whose_client_was_never_told_to_go_on() -> None:
    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    head = b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\nexpect: 100-continue\r\n\r\n"
    assert b"connection: close" in await said(refuse, head)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/1.1\r\nhost a\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello!",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: -5\r\n\r\nhello!",
        b"GET /\x00 HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET http:// HTTP/1.1\r\nhost: a\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_what_is_no_request_is_refused_as_an_error_that_clients_can_read(sent: bytes) -> None:
    assert refusal(await said(echo, sent)) == (
        b"HTTP/1.1 400 Bad Request",
        {
            "message": "This is no valid HTTP/1.1 request.",
            "type": "invalid_request_error",
            "param": None,
            "code": "invalid_http",
        },
    )


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nhost: a\r\n" + b"x: y\r\n" * MAX_FIELDS + b"\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * MAX_HEAD_BYTES + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 2 * MAX_HEAD_BYTES,
        b"GET /" + b"y" * 2 * MAX_HEAD_BYTES,
        b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx: "
        + b"y" * MAX_FRAMING_BYTES,
    ],
)
async def test_a_header_without_end_is_refused(sent: bytes) -> None:
    status, error = refusal(await said(echo, sent))
    assert (status, error["code"]) == (b"HTTP/1.1 431 Request Header Fields Too Large", "header_too_large")


async def test_trailers_are_no_fields_of_the_next_request() -> None:
    chunked = b"POST /1 HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"
    chunked += b"expect: 100-continue\r\nhost: b\r\n\r\n"
    lines = await said(echo, chunked, LAST)
    assert [line for line in lines if line.startswith(b"/")] == [b"/1x", b"/last"]
    assert b"HTTP/1.1 100 Continue" not in lines


async def test_what_cannot_be_read_costs_no_answer_that_is_under_way() -> None:
    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.05)
        await echo(scope, receive, send)

    lines = await said(slow, GET % b"/1", b"\x00 garbage")
    assert (lines[0], lines[-3]) == (b"HTTP/1.1 200 OK", b"0")
    assert b"/1" in lines


@pytest.mark.parametrize("hosts", [b"", b"host: a\r\nhost: b\r\n"])
async def test_a_request_names_one_host(hosts: bytes) -> None:
    status, error = refusal(await said(echo, b"GET / HTTP/1.1\r\n" + hosts + b"\r\n"))
    assert (status, error["code"]) == (b"HTTP/1.1 400 Bad Request", "invalid_http")


async def test_no_transfer_coding_but_chunked_is_taken() -> None:
    coded = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n"
    status, error = refusal(await said(echo, coded))
    assert (status, error["code"]) == (b"HTTP/1.1 501 Not Implemented", "unsupported_transfer_coding")


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
    assert lines[0] == b"HTTP/1.1 413 Request Entity Too Large"


async def test_of_very_many_requests_at_once_the_first_are_answered() -> None:
    sent = GET % b"/1" * (2 * MAX_WAITING_REQUESTS)
    lines = await said(echo, sent)
    assert lines.count(b"/1") == 1 + MAX_WAITING_REQUESTS
    assert lines.count(b"connection: close") == 1


async def test_a_client_that_reads_nothing_is_cut_off() -> None:
    begun, over = asyncio.Event(), asyncio.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        begun.set()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(1_000):
            await send({"type": "http.response.body", "body": b"x" * 65_536, "more_body": True})
        over.set()

    async with serve_embedded(application(endless), deadlines=ClientDeadlines(send_s=0.3)) as url:
        _, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port, limit=1)
        writer.write(GET % b"/")
        async with asyncio.timeout(30):
            await over.wait()
        writer.transport.abort()


async def test_an_application_that_fails_is_logged_and_answered() -> None:
    async def crash(scope: Any, receive: Any, send: Any) -> None:
        raise ZeroDivisionError

    with structlog.testing.capture_logs() as logged:
        status, error = refusal(await said(crash, GET % b"/"))
    assert status == b"HTTP/1.1 500 Internal Server Error"
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert [(line["event"], line["log_level"]) for line in logged] == [("request.crashed", "error")]


@pytest.mark.parametrize(("announced", "sent"), [(b"3", b"ok"), (b"1", b"ok")])
async def test_a_body_of_another_length_than_announced_is_cut(announced: bytes, sent: bytes) -> None:
    async def lie(scope: Any, receive: Any, send: Any) -> None:
        fields = [(b"content-length", announced)]
        await send({"type": "http.response.start", "status": 200, "headers": fields})
        await send({"type": "http.response.body", "body": sent})

    with structlog.testing.capture_logs() as logged:
        lines = await said(lie, GET % b"/")
    assert len(lines[-1]) < int(announced)
    assert [line["event"] for line in logged] == ["request.crashed"]


@pytest.mark.parametrize("field", [(b"x", b"a\r\nb: c"), (b"x", b"a\nb"), (b"x\r", b"a\n"), (b"x", b"a\0")])
def test_no_field_of_an_answer_ends_its_line_early(field: tuple[bytes, bytes]) -> None:
    with pytest.raises(ValueError, match="would end its line"):
        encode_header_lines([(b"y", b"z"), field])


async def test_an_application_may_ask_whether_the_client_is_still_there() -> None:
    seen = asyncio.Queue[str]()

    async def asking(scope: Any, receive: Any, send: Any) -> None:
        for _ in range(2):
            seen.put_nowait((await receive())["type"])

    async with serve_embedded(application(asking)) as url:
        _, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
        writer.write(GET % b"/")
        assert await seen.get() == "http.request"
        writer.close()
        async with asyncio.timeout(30):
            assert await seen.get() == "http.disconnect"
