"""How a proxy ends: nobody's answer is cut, and nobody keeps it from ending."""

import asyncio
import signal
import sys
from typing import Any

import httpx
import pytest

HALF_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-le"
HALF_BODY = b'POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{"model": "m", '
ENDLESS = 100_000
LONG_TALK = [{"role": ("user", "assistant")[n % 2], "content": f"Word {n}. " * 200} for n in range(31)]

# A thread of the standard library's, as name look-ups use it, that is at work for long at the end.
HANGING = """
import asyncio, time
from compaction_proxy.telemetry.exchange_log import ExchangeLog
async def close(self):
    asyncio.get_running_loop().run_in_executor(None, time.sleep, 600)
ExchangeLog.close = close
"""


async def opened(
    port: int, sent: bytes, count: int
) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connections on which something was sent."""
    pairs = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
    for _, writer in pairs:
        writer.write(sent)
    return pairs


async def test_every_stream_completes_beside_half_requests_and_idle_connections(stop: Any) -> None:
    async with (
        stop.upstream() as upstream,
        stop.proxy(upstream.port) as running,
        stop.client(running) as client,
    ):
        others = await opened(running.port, HALF_HEAD, 25)
        others += await opened(running.port, HALF_BODY, 25)
        others += await opened(running.port, b"", 5)
        idle = await opened(running.port, b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n", 10)
        for reader, _ in idle:
            await reader.readuntil(b"}")
        upstream.go_on.clear()
        streams = [asyncio.create_task(stop.stream(client, f"u{n}", 5 + n % 5)) for n in range(100)]
        await stop.until(lambda: upstream.streaming == 100)
        running.process.send_signal(signal.SIGTERM)
        await stop.until(lambda: running.events("serving.stopping"))
        upstream.go_on.set()
        await running.ended()
        answers = await asyncio.gather(*streams)
        for _, writer in [*others, *idle]:
            writer.close()
    assert answers == [stop.body(f"u{n}", 5 + n % 5) for n in range(100)]
    assert running.events("serving.stopping") == [{"requests": 100, "accept_grace_s": 0, "drain_s": 120}]
    assert running.events("serving.stopped") == [{"finished": 100, "dropped": 65, "cut": 0}]


@pytest.mark.skipif(sys.platform != "linux", reason="looks at sockets in /proc")
async def test_at_first_it_is_unready_alive_and_still_takes_requests(stop: Any) -> None:
    async with (
        stop.upstream() as upstream,
        stop.proxy(upstream.port, accept_grace_s=5) as running,
        stop.client(running) as client,
    ):
        upstream.go_on.clear()
        stream = asyncio.create_task(stop.stream(client, "before", 5))
        await stop.until(lambda: upstream.streaming == 1)
        assert (await client.get("/readyz")).status_code == 200
        running.process.send_signal(signal.SIGTERM)
        await stop.until(lambda: running.events("serving.stopping"))
        ready = await client.get("/readyz")
        alive = await client.get("/livez")
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=stop.request("late", 3)))
        await stop.until(lambda: upstream.streaming == 2)
        assert stop.count_listeners(running.port) == 1
        await stop.until(lambda: stop.count_listeners(running.port) == 0)
        assert not stream.done()
        upstream.go_on.set()
        before = await stream
        late = await asking
        await running.ended()
    assert (ready.status_code, ready.json()["status"], ready.json()["ready"]) == (503, "stopping", False)
    assert alive.status_code == 200
    assert (late.content, late.headers["connection"]) == (stop.body("late", 3), "close")
    assert before == stop.body("before", 5)
    assert running.events("serving.stopping") == [{"requests": 1, "accept_grace_s": 5, "drain_s": 120}]
    # The stream, the late one, and both health checks.
    assert running.events("serving.stopped") == [{"finished": 4, "dropped": 0, "cut": 0}]


async def cut_answer(port: int, sent: bytes) -> bytes:
    """What comes on a connection until it is closed, by whichever packet."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    got = b""
    try:
        while chunk := await reader.read(65_536):
            got += chunk
    except ConnectionError:
        pass
    writer.close()
    return got


def raw(stop: Any, user: str, events: int) -> bytes:
    built = httpx.Request("POST", "http://x/v1/chat/completions", json=stop.request(user, events))
    return b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (
        len(built.content),
        built.content,
    )


