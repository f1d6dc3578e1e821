"""A client that leaves is noticed at every stage, and back-pressure reaches the upstream."""

import asyncio
import json
import socket
from typing import Any

import pytest

# Only a hang takes as long.
NOTICED_WITHIN_S = 30.0

STREAM = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
BEGINNINGS = {
    "before the status": b"",
    "before the first byte": STREAM,
    "in the middle of a stream": STREAM + b"5\r\nfirst\r\n",
    "in the middle of a body": b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nfirst",
    "in the middle of an error": b"HTTP/1.1 400 No\r\ncontent-length: 100\r\n\r\nfirst",
}
SUMMARY_MODEL = "summary-small"


async def nothing_left(before: set[asyncio.Task[Any]]) -> None:
    """Wait until every task that was not there before has ended."""
    while asyncio.all_tasks() - before:  # noqa: ASYNC110 - it is about tasks, which set no event
        await asyncio.sleep(0.005)


async def leaves(wire: Any, request: bytes, stage: str) -> None:
    """Leave at a stage, and see the upstream's socket and all our tasks end in time."""
    asked, left = asyncio.Event(), asyncio.Event()

    async def script(exchange: Any) -> None:
        await exchange.send(BEGINNINGS[stage])
        asked.set()
        assert await exchange.reader.read() == b""
        left.set()
        exchange.writer.close()

    async with wire.running_upstream(script) as upstream, wire.running_proxy(upstream.port) as port:
        before = asyncio.all_tasks()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        await asked.wait()
        if "in the middle of a " in stage:
            await reader.readuntil(b"first")
        else:
            await asyncio.sleep(0.02)  # so that what the upstream has sent has come
        writer.close()
        async with asyncio.timeout(NOTICED_WITHIN_S):
            await left.wait()
            await nothing_left(before)


@pytest.mark.parametrize("stage", BEGINNINGS)
async def test_a_client_that_leaves_ends_the_upstream_call(wire: Any, chat: Any, stage: str) -> None:
    await leaves(wire, chat(), stage)


@pytest.mark.parametrize("stage", BEGINNINGS)
async def test_a_client_that_leaves_ends_a_call_that_nobody_looked_at(wire: Any, stage: str) -> None:
    await leaves(wire, wire.post("/v1/responses"), stage)


def long_chat(wire: Any) -> bytes:
    """A request that is over the trigger of a window of 2,000 tokens."""
    said = [
        {"role": role, "content": f"{role} tells: " + "alpha beta " * 60}
        for role in ("user", "assistant") * 10
    ]
    return bytes(wire.post("/v1/chat/completions", wire.chat_body(messages=said)))


def summary() -> bytes:
    """The answer of a summary model."""
    said = {
        "role": "assistant",
        "content": "They told one another of alpha and beta, again and again, and asked for nothing.",
    }
    body = json.dumps({"choices": [{"message": said, "finish_reason": "stop"}]}).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


def compacting(on_disconnect: str) -> dict[str, Any]:
    return {
        "summary": {"model": SUMMARY_MODEL},
        "compaction": {"on_disconnect": on_disconnect},
        "models": {"m": {"window": 2_000}},
    }


async def test_a_client_that_leaves_during_a_summary_ends_it_where_that_is_configured(wire: Any) -> None:
    asked, left = asyncio.Event(), asyncio.Event()

    async def script(exchange: Any) -> None:
        asked.set()
        assert await exchange.reader.read() == b""
        left.set()
        exchange.writer.close()

    async with (
        wire.running_upstream(script) as upstream,
        wire.running_proxy(upstream.port, **compacting("cancel")) as port,
    ):
        before = asyncio.all_tasks()
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(long_chat(wire))
        await asked.wait()
        writer.close()
        async with asyncio.timeout(NOTICED_WITHIN_S):
            await left.wait()
            await nothing_left(before)
        assert upstream.open_sockets == 0
    assert [json.loads(seen.body)["model"] for seen in upstream.seen] == [SUMMARY_MODEL]


