"""What is under way, what waits and what is held stays bounded, whatever clients do."""

import asyncio
import gc
import json
from typing import Any
from urllib.parse import urlsplit

import pytest

from compaction_proxy.gateway import client_stream
from compaction_proxy.gateway.server import ClientDeadlines, connection, serve_embedded

CHAT = "/v1/chat/completions"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
OVERLOADED = {
    "message": "Too many requests are in progress. Try again later.",
    "type": "overloaded_error",
    "param": None,
    "code": "overloaded",
}
TOO_LATE = {
    "message": "The request body did not arrive in time.",
    "type": "invalid_request_error",
    "param": None,
    "code": "request_timeout",
}


async def test_one_request_too_many_is_refused_and_places_come_back_however_requests_end(
    wire: Any, chat: Any
) -> None:
    asked, go_on = asyncio.Semaphore(0), asyncio.Event()

    async def script(exchange: Any) -> None:
        asked.release()
        await go_on.wait()
        await exchange.send(OK)

    limits = {"max_in_flight": 2}
    async with (
        wire.running_upstream(script) as upstream,
        wire.running_proxy(upstream.port, server=limits) as port,
    ):
        staying = asyncio.create_task(wire.ask(port, chat()))
        _, leaving = await asyncio.open_connection("127.0.0.1", port)
        leaving.write(chat())
        await asked.acquire()
        await asked.acquire()
        refused = await wire.ask(port, chat())
        health = await wire.ask(port, wire.get("/livez"))
        leaving.close()
        next_one = asyncio.create_task(wire.ask(port, chat()))
        await asked.acquire()
        go_on.set()
        served_both = [(await staying).body, (await next_one).body]
    assert (refused.status, json.loads(refused.body)) == (503, {"error": OVERLOADED})
    assert refused.all(b"retry-after") == [b"1"]
    assert (health.status, served_both) == (200, [b"ok", b"ok"])


async def test_a_request_that_is_relayed_unread_takes_a_place_too(wire: Any, chat: Any) -> None:
    asked, go_on = asyncio.Semaphore(0), asyncio.Event()

    async def script(exchange: Any) -> None:
        asked.release()
        await go_on.wait()
        await exchange.send(OK)

    unread = wire.post("/v1/embeddings")
    async with (
        wire.running_upstream(script) as upstream,
        wire.running_proxy(upstream.port, server={"max_in_flight": 1}) as port,
    ):
        staying = asyncio.create_task(wire.ask(port, unread))
        await asked.acquire()
        refused = [(await wire.ask(port, request)).status for request in (unread, chat())]
        go_on.set()
        served = [(await staying).status, (await wire.ask(port, chat())).status]
    assert (refused, served) == ([503, 503], [200, 200])