async def test_what_still_streams_after_the_drain_is_cut_and_not_given_an_end(stop: Any) -> None:
    async with stop.upstream() as upstream, stop.proxy(upstream.port, drain_s=0.5) as running:
        answer = asyncio.create_task(cut_answer(running.port, raw(stop, "u", ENDLESS)))
        await stop.until(lambda: upstream.streaming == 1)
        await running.end()
        got = await answer
        await stop.until(lambda: upstream.left == ["u"])
    assert got.startswith(b"HTTP/1.1 200 OK")
    assert b"data: u-5\n\n" in got
    assert not got.endswith(b"0\r\n\r\n")
    assert running.events("serving.stopped") == [{"finished": 0, "dropped": 0, "cut": 1}]


@pytest.mark.parametrize("grace_s", [0, 60])
async def test_a_second_signal_ends_it_at_once(grace_s: int, stop: Any) -> None:
    async with stop.upstream() as upstream, stop.proxy(upstream.port, accept_grace_s=grace_s) as running:
        answer = asyncio.create_task(cut_answer(running.port, raw(stop, "u", ENDLESS)))
        await stop.until(lambda: upstream.streaming == 1)
        running.process.send_signal(signal.SIGTERM)
        await stop.until(lambda: running.events("serving.stopping"))
        await running.end()
        assert not (await answer).endswith(b"0\r\n\r\n")
    assert running.events("serving.stopped") == [{"finished": 0, "dropped": 0, "cut": 1}]


async def test_ctrl_c_with_nothing_running_ends_at_once(stop: Any) -> None:
    async with stop.proxy() as running:
        await running.end(signal.SIGINT)
    assert "Traceback" not in running.errors.read_text()


async def test_a_client_that_does_not_read_is_no_reason_to_stay(stop: Any) -> None:
    async with stop.upstream() as upstream, stop.proxy(upstream.port, drain_s=0.5) as running:
        [(_, writer)] = await opened(running.port, raw(stop, "u" * 2_000_000, ENDLESS), 1)
        await stop.until(lambda: upstream.streaming == 1)
        await asyncio.sleep(0.5)  # by now every buffer between is full
        await running.end()
        writer.transport.abort()


async def test_a_request_that_waits_for_its_summary_is_answered(stop: Any) -> None:
    async with (
        stop.upstream() as upstream,
        stop.proxy(upstream.port) as running,
        stop.client(running) as client,
    ):
        upstream.summary_s = 1.5
        asked = stop.request("u", 3, messages=LONG_TALK)
        post = client.post("/v1/chat/completions", json=asked, headers={"x-compaction": "force"})
        answer = asyncio.create_task(post)
        await stop.until(lambda: upstream.summaries == 1)
        await running.end()
        got = await answer
    assert (got.status_code, got.headers["x-compaction-status"]) == (200, "applied")
    assert got.content == stop.body("u", 3)


async def test_a_summary_that_nobody_waits_for_does_not_hold_it_up(stop: Any) -> None:
    async with (
        stop.upstream() as upstream,
        stop.proxy(upstream.port) as running,
        stop.client(running) as client,
    ):
        upstream.summary_s = 110
        asked = stop.request("u", 3, messages=LONG_TALK)
        post = client.post("/v1/chat/completions", json=asked, headers={"x-compaction": "force"})
        answer = asyncio.create_task(post)
        await stop.until(lambda: upstream.summaries == 1)
        answer.cancel()
        await asyncio.wait({answer})
        await running.end()
    assert "Traceback" not in running.errors.read_text()


async def test_a_store_that_hangs_does_not_hold_it_up(stop: Any) -> None:
    async with (
        stop.upstream() as upstream,
        stop.proxy(upstream.port) as running,
        stop.client(running) as client,
    ):
        lock = "c.execute('BEGIN EXCLUSIVE'); print(1, flush=True); input()"
        path = next(stop.folder.rglob("state.db"))
        holder = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", f"import sqlite3; c = sqlite3.connect({str(path)!r}); {lock}"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert holder.stdout is not None
        assert await holder.stdout.readline() == b"1\n"
        headers = {"x-session-id": "s"}
        await client.post("/v1/chat/completions", json=stop.request("u", 1), headers=headers)
        await running.end()
        await holder.communicate(b"\n")


async def test_a_thread_that_hangs_does_not_hold_it_up(stop: Any) -> None:
    (stop.folder / "sitecustomize.py").write_text(HANGING)
    async with stop.proxy() as running:
        await running.end()
    assert running.events("serving.stopped") == [{"finished": 0, "dropped": 0, "cut": 0}]
