"""The proxy as a process, and an upstream that streams for as long as it is told to."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.proxy_processes import ProxyProcess, proxy_process

PAUSE_S = 0.05
SUMMARY = {
    "choices": [
        {
            "message": {
                "role": "assistant",
                "content": "They spoke of many words, again and again, and wanted nothing.",
            }
        }
    ]
}


@dataclass
class Upstream:
    """Answers with as many events as the request's `n` says, and to a summary call after `summary_s`.

    Attributes:
        go_on: Cleared, the last event of an answer of several waits until it is set.
    """

    port: int = 0
    summary_s: float = 0.0
    summaries: int = 0
    streaming: int = 0
    left: list[str] = field(default_factory=list)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.go_on.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET "):  # the proxy asks for models and windows
                    writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
                    continue
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                await self._answer(json.loads(await reader.readexactly(length)), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if asked["model"] == "summary-small":
            self.summaries += 1
            await asyncio.sleep(self.summary_s)
            text = json.dumps(SUMMARY).encode()
            kind = b"content-type: application/json\r\n"
            writer.write(b"HTTP/1.1 200 OK\r\n%scontent-length: %d\r\n\r\n%s" % (kind, len(text), text))
            return
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        self.streaming += 1
        try:
            for number in range(asked["n"]):
                if 0 < number == asked["n"] - 1:
                    await self.go_on.wait()
                chunk = event(asked["user"], number)
                writer.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
                await writer.drain()
                await asyncio.sleep(PAUSE_S)
            writer.write(b"0\r\n\r\n")
        except ConnectionError:
            self.left.append(asked["user"])
            raise
        finally:
            self.streaming -= 1


def event(user: str, number: int) -> bytes:
    return b"data: %s-%d\n\n" % (user.encode(), number)


def body(user: str, events: int) -> bytes:
    """What a stream of so many events is, byte for byte."""
    return b"".join(event(user, number) for number in range(events))


def request(user: str, events: int, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Go."}]
    return {"model": "m", "user": user, "n": events, "stream": True, "messages": messages, **more}


def count_listeners(port: int) -> int:
    """Sockets that take connections on a port; asked of the kernel, so that no connection is made."""
    lines = Path("/proc/net/tcp").read_text().splitlines()
    return sum(f":{port:04X} 00000000:0000 0A" in line for line in lines)


class Stop:
    """What tests need, without an import between test files."""

    body = staticmethod(body)
    count_listeners = staticmethod(count_listeners)
    request = staticmethod(request)

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextlib.asynccontextmanager
    async def upstream(self) -> AsyncIterator[Upstream]:
        upstream = Upstream()
        server = await asyncio.start_server(upstream.serve, "127.0.0.1", 0)
        upstream.port = server.sockets[0].getsockname()[1]
        try:
            yield upstream
        finally:
            server.close()

    @contextlib.asynccontextmanager
    async def proxy(self, upstream: int = 9, *arguments: str, **server: Any) -> AsyncIterator[ProxyProcess]:
        """A proxy that accepts requests; keyword arguments are keys of `server`."""
        summarised = {"COMPACTION_PROXY__SUMMARY__MODEL": "summary-small"}
        async with proxy_process(self.folder, upstream, *arguments, environ=summarised, **server) as running:
            yield running

    @contextlib.asynccontextmanager
    async def client(self, running: ProxyProcess) -> AsyncIterator[httpx.AsyncClient]:
        limits = httpx.Limits(max_connections=300, max_keepalive_connections=300)
        async with httpx.AsyncClient(
            base_url=running.url, timeout=60, limits=limits, trust_env=False
        ) as client:
            yield client

    async def stream(self, client: httpx.AsyncClient, user: str, events: int) -> bytes:
        """One whole answer."""
        answer = await client.post("/v1/chat/completions", json=request(user, events))
        return answer.content

    async def until(self, condition: Any, limit_s: float = 60.0) -> None:
        """Wait until a condition holds."""
        async with asyncio.timeout(limit_s):
            while not condition():  # noqa: ASYNC110 - it is about other processes
                await asyncio.sleep(0.01)


@pytest.fixture
def stop(tmp_path: Path) -> Stop:
    return Stop(tmp_path)
