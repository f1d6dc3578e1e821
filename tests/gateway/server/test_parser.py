"""How requests are read from a connection, and which are refused."""

from typing import Any
from unittest.mock import Mock, call

import pytest

from compaction_proxy.gateway.server.parser import (
    MAX_FIELDS,
    MAX_FRAMING_BYTES,
    MAX_HEAD_BYTES,
    RequestParser,
)
from tests.gateway.server.test_connection import GET, LAST, echo, refusal, said


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


async def test_what_a_body_holds_is_no_head_even_when_the_answer_is_out() -> None:
    async def early(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": scope["raw_path"]})

    body = b"POST /x HTTP/1.1\r\nhost: a\r\nupgrade: h2c\r\nx: 1\r\n\r\n"
    head = b"POST /1 HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body)
    lines = await said(early, head, body, LAST)
    assert [line for line in lines if line.startswith(b"/")] == [b"/1", b"/last"]


@pytest.mark.parametrize("step", [1, 7, 50])
async def test_a_request_may_come_in_any_pieces(step: int) -> None:
    request = b"POST /x?y=%20 HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\nconnection: close\r\n\r\nabc"
    pieces = [request[at : at + step] for at in range(0, len(request), step)]
    assert (await said(echo, *pieces))[-4:-2] == [b"/xabc", b"0"]


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
        b"GET /\r\n\r\n",
        b"GET / HTTP/0.9\r\nhost: a\r\n\r\n",
        b"GET / HTTP/2.0\r\nhost: a\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_what_is_no_request_is_refused_as_an_error_that_clients_can_read(sent: bytes) -> None:
    assert refusal(await said(echo, sent)) == (
        b"HTTP/1.1 400 Bad Request",
        {
            "message": "The request is not valid HTTP/1.1.",
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
        b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
        + (b"1;" + b"y" * 1_000 + b"\r\nx\r\n") * (MAX_FRAMING_BYTES // 500),
    ],
)
async def test_a_header_without_end_is_refused(sent: bytes) -> None:
    status, error = refusal(await said(echo, sent))
    assert (status, error["code"]) == (b"HTTP/1.1 431 Request Header Fields Too Large", "header_too_large")


async def test_a_body_may_come_in_chunks_of_one_byte() -> None:
    head = b"POST /1 HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    size = MAX_FRAMING_BYTES // 4  # the chunks have six bytes each
    lines = await said(echo, head + b"1\r\nx\r\n" * size + b"0\r\n\r\n", LAST)
    assert b"/1" + b"x" * size in lines


def test_the_chunks_of_one_read_are_one_piece_of_the_body() -> None:
    receiver = Mock()
    parser = RequestParser(receiver)
    parser.feed_data(b"POST /1 HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n1\r\nb\r\n")
    parser.feed_data(b"1\r\nc\r\n1\r\nd\r\n0\r\n\r\n" + GET % b"/2")
    assert [name for name, _, _ in receiver.method_calls] == [
        "on_head_started",
        "on_head_received",
        "on_body_received",
        "on_body_received",
        "on_request_received",
        "on_head_started",
        "on_head_received",
        "on_request_received",
    ]
    assert receiver.on_body_received.call_args_list == [call(b"ab"), call(b"cd")]


async def test_trailers_are_no_fields_of_the_next_request() -> None:
    chunked = b"POST /1 HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"
    chunked += b"expect: 100-continue\r\nhost: b\r\n\r\n"
    lines = await said(echo, chunked, LAST)
    assert [line for line in lines if line.startswith(b"/")] == [b"/1x", b"/last"]
    assert b"HTTP/1.1 100 Continue" not in lines


async def test_trailers_are_no_fields_of_their_own_request() -> None:
    seen: list[list[tuple[bytes, bytes]]] = []

    async def read_and_list(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        seen.append(scope["headers"])
        await echo(scope, _no_body, send)

    chunked = b"POST /1 HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"
    await said(read_and_list, chunked + b"authorization: Bearer other\r\n\r\n", LAST)
    assert seen[0] == [(b"host", b"a"), (b"transfer-encoding", b"chunked")]


async def _no_body() -> dict[str, Any]:
    return {"body": b"", "more_body": False}


@pytest.mark.parametrize("hosts", [b"", b"host: a\r\nhost: b\r\n"])
async def test_a_request_names_one_host(hosts: bytes) -> None:
    status, error = refusal(await said(echo, b"GET / HTTP/1.1\r\n" + hosts + b"\r\n"))
    assert (status, error["code"]) == (b"HTTP/1.1 400 Bad Request", "invalid_http")


async def test_no_transfer_coding_but_chunked_is_taken() -> None:
    coded = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n"
    status, error = refusal(await said(echo, coded))
    assert (status, error["code"]) == (b"HTTP/1.1 501 Not Implemented", "unsupported_transfer_coding")
