"""Runs the installed command as a process and observes it from outside: HTTP, files and /proc only.

Nothing here imports the package under test. So the same tests run against another version:
`COMPACTION_PROXY=/other/venv/bin/compaction-proxy pytest tests/system`. Without that variable most proxies
are forked from a process that has loaded the package, which saves a second of processor time each.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import httpx

from tests.helpers.fork_server import ForkedProcess, fork_proxy

INSTALLED = str(Path(sys.executable).parent / "compaction-proxy")
COMMAND = os.environ.get("COMPACTION_PROXY", INSTALLED)
CAN_FORK = COMMAND == INSTALLED and sys.platform == "linux"
# Generous outer bounds: they only catch a hang.
# The module that watches the loop of a process, and its file in the folder of the proxy.
WATCHER, LOOP_BEATS = Path(__file__).parents[1] / "helpers/loop_beats", "loop_beats.txt"
START_LIMIT_S = 60.0
REQUEST_LIMIT_S = 100.0


@dataclass(frozen=True)
class Received:
    """A request that reached the provider."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Reply:
    """What the provider answers. `cut` closes the connection before the declared length is sent.

    With the status 0 it closes the connection without an answer. `chunks`, where there are any, are sent one
    by one in place of `body`.
    """

    status: int = 200
    body: bytes = b"{}"
    headers: Mapping[str, str] = field(default_factory=lambda: {"content-type": "application/json"})
    cut: bool = False
    chunks: Iterable[bytes] = ()


Answer = Callable[[Received], Reply]


def chat_reply(request: Received, text: str = "ok") -> Reply:
    """A complete chat answer; the usage counts four bytes as a token."""
    usage = {"prompt_tokens": len(request.body) // 4, "completion_tokens": 1}
    usage["total_tokens"] = sum(usage.values())
    body = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": usage,
    }
    return Reply(body=json.dumps(body).encode())


