"""A server that stops: answers in progress end, idle connections do not, and the time for both is limited."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from compaction_proxy.gateway.server import (
    DrainReport,
    DrainTimeouts,
    GracefulServer,
    build_base_url,
    build_server,
    listen,
    run_server,
)
from tests.gateway.server.test_connection import GET, Answering, application, echo

pytestmark = pytest.mark.virtual_time

BODY = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\nx"
OK = b"HTTP/1.1 200 OK"


@pytest.fixture(autouse=True)
def signals_as_they_were() -> Iterator[None]:
    """The handlers of a server stay installed."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Gate:
    """Answers once it is opened.

    Attributes:
        asked: Set once a request has come.
        is_stopping: What each request was told of the server's state.
    """

    def __init__(self) -> None:
        self.asked, self.opened = asyncio.Event(), asyncio.Event()
        self.is_stopping: list[bool] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.is_stopping.append(scope["state"].get("stopping", False))
        self.asked.set()
        await self.opened.wait()
        await echo(scope, receive, send)


class Running:
    """A server that runs until it is stopped."""

    def __init__(self, server: GracefulServer, port: int, serving: asyncio.Task[None]) -> None:
        self.server = server
        self.serving = serving
        self._port = port

    async def connect(self, data: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(data)
        return reader, writer

    async def fetch(self, data: bytes = GET % b"/") -> bytes:
        """Returns all that comes back on a connection until it is closed."""
        reader, writer = await self.connect(data)
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""
        finally:
            writer.close()

    async def stop(self) -> DrainReport:
        self.server.stop()
        await self.serving
        return self.server.drain_report


@asynccontextmanager
async def running(
    answer: Answering, drain: DrainTimeouts, counts: list[int] | None = None, **options: Any
) -> AsyncIterator[Running]:
    """Serves; `counts` gets the number of requests in progress when the server begins to stop."""
    told = [] if counts is None else counts
    server = build_server(application(answer), drain, told.append, **options)
    listener, started = listen("127.0.0.1", 0), asyncio.Event()
    port = urlsplit(build_base_url(listener)).port or 0
    serving = asyncio.create_task(run_server(server, listener, started.set))
    await started.wait()
    try:
        yield Running(server, port, serving)
    finally:
        server.stop(now=True)
        await serving


async def test_an_answer_in_progress_ends_and_connections_without_a_request_are_dropped() -> None:
    gate, counts = Gate(), list[int]()
    async with running(gate, DrainTimeouts(), counts) as made:
        idle, partial = await made.connect(), await made.connect(BODY)
        asking = asyncio.create_task(made.fetch())
        await gate.asked.wait()
        stopping = asyncio.create_task(made.stop())
        assert (await idle[0].read(), await partial[0].read()) == (b"", b"")
        gate.opened.set()
        answer = await asking
        assert (answer[:15], b"connection: close" in answer) == (OK, True)
        assert await stopping == DrainReport(finished=1, dropped=2)
        for _, writer in (idle, partial):
            writer.close()
    assert counts == [1]


async def test_an_answer_that_does_not_end_in_time_is_cut() -> None:
    gate = Gate()
    async with running(gate, DrainTimeouts(drain_s=30)) as made:
        asking = asyncio.create_task(made.fetch())
        await gate.asked.wait()
        before = asyncio.get_running_loop().time()
        assert await made.stop() == DrainReport(cut=1)
        assert asyncio.get_running_loop().time() - before >= 30
        assert await asking == b""


async def test_requests_are_still_accepted_for_a_while_and_told_that_the_server_stops() -> None:
    gate = Gate()
    gate.opened.set()
    async with running(gate, DrainTimeouts(accept_s=60)) as made:
        first = await made.fetch(GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n") % b"/")
        stopping = asyncio.create_task(made.stop())
        await asyncio.sleep(30)
        later = await made.fetch()
        assert (await stopping).finished == 1
    assert (first[:15], later[:15], b"connection: close" in later) == (OK, OK, True)
    assert gate.is_stopping == [False, True]


@pytest.mark.parametrize("force", [True, False])
async def test_a_second_signal_stops_the_server_at_once_if_it_may(*, force: bool) -> None:
    gate = Gate()
    async with running(gate, DrainTimeouts(drain_s=1_000), force_on_second_signal=force) as made:
        asking = asyncio.create_task(made.fetch())
        await gate.asked.wait()
        for _ in range(2):
            made.server.handle_exit(signal.SIGTERM, None)
        await asyncio.sleep(10)
        assert made.serving.done() is force
        gate.opened.set()
        assert (await asking)[:15] == (b"" if force else OK)


async def test_a_signal_to_the_process_stops_the_server() -> None:
    async with running(echo, DrainTimeouts()) as made:
        signal.raise_signal(signal.SIGTERM)
        await made.serving
        assert made.server.should_exit


async def test_work_after_an_answer_is_cancelled_after_a_second() -> None:
    ended = asyncio.Event()

    async def work_on(scope: Any, receive: Any, send: Any) -> None:
        await echo(scope, receive, send)
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with running(work_on, DrainTimeouts()) as made:
        reader, writer = await made.connect(GET % b"/")
        await reader.readuntil(b"\r\n\r\n")
        assert not ended.is_set()
        await made.stop()
        assert ended.is_set()
        writer.close()


async def test_an_application_that_does_not_shut_down_holds_the_server_for_a_limited_time() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await asyncio.Event().wait()

    server = build_server(app, DrainTimeouts(), lambda _: None)
    started = asyncio.Event()
    serving = asyncio.create_task(run_server(server, listen("127.0.0.1", 0), started.set))
    await started.wait()
    server.stop()
    await serving
    assert server.drain_report == DrainReport()
