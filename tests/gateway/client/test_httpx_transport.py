"""httpx over an engine: what the engine is asked, and what httpx gets of its response."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest

from compaction_proxy.gateway.client.httpx_transport import EngineTransport
from compaction_proxy.gateway.client.types import HttpRequest, HttpResponse
from tests.gateway.client.test_connection_pool import answer_and_close

URL = "http://up.example:8080/a%2Fb?c=%20"


class Reply:
    """A response whose body comes in pieces."""

    status = 207
    reason = b"Some Of It"
    headers: Sequence[tuple[bytes, bytes]] = ((b"x-a", b"1"), (b"x-a", b"2"))

    def __init__(self, *pieces: bytes) -> None:
        self.closed = 0
        self._pieces = iter(pieces)

    async def read(self) -> bytes:
        return next(self._pieces, b"")

    async def aclose(self) -> None:
        self.closed += 1


class Engine:
    """Keeps what it is asked, and gives one response."""

    def __init__(self, reply: Reply | None = None) -> None:
        self.reply = reply or Reply()
        self.asked: list[HttpRequest] = []
        self.closed = 0

    async def send(self, request: HttpRequest) -> HttpResponse:
        self.asked.append(request)
        return self.reply

    async def aclose(self) -> None:
        self.closed += 1


async def ask(**options: Any) -> HttpRequest:
    """Returns what an engine is asked for a request of httpx."""
    engine = Engine()
    await EngineTransport(engine).handle_async_request(httpx.Request("POST", URL, **options))
    [asked] = engine.asked
    return asked


async def test_an_async_client_runs_on_it(wire: Any, engine: Any) -> None:
    async with (
        wire.running_upstream(answer_and_close) as upstream,
        httpx.AsyncClient(transport=EngineTransport(engine())) as client,
    ):
        response = await client.post(f"http://127.0.0.1:{upstream.port}/a%2Fb?c=%20", json={"a": 1})
    assert (response.text, upstream.seen[0].target) == ("ok", b"/a%2Fb?c=%20")


async def test_a_request_is_sent_with_its_bytes_and_without_the_fields_that_the_engine_writes() -> None:
    asked = await ask(content=b"{}", headers={"X-A": "1", "Connection": "close", "Host": "other"})
    assert (asked.method, asked.origin, asked.target) == ("POST", "http://up.example:8080", b"/a%2Fb?c=%20")
    assert (asked.headers, asked.body, asked.body_length) == ([(b"X-A", b"1")], b"{}", 2)
    assert (asked.connect_timeout_s, asked.silence_timeout_s) == (None, None)


async def test_a_request_may_name_its_raw_target_and_its_timeouts() -> None:
    timeouts = {"connect": 1.5, "read": None, "write": 9.0}
    asked = await ask(extensions={"target": b"/raw%20/../x", "timeout": timeouts})
    assert asked.target == b"/raw%20/../x"
    assert (asked.connect_timeout_s, asked.silence_timeout_s) == (1.5, None)


async def test_a_stream_is_passed_on_with_its_declared_length() -> None:
    async def stream() -> AsyncIterator[bytes]:
        yield b"a"
        yield b"b"

    for headers, length in (({}, None), ({"content-length": "2"}, 2)):
        asked = await ask(content=stream(), headers=headers)
        assert not isinstance(asked.body, bytes)
        assert [piece async for piece in asked.body] == [b"a", b"b"]
        assert asked.body_length == length


async def test_a_stream_that_cannot_be_awaited_is_refused() -> None:
    with pytest.raises(TypeError, match="asynchronous stream"):
        await ask(content=iter([b"a"]))


async def test_a_response_is_read_piece_by_piece_and_closed_with_its_end() -> None:
    engine = Engine(Reply(b"a", b"b"))
    async with (
        httpx.AsyncClient(transport=EngineTransport(engine)) as client,
        client.stream("GET", URL) as response,
    ):
        assert (response.status_code, response.reason_phrase) == (207, "Some Of It")
        assert response.headers.get_list("x-a") == ["1", "2"]
        assert [piece async for piece in response.aiter_raw()] == [b"a", b"b"]
    assert (engine.reply.closed, engine.closed) == (1, 1)
