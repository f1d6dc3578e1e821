"""A scripted upstream on a raw socket, the proxy under a real server, and a raw client between them."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import httpx
import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from proxy.adapters.aiohttp_transport import AiohttpTransport
from proxy.relay.asgi import Dispatcher
from proxy.relay.blind import Blind
from proxy.relay.exchange import Upstream, build_request, open_answer, relay_back
from proxy.relay.inbound import read_body, while_connected

HOP = "0123456789abcdef"


@dataclass
class Exchange:
    """One request that reached the scripted upstream, and the socket to answer it on."""

    head: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    body: bytes = b""

    @property
    def target(self) -> bytes:
        return self.head.split(b" ", 2)[1]

    @property
    def fields(self) -> list[tuple[bytes, bytes]]:
        lines = self.head.split(b"\r\n")[1:-2]
        return [(name.lower(), held) for name, _, held in (line.partition(b": ") for line in lines)]

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()


Script = Callable[[Exchange], Awaitable[None]]


@dataclass
class Scripted:
    """An upstream that does what `script` says; it reads bodies only up to their content-length."""

    script: Script
    port: int = 0
    connections: int = 0
    open_sockets: int = 0
    seen: list[Exchange] = field(default_factory=list)
    read_bodies: bool = True

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open_sockets += 1
        try:
            while True:
                exchange = Exchange(await reader.readuntil(b"\r\n\r\n"), reader, writer)
                length = int(dict(exchange.fields).get(b"content-length", b"0"))
                if self.read_bodies:
                    exchange.body = await reader.readexactly(length)
                self.seen.append(exchange)
                await self.script(exchange)
                if writer.is_closing():
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open_sockets -= 1
            writer.close()


@contextlib.asynccontextmanager
async def running_upstream(script: Script) -> AsyncIterator[Scripted]:
    upstream = Scripted(script)
    server = await asyncio.start_server(upstream.serve, "127.0.0.1", 0)
    upstream.port = server.sockets[0].getsockname()[1]
    try:
        yield upstream
    finally:
        server.close()


@dataclass
class Chat:
    """The least a chat endpoint can be: whole body, one exchange."""

    upstream: Upstream
    taps: list[bytes] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(scope, receive, 1_048_576)
        async with while_connected(receive):
            answer = await open_answer(self.upstream, build_request(self.upstream, scope, body))
            await relay_back(answer, send, extra=[(b"x-compaction-status", b"none")], tap=self.taps.append)


async def own(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ours " + scope["root_path"].encode()})


@contextlib.asynccontextmanager
async def running_app(app: ASGIApp) -> AsyncIterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, ws="none", lifespan="on", log_config=None, access_log=False, loop="asyncio")
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:  # noqa: ASYNC110 - uvicorn offers no event
        await asyncio.sleep(0.002)
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        server.force_exit = True
        await running
        listener.close()


@dataclass
class Proxy:
    port: int
    upstream: Upstream
    chat: Chat


@contextlib.asynccontextmanager
async def running_proxy(
    upstream_port: int,
    *,
    transport: httpx.AsyncBaseTransport | None = None,
    api_key: str = "",
    read_timeout_s: float = 5.0,
    base_path: str = "",
) -> AsyncIterator[Proxy]:
    transport = transport or AiohttpTransport()
    upstream = Upstream(f"http://127.0.0.1:{upstream_port}/v1", api_key, HOP, transport, 5.0, read_timeout_s)
    chat = Chat(upstream)
    app = Dispatcher(admin=own, chat=chat, blind=Blind(upstream), hop=HOP, base_path=base_path)
    try:
        async with running_app(app) as port:
            yield Proxy(port, upstream, chat)
    finally:
        await transport.aclose()


@dataclass
class Reply:
    """A response as it stood on the wire."""

    status: int
    fields: list[tuple[bytes, bytes]]
    body: bytes
    whole: bool

    def all(self, name: bytes) -> list[bytes]:
        return [held for key, held in self.fields if key == name]


def _dechunk(data: bytes) -> tuple[bytes, bool]:
    body = b""
    while True:
        size, found, rest = data.partition(b"\r\n")
        if not found:
            return body, False
        length = int(size, 16)
        if length == 0:
            return body, rest == b"\r\n"
        body += rest[:length]
        if len(rest) < length + 2:
            return body, False
        data = rest[length + 2 :]


def parse_reply(data: bytes, *, bodiless: bool = False) -> Reply:
    head, _, rest = data.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    fields = [(name.lower(), held) for name, _, held in (line.partition(b": ") for line in lines)]
    known = dict(fields)
    if known.get(b"transfer-encoding") == b"chunked":
        body, whole = _dechunk(rest)
    else:
        body, whole = rest, bodiless or len(rest) == int(known.get(b"content-length", len(rest)))
    return Reply(int(first.split(b" ")[1]), fields, body, whole)


async def ask(port: int, request: bytes, *, bodiless: bool = False) -> Reply:
    """Send raw bytes and read until the proxy closes; the request should say `connection: close`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        return parse_reply(await reader.read(-1), bodiless=bodiless)
    finally:
        writer.close()


def post(path: str, body: bytes = b"{}", *fields: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: proxy", f"content-length: {len(body)}", "connection: close"]
    return "\r\n".join([*lines, *fields]).encode() + b"\r\n\r\n" + body


def get(path: str, *fields: str, method: str = "GET") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: proxy", "connection: close"]
    return "\r\n".join([*lines, *fields]).encode() + b"\r\n\r\n"


@dataclass
class Wire:
    """What tests need, without an import between test files."""

    running_upstream = staticmethod(running_upstream)
    running_proxy = staticmethod(running_proxy)
    ask = staticmethod(ask)
    post = staticmethod(post)
    get = staticmethod(get)
    parse_reply = staticmethod(parse_reply)
    hop = HOP


@pytest.fixture
def wire() -> Wire:
    return Wire()
