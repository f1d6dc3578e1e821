"""A process that is killed in the middle of a round costs its clients that answer, and nothing else."""

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from compaction_proxy.storage.leases import LEASE_S

POINTS = range(12)
# Holding the lease, with the summary, on both sides of the commit, with the round saved, in the answer.
FEW_POINTS = (1, 3, 6, 7, 9, 11)
TIMES = 10
# A conversation has had its first round with so many messages, and needs another with so many more.
BEFORE, NOW, THEN = 61, 121, 123
DYING = Path(__file__).with_name("dying.py")
# Those whose lease a dead process holds need not wait for its end.
HASTY = {
    "COMPACTION_PROXY__COMPACTION__MAX_BLOCK_S": "2",
    "COMPACTION_PROXY__COMPACTION__BACKGROUND": "false",
}


class Dying:
    """Starts proxies that die at a point of their own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def line(self) -> str:
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), 30)
        assert line
        return line.decode().rstrip()

    async def killed(self, point: int, body: bytes, marker: str) -> str:
        """How a request ends whose proxy dies at this point."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"%d\n" % point)
        lines = [await self.line()]
        while "OPENAI_BASE_URL" not in lines[-1]:
            lines.append(await self.line())
        url = f"{lines[0].rpartition(' ')[2]}/v1/chat/completions"
        async with httpx.AsyncClient(timeout=100, trust_env=False) as client:
            try:
                answer = await client.post(url, content=body, headers={"authorization": f"Bearer {marker}"})
                came = str(answer.status_code)
            except httpx.TransportError:
                came = "cut"
        assert await self.line() == f"ended {-signal.SIGKILL}"
        return came


def environment(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(line.split("=", 1) for line in lines if "=" in line)


@contextlib.asynccontextmanager
async def dying(replica: Any, folder: Path, upstream: str) -> AsyncIterator[Dying]:
    """As `replica` runs."""
    environ = environment(replica.process.pid)
    with (folder / "dying.log").open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(DYING), "--port", "0", "--upstream", f"{upstream}/v1"),
            cwd=folder,
            env=environ,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=output,
        )
    try:
        yield Dying(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")
@pytest.mark.parametrize("kind", ["redis", pytest.param("sqlite", marks=pytest.mark.slow)])
async def test_every_conversation_goes_on_after_its_process_was_killed_at_any_point_of_a_round(
    replicated: Any, kind: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    points = [*POINTS] * TIMES if pytestconfig.getoption("--runslow") else FEW_POINTS
    markers = [f"c{number}-" for number in range(len(points))]
    async with replicated.scene() as (upstream, url, replicas, server):
        store = server.url if kind == "redis" else f"sqlite:///{tmp_path / 'state.db'}"
        sound = await replicas.start(url, store, **HASTY)

        async def asked(marker: str, messages: int) -> str:
            """How a turn went: the status, ours, and whether the last message came to the model whole."""
            said = replicated.conversation(marker, messages)
            answer = await sound.ask(replicated.body(said), authorization=f"Bearer {marker}")
            last = json.loads(upstream.forwarded(marker)[-1])["messages"][-1]
            return f"{answer.status_code} {answer.headers['x-compaction-status']} {last == said[-1]}"

        def body(marker: str) -> bytes:
            content: bytes = replicated.body(replicated.conversation(marker, NOW), stream=True)
            return content

        async def turn(messages: int) -> set[str]:
            return set(await asyncio.gather(*(asked(marker, messages) for marker in markers)))

        before = await turn(BEFORE)
        async with dying(sound, tmp_path, url) as deaths:
            cut = [
                await deaths.killed(point, body(marker), marker)
                for point, marker in zip(points, markers, strict=True)
            ]
        after = await turn(NOW)
        if pytestconfig.getoption("--runslow"):
            await asyncio.sleep(LEASE_S)
        later = await turn(THEN)
    replicated.note(f"\n{len(points)} killed; before {before}, after {after}, later {later}")
    assert before == {"200 applied True"}
    assert cut == ["cut"] * len(points)
    assert after <= {"200 applied True", "200 reused True"}
    assert later == {"200 reused True"}
    assert "Traceback" not in sound.errors.read_text()
