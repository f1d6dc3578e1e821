"""Wraps ASGI's receive and send for the demo provider, and notices when the client disconnects."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class ClientDepartedError(Exception):
    """Reports that the client has disconnected."""


class DemoClient:
    """Represents the client of one request. The client may disconnect while it waits for the answer.

    The answer is sent with the headers in `headers`.
    """

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self.headers: tuple[tuple[bytes, bytes], ...] = ((b"openai-version", b"2020-10-01"),)

    async def read_body(self) -> bytes:
        """Reads the whole request body.

        Raises:
            ClientDepartedError: The client disconnected before the body was complete.
        """
        parts = []
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDepartedError
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                return b"".join(parts)

    async def wait(self, seconds: float | None) -> None:
        """Waits for a number of seconds; None waits until the client disconnects.

        Raises:
            ClientDepartedError: The client disconnected meanwhile.
        """
        if seconds == 0:
            return
        try:
            async with asyncio.timeout(seconds):
                while (await self._receive())["type"] != "http.disconnect":
                    pass
        except TimeoutError:
            return
        raise ClientDepartedError

    async def start(self, status: int, kind: bytes, length: int | None = None) -> None:
        """Sends status and headers. `length` is the size of the body in bytes; None sends a chunked body."""
        headers = [(b"content-type", kind), *self.headers]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def send(self, data: bytes, *, more: bool = False) -> None:
        """Sends a part of the body. `more` says that further parts follow."""
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def send_json(self, status: int, data: bytes) -> None:
        """Sends a whole JSON answer."""
        await self.start(status, b"application/json", len(data))
        await self.send(data)
