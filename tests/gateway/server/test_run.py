import asyncio
from typing import Any

import pytest

from compaction_proxy.core.errors import ProxyError
from compaction_proxy.gateway.server import serve_embedded


async def lifespan(receive: Any, send: Any, log: list[str]) -> None:
    await receive()
    log.append("started")
    await send({"type": "lifespan.startup.complete"})
    await receive()
    log.append("ended")
    await send({"type": "lifespan.shutdown.complete"})


async def exchange(url: str, request: bytes) -> bytes:
    """What comes back on a connection until it is closed."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    writer.write(request)
    answer = await reader.read()
    writer.close()
    return answer


async def test_it_serves_while_the_block_runs_and_adds_nothing_but_a_date() -> None:
    log: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await lifespan(receive, send, log)
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async with serve_embedded(app) as url:
        assert log == ["started"]
        answer = await exchange(url, b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        lines = [line for line in answer.split(b"\r\n") if not line.startswith(b"date: ")]
        assert lines == [b"HTTP/1.1 200 OK", b"content-length: 2", b"connection: close", b"", b"ok"]
    assert log == ["started", "ended"]
    with pytest.raises(OSError, match="Connect call failed"):
        await exchange(url, b"")


async def test_an_application_that_does_not_start_is_an_error_and_not_the_end_of_the_process() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "no"})

    with pytest.raises(ProxyError, match="did not start"):
        async with serve_embedded(app):
            pytest.fail("it must not get here")


async def test_an_error_in_the_block_is_not_hidden() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await lifespan(receive, send, [])

    with pytest.raises(ZeroDivisionError):
        async with serve_embedded(app):
            raise ZeroDivisionError
