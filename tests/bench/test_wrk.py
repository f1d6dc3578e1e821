"""wrk sends what the bench's own generator sends."""

import asyncio
import importlib
import shutil
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parent.parent.parent / "bench"
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
REQUESTS = 45  # the large conversation is taken up anew after 20 turns


class Wire(asyncio.Protocol):
    """Keeps all requests of one connection, and answers each."""

    requests: list[bytes]

    def __init__(self, requests: list[bytes]) -> None:
        self.requests = requests
        self.read = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.read += data
        head, found, body = self.read.partition(b"\r\n\r\n")
        if found and len(body) == int(head.rpartition(b": ")[2]):
            self.requests.append(self.read)
            self.read = b""
            assert isinstance(self.transport, asyncio.Transport)
            self.transport.write(ANSWER)


@pytest.mark.skipif(shutil.which("wrk") is None, reason="wrk is not installed")
@pytest.mark.parametrize("name", ["small", "streamed", "large"])
async def test_wrk_sends_the_same_requests_as_our_own_generator(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    conversations, processes, wrk = map(importlib.import_module, ("conversations", "processes", "wrk"))
    conversation = getattr(conversations, name)("a session", ["x-more: 1"])
    wrk.written(tmp_path / "requests", [conversation])
    seen: list[bytes] = []
    server = await asyncio.get_running_loop().create_server(lambda: Wire(seen), "127.0.0.1", 0)
    program = processes.Program(0, server.sockets[0].getsockname())
    async with server:
        found = await asyncio.to_thread(wrk.run, program, tmp_path / "requests", 1, number=0, seconds=1)
    ours = conversation.requests()
    # wrk asks for a request once before it begins, to see what the script makes.
    next(ours)
    assert found.answers >= REQUESTS
    assert seen[:REQUESTS] == [b"".join(next(ours)) for _ in range(REQUESTS)]
