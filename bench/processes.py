"""Programs under test: started on a core of their own, asked what they cost, and ended."""

import contextlib
import os
import re
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

START_S = 120.0
STOP_S = 10.0
POLL_S = 0.02
# A program is at rest when it has taken less than this share of a core for `POLL_S`.
REST_SHARE = 0.1
NS = 1e9

_URL = re.compile(r"http://([\w.]+):(\d+)")


@dataclass(frozen=True, slots=True)
class Program:
    """A running program that serves HTTP.

    Attributes:
        pid: Its process; what that has started belongs to it.
        address: Host and port that it listens on.
    """

    pid: int
    address: tuple[str, int]

    @property
    def url(self) -> str:
        return "http://{}:{}".format(*self.address)

    def cpu_s(self) -> float:
        """CPU time that its threads have taken so far, in seconds; 0 where the system does not say."""
        return sum(_thread_cpu_s(task) for pid in _family(self.pid) for task in _tasks(pid))

    def rss_bytes(self) -> int:
        """Memory that it holds; 0 where the system does not say."""
        return _page_bytes() * sum(map(_resident_pages, _family(self.pid)))

    def has_loaded(self, name: str) -> bool:
        """Whether a file with this in its path is mapped into it, such as a native library."""
        return any(name in _read(f"/proc/{pid}/maps") for pid in _family(self.pid))

    def has_ended(self) -> bool:
        """Whether it is gone."""
        said = _read(f"/proc/{self.pid}/stat").rpartition(") ")[2]
        return not said or said[0] == "Z"

    def pause(self) -> None:
        """Stop it where it is, so that it takes nothing of its core."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for pid in _family(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def settle(self, patience_s: float) -> None:
        """Wait, at most so long, until it does nothing: what one load left behind is not the next's."""
        deadline_s = time.monotonic() + patience_s
        while time.monotonic() < deadline_s:
            before_s = self.cpu_s()
            time.sleep(POLL_S)
            if self.cpu_s() - before_s < POLL_S * REST_SHARE:
                return


def _page_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE")


def _read(path: str) -> str:
    """What a file of /proc says; empty if its process is gone, or there is no /proc."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _resident_pages(pid: int) -> int:
    return int((_read(f"/proc/{pid}/statm").split() or ["0", "0"])[1])


def _tasks(pid: int) -> list[str]:
    """The threads of a process, as paths."""
    try:
        return [entry.path for entry in os.scandir(f"/proc/{pid}/task")]
    except OSError:
        return []


def _family(pid: int) -> list[int]:
    """A process that is there, and all that it has started."""
    if not _read(f"/proc/{pid}/statm"):
        return []
    children = (int(child) for task in _tasks(pid) for child in _read(f"{task}/children").split())
    return [pid, *(member for child in children for member in _family(child))]


def _thread_cpu_s(task: str) -> float:
    if found := _read(f"{task}/schedstat").split():
        return int(found[0]) / NS
    if fields := _read(f"{task}/stat").rpartition(")")[2].split():
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def cores() -> tuple[int, int] | None:
    """The core for the program under test and the one for everything else; None if they cannot be had."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    usable = sorted(os.sched_getaffinity(0))
    return (usable[0], usable[1]) if len(usable) > 1 else None


def allow_sockets() -> None:
    """Raise this process's limit of open files as far as it may; what it starts inherits that."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return int(bound.getsockname()[1])


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


def _listening(output: Path, port: int | None) -> tuple[str, int] | None:
    """Where a program listens: on the port it was given, or the first address that it prints."""
    if port is None:
        found = _URL.search(output.read_text(errors="replace"))
        return (found[1], int(found[2])) if found else None
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return "127.0.0.1", port
    return None


def _awaited(running: subprocess.Popen[bytes], output: Path, port: int | None) -> tuple[str, int]:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and running.poll() is None:
        if found := _listening(output, port):
            return found
        time.sleep(POLL_S)
    said = output.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
    raise RuntimeError(f"did not start: {said[-1][:300]}")


@contextlib.contextmanager
def started(
    command: Sequence[str],
    folder: Path,
    core: int | None,
    settings: Mapping[str, str],
    *,
    port: int | None = None,
) -> Iterator[Program]:
    """Run a program that serves HTTP, for the length of the block.

    Args:
        command: What to run.
        folder: A folder for it to work in; its output is kept there.
        core: Where to run it; None leaves that to the system.
        settings: Environment variables beside those of this process; configuration of a proxy that happens
            to be in those is left out.
        port: What it was told to listen on; without one it prints its URL.

    Raises:
        RuntimeError: It ended, or did not listen in time; with the last line that it said.
    """
    folder.mkdir(exist_ok=True)
    output = folder / "output"
    inherited = {key: held for key, held in os.environ.items() if not key.startswith("COMPACTION_PROXY")}
    with output.open("wb") as log, pinned(core):
        running = subprocess.Popen(
            command, cwd=folder, env={**inherited, **settings}, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        yield Program(running.pid, _awaited(running, output, port))
    finally:
        Program(running.pid, ("", 0)).resume()
        running.terminate()
        try:
            running.wait(STOP_S)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()