@pytest.mark.virtual_time
async def test_a_summary_goes_on_as_long_as_one_client_waits_for_it(wire: Any) -> None:
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def script(exchange: Any) -> None:
        if json.loads(exchange.body)["model"] == SUMMARY_MODEL:
            asked.set()
            await go_on.wait()
            await exchange.send(summary())
        else:
            await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")

    async with (
        wire.running_upstream(script) as upstream,
        wire.running_proxy(upstream.port, **compacting("cancel")) as port,
    ):
        _, leaving = await asyncio.open_connection("127.0.0.1", port)
        leaving.write(long_chat(wire))
        await asked.wait()
        staying = asyncio.create_task(wire.ask(port, long_chat(wire)))
        await asyncio.sleep(0.05)  # until it waits for the same summary
        leaving.close()
        await asyncio.sleep(0.05)  # until that has been noticed
        go_on.set()
        reply = await staying
    assert (reply.body, wire.status_of_ours(reply)["status"]) == (b"ok", "applied")
    assert [json.loads(seen.body)["model"] for seen in upstream.seen] == [SUMMARY_MODEL, "m"]


@pytest.mark.virtual_time
async def test_a_summary_whose_client_left_is_finished_and_the_request_goes_nowhere(wire: Any) -> None:
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def script(exchange: Any) -> None:
        if json.loads(exchange.body)["model"] == SUMMARY_MODEL:
            asked.set()
            await go_on.wait()
            await exchange.send(summary())
        else:
            await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")

    async with (
        wire.running_upstream(script) as upstream,
        wire.running_proxy(upstream.port, **compacting("finish")) as port,
    ):
        before = asyncio.all_tasks()
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(long_chat(wire))
        await asked.wait()
        writer.close()
        await asyncio.sleep(0.05)  # until that has been noticed
        go_on.set()
        async with asyncio.timeout(NOTICED_WITHIN_S):
            while len(asyncio.all_tasks() - before) > upstream.open_sockets:  # noqa: ASYNC110 - likewise
                await asyncio.sleep(0.005)
        assert [json.loads(seen.body)["model"] for seen in upstream.seen] == [SUMMARY_MODEL]
        again = wire.status_of_ours(await wire.ask(port, long_chat(wire)))
    assert (again["status"], again["round"]) == ("applied", "1")  # whoever needs it puts it in force
    assert [json.loads(seen.body)["model"] for seen in upstream.seen] == [SUMMARY_MODEL, "m"]


@pytest.mark.virtual_time
@pytest.mark.parametrize("length", [1_000, 1_000_000])
async def test_a_client_that_leaves_while_sending_never_makes_a_whole_request(wire: Any, length: int) -> None:
    arrived = asyncio.Event()

    async def script(exchange: Any) -> None:
        raise AssertionError("half a body was taken for a whole one")

    async with wire.running_upstream(script) as upstream, wire.running_proxy(upstream.port) as port:
        before = asyncio.all_tasks()
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(wire.post("/v1/files", b"x" * length)[:-500])
        await writer.drain()
        asyncio.get_running_loop().call_later(0.05, arrived.set)
        await arrived.wait()
        writer.close()
        async with asyncio.timeout(NOTICED_WITHIN_S):
            await nothing_left(before)
        assert upstream.open_sockets == 0
    assert upstream.seen == []


async def test_a_client_that_leaves_within_a_chunked_upload_leaves_it_unfinished(wire: Any) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()
    got = []

    async def script(exchange: Any) -> None:
        got.append(await exchange.reader.readuntil(b"abc\r\n"))
        begun.set()
        got.append(await exchange.reader.read(-1))
        ended.set()
        exchange.writer.close()

    async with wire.running_upstream(script) as upstream, wire.running_proxy(upstream.port) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/files HTTP/1.1\r\nhost: p\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n")
        async with asyncio.timeout(NOTICED_WITHIN_S):
            await begun.wait()
        writer.close()
        async with asyncio.timeout(NOTICED_WITHIN_S):
            await ended.wait()
    assert got == [b"3\r\nabc\r\n", b""]


@pytest.mark.virtual_time
async def test_a_client_that_stops_reading_stops_the_upstream(wire: Any, chat: Any) -> None:
    offered = 64 * 1_048_576
    sent = 0

    async def script(exchange: Any) -> None:
        nonlocal sent
        await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % offered)
        while sent < offered:
            await exchange.send(b"x" * 65_536)
            sent += 65_536

    async def settled() -> int:
        last = -1
        while last != sent:
            last = sent
            await asyncio.sleep(0.15)
        return last

    async with wire.running_upstream(script) as upstream, wire.running_proxy(upstream.port) as port:
        client = socket.create_connection(("127.0.0.1", port))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        client.sendall(chat())
        blocked_at = await settled()
        client.close()
    # Kernel buffers of two loopback sockets take several MiB; ours add little.
    assert 0 < blocked_at < offered / 3
