"""Request bodies in flight have a common bound, which follows the memory limit of the process."""

import asyncio
import json
import resource
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.system.black_box import REQUEST_LIMIT_S, Provider, Proxy, run_proxy

MB = 1_000_000
MIB = 1_048_576
BODY_BYTES = 60 * MB
HELD_BACK_BYTES = MB
UPLOADS = 60
SLICE_BYTES = 262_144
PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
# A held upload is not to be ended for its slowness, however busy the machine is.
SERVER = {"body_timeout_s": 600}
SMALL_CHAT = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()


def large_body(size_bytes: int) -> bytes:
    """A body that any of the wires takes: one long text."""
    head = b'{"model":"m","max_tokens":9,"input":"hi","messages":[{"role":"user","content":"'
    tail = b'"}]}'
    words = b"the quick brown fox jumps over the lazy dog "
    room = size_bytes - len(head) - len(tail)
    return head + (words * (room // len(words) + 1))[:room] + tail


@dataclass
class Upload:
    """One request that sends its body in slices and reads its answer at any time.

    Attributes:
        path: Where it goes.
        body: The whole body.
        sent_bytes: How much of it the kernel has taken.
        status: Of the answer; 0 while there is none, or if the connection ended without one.
        headers: Of the answer.
        answer: Its body.
        ended: Set once the answer is whole, or the connection has ended.
    """

    path: str
    body: bytes
    sent_bytes: int = 0
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    answer: bytes = b""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    writer: asyncio.StreamWriter | None = None
    reading: asyncio.Task[None] | None = None

    async def open(self, proxy: Proxy) -> None:
        reader, self.writer = await asyncio.open_connection("127.0.0.1", urlsplit(proxy.url).port)
        head = f"POST {self.path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        self.writer.write(f"{head}content-length: {len(self.body)}\r\n\r\n".encode())
        self.reading = asyncio.create_task(self._read(reader))

    async def send(self, stop: int) -> None:
        """Send up to byte `stop`, or until there is an answer."""
        assert self.writer is not None
        view = memoryview(self.body)
        try:
            while self.sent_bytes < stop and not self.ended.is_set():
                piece = view[self.sent_bytes : min(self.sent_bytes + SLICE_BYTES, stop)]
                self.writer.write(piece)
                await self._drain()
                self.sent_bytes += len(piece)
        except ConnectionError:
            await self.ended.wait()

    async def _drain(self) -> None:
        assert self.writer is not None
        drained = asyncio.ensure_future(self.writer.drain())
        ended = asyncio.ensure_future(self.ended.wait())
        await asyncio.wait({drained, ended}, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if not drained.done():
            drained.cancel()
            return
        drained.result()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            lines = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
            status = int(lines[0].split()[1])
            pairs = (line.partition(":") for line in lines[1:] if line)
            self.headers = {name.lower(): value.strip() for name, _, value in pairs}
            self.answer = await reader.readexactly(int(self.headers.get("content-length", 0)))
            self.status = status
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        self.ended.set()

    def close(self) -> None:
        if self.writer is not None:
            self.writer.transport.abort()


def inflight_bytes(proxy: Proxy, name: str = "inflight_body_bytes") -> float | None:
    """The gauge of /metrics; None if there is none."""
    with proxy.client() as client:
        for line in client.get("/metrics").text.splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[1])
    return None


def limit_address_space(size_bytes: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_AS, (size_bytes, size_bytes))


def idle_size_bytes(folder: Path, provider: Provider, config: dict[str, Any]) -> int:
    """The address space of an idle proxy without a limit."""
    folder.mkdir()
    with run_proxy(folder, provider.url, config) as proxy:
        return proxy.memory_bytes("VmSize")


async def ask_small(proxy: Proxy, until: asyncio.Event) -> list[int]:
    """Status codes of small requests, one after the other, each on a connection of its own."""
    statuses = []
    while not until.is_set():
        one = Upload(PATHS[0], SMALL_CHAT)
        try:
            await one.open(proxy)
            await one.send(len(one.body))
            async with asyncio.timeout(REQUEST_LIMIT_S):
                await one.ended.wait()
        except OSError:
            pass
        statuses.append(one.status)
        one.close()
        if one.status == 0:
            break
        await asyncio.sleep(0.1)
    return statuses


def is_refusal(upload: Upload) -> bool:
    """Whether the answer is 503 with `retry-after`, in the shape of errors of its wire."""
    told = json.loads(upload.answer)
    kind, code = told["error"]["type"], told["error"].get("code")
    anthropic = upload.path.endswith("/messages")
    shaped = told.get("type") == "error" if anthropic else code == "overloaded"
    retry_s = int(upload.headers.get("retry-after", 0))
    return upload.status == 503 and retry_s > 0 and kind == "overloaded_error" and shaped


async def test_many_uploads_under_a_memory_limit_are_served_or_refused_and_small_requests_go_on(
    tmp_path: Path, provider: Provider
) -> None:
    config = {"server": SERVER}
    limit_bytes = idle_size_bytes(tmp_path / "idle", provider, config) + 512 * MB
    body = large_body(BODY_BYTES)
    (tmp_path / "limited").mkdir()
    with run_proxy(
        tmp_path / "limited", provider.url, config, prepare=limit_address_space(limit_bytes)
    ) as proxy:
        uploads = [Upload(PATHS[number % len(PATHS)], body) for number in range(UPLOADS)]
        over = asyncio.Event()
        small = asyncio.create_task(ask_small(proxy, over))
        for upload in uploads:
            await upload.open(proxy)
        async with asyncio.timeout(REQUEST_LIMIT_S):
            await asyncio.gather(*(upload.send(BODY_BYTES - HELD_BACK_BYTES) for upload in uploads))
            held = [upload for upload in uploads if not upload.ended.is_set()]
            await asyncio.gather(*(upload.send(BODY_BYTES) for upload in held))
            await asyncio.gather(*(upload.ended.wait() for upload in held))
        over.set()
        small_statuses = Counter(await small)
        for upload in uploads:
            upload.close()
        log = proxy.log_path.read_text()
        statuses = Counter(upload.status for upload in uploads)
        assert proxy.process.poll() is None, f"the proxy has ended:\n{log[-2000:]}"
        assert "Traceback" not in log
        assert set(small_statuses) == {200}
        assert set(statuses) == {200, 503}
        assert statuses[200] == len(held)
        refused = [upload for upload in uploads if upload.status == 503]
        assert {upload.path for upload in refused} == set(PATHS)
        assert [upload.answer for upload in refused if not is_refusal(upload)] == []
        proxy.wait_for(lambda: inflight_bytes(proxy) == 0, "the last body is let go of")
