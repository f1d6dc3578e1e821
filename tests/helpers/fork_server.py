"""Starts proxies without their start-up: forks them from a process that has loaded the package already.

A start from nothing takes a second of processor time, most of it for imports and for the vocabulary. The
tests of the whole product start hundreds of proxies, which differ only in their configuration. The forked
process runs the same command line with the environment, the folder and the streams that the test gives it.
It needs a kind of socket that only Linux has.
"""

import atexit
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]
# A message to the server fits into one packet, its environment included.
PACKET_BYTES = 65_536
STATUS_BYTES = 64
# Modules that a start of `serve` loads beside those of the package.
OTHER_MODULES = ("certifi", "ctypes", "encodings.idna", "uvicorn.lifespan.on")


class ForkedProcess:
    """A process that the fork server has started, with those methods of `subprocess.Popen` that tests use.

    Attributes:
        pid: Its process id.
        stdout: What it prints.
        returncode: Its exit code, negative for a signal, or None while it runs.
    """

    def __init__(self, stdout: IO[bytes], status: socket.socket) -> None:
        self.stdout = stdout
        self.returncode: int | None = None
        self._status = status
        self.pid = int(status.recv(STATUS_BYTES))

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, at most `timeout` seconds."""
        if self.returncode is None:
            self._status.settimeout(timeout)
            try:
                self.returncode = int(self._status.recv(STATUS_BYTES))
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired("compaction-proxy", timeout or 0) from None
            self._status.close()
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self) -> tuple[bytes, None]:
        """Read what is left of its output, and wait for the end."""
        with self.stdout:
            output = self.stdout.read()
        self.wait()
        return output, None


def fork_proxy(
    arguments: Sequence[str], folder: Path, environ: Mapping[str, str], stderr: IO[bytes]
) -> ForkedProcess:
    """Run the command with these arguments in a process of its own.

    Args:
        arguments: Arguments of `compaction-proxy`.
        folder: Working directory.
        environ: All environment variables.
        stderr: The file that its stderr goes to.
    """
    message = json.dumps({"arguments": list(arguments), "folder": str(folder), "environ": dict(environ)})
    reader, writer = os.pipe()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    socket.send_fds(_start_server(), [message.encode()], [writer, stderr.fileno(), theirs.fileno()])
    os.close(writer)
    theirs.close()
    return ForkedProcess(os.fdopen(reader, "rb"), ours)


@cache
def _start_server() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.fork_server", str(theirs.fileno())],
        cwd=ROOT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
    )  # fmt: skip
    theirs.close()

    def stop() -> None:
        ours.close()
        server.wait()

    atexit.register(stop)
    return ours


def _load_package() -> Callable[..., object]:
    """Load what each process would load by itself. Returns the command."""
    import httpx
    from typer.main import get_command

    from compaction_proxy.cli.main import app
    from compaction_proxy.providers.tokenizers_fast import load_tokenizer
    from compaction_proxy.support.fail_open import suppress_and_report
    from tests.helpers.ssl_contexts import cache_ssl_contexts

    names = ("app", "cli.admin_key", "cli.serve", "cli.workers", "admin.app", "gateway.routes", "replay.jobs")
    for name in (*(f"compaction_proxy.{each}" for each in names), *OTHER_MODULES):
        import_module(name)
    with suppress_and_report(lambda _: None):  # it may be missing; then each process loads what it needs
        load_tokenizer()  # the library keeps it for the process
    with suppress(ImportError):
        import_module("uvloop")
    cache_ssl_contexts()
    httpx.create_ssl_context()
    return get_command(app)


def _serve(control: socket.socket) -> list[str]:
    """Fork a process for each message. Returns in the forked process only, with its arguments."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the watchers
    while True:
        content, fds, _, _ = socket.recv_fds(control, PACKET_BYTES, 3)
        if not content:
            os._exit(0)
        if os.fork() == 0:
            control.close()
            return _run_watcher(json.loads(content), fds)
        for each in fds:
            os.close(each)


def _run_watcher(message: dict[str, object], fds: Sequence[int]) -> list[str]:
    """Fork the process itself, report its id and its exit code. Returns in that process only."""
    stdout, stderr, status_fd = fds
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    status = socket.socket(fileno=status_fd)
    pid = os.fork()
    if pid:
        os.close(stdout)
        os.close(stderr)
        status.send(str(pid).encode())
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        status.send(str(code).encode())
        os._exit(0)
    status.close()
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.close(stdout)
    os.close(stderr)
    os.chdir(str(message["folder"]))
    os.environ.clear()
    environ, arguments = message["environ"], message["arguments"]
    assert isinstance(environ, dict)
    assert isinstance(arguments, list)
    os.environ.update(environ)
    return arguments


def main() -> None:
    """Load the package, then fork for each message; in the forked process, run the command."""
    command = _load_package()
    sys.argv = ["compaction-proxy", *_serve(socket.socket(fileno=int(sys.argv[1])))]
    from compaction_proxy.gateway import request_state

    request_state._PROCESS = secrets.token_hex(5)  # no two processes have the same
    command(prog_name="compaction-proxy")


if __name__ == "__main__":
    main()