async def test_a_tenant_that_takes_many_places_leaves_some_to_others(wire: Any, chat: Any) -> None:
    asked, go_on = asyncio.Semaphore(0), asyncio.Event()

    async def script(exchange: Any) -> None:
        asked.release()
        await go_on.wait()
        await exchange.send(OK)

    limits, share = {"max_in_flight": 32}, 24
    one, other = ("authorization: Bearer one", "authorization: Bearer other")
    async with (
        wire.running_upstream(script) as upstream,
        wire.running_proxy(upstream.port, server=limits) as port,
    ):
        go_on.set()
        for each in (other, one):  # no longer alone
            await wire.ask(port, chat(each))
            await asked.acquire()
        go_on.clear()
        requests = [chat(one), wire.post("/v1/embeddings", b"{}", one)]
        staying = [asyncio.create_task(wire.ask(port, each)) for each in requests * (share // 2)]
        for _ in staying:
            await asked.acquire()
        refused = [await wire.ask(port, request) for request in requests]
        others = [chat(other), wire.post("/v1/embeddings", b"{}", other)]
        coming = [asyncio.create_task(wire.ask(port, each)) for each in others]
        for _ in coming:
            await asked.acquire()
        go_on.set()
        served = [(await task).status for task in (*staying, *coming)]
    assert [(reply.status, reply.all(b"retry-after")) for reply in refused] == [(503, [b"1"])] * 2
    assert served == [200] * (share + 2)


async def test_a_request_that_passes_has_no_task_beside_its_own(wire: Any, chat: Any) -> None:
    seen: list[int] = []
    before: set[Any] = set()

    async def script(exchange: Any) -> None:
        seen.append(len({task for task in asyncio.all_tasks() - before if "Cycle.run" in repr(task)}))
        seen.append(len({task for task in asyncio.all_tasks() - before if "_watch" in repr(task)}))
        await exchange.send(OK)

    async with wire.running_upstream(script) as upstream, wire.running_proxy(upstream.port) as port:
        before |= asyncio.all_tasks()
        assert (await wire.ask(port, chat())).body == b"ok"
    assert seen == [1, 0]
    assert (client_stream.DEPARTURE, client_stream.NOTICE) == (connection.DEPARTURE, connection.NOTICE)


@pytest.mark.virtual_time
async def test_a_body_is_let_go_of_while_its_answer_streams(wire: Any) -> None:
    streaming, go_on = asyncio.Event(), asyncio.Event()

    async def script(exchange: Any) -> None:
        exchange.body = b""
        await exchange.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n")
        streaming.set()
        await go_on.wait()
        await exchange.send(b"0\r\n\r\n")

    large = wire.chat_body(filler="x" * 100_000)
    models = {"models": {"m": {"window": 1_000_000}}}
    async with (
        wire.running_upstream(script) as upstream,
        wire.running_proxy(upstream.port, **models) as port,
    ):
        answer = asyncio.create_task(wire.ask(port, wire.post(CHAT, large, "x-session-id: s")))
        await streaming.wait()
        await asyncio.sleep(0.05)  # until the answer's beginning has come
        held = [
            each
            for frame in (task.get_coro() for task in asyncio.all_tasks() if "Cycle.run" in repr(task))
            for each in _reachable(frame)
            if type(each) in {bytes, bytearray} and len(each) >= len(large)
        ]
        go_on.set()
        assert (await answer).body == b"x"
    assert held == []


def _reachable(coroutine: Any) -> list[Any]:
    """What the frames of a coroutine hold, and what those hold, some steps deep."""
    found: list[Any] = []
    while coroutine is not None and getattr(coroutine, "cr_frame", None) is not None:
        found.extend(coroutine.cr_frame.f_locals.values())
        coroutine = coroutine.cr_await
    inner = [held for each in found for held in gc.get_referents(each)]
    return [*found, *inner]


async def lifespan(receive: Any, send: Any) -> None:
    for done in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{done}.complete"})


async def patient(scope: Any, receive: Any, send: Any) -> None:
    """Reads a body, then answers slowly; a body that begins with `!` is refused at once."""
    if scope["type"] == "lifespan":
        await lifespan(receive, send)
        return
    message = await receive()
    if not message["body"].startswith(b"!"):
        while message.get("more_body"):
            message = await receive()
        if message["type"] == "http.disconnect":
            return
        await asyncio.sleep(0.5)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def said(url: str, *pieces: bytes, pause_s: float = 0.0) -> bytes:
    """What comes back until the connection is closed, for what is sent piece by piece."""
    reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
    answer = asyncio.create_task(_read_to_end(reader))
    for piece in pieces:
        if not answer.done():
            writer.write(piece)
        await asyncio.sleep(pause_s)
    async with asyncio.timeout(100):
        came = await answer
    writer.close()
    return came


async def _read_to_end(reader: asyncio.StreamReader) -> bytes:
    """What comes until the connection ends. A reset is an end too: it answers bytes sent after the close."""
    came = b""
    try:
        while piece := await reader.read(65_536):
            came += piece
    except ConnectionResetError:
        pass
    return came


POST = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n"
LATE = ClientDeadlines(head_s=0.2, body_s=0.2)


@pytest.mark.virtual_time
async def test_a_connection_without_a_whole_head_is_closed() -> None:
    async with serve_embedded(patient, deadlines=ClientDeadlines(head_s=0.2, body_s=60)) as url:
        trickling = [b"POST / HTTP/1.1\r\n", *[b"x: 1\r\n"] * 5]
        came = await asyncio.gather(said(url), said(url, b"POST / HT"), said(url, *trickling, pause_s=0.1))
        second = await said(url, POST % 1 + b"\r\nx" + b"POST / HTTP/1.1\r\n", pause_s=0.1)
    assert list(came) == [b"", b"", b""]
    assert (second[:12], second[-2:]) == (b"HTTP/1.1 200", b"ok")


@pytest.mark.virtual_time
async def test_a_body_that_stops_coming_is_answered_with_408() -> None:
    async with serve_embedded(patient, deadlines=ClientDeadlines(head_s=60, body_s=0.2)) as url:
        came = await said(url, POST % 10 + b"\r\nhalf")
    head, _, body = came.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert b"\r\nconnection: close" in head
    assert json.loads(body) == {"type": "error", "error": TOO_LATE}


@pytest.mark.virtual_time
async def test_a_body_that_trickles_is_answered_with_408() -> None:
    async with serve_embedded(patient, deadlines=ClientDeadlines(head_s=60, body_s=0.3)) as url:
        came = await said(url, POST % 1_000 + b"\r\nhalf", *[b"x"] * 20, pause_s=0.05)
    head, _, body = came.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert json.loads(body) == {"type": "error", "error": TOO_LATE}


@pytest.mark.virtual_time
async def test_what_is_left_of_a_refused_body_does_not_hold_its_connection() -> None:
    async with serve_embedded(patient, deadlines=ClientDeadlines(head_s=60, body_s=0.2)) as url:
        came = await said(url, POST % 10 + b"\r\n!", b"xx", pause_s=0.05)
    assert (came[:12], came[-2:]) == (b"HTTP/1.1 200", b"ok")


@pytest.mark.virtual_time
async def test_an_idle_connection_is_closed_after_its_time_and_not_before() -> None:
    async with serve_embedded(patient, deadlines=ClientDeadlines(head_s=60, body_s=60, idle_s=0.4)) as url:
        came = await said(url, POST % 1 + b"\r\n!", POST % 1 + b"\r\n!", pause_s=0.2)
    assert came.count(b"HTTP/1.1 200") == 2


async def trickle(writer: asyncio.StreamWriter) -> None:
    """Send on and on, until that fails."""
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.02)


@pytest.mark.virtual_time
async def test_a_refused_client_that_goes_on_sending_is_closed_after_a_while() -> None:
    async with serve_embedded(patient, deadlines=ClientDeadlines(head_s=60, body_s=0.2, linger_s=0.2)) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
        writer.write(POST % 1_000 + b"\r\nhalf")
        assert b"408" in await reader.readline()
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(trickle(writer), 30)
        writer.close()


@pytest.mark.virtual_time
async def test_a_slow_body_and_a_slow_answer_are_no_offence() -> None:
    async with serve_embedded(patient, deadlines=LATE) as url:
        pieces = [b"connection: close\r\n\r\n", *[b"x" * 100] * 6]
        came = await said(url, POST % 600 + pieces[0], *pieces[1:], pause_s=0.1)
    assert (came[:12], came[-2:]) == (b"HTTP/1.1 200", b"ok")
