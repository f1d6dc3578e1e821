"""Several workers on one port: they share the work, one that dies is replaced, and all end together."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.proxy_processes import command

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")

# Python runs `sitecustomize` when it starts, in each worker too.
BROKEN = """
import os, pathlib
from compaction_proxy.providers.tokenizers_fast import ToktokCounter
good = ToktokCounter.warm_up
def warm_up(self):
    if pathlib.Path(os.environ["HOME"], "broken").exists():
        raise RuntimeError("no")
    good(self)
ToktokCounter.warm_up = warm_up
"""

# Only one worker reports its start; the others wait for the file `go`.
SLOW = """
import os, pathlib, time
from multiprocessing.connection import Connection
home = pathlib.Path(os.environ["HOME"])
send = Connection.send
def send_in_turn(self, report):
    if isinstance(report, list):  # the worker accepts requests
        try:
            (home / "first").touch(exist_ok=False)
        except FileExistsError:
            while not (home / "go").exists():
                time.sleep(0.02)
        else:
            send(self, report)
            (home / "told").write_text(str(os.getpid()))
            return
    send(self, report)
Connection.send = send_in_turn
"""


def sockets(pid: int) -> int:
    """How many sockets a process has open."""
    return sum(str(entry.readlink()).startswith("socket:") for entry in Path(f"/proc/{pid}/fd").iterdir())


async def ask(client: httpx.AsyncClient, stop: Any, count: int) -> list[bytes]:
    """Answers to requests made one after the other, each on a connection of its own."""
    close = {"connection": "close"}
    asked = stop.request("u", 1)
    return [
        (await client.post("/v1/chat/completions", json=asked, headers=close)).content for _ in range(count)
    ]


async def test_workers_share_one_port_and_all_get_connections(stop: Any) -> None:
    async with stop.proxy(9, "--workers", "3") as running:
        pids = running.workers()
        before = [sockets(pid) for pid in pids]
        pairs = [await asyncio.open_connection("127.0.0.1", running.port) for _ in range(200)]
        for _, writer in pairs:
            writer.write(b"GET /readyz HTTP/1.1\r\nhost: x\r\n\r\n")
        for reader, _ in pairs:
            assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200 OK")
        got = [sockets(pid) - had for pid, had in zip(pids, before, strict=True)]
        await running.end()
        for _, writer in pairs:
            writer.close()
    assert sum(got) == 200
    assert min(got) >= 30  # even would be 67
    assert [line.split()[0] for line in running.lines] == [
        "compaction-proxy",
        "upstream",
        "store",
        "strategy",
        "workers",
        "degraded",
        "dashboard",
        "client",
    ]  # fmt: skip - degraded, because nothing answers for the summary model
    assert len(running.events("serving.started")) == 1
    assert sorted(line["worker"] for line in running.events("serving.stopped") if "worker" in line) == [
        1,
        2,
        3,
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_to_all_processes_cuts_no_stream(number: signal.Signals, stop: Any) -> None:
    async with (
        stop.upstream() as upstream,
        stop.proxy(upstream.port, workers=2) as running,
        stop.client(running) as client,
    ):
        upstream.go_on.clear()
        streams = [asyncio.create_task(stop.stream(client, f"u{n}", 10)) for n in range(20)]
        await stop.until(lambda: upstream.streaming == 20)
        os.killpg(running.process.pid, number)
        await stop.until(lambda: len(running.events("serving.stopping")) == 3)
        upstream.go_on.set()
        await running.ended()
        answers = await asyncio.gather(*streams)
    assert answers == [stop.body(f"u{n}", 10) for n in range(20)]
    ends = [line for line in running.events("serving.stopped") if "worker" in line]
    assert sum(line["finished"] for line in ends) == 20
    assert [line["cut"] for line in ends] == [0, 0]
    assert "Traceback" not in running.errors.read_text()


async def test_a_second_signal_ends_all_at_once(stop: Any) -> None:
    async with (
        stop.upstream() as upstream,
        stop.proxy(upstream.port, workers=2) as running,
        stop.client(running) as client,
    ):
        streams = [asyncio.create_task(stop.stream(client, f"u{n}", 10_000)) for n in range(4)]
        await stop.until(lambda: upstream.streaming == 4)
        running.process.send_signal(signal.SIGTERM)
        await stop.until(lambda: len(running.events("serving.stopping")) == 3)
        await running.end()
        ended = await asyncio.gather(*streams, return_exceptions=True)
    assert [type(error) for error in ended] == [httpx.RemoteProtocolError] * 4


async def test_a_worker_that_is_killed_is_replaced_and_requests_go_on(stop: Any) -> None:
    async with (
        stop.upstream() as upstream,
        stop.proxy(upstream.port, workers=2) as running,
        stop.client(running) as client,
    ):
        killed, kept = running.workers()
        os.kill(killed, signal.SIGKILL)
        answers = await ask(client, stop, 20)
        await stop.until(lambda: len(running.workers()) == 2)
        assert kept in running.workers()
        assert killed not in running.workers()
        await running.end()
    assert answers == [stop.body("u", 1)] * 20
    [line] = running.events("worker.ended")
    assert (line["pid"], line["code"], line["again_in_s"]) == (killed, -signal.SIGKILL, 0.1)


async def test_a_worker_that_is_killed_while_another_starts_is_replaced(stop: Any) -> None:
    (stop.folder / "sitecustomize.py").write_text(SLOW)
    told = stop.folder / "told"

    async def kill_the_first() -> int:
        await stop.until(lambda: told.exists() and told.read_text())
        pid = int(told.read_text())
        os.kill(pid, signal.SIGKILL)
        await stop.until(lambda: "worker.ended" in (stop.folder / "stderr").read_text())
        (stop.folder / "go").touch()
        return pid

    killing = asyncio.create_task(kill_the_first())
    async with (
        stop.upstream() as upstream,
        stop.proxy(upstream.port, workers=2) as running,
        stop.client(running) as client,
    ):
        assert await ask(client, stop, 20) == [stop.body("u", 1)] * 20
        await running.end()
    [line] = running.events("worker.ended")
    assert (line["pid"], line["code"]) == (await killing, -signal.SIGKILL)


async def test_while_a_worker_cannot_be_replaced_the_others_take_all_requests(stop: Any) -> None:
    (stop.folder / "sitecustomize.py").write_text(BROKEN)
    async with (
        stop.upstream() as upstream,
        stop.proxy(upstream.port, workers=2) as running,
        stop.client(running) as client,
    ):
        (stop.folder / "broken").touch()
        os.kill(running.workers()[0], signal.SIGKILL)
        await stop.until(lambda: len(running.events("worker.ended")) >= 3)
        assert await ask(client, stop, 20) == [stop.body("u", 1)] * 20
        (stop.folder / "broken").unlink()
        await stop.until(lambda: len(running.workers()) == 2)
        assert await ask(client, stop, 20) == [stop.body("u", 1)] * 20
        await running.end()
    pauses = [line["again_in_s"] for line in running.events("worker.ended")]
    assert pauses[:3] == [0.1, 0.2, 0.4]


async def test_a_worker_told_to_end_leaves_new_requests_to_the_others(stop: Any) -> None:
    async with (
        stop.upstream() as upstream,
        stop.proxy(upstream.port, workers=2) as running,
        stop.client(running) as client,
    ):
        old = running.workers()
        upstream.go_on.clear()
        streams = [asyncio.create_task(stop.stream(client, f"u{n}", 10)) for n in range(10)]
        await stop.until(lambda: upstream.streaming == 10)
        assert stop.count_listeners(running.port) == 2
        os.kill(old[0], signal.SIGTERM)
        await stop.until(lambda: stop.count_listeners(running.port) == 1)
        assert await ask(client, stop, 10) == [stop.body("u", 1)] * 10
        assert not any(stream.done() for stream in streams)
        upstream.go_on.set()
        answers = await asyncio.gather(*streams)
        await stop.until(lambda: len(set(running.workers()) - set(old)) == 1)
        await running.end()
    assert answers == [stop.body(f"u{n}", 10) for n in range(10)]


async def test_a_summary_made_by_one_worker_is_used_by_all(stop: Any) -> None:
    talk = [{"role": ("user", "assistant")[n % 2], "content": f"Word {n}. " * 200} for n in range(31)]
    asked = stop.request("u", 1, messages=talk)
    async with (
        stop.upstream() as upstream,
        stop.proxy(upstream.port, workers=2) as running,
        stop.client(running) as client,
    ):
        made = await client.post("/v1/chat/completions", json=asked, headers={"x-compaction": "force"})
        # Below the trigger nothing is looked up; a lower one, out of reach of what is left, has it done.
        headers = {"connection": "close", "x-compaction-trigger-tokens": "50000"}
        found = [await client.post("/v1/chat/completions", json=asked, headers=headers) for _ in range(12)]
        await running.end()
    assert made.headers["x-compaction-status"] == "applied"
    assert [answer.headers["x-compaction-status"] for answer in found] == ["reused"] * 12
    assert upstream.summaries == 1


async def test_workers_end_with_their_parent(stop: Any) -> None:
    async with stop.proxy(9, workers=2) as running:
        pids = running.workers()
        running.process.kill()
        await stop.until(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in pids))


async def failed(stop: Any, *arguments: str, **environ: str) -> tuple[int, str]:
    """Exit code and stderr of a proxy that does not start."""
    line = " ".join(["serve --port 0 --workers 2", *arguments])
    code, printed, errors = await asyncio.to_thread(command, line, stop.folder, **environ)
    assert printed == ""
    return code, errors


async def test_workers_need_a_store_that_they_can_share(stop: Any) -> None:
    code, errors = await failed(stop, COMPACTION_PROXY__STORE__URL="memory://")
    expected = "server.workers: several workers need a shared store, not memory://\n"
    assert (code, errors.endswith(expected)) == (2, True)


async def test_a_port_in_use_is_noticed_although_workers_share_theirs(stop: Any) -> None:
    async with stop.proxy(9, workers=2) as running:
        # The last option counts.
        code, errors = await failed(stop, "--port", str(running.port))
    assert (code, errors) == (
        2,
        f"server.port: cannot listen on 127.0.0.1:{running.port}: Address already in use\n",
    )


async def test_workers_that_do_not_start_end_the_parent_with_1(stop: Any) -> None:
    (stop.folder / "sitecustomize.py").write_text(BROKEN)
    (stop.folder / "broken").touch()
    code, errors = await failed(stop)
    assert (code, errors.splitlines()[-1]) == (1, "a worker did not start; see the log")
