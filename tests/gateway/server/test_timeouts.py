"""Connections of clients that are too slow or have left are closed; those that wait for the proxy are not."""

import asyncio
import json
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn
from uvicorn.server import ServerState

from compaction_proxy.gateway.server import ClientDeadlines, serve_embedded
from compaction_proxy.gateway.server.connection import ServerConnection
from compaction_proxy.gateway.server.timeouts import MIN_BODY_BYTES_PER_S, close_overdue_connections
from tests.gateway.server.test_connection import GET, application, echo

DEADLINES = ClientDeadlines()
POST = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1000000\r\n%b\r\n"


class Transport(asyncio.Transport):
    """What a connection is given by the event loop; nothing leaves it.

    Attributes:
        written: What was sent.
        unsent_bytes: How much of it the client has not taken.
        ended: How the connection was ended: `close`, `abort` or `eof`; empty if it is open.
    """

    def __init__(self, sock: socket.socket | None = None) -> None:
        super().__init__({"socket": sock})
        self.written = b""
        self.unsent_bytes = 0
        self.ended = ""

    def write(self, data: Any) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = "eof"

    def close(self) -> None:
        self.ended = "close"

    def abort(self) -> None:
        self.ended = "abort"

    def is_closing(self) -> bool:
        return self.ended in {"close", "abort"}

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Peer:
    """A connection on a clock that stands at 0, and its client."""

    def __init__(
        self, answer: Callable[[Any, Any, Any], Awaitable[None]] = echo, sock: socket.socket | None = None
    ) -> None:
        config = uvicorn.Config(application(answer), log_config=None)
        config.load()
        self.transport = Transport(sock)
        self.connection = ServerConnection(config, ServerState(), {})
        self.connection.connection_made(self.transport)

    async def send(self, data: bytes, *, at: float = 0.0) -> None:
        """Sends data, and lets the application run until it waits."""
        self.connection.data_received(data)
        if self.connection.is_reading_head and self.connection.newest_cycle is not None:
            self.connection.phase_started_at = at
        for _ in range(10):
            await asyncio.sleep(0)
        self.connection.last_activity_at = at

    def sweep(self, now: float) -> str:
        """Returns how the connection was ended by then; empty if it is open."""
        close_overdue_connections({self.connection, object()}, DEADLINES, now)
        return self.transport.ended

    def sweep_around(self, deadline: float) -> tuple[str, str]:
        return self.sweep(deadline), self.sweep(deadline + 0.1)

    @property
    def refusal(self) -> str:
        """The code of the error that was sent; empty if none was."""
        body = self.transport.written.rpartition(b"\r\n\r\n")[2]
        return str(json.loads(body)["error"]["code"]) if body.startswith(b"{") else ""


async def wait_for_ever(scope: Any, receive: Any, send: Any) -> None:
    await asyncio.Event().wait()


@pytest.mark.virtual_time
@pytest.mark.parametrize("data", [b"", b"GET / HT", POST[:30]])
async def test_a_head_must_be_complete_in_time_and_further_bytes_gain_none(data: bytes) -> None:
    peer = Peer()
    await peer.send(data, at=DEADLINES.head_s - 0.1)
    assert peer.sweep_around(DEADLINES.head_s) == ("", "close")


@pytest.mark.virtual_time
async def test_a_connection_that_is_idle_after_an_answer_is_kept_for_a_while() -> None:
    peer = Peer()
    await peer.send(GET % b"/", at=100.0)
    assert b"200 OK" in peer.transport.written
    assert peer.sweep_around(100.0 + DEADLINES.idle_s) == ("", "close")


@pytest.mark.virtual_time
async def test_the_head_of_a_further_request_has_its_own_deadline() -> None:
    peer = Peer()
    await peer.send(GET % b"/")
    await peer.send(b"GET / HT", at=50.0)
    assert peer.sweep_around(50.0 + DEADLINES.head_s) == ("", "close")


@pytest.mark.virtual_time
async def test_a_client_that_waits_for_its_answer_has_all_the_time() -> None:
    peer = Peer(wait_for_ever)
    await peer.send(GET % b"/")
    assert peer.sweep(1e6) == ""


@pytest.mark.virtual_time
async def test_a_body_that_pauses_is_refused_with_408() -> None:
    peer = Peer(wait_for_ever)
    await peer.send(POST % b"" + b"x", at=10.0)
    assert peer.sweep_around(10.0 + DEADLINES.body_s) == ("", "eof")
    assert peer.transport.written.startswith(b"HTTP/1.1 408 ")
    assert peer.refusal == "request_timeout"


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("rate", "code"), [(MIN_BODY_BYTES_PER_S * 9 // 10, "request_timeout"), (MIN_BODY_BYTES_PER_S, "")]
)
async def test_a_body_that_comes_too_slowly_is_refused_although_it_never_pauses(rate: int, code: str) -> None:
    peer = Peer()
    await peer.send(POST % b"")
    for second in range(1, 2 * round(DEADLINES.body_s) + 3):
        await peer.send(b"x" * rate, at=float(second))
        peer.sweep(float(second))
    assert peer.refusal == code


@pytest.mark.virtual_time
async def test_a_client_that_waits_to_be_asked_for_its_body_is_not_slow() -> None:
    peer = Peer(wait_for_ever)
    await peer.send(POST % b"expect: 100-continue\r\n")
    assert [peer.sweep(now) for now in (100.0, 200.0)] == ["", ""]


@pytest.mark.virtual_time
async def test_a_client_that_takes_nothing_of_its_answer_is_cut_off_and_one_that_takes_some_is_not() -> None:
    peer = Peer(wait_for_ever)
    await peer.send(GET % b"/")
    for now in (0.0, 50.0, 100.0):
        peer.transport.unsent_bytes = 1_000 - int(now)
        assert peer.sweep(now) == ""
    assert peer.sweep_around(100.0 + DEADLINES.send_s) == ("", "abort")


@pytest.mark.virtual_time
async def test_a_connection_that_hung_up_waits_a_moment_for_the_client_to_close_it() -> None:
    peer = Peer()
    await peer.send(b"\0 no HTTP\r\n\r\n")
    assert peer.connection.has_hung_up
    assert peer.sweep_around(DEADLINES.linger_s) == ("eof", "close")


@pytest.mark.virtual_time
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of a departure while nothing is read")
async def test_a_client_that_leaves_while_nothing_is_read_is_noticed() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        peer = Peer(wait_for_ever, ours)
        await peer.send(GET % b"/1" + GET % b"/2")  # the second one waits, so reading is paused
        assert (peer.connection.is_reading_paused, peer.sweep(1.0)) == (True, "")
        theirs.close()
        assert peer.sweep(2.0) == "abort"


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
        async with asyncio.timeout(100):
            await over.wait()
        writer.transport.abort()
