import asyncio
from typing import Any
from urllib.parse import urlsplit

import pytest

from proxy.serving import served
from proxy.serving.connection import without_offer

OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"


@pytest.mark.parametrize(
    ("came", "read"),
    [
        (b"POST /x HTTP/1.1\r\nHost: a\r\n" + OFFER + b"\r\n{}", b"POST /x HTTP/1.1\r\nHost: a\r\n\r\n{}"),
        (
            b"GET / HTTP/1.1\r\nconnection: keep-alive, upgrade\r\nupgrade: h2c\r\nx: 1\r\n\r\n",
            b"GET / HTTP/1.1\r\nconnection: keep-alive\r\nx: 1\r\n\r\n",
        ),
        (b"GET / HTTP/1.1\r\nupgrade: websocket\r\nx: h2c\r\n\r\n", None),
        (b"some body about upgrade: h2c\r\n\r\n", None),
        (b"POST /x HTTP/1.1\r\nx: 1\r\n\r\nbody\r\nupgrade: h2c\r\n\r\n", None),
    ],
)
def test_the_offer_is_taken_out_and_nothing_else(came: bytes, read: bytes | None) -> None:
    assert without_offer(came) == (came if read is None else read)


async def test_a_request_that_offers_http2_is_read_with_its_body() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for done in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{done}.complete"})
            return
        body = (await receive())["body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    async with served(app) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
        writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n" + OFFER + b"\r\nhello")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert await reader.readuntil(b"0\r\n\r\n") == b"5\r\nhello\r\n0\r\n\r\n"
        writer.close()
