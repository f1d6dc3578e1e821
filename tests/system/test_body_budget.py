"""Request bodies in flight have a common bound, which follows the memory limit of the process."""

import asyncio
import json
import os
import resource
import subprocess
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.system.black_box import (
    COMMAND,
    REQUEST_LIMIT_S,
    Provider,
    Proxy,
    Received,
    Reply,
    chat_reply,
    run_proxy,
)

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
        kind: Its content type.
        key: The client's key; empty for none.
        sent_bytes: How much of it the kernel has taken.
        status: Of the answer; 0 while there is none, or if the connection ended without one.
        headers: Of the answer.
        answer: Its body.
        ended: Set once the answer is whole, or the connection has ended.
    """

    path: str
    body: bytes
    kind: str = "application/json"
    key: str = ""
    sent_bytes: int = 0
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    answer: bytes = b""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    writer: asyncio.StreamWriter | None = None
    reading: asyncio.Task[None] | None = None

    async def open(self, proxy: Proxy) -> None:
        address = urlsplit(proxy.url)
        reader, self.writer = await asyncio.open_connection(address.hostname, address.port)
        head = f"POST {self.path} HTTP/1.1\r\nhost: {address.netloc}\r\ncontent-type: {self.kind}\r\n"
        head += f"authorization: Bearer {self.key}\r\n" if self.key else ""
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


class Gate:
    """Answers chats once it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def __call__(self, request: Received) -> Reply:
        self.opened.wait(REQUEST_LIMIT_S)
        return chat_reply(request)


async def test_no_byte_stays_counted_however_and_whenever_a_request_ends(
    tmp_path: Path, provider: Provider
) -> None:
    gate = provider.answer = Gate()
    body = large_body(3 * MB)
    with run_proxy(tmp_path, provider.url, {"server": SERVER}) as proxy:

        async def count_is(expected: int) -> None:
            what = f"{expected} bytes are counted"
            await asyncio.to_thread(proxy.wait_for, lambda: inflight_bytes(proxy) == expected, what)

        for path in (*PATHS, "/v1/compact", "/v1/responses/compact", "/v1/messages/count_tokens"):
            leaving = Upload(path, body)
            await leaving.open(proxy)
            await leaving.send(2 * MB)
            await count_is(2 * MB)
            leaving.close()
            await count_is(0)
        for path in PATHS:
            leaving = Upload(path, body)
            await leaving.open(proxy)
            await leaving.send(len(body))
            await count_is(len(body))
            leaving.close()
            await count_is(0)
        gate.opened.set()
        served = [Upload(path, body) for path in PATHS]
        too_large = Upload(PATHS[0], large_body(70 * MB))
        for upload in (*served, too_large):
            await upload.open(proxy)
            await upload.send(len(upload.body))
            async with asyncio.timeout(REQUEST_LIMIT_S):
                await upload.ended.wait()
            upload.close()
        await count_is(0)
        assert [upload.status for upload in (*served, too_large)] == [200, 200, 200, 413]


async def test_a_lone_body_may_use_up_the_whole_budget_and_no_larger_one_is_read(
    tmp_path: Path, provider: Provider
) -> None:
    most = 2 * MIB
    config = {"server": {"max_inflight_bytes": most, "max_body_bytes": most}}
    statuses = []
    with run_proxy(tmp_path, provider.url, config) as proxy:
        for content in (large_body(most), large_body(most + 1), iter([large_body(most)])):
            with proxy.client() as client:
                statuses.append(client.post(PATHS[0], content=content).status_code)
    assert statuses == [200, 413, 200]


async def test_large_bodies_of_one_client_leave_room_for_those_of_another(
    tmp_path: Path, provider: Provider
) -> None:
    config = {"server": {**SERVER, "max_inflight_bytes": 4 * MIB, "max_body_bytes": 4 * MIB}}
    greedy = [Upload(PATHS[0], large_body(MIB), key="sk-greedy") for _ in range(20)]
    other = Upload(PATHS[0], large_body(900_000), key="sk-other")
    with run_proxy(tmp_path, provider.url, config) as proxy:
        for upload in greedy:
            await upload.open(proxy)
        async with asyncio.timeout(REQUEST_LIMIT_S):
            await asyncio.gather(*(upload.send(MIB - 100) for upload in greedy))
            await other.open(proxy)
            await other.send(len(other.body))
            await other.ended.wait()
        assert other.status == 200
        assert [upload.answer for upload in greedy if upload.ended.is_set() and not is_refusal(upload)] == []
        for upload in (*greedy, other):
            upload.close()
        await asyncio.to_thread(proxy.wait_for, lambda: inflight_bytes(proxy) == 0, "nothing is held")


async def test_every_place_that_reads_large_bodies_refuses_them_while_the_budget_is_used_up(
    tmp_path: Path, provider: Provider
) -> None:
    config = {"server": {**SERVER, "max_inflight_bytes": 2 * MIB, "max_body_bytes": 2 * MIB}}
    holding = Upload(PATHS[0], large_body(2 * MIB))
    body, call = large_body(600_000), b" " * 600_000
    with run_proxy(tmp_path, provider.url, config) as proxy:
        await holding.open(proxy)
        await holding.send(2 * MIB - 100_000)
        await asyncio.to_thread(
            proxy.wait_for, lambda: inflight_bytes(proxy) == holding.sent_bytes, "the first body is held"
        )
        uploads = [
            *(Upload(path, body) for path in (*PATHS, "/v1/messages/count_tokens", "/v1/compact")),
            Upload("/v1/responses/compact", body),
            Upload("/v1/embeddings", large_body(260_000)),
            Upload("/mcp", call),
            Upload("/admin/v1/replay", body),
            Upload("/ui/playground", body, kind="application/x-www-form-urlencoded"),
        ]
        over = asyncio.Event()
        small = asyncio.create_task(ask_small(proxy, over))
        for upload in uploads:
            await upload.open(proxy)
        async with asyncio.timeout(REQUEST_LIMIT_S):
            await asyncio.gather(*(upload.send(len(upload.body)) for upload in uploads))
            await asyncio.gather(*(upload.ended.wait() for upload in uploads))
        over.set()
        assert {upload.path: (upload.status, upload.headers.get("retry-after")) for upload in uploads} == {
            upload.path: (503, "5") for upload in uploads
        }
        assert set(await small) == {200}
        holding.close()
        for upload in uploads:
            upload.close()
        await asyncio.to_thread(proxy.wait_for, lambda: inflight_bytes(proxy) == 0, "nothing is held")


def test_a_budget_below_the_largest_body_is_refused_with_both_figures(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"server": {"max_inflight_bytes": 2 * MIB}}))
    ended = subprocess.run(
        [COMMAND, "check", "--config", str(path)],
        capture_output=True,
        text=True,
        check=False,
        env={"HOME": str(tmp_path), "PATH": os.environ["PATH"]},
    )
    assert ended.returncode == 2
    told = ended.stdout + ended.stderr
    assert "server.max_inflight_bytes: " in told
    assert "server.max_body_bytes" in told
    assert "67108864" in told
