"""A scripted upstream on a raw socket, the product under its own server, and a raw client between them."""

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import pytest
import uvicorn

from compaction_proxy import app
from compaction_proxy.app import create_app
from compaction_proxy.config.config import Config
from compaction_proxy.gateway.body_budget import BodyBudget
from compaction_proxy.gateway.concurrency_limit import ConcurrencyLimiter
from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.providers import tokenizers
from compaction_proxy.storage.store import Store
from tests.helpers.virtual_time import VirtualTimeLoop

CHAT = "/v1/chat/completions"
# The two ways of a chat request, by the header field that chooses. Past the gate it is parsed, digested,
# counted and looked up; the field lowers nothing, because no trigger is as high.
WAYS = {"through the gate": (), "past the gate": ("x-compaction-trigger-tokens: 1000000",)}

cached_load = functools.cache(tokenizers.load_encoding)


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

    @property
    def is_own(self) -> bool:
        """Whether the proxy itself asks, for models and windows."""
        return self.head.startswith(b"GET ") and dict(self.fields).get(b"user-agent", b"").startswith(
            b"compaction-proxy/"
        )

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
                if exchange.is_own:
                    await exchange.send(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
                    continue
                self.seen.append(exchange)
                await self.script(exchange)
                if writer.is_closing():
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open_sockets -= 1
            writer.close()


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The event loop of a test: a virtual clock if it is marked `virtual_time`, else the loop of `serve`."""
    if item.get_closest_marker("virtual_time"):
        return {"loop": VirtualTimeLoop}
    return {"loop": uvicorn.Config("", loop="auto").get_loop_factory() or asyncio.new_event_loop}


@contextlib.asynccontextmanager
async def running_upstream(script: Script) -> AsyncIterator[Scripted]:
    upstream = Scripted(script)
    server = await asyncio.start_server(upstream.serve, "127.0.0.1", 0)
    upstream.port = server.sockets[0].getsockname()[1]
    try:
        yield upstream
    finally:
        server.close()


@contextlib.asynccontextmanager
async def running_proxy(
    upstream_port: int, *, store: Store | None = None, **sections: Any
) -> AsyncIterator[int]:
    """The product, as `serve` composes and serves it; gives its port. `sections` are the configuration's."""
    upstream = {"base_url": f"http://127.0.0.1:{upstream_port}/v1", **sections.pop("upstream", {})}
    given = {
        "store": {"url": "memory://"},
        "summary": {"model": "none"},
        "models": {"m": {"window": 128_000}},  # one that is not known is asked for
        **sections,
        "server": {"admin_key": "none", **sections.get("server", {})},
        "upstream": upstream,
    }
    with mock.patch.object(tokenizers, "load_encoding", cached_load):  # takes half a second each time
        async with serve_embedded(create_app(Config.model_validate(given), store=store)) as url:
            yield urlsplit(url).port or 0


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


def chat_body(**members: Any) -> bytes:
    """A chat request with a history long enough to be looked up in the store."""
    said = [{"role": role, "content": f"{role} says žluť"} for role in ("user", "assistant") * 2]
    return json.dumps(
        {"model": "m", "messages": [*said, {"role": "user", "content": "?"}], **members}
    ).encode()


def get(path: str, *fields: str, method: str = "GET") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: proxy", "connection: close"]
    return "\r\n".join([*lines, *fields]).encode() + b"\r\n\r\n"


def status_of_ours(reply: Reply) -> dict[str, str]:
    """Our response headers, by what follows `x-compaction-`."""
    ours = ((name.decode(), held.decode()) for name, held in reply.fields)
    return {
        name.removeprefix("x-compaction-"): held for name, held in ours if name.startswith("x-compaction-")
    }


@dataclass
class Wire:
    """What tests need, without an import between test files."""

    running_upstream = staticmethod(running_upstream)
    running_proxy = staticmethod(running_proxy)
    ask = staticmethod(ask)
    post = staticmethod(post)
    get = staticmethod(get)
    chat_body = staticmethod(chat_body)
    status_of_ours = staticmethod(status_of_ours)
    parse_reply = staticmethod(parse_reply)
    ways = WAYS


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def admissions(monkeypatch: pytest.MonkeyPatch) -> list[ConcurrencyLimiter]:
    """The places for requests of each application that is made, in that order."""
    made: list[ConcurrencyLimiter] = []

    def making(places: int, *, body_budget: BodyBudget) -> ConcurrencyLimiter:
        made.append(ConcurrencyLimiter(places, body_budget=body_budget))
        return made[-1]

    monkeypatch.setattr(app, "ConcurrencyLimiter", making)
    return made


@pytest.fixture(params=WAYS)
def chat(request: pytest.FixtureRequest) -> Callable[..., bytes]:
    """Makes raw chat requests that all go the same way: through the gate, or past it."""

    def made(*fields: str, **members: Any) -> bytes:
        return post(CHAT, chat_body(**members), *WAYS[request.param], *fields)

    return made
