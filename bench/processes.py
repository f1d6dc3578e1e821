"""Programs under test: started on a core of their own, asked what they cost, and ended."""

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

START_S = 30.0
STOP_S = 10.0
POLL_S = 0.02

_URL = re.compile(r"http://([\w.]+):(\d+)")


@dataclass(frozen=True, slots=True)
class Program:
    """A running program that serves HTTP.

    Attributes:
        pid: Its process.
        address: Host and port that it listens on.
    """

    pid: int
    address: tuple[str, int]

    @property
    def url(self) -> str:
        return "http://{}:{}".format(*self.address)

    def cpu_s(self) -> float:
        """CPU time that it has taken so far, in seconds; 0 where the system does not say."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss_bytes(self) -> int:
        """Memory that it holds; 0 where the system does not say."""
        try:
            pages = Path(f"/proc/{self.pid}/statm").read_text().split()[1]
        except OSError:
            return 0
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


def cores() -> tuple[int, int] | None:
    """The core for the program under test and the one for everything else; None if they cannot be had."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    usable = sorted(os.sched_getaffinity(0))
    return (usable[0], usable[1]) if len(usable) > 1 else None


@contextlib.contextmanager
def pinned(core: int | None) -> Iterator[None]:
    """Keep this process, and what it starts meanwhile, on one core; None leaves it where it is."""
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _listening(running: subprocess.Popen[bytes], output: Path) -> tuple[str, int]:
    """The first address that a program prints."""
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and running.poll() is None:
        if found := _URL.search(output.read_text()):
            return found[1], int(found[2])
        time.sleep(POLL_S)
    raise RuntimeError(f"a program did not start: {output.read_text()[-2000:]}")


@contextlib.contextmanager
def started(
    command: Sequence[str], folder: Path, core: int | None, settings: Mapping[str, str]
) -> Iterator[Program]:
    """Run a program that prints the URL it listens on, for the length of the block.

    Args:
        command: What to run.
        folder: An empty folder for it to work in; its output is kept there.
        core: Where to run it; None leaves that to the system.
        settings: Environment variables beside those of this process; configuration of a proxy that happens
            to be in those is left out.

    Raises:
        RuntimeError: It ended, or printed no URL in time.
    """
    folder.mkdir()
    output = folder / "output"
    inherited = {key: held for key, held in os.environ.items() if not key.startswith("COMPACTION_PROXY")}
    with output.open("wb") as log, pinned(core):
        running = subprocess.Popen(
            command, cwd=folder, env={**inherited, **settings}, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        yield Program(running.pid, _listening(running, output))
    finally:
        running.terminate()
        try:
            running.wait(STOP_S)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()
