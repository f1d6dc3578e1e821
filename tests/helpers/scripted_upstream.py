"""An upstream on a socket whose script writes each answer byte by byte, or whatever it wants instead."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field


@dataclass
class Asked:
    """A request as it reached an upstream: fields in their order, names in lower case."""

    target: bytes
    fields: list[tuple[bytes, bytes]]
    body: bytes

    def field(self, name: bytes) -> bytes:
        """The first value of a field, empty if there is none."""
        return dict(reversed(self.fields)).get(name, b"")


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    pieces = []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        pieces.append((await reader.readexactly(size + 2))[:-2])
    await reader.readuntil(b"\r\n")
    return b"".join(pieces)


Script = Callable[[Asked, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Upstream:
    """Answers as `script` says.

    Attributes:
        script: Writes the answer to a request.
        port: Where it listens.
        connections: How many there have been.
        seen: Every request, oldest first.
    """

    script: Script
    port: int = 0
    connections: int = 0
    seen: list[Asked] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                first, *lines = head[:-4].split(b"\r\n")
                fields = [(name.lower(), held) for name, _, held in (line.partition(b": ") for line in lines)]
                asked = Asked(first.split(b" ")[1], fields, b"")
                if asked.field(b"transfer-encoding"):
                    asked.body = await _read_chunks(reader)
                else:
                    asked.body = await reader.readexactly(int(asked.field(b"content-length") or b"0"))
                self.seen.append(asked)
                await self.script(asked, writer)
                if writer.is_closing():
                    return
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):  # the loop ends
            pass
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def upstream(script: Script) -> AsyncIterator[Upstream]:
    made = Upstream(script)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0, limit=1 << 20)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