class Provider:
    """A scripted provider on a socket of its own.

    Args:
        answer: Makes the answer to a request.
        port: Where to listen; 0 takes a free port.

    Attributes:
        url: Base URL, ending in /v1.
        answer: Makes the answer to a request. Tests may replace it at any time.
        received: All requests of clients and for summaries so far, oldest first.
        asked: The requests with which the proxy itself asked for models and windows, oldest first.
    """

    def __init__(self, answer: Answer = chat_reply, port: int = 0) -> None:
        self.answer = answer
        self.received: list[Received] = []
        self.asked: list[Received] = []
        provider = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # Head and body are two writes. Otherwise the body waits 40 ms for an acknowledgement of the head.
            disable_nagle_algorithm = True

            def _serve(self) -> None:
                length = int(self.headers.get("content-length", 0))
                body = self.rfile.read(length)
                headers = {name.lower(): value for name, value in self.headers.items()}
                request = Received(self.command, self.path, headers, body)
                is_own = self.command == "GET" and headers.get("user-agent", "").startswith(
                    "compaction-proxy/"
                )
                (provider.asked if is_own else provider.received).append(request)
                reply = provider.answer(request)
                if not reply.status:
                    self.close_connection = True
                    return
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                if reply.chunks:
                    self._send_chunks(reply.chunks)
                    return
                self.send_header("content-length", str(len(reply.body) + (10 if reply.cut else 0)))
                self.end_headers()
                self.wfile.write(reply.body)
                self.close_connection = self.close_connection or reply.cut

            def _send_chunks(self, chunks: Iterable[bytes]) -> None:
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                for chunk in chunks:
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
                self.wfile.write(b"0\r\n\r\n")

            do_GET = do_POST = _serve  # noqa: N815 - the names that http.server calls

            def log_message(self, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 256  # connections that may wait to be accepted

        self._server = Server(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        # `close` waits for the end of an interval.
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def run_command(
    folder: Path, *arguments: str | Path, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a command of the product to its end, in the home folder of its user."""
    variables = {"HOME": str(folder), "PATH": os.environ["PATH"], **(environ or {})}
    command = [COMMAND, *map(str, arguments)]
    if not CAN_FORK:
        return subprocess.run(
            command, cwd=folder, env=variables, capture_output=True, text=True, stdin=subprocess.DEVNULL,
            timeout=REQUEST_LIMIT_S, check=False,
        )  # fmt: skip
    with TemporaryFile() as log:
        process = fork_proxy(command[1:], folder, variables, log)
        output, _ = process.communicate()
        log.seek(0)
        return subprocess.CompletedProcess(command, process.wait(), output.decode(), log.read().decode())


@contextmanager
def run_server(command: Sequence[str | Path], url: str) -> Iterator[None]:
    """Run another server until the end of the block; it has started once `url` answers with 200."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 5 * START_LIMIT_S  # the first start may install something
        while not _is_ready(url):
            assert process.poll() is None, f"{command[0]} has ended"
            assert time.monotonic() < deadline, f"{command[0]} did not start"
            time.sleep(0.1)
        yield
    finally:
        process.kill()
        process.wait()


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(url, timeout=REQUEST_LIMIT_S).status_code == 200
    except httpx.TransportError:
        return False


@dataclass
class Proxy:
    """A running proxy that accepts requests.

    Attributes:
        url: Where it listens, without /v1.
        process: The process.
        folder: Its home and working directory.
        log_path: The file that its stderr goes to.
        banner: The lines that it has printed at its start.
    """

    url: str
    process: subprocess.Popen[bytes] | ForkedProcess
    folder: Path
    log_path: Path
    banner: Sequence[str] = ()

    def client(self, **options: Any) -> httpx.Client:
        """An HTTP client whose base URL is the proxy."""
        return httpx.Client(base_url=self.url, timeout=options.pop("timeout", REQUEST_LIMIT_S), **options)

    def run_command(self, admin_key: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs a command of the product that asks this proxy, with an admin key."""
        environ = {"COMPACTION_PROXY__SERVER__ADMIN_KEY": admin_key}
        return run_command(self.folder, *arguments, "--url", self.url, environ=environ)

    @property
    def cpu_s(self) -> float:
        """Processor seconds that the process has used, all threads."""
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    @contextmanager
    def watch_loop(self) -> Iterator[list[float]]:
        """List how long steps held the event loop. The proxy must run with `watched_loop`.

        An entry is the processor time of the loop's thread between two beats of a timer, in seconds. There
        are only entries of more than 1 ms. The list is filled at the end of the block, once the proxy rests.
        """
        path = self.folder / LOOP_BEATS
        seen = len(path.read_text().split())
        held: list[float] = []
        yield held
        self.wait_for_quiet()  # the beat after the last step has fired
        held.extend(map(float, path.read_text().split()[seen:]))

    def wait_for_quiet(self) -> None:
        """Wait until the process uses less than a twentieth of a processor."""
        watched_s = 0.05

        def is_quiet() -> bool:
            before = self.cpu_s
            time.sleep(watched_s)
            # On a busy machine, a process that wants to run may get no time for so long.
            return self.cpu_s - before < watched_s / 20 and not self._wants_to_run()

        self.wait_for(is_quiet, "the process rests")

    def _wants_to_run(self) -> bool:
        """Whether a thread of the process runs, or waits for a processor or a disk."""
        stats = Path(f"/proc/{self.process.pid}/task").glob("*/stat")
        return any(path.read_text().rpartition(")")[2].split()[0] in {"R", "D"} for path in stats)

    def memory_bytes(self, name: str) -> int:
        """A figure of /proc/PID/status, such as VmRSS, VmHWM or VmSize, in bytes."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
        raise AssertionError(f"no {name}")

    def log_lines(self, event: str | None = None) -> list[dict[str, Any]]:
        """The JSON lines of the log; only those of one event where it is named."""
        text = self.log_path.read_text(errors="replace")
        lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        return [line for line in lines if event is None or line.get("event") == event]

    def wait_for(self, condition: Callable[[], Any], what: str) -> Any:
        """Poll until `condition` gives something true, and return it; the outer bound only catches a hang."""
        deadline = time.monotonic() + START_LIMIT_S
        while not (found := condition()):
            assert time.monotonic() < deadline, f"{what}: did not happen"
            assert self.process.poll() is None, f"the proxy has ended:\n{self.log_path.read_text()}"
            time.sleep(0.02)
        return found


@contextmanager
def run_proxy(
    folder: Path,
    upstream: str,
    config: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    prepare: Callable[[], None] | None = None,
    command: str = COMMAND,
    watched_loop: bool = False,
) -> Iterator[Proxy]:
    """Start `serve` before an upstream and kill it at the end.

    Args:
        folder: Home and working directory of the process.
        upstream: Base URL of the provider.
        config: Sections of the configuration file. Logs are JSON, the store is in memory, and on loopback the
            admin API needs no key, unless told.
        environ: More environment variables.
        prepare: Called in the new process before the command, for resource limits.
        command: The installed command; two versions can run at the same time.
        watched_loop: Whether `Proxy.watch_loop` will be used.
    """
    sections: dict[str, Any] = {
        "store": {"url": "memory://"},
        "observability": {"log_format": "json"},
        **(config or {}),
    }
    server = sections.get("server", {})
    if command == INSTALLED and not {"host", "unix_socket"} & server.keys():  # others do not know the word
        sections["server"] = {"admin_key": "none", **server}
    path = folder / "config.json"  # JSON is YAML
    path.write_text(json.dumps(sections))
    log_path = folder / "stderr.log"
    arguments = ["serve", "--config", str(path), "--port", "0", "--upstream", upstream]
    variables = {"HOME": str(folder), "PATH": os.environ["PATH"], **(environ or {})}
    if watched_loop:
        variables |= {"PYTHONPATH": str(WATCHER), "LOOP_BEATS_FILE": str(folder / LOOP_BEATS)}
    with log_path.open("wb") as log:
        process: subprocess.Popen[bytes] | ForkedProcess
        if CAN_FORK and command == INSTALLED and prepare is None and not watched_loop:
            process = fork_proxy(arguments, folder, variables, log)
        else:
            process = subprocess.Popen(
                [command, *arguments],
                cwd=folder,
                env=variables,
                stdout=subprocess.PIPE,
                stderr=log,
                preexec_fn=prepare,  # noqa: PLW1509 - limits of the child; no thread runs in it
            )
    timer = threading.Timer(START_LIMIT_S, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        url, banner = "", []
        for line in process.stdout:  # ends when the process does
            text = line.decode()
            banner.append(text.rstrip())
            if "listens on" in text:
                url = text.split()[-1]
            if "OPENAI_BASE_URL" in text:
                break
        timer.cancel()
        assert url, log_path.read_text()
        yield Proxy(url, process, folder, log_path, banner)
    finally:
        timer.cancel()
        process.send_signal(signal.SIGKILL)
        process.communicate()
