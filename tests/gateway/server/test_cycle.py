"""How answers are written to a connection."""

import asyncio
import errno
import json
from typing import Any
from urllib.parse import urlsplit

import pytest
import structlog

from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.gateway.server.cycle import encode_header_lines
from tests.gateway.server.test_connection import GET, LAST, application, echo, refusal, said


async def test_a_head_goes_out_as_soon_as_the_application_waits() -> None:
    go_on = asyncio.Event()

    async def late(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await go_on.wait()
        await send({"type": "http.response.body", "body": b"ok"})

    async with serve_embedded(application(late)) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
        writer.write(GET % b"/")
        async with asyncio.timeout(100):
            head = await reader.readuntil(b"\r\n\r\n")
            go_on.set()
            assert (head[:15], await reader.readexactly(2)) == (b"HTTP/1.1 200 OK", b"ok")
        writer.close()


async def test_who_speaks_http_1_0_gets_no_chunks() -> None:
    lines = await said(echo, b"GET /x HTTP/1.0\r\n\r\n")
    assert lines == [b"HTTP/1.1 200 OK", b"connection: close", b"", b"/x"]


@pytest.mark.parametrize("given", [[], [(b"transfer-encoding", b"chunked")]])
async def test_an_answer_of_unknown_length_says_once_that_it_is_chunked(
    given: list[tuple[bytes, bytes]],
) -> None:
    async def two(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": given})
        await send({"type": "http.response.body", "body": b"ok"})

    assert await said(two, LAST) == [
        b"HTTP/1.1 200 OK",
        b"transfer-encoding: chunked",
        b"connection: close",
        b"",
        *(b"2", b"ok", b"0", b"", b""),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "413 Content Too Large",
        "414 URI Too Long",
        "416 Range Not Satisfiable",
        "422 Unprocessable Content",
        "502 Bad Gateway",
        "599 ",
    ],
)
async def test_a_status_has_its_name_of_rfc_9110_on_every_python(line: str) -> None:
    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": int(line[:3]), "headers": []})
        await send({"type": "http.response.body"})

    assert (await said(refuse, LAST))[0] == f"HTTP/1.1 {line}".encode()


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


async def test_an_application_that_fails_is_logged_and_answered() -> None:
    async def crash(scope: Any, receive: Any, send: Any) -> None:
        raise ZeroDivisionError

    with structlog.testing.capture_logs() as logged:
        status, error = refusal(await said(crash, GET % b"/"))
    assert status == b"HTTP/1.1 500 Internal Server Error"
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert [(line["event"], line["log_level"]) for line in logged] == [("request.crashed", "error")]


@pytest.mark.parametrize(
    "shortage",
    [
        MemoryError(),
        RuntimeError("can't start new thread"),
        OSError(errno.EMFILE, "Too many open files"),
        ExceptionGroup("tasks", [MemoryError()]),
    ],
)
async def test_a_request_for_which_nothing_is_left_is_told_to_come_back(shortage: Exception) -> None:
    async def starve(scope: Any, receive: Any, send: Any) -> None:
        raise shortage

    with structlog.testing.capture_logs() as logged:
        lines = await said(starve, GET % b"/")
    status, error = refusal(lines)
    assert (status, error["code"]) == (b"HTTP/1.1 503 Service Unavailable", "overloaded")
    assert b"retry-after: 5" in lines
    assert [(line["event"], line["log_level"]) for line in logged] == [
        ("request.out_of_resources", "warning")
    ]


async def test_an_answer_that_has_begun_is_cut_where_no_memory_is_left() -> None:
    async def starve(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"o", "more_body": True})
        raise MemoryError

    with structlog.testing.capture_logs() as logged:
        lines = await said(starve, GET % b"/")
    assert (lines[0], lines[-1]) == (b"HTTP/1.1 200 OK", b"o")
    assert [line["log_level"] for line in logged] == ["warning"]


@pytest.mark.parametrize("sent", [GET % b"/", b"POST / HTTP/1.1\r\n\r\n"])
async def test_an_error_of_the_server_is_one_for_clients_of_every_wire(sent: bytes) -> None:
    async def crash(scope: Any, receive: Any, send: Any) -> None:
        raise ZeroDivisionError

    told = json.loads((await said(crash, sent))[-1])
    assert told["type"] == "error"
    assert {"type", "message"} <= told["error"].keys()


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
    with pytest.raises(ValueError, match="contains a line break"):
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
        async with asyncio.timeout(100):
            assert await seen.get() == "http.disconnect"
