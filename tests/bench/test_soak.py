"""The soak runs from end to end without a violation, and would see one."""

import asyncio
import importlib
import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parent.parent.parent / "bench"
MB = 1024 * 1024
CHAT = "POST /v1/chat/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n"
pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")


def soaked(seconds: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH / "soak.py"), f"--seconds={seconds}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds + 200, check=False)


def times(report: str, what: str) -> int:
    """How often something happened."""
    (line,) = (line for line in report.splitlines() if line.startswith(f"| {what} |"))
    return int(line.split("|")[2].replace(",", ""))


@pytest.mark.timeout(300)
def test_a_short_soak_ends_without_a_violation() -> None:
    ended = soaked(seconds=3)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout
    assert "\n0 violations\n" in ended.stdout
    for what in ("whole", "left by the client", "summary calls", "requests upstream, compacted"):
        assert times(ended.stdout, what) > 0


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("soak")


def outcome(soak: Any, *, grown: float = 0.0, files: int = 0, tasks: int = 0, wrong: Any = ()) -> Any:
    """Of a run of 100 s that began with 100 MiB, one descriptor and 7 tasks."""
    samples = [soak.Held(float(at), int((100 + grown * at / 100) * MB), ("log",), 50) for at in range(101)]
    idle = soak.Held(0.0, 90 * MB, ("log",), 7)
    after = soak.Held(101.0, 90 * MB, ("log", *["socket"] * files), 7 + tasks)
    return soak.Outcome(Counter(), idle, samples, after, 100.0, wrong)


def test_what_is_left_behind_and_what_grows_is_a_violation(soak: Any) -> None:
    assert outcome(soak).violations() == []
    assert outcome(soak, grown=10.0).violations() == []
    assert outcome(soak, grown=13.0).violations() == ["memory grew by 11.8 MiB"]
    assert outcome(soak, files=2, tasks=1, wrong=["an answer"]).violations() == [
        "an answer",
        "2 descriptors more than before the load",
        "1 tasks more than before the load",
        "open after the load: log",
        "open after the load: socket",
        "open after the load: socket",
    ]


async def asked_of(soak: Any, answer: bytes) -> tuple[list[str], Counter[str]]:
    """What clients say of a proxy that answers everything so."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        addresses = soak.Addresses([server.sockets[0].getsockname()])
        clients = soak.Clients(soak.Upstream(random.Random(0)), addresses, random.Random(0))
        await clients.run(2, 0.1)
    return clients.wrong, clients.counted


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 12\r\n\r\ndata: {}\n\n\r\n", "12 bytes, other than the"),
        (b"HTTP/1.1 500 Oops\r\ncontent-length: 2\r\n\r\n{}", "status 500"),
        (b"HTTP/1.1 503 Busy\r\ncontent-length: 2\r\n\r\n{}", "status 503"),
        (b"", "status 0"),
    ],
)
async def test_an_answer_that_is_not_the_upstream_s_is_a_violation(
    soak: Any, answer: bytes, said: str
) -> None:
    wrong, counted = await asked_of(soak, answer)
    assert len(wrong) == counted["asked"] - counted["left by the client"] > 0
    assert all(said in each for each in wrong)


async def test_a_client_that_is_told_to_come_back_is_no_violation(soak: Any) -> None:
    busy = b"HTTP/1.1 503 Busy\r\nretry-after: 1\r\ncontent-length: 2\r\n\r\n{}"
    wrong, counted = await asked_of(soak, busy)
    assert wrong == []
    assert counted["turned away with retry-after"] > 0


async def told_upstream(soak: Any, messages: list[dict[str, str]], size: int) -> list[str]:
    """What the upstream finds wrong with a request of these messages that came to the proxy in this size."""
    upstream_module = importlib.import_module("soak_upstream")
    upstream = soak.Upstream(random.Random(0))
    upstream.asked["s1"] = upstream_module.Asked("s1", "canary_1_", "never drop it", size, 0, 0.0)
    body = json.dumps({"model": upstream_module.MODEL, "user": "s1", "messages": messages}).encode()
    async with upstream.listening():
        reader, writer = await asyncio.open_connection("127.0.0.1", upstream.port)
        writer.write((CHAT % len(body)).encode() + body)
        assert (await reader.readuntil(b"\r\n")) == b"HTTP/1.1 200 OK\r\n"
        writer.close()
    wrong: list[str] = upstream.wrong
    return wrong


async def test_a_request_that_lost_or_gained_something_is_a_violation(soak: Any) -> None:
    own = {"role": "system", "content": "canary_1_"}
    ruled = {"role": "user", "content": "Please never drop it."}
    foreign = {"role": "user", "content": "canary_2_ " + "and so on " * 4_000}
    assert await told_upstream(soak, [own, ruled], 1_000) == []
    wrong = await told_upstream(soak, [foreign], 1_000)
    assert [each.removeprefix("s1 upstream: ").lstrip("0123456789") for each in wrong] == [
        " tokens for a window of 8000",
        "words of 1 other conversations",
        "without the rule",
        " bytes of 1000",
        "not its own system message",
    ]


async def test_a_replica_whose_start_is_cancelled_is_gone_and_writes_to_no_other_one_s_log(
    soak: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("soak_replicas")
    begun: asyncio.Future[asyncio.subprocess.Process] = asyncio.get_running_loop().create_future()

    async def wait_forever(process: asyncio.subprocess.Process) -> None:
        begun.set_result(process)
        await asyncio.Event().wait()

    monkeypatch.setattr(module, "_listening", wait_forever)
    redis = SimpleNamespace(url="redis://127.0.0.1:1", port=1)
    replicas = soak.Replicas(tmp_path, 1, redis, soak.Addresses([]), random.Random(0))
    start = asyncio.create_task(replicas.start())
    process = await begun
    assert process.returncode is None
    start.cancel()
    await asyncio.wait([start])
    assert process.returncode is not None
    assert (replicas.started, replicas.addresses.live) == ([], [])
