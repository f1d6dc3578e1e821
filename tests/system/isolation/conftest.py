"""Proxies as processes that tell everything, and a raw client."""

import asyncio
import contextlib
import os
import signal
import sqlite3
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import redis

import compaction_proxy
from tests.helpers.free_ports import find_free_port
from tests.helpers.scripted_upstream import upstream

ROOT = Path(compaction_proxy.__file__).parents[2]
START_LIMIT_S = 60.0
END_LIMIT_S = 60.0
ANSWER_LIMIT_S = 60.0


@dataclass
class Proxy:
    """A proxy process that may be ended and started again at the same port.

    Attributes:
        folder: Its home; `output` there holds everything that it has ever printed and logged.
        environ: Its settings.
        port: Where it listens.
    """

    folder: Path
    environ: dict[str, str]
    port: int = field(default_factory=find_free_port)
    process: asyncio.subprocess.Process | None = None

    @property
    def output(self) -> Path:
        return self.folder / f"output-{self.port}"

    async def launch(self) -> None:
        """Start the process, and do not wait for it."""
        with self.output.open("ab") as output:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "compaction_proxy", "serve", "--port", str(self.port),
                cwd=self.folder,
                env={"HOME": str(self.folder), "PYTHONPATH": str(ROOT), **self.environ},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )  # fmt: skip

    async def start(self) -> None:
        """Start the process; it accepts requests then."""
        await self.launch()
        async with asyncio.timeout(START_LIMIT_S):
            while not await self._accepts():
                assert self.process is not None
                assert self.process.returncode is None, self.output.read_text()
                await asyncio.sleep(0.02)

    async def _accepts(self) -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except ConnectionError:
            return False
        writer.close()
        return True

    async def end(self, number: int = signal.SIGTERM) -> None:
        """Send a signal, and wait for the end."""
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
        await asyncio.wait_for(self.process.wait(), END_LIMIT_S)


@dataclass
class Reply:
    """A response as it came; `head` and `body` as bytes on the wire."""

    status: int
    head: bytes
    body: bytes

    def field(self, name: str) -> str:
        """A field's value, empty if there is none."""
        for line in self.head.decode("latin-1").split("\r\n")[1:]:
            key, _, held = line.partition(": ")
            if key.lower() == name:
                return held
        return ""


async def ask(port: int, request: bytes, *, leave_after_s: float | None = None) -> Reply | None:
    """Send raw bytes and read to the end; None if we have left, or nothing came.

    The request should say `connection: close`.
    """
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionError:
        return None
    try:
        writer.write(request)
        if leave_after_s is not None:
            await asyncio.sleep(leave_after_s)
            writer.transport.abort()
            return None
        data = await asyncio.wait_for(reader.read(-1), ANSWER_LIMIT_S)
    except ConnectionError:
        return None
    finally:
        writer.close()
    head, found, body = data.partition(b"\r\n\r\n")
    return Reply(int(head.split(b" ")[1]), head, body) if found else None


def request(method: str, target: str, *fields: str, body: bytes = b"") -> bytes:
    """A request as it goes over the wire."""
    lines = [f"{method} {target} HTTP/1.1", "connection: close", f"content-length: {len(body)}", *fields]
    if not any(each.lower().startswith("host:") for each in fields):
        lines.insert(1, "host: localhost")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def answer(status: bytes, body: bytes, *fields: bytes) -> bytes:
    """An upstream's answer."""
    lines = [b"HTTP/1.1 " + status, b"content-length: %d" % len(body), *fields]
    if not any(each.startswith(b"content-type") for each in fields):
        lines.append(b"content-type: application/json")
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def stored(url: str) -> dict[bytes, list[bytes]]:
    """Every value in a store, by key."""
    if url.startswith("sqlite:///"):
        with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as file:
            file.execute("BEGIN")  # both tables as they are at one moment: proxies may still write
            found = {
                key.encode(): [value or b""] for key, value in file.execute("SELECT key, value FROM items")
            }
            rows = file.execute("SELECT key, lines.value FROM lines JOIN items ON items.id = lines.item")
            for key, value in rows:
                found[key.encode()].append(value)
        return found
    found = {}
    with contextlib.closing(redis.Redis.from_url(url)) as client:
        for key in client.scan_iter():
            kind = client.type(key)
            if kind == b"string":
                found[key] = [client.get(key) or b""]
            else:
                found[key] = list(client.lrange(key, 0, -1)) if kind == b"list" else []
    return found


class Isolation:
    """What tests need, without an import between test files."""

    upstream = staticmethod(upstream)
    ask = staticmethod(ask)
    request = staticmethod(request)
    answer = staticmethod(answer)
    stored = staticmethod(stored)

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextlib.asynccontextmanager
    async def proxies(self, count: int, **settings: str) -> AsyncIterator[list[Proxy]]:
        """Processes with the same settings, by names of sections and keys; they accept requests."""
        environ = {f"COMPACTION_PROXY__{name.upper()}": value for name, value in settings.items()}
        # Nothing that any part would ever log is left out.
        environ |= {
            f"COMPACTION_PROXY__OBSERVABILITY__{name}": value
            for name, value in (("LOG_LEVEL", "debug"), ("ACCESS_LOG", "all"))
        }
        made = [Proxy(self.folder, environ) for _ in range(count)]
        try:
            await asyncio.gather(*(each.start() for each in made))
            yield made
        finally:
            for each in made:
                if each.process is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(each.process.pid, signal.SIGKILL)
                    await each.process.wait()


@pytest.fixture
def isolation(tmp_path: Path) -> Isolation:
    return Isolation(tmp_path)
