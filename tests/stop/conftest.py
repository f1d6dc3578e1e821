"""The proxy as a process, and an upstream that streams for as long as it is told to."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

import proxy

ROOT = Path(proxy.__file__).parent.parent
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
    """Answers with as many events as the request's `n` says, and to a summary call after `summary_s`."""

    port: int = 0
    summary_s: float = 0.0
    summaries: int = 0
    streaming: int = 0
    left: list[str] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
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


@dataclass
class Running:
    """A proxy that accepts requests.

    Attributes:
        process: The process; the parent where there are workers.
        url: Where it listens.
        lines: What it has printed.
        errors: The file that its stderr goes to.
    """

    process: asyncio.subprocess.Process
    url: str
    lines: list[str]
    errors: Path

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def events(self, name: str) -> list[dict[str, Any]]:
        """Log lines of one event, without time, level and logger."""
        lines = [json.loads(line) for line in self.errors.read_text().splitlines()]
        hidden = {"event", "timestamp", "level", "logger"}
        return [{k: v for k, v in line.items() if k not in hidden} for line in lines if line["event"] == name]

    async def end(self, limit_s: float, number: int = signal.SIGTERM) -> float:
        """Send a signal; the seconds until the process ends, which it must within the limit, with code 0."""
        begun = time.monotonic()
        self.process.send_signal(number)
        await self.ended(limit_s)
        return time.monotonic() - begun

    async def ended(self, limit_s: float) -> None:
        code = await asyncio.wait_for(self.process.wait(), limit_s)
        assert code == 0, self.errors.read_text()

    def workers(self) -> list[int]:
        """Process ids of the workers: children that are not multiprocessing's own."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


class Stop:
    """What tests need, without an import between test files."""

    body = staticmethod(body)
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

    async def spawn(
        self, *arguments: str, errors_to: str = "stderr", **environ: str
    ) -> asyncio.subprocess.Process:
        """A proxy that has just been started, in a process group of its own."""
        errors = (self.folder / errors_to).open("wb")
        with errors:
            return await asyncio.create_subprocess_exec(
                sys.executable, "-m", "proxy", "serve", "--port", "0", *arguments,
                cwd=self.folder,
                # Python runs a `sitecustomize` that a test may have put into the folder.
                env={"HOME": str(self.folder), "PYTHONPATH": f"{self.folder}{os.pathsep}{ROOT}", **environ},
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )  # fmt: skip

    @contextlib.asynccontextmanager
    async def proxy(self, upstream: int = 9, *arguments: str, **server: Any) -> AsyncIterator[Running]:
        """A proxy that accepts requests; keyword arguments are keys of `server`."""
        environ = {f"COMPACTION_PROXY__SERVER__{key.upper()}": str(value) for key, value in server.items()}
        environ["COMPACTION_PROXY__SUMMARY__MODEL"] = "summary-small"
        target = f"http://127.0.0.1:{upstream}/v1"
        process = await self.spawn("--upstream", target, *arguments, **environ)
        try:
            assert process.stdout is not None
            lines: list[str] = []
            while not lines or "OPENAI_BASE_URL" not in lines[-1]:
                line = await asyncio.wait_for(process.stdout.readline(), 60)
                assert line, (self.folder / "stderr").read_text()
                lines.append(line.decode().rstrip())
            yield Running(process, lines[0].rpartition(" ")[2], lines, self.folder / "stderr")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.communicate()

    @contextlib.asynccontextmanager
    async def client(self, running: Running) -> AsyncIterator[httpx.AsyncClient]:
        limits = httpx.Limits(max_connections=300, max_keepalive_connections=300)
        async with httpx.AsyncClient(
            base_url=running.url, timeout=60, limits=limits, trust_env=False
        ) as client:
            yield client

    async def stream(self, client: httpx.AsyncClient, user: str, events: int) -> tuple[bytes, float]:
        """One whole answer, and when it ended."""
        answer = await client.post("/v1/chat/completions", json=request(user, events))
        return answer.content, time.monotonic()

    async def until(self, condition: Any, limit_s: float = 20.0) -> None:
        """Wait until a condition holds."""
        async with asyncio.timeout(limit_s):
            while not condition():  # noqa: ASYNC110 - it is about other processes
                await asyncio.sleep(0.01)


@pytest.fixture
def stop(tmp_path: Path) -> Stop:
    return Stop(tmp_path)
