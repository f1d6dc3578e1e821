"""How uvicorn's server ends with our connections, as it does where the proxy is embedded."""

import asyncio
import socket
from typing import Any

import uvicorn

from compaction_proxy.gateway.server.connection import ServerConnection

STREAMS = 20
CHUNKS = 10


async def test_a_server_that_ends_neither_cancels_streams_nor_tells_them_that_the_client_left() -> None:
    seen: list[str] = []
    streaming = asyncio.Semaphore(0)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        gone = asyncio.create_task(receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        streaming.release()
        for _ in range(CHUNKS):
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
            await asyncio.sleep(0.05)
            seen.extend(gone.result()["type"] for _ in range(gone.done()))
        await send({"type": "http.response.body", "body": b""})
        gone.cancel()

    async def answer(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        got = await reader.read()
        writer.close()
        return got.partition(b"\r\n\r\n")[2]

    bound = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app, lifespan="off", ws="none", http=ServerConnection, log_config=None, access_log=False
    )
    server = uvicorn.Server(config)
    port = bound.getsockname()[1]
    serving = asyncio.create_task(server._serve([bound]))
    while not server.started:  # noqa: ASYNC110 - uvicorn offers no event
        await asyncio.sleep(0.01)
    answers = [asyncio.create_task(answer(port)) for _ in range(STREAMS)]
    for _ in answers:
        await streaming.acquire()
    server.should_exit = True
    assert await asyncio.gather(*answers) == [b"1\r\nx\r\n" * CHUNKS + b"0\r\n\r\n"] * STREAMS
    await serving
    assert seen == []
