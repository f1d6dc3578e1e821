from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from proxy.errors import RequestRefused, UpstreamError
from proxy.relay.exchange import Answer, Upstream, build_request, open_answer, relay_back, send_error

CUT = httpx.RemoteProtocolError("cut")


class Chunks(httpx.AsyncByteStream):
    """A body in pieces; an error among them is raised in its place."""

    def __init__(self, *pieces: bytes | Exception) -> None:
        self.pieces = pieces
        self.closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            if isinstance(piece, Exception):
                raise piece
            yield piece

    async def aclose(self) -> None:
        self.closed = True


class Sent(list[dict[str, Any]]):
    async def __call__(self, message: Any) -> None:
        self.append(message)

    @property
    def bodies(self) -> list[tuple[bytes, bool]]:
        return [(message["body"], message["more_body"]) for message in self[1:]]


def answer(*pieces: bytes | Exception, status: int = 400) -> Answer:
    return Answer(httpx.Response(status, headers=[(b"X-A", b"1")], stream=Chunks(*pieces)))


def upstream(reply: httpx.Response | Exception) -> Upstream:
    def handle(request: httpx.Request) -> httpx.Response:
        if isinstance(reply, Exception):
            raise reply
        return reply

    return Upstream("http://up.example/v1", "", "0" * 16, httpx.MockTransport(handle), 1.5, 2.5)


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
    assert await relay_back(looked_at, sent, extra=[(b"x-b", b"2")])
    assert sent[0] == {
        "type": "http.response.start",
        "status": 400,
        "headers": [(b"X-A", b"1"), (b"x-b", b"2")],
    }
    assert sent.bodies == [(b"ab", True), (b"cd", True), (b"ef", True), (b"", False)]


async def test_peeking_beyond_the_end_gives_all_there_is() -> None:
    assert await answer(b"ab", b"cd").peek(65_536) == b"abcd"


async def test_a_cut_found_while_peeking_is_relayed_where_it_was() -> None:
    looked_at = answer(b"ab", CUT)
    sent = Sent()
    assert await looked_at.peek(100) == b"ab"
    assert not await relay_back(looked_at, sent)
    assert sent.bodies == [(b"ab", True)]


async def test_an_answer_is_closed_however_its_relay_ends() -> None:
    async def broken(message: Any) -> None:
        raise OSError

    cut, unsendable = answer(CUT), answer(b"ab")
    await relay_back(cut, Sent())
    with pytest.raises(OSError):
        await relay_back(unsendable, broken)
    assert [kept.response.stream.closed for kept in (cut, unsendable)] == [True, True]  # type: ignore[union-attr]


async def test_a_tap_sees_every_byte_that_was_sent() -> None:
    tapped: list[bytes] = []
    looked_at = answer(b"ab", b"cd", CUT)
    await looked_at.peek(1)
    await relay_back(looked_at, Sent(), tap=tapped.append)
    assert tapped == [b"ab", b"cd"]


async def test_a_request_names_its_target_its_limits_and_its_true_length() -> None:
    made = build_request(upstream(CUT), SCOPE, b"{}")
    assert (made.method, str(made.url), await made.aread()) == ("POST", "http://up.example", b"{}")
    assert made.extensions == {
        "target": b"/v1/chat/completions?a=%2F",
        "timeout": {"connect": 1.5, "read": 2.5},
    }
    assert sorted((name.lower(), held) for name, held in made.headers.raw) == [
        (b"content-length", b"2"),
        (b"x-a", b"1"),
        (b"x-compaction-hop", b"0" * 16),
    ]


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (httpx.ConnectError(""), 502, "upstream_unreachable"),
        (httpx.ConnectTimeout(""), 502, "upstream_unreachable"),
        (httpx.ReadTimeout(""), 504, "upstream_timeout"),
        (httpx.ReadError(""), 502, "upstream_protocol_error"),
        (CUT, 502, "upstream_protocol_error"),
        (httpx.Response(101), 502, "upstream_protocol_error"),
        (httpx.Response(999), 502, "upstream_protocol_error"),
    ],
)
async def test_a_missing_answer_is_named(failure: Exception | httpx.Response, status: int, code: str) -> None:
    asked = upstream(failure)
    with pytest.raises(UpstreamError) as error:
        await open_answer(asked, build_request(asked, SCOPE, b""))
    assert (error.value.status, error.value.code) == (status, code)


async def test_an_error_of_ours_is_sent_in_openais_shape() -> None:
    sent = Sent()
    await send_error(sent, RequestRefused(413, "too much", "request_too_large"), [(b"x-b", b"2")])
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
