"""The proxy as a process of its own, as `serve` runs it."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import proxy

ROOT = Path(proxy.__file__).parent.parent
START_LIMIT_S = 60.0
_HIDDEN = {"event", "timestamp", "level", "logger"}


@dataclass
class ProxyProcess:
    """A proxy that accepts requests.

    Attributes:
        process: The process, the leader of its group.
        url: Where it listens.
        errors: The file that its stderr goes to.
    """

    process: asyncio.subprocess.Process
    url: str
    errors: Path

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def cpu_s(self) -> float:
        """Seconds of processor time that it has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def open_files(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def events(self, name: str) -> list[dict[str, Any]]:
        """Log lines of one event, without time, level and logger."""
        lines = [json.loads(line) for line in self.errors.read_text().splitlines() if line.startswith("{")]
        return [
            {k: v for k, v in line.items() if k not in _HIDDEN} for line in lines if line["event"] == name
        ]


@contextlib.asynccontextmanager
async def proxy_process(
    folder: Path, upstream_port: int, prepare: Callable[[], None] | None = None, **server: object
) -> AsyncIterator[ProxyProcess]:
    """A proxy that accepts requests, and is killed in the end.

    Args:
        folder: Its home and working directory.
        upstream_port: Of the upstream, on loopback.
        prepare: Called in the new process before anything else.
        server: Keys of the configuration's section.
    """
    environ = {f"COMPACTION_PROXY__SERVER__{key.upper()}": str(value) for key, value in server.items()}
    errors = folder / "stderr"
    with errors.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "proxy", "serve", "--port", "0"),
            *("--upstream", f"http://127.0.0.1:{upstream_port}/v1"),
            cwd=folder,
            env={"HOME": str(folder), "PYTHONPATH": str(ROOT), **environ},
            stdout=asyncio.subprocess.PIPE,
            stderr=output,
            start_new_session=True,
            preexec_fn=prepare,
        )
    try:
        assert process.stdout is not None
        lines: list[str] = []
        while not lines or "OPENAI_BASE_URL" not in lines[-1]:
            line = await asyncio.wait_for(process.stdout.readline(), START_LIMIT_S)
            assert line, errors.read_text()
            lines.append(line.decode().rstrip())
        yield ProxyProcess(process, lines[0].rpartition(" ")[2], errors)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.communicate()
