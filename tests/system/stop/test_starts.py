"""A signal that comes while the proxy is still starting ends it as any other does."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compaction_proxy.gateway.server import DrainTimeouts, build_server, listen, run_server
from tests.helpers.proxy_processes import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")

# Only a hang takes as long.
_START_S = 30.0
_END_S = 60.0


def _catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler of its own for a signal."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    caught = next(line for line in lines if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(_START_S):
        while not condition():  # noqa: ASYNC110 - it is about another process
            await asyncio.sleep(0.001)


async def test_a_server_told_to_end_before_it_accepts_requests_is_not_said_to_have_started() -> None:
    said: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        running.stop()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        said.append("closed")
        await send({"type": "lifespan.shutdown.complete"})

    running = build_server(app, DrainTimeouts(), lambda _: said.append("told"))
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        await run_server(running, listen("127.0.0.1", 0), lambda: said.append("started"))
    finally:
        for number, handling in before.items():
            signal.signal(number, handling)
    assert said == ["closed"]


@pytest.mark.parametrize("where", ["port", "path"])
@pytest.mark.parametrize("workers", ["1", "2"])
async def test_a_signal_during_the_start_ends_it_with_0(workers: str, where: str, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    unix = {"COMPACTION_PROXY__SERVER__UNIX_SOCKET": str(path)} if where == "path" else {}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "compaction_proxy", "serve", "--port", "0", "--workers", workers),
        *("--upstream", "http://127.0.0.1:9/v1"),
        cwd=tmp_path,
        env={"HOME": str(tmp_path), "PYTHONPATH": str(ROOT), **unix},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        await _until(lambda: _catches(process.pid, signal.SIGTERM))
        process.send_signal(signal.SIGTERM)
        _, errors = await asyncio.wait_for(process.communicate(), _END_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode, b"Traceback" in errors) == (0, False), errors.decode()
    assert not path.exists()
