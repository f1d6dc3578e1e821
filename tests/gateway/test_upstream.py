import asyncio
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from compaction_proxy.core.errors import RequestRefusedError, UpstreamError
from compaction_proxy.gateway.client.types import HttpRequest, HttpResponse
from compaction_proxy.gateway.upstream import (
    Upstream,
    UpstreamResponse,
    build_request,
    relay_response,
    send_error,
    send_request,
)

CUT = httpx.RemoteProtocolError("cut")


class Reply:
    """An answer in pieces; an error among them is raised in its place."""

    def __init__(self, status: int, *pieces: bytes | Exception) -> None:
        self.status = status
        self.reason = b""
        self.headers = [(b"x-a", b"1")]
        self.closed = False
        self._pieces = iter(pieces)

    async def read(self) -> bytes:
        piece = next(self._pieces, b"")
        if isinstance(piece, Exception):
            raise piece
        return piece

    async def aclose(self) -> None:
        self.closed = True


@dataclass
class Engine:
    """Gives one answer, or one error."""

    reply: Reply | Exception

    async def send(self, request: HttpRequest) -> HttpResponse:
        if isinstance(self.reply, Exception):
            raise self.reply
        return self.reply

    async def aclose(self) -> None:
        raise AssertionError("nobody closes the engine here")


class Sent(list[dict[str, Any]]):
    async def __call__(self, message: Any) -> None:
        self.append(message)

    @property
    def bodies(self) -> list[tuple[bytes, bool]]:
        return [(message["body"], message["more_body"]) for message in self[1:]]


def answer(*pieces: bytes | Exception, status: int = 400) -> UpstreamResponse:
    return UpstreamResponse(Reply(status, *pieces))


def upstream(reply: Reply | Exception) -> Upstream:
    return Upstream("http://up.example/v1", "", "0" * 16, Engine(reply), 1.5, 2.5)


SCOPE = {
    "type": "http",
    "method": "POST",
    "raw_path": b"/v1/chat/completions",
    "query_string": b"a=%2F",
    "headers": [(b"host", b"proxy"), (b"x-a", b"1"), (b"content-length", b"99")],
}


async def test_what_was_peeked_is_relayed_verbatim() -> None:
    looked_at = answer(b"ab", b"cd", b"ef")
    sent = Sent()
    assert await looked_at.peek(3) == b"abcd"
    assert await looked_at.peek(2) == b"abcd"
    assert await relay_response(looked_at, sent, extra_headers=[(b"x-b", b"2")])
    assert sent[0] == {
        "type": "http.response.start",
        "status": 400,
        "headers": [(b"x-a", b"1"), (b"content-security-policy", b"sandbox"), (b"x-b", b"2")],
    }
    assert sent.bodies == [(b"ab", True), (b"cd", True), (b"ef", True), (b"", False)]


async def test_peeking_beyond_the_end_gives_all_there_is() -> None:
    assert await answer(b"ab", b"cd").peek(65_536) == b"abcd"


async def test_a_cut_found_while_peeking_is_relayed_where_it_was() -> None:
    looked_at = answer(b"ab", CUT)
    sent = Sent()
    assert await looked_at.peek(100) == b"ab"
    assert not await relay_response(looked_at, sent)
    assert sent.bodies == [(b"ab", True)]


async def test_an_answer_is_closed_however_its_relay_ends() -> None:
    async def broken(message: Any) -> None:
        raise OSError

    cut, unsendable = answer(CUT), answer(b"ab")
    await relay_response(cut, Sent())
    with pytest.raises(OSError):
        await relay_response(unsendable, broken)
    assert [kept.response.closed for kept in (cut, unsendable)] == [True, True]  # type: ignore[attr-defined]


async def test_a_tap_sees_every_byte_that_was_sent() -> None:
    tapped: list[bytes] = []
    looked_at = answer(b"ab", b"cd", CUT)
    await looked_at.peek(1)
    await relay_response(looked_at, Sent(), tap=tapped.append)
    assert tapped == [b"ab", b"cd"]


async def test_a_request_names_its_target_and_its_limits() -> None:
    assert build_request(upstream(CUT), SCOPE, b"{}") == HttpRequest(
        method="POST",
        origin="http://up.example",
        target=b"/v1/chat/completions?a=%2F",
        headers=[(b"x-a", b"1"), (b"x-compaction-hop", b"0" * 16)],
        body=b"{}",
        connect_timeout_s=1.5,
        silence_timeout_s=2.5,
    )


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (httpx.ConnectError(""), 502, "upstream_unreachable"),
        (httpx.ConnectTimeout(""), 502, "upstream_unreachable"),
        (httpx.ReadTimeout(""), 504, "upstream_timeout"),
        (httpx.ReadError(""), 502, "upstream_protocol_error"),
        (CUT, 502, "upstream_protocol_error"),
        (Reply(101), 502, "upstream_protocol_error"),
        (Reply(999), 502, "upstream_protocol_error"),
    ],
)
async def test_a_missing_answer_is_named(failure: Exception | Reply, status: int, code: str) -> None:
    asked = upstream(failure)
    with pytest.raises(UpstreamError) as error:
        await send_request(asked, build_request(asked, SCOPE, b""))
    assert (error.value.status, error.value.code) == (status, code)


async def test_an_error_of_ours_is_sent_in_openais_shape() -> None:
    sent = Sent()
    await send_error(sent, RequestRefusedError(413, "too much", "request_too_large"), [(b"x-b", b"2")])
    body = (
        b'{"error": {"message": "too much", "type": "invalid_request_error", '
        b'"param": null, "code": "request_too_large"}}'
    )
    assert sent == [
        {
            "type": "http.response.start",
            "status": 413,
            "headers": [
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                (b"x-b", b"2"),
            ],
        },
        {"type": "http.response.body", "body": body, "more_body": False},
    ]


async def test_a_late_chunk_is_awaited_no_longer_and_still_relayed() -> None:
    come = asyncio.Event()

    class Late(Reply):
        async def read(self) -> bytes:
            piece = await super().read()
            if piece == b"cd":
                await come.wait()
            return piece

    looked_at = UpstreamResponse(Late(200, b"ab", b"cd", b"ef"))
    assert await looked_at.peek(1) == b"ab"
    assert await looked_at.peek_with_timeout(3, 0.01) == b"ab"
    come.set()
    assert await looked_at.peek_with_timeout(3, 5.0) == b"abcd"
    sent = Sent()
    assert await relay_response(looked_at, sent)
    assert b"".join(body for body, _ in sent.bodies) == b"abcdef"


async def test_an_answer_is_closed_while_a_chunk_is_awaited() -> None:
    class Silent(Reply):
        async def read(self) -> bytes:
            await asyncio.Event().wait()
            return b""

    reply = Silent(200)
    looked_at = UpstreamResponse(reply)
    assert await looked_at.peek_with_timeout(1, 0.01) == b""
    await looked_at.aclose()
    assert reply.closed


async def test_a_cut_after_a_late_chunk_was_awaited_is_reported_where_it_is_relayed() -> None:
    looked_at = answer(b"ab", CUT)
    assert await looked_at.peek(1) == b"ab"
    assert await looked_at.peek_with_timeout(3, 5.0) == b"ab"
    assert looked_at.is_cut
    assert not await relay_response(looked_at, Sent())
