"""The proxy as a process of its own, as people run it."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import compaction_proxy

ROOT = Path(compaction_proxy.__file__).parents[2]
START_LIMIT_S = 100.0
# Only a hang takes as long. A drain takes twice that, so what waits for it is found too.
END_LIMIT_S = 100.0
_HIDDEN = {"event", "timestamp", "level", "logger"}


@dataclass
class ProxyProcess:
    """A proxy that accepts requests.

    Attributes:
        process: The process, the leader of its group; the parent where there are workers.
        lines: What it has printed.
        errors: The file that its stderr goes to.
    """

    process: asyncio.subprocess.Process
    lines: list[str]
    errors: Path

    @property
    def url(self) -> str:
        """Where it listens."""
        return self.lines[0].rpartition(" ")[2]

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

    def workers(self) -> list[int]:
        """Process ids of the workers: children that are not multiprocessing's own."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in children if b"spawn_main" in _read_command_line(pid)]

    async def end(self, number: int = signal.SIGTERM) -> None:
        """Send a signal; the process must end with code 0, long before its drain does."""
        self.process.send_signal(number)
        await self.ended()

    async def ended(self) -> None:
        """Wait for the end."""
        code = await asyncio.wait_for(self.process.wait(), END_LIMIT_S)
        assert code == 0, self.errors.read_text()


def _read_command_line(pid: str) -> bytes:
    """The command line of a process; empty if it has ended meanwhile."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def _environment(folder: Path, more: Mapping[str, str]) -> dict[str, str]:
    """What is given, and no more; Python runs a `sitecustomize` that a test has put into the folder."""
    return {"HOME": str(folder), "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", **more}


def command(line: str, folder: Path, **environ: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command of ours that ends by itself, such as `health`."""
    done = subprocess.run(
        [sys.executable, "-m", "compaction_proxy", *line.split()],
        cwd=folder, env=_environment(folder, environ),
        capture_output=True, text=True, timeout=START_LIMIT_S, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@contextlib.asynccontextmanager
async def proxy_process(
    folder: Path,
    upstream_port: int,
    *arguments: str,
    prepare: Callable[[], None] | None = None,
    environ: Mapping[str, str] | None = None,
    **server: object,
) -> AsyncIterator[ProxyProcess]:
    """A proxy that accepts requests, and is killed in the end.

    Args:
        folder: Its home and working directory.
        upstream_port: Of the upstream, on loopback.
        arguments: Of `serve`.
        prepare: Called in the new process before anything else.
        environ: Environment variables.
        server: Keys of the configuration's section.
    """
    settings = {f"COMPACTION_PROXY__SERVER__{key.upper()}": str(value) for key, value in server.items()}
    upstream = ("--upstream", f"http://127.0.0.1:{upstream_port}/v1")
    errors = folder / "stderr"
    with errors.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "compaction_proxy", "serve", "--port", "0", *upstream, *arguments),
            cwd=folder,
            env=_environment(folder, {**settings, **(environ or {})}),
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
        yield ProxyProcess(process, lines, errors)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.communicate()
