"""An upstream that answers once it may, and clients on raw sockets."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


def chat(*fields: bytes, text: str = "Go.") -> bytes:
    """A whole chat request."""
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    lines = b"".join(line + b"\r\n" for line in fields)
    return CHAT + lines + b"content-length: %d\r\n\r\n" % len(body) + body


@dataclass
class Upstream:
    """Answers `ok` once it may.

    Attributes:
        takes_s: How long each answer takes.
        go_on: Cleared, answers wait until it is set.
    """

    port: int = 0
    takes_s: float = 0.0
    asked: int = 0
    go_on: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(
                    int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                )
                self.asked += 1
                if self.takes_s:
                    await asyncio.sleep(self.takes_s)
                await self.go_on.wait()
                writer.write(OK)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def running_upstream() -> AsyncIterator[Upstream]:
    """An upstream that listens, and may answer."""
    upstream = Upstream()
    upstream.go_on.set()
    server = await asyncio.start_server(upstream.serve, "127.0.0.1", 0, backlog=1_024)
    upstream.port = server.sockets[0].getsockname()[1]
    try:
        yield upstream
    finally:
        server.close()


async def ask(port: int, request: bytes, limit_s: float = 60.0) -> bytes:
    """Whatever comes until the connection ends; empty where it was refused or reset."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionError:
        return b""
    try:
        writer.write(request)
        async with asyncio.timeout(limit_s):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


def note(text: str) -> None:
    """Say what was measured; pytest shows it with `-s`."""
    print(text)  # noqa: T201 - a test's figures are for people
